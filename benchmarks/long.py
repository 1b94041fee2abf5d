"""A hundred thousand tokens, trained on a CPU: one causal layer of Local(256) | Global(first=4) learns a moving sum.

The target of a token is the sum of the last 256 inputs, itself among them, scaled to unit variance: answering 0 costs 1.

    python benchmarks/long.py              into results/long.json (a minute on two cores)
"""

from __future__ import annotations

import time

import torch

from common import Progress, only_words, peak_bytes, save
from regard import layer

N, WIDTH, HEADS, WINDOW, STEPS, RATE, SEED = 100_000, 64, 4, 256, 40, 3e-2, 0
SPEC = f"Local({WINDOW}) | Global(first=4)"


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, N, WIDTH)
    sums = torch.cat([torch.zeros(1, 1, WIDTH), x.cumsum(1)], 1)
    end = torch.arange(1, N + 1)
    start = (end - WINDOW).clamp_min(0)
    return x, (sums[:, end] - sums[:, start]) / (end - start)[:, None] ** 0.5


def main() -> None:
    only_words(__doc__)
    torch.manual_seed(SEED)
    mixer, progress = layer(SPEC, width=WIDTH, heads=HEADS, causal=True), Progress(STEPS)
    optimiser = torch.optim.Adam(mixer.parameters(), lr=RATE)
    losses: list[float] = []
    seconds: list[float] = []

    def train() -> None:
        start = time.perf_counter()
        loss = (mixer(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())

    peak = 0
    for _ in range(STEPS):
        x, y = batch()
        peak = max(peak, peak_bytes(train, torch.device("cpu")))
        progress.step(f"loss {losses[-1]:.3f}")
    rows = [{"spec": SPEC, "losses": losses, "floor": 1.0, "step_seconds": min(seconds), "peak_bytes": peak}]
    settings = {"n": N, "width": WIDTH, "heads": HEADS, "steps": STEPS, "rate": RATE, "seed": SEED, "causal": True}
    print(save("long", settings, rows))


if __name__ == "__main__":
    main()
