"""The backend "torch": bucketed attention in linear time. After sorting by label, a token sees one range of the order.

A token may have several labels, one a round. A pair counts in the first round that holds it and in no other, so that all
rounds together are one softmax over the union of their pairs. Shapes never depend on labels: no host waits, one graph compiles.

Letters: x rows (batch and heads), n tokens, r rounds, c tiles of p places, d key dim, e value dim.
Labels (x r n) are 0 .. count - 1; padding has label `count`, is sorted behind all others, sees nothing and is not seen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.ops.bucket.bucket_op import BucketCall, LabelCall, scored
from regard.ops.bucket.bucket_sort import SortedRange, chunk_stretch, newest_per_bucket
from regard.ops.dropout_hash import kept_pairs_composite, key_keys, query_keys
from regard.ops.strip import in_strips
from regard.ops.tile.call import accumulator
from regard.patterns.tiles import MASKED_SCORE, ceil_div
from regard.transforms import transformed

BucketOutLse = tuple[Tensor, Tensor]  # out (x n e), and log-sum-exp (x n): far below all scores where nothing is seen


class TorchBuckets:
    """Tiles of the sorted order, in plain PyTorch on any device."""

    name = "torch"

    def refuses(self, call: BucketCall | LabelCall) -> str | None:  # noqa: ARG002 - it computes every call
        return None

    def forward(self, call: BucketCall) -> Tensor:
        q, k, v = scored(call, accumulator(call.q.dtype))
        labels = call.labels.flatten(0, 1)
        stretch = newest_per_bucket if call.causal else chunk_stretch
        sees = stretch(labels, call.buckets, call.reach)
        out, lse = sorted_attention(q, k, v, sees, own=call.own, seed=call.seed, rate=call.dropout)
        if not call.own:
            out = with_lonely(out, lse, v, labels[:, 0] < call.buckets, call.seed, call.dropout)
        return out.unflatten(0, call.q.shape[:2]).to(call.v.dtype)

    def labels(self, call: LabelCall) -> Tensor:
        k = call.k.to(accumulator(call.k.dtype))
        share = call.directions.shape[0] // k.shape[1]
        if share > 1:
            k = k.repeat_interleave(share, 1)
        strip = partial(_largest, directions=call.directions.to(k.dtype), rounds=call.rounds, opposite=call.opposite)
        each = k.shape[0] * k.shape[1] * call.directions.shape[2]
        return in_strips(strip, (k,), 2, each)[0]


def _largest(k: Tensor, directions: Tensor, rounds: int, opposite: bool) -> tuple[Tensor]:
    products = (k @ directions).unflatten(-1, (rounds, -1))
    if not opposite:
        return (products.argmax(-1).int(),)
    far = products.abs().argmax(-1, keepdim=True)  # the largest of [x, -x] without making -x
    negative = products.gather(-1, far) < 0
    label = far + products.shape[-1] * negative
    return (label.squeeze(-1).int(),)


def with_lonely(out: Tensor, lse: Tensor, v: Tensor, real: Tensor, seed: Tensor | None, rate: float) -> Tensor:
    """Add its own value to a real token that sees no other, out (x n e): the last n of the tokens of v (x m e); real (x n)."""
    n, m = out.shape[1], v.shape[1]
    alone = (bucket_lost(lse) & real).to(out.dtype)  # a softmax over one token
    if seed is not None:
        i = torch.arange(m - n, m, device=v.device)
        alone = alone * kept_weights(seed, _row_numbers(out), i, key_keys(seed, i), rate, out.dtype)
    return out + alone.unsqueeze(-1) * v[:, m - n :]


def _row_numbers(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)[:, None]


def kept_weights(seed: Tensor, row: Tensor, i: Tensor, key: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Return the factors of dropout: 0 for dropped weights of queries i, and 1 / (1 - rate) for others; all broadcast."""
    kept = kept_pairs_composite(query_keys(seed, row, i), key, rate)
    return kept.to(dtype) / (1 - rate)


