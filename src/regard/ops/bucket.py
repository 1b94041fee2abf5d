"""Softmax among tokens with the same label, in linear time: after sorting by label, a token sees one range of the order.

A token may have several labels, one a round. A pair counts in the first round that holds it and in no other, so that all
rounds together are one softmax over the union of their pairs. Shapes never depend on labels: no host waits, one graph compiles.

Letters: x rows (batch and heads), n tokens, r rounds, c tiles of p places, d key dim, e value dim.
Labels (x r n) are 0 .. count - 1; padding has label `count`, is sorted behind all others, sees nothing and is not seen.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from regard.ops.strip import in_strips
from regard.patterns.tiles import MASKED_SCORE, ceil_div
from regard.transforms import transformed

BucketOutLse = tuple[Tensor, Tensor]  # out (x n e), and log-sum-exp (x n): far below all scores where nothing is seen


class SortedTokens(NamedTuple):
    """Tokens in the order of their labels, and by time among equals; all (x r n)."""

    order: Tensor  # the token at each place
    place: Tensor  # the place of each token
    first: Tensor  # the first place that holds the token's label
    last: Tensor


class SortedRange(NamedTuple):
    """What each token sees: the places low .. high of the sorted order, all (x r n). Tiles of p places see `back` tiles more."""

    order: Tensor
    place: Tensor
    low: Tensor
    high: Tensor
    p: int
    back: int


def sort_by_bucket(labels: Tensor, count: int) -> SortedTokens:
    labels = labels.long()
    order = labels.sort(dim=-1, stable=True).indices
    number = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order)
    place = place.scatter(-1, order, number) if transformed() else place.scatter_(-1, order, number)
    size = labels.new_zeros(*labels.shape[:-1], count + 1)
    size = size.scatter_add_(-1, labels, torch.ones_like(labels))
    end = size.cumsum(-1)
    first = (end - size).gather(-1, labels)
    last = end.gather(-1, labels) - 1
    return SortedTokens(order, place, first, last)


def newest_per_bucket(labels: Tensor, count: int, window: int) -> SortedRange:
    """Return what causal tokens see: the `window` newest of their label up to themselves, whatever comes later."""
    order, place, first, _ = sort_by_bucket(labels, count)
    n = labels.shape[-1]
    p = min(max(window // 2, 16), 128, n)  # a tile of p queries has p + window keys; below 16 there is little left to save
    high = torch.where(labels < count, place, -1)
    low = torch.maximum(first, place - window + 1)
    reach = ceil_div(window - 1, p)
    back = min(reach, ceil_div(n, p) - 1)
    return SortedRange(order, place, low, high, p, back)


def chunk_stretch(labels: Tensor, count: int, chunk: int) -> SortedRange:
    """Return what tokens see in chunks of the sorted order: those of their label in their own chunk and in the one before."""
    order, place, first, last = sort_by_bucket(labels, count)
    p = min(chunk, labels.shape[-1])
    start = place // p * p
    high = torch.minimum(last, start + p - 1)
    high = torch.where(labels < count, high, -1)
    low = torch.maximum(first, start - p)
    back = int(p < labels.shape[-1])
    return SortedRange(order, place, low, high, p, back)


def bucket_attention(q: Tensor, k: Tensor, v: Tensor, sees: SortedRange, *, own: bool, drop: float = 0.0) -> BucketOutLse:
    """Compute the softmax of q . k over what each token sees in any round, q, k (x n d), v (x n e); own=False: not itself."""
    (x, n, e), p, back = v.shape, sees.p, sees.back
    row = torch.arange(x, device=v.device)[:, None]
    room = ceil_div(n, p) * p
    place = sees.place.transpose(0, 1).to(v.dtype)  # (r x n)
    spans = torch.stack([sees.low + sees.high, sees.high - sees.low], -2)
    spans = spans.transpose(0, 1).to(v.dtype) / 2  # (r x 2 n)
    found = []
    for r in range(len(place)):
        # The orders of all rows lie one behind the other, `room` places each: a tile is a tile, whatever row it is of. A place
        # behind the last token repeats the first: its output is never read, and no range reaches that far.
        order = pad(sees.order[:, r], (0, room - n))
        token = (order + row * n).flatten()
        seen = pad(token, (back * p, 0))
        index = order[:, None].expand(r + 1, -1, 2, -1)
        spots = torch.cat([spans[r : r + 1], spans[:r]]).gather(-1, index)
        spots[0, :, 0] -= torch.arange(room, device=v.device) // p * p  # in this round, places count from the tile
        at = place[:r].flatten(1).index_select(1, seen)
        at = at.unflatten(1, (-1, p)).transpose(0, 1)
        queries, keys, values = (_tiles_of(y, seen, p) for y in (q, k, v))
        count = x * room // p
        windows = [y[j : j + count] for y in (keys, values, at) for j in range(back + 1)]
        spots = spots.unflatten(-1, (-1, p))
        spots = spots.permute(1, 3, 0, 2, 4).flatten(0, 1)  # (c r+1 2 p)
        strip = partial(_tile, own=own, drop=drop)
        out, lse = in_strips(strip, (queries[back:], spots, *windows), 0, p * p * (back + 1))
        there = (sees.place[:, r] + row * room).flatten()
        out = out.flatten(0, 1).index_select(0, there)
        lse = lse.flatten().index_select(0, there)
        found.append((out.view(x, n, e), lse.view(x, n)))
    return _merged(found)


def _tiles_of(y: Tensor, seen: Tensor, p: int) -> Tensor:
    """Collect the tokens (x n d) of the sorted places, in tiles (c p d)."""
    tokens = y.flatten(0, 1).index_select(0, seen)
    return tokens.unflatten(0, (-1, p))


def _tile(q: Tensor, spots: Tensor, *windows: Tensor, own: bool, drop: float) -> BucketOutLse:
    """Queries (c p d), the middle and half length of what they see in this round and those before it (c r+1 2 p), and tiles of
    keys, of values and of the places of the keys in the rounds before.

    Hidden pairs are marked by numbers, 0 where seen and 1 or more elsewhere: a CPU compares slowly. They are exact in
    float32 for rows of up to 2**23 tokens.
    """
    tiles = len(windows) // 3
    p = q.shape[1]
    k, v, at = (torch.cat(windows[j * tiles : (j + 1) * tiles], -2 if j < 2 else -1) for j in range(3))
    middle, half = spots[:, :, 0, :, None], spots[:, :, 1, :, None]
    here = torch.arange((1 - tiles) * p, p, device=q.device, dtype=q.dtype)
    hidden = _outside(here, middle[:, 0], half[:, 0]).relu_()
    if not own:
        hidden.diagonal((tiles - 1) * p, 1, 2).fill_(1)
    for r in range(1, spots.shape[1]):
        hidden -= _outside(at[:, r - 1, None], middle[:, r], half[:, r] + 1).clamp_max_(0)
    return bucket_weights(q, k, v, hidden, drop)


def _outside(place: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """Return how far places are outside of ranges, given by middle and half length; below zero inside."""
    distance = (place - middle).abs_()
    return distance.sub_(half)


def bucket_weights(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, drop: float) -> BucketOutLse:
    """Compute the softmax of q . k where hidden is 0; it is at least 1 elsewhere. A row that sees nothing is 0."""
    followed = transformed()
    s = q @ k.mT
    s = s + MASKED_SCORE * hidden if followed else s.add_(hidden, alpha=MASKED_SCORE)
    if followed or torch.compiler.is_compiling():  # which fuses these, and torch 2.11 compiles the Function into a wrong gradient
        weights = s.softmax(-1)
        lse = s.logsumexp(-1)
    else:
        weights, lse = BucketWeights.apply(s)
    if drop:
        weights = dropout(weights, drop)
    out = weights @ v
    empty = bucket_lost(lse).unsqueeze(-1)
    return out.masked_fill(empty, 0), lse


class BucketWeights(torch.autograd.Function):
    """Softmax and log-sum-exp together, one pass each way: the exponential alone would take longer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor) -> BucketOutLse:
        weights = s.softmax(-1)
        lse = s.amax(-1) - weights.amax(-1).log()
        return weights, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: BucketOutLse) -> None:  # noqa: ARG004 - torch names them
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        d = torch._softmax_backward_data(grad, weights, -1, weights.dtype)
        return d.addcmul_(weights, grad_lse.unsqueeze(-1))


