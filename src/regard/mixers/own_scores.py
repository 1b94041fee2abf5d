"""Softmax attention with a mask or a function of scores of the caller's own: all pairs, n x m numbers for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from regard.mixers.base import Core
from regard.mixers.places import Places
from regard.mixers.softmax import Softmax
from regard.mixers.sparse import Sparse
from regard.ops.tile.tile_op import MASKED_SCORE, accumulator

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ABLE_BACKENDS = ("auto", "torch", "reference")


class OwnScores(NamedTuple):
    """What a caller adds to softmax attention."""

    mask: Tensor | None = None  # broadcasts to (b h n m), True: this query may attend to this key
    score: ScoreFunction | None = None  # (scores, row, head, i, j) -> scores, as in FlexAttention

    @property
    def given(self) -> bool:
        return self.mask is not None or self.score is not None


def attend_own(
    q: Tensor, k: Tensor, v: Tensor, core: Core, own: OwnScores, *, causal: bool, queries: Places, keys: Places
) -> Tensor:
    """Attend with q (b h n d), k (b g m d), v (b g m e) by softmax over the pairs that core, mask and padding all allow.

    `score` gets the scaled scores (b h n m), and indices that broadcast to them: rows of the batch, heads, positions of queries
    and of keys, which count real tokens. A query without any pair gets 0.
    """
    _check_own(core, own, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), keys)
    assert isinstance(core, Softmax | Sparse)
    acc, share = accumulator(q.dtype), q.shape[1] // k.shape[1]
    k, v = (x.to(acc).repeat_interleave(share, 1) for x in (k, v))
    scores = core.scale * (q.to(acc) @ k.mT)
    i, j = queries.at[:, None, :, None], keys.at[:, None, None, :]
    if own.score is not None:
        row, head = (torch.arange(x, device=q.device) for x in q.shape[:2])
        scores = _scored(own.score, scores, row[:, None, None, None], head[:, None, None], i, j)
    seen = _visible(core, own, i, j, causal, keys.valid)
    weights = scores.masked_fill(~seen, MASKED_SCORE).softmax(-1)
    weights = weights.masked_fill(~seen, 0)
    return (dropout(weights, core.drop) @ v).to(q.dtype)


def _visible(core: Softmax | Sparse, own: OwnScores, i: Tensor, j: Tensor, causal: bool, valid: Tensor | None) -> Tensor:
    """Return which pairs are in the softmax, (b h n m) or what broadcasts to it."""
    n, m = i.shape[2], j.shape[3]
    each = [pattern.bound(n, m) for pattern in core.reach.each]
    found = {pattern: pattern(0, i[:, 0], j[:, 0]).expand(len(i), n, m) for pattern in dict.fromkeys(each)}
    seen = torch.stack([found[pattern] for pattern in each], 1)
    if causal:
        seen = seen & (i >= j)
    if valid is not None:
        seen = seen & valid[:, None, None]
    if own.mask is not None:
        seen = seen & own.mask
    return seen


def _scored(score: ScoreFunction, scores: Tensor, *index: Tensor) -> Tensor:
    found = score(scores, *index)
    if not isinstance(found, Tensor) or found.shape != scores.shape:
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"score must return scores of the shape it is given, {tuple(scores.shape)}, not {given}")
    return found


def _check_own(core: Core, own: OwnScores, shape: tuple[int, ...], keys: Places) -> None:
    """Refuse cores and backends that have no place for a mask or scores of the caller's, and masks of a wrong kind."""
    what = "mask" if own.score is None else "score function"
    if type(core) not in (Softmax, Sparse):
        raise ValueError(f"{core.name} takes no {what} of your own: softmax and patterns do, by the scores of all pairs")
    if core.dims.backend not in ABLE_BACKENDS:
        raise ValueError(f"the backend {core.dims.backend} takes no {what} of your own: use auto, torch or reference")
    if core.positions is not None:
        raise ValueError(f"{core.positions.name} positions add to the scores themselves: write them into your score function")
    assert isinstance(core, Softmax | Sparse)
    if core.reach.bends and keys.valid is not None:
        raise ValueError(f"{core.reach.text} is drawn for the length of each row: give rows of one length, without valid")
    mask = own.mask
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor, True = may attend, not {kind}: numbers that are added belong into score=")
    if mask.device != keys.device:
        raise ValueError(f"mask is on {mask.device} but the keys are on {keys.device}: move one of them with .to()")
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, but it must broadcast to (batch, heads, queries, keys) = {shape}")
