"""What one decoding step costs after a thousand tokens and after a hundred thousand, and what the state weighs.

python benchmarks/stream.py            into results/stream.json (a minute on two cores)
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from common import Progress, only_words, save, seconds
from regard import layer

SPECS = ["Local(256) | Global(first=4)", "linear", "efficient", "performer", "rfa", "softmax"]
LENGTHS = [1_000, 100_000]
WIDTH, HEADS, STEPS, SEED = 256, 4, 400, 0


def after(mixer, t: int):
    """The state after t tokens, fed in chunks of 1,000."""
    state = mixer.start(1)
    for _ in range(t // 1000):
        _, state = mixer.extend(state, torch.randn(1, 1000, WIDTH))
    return state


def steps(mixer, lengths: list[int], device: torch.device) -> tuple[dict[int, float], dict]:
    """Mean seconds of a step behind each length, the slowest and fastest twentieth left out; and the states at the end."""
    states, times = {t: after(mixer, t) for t in lengths}, {t: [] for t in lengths}

    def step(t: int, token: torch.Tensor) -> None:
        _, states[t] = mixer.extend(states[t], token)

    for _ in range(STEPS):
        token = torch.randn(1, 1, WIDTH)
        for t in lengths:  # in turns, so that a busy moment hits both alike
            times[t].append(seconds(partial(step, t, token), device))
    return {t: statistics.mean(sorted(x)[STEPS // 20 : -STEPS // 20]) for t, x in times.items()}, states


@torch.no_grad()
def main() -> None:
    only_words(__doc__)
    rows, progress = [], Progress(len(SPECS))
    for spec in SPECS:
        torch.manual_seed(SEED)
        lengths = LENGTHS if spec != "softmax" else [1_000, 10_000]
        means, states = steps(layer(spec, width=WIDTH, heads=HEADS, causal=True).eval(), lengths, torch.device("cpu"))
        for t in lengths:
            ratio = means[t] / means[lengths[0]]
            rows.append({"spec": spec, "t": t, "step_seconds": means[t], "step_ratio": ratio, "state_bytes": states[t].nbytes})
        progress.step(f"{spec}: {rows[-1]['step_ratio']:.2f} x, {rows[-1]['state_bytes']} bytes")
    settings = {"width": WIDTH, "heads": HEADS, "batch": 1, "dtype": "float32", "steps": STEPS, "seed": SEED}
    print(save("stream", {**settings, "value": "mean without the slowest and fastest twentieth"}, rows))


if __name__ == "__main__":
    main()
