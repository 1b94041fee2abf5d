"""Attention of few queries to many keys in half precision, with answers in nearly float32: kernels for CUDA devices.

For the landmarks of nystrom, whose answers are multiplied by an inverse afterwards. PyTorch would compute with copies of keys and
values in float32, one program a head. These kernels divide the keys, and copy nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.few_keys import MOST_KEY_ELEMENTS, queries_of_segment
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, block_of, has_triton, kernel_config
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

FEWEST_KEYS = 512  # below, PyTorch's kernels are as good


def takes_many_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels compute attention of q (b h s d) in float32 to k (b g n d), v (b g n e) in half precision."""
    if not q.is_cuda or not has_triton() or needs_plain_ops() or too_few_keys(k):
        return False
    alike = q.dtype == torch.float32 and k.dtype == v.dtype and k.dtype in HALVES
    most = MOST_KEY_ELEMENTS[False] // block_of(max(q.shape[-1], v.shape[-1]), q.device)  # a power of two
    return alike and block_of(1, q.device) <= most and 0 < q.shape[2] <= most  # which may be a symbol


def too_few_keys(k: Tensor) -> bool:
    """Return whether PyTorch's kernels serve keys (b g n d) as well. A graph asks for no length: one serves all."""
    return not torch.compiler.is_compiling() and k.shape[2] < FEWEST_KEYS


def many_keys_answers(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float, plain: Callable[..., Tensor]
) -> Tensor:
    """Return softmax(scale q k^T) v (b h s e) in float32, over the keys that are `valid` (b n); 0 where none is.

    plain: the same function of q, k and v in differentiable operations, for second derivatives.
    """
    if torch.compiler.is_compiling():
        from regard.ops.landmark_compiled import answers_operator

        return answers_operator(q, k, v, valid, scale)[0]
    return _ManyKeys.apply(q, k, v, valid, scale, plain)


def _constants(kernel: str, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> dict[str, Any]:
    (_, h, s, d), g = q.shape, k.shape[1]
    return _kept_constants((kernel, h // g, valid is not None, s, d, v.shape[-1], k.dtype, q.device))


@signature_cache
def _kept_constants(key: tuple) -> dict[str, Any]:
    """Return what a kernel is compiled for; the best sizes depend on the type of keys and the widest head."""
    kernel, share, masked, s, d, e, dtype, device = key
    bd, be, queries = (block_of(size, device) for size in (d, e, s))
    kind = "half" if dtype in HALVES else "single"
    sizes = {"SHARE": share, "MASKED": masked, "D": d, "E": e, "BD": bd, "BE": be, "BM": queries}
    return {**sizes, **kernel_config(kernel, f"{kind} {max(bd, be)}", device)}


def answer_inputs(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors of a call as the kernels read them."""
    return q.contiguous(), dense_rows(k), dense_rows(v), None if valid is None else valid.contiguous().view(torch.uint8)


def launch_answers(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the answers (b h s e) and their log-sum-exp (b h s). q is contiguous, rows of k and v are; real (b n) is bytes."""
    from regard.ops.many_keys_kernels import many_keys_forward, merge_segments

    (b, h, s, _), n, e = q.shape, k.shape[2], v.shape[-1]
    constants = _constants("many_keys_forward", q, k, v, real)
    size = queries_of_segment(b * h, n, constants["BN"])
    segments = ceil_div(n, size)
    parts, lses = q.new_empty(b, h, segments, s, e), q.new_empty(b, h, segments, s)
    numbers = (*row_strides(k, v), s, n, h, segments, size, float(scale))
    launch_kernel(many_keys_forward, (b * h * segments,), (q, k, v, real, parts, lses), numbers, constants)
    out, lse = q.new_empty(b, h, s, e), q.new_empty(b, h, s)
    own = {"E": e, "BE": constants["BE"], **kernel_config("many_keys_merge", "any", q.device)}
    launch_kernel(merge_segments, (b * h, ceil_div(s, own["BM"])), (parts, lses, out, lse), (s, segments), own)
    return out, lse


def launch_answer_gradients(
    saved: tuple[Any, ...], grad: Tensor, means: Tensor | None, scale: float, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, in parts (b h parts s d), of keys and of values.

    saved: q, k, v and `real` as in `launch_answers`, and what that returned. means (b h t d): gradients of the means of t
    segments of keys, for every query head, which those of keys take up. out: where to write those of keys and values, if
    not into new tensors; not used where query heads share keys, whose sums are new tensors.
    """
    from regard.ops.many_keys_kernels import many_keys_backward

    q, k, v, real, answers, lse = saved
    (b, h, s, d), (g, n), e = q.shape, k.shape[1:3], v.shape[-1]
    constants = {**_constants("many_keys_backward", q, k, v, real), "MEAN": means is not None}
    size = queries_of_segment(b * h, n, constants["BN"])
    segments = ceil_div(n, size)
    kind = k.dtype if g == h else torch.float32
    dq = q.new_empty(b, h, segments, s, d)
    dk, dv = out if out is not None and g == h else (by_token(k, b, n, h, d, kind), by_token(v, b, n, h, e, kind))
    tensors = (q, k, v, real, answers, lse, grad.contiguous(), means, dq, dk, dv)
    t = 0 if means is None else means.shape[2]
    numbers = (*row_strides(k, v, dk, dv), s, n, h, segments, size, t, float(scale))
    launch_kernel(many_keys_backward, (b * h * segments,), tensors, numbers, constants)
    if g < h:
        dk, dv = (x.unflatten(1, (g, -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


class _ManyKeys(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float, plain: Callable[..., Tensor]
    ) -> Tensor:
        q, k, v, real = answer_inputs(q, k, v, valid)
        out, lse = launch_answers(q, k, v, real, scale)
        ctx.save_for_backward(q, k, v, real, out, lse)
        ctx.scale, ctx.plain = scale, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(lambda *x: (ctx.plain(*x),), saved[:3], (grad,)), None, None, None
        dq, dk, dv = launch_answer_gradients(saved, grad, None, ctx.scale)
        return dq.sum(2), dk, dv, None, None, None
