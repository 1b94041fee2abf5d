"""Blocks of queries that see their own block of keys and a mixture of all blocks, on a CPU: products in buffers that are kept.

The definition is `mixed_blocks` in plain operations. Keys that are not seen by any query have a bias of MASKED_SCORE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.ops.budget import budget
from regard.ops.tile.buffers import scratch_buffers
from regard.patterns.tiles import MASKED_SCORE
from regard.transforms import differentiable_grads, needs_plain_ops


def mixed_blocks(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, lack: Tensor | None, bias: Tensor, causal: bool) -> Tensor:
    """Return out (b h u p e): one softmax over the scores of k_i and of k'_i = sum_j weights_ij k_j, each with its bias.

    q (b h u p d), k (b h c p d), v (b h c p e) with c >= u; weights (b h u c); lack (b h u p): factors of the mixed keys and
    values; bias (b h u 2p) of the own keys and the mixed ones. Causal: of its own block a query sees the keys up to its place.
    """
    u, p = q.shape[2:4]
    own = [x[:, :, :u] for x in (k, v)]
    mixed = [(weights @ x.flatten(3)).unflatten(3, x.shape[3:]) for x in (k, v)]
    if lack is not None:
        mixed = [x * lack[..., None] for x in mixed]
    keys, values = (torch.cat(pair, 3) for pair in zip(own, mixed, strict=True))
    scores = q @ keys.mT * q.shape[-1] ** -0.5 + bias[..., None, :]
    if causal:
        scores = scores + _future(p, scores)
    return scores.softmax(-1) @ values


def _future(p: int, like: Tensor) -> Tensor:
    """Return what hides later keys of the own block, (p 2p)."""
    hidden = torch.full((p, p), MASKED_SCORE, dtype=like.dtype, device=like.device).triu(1)
    return pad(hidden, (0, p))


def takes_mixed_blocks(*tensors: Tensor) -> bool:
    """Return whether the products in buffers compute these tensors."""
    kinds = {x.dtype for x in tensors}
    plain = torch.compiler.is_compiling() or needs_plain_ops()
    return tensors[0].device.type == "cpu" and not plain and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}


def mixed_blocks_in_buffers(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, lack: Tensor | None, bias: Tensor, causal: bool
) -> Tensor:
    """Compute `mixed_blocks` a few blocks of one head at a time. Neither scores nor weights are kept for the backward pass."""
    return _MixedBlocks.apply(q, k, v, weights, lack, bias, causal)


class _Strip(NamedTuple):
    """Hold some blocks of one head: queries (u p d); keys (u 2p d) and values (u 2p e), own and mixed; bias (u 1 2p)."""

    at: tuple[int, int, slice]
    q: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor

    def weights(self, future: Tensor | None) -> Tensor:
        """Return the weights (u p 2p), in a buffer."""
        u, p, d = self.q.shape
        scores = scratch_buffers(self.q.device)("s", self.q.dtype, u, p, 2 * p)
        scores.copy_(self.bias) if future is None else torch.add(self.bias, future, out=scores)
        scores.baddbmm_(self.q, self.keys.mT, alpha=d**-0.5)
        return torch.softmax(scores, -1, out=scores)


def _strips(q: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor) -> Iterator[_Strip]:
    """Cut every head into strips whose scores fit a cache. Own and mixed blocks are laid side by side in buffers."""
    b, h, u, p, _ = q.shape
    size = max(1, budget(q.device).tile_scores // (8 * p * p))
    scratch = scratch_buffers(q.device)
    for row, head, first in product(range(b), range(h), range(0, u, size)):
        at = row, head, slice(first, min(first + size, u))
        both = []
        for name, (own, mixed) in zip("kv", pairs, strict=True):
            pair = scratch(name, q.dtype, at[2].stop - first, 2, p, own.shape[-1])
            pair[:, 0], pair[:, 1] = own[at], mixed[at]
            both.append(pair.flatten(1, 2))
        yield _Strip(at, q[at], both[0], both[1], bias[at][:, None])


class _MixedBlocks(torch.autograd.Function):
    """The products for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, lack: Tensor | None, bias: Tensor, causal: bool
    ) -> Tensor:
        b, h, u, p, _ = q.shape
        k2, v2 = (_mixed(x, weights, lack) for x in (k, v))
        future = _future(p, q) if causal else None
        out = q.new_empty(b, u, p, h, v.shape[-1]).permute(0, 3, 1, 2, 4)  # the heads of a token side by side
        scratch = scratch_buffers(q.device)
        for strip in _strips(q, ((k, k2), (v, v2)), bias):
            out[strip.at] = scratch.bmm("y", strip.weights(future), strip.values, q.dtype)
        ctx.save_for_backward(q, k, v, weights, lack, bias, k2, v2)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, lack, bias, k2, v2 = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            plain = partial(mixed_blocks, causal=ctx.causal)
            return *differentiable_grads(lambda *x: (plain(*x),), (q, k, v, weights, lack, bias), (up,)), None
        future = _future(q.shape[3], q) if ctx.causal else None
        dq, d_bias, dk2, dv2 = (torch.empty(x.shape, dtype=x.dtype) for x in (q, bias, k2, v2))
        dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (k, v))
        for strip in _strips(q, ((k, k2), (v, v2)), bias):
            _strip_gradients(strip, strip.weights(future), up[strip.at], dq, ((dk, dk2), (dv, dv2)), d_bias)
        d_weights, d_lack = torch.zeros_like(weights), None
        if lack is not None:
            d_lack = (torch.linalg.vecdot(dk2, k2) + torch.linalg.vecdot(dv2, v2)) / lack
            dk2, dv2 = dk2.mul_(lack[..., None]), dv2.mul_(lack[..., None])
        for at in product(range(q.shape[0]), range(q.shape[1])):
            for x, grad, total in ((k, dk2, dk), (v, dv2, dv)):
                rows = grad[at].flatten(1)
                d_weights[at].addmm_(rows, x[at].reshape(-1, rows.shape[1]).mT)
                total[at].flatten(1).addmm_(weights[at].mT, rows)
        return dq, dk, dv, d_weights, d_lack, d_bias, None


