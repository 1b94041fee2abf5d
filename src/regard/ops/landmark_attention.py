"""Nystrom attention in half precision without padding: five kernels forward and five backward, for CUDA devices.

Means of segments, the answers of landmarks to all keys, the pseudo-inverse, and attention to the landmarks of keys. All products
with tokens are in half precision; what belongs to landmarks alone stays in float32, one program a head (`landmark_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.bucket.bucket_launch import dense_rows, row_strides
from regard.ops.few_keys import launch_few_keys, launch_few_keys_gradients
from regard.ops.joined_linear import gradient_buffers
from regard.ops.kernel_launch import launch_kernel
from regard.ops.many_keys import launch_answer_gradients, launch_answers, too_few_keys
from regard.ops.triton_support import HALVES, block_of, dot_precision, has_triton, kernel_config
from regard.transforms import differentiable_grads, needs_plain_ops

MOST_LANDMARKS = 64  # matrices of a program
WIDEST_LANDMARK = 64  # columns of a head


class LandmarkRule(NamedTuple):
    """Which landmarks there are and how they are inverted."""

    landmarks: int
    iterations: int  # 0: a ridge solve
    ridge: float
    scale: float


class LandmarkKept(NamedTuple):
    """What the backward pass needs beside q, k and v: s landmarks of queries, t of keys; in float32 but for the last two."""

    few_q: Tensor  # (b h s d) means of queries
    few_k: Tensor  # (b g t d) means of keys
    answers: Tensor  # (b h s e) what landmarks get from all tokens
    lse: Tensor  # (b h s) of their scores
    weights: Tensor  # (b h s t) S
    steps: Tensor  # (b h iterations+1 t s) of the iteration, or (b h t t) the inverse of the ridge solve
    found: Tensor  # (b h t e) S^+ answers
    half_k: Tensor  # (b h t d) few_k for every query head, in the type of q
    half_v: Tensor  # (b h t e) found, in the type of q


def takes_landmarks(q: Tensor, k: Tensor, v: Tensor, landmarks: int) -> bool:
    """Return whether the kernels compute Nystrom attention of q (b h n d) to k (b g m d), v (b g m e)."""
    if not q.is_cuda or not has_triton() or needs_plain_ops() or too_few_keys(k):
        return False
    alike = q.dtype == k.dtype == v.dtype and q.dtype in HALVES
    return alike and landmarks <= MOST_LANDMARKS and max(q.shape[-1], v.shape[-1]) <= WIDEST_LANDMARK


def landmark_attention(q: Tensor, k: Tensor, v: Tensor, rule: LandmarkRule, plain: Callable[..., Tensor]) -> Tensor:
    """Return softmax(q k~^T) S^+ softmax(q~ k^T) v (b h n e), S = softmax(q~ k~^T), with means of segments q~ and k~.

    plain: the same function of q, k and v in differentiable operations, for second derivatives.
    """
    if torch.compiler.is_compiling():
        from regard.ops.landmark_compiled import landmark_operator

        return landmark_operator(q, k, v, *rule)[0]
    return _LandmarkAttention.apply(q, k, v, rule, plain)


def _precision(q: Tensor, iterations: int) -> str:
    """Return how products of landmarks are computed for queries of a type.

    Three products of bfloat16 parts leave errors of 4e-4 in the gradients of the iteration, a tenth of what bfloat16 itself
    does. The ridge solve and float16 need more: three of TensorFloat32 parts. Triton's interpreter knows those alone.
    """
    return "bf16x3" if iterations and q.dtype == torch.bfloat16 and q.is_cuda else dot_precision(torch.float32)


def _constants(kernel: str, q: Tensor, v: Tensor, rule: LandmarkRule, share: int) -> dict[str, Any]:
    few, iterations, *_ = rule
    return _kept_constants((kernel, share, few, iterations, q.shape[-1], v.shape[-1], _precision(q, iterations), q.device))


@signature_cache
def _kept_constants(key: tuple) -> dict[str, Any]:
    """Return what a kernel is compiled for; the best number of warps depends on the inverse and how its products are computed."""
    kernel, share, landmarks, iterations, d, e, precision, device = key
    sizes = {"SHARE": share, "ITERATIONS": iterations, "D": d, "E": e, "PRECISION": precision}
    blocks = {"BD": block_of(d, device), "BE": block_of(e, device), "BS": block_of(landmarks, device)}
    return {**sizes, **blocks, **kernel_config(kernel, f"{'iterations' if iterations else 'ridge'} {precision}", device)}


def _segment_means(q: Tensor, k: Tensor, landmarks: int) -> tuple[Tensor, Tensor]:
    """Return the means of segments of queries (b h s d) and keys (b g t d) in float32."""
    from regard.ops.landmark_kernels import segment_means

    (b, h, n, d), (g, m) = q.shape, k.shape[1:3]
    s, t = min(landmarks, n), min(landmarks, m)
    few_q, few_k = (q.new_empty(b, heads, size, d, dtype=torch.float32) for heads, size in ((h, s), (g, t)))
    numbers = (*row_strides(q, k), n, m, s, t, b * h * s, h, g)
    constants = {"D": d, "BD": block_of(d, q.device), **kernel_config("segment_means", "any", q.device)}
    launch_kernel(segment_means, (b * h * s + b * g * t,), (q, k, few_q, few_k), numbers, constants)
    return few_q, few_k


def launch_landmarks(q: Tensor, k: Tensor, v: Tensor, rule: LandmarkRule) -> tuple[Tensor, LandmarkKept]:
    """Return the outputs (b h n e), and what their gradients need; rows of q, k and v are contiguous."""
    from regard.ops.landmark_kernels import landmark_inverse

    b, h, d, e, share = *q.shape[:2], q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
    few_q, few_k = _segment_means(q, k, rule.landmarks)
    answers, lse = launch_answers(few_q, k, v, None, rule.scale)
    s, t = few_q.shape[2], few_k.shape[2]
    weights, found = few_q.new_empty(b, h, s, t), few_q.new_empty(b, h, t, e)
    steps = few_q.new_empty(b, h, rule.iterations + 1, t, s) if rule.iterations else few_q.new_empty(b, h, t, t)
    half_k, half_v = q.new_empty(b, h, t, d), q.new_empty(b, h, t, e)
    tensors = (few_q, few_k, answers, weights, steps, found, half_k, half_v)
    numbers = (s, t, rule.scale, rule.ridge)
    launch_kernel(landmark_inverse, (b * h,), tensors, numbers, _constants("landmark_inverse", q, v, rule, share))
    out = launch_few_keys(q, half_k, half_v, None, rule.scale)
    return out, LandmarkKept(few_q, few_k, answers, lse, weights, steps, found, half_k, half_v)


def launch_landmark_gradients(
    saved: tuple[Tensor, ...], kept: LandmarkKept, grad: Tensor, rule: LandmarkRule, into: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    saved: q, k and v as in `launch_landmarks`. into: where to write them; those of keys and values that query heads share are
    new tensors.
    """
    from regard.ops.landmark_kernels import add_mean_gradients, landmark_gradients

    q, k, v = saved
    few_q, few_k, answers, lse, weights, steps, found, half_k, half_v = kept
    (b, h, n, d), s, t = q.shape, few_q.shape[2], few_k.shape[2]
    dq, out_k, out_v = into
    dq, dk_parts, dfound = launch_few_keys_gradients((q, half_k, half_v, None), grad, rule.scale, dq)
    danswers, dscores = torch.empty_like(answers), torch.empty_like(weights)
    dfew_q, dfew_k = torch.empty_like(few_q), few_q.new_empty(b, h, t, d)
    tensors = (few_k, answers, weights, steps, found, dk_parts, dfound, danswers, dscores, dfew_q, dfew_k)
    constants = _constants("landmark_gradients", q, v, rule, h // k.shape[1])
    launch_kernel(landmark_gradients, (b * h,), tensors, (s, t, dk_parts.shape[2], rule.scale), constants)
    dfew_k = torch.baddbmm(dfew_k.flatten(0, 1), dscores.flatten(0, 1).mT, few_q.flatten(0, 1)).view_as(dfew_k)
    of_answers = few_q, k, v, None, answers, lse
    dq_parts, dk, dv = launch_answer_gradients(of_answers, danswers, dfew_k, rule.scale, (out_k, out_v))
    numbers = (*row_strides(dq), n, s, h, dq_parts.shape[2])
    sizes = {"D": d, "BD": constants["BD"], **kernel_config("add_mean_gradients", "any", q.device)}
    launch_kernel(add_mean_gradients, (b * h * s,), (dq, dfew_q, dq_parts), numbers, sizes)
    return dq, dk, dv


class _LandmarkAttention(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: LandmarkRule, plain: Callable[..., Tensor]) -> Tensor:
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        out, kept = launch_landmarks(q, k, v, rule)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.rule, ctx.plain = rule, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(lambda *x: (ctx.plain(*x),), (q, k, v), (grad,)), None, None
        found = launch_landmark_gradients((q, k, v), LandmarkKept(*kept), grad, ctx.rule, gradient_buffers(q, k, v))
        return *found, None, None
