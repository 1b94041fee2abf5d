"""A mechanism of your own in one class: push and read are enough, causal and streaming follow from them.

python examples/new_mechanism.py
"""

from typing import NamedTuple

import torch

from regard import Attention, Can, Core, Dims


class Mean(NamedTuple):
    total: torch.Tensor  # (b g e)
    count: torch.Tensor  # (b g 1)


class Average(Core):
    """Every query gets the mean of all values: attention that pays none. A_ij = 1 / m. Cost: n."""

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM

    def empty(self, k, v):
        return Mean(v.new_zeros(*v.shape[:2], v.shape[-1]), v.new_zeros(*v.shape[:2], 1))

    def push(self, memory, k, v, places):
        real = torch.ones_like(places.at, dtype=v.dtype) if places.valid is None else places.valid.to(v.dtype)
        total = memory.total + torch.einsum("bn,bgne->bge", real, v)
        return Mean(total, memory.count + real.sum(1)[:, None, None])

    def read(self, memory, q, places):
        mean = memory.total / memory.count.clamp(min=1)
        return mean.repeat_interleave(q.shape[1] // mean.shape[1], 1)[:, :, None].expand(-1, -1, q.shape[2], -1)


dims = Dims(width=32, heads=4, causal=True)
mixer = Attention(dims, Average(dims))
x = torch.randn(2, 20, 32)
y = mixer(x)
state, steps = mixer.start(2), []
for token in x.split(1, 1):
    step, state = mixer.extend(state, token)
    steps.append(step)
print("streaming equals the whole pass:", torch.allclose(torch.cat(steps, 1), y, atol=1e-6))
print("state bytes, whatever the length:", state.nbytes)
assert torch.allclose(torch.cat(steps, 1), y, atol=1e-6)
