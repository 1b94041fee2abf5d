"""Blocks of queries that see their own block of keys and one that a Sinkhorn sort mixes, from scores to outputs: few launches.

The definition in plain operations is in `regard.mixers.sinkhorn`. One autograd function, because of the host: a call is eight
launches, its gradients eleven, or seven and nine where blocks do not lie in one piece; beyond 128 blocks, one more an iteration.
Gradients of the sums of blocks are added to those of keys where these are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.balance import LARGEST_WIDE, balance_pass, balance_pass_grads
from regard.ops.delta.unit_features import SHORTEST_NORM
from regard.ops.kernel_launch import KernelLaunch, tensor_key
from regard.ops.mix_blocks import add_mixed, block_strides, key_and_value_products, mix_keys_and_values, product_slices
from regard.ops.triton_support import block_of, dot_precision, kernel_config
from regard.ops.two_blocks import beside_heads, block_constants, dense_blocks, share_row_sizes
from regard.patterns.tiles import MASKED_SCORE, ceil_div
from regard.transforms import differentiable_grads

WIDEST_SORT = 64  # of directions: what shared memory holds of the matrix of a head and of tiles beside it


class SortedCall(NamedTuple):
    """One call: blocks q, k (b h c p d), v (b h c p e), all full."""

    q: Tensor
    k: Tensor
    v: Tensor
    sort: Tensor  # (h d d)
    noise: Tensor | None  # (b h c c) exponential, in float32
    temperature: float
    iterations: int


def takes_sinkhorn_attention(q: Tensor, k: Tensor, c: int) -> bool:
    """Return whether `sinkhorn_attention` computes blocks that `takes_two_blocks` allows, c of them."""
    return q.shape == k.shape and q.shape[-1] <= WIDEST_SORT and c <= LARGEST_WIDE


def sinkhorn_attention(call: SortedCall, plain: Callable[..., Tensor]) -> Tensor:
    """Return out (b h c p e); plain: the same function of q, k, v and sort in differentiable operations."""
    return _SortedAttention.apply(call, plain, *call[:4])


def _key(call: SortedCall) -> tuple:
    noisy = call.noise is not None
    same = call.temperature, call.iterations, torch.get_float32_matmul_precision(), call.q.get_device()
    return *tensor_key(call.q), *tensor_key(call.k), *tensor_key(call.v), call.sort.dtype, noisy, *same


def _score_constants(kernel: str, d: int, device: torch.device) -> dict[str, Any]:
    """Return what a kernel of scores is compiled for: tiles of BC blocks."""
    wide = {"D": d, "BD": block_of(d, device)}
    return {"PRECISION": dot_precision(torch.float32), **wide, **kernel_config(kernel, "any", device)}


@signature_cache
def _forward_launches(key: Any, call: SortedCall, k2: Tensor, v2: Tensor, out: Tensor) -> list[KernelLaunch]:  # noqa: ARG001
    """Return the launches of directions, scores, weights and outputs."""
    from regard.ops import sorted_scores_kernels as scores
    from regard.ops import two_blocks_kernels as kernels

    (b, h, c, p, d), device = call.q.shape, call.q.get_device()
    own = {"NOISY": call.noise is not None, **_score_constants("block_scores", d, call.q.device)}
    tiles, size = ceil_div(c, own["BC"]), {"BP": block_of(p, call.q.device), "D": d, "BD": own["BD"]}
    some, shares, rows = share_row_sizes(call.q.new_empty(b, h, c, c, dtype=torch.float32))
    strides = block_strides(call.q, call.k, call.v, k2, v2, out)
    blocks = (b * h * c,)
    directions = (block_strides(call.k)[0], h, c, p, SHORTEST_NORM)
    found: tuple[tuple[Any, Any, Any, Any, Any], ...] = (
        (scores.block_directions, blocks, range(3), directions, size),
        (scores.block_scores, (b * h * tiles,), range(4), (h, c, tiles, 1 / call.temperature), own),
        (kernels.share_weights, some, range(3), (*shares, MASKED_SCORE), rows),
        (
            kernels.two_blocks_forward,
            blocks,
            range(8),
            (*strides, h, c, p, d**-0.5),
            block_constants("two_blocks_forward", call.q, call.v, False, True),
        ),
    )
    return [KernelLaunch(kernel, grid, slots, numbers, own, device) for kernel, grid, slots, numbers, own in found]


@signature_cache
def _backward_launches(
    key: Any,  # noqa: ARG001
    call: SortedCall,
    tensors: tuple[Tensor, ...],
    parts: int,
) -> tuple[list[KernelLaunch], int]:
    """Return the launches of gradients of blocks, weights and scores, and the one that adds to those of keys.

    parts: of the gradients of weights. The number beside the launches: tiles of scores, each of which adds to the gradient of
    the sort.
    """
    from regard.ops import sorted_scores_kernels as scores
    from regard.ops import two_blocks_kernels as kernels

    (b, h, c, p, d), device, dk = call.q.shape, call.q.get_device(), tensors[8]
    own = _score_constants("block_score_grads", d, call.q.device)
    tiles, size = ceil_div(c, own["BC"]), {"BP": block_of(p, call.q.device), "D": d, "BD": own["BD"]}
    attend = block_constants("two_blocks_backward", call.q, call.v, False, True)
    some, shares, rows = share_row_sizes(call.q.new_empty(b, h, c, c, dtype=torch.float32))
    numbers = (*block_strides(*tensors), h, c, p, d**-0.5)
    found: tuple[tuple[Any, Any, Any, Any, Any], ...] = (
        (kernels.two_blocks_backward, (b * h * c,), range(15), numbers, attend),
        (kernels.share_weights_grads, some, range(5), shares, {"PARTS": parts, **rows}),
        (scores.block_score_grads, (b * h * tiles,), range(6), (h, c, tiles, 1 / call.temperature, SHORTEST_NORM), own),
        (scores.add_to_blocks, (b * h * c,), range(2), (block_strides(dk)[0], h, c, p), size),
    )
    launches = [KernelLaunch(kernel, grid, slots, numbers, own, device) for kernel, grid, slots, numbers, own in found]
    return launches, tiles


class _SortedAttention(torch.autograd.Function):
    """The kernels and the products that mix blocks, for autograd."""

    @staticmethod
    def forward(ctx: Any, call: SortedCall, plain: Callable[..., Tensor], *given: Tensor) -> Tensor:
        q, k, v = (dense_blocks(x) for x in given[:3])
        sort = given[3].contiguous()
        call = call._replace(q=q, k=k, v=v, sort=sort)
        b, h, c, p, d = q.shape
        sums = torch.empty(2, b, h, c, d, dtype=torch.float32, device=q.device)
        logits = torch.empty(b, h, c, c, dtype=torch.float32, device=q.device)
        weights, mass = k.new_empty(b * h, c, c), logits.new_empty(b, h, c)
        k2, v2 = k.new_empty(b, h, c, p, d), v.new_empty(b, h, c, p, v.shape[-1])
        out, lse = beside_heads(v2), logits.new_empty(b, h, c, p)
        key = _key(call)
        directions, scores, share, attend = _forward_launches(key, call, k2, v2, out)
        total, units = sums.unbind()
        directions(k, total, units)
        scores(units, sort, logits if call.noise is None else call.noise, logits)
        shares, kept = balance_pass(logits, call.iterations)
        share(shares, weights, mass)
        mix_keys_and_values(key, weights, k, v, k2, v2)
        attend(q, k, v, k2, v2, mass, out, lse)
        ctx.save_for_backward(q, k, v, sort, total, units, logits, kept, shares, k2, v2, weights, mass, out, lse)
        ctx.call, ctx.plain = call._replace(q=None, k=None, v=None, sort=None, noise=None), plain  # type: ignore[arg-type]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sort, total, units, logits, kept, shares, k2, v2, weights, mass, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return None, None, *differentiable_grads(lambda *x: (ctx.plain(*x),), (q, k, v, sort), (grad,))
        call = ctx.call._replace(q=q, k=k, v=v, sort=sort)
        b, h, _, _, d = q.shape
        grad = dense_blocks(grad)
        dq, dk, dv, dk2, dv2 = (torch.empty_like(x) for x in (q, k, v, k2, v2))
        tensors = (q, k, v, k2, v2, out, grad, dq, dk, dv, dk2, dv2)
        key, parts = _key(call), product_slices(k, v)
        (blocks, share, scores, add), tiles = _backward_launches((*key, grad.stride(), parts), call, tensors, parts)
        d_mass, d_shares = torch.empty_like(mass), torch.empty_like(shares)
        blocks(q, k, v, k2, v2, mass, out, grad, lse, dq, dk, dv, dk2, dv2, d_mass)
        by_block = key_and_value_products(key, k, v, dk2, dv2)
        share(shares, *by_block, d_mass, d_shares)
        d_logits = balance_pass_grads(logits, kept, d_shares)
        d_sums, d_sort = torch.empty_like(total), units.new_empty(b, h, tiles, d, d)
        scores(units, total, sort, d_logits, d_sums, d_sort)
        add(dk, d_sums)
        dk, dv = add_mixed(key, weights, (k, v), dk, dv, dk2, dv2)
        return None, None, dq, dk, dv, d_sort.sum((0, 2)).to(sort.dtype)
