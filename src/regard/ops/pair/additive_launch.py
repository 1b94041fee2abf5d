"""Launch the Triton kernels of additive attention: exponentials of single tokens, then tiles of pairs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.pair.pair_op import PairCall
from regard.ops.triton_support import interpreting
from regard.patterns.tiles import ceil_div

LARGEST_EXPONENT = 124.0  # of 2: no exponential is infinite, or less than the smallest float32
WHOLE_TILES = 256  # tokens: a multiple of every tile
DOUBLED = 2 / math.log(2)


def token_exponentials(x: Tensor) -> Tensor:
    """Return exp(2 x) of x (b h n f), transposed: (b h f n) in float32, f and n filled up with zeros: see `additive_kernels`."""
    b, h, n, f = x.shape
    room = ceil_div(n, WHOLE_TILES) * WHOLE_TILES
    found = torch.empty(b, h, f + f % 2, room, dtype=torch.float32, device=x.device)
    found[:, :, f:] = 0.0
    found[..., n:] = 0.0
    own = found[:, :, :f, :n]
    torch.mul(x.mT, DOUBLED, out=own)
    own.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp2_()
    return found


def value_columns(x: Tensor) -> Tensor:
    """Return x (b h n e) transposed: (b h e n) in float32, n filled up with zeros."""
    return torch.nn.functional.pad(x.mT.float(), (0, -x.shape[2] % WHOLE_TILES)).contiguous()


def base_two_weights(w: Tensor) -> Tensor:
    """Return weights (h f) of the reciprocals in the kernels, as many as there are exponentials."""
    scaled = w.float() * -DOUBLED
    return torch.nn.functional.pad(scaled, (0, w.shape[-1] % 2)).contiguous()


def additive_forward_pass(
    call: PairCall,
    found: tuple[Tensor, Tensor],
    masks: tuple[Tensor, ...],
    numbers: tuple[int, float],
    constants: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Write out and the log-sum-exp, the tensors `found`."""
    from regard.ops.pair import additive_kernels as kernels

    assert call.w is not None
    v, (out, stat) = dense_rows(call.v), found
    (b, h, n, _), m = call.q.shape, v.shape[2]
    queries, keys = token_exponentials(call.q), token_exponentials(call.k)
    tiles = ceil_div(n, config["BM"])
    tensors = (queries, keys, base_two_weights(call.w), v, out, stat, *masks)
    sizes = (n, m, queries.shape[3], keys.shape[3], call.start, h, tiles)
    own = {"FEATURES": queries.shape[2], "FAST": not interpreting(), **constants, **config}
    launch_kernel(kernels.additive_forward, (b * h * tiles,), tensors, (*row_strides(v, out), *sizes, *numbers), own)


def additive_backward(
    call: PairCall,
    found: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor, ...],
    numbers: tuple[int, float],
    constants: dict[str, Any],
    configs: list[dict[str, Any]],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and w, and None four times, given out, its log-sum-exp and the gradient of out."""
    from regard.ops.pair import additive_kernels as kernels

    assert call.w is not None
    v, (out, stat, grad), (of_queries, of_keys) = call.v, found, configs
    (b, h, n, f), (m, e) = call.q.shape, v.shape[2:]
    queries, keys = token_exponentials(call.q), token_exponentials(call.k)
    scaled = base_two_weights(call.w)
    more = constants | {"FEATURES": queries.shape[2], "FAST": not interpreting()}
    without = {name: value for name, value in more.items() if name != "PRECISION"}
    query_sums, key_sums, weighted = (torch.zeros_like(x) for x in (queries, keys, queries))
    delta, values, grads = torch.empty_like(stat), value_columns(v), value_columns(grad)
    tiles, key_tiles = ceil_div(n, of_queries["BM"]), ceil_div(m, of_keys["BN"])
    lengths = (n, m, queries.shape[3], keys.shape[3], call.start, h)
    launch_kernel(
        kernels.additive_query_grads,
        (b * h * tiles,),
        (queries, keys, scaled, values, out, grad, grads, stat, delta, query_sums, weighted, *masks),
        (*row_strides(out, grad), *lengths, tiles, *numbers),
        {**without, **of_queries},
    )
    dv = by_token(v, b, m, h, e, v.dtype if v.shape[1] == h else torch.float32)
    launch_kernel(
        kernels.additive_key_grads,
        (b * h * key_tiles,),
        (queries, keys, scaled, values, grad, grads, stat, delta, key_sums, dv, *masks),
        (*row_strides(grad, dv), *lengths, key_tiles, *numbers),
        {**more, **of_keys},
    )
    dw = weighted[:, :, :f, :n].sum(-1).sum(0).mul_(-2)
    factors = 4 * call.w.float()[:, :, None]
    dq, dk = (sums[:, :, :f, : x.shape[2]].mul_(factors).mT.to(x.dtype) for sums, x in ((query_sums, call.q), (key_sums, call.k)))
    if v.shape[1] != h:
        dv = dv.unflatten(1, (v.shape[1], -1)).sum(2).to(v.dtype)
    return dq, dk, dv, dw.to(call.w.dtype), None, None, None, None
