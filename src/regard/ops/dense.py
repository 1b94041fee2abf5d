"""Attention over all pairs: PyTorch's fused kernel, and a small form that also returns the log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.ops.dense_limit import DENSE_LIMIT
from regard.ops.dropout import drop_out
from regard.ops.few_keys import few_keys_attention, takes_few_keys
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.call import accumulator
from regard.patterns.tiles import MASKED_SCORE, ceil_div
from regard.transforms import differentiable_grads, transformed


class SdpaMask(NamedTuple):
    """A padding mask in the form of the fused kernel. Rows without any key are shown all keys, and set to zero afterwards."""

    bias: Tensor  # (b h or 1, 1, m) added to scores: 0, or -inf at padding
    empty: Tensor  # (b 1 h or 1, 1) True: no key is real


def sdpa_mask(valid: Tensor, dtype: torch.dtype) -> SdpaMask:
    """Make the mask of keys from valid (b m), or (b h m) where heads have keys of their own.

    As numbers, and with room at the end of each row, as a GPU needs it: else every call would make them of a mask once more.
    """
    if valid.dim() == 2:
        valid = valid[:, None]
    empty = ~valid.any(-1)
    m = valid.shape[-1]
    room = m if torch.compiler.is_compiling() else ceil_div(m, 8) * 8  # a compiler pads by itself
    bias = torch.zeros(*valid.shape[:2], 1, room, dtype=dtype, device=valid.device)
    bias = bias[..., :m]
    shown = valid | empty[..., None]
    gone = ~shown[:, :, None]
    empty = empty[:, None, :, None]
    bias = bias.masked_fill(gone, -torch.inf) if transformed() else bias.masked_fill_(gone, -torch.inf)
    return SdpaMask(bias, empty)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    valid: Tensor | SdpaMask | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    keep_empty: bool = False,
    pairs: Tensor | None = None,
) -> Tensor:
    """Compute SDPA for any key and value widths; rows without a visible key are 0, with gradient 0.

    valid (b m), or (b h m) where heads have keys of their own; or the mask that `sdpa_mask` made of it in the type of q.
    keep_empty: outputs of a row that sees nothing are finite, and not set to zero, because they are not used.
    pairs (n m): True where a query sees a key, the same for all rows and heads, in place of valid; each query sees one.
    """
    e = v.shape[-1]
    if isinstance(valid, Tensor):
        valid = sdpa_mask(valid, q.dtype)
    mask, empty = (pairs, None) if valid is None else valid
    wide = max(q.shape[-1], e)  # with unequal widths PyTorch would fall back to the n x m form,
    if q.is_cuda:
        wide = ceil_div(wide, 8) * 8  # and on a GPU with odd ones too
    if q.is_cuda and q.dtype == torch.float64:
        _refuse_all_pairs(q, k, "float64 on a GPU has no fused kernel")
    if unfused_dropout(q, k, dropout):
        _refuse_all_pairs(q, k, "dropout on a CPU has no fused kernel")
    if transformed():
        out = sdpa_composite(q, k, v, mask, scale, causal, dropout)
    elif pairs is None and not causal and not dropout and takes_few_keys(q, k, v):
        bias = None if mask is None else mask.squeeze(2)
        out = few_keys_attention(q, k, v, bias, scale, lambda q, k, v: sdpa_composite(q, k, v, mask, scale, False))
    else:
        q, k, v = (widened(x, wide) for x in (q, k, v))
        if repeats_heads(q, k, mask):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 - sizes may be symbols, which the kernel refuses
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=grouped
        )
        node = None if torch.compiler.is_compiling() else out.grad_fn
        if node is not None and node.name().startswith("ScaledDotProduct"):
            node.register_hook(_second_derivative)
        out = out[..., :e]
    if empty is None or keep_empty:
        return out
    out = out.transpose(1, 2)  # the memory order of layers: heads side by side
    return out.masked_fill(empty, 0).transpose(1, 2)


def repeats_heads(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Return whether keys are repeated for the query heads that share them: PyTorch would else make the scores of all pairs.

    On a GPU its kernel for float32 and for masks takes no groups of heads.
    """
    return q.is_cuda and (mask is not None or q.dtype == torch.float32) and bool(q.shape[1] != k.shape[1])


def unfused_dropout(q: Tensor, k: Tensor, dropout: float) -> bool:
    """Return whether PyTorch would make more scores at once than is allowed: its kernels for CPUs have no dropout."""
    if not dropout or q.is_cuda or torch.compiler.is_compiling():  # then sizes may be symbols
        return False
    return min(q.shape[2], k.shape[2]) > DENSE_LIMIT


