"""Attention inside of clusters by one kernel each way, for clusters that take few tokens: rows are loaded where they lie.

The gradients of a cluster need no more of a forward pass than which tokens it took, because one program has all its pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.bucket.bucket_launch import dense_rows, row_strides
from regard.ops.bucket.members import Members, by_kernels, gather_three, mean_of_members, sum_members, sum_three
from regard.ops.dense import sdpa_composite, sdpa_mask
from regard.ops.kernel_launch import KernelLaunch, present_slots, tensor_key
from regard.ops.triton_support import block_of, dot_precision
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads

MOST_MEMBERS = 128  # tokens of a cluster, whose pairs lie in the registers of a program
WIDEST_MEMBERS = {
    2: 1 << 14,
    4: 1 << 12,
}  # numbers in the queries of a cluster by their bytes: gradients need more registers beyond
QUERY_TILE = 64  # queries of a program
FORWARD_WARPS, GRADIENT_WARPS = 4, 8


def takes_clusters(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, backend: str) -> bool:
    """Return whether the kernels compute attention of q, k, v (b h n .) inside of clusters."""
    w = queries.index.shape[2]
    if w > MOST_MEMBERS or w != keys.index.shape[2] or not q.dtype == k.dtype == v.dtype or not by_kernels(q, backend):
        return False
    widest = block_of(max(q.shape[-1], v.shape[-1]), q.device)
    return block_of(w, q.device) * widest <= WIDEST_MEMBERS[q.element_size()]


def cluster_attention(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, scale: float) -> Tensor:
    """Return the mean over clusters of what a query gets from the keys of each that took it: q, k, v (b h n .), out (b h n e)."""
    return _ClusterFunction.apply(q, k, v, queries, keys, scale)


class _ClusterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, scale: float) -> Tensor:
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        key = _key(q, k, v, queries, keys, scale)
        found = v.new_empty(*queries.index.shape, v.shape[-1])
        _forward_launch(key, q, k, v)(q, k, v, queries.taken, keys.taken, *_marks(keys), found)
        ctx.save_for_backward(q, k, v)
        ctx.rest = key, queries, keys, scale
        return sum_members(found, queries, q.shape[1], True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), (key, queries, keys, scale) = ctx.saved_tensors, ctx.rest
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *_differentiable_clusters(q, k, v, queries, keys, scale, grad), None, None, None
        return *_cluster_grads(key, q, k, v, queries, keys, dense_rows(grad)), None, None, None


def _differentiable_clusters(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, scale: float, grad: Tensor) -> Any:
    """Return the gradients as functions of everything they depend on."""
    mask = None if keys.real is None else sdpa_mask(keys.real, q.dtype)

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        q_rows, k_rows, v_rows = gather_three(q, k, v, queries, keys, "torch")
        out = sdpa_composite(q_rows, k_rows, v_rows, None if mask is None else mask.bias, scale, False)
        out = out if mask is None else out.masked_fill(mask.empty.transpose(1, 2), 0)
        return (mean_of_members(out, queries, q.shape[1], "torch"),)

    return differentiable_grads(f, (q, k, v), (grad,))


def _key(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, scale: float) -> tuple[Any, ...]:
    masked = queries.real is not None, keys.real is not None
    return tensor_key(q), k.stride(), tensor_key(v), queries.index.shape, masked, scale, q.get_device(), dot_precision(q.dtype)


def _sizes(q: Tensor, v: Tensor, w: int) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    d, e, device = q.shape[-1], v.shape[-1], q.device
    widths = {"D": d, "E": e, "BD": block_of(d, device), "BE": block_of(e, device), "BW": block_of(w, device)}
    return {"PRECISION": dot_precision(q.dtype), **widths}


@signature_cache
def _forward_launch(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> KernelLaunch:
    from regard.ops.bucket import cluster_attention_kernels as kernels

    _, _, _, (rows, c, w), (_, masked), scale, device, _ = key
    sizes = {"MASKED": masked, **_sizes(q, v, w), "num_warps": FORWARD_WARPS}
    sizes["BM"] = min(QUERY_TILE, sizes["BW"])
    slots = present_slots([True] * 5 + [masked, True])
    numbers = (*row_strides(q, k, v), w, c, q.shape[1], float(scale))
    return KernelLaunch(kernels.attend_cluster, (rows * c, ceil_div(w, sizes["BM"])), slots, numbers, sizes, device)


@signature_cache
def _backward_launch(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> KernelLaunch:
    from regard.ops.bucket import cluster_attention_kernels as kernels

    _, _, _, (rows, c, w), masked, scale, device, *_ = key
    own = {"MASKED_QUERIES": masked[0], "MASKED_KEYS": masked[1]}
    sizes = {**own, **_sizes(q, v, w), "num_warps": GRADIENT_WARPS}
    slots = present_slots([True] * 7 + [*masked] + [True] * 3)
    numbers = (*row_strides(q, k, v, grad), q.shape[2], w, c, q.shape[1], float(scale))
    return KernelLaunch(kernels.cluster_gradients, (rows * c,), slots, numbers, sizes, device)


def _marks(*members: Members) -> list[Tensor]:
    """Return the marks of real members, where there are any."""
    return [own.marked for own in members if own.marked is not None]


def _cluster_grads(
    key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, grad: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    launch = _backward_launch((*key, grad.stride()), q, k, v, grad)
    rows, c, w = queries.index.shape
    dq, dk, dv = [x.new_empty(rows, c, w, x.shape[-1]) for x in (q, k, v)]
    launch(q, k, v, grad, queries.times, queries.taken, keys.taken, *_marks(queries, keys), dq, dk, dv)
    return sum_three(dq, dk, dv, queries, keys, q.shape[1])
