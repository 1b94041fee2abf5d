"""Floors of a pass: the bytes and the FLOPs below which no implementation can go, and the time they take at measured rates.

Bytes: every pass reads each of its inputs once and writes each of its outputs once. Forward: q, k, v and out. Backward: q, k, v
and the gradient of out are read, the gradients of q, k and v written. A layer reads and writes its tokens and weights likewise.
FLOPs: two products of size d and e for every pair of a pattern; for sums over features the product of state and query, once
written and once read, and the features themselves; elsewhere what a count of the matrix products on meta tensors finds. A
backward pass has 5/2 of the products of attention over pairs, and twice those of anything else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.analysis.cost import MAX_BLOCKS
from regard.bench.machine import Rates
from regard.bench.workload import LAYER, Setting, own_workload
from regard.cache import bounded_cache
from regard.mixers.attention import Attention
from regard.mixers.base import Core, Mixer
from regard.mixers.linear_attention import Kernel
from regard.mixers.softmax import Softmax
from regard.mixers.sparse import Longformer, Sparse
from regard.patterns import Everything, Pattern
from regard.patterns.density import count_pairs
from regard.spec import Spec

FORWARD, TRAINING = "forward", "forward + backward"
PAIR_BACKWARD, OTHER_BACKWARD = 2.5, 2.0  # products of a backward pass by those of its forward pass
SHORT_FLOPS = 2048  # tokens at which FLOPs are counted; beyond them by the growth of the row


class Floor(NamedTuple):
    bytes: float
    flops: float

    def seconds(self, rates: Rates) -> float:
        return max(self.bytes / rates.bytes, self.flops / rates.flops)

    def bound_by(self, rates: Rates) -> str:
        return "bytes" if self.bytes / rates.bytes >= self.flops / rates.flops else "FLOPs"


def floor_of(mixer: Mixer, setting: Setting, level: str, work: str, growth: float) -> Floor:
    """The floor of a pass of a mechanism; `growth` is the power of n with which its cost grows."""
    flops, backward = _forward_flops(mixer, setting, growth)
    moved, weights = _tensor_bytes(mixer, setting, level)
    forward = sum(moved) + weights
    if level == LAYER:
        projections = _projection_flops(mixer, setting)
        flops += projections
    if work == FORWARD:
        return Floor(forward, flops)
    read_again = sum(moved) + weights  # inputs and the gradient of out, which is as large as out
    gradients = sum(moved[:-1]) + weights
    return Floor(forward + read_again + gradients, flops * (1 + backward))


def _tensor_bytes(mixer: Mixer, setting: Setting, level: str) -> tuple[list[float], float]:
    """Bytes of the inputs and, last, of the output; and those of the weights."""
    size = torch.empty((), dtype=setting.torch_dtype).element_size()
    tokens = setting.batch * setting.n * size
    out = tokens * setting.width / mixer.rate
    if level == LAYER or not isinstance(mixer, Attention):
        return [tokens * setting.width, out], size * sum(p.numel() for p in mixer.parameters())
    core = mixer.core
    heads = tokens * setting.heads
    sizes = [setting.dim * core.streams, *core.sizes]
    if core.shared_qk:
        sizes = sizes[1:]
    return [*(heads * x for x in sizes), out], size * sum(p.numel() for p in core.parameters())


def _projection_flops(mixer: Mixer, setting: Setting) -> float:
    if not isinstance(mixer, Attention):
        return 0.0
    linears = [part for part in mixer.children() if isinstance(part, torch.nn.Linear)]
    per_token = sum(2 * x.in_features * x.out_features for x in linears)
    return per_token * setting.batch * setting.n


def _forward_flops(mixer: Mixer, setting: Setting, growth: float) -> tuple[float, float]:
    """FLOPs of mixing in a forward pass, and the factor of a backward pass."""
    core = mixer.core if isinstance(mixer, Attention) else None
    pattern = _pattern(core)
    if core is not None and pattern is not None:
        pairs = _pairs_of(pattern, setting.n, setting.causal, setting.heads)
        return 2 * setting.batch * pairs * (core.dims.d + core.dims.e), PAIR_BACKWARD
    if isinstance(core, Kernel):
        state = 4 * core.f * core.dims.e  # written and read
        drawn = getattr(core, "directions", None)
        features = 0 if drawn is None else 4 * drawn.numel()  # of a query and of a key
        return setting.batch * setting.heads * setting.n * (state + features), OTHER_BACKWARD
    return _counted_flops(mixer, setting, growth), OTHER_BACKWARD


@bounded_cache(lambda _: 1)
def _pairs_of(pattern: Pattern, n: int, causal: bool, heads: int) -> int:
    """Pairs of a pattern over all heads, counted once for a mechanism and its peers; drawn ones in one head, for all heads."""
    block = 64 * -(-n // (64 * MAX_BLOCKS))
    counted = 1 if "per_head=True" in str(pattern) else heads
    return count_pairs(pattern, n, causal=causal, heads=counted, block=block).pairs * heads // counted


def _pattern(core: Core | None) -> Pattern | None:
    """The pairs of a core that scores pairs."""
    if isinstance(core, Longformer):
        if core.rows is None:
            return core.local.pattern
        return core.local.pattern | core.rows
    if isinstance(core, Sparse):
        return core.pattern
    if type(core) is Softmax:
        return Everything()
    return None


def _counted_flops(mixer: Mixer, setting: Setting, growth: float) -> float:
    """Count the matrix products of a short forward pass on meta tensors, and let them grow to the length of the setting."""
    n = min(setting.n, SHORT_FLOPS)
    meta = Setting(n, 1, setting.heads, setting.dim, setting.causal, "meta", "fp32", "auto", setting.seed)
    spec = mixer.spec
    if spec is None:
        return 0.0
    try:
        with torch.device("meta"):
            small = Spec.of(spec).build(meta.dims())
            x = torch.empty(1, n, setting.width)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            own_workload(small, meta, LAYER, (x,)).forward()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0.0  # it reads data, which meta tensors do not have
    one = counter.get_total_flops() - _projection_flops(small, meta)
    return setting.batch * max(one, 0) * (setting.n / n) ** growth