def _refuse_all_pairs(q: Tensor, k: Tensor, why: str) -> None:
    """Refuse to make the scores of q (b h n d) and k (b g m d) at once, where both are long."""
    if torch.compiler.is_compiling():  # sizes may be symbols
        return
    n, m = q.shape[2], k.shape[2]
    if min(n, m) > DENSE_LIMIT:
        raise ValueError(
            f"{why}: the scores of {n:,} queries and {m:,} keys would be one tensor, and more than {DENSE_LIMIT:,} tokens are "
            "not allowed there; use fewer tokens, or a mechanism that is not quadratic"
        )


def widened(x: Tensor, wide: int) -> Tensor:
    """Append columns of zeros up to a width. Joined, not padded: the gradient is then a view."""
    missing = wide - x.shape[-1]
    return torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], -1) if missing > 0 else x


def sdpa_composite(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Compute SDPA in plain operations, which can be differentiated in every way. It makes n x m scores.

    mask (b h n m): numbers to add, or True where a pair is seen.
    """
    _refuse_all_pairs(q, k, "a transform of torch.func, forward-mode AD or a second derivative has no fused kernel")
    share = q.shape[1] // k.shape[1]
    if share != 1:
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    s = (q * scale) @ k.mT
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(future, -torch.inf)
    weights = s.softmax(-1, dtype=accumulator(s.dtype)).to(s.dtype)
    if dropout:
        weights = drop_out(weights, dropout)
    return weights @ v


def _second_derivative(grads: tuple[Tensor | None, ...], up: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
    """Replace the gradients that a fused kernel found by ones that can be differentiated, for create_graph=True.

    A hook of the kernel's node: what the node saved is read there, so that nothing is kept alive.
    """
    if not torch.is_grad_enabled():
        return None
    node: Any = torch._C._current_autograd_node()
    if node._saved_dropout_p:
        raise RuntimeError("a fused kernel drops weights that cannot be found again: for second derivatives use dropout=0")
    names = ("_saved_attn_mask", "_saved_attn_bias")
    masks = (getattr(node, name) for name in names if hasattr(node, name))
    mask = next(masks, None)
    q, k, v = node._saved_query, node._saved_key, node._saved_value
    scale = q.shape[-1] ** -0.5 if node._saved_scale is None else node._saved_scale

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (sdpa_composite(q, k, v, mask, scale, node._saved_is_causal),)

    found = [*differentiable_grads(f, (q, k, v), up[:1]), *grads[3:]]
    return tuple(None if old is None else new for old, new in zip(grads, found, strict=True))  # as many as were wanted


def few_queries_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    term: ScoreBias | None = None,
    apart: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out and log-sum-exp (b h n) of few queries (b h n d) against all keys (b g m d); seen broadcasts to (b h n m).

    Query heads that share a key head are further rows of one product: no key is repeated.
    With a term: of pairs that stand `apart` (b 1 n m); its columns come behind those of out.
    """
    acc, (b, h, n, d), (g, m) = accumulator(q.dtype), q.shape, k.shape[1:3]
    rows = h // g * n  # of one key head
    queries = (q.to(acc) * scale).reshape(b, g, rows, d)
    s = queries @ k.to(acc).mT
    s = s.reshape(b, h, n, m)
    if term is not None and apart is not None:
        s = term.add(s, apart)
    s = s.masked_fill(~seen, MASKED_SCORE)
    lse = s.logsumexp(-1)
    weights = (s - lse[..., None]).exp()
    if dropout:
        weights = drop_out(weights, dropout)
    lost = lse < MASKED_SCORE / 2
    out = weights.reshape(b, g, rows, m) @ v.to(acc)
    out = out.reshape(b, h, n, v.shape[-1])
    if term is not None and term.mass and apart is not None:
        out = torch.cat([out, term.masses(weights, apart)], -1)
    out = out.masked_fill(lost[..., None], 0)
    return out.to(v.dtype), lse


def merge_by_lse(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into that over their union, from the out and log-sum-exp of each."""
    (a, la), (b, lb) = first, second
    # torch.logaddexp has no second derivative where one of them saw nothing: NaN
    lse = torch.stack([la, lb]).logsumexp(0) if torch.is_grad_enabled() else torch.logaddexp(la, lb)
    share_a = (la - lse).exp()[..., None]
    share_b = (lb - lse).exp()[..., None]
    out = a * share_a + b * share_b
    return out.to(a.dtype), lse
