"""The backend "triton": bucketed attention by kernels that load rows through the sorted order. One sort serves all rounds.

Memory beside inputs and outputs: six 32-bit integers for every token, head and round (three if there is one round), and a
float32 copy of the output, or of the gradients, where there are several rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, key_factors, label_keys, row_strides, sorted_places
from regard.ops.bucket.bucket_op import BUCKET_TENSORS, SHORTEST, BucketCall, LabelCall
from regard.ops.bucket.torch import TorchBuckets
from regard.ops.dropout_hash import head_numbers, keep_threshold, key_keys, query_keys
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, WIDEST_HEAD, block_of, dot_precision, kernel_config, triton_cannot_run
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

MOST_ROUNDS = 16  # a round has kernels of its own
PRODUCT_BLOCK = 64  # rows of a program that multiplies outputs and their gradients


class Found(NamedTuple):
    """What a forward pass leaves for the backward pass."""

    out: Tensor  # (b h n e)
    lse: Tensor  # (b h n) base 2, in float32
    places: Tensor  # (3 or 6, b h r n) int32: see `token_places` in triton_kernels
    short: Tensor  # (b g n) 1 / |k|, in float32; (0) without unit keys


class TritonBuckets:
    """Sorted tiles in fused kernels: float16, bfloat16 and float32 on CUDA devices."""

    name = "triton"
    devices = ("cuda",)

    def refuses(self, call: BucketCall | LabelCall) -> str | None:
        if isinstance(call, LabelCall):
            wide = call.k.shape[-1] > WIDEST_HEAD
            why = f"its kernels take keys of up to {WIDEST_HEAD} dimensions" if wide else None
            return triton_cannot_run(call.k, call.directions) or why
        if why := triton_cannot_run(call.q, call.k, call.v):
            return why
        if not call.q.dtype == call.k.dtype == call.v.dtype:
            return "its kernels take queries, keys and values of one type"
        if max(call.q.shape[-1], call.v.shape[-1]) > WIDEST_HEAD:
            return f"its kernels take heads of up to {WIDEST_HEAD} dimensions"
        if call.labels.shape[2] > MOST_ROUNDS:
            return f"its kernels take up to {MOST_ROUNDS} rounds, not {call.labels.shape[2]}"
        return None

    def forward(self, call: BucketCall) -> Tensor:
        if needs_plain_ops():
            return TorchBuckets().forward(call)
        if torch.compiler.is_compiling():
            return _operator(*call)[0]
        return _BucketFunction.apply(*call)

    def labels(self, call: LabelCall) -> Tensor:
        if needs_plain_ops():
            return TorchBuckets().labels(call)
        if torch.compiler.is_compiling():
            return _label_operator(*call)
        return label_keys(call)


def _dropout_keys(call: BucketCall, none: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of dropout, of queries (b h n) and of keys (n); `none` twice without dropout."""
    if call.seed is None:
        return none, none
    b, h, n, _ = call.q.shape
    i = torch.arange(n, device=call.q.device)
    heads = head_numbers(b, h, slice(None), call.q.device)
    return query_keys(call.seed, heads.unsqueeze(-1), i), key_keys(call.seed, i)


def _numbers(call: BucketCall) -> tuple[float, int, float]:
    """Return the scale of scores, the smallest hash that dropout keeps, and the factor of what it keeps."""
    return float(call.scale), keep_threshold(call.dropout), 1 / (1 - call.dropout) if call.dropout < 1 else 0.0


def _constants(call: BucketCall) -> dict[str, Any]:
    """Return what all kernels are compiled for."""
    (_, h, _, d), e = call.q.shape, call.v.shape[-1]
    return {
        "SHARE": h // call.k.shape[1],
        "CAUSAL": call.causal,
        "OWN": call.own,
        "UNIT": call.unit_keys,
        "DROP": call.seed is not None,
        "D": d,
        "E": e,
        "BD": block_of(d, call.q.device),
        "BE": block_of(e, call.q.device),
        "PRECISION": dot_precision(call.q.dtype),
    }


def _config(kernel: str, call: BucketCall) -> dict[str, Any]:
    kind = "half" if call.q.dtype in HALVES else "float32"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    return kernel_config(kernel, f"{kind} {block_of(widest, call.q.device)}", call.q.device)


def bucket_forward_pass(call: BucketCall) -> Found:
    """Return the outputs of a call, and what its backward pass needs."""
    from regard.ops.bucket import triton_kernels as kernels

    q, k, v = (dense_rows(x) for x in call[:3])
    (b, h, n, _), e, r = q.shape, v.shape[-1], call.labels.shape[2]
    places = sorted_places(call)
    out = by_token(v, b, n, h, e)
    lse = q.new_empty(b, h, n, dtype=torch.float32)
    short = key_factors(k) if call.unit_keys else lse.new_empty(0)
    total = q.new_empty(b, h, n, e, dtype=torch.float32) if r > 1 else lse
    asking, there = _dropout_keys(call, places)
    config = _config("bucket_forward", call)
    tiles = ceil_div(n, config["BM"])
    tensors = (q, k, v, out, total, lse, short, places, asking, there)
    sizes = (n, call.labels.numel(), min(call.reach, n), h, r, tiles)
    numbers = (*row_strides(q, k, v, out), *sizes, *_numbers(call))
    constants = {**_constants(call), **config}
    for number in range(r):
        own = {"ROUND": number, "LAST_ROUND": number == r - 1, **constants}
        launch_kernel(kernels.bucket_forward, (b * h * tiles,), tensors, numbers, own)
    return Found(out, lse, places, short)


