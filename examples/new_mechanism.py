"""A mechanism of your own in one class: push and read are enough, causal and streaming follow from them.

python examples/new_mechanism.py
"""

from typing import NamedTuple

import torch

from regard import Attention, Can, Core, Dims, per_query_head


class Mean(NamedTuple):
    total: torch.Tensor  # (b g 1 e)
    count: torch.Tensor  # (b 1 1 1)


class Average(Core):
    """Every query gets the mean of all values: attention that pays none. A_ij = 1 / m. Cost: n."""

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM
    positional = False  # the positions of queries change nothing
    ignores = ("q", "k")  # a layer makes no maps for them

    def empty(self, k, v):
        return Mean(v.new_zeros(*v.shape[:2], 1, v.shape[-1]), v.new_zeros(len(v), 1, 1, 1))

    def push(self, memory, k, v, places):
        real = torch.ones_like(places.at, dtype=torch.bool) if places.valid is None else places.valid
        real, v = real[:, None, None].to(v.dtype), v.masked_fill(~real[:, None, :, None], 0)
        return Mean(memory.total + real @ v, memory.count + real.sum(-1, keepdim=True))

    def read(self, memory, q, places):
        mean = memory.total / memory.count.clamp(min=1)
        return per_query_head(mean, q).expand(-1, -1, q.shape[2], -1)  # grouped heads: the memory keeps g of them


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
