"""Argmax over the vocabulary without exact scores of all tokens: a screening in bfloat16, then exact scores of the best.

A CPU reads the whole table of the vocabulary for one token, which is half of a step. Rounded to bfloat16 it is read, and
multiplied, twice as fast. The rounding error is bounded, so tokens that are further behind than the bound need no exact score.

Letters: r rows, w width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.models.heads import NextToken
from regard.ops.topk import argmax_first, topk_by_part
from regard.runtime.packed_linear import PackedLinear

EXACT_WORDS = 8  # tokens with exact scores
MIN_VOCAB = 4096  # tokens of the smallest vocabulary that is screened
BF16_UNIT = 2**-8  # relative error of rounding to bfloat16, at most


def has_bfloat16() -> bool:
    """Tell whether this CPU multiplies in bfloat16."""
    return bool(torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported())


class ScreenedHead:
    """Compute scores x W^T + b of a `NextToken` with a table of half the size."""

    def __init__(self, head: nn.Module, table: PackedLinear) -> None:
        self.head, self.weight, self.bias = head, table.weight, table.bias
        near = self.weight.bfloat16().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(near)
        self.rounded = None if self.bias is None else self.bias.bfloat16()
        self.longest, self.off = (float(x.norm(dim=1).max()) for x in (self.weight, self.weight - near))
        self.shift = 0.0 if self.bias is None or self.rounded is None else float((self.bias - self.rounded).abs().max())

    @staticmethod
    def of(head: nn.Module) -> ScreenedHead | None:
        """Return a screened head; None for other heads, other processors, and small vocabularies."""
        if type(head) is NextToken and type(head.map) is PackedLinear and len(head.map.weight) >= MIN_VOCAB and has_bfloat16():
            return ScreenedHead(head, head.map)
        return None

    def __call__(self, x: Tensor) -> ScreenedScores:
        """Screen vectors x (r w). With W' and x' rounded, W x - W' x' = (W - W') x' + W (x - x'): each is at most a product of
        norms; the last one is the rounding error of float32 sums.
        """
        near = x.bfloat16()
        scores = torch.ops.mkldnn._linear_pointwise(near, self.packed, self.rounded, "none", [], "")
        rounding = x.shape[1] * torch.finfo(x.dtype).eps * x.norm(dim=1)
        off = self.off * near.float().norm(dim=1) + self.longest * ((x - near).norm(dim=1) + rounding) + self.shift
        return ScreenedScores(self, x, scores.float(), off)

    def of_some(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Compute exact scores of some tokens (r k)."""
        found = torch.einsum("rw,rkw->rk", x, self.weight[tokens])
        return found if self.bias is None else found + self.bias[tokens]


class ScreenedScores(NamedTuple):
    """Hold screened scores, and the bound of their error before they were rounded themselves."""

    by: ScreenedHead
    x: Tensor  # (r w)
    scores: Tensor  # (r v)
    off: Tensor  # (r)

    def likeliest(self, allowed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the argmax (r) of the exact scores, after `allowed` has set some to -inf."""
        value, token = topk_by_part(allowed(self.scores), EXACT_WORDS)
        exact = self.by.of_some(self.x, token).masked_fill(value == -torch.inf, -torch.inf)
        best, rest = exact.amax(1), value[:, -1]
        if not bool(
            (rest + BF16_UNIT * rest.abs() + self.off < best).all()
        ):  # one of the rest may be better, or nothing is a number
            return argmax_first(allowed(self.by.head(self.x[:, None])[:, 0]))
        return token.masked_fill(exact < best[:, None], self.scores.shape[1]).amin(1)  # the first where several are best
