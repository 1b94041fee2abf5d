"""The kernels of Nystrom attention as operators of torch.library, for torch.compile: one graph for any length.

All of it at once without padding; the answers of landmarks and the solve by themselves with padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, like_by_token
from regard.ops.landmark_attention import LandmarkKept, LandmarkRule, launch_landmark_gradients, launch_landmarks
from regard.ops.many_keys import answer_inputs, launch_answer_gradients, launch_answers
from regard.ops.spd_solve import eliminate


@torch.library.custom_op("regard::landmark_attention", mutates_args=())
def landmark_operator(
    q: Tensor, k: Tensor, v: Tensor, landmarks: int, iterations: int, ridge: float, scale: float
) -> list[Tensor]:
    """Compute out (b h n e) and what the backward pass needs: see `LandmarkKept`."""
    rule = LandmarkRule(landmarks, iterations, ridge, scale)
    out, kept = launch_landmarks(dense_rows(q), dense_rows(k), dense_rows(v), rule)
    return [out, *kept]


@landmark_operator.register_fake
def fake_landmark_attention(q, k, v, landmarks, iterations, ridge, scale):  # noqa: ARG001
    (b, h, n, d), (g, m), e = q.shape, k.shape[1:3], v.shape[-1]
    s, t = min(landmarks, n), min(landmarks, m)
    steps = (b, h, iterations + 1, t, s) if iterations else (b, h, t, t)
    single = (b, h, s, d), (b, g, t, d), (b, h, s, e), (b, h, s), (b, h, s, t), steps, (b, h, t, e)
    half = (b, h, t, d), (b, h, t, e)
    kept = [q.new_empty(shape, dtype=torch.float32) for shape in single] + [q.new_empty(shape) for shape in half]
    return [by_token(v, b, n, h, e), *kept]


@torch.library.custom_op("regard::landmark_attention_backward", mutates_args=())
def landmark_operator_backward(
    grad: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: int,
    iterations: int,
    ridge: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rule, into = LandmarkRule(landmarks, iterations, ridge, scale), (like_by_token(q), like_by_token(k), like_by_token(v))
    saved = dense_rows(q), dense_rows(k), dense_rows(v)
    return launch_landmark_gradients(saved, LandmarkKept(*kept), grad, rule, into)


@landmark_operator_backward.register_fake
def fake_landmark_attention_backward(grad, kept, q, k, v, *rule):  # noqa: ARG001
    return like_by_token(q), _key_gradient(q, k), _key_gradient(q, v)


def _key_gradient(q: Tensor, x: Tensor) -> Tensor:
    """Return an empty tensor for the gradient of keys or values: a sum of new tensors where query heads share them."""
    return like_by_token(x) if q.shape[1] == x.shape[1] else x.new_empty(x.shape)


def _keep_landmarks(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    q, k, v, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _landmark_grads(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    q, k, v, *kept = ctx.saved_tensors
    found = landmark_operator_backward(grads[0], kept, q, k, v, *ctx.rule)
    return *found, *[None] * len(ctx.rule)


landmark_operator.register_autograd(_landmark_grads, setup_context=_keep_landmarks)


@torch.library.custom_op("regard::many_keys_answers", mutates_args=())
def answers_operator(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the answers (b h s e) of `many_keys_answers` and their log-sum-exp (b h s)."""
    return launch_answers(*answer_inputs(q, k, v, valid), scale)


@answers_operator.register_fake
def fake_many_keys_answers(q, k, v, valid, scale):  # noqa: ARG001
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.custom_op("regard::many_keys_answers_backward", mutates_args=())
def answers_operator_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = launch_answer_gradients((*answer_inputs(q, k, v, valid), out, lse), grad, None, scale)
    return dq.sum(2), dk, dv


@answers_operator_backward.register_fake
def fake_many_keys_answers_backward(grad, out, lse, q, k, v, valid, scale):  # noqa: ARG001
    return q.new_empty(q.shape), _key_gradient(q, k), _key_gradient(q, v)


def _keep_answers(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _answer_grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *answers_operator_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


answers_operator.register_autograd(_answer_grads, setup_context=_keep_answers)


@torch.library.custom_op("regard::spd_solve", mutates_args=())
def solve_operator(a: Tensor, b: Tensor) -> Tensor:
    """Compute a^-1 b of matrices a (... n n) and right sides b (... n e)."""
    return eliminate(a, b)


@solve_operator.register_fake
def fake_spd_solve(a, b):  # noqa: ARG001
    return b.new_empty(b.shape)


def _keep_solution(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _solve_grads(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, x = ctx.saved_tensors
    db = solve_operator(a, grad)
    return -(db @ x.mT), db


solve_operator.register_autograd(_solve_grads, setup_context=_keep_solution)
