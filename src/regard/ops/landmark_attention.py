"""Nystrom attention in half precision without padding: five kernels forward and five backward, for CUDA devices.

Means of segments, the answers of landmarks to all keys, the pseudo-inverse, and attention to the landmarks of keys. All products
with tokens are in half precision; what belongs to landmarks alone stays in float32, one program a head (`landmark_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import dense_rows, row_strides
from regard.ops.few_keys import launch_few_keys, launch_few_keys_gradients
from regard.ops.joined_linear import gradient_buffers
from regard.ops.kernel_launch import launch_kernel
from regard.ops.many_keys import FEWEST_KEYS, launch_answer_gradients, launch_answers
from regard.ops.triton_support import HALVES, block_of, dot_precision, has_triton
from regard.transforms import differentiable_grads, needs_plain_ops

MOST_LANDMARKS = 64  # matrices of a program
WIDEST_LANDMARK = 64  # columns of a head
TOKEN_TILE = 64  # tokens whose mean is computed at once


class LandmarkRule(NamedTuple):
    """Which landmarks there are and how they are inverted."""

    landmarks: int
    iterations: int  # 0: a ridge solve
    ridge: float
    scale: float


def takes_landmarks(q: Tensor, k: Tensor, v: Tensor, landmarks: int) -> bool:
    """Return whether the kernels compute Nystrom attention of q (b h n d) to k (b g m d), v (b g m e)."""
    if not q.is_cuda or torch.compiler.is_compiling() or k.shape[2] < FEWEST_KEYS or not has_triton() or needs_plain_ops():
        return False
    alike = q.dtype == k.dtype == v.dtype and q.dtype in HALVES
    return alike and landmarks <= MOST_LANDMARKS and max(q.shape[-1], v.shape[-1]) <= WIDEST_LANDMARK


def landmark_attention(q: Tensor, k: Tensor, v: Tensor, rule: LandmarkRule, plain: Callable[..., Tensor]) -> Tensor:
    """Return softmax(q k~^T) S^+ softmax(q~ k^T) v (b h n e), S = softmax(q~ k~^T), with means of segments q~ and k~.

    plain: the same function of q, k and v in differentiable operations, for second derivatives.
    """
    return _LandmarkAttention.apply(q, k, v, rule, plain)


def _precision(q: Tensor, iterations: int) -> str:
    """Return how products of landmarks are computed for queries of a type.

    Three products of bfloat16 parts leave errors of 4e-4 in the gradients of the iteration, a tenth of what bfloat16 itself
    does. The ridge solve and float16 need more: three of TensorFloat32 parts. Triton's interpreter knows those alone.
    """
    return "bf16x3" if iterations and q.dtype == torch.bfloat16 and q.is_cuda else dot_precision(torch.float32)


def _constants(q: Tensor, v: Tensor, rule: LandmarkRule, share: int) -> dict[str, Any]:
    d, e, device = q.shape[-1], v.shape[-1], q.device
    return {
        "SHARE": share,
        "ITERATIONS": rule.iterations,
        "D": d,
        "E": e,
        "BD": block_of(d, device),
        "BE": block_of(e, device),
        "BS": block_of(rule.landmarks, device),
        "PRECISION": _precision(q, rule.iterations),
        "num_warps": 4,
        "num_stages": 1,
    }


def _segment_means(q: Tensor, k: Tensor, landmarks: int) -> tuple[Tensor, Tensor]:
    """Return the means of segments of queries (b h s d) and keys (b g t d) in float32."""
    from regard.ops.landmark_kernels import segment_means

    (b, h, n, d), (g, m) = q.shape, k.shape[1:3]
    s, t = min(landmarks, n), min(landmarks, m)
    few_q, few_k = (q.new_empty(b, heads, size, d, dtype=torch.float32) for heads, size in ((h, s), (g, t)))
    numbers = (*row_strides(q, k), n, m, s, t, b * h * s, h, g)
    constants = {"D": d, "BD": block_of(d, q.device), "BT": TOKEN_TILE}
    launch_kernel(segment_means, (b * h * s + b * g * t,), (q, k, few_q, few_k), numbers, constants)
    return few_q, few_k


class _LandmarkAttention(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: LandmarkRule, plain: Callable[..., Tensor]) -> Tensor:
        from regard.ops.landmark_kernels import landmark_inverse

        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        b, h, d, e, share = *q.shape[:2], q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
        few_q, few_k = _segment_means(q, k, rule.landmarks)
        answers, lse = launch_answers(few_q, k, v, None, rule.scale)
        s, t = few_q.shape[2], few_k.shape[2]
        weights, found = few_q.new_empty(b, h, s, t), few_q.new_empty(b, h, t, e)
        steps = few_q.new_empty(b, h, rule.iterations + 1, t, s) if rule.iterations else few_q.new_empty(b, h, t, t)
        half_k, half_v = q.new_empty(b, h, t, d), q.new_empty(b, h, t, e)
        tensors = (few_q, few_k, answers, weights, steps, found, half_k, half_v)
        numbers = (s, t, rule.scale, rule.ridge)
        launch_kernel(landmark_inverse, (b * h,), tensors, numbers, _constants(q, v, rule, share))
        ctx.save_for_backward(q, k, v, answers, lse, *tensors[:2], *tensors[3:])
        ctx.rule, ctx.plain = rule, plain
        return launch_few_keys(q, half_k, half_v, None, rule.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.landmark_kernels import add_mean_gradients, landmark_gradients

        q, k, v, answers, lse, few_q, few_k, weights, steps, found, half_k, half_v = ctx.saved_tensors
        rule: LandmarkRule = ctx.rule
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(lambda *x: (ctx.plain(*x),), (q, k, v), (grad,)), None, None
        (b, h, n, d), s, t = q.shape, few_q.shape[2], few_k.shape[2]
        dq, out_k, out_v = gradient_buffers(q, k, v)
        dq, dk_parts, dfound = launch_few_keys_gradients((q, half_k, half_v, None), grad, rule.scale, dq)
        danswers, dscores = torch.empty_like(answers), torch.empty_like(weights)
        dfew_q, dfew_k = torch.empty_like(few_q), few_q.new_empty(b, h, t, d)
        tensors = (few_k, answers, weights, steps, found, dk_parts, dfound, danswers, dscores, dfew_q, dfew_k)
        constants = _constants(q, v, rule, h // k.shape[1])
        launch_kernel(landmark_gradients, (b * h,), tensors, (s, t, dk_parts.shape[2], rule.scale), constants)
        dfew_k = torch.baddbmm(dfew_k.flatten(0, 1), dscores.flatten(0, 1).mT, few_q.flatten(0, 1)).view_as(dfew_k)
        saved = few_q, k, v, None, answers, lse
        dq_parts, dk, dv = launch_answer_gradients(saved, danswers, dfew_k, rule.scale, (out_k, out_v))
        numbers = (*row_strides(dq), n, s, h, dq_parts.shape[2])
        sizes = {"D": d, "BD": constants["BD"], "BT": TOKEN_TILE}
        launch_kernel(add_mean_gradients, (b * h * s,), (dq, dfew_q, dq_parts), numbers, sizes)
        return dq, dk, dv, None, None
