"""A hundred thousand tokens, trained on a CPU: recall over 90,000 tokens with Local(256) | Global(first=4).

The first four tokens hold a label; every token must name it. A window alone cannot: the answer is far away.

    python benchmarks/long.py              into results/long.json (some minutes on two cores)
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from common import Progress, peak_bytes, save
from regard import layer

N, WIDTH, HEADS, LABELS, STEPS, SEED = 100_000, 64, 4, 8, 12, 0


class Model(nn.Module):
    def __init__(self, spec: str) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.head = layer(spec, width=WIDTH, heads=HEADS, causal=True), nn.Linear(WIDTH, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.mixer(x)))


def batch(label: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, N, WIDTH)
    x[:, :4] = 0
    x[:, :4, label] = 8.0
    return x, torch.full((1, N), label)


def trained(spec: str) -> dict:
    torch.manual_seed(SEED)
    model, progress, labels = Model(spec), Progress(STEPS), torch.randperm(LABELS).repeat(STEPS)
    optimiser, losses, peak, start = torch.optim.Adam(model.parameters(), lr=2e-2), [], 0, time.perf_counter()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        far = N // 10  # tokens that no window reaches from the beginning
        loss = nn.functional.cross_entropy(model(x)[:, far:].flatten(0, 1), y[:, far:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())

    for step in range(STEPS):
        x, y = batch(int(labels[step]))
        peak = max(peak, peak_bytes(lambda x=x, y=y: train(x, y), torch.device("cpu")))
        progress.step(f"{spec}: loss {losses[-1]:.3f}")
    seconds = (time.perf_counter() - start) / STEPS
    return {"spec": spec, "losses": losses, "floor": math.log(LABELS), "step_seconds": seconds, "peak_bytes": peak}


def main() -> None:
    rows = [trained(spec) for spec in ("Local(256) | Global(first=4)", "Local(256)")]
    settings = {"n": N, "width": WIDTH, "heads": HEADS, "labels": LABELS, "steps": STEPS, "seed": SEED, "causal": True}
    print(save("long", settings, rows))


if __name__ == "__main__":
    main()
