"""A hundred thousand tokens, trained on a CPU: recall over 90,000 tokens with Local(256) | Global(first=4).

The first four tokens hold a label; every token must name it. A window alone cannot: the answer is far away.

    python benchmarks/long.py              into results/long.json (some minutes on two cores)
"""

from __future__ import annotations

import time

import torch
from common import Progress, peak_bytes, save
from torch import nn

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


def main() -> None:
    rows = []
    for spec in ("Local(256) | Global(first=4)", "Local(256)"):
        torch.manual_seed(SEED)
        model, progress, labels = Model(spec), Progress(STEPS), torch.randperm(LABELS).repeat(STEPS)
        optimiser, losses, peak, start = torch.optim.Adam(model.parameters(), lr=2e-2), [], 0, time.perf_counter()
        for step in range(STEPS):
            x, y = batch(int(labels[step]))

            def train(x=x, y=y):
                loss = nn.functional.cross_entropy(model(x)[:, N // 10 :].flatten(0, 1), y[:, N // 10 :].flatten())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())

            peak = max(peak, peak_bytes(train, torch.device("cpu")))
            progress.step(f"{spec}: loss {losses[-1]:.3f}")
        seconds = (time.perf_counter() - start) / STEPS
        rows.append({"spec": spec, "n": N, "losses": losses, "floor": float(torch.tensor(LABELS).log()), "step_seconds": seconds, "peak_bytes": peak})
    print(save("long", {"n": N, "width": WIDTH, "heads": HEADS, "labels": LABELS, "steps": STEPS, "seed": SEED, "causal": True}, rows))


if __name__ == "__main__":
    main()