def _mixed(x: Tensor, weights: Tensor, lack: Tensor | None) -> Tensor:
    """Return the mixtures (b h u p .) of the blocks of x (b h c p .)."""
    b, h, u, c = weights.shape
    found = x.new_empty(b, h, u, *x.shape[3:])
    for at in product(range(b), range(h)):
        torch.mm(weights[at], x[at].reshape(c, -1), out=found[at].flatten(1))
    return found if lack is None else found.mul_(lack[..., None])


def _strip_gradients(
    strip: _Strip, weights: Tensor, up: Tensor, dq: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], d_bias: Tensor
) -> None:
    """Write the gradients of the queries, of both blocks of keys and of values, and of the bias of a strip; up (u p e)."""
    at, scale, scratch = strip.at, strip.q.shape[-1] ** -0.5, scratch_buffers(up.device)
    p = strip.q.shape[1]
    d_values = scratch.bmm("y", weights.mT, up, up.dtype)
    for total, part in zip(pairs[1], d_values.split(p, 1), strict=True):
        total[at] = part
    grads = scratch.bmm("d", up, strip.values.mT, up.dtype)
    torch._softmax_backward_data(grads, weights, -1, up.dtype, grad_input=grads)
    torch.sum(grads, 1, out=d_bias[at])
    dq[at].baddbmm_(grads, strip.keys, beta=0, alpha=scale)
    d_keys = scratch.bmm("y", grads.mT, strip.q, up.dtype)
    for total, part in zip(pairs[0], d_keys.split(p, 1), strict=True):
        torch.mul(part, scale, out=total[at])
