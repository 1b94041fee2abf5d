"""Launch the Triton kernels of attention over all pairs, forward and backward, on ordinary tensors without autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.dropout_hash import keep_threshold
from regard.ops.kernel_launch import launch_kernel
from regard.ops.pair.additive_launch import additive_backward, additive_forward_pass
from regard.ops.pair.pair_op import BY_COUNT, SOFTMAX, PairCall, key_positions, pair_dropout_keys, query_positions
from regard.ops.triton_support import HALVES, SMALLEST_DOT, block_of, dot_precision, kernel_config
from regard.patterns.tiles import ceil_div

PairGrads = tuple[Tensor | None, ...]  # of q, k, v, w, table, share, x and y
NOT_CAUSAL, CAUSAL_BY_PLACE, CAUSAL_BY_POSITION = 0, 1, 2  # as in triton_kernels


class MaskTensors(NamedTuple):
    """What all kernels read beside queries, keys and values; a tensor that is not needed is any other."""

    at: Tensor  # (b n) int32
    key_at: Tensor  # (b m) int32
    valid: Tensor  # (b m) bool
    drawn: Tensor  # (b h n) int32, of dropout
    keyed: Tensor  # (m) int32


def mask_tensors(call: PairCall, unused: Tensor) -> MaskTensors:
    """Return positions, padding and keys of dropout as kernels read them."""
    b, n, m = len(call.v), call.q.shape[2], call.v.shape[2]
    at = key_at = unused
    if call.at is not None or _seen(call) == CAUSAL_BY_POSITION:
        at = query_positions(call).expand(b, n).to(torch.int32).contiguous()
    if _seen(call) == CAUSAL_BY_POSITION:
        key_at = key_positions(call).expand(b, m).to(torch.int32).contiguous()
    valid = unused if call.valid is None else call.valid.expand(b, m).contiguous()
    return MaskTensors(at, key_at, valid, *(pair_dropout_keys(call) or (unused, unused)))


def _seen(call: PairCall) -> int:
    """Return how causal queries find their keys: see `triton_kernels`."""
    if not call.causal:
        return NOT_CAUSAL
    return CAUSAL_BY_PLACE if call.at is None and call.key_at is None else CAUSAL_BY_POSITION


def mask_constants(call: PairCall) -> dict[str, Any]:
    """Return what masks and heads compile to, in all kernels."""
    return {
        "SHARE": call.q.shape[1] // call.v.shape[1],
        "SEEN": _seen(call),
        "VALIDS": call.valid is not None,
        "DROP": call.seed is not None,
        "E": call.v.shape[-1],
        "BE": block_of(call.v.shape[-1], call.v.device),
        "PRECISION": dot_precision(call.v.dtype),
    }


def drop_numbers(call: PairCall) -> tuple[int, float]:
    """Return the smallest hash that dropout keeps, and the factor of what it keeps."""
    return keep_threshold(call.dropout), 1 / (1 - call.dropout) if call.dropout < 1 else 0.0


def _config(kernel: str, call: PairCall) -> dict[str, Any]:
    """Return the tile sizes of a kernel for the type and the widest head of a call."""
    kind = "half" if call.v.dtype in HALVES else "float32"
    widest = max(call.q.shape[-1] if call.w is None else 1, call.v.shape[-1])
    return kernel_config(kernel, f"{kind} {block_of(widest, call.v.device)}", call.v.device)


def factor_block(call: PairCall) -> int:
    """Return the keys of a tile where scores are products of factors: the columns of y, as a power of two."""
    assert call.y is not None
    return max(SMALLEST_DOT, 1 << (call.y.shape[-1] - 1).bit_length())


class _Tiles(NamedTuple):
    """How a call is cut for one kernel."""

    config: dict[str, Any]
    step: int  # keys of a tile
    constants: dict[str, Any]


def _tiles(config: dict[str, Any], call: PairCall, masks: dict[str, Any]) -> _Tiles:
    config = dict(config)
    step = config["BN"]
    ragged = False
    if call.y is not None:
        step, config["BN"] = call.y.shape[-1], factor_block(call)
        ragged = step != config["BN"]
    d = call.q.shape[-1]
    constants = masks | {
        "SHARE_K": call.q.shape[1] // call.k.shape[1],
        "DOT": d > 0,
        "TABLE": call.table is not None,
        "FACTORS": call.y is not None,
        "RELU": call.norm != SOFTMAX,
        "MASKS": ragged or masks["VALIDS"] or masks["SEEN"] == CAUSAL_BY_POSITION,
        "ATS": call.at is not None or masks["SEEN"] == CAUSAL_BY_POSITION,
        "D": d,
        "Y": 1 if call.y is None else step,
        "BD": block_of(max(d, 1), call.v.device),
    }
    return _Tiles(config, step, constants)


def _parts(call: PairCall, unused: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], int]:
    """Return the table, its shares, x and y, their strides (h x, b h n, b h n), and the rows of the table."""
    table, x, y = (None if part is None else dense_rows(part) for part in (call.table, call.x, call.y))
    shares = unused if table is None else _shares(call)
    strides = (0, 0) if table is None else table.stride()[:2]
    more = (0, 0, 0, 0, 0, 0) if x is None or y is None else row_strides(x, y)
    tensors = tuple(unused if part is None else part for part in (table, shares, x, y))
    return tensors, (*strides, *more), 1 if table is None else table.shape[1]


def _shares(call: PairCall) -> Tensor:
    """Return the factors of the table (h) in float32."""
    if call.share is None:
        return torch.ones(call.q.shape[1], device=call.v.device)
    return call.share.float().contiguous()


def pair_forward_pass(call: PairCall) -> tuple[Tensor, Tensor]:
    """Return out (b h n e), and what the backward pass needs of every query (b h n): see `triton_kernels`."""
    from regard.ops.pair import triton_kernels as kernels

    (b, h, n, _), m, e = call.q.shape, call.v.shape[2], call.v.shape[-1]
    out = by_token(call.v, b, n, h, e)
    stat = call.v.new_empty(b, h, n, dtype=torch.float32)
    masks = mask_tensors(call, stat)
    constants = mask_constants(call)
    if call.w is not None:
        config = _config("additive_forward", call)
        additive_forward_pass(call, (out, stat), masks, drop_numbers(call), constants, config)
        return out, stat
    q, k, v = (dense_rows(x) for x in call[:3])
    cut = _tiles(_config("pair_forward", call), call, constants)
    parts, strides, rows = _parts(call, stat)
    tiles = ceil_div(n, cut.config["BM"])
    sizes = (n, m, cut.step, call.start, h, tiles, rows, float(call.scale))
    numbers = (*row_strides(q, k, v, out), *strides, *sizes, *drop_numbers(call))
    own = {"COUNT": call.norm == BY_COUNT, **cut.constants, **cut.config}
    launch_kernel(kernels.pair_forward, (b * h * tiles,), (q, k, v, out, stat, *parts, *masks), numbers, own)
    return out, stat


def pair_backward_pass(call: PairCall, out: Tensor, stat: Tensor, grad: Tensor, need_table: bool) -> PairGrads:
    """Return the gradients of q, k, v, w, table, share, x and y; None for those that a call has not."""
    masks, constants = mask_tensors(call, stat), mask_constants(call)
    grad = dense_rows(grad)
    if call.w is not None:
        configs = [_config("additive_query_grads", call), _config("additive_key_grads", call)]
        return additive_backward(call, (out, stat, grad), masks, drop_numbers(call), constants, configs)
    q, k, v = (dense_rows(x) for x in call[:3])
    inputs = call._replace(q=q, k=k, v=v)
    delta, dq, dx, dy = _query_grads(inputs, (out, stat, grad), masks, constants)
    dk, dv = _key_grads(inputs, (stat, delta, grad), masks, constants)
    dt = d_share = None
    if need_table and call.table is not None:
        dt, d_share = _table_grads(inputs, (stat, delta, grad), masks, constants)
    return dq, dk, dv, None, dt, d_share, dx, dy


def _query_grads(
    call: PairCall, found: tuple[Tensor, Tensor, Tensor], masks: MaskTensors, constants: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    from regard.ops.pair import pair_grad_kernels as kernels

    out, stat, grad = found
    q, k, v = call[:3]
    (b, h, n, d), m = q.shape, v.shape[2]
    cut = _tiles(_config("pair_query_grads", call), call, constants)
    parts, strides, rows = _parts(call, stat)
    tiles = ceil_div(n, cut.config["BM"])
    delta, dq = torch.empty_like(stat), by_token(q, b, n, h, d)
    x_grad = None if call.x is None else call.x.new_zeros(call.x.shape, dtype=torch.float32)
    y_grad = None if call.y is None else torch.empty_like(call.y, memory_format=torch.contiguous_format)
    sizes = (n, m, cut.step, call.start, h, tiles, rows, float(call.scale))
    numbers = (*row_strides(q, k, v, out, grad, dq), *strides, *sizes, *drop_numbers(call))
    tensors = (q, k, v, out, grad, stat, delta, dq, x_grad, y_grad, *parts, *masks)
    width = 1 if call.x is None else call.x.shape[-1]
    own = {"COUNT": call.norm == BY_COUNT, "X": width, **cut.constants, **cut.config}
    launch_kernel(kernels.pair_query_grads, (b * h * tiles,), tensors, numbers, own)
    if x_grad is not None and call.x is not None:
        x_grad = x_grad.to(call.x.dtype)
    return delta, dq, x_grad, y_grad


def _key_grads(
    call: PairCall, found: tuple[Tensor, Tensor, Tensor], masks: MaskTensors, constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    from regard.ops.pair import pair_grad_kernels as kernels

    stat, delta, grad = found
    q, k, v = call[:3]
    (b, h, n, d), (m, e) = q.shape, v.shape[2:]
    cut = _tiles(_config("pair_key_grads", call), call, constants)
    parts, strides, rows = _parts(call, stat)
    tiles = ceil_div(m, cut.step)
    dk = by_token(k, b, m, h, d, k.dtype if k.shape[1] == h else torch.float32)
    dv = by_token(v, b, m, h, e, v.dtype if v.shape[1] == h else torch.float32)
    sizes = (n, m, cut.step, call.start, h, tiles, rows, float(call.scale))
    numbers = (*row_strides(q, k, v, grad, dk, dv), *strides, *sizes, *drop_numbers(call))
    tensors = (q, k, v, grad, stat, delta, dk, dv, *parts, *masks)
    launch_kernel(kernels.pair_key_grads, (b * h * tiles,), tensors, numbers, {**cut.constants, **cut.config})
    return sum_shared(dk, k), sum_shared(dv, v)


def sum_shared(grad: Tensor, x: Tensor) -> Tensor:
    """Sum gradients (b h m .) over the query heads that share a head of x (b g m .)."""
    if grad.shape[1] == x.shape[1]:
        return grad
    return grad.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)


def _table_grads(
    call: PairCall, found: tuple[Tensor, Tensor, Tensor], masks: MaskTensors, constants: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    from regard.ops.pair import pair_grad_kernels as kernels

    assert call.table is not None
    stat, delta, grad = found
    q, k, v, table = *call[:3], dense_rows(call.table)
    (b, h, n, _), m = q.shape, v.shape[2]
    cut = _tiles(_config("pair_table_grads", call), call, constants)
    unused = ("TABLE", "FACTORS", "RELU", "MASKS", "ATS", "Y")
    own = {name: value for name, value in cut.constants.items() if name not in unused}
    tiles, key_tiles = ceil_div(n, cut.config["BM"]), ceil_div(m, cut.config["BN"])
    dt, parts = table.new_zeros(table.shape), stat.new_empty(h, tiles * key_tiles)
    sizes = (n, m, call.start, h, tiles, key_tiles, b, table.shape[1], float(call.scale))
    numbers = (*row_strides(q, k, v, grad), *table.stride()[:2], *dt.stride()[:2], *sizes, *drop_numbers(call))
    tensors = (q, k, v, grad, stat, delta, dt, parts, table, _shares(call), masks.valid, masks.drawn, masks.keyed)
    launch_kernel(kernels.pair_table_grads, (h * tiles * key_tiles,), tensors, numbers, {**own, **cut.config})
    return dt, None if call.share is None else parts.sum(1).to(call.share.dtype)