def bucket_lost(lse: Tensor) -> Tensor:
    return lse < MASKED_SCORE / 2


def _merged(found: list[BucketOutLse]) -> BucketOutLse:
    if len(found) == 1:
        return found[0]
    lse = torch.stack([y for _, y in found])
    share = lse.softmax(0).unsqueeze(-1)
    out = sum(a * out for a, (out, _) in zip(share, found, strict=True))
    return out, lse.logsumexp(0)


def few_queries(
    q: Tensor, k: Tensor, v: Tensor, labels: Tensor, count: int, window: int, *, own: bool, drop: float = 0.0
) -> BucketOutLse:
    """Compute what the last n of m tokens get from the newest of their label, without sorting: all n m pairs are compared."""
    n, m = q.shape[1], k.shape[1]
    j = torch.arange(m, device=k.device)

    def strip(q: Tensor, own_labels: Tensor, i: Tensor) -> BucketOutLse:
        same = labels[:, :, None] == own_labels.mT[..., None]
        same = same & (j <= i.mT)
        same = same & (labels < count)[:, :, None]
        newer = same.cumsum(-1, dtype=torch.int32)
        newer = newer[..., -1:] - newer
        seen = (same & (newer < window)).any(1)
        if not own:
            seen = seen & (j != i.mT)
        hidden = (~seen).to(q.dtype)
        return bucket_weights(q, k, v, hidden, drop)

    old = m - n
    each = len(q) * m * labels.shape[1]
    out, lse = in_strips(strip, (q, labels[:, :, old:].mT, j[None, old:]), 1, each)
    return out, lse
