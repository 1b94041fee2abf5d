"""Attention where all pairs are looked at: PyTorch's fused kernel, and a small form that also returns the log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.kernels.once import once
from regard.kernels.terms import Term
from regard.kernels.tiles import UNSEEN, accumulator


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    valid: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    alike: bool = False,
) -> Tensor:
    """SDPA that takes any key and value widths and gives 0, with gradient 0, to rows that see nothing.

    valid (b m), or (b h m) where heads have keys of their own. alike: queries are padding where keys are, so that nobody looks at
    the answers of a row that sees nothing: they are finite, and that is all.
    """
    e, mask, lost = v.shape[-1], None, None
    if valid is not None:
        mask, lost = once(("mask", q.dtype), valid, lambda: _masks(valid, q.dtype))
    wide = max(q.shape[-1], e)  # with unequal widths PyTorch would fall back to the n x m form,
    if q.is_cuda:
        wide = -(-wide // 8) * 8  # and on a GPU with odd ones too
    q, k, v = (pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )[..., :e]
    if lost is None or alike:
        return out
    return out.transpose(1, 2).masked_fill(lost, 0).transpose(1, 2)  # in the order that layers want: heads side by side


def _masks(valid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is added to scores (b h n m), and which rows see nothing, (b 1 h 1): those are shown everything, and silenced later.

    As numbers, and with room at the end of each row, as a GPU wants it: else every call would make them of a mask once more.
    """
    valid = valid[:, None] if valid.dim() == 2 else valid
    lost, m = ~valid.any(-1), valid.shape[-1]
    room = m if torch.compiler.is_compiling() else -(-m // 8) * 8  # a compiler makes room where it wants it
    mask = torch.zeros(*valid.shape[:2], 1, room, dtype=dtype, device=valid.device)[..., :m]
    return mask.masked_fill_(~(valid | lost[..., None])[:, :, None], -torch.inf), lost[:, None, :, None]


def small(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    term: Term | None = None,
    apart: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp (b h n) of few queries against all keys; seen broadcasts to (b h n m).

    With a term: of pairs that stand `apart` (b 1 n m); its columns come behind those of out.
    """
    acc = accumulator(q.dtype)
    s = (q.to(acc) * scale) @ k.to(acc).mT
    if term is not None and apart is not None:
        s = term.add(s, apart)
    s = s.masked_fill(~seen, UNSEEN)
    lse = s.logsumexp(-1)
    weights = (s - lse[..., None]).exp()
    weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    lost = lse < UNSEEN / 2
    out = weights @ v.to(acc)
    if term is not None and term.mass and apart is not None:
        out = torch.cat([out, term.masses(weights, apart)], -1)
    out = out.masked_fill(lost[..., None], 0)
    return out.to(v.dtype), lse


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the out and log-sum-exp of each."""
    (a, la), (b, lb) = first, second
    lse = torch.logaddexp(la, lb)
    out = a * (la - lse).exp()[..., None] + b * (lb - lse).exp()[..., None]
    return out.to(a.dtype), lse
