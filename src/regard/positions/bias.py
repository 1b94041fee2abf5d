"""Positions that add a bias to the scores: ALiBi, relative positions, and buckets of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.cache import outlives_tracing
from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims
from regard.mixers.position_interface import Positions
from regard.ops.score_bias import ScoreBias


class Alibi(Positions):
    """Far tokens count less: every head takes its own price for distance off the scores.

    s_ij - slope_h |i - j|, slope_h = 2^(-8 h / heads) for h = 1 .. heads, if heads is a power of two. Otherwise, as in the
    published code and in BLOOM, the first p heads, p the power below, have the slopes of p heads, and the rest the first, third
    and so on of 2 p heads. Press et al. 2021, arXiv:2108.12409.

    `dims` are the sizes of the layer.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("softmax", width=16, heads=2, positions="alibi")
    >>> tuple(mixer(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    needs = Can.RELATIVE

    def term(self, q: Tensor, scale: float, at: Tensor) -> ScoreBias:  # noqa: ARG002 - the same for all queries
        heads = q.shape[1]
        bits = heads.bit_length()
        power = 1 << (bits - 1)
        number = torch.arange(1, power + 1, dtype=torch.float64, device=q.device)
        first = number * (-8 / power)
        if heads == power:
            return ScoreBias(slopes=torch.exp2(first))
        odd = torch.arange(1, 2 * (heads - power), 2, dtype=torch.float64, device=q.device)
        rest = odd * (-4 / power)
        exponents = torch.cat([first, rest])
        return ScoreBias(slopes=torch.exp2(exponents))


class RelativePositions(Positions):
    """A vector for every distance up to `clip`, added to keys and, if `values`, to values; all heads share them.

    s_ij = scale q_i.(k_j + a_c), out_i = sum_j A_ij (v_j + b_c), c = clamp(i - j, -clip, clip). The n x n x d tensor of the
    formula never exists: n (2 clip + 1) numbers do. Shaw et al. 2018, arXiv:1803.02155.

    `dims` are the sizes of the layer.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("softmax", width=16, heads=2, positions="relative(clip=4)")
    >>> tuple(mixer(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    needs = Can.RELATIVE
    name = "relative"

    def __init__(self, dims: Dims, *, clip: int = 16, values: bool = True) -> None:
        super().__init__(dims)
        classes = 2 * need("clip", clip, 0, WIDEST) + 1
        self.clip = clip
        keys = torch.randn(classes, dims.d) * dims.d**-0.5
        self.keys = nn.Parameter(keys)
        std = dims.e**-0.5
        self.values = nn.Parameter(torch.randn(classes, dims.e) * std) if values else None

    def term(self, q: Tensor, scale: float, at: Tensor) -> ScoreBias:  # noqa: ARG002 - the same at all positions
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        keys = self.keys.to(q.dtype)
        by_query = (q * scale) @ keys.mT
        return ScoreBias(clip=self.clip, by_query=by_query, mass=self.values is not None)

    def finish(self, out: Tensor, e: int) -> Tensor:
        if self.values is None:
            return out
        wide = torch.promote_types(out.dtype, torch.float32)
        added = out[..., e:].to(wide) @ self.values.to(wide)
        total = out[..., :e].to(wide) + added
        return total.to(out.dtype)


class Buckets(Positions):
    """A number for every bucket of distances and every head, added to the scores, as in T5.

    s_ij + table[bucket(i - j), h]: near distances have a bucket each, farther ones share buckets that grow with the distance,
    from `longest` on all share the last. Half of the buckets are for later tokens, unless it is causal.
    Raffel et al. 2019, arXiv:1910.10683.

    `dims` are the sizes of the layer, `buckets` is the number of learned numbers a head.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("softmax", width=16, heads=2, positions="buckets(buckets=8)")
    >>> tuple(mixer(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    needs = Can.RELATIVE

    def __init__(self, dims: Dims, *, buckets: int = 32, longest: int = 128) -> None:
        super().__init__(dims)
        sides = 1 if dims.causal else 2
        exact = need("buckets", buckets, 2 * sides, WIDEST) // sides // 2
        if buckets % sides or need("longest", longest, 1, WIDEST) <= exact:
            raise ValueError(f"buckets are an even number where both sides count, and longest is above {exact}, not {longest}")
        self.buckets, self.longest = buckets, longest
        self.table = nn.Parameter(torch.randn(buckets, dims.heads) * dims.width**-0.5)
        by_distance = _distance_buckets(buckets // sides, longest)
        ahead = [0 if dims.causal else buckets // 2 + bucket for bucket in by_distance[:0:-1]]
        self.classes = tuple(ahead + by_distance)  # the bucket of every distance i - j, from -clip to clip
        self.clip = len(by_distance) - 1
        self._kept: Tensor | None = None

    def extra_repr(self) -> str:
        return f"buckets={self.buckets}, longest={self.longest}"

    def term(self, q: Tensor, scale: float, at: Tensor) -> ScoreBias:  # noqa: ARG002 - the same for all queries
        by_class = self.table[self._index(q.device)].mT  # (h classes)
        by_query = by_class[None, :, None].expand(len(q), -1, q.shape[2], -1)
        return ScoreBias(clip=self.clip, by_query=by_query.to(torch.promote_types(q.dtype, torch.float32)))

    def _index(self, device: torch.device) -> Tensor:
        """Return the bucket of every distance class, remembered for its device."""
        if torch.compiler.is_dynamo_compiling():
            return torch.tensor(self.classes, device=device)
        if self._kept is None or self._kept.device != device:
            make = outlives_tracing(torch.tensor)
            self._kept = make(self.classes, device=device)
        return self._kept


def _distance_buckets(buckets: int, longest: int) -> list[int]:
    """Return the bucket of every distance from 0 to the first one in the last bucket: logarithmic from the middle one on."""
    exact = buckets // 2
    distance = torch.arange(exact, longest + 1, device="cpu")
    share = torch.log(distance.float() / exact) / math.log(longest / exact)
    found = [*range(exact), *(exact + (share * (buckets - exact)).long()).tolist()]
    last = next(i for i, bucket in enumerate(found) if bucket >= buckets - 1)
    return [*found[:last], buckets - 1]
