"""Feature maps, gates and the division by the norm of kernelized attention, in plain operations: what kernels compute inside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from regard.transforms import differentiable_grads, needs_plain_ops, transformed

FEATURES = ("identity", "elu", "relu")  # a kernel has the index of a name


def feature_map(x: Tensor, name: str) -> Tensor:
    """Return the features of queries or keys: x, elu(x) + 1, or relu(x)."""
    if name == "elu":
        return elu_plus_one(x)
    if name == "relu":
        return x.relu()
    if name != "identity":
        raise ValueError(f"feature must be one of {', '.join(FEATURES)}, not {name!r}")
    return x


def safe_ratio(out: Tensor, norm: Tensor) -> Tensor:
    """Return out / norm, and 0 where a query sees nothing, or so little that its weights have no digits left."""
    return out / _safe_norm(norm)


def _safe_norm(norm: Tensor) -> Tensor:
    limits = torch.finfo(norm.dtype)
    return torch.where(norm > limits.tiny / limits.eps, norm, torch.inf)


def divided_by_last(x: Tensor) -> Tensor:
    """Return the safe ratio of all columns of x (... e + 1) but the last, (... e), and the last one."""
    if torch.compiler.is_compiling() or needs_plain_ops():
        return safe_ratio(x[..., :-1], x[..., -1:])
    return _DividedByLast.apply(x)


class _DividedByLast(torch.autograd.Function):
    """The ratio with one tensor for both gradients, which are the columns of one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return safe_ratio(x[..., :-1], x[..., -1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return differentiable_grads(lambda y: (safe_ratio(y[..., :-1], y[..., -1:]),), (x,), (grad,))[0]
        found, norm = torch.empty_like(x), _safe_norm(x[..., -1:])
        torch.div(grad, norm, out=found[..., :-1])
        torch.sum(found[..., :-1] * x[..., :-1], -1, keepdim=True, out=found[..., -1:])
        found[..., -1:].div_(norm).neg_()
        return found


def min_log_decay(dtype: torch.dtype) -> float:
    """Return a log decay that leaves nothing: a lower one would only cost digits of those after it."""
    return 1.3 * math.log(torch.finfo(dtype).tiny)


def log_gate(gate: Tensor, valid: Tensor | None, root: float = 1.0) -> Tensor:
    """Return the log of sigmoid(gate) ** (1 / root), gate (b g m ...), at most 0, and 0 at padding."""
    log = logsigmoid(gate) / root
    log = log.clamp(min=min_log_decay(gate.dtype))
    if valid is None:
        return log
    return log.masked_fill(~valid[:, None, :, None], 0)


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1 with all its digits, where exp(x) - 1 + 1 loses them."""
    if torch.compiler.is_compiling() or transformed():  # fused by itself; torch 2.11 compiles the Function into a wrong gradient
        return x.clamp(max=0).exp() + x.relu()
    return EluPlusOne.apply(x)


class EluPlusOne(torch.autograd.Function):
    """elu(x) + 1 in one pass and one tensor: its slope is min(phi, 1), so only phi is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(max=0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004 - torch names them
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return phi.clamp(max=1) * grad