def sorted_attention(
    q: Tensor, k: Tensor, v: Tensor, sees: SortedRange, *, own: bool, seed: Tensor | None = None, rate: float = 0.0
) -> BucketOutLse:
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
        if seed is not None:
            asking, keyed = _dropout_keys(seed, row, order, back, p)
            windows = [asking, *windows, *(keyed[j : j + count] for j in range(back + 1))]
        strip = partial(_tile, own=own, tiles=back + 1, rate=rate)
        out, lse = in_strips(strip, (queries[back:], spots, *windows), 0, p * p * (back + 1))
        there = (sees.place[:, r] + row * room).flatten()
        out = out.flatten(0, 1).index_select(0, there)
        lse = lse.flatten().index_select(0, there)
        found.append((out.view(x, n, e), lse.view(x, n)))
    return _merged(found)


def _dropout_keys(seed: Tensor, row: Tensor, order: Tensor, back: int, p: int) -> tuple[Tensor, Tensor]:
    """Return the keys of dropout of queries and of keys, in tiles (c p), for the tokens (x places) of sorted places."""
    asking = query_keys(seed, row, order).view(-1, p)
    there = pad(key_keys(seed, order).flatten(), (back * p, 0))
    return asking, there.view(-1, p)


def _tiles_of(y: Tensor, seen: Tensor, p: int) -> Tensor:
    """Collect the tokens (x n d) of the sorted places, in tiles (c p d)."""
    tokens = y.flatten(0, 1).index_select(0, seen)
    return tokens.unflatten(0, (-1, p))


def _tile(q: Tensor, spots: Tensor, *windows: Tensor, own: bool, tiles: int, rate: float) -> BucketOutLse:
    """Queries (c p d), the middle and half length of what they see in this round and those before it (c r+1 2 p), and tiles of
    keys, of values and of the places of the keys in the rounds before. With dropout, its keys of queries before these tiles,
    and its keys of keys behind them.

    Hidden pairs are marked by numbers, 0 where seen and 1 or more elsewhere: a CPU compares slowly. They are exact in
    float32 for rows of up to 2**23 tokens.
    """
    p = q.shape[1]
    kept = None
    if rate:
        asking, *windows = windows  # type: ignore[assignment]
        there = torch.cat(windows[3 * tiles :], -1)
        kept = kept_pairs_composite(asking[:, :, None], there[:, None], rate).to(q.dtype) / (1 - rate)
    k, v, at = (torch.cat(windows[j * tiles : (j + 1) * tiles], -2 if j < 2 else -1) for j in range(3))
    middle, half = spots[:, :, 0, :, None], spots[:, :, 1, :, None]
    here = torch.arange((1 - tiles) * p, p, device=q.device, dtype=q.dtype)
    hidden = _outside(here, middle[:, 0], half[:, 0]).relu_()
    if not own:
        hidden.diagonal((tiles - 1) * p, 1, 2).fill_(1)
    for r in range(1, spots.shape[1]):
        hidden -= _outside(at[:, r - 1, None], middle[:, r], half[:, r] + 1).clamp_max_(0)
    return bucket_weights(q, k, v, hidden, kept)


def _outside(place: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """Return how far places are outside of ranges, given by middle and half length; below zero inside."""
    distance = (place - middle).abs_()
    return distance.sub_(half)


def bucket_weights(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, kept: Tensor | None) -> BucketOutLse:
    """Compute the softmax of q . k where hidden is 0; it is at least 1 elsewhere. A row that sees nothing is 0.

    kept: factors of the weights, of dropout.
    """
    followed = transformed()
    s = q @ k.mT
    s = s + MASKED_SCORE * hidden if followed else s.add_(hidden, alpha=MASKED_SCORE)
    if followed or torch.compiler.is_compiling():  # which fuses these, and torch 2.11 compiles the Function into a wrong gradient
        weights = s.softmax(-1)
        lse = s.logsumexp(-1)
    else:
        weights, lse = BucketWeights.apply(s)
    if kept is not None:
        weights = weights * kept
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
