"""Positions that add a bias to the scores: ALiBi and relative positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims
from regard.mixers.position_interface import Positions
from regard.ops.score_bias import ScoreBias


class Alibi(Positions):
    """Far tokens count less: every head takes its own price for distance off the scores.

    s_ij - slope_h |i - j|, slope_h = 2^(-8 h / heads) for h = 1 .. heads, if heads is a power of two. Otherwise, as in the
    published code and in BLOOM, the first p heads, p the power below, have the slopes of p heads, and the rest the first, third
    and so on of 2 p heads. Press et al. 2021, arXiv:2108.12409.
    """

    needs = Can.RELATIVE

    def term(self, q: Tensor, scale: float) -> ScoreBias:  # noqa: ARG002 - the same for all queries
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

    def term(self, q: Tensor, scale: float) -> ScoreBias:
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
