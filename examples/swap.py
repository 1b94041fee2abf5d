"""Swap the attention of a model and see what it costs: one line per mechanism, everything else the same.

python examples/swap.py
"""

import time

import torch

from regard import layer

N, WIDTH, HEADS = 2048, 128, 4
x = torch.randn(1, N, WIDTH)
print(f"{N} tokens, width {WIDTH}, {HEADS} heads, forward + backward on this machine")
full = None
for spec in ("softmax", "Local(64)", "Local(64) | Global(first=2)", "bigbird", "linear", "performer(features=128)"):
    mixer = layer(spec, width=WIDTH, heads=HEADS)
    mixer(x).sum().backward()  # warm up
    start = time.perf_counter()
    mixer(x).sum().backward()
    seconds = time.perf_counter() - start
    full = full or seconds
    print(f"{spec:32s} {1000 * seconds:7.1f} ms   {full / seconds:5.1f} x the speed of softmax")
