"""Beside the others, in one run: SDPA and compiled FlexAttention against the same patterns, n = 8,192, 4 heads x 64, float32.

python benchmarks/peers.py             into results/peers.json (needs a C++ compiler for FlexAttention)
"""

from __future__ import annotations

import os
import statistics
from functools import partial

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no idle compilers beside what is timed

import torch
from torch.nn.functional import scaled_dot_product_attention

from common import Progress, only_words, save, taking_turns
from regard import Dims, Pattern, attend, core
from regard.bench.peers_kernels import Flex
from regard.bench.workload import Setting

N, HEADS, DIM, SEED = 8192, 4, 64, 0
PATTERNS = ["Local(128)", "Local(128) | Global(first=2)", "Dilated(32, 8)", "Stride(64)"]


def main() -> None:
    only_words(__doc__)
    device = torch.device("cpu")
    torch.manual_seed(SEED)
    q, k, v = (torch.randn(1, HEADS, N, DIM) for _ in range(3))
    rows, progress = [], Progress(len(PATTERNS) + 1)
    for text in PATTERNS:
        rows += forward(text, q, k, v, device)
        progress.step(f"forward, {text}")
    rows += both(["linear", "bigbird", *PATTERNS], q, k, v, device)
    progress.step("forward + backward")
    settings = {
        "n": N,
        "heads": HEADS,
        "dim": DIM,
        "batch": 1,
        "dtype": "float32",
        "seed": SEED,
        "value": "seconds, in turns of three calls; ratios are of the fastest",
    }
    print(save("peers", settings, rows))


def forward(text: str, q, k, v, device) -> list[dict]:
    """FlexAttention has no backward on a CPU, so the comparison is of the forward pass."""
    pattern, made = Pattern.parse(text), core(text, Dims(HEADS * DIM, HEADS))
    fs = {"regard": lambda: attend(q, k, v, made)}
    for block in (64, 128):
        flex = Flex(pattern, Setting(N, 1, HEADS, DIM), block)
        fs[f"FlexAttention, blocks of {block}"] = partial(flex.run, q, k, v)
    fs["SDPA, all pairs"] = lambda: scaled_dot_product_attention(q, k, v)
    with torch.no_grad():
        ours, theirs = (list(fs.values())[x]() for x in (0, 1))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # only what agrees is timed
        times = taking_turns(fs, device, 7)
    ours = min(times["regard"])
    return [{"pass": "forward", "spec": text, "by": name, **summary(t), "ratio": min(t) / ours} for name, t in times.items()]


def summary(times: list[float]) -> dict[str, float]:
    return {"fastest": min(times), "median": statistics.median(times)}


def both(specs: list[str], q, k, v, device) -> list[dict]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))

    def trained(f):
        def step():
            out = f()
            out.backward(torch.ones_like(out))
            q.grad = k.grad = v.grad = None

        return step

    cores = {spec: core(spec, Dims(HEADS * DIM, HEADS)) for spec in specs}
    fs = {spec: trained(partial(attend, q, k, v, made)) for spec, made in cores.items()}
    times = taking_turns({**fs, "SDPA": trained(lambda: scaled_dot_product_attention(q, k, v))}, device, 3)
    full = min(times["SDPA"])
    return [
        {"pass": "forward + backward", "spec": spec, "by": "SDPA, all pairs", **summary(t), "ratio": full / min(t)}
        for spec, t in times.items()
    ]


if __name__ == "__main__":
    main()