def bucket_backward_pass(call: BucketCall, found: Found, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    from regard.ops.bucket import bucket_backward_kernels as kernels
    from regard.ops.bucket import triton_kernels

    q, k, v, grad = (dense_rows(x) for x in (*call[:3], grad))
    (b, h, n, d), g, e, r = q.shape, k.shape[1], v.shape[-1], call.labels.shape[2]
    constants = _constants(call)
    delta = torch.empty_like(found.lse)
    tiles = ceil_div(n, PRODUCT_BLOCK)
    launch_kernel(
        triton_kernels.output_products,
        (b * h * tiles,),
        (found.out, grad, delta),
        (*row_strides(found.out, grad), n, h, tiles),
        {"E": e, "BE": constants["BE"], "BM": PRODUCT_BLOCK},
    )
    sum_q, sum_k, sum_v = (q.new_empty(b, h, n, width, dtype=torch.float32) if r > 1 else delta for width in (d, d, e))
    kind = k.dtype if g == h else torch.float32
    dq = by_token(q, b, n, h, d)
    dk, dv = by_token(k, b, n, h, d, kind), by_token(v, b, n, h, e, kind)
    keyed = _dropout_keys(call, found.places)
    inputs = (q, k, v, grad, found.lse, delta, found.short, found.places, *keyed)
    strides = row_strides(q, k, v, grad)
    numbers = (n, call.labels.numel(), min(call.reach, n), h, r)
    of_queries, of_keys = _config("bucket_query_grads", call), _config("bucket_key_grads", call)
    query_tiles, key_tiles = ceil_div(n, of_queries["BM"]), ceil_div(n, of_keys["BN"])
    query_numbers = (*strides, *row_strides(dq), *numbers, query_tiles, *_numbers(call))
    key_numbers = (*strides, *row_strides(dk, dv), *numbers, key_tiles, *_numbers(call), SHORTEST)
    for number in range(r):
        own = {"ROUND": number, "LAST_ROUND": number == r - 1, **constants}
        launch_kernel(
            kernels.bucket_query_grads, (b * h * query_tiles,), (*inputs, sum_q, dq), query_numbers, {**own, **of_queries}
        )
        launch_kernel(
            kernels.bucket_key_grads, (b * h * key_tiles,), (*inputs, sum_k, sum_v, dk, dv), key_numbers, {**own, **of_keys}
        )
    if g < h:
        dk, dv = (x.unflatten(1, (g, -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


class _BucketFunction(torch.autograd.Function):
    """The kernels for autograd. Arguments: the fields of a call."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        found = bucket_forward_pass(BucketCall(*fields))
        ctx.save_for_backward(*fields[:BUCKET_TENSORS], *found)
        ctx.rest = fields[BUCKET_TENSORS:]
        return found.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        call = BucketCall(*tensors[:BUCKET_TENSORS], *ctx.rest)
        none = [None] * (len(call) - 3)
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *_differentiable_backward(call, grad), *none
        return *bucket_backward_pass(call, Found(*tensors[BUCKET_TENSORS:]), grad), *none


def _differentiable_backward(call: BucketCall, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients as functions of everything they depend on."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (TorchBuckets().forward(BucketCall(q, k, v, *call[3:])),)

    return differentiable_grads(f, call[:3], (grad,))


@torch.library.custom_op("regard::bucket_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels: Tensor,
    seed: Tensor | None,
    buckets: int,
    reach: int,
    causal: bool,
    own: bool,
    unit_keys: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = BucketCall(q, k, v, labels, seed, buckets, reach, causal, own, unit_keys, scale, dropout)
    return tuple(bucket_forward_pass(call))  # type: ignore[return-value]


@_operator.register_fake
def fake_bucket_attention(q, k, v, labels, seed, buckets, reach, causal, own, unit_keys, *numbers):  # noqa: ARG001
    b, h, r, n = labels.shape
    out = by_token(v, b, n, h, v.shape[-1])
    lse = q.new_empty(b, h, n, dtype=torch.float32)
    places = labels.new_empty(6 if r > 1 else 3, b, h, r, n, dtype=torch.int32)
    short = lse.new_empty(k.shape[:3]) if unit_keys else lse.new_empty(0)
    return out, lse, places, short


@torch.library.custom_op("regard::bucket_attention_backward", mutates_args=())
def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels: Tensor,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    places: Tensor,
    short: Tensor,
    buckets: int,
    reach: int,
    causal: bool,
    own: bool,
    unit_keys: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    call = BucketCall(q, k, v, labels, seed, buckets, reach, causal, own, unit_keys, scale, dropout)
    return bucket_backward_pass(call, Found(out, lse, places, short), grad)


@_operator_backward.register_fake
def fake_bucket_attention_backward(grad, q, k, v, *rest):  # noqa: ARG001
    b, h, n, _ = q.shape
    dq = by_token(q, b, n, h, q.shape[-1])
    if k.shape[1] < h:
        return dq, k.new_empty(k.shape), v.new_empty(v.shape)
    return dq, by_token(k, b, n, h, k.shape[-1]), by_token(v, b, n, h, v.shape[-1])


def keep_bucket_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:BUCKET_TENSORS], *output)
    ctx.rest = inputs[BUCKET_TENSORS:]


def bucket_operator_grads(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple:  # noqa: ARG001 - only out has a gradient
    grads = _operator_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * (BUCKET_TENSORS - 3 + len(ctx.rest))


_operator.register_autograd(bucket_operator_grads, setup_context=keep_bucket_tensors)


@torch.library.custom_op("regard::product_labels", mutates_args=())
def _label_operator(k: Tensor, directions: Tensor, rounds: int, opposite: bool) -> Tensor:
    return label_keys(LabelCall(k, directions, rounds, opposite))


@_label_operator.register_fake
def fake_product_labels(k, directions, rounds, opposite):  # noqa: ARG001
    return k.new_empty(k.shape[0], directions.shape[0], k.shape[2], rounds, dtype=torch.int32)
