"""Exponential random features of queries and keys, by kernels on CUDA devices: see `exp_feature_kernels.py` for the formulas.

Gradients go to the tokens and to the largest norm. Maxima are constants: outputs do not depend on them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.linear.feature_maps import min_log_decay
from regard.ops.triton_support import block_of, dot_precision, kernel_config, triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

WIDEST_TOKEN = 256  # coordinates
_QUERIES, _RUNNING, _GIVEN = 0, 1, 2  # what is subtracted from exponents


class ExpMap(NamedTuple):
    """Directions (f d), and the log of the largest norm of every key-value head (g), if there is one."""

    directions: Tensor
    log_norm: Tensor | None


class KeyFeatures(NamedTuple):
    """Features of keys in units of exp(top) at their time."""

    phi: Tensor  # (b g n f)
    log_decay: Tensor  # (b g n 1) by which units grow
    top: Tensor  # (b g 1) behind the last key


def exp_kernels_fit(x: Tensor) -> bool:
    """Return whether kernels can compute the features of tokens x (b h n d)."""
    plain = torch.compiler.is_compiling() or needs_plain_ops() or x.numel() == 0
    return not plain and x.shape[-1] <= WIDEST_TOKEN and triton_cannot_run(x) is None


def exponents(x: Tensor, directions: Tensor, most: Tensor | None) -> Tensor:
    """Return the exponents (b h n f) of the features of tokens x (b h n d), w_f . x' - |x'|^2 / 2 - log(f) / 2.

    x' = x / d^(1/4), shortened to a squared norm of `most`, one number or (h 1 1), where it is longer.
    """
    directions = directions.to(x.dtype)
    if torch.compiler.is_compiling() or needs_plain_ops():
        return plain_exponents(x, directions, most)
    return _Exponents.apply(x, directions, most)


def plain_exponents(x: Tensor, directions: Tensor, most: Tensor | None) -> Tensor:
    """Compute `exponents` in plain operations."""
    x = x * x.shape[-1] ** -0.25
    square = x.square().sum(-1, keepdim=True)
    if most is not None:
        over = (square / most).clamp_min(1)  # by how much a squared norm is too large
        x = x * over.rsqrt()
        square = square / over
    # the offset rides along as one more coordinate, which saves a pass over n f numbers
    offset = -square / 2 - math.log(len(directions)) / 2
    coordinates = torch.cat([x, offset], -1)
    return F.linear(coordinates, F.pad(directions, (0, 1), value=1.0))


class _Exponents(torch.autograd.Function):
    """Exponents with few passes over the tokens: a factor and an offset of every token join the products with directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, directions: Tensor, most: Tensor | None) -> Tensor:
        square = torch.linalg.vecdot(x, x).unsqueeze(-1).mul_(x.shape[-1] ** -0.5)
        factor, offset = _factor_and_offset(square, most, x.shape[-1])
        offset -= math.log(len(directions)) / 2
        logs = x @ directions.mT
        ctx.save_for_backward(x, directions, most, square, factor)
        return torch.addcmul(offset, logs, factor, out=logs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, directions, most, square, factor = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return tuple(differentiable_grads(lambda *given: (plain_exponents(*given),), (x, directions, most), (grad,)))
        found = grad @ directions
        d_offset = grad.sum(-1, keepdim=True)
        d_square, d_most = -d_offset / 2, None
        if most is not None:
            pull = torch.linalg.vecdot(x, found).unsqueeze(-1).mul_(factor).div_(2)
            long = square >= most
            d_most = torch.where(long, pull / most + d_square, 0).sum_to_size(most.shape)
            d_square = torch.where(long, -pull / square, d_square)
        d_directions = None
        if ctx.needs_input_grad[1]:
            d_directions = (grad * factor).flatten(0, -2).mT @ x.flatten(0, -2)
        d_x = found.mul_(factor).addcmul_(x, d_square, value=2 * x.shape[-1] ** -0.5)
        return d_x, d_directions, d_most


def _factor_and_offset(square: Tensor, most: Tensor | None, d: int) -> tuple[Tensor, Tensor]:
    """Return what shortens and scales every token, and half of its squared norm, negative; square (b h n 1) as it comes."""
    if most is None:
        return torch.full_like(square, d**-0.25), square / -2
    over = (square / most).clamp_min_(1)
    return over.rsqrt().mul_(d**-0.25), (square / over).div_(-2)


def exp_query_features(x: Tensor, by: ExpMap) -> Tensor:
    """Return the softmax over features of queries x (b h n d), (b h n f)."""
    return _ExpFunction.apply(x, by.log_norm, by.directions, None, None, None, None, _QUERIES)[0]


def exp_key_features(x: Tensor, by: ExpMap, first: Tensor, valid: Tensor | None) -> KeyFeatures:
    """Return the features of keys x (b g n d) in units of the largest exponent up to each one; first (b g 1): that before."""
    own, maxima = _maxima(x, by, valid)
    phi, log_decay, top = _ExpFunction.apply(x, by.log_norm, by.directions, first.detach(), own, maxima, valid, _RUNNING)
    return KeyFeatures(phi, log_decay.unsqueeze(-1), top.unsqueeze(-1))


def exp_keys_at_once(x: Tensor, by: ExpMap, first: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the features of keys x (b g n d) in units of the largest exponent of them and of `first` (b g 1), and that."""
    _, maxima = _maxima(x, by, valid)
    top = torch.maximum(first.detach().float(), maxima.amax(-1, keepdim=True))
    return _ExpFunction.apply(x, by.log_norm, by.directions, top, None, None, valid, _GIVEN)[0], top


class _Launch:
    """The sizes and constants that the kernels of one tensor share."""

    def __init__(
        self, x: Tensor, directions: Tensor, log_norm: Tensor | None, valid: Tensor | None, config: dict[str, Any]
    ) -> None:
        self.x = x if x.stride(-1) == 1 else x.contiguous()
        self.directions = directions.contiguous()
        self.valid = None if valid is None else valid.contiguous().view(torch.uint8)
        self.log_norm = None if log_norm is None else log_norm.detach()
        self.b, self.h, self.n, self.d = x.shape
        self.f = len(directions)
        config = dict(config)
        self.chunk, tile = config.pop("chunk"), config.pop("features")
        self.blocks = -(-self.n // self.chunk)
        self.grid = (self.blocks * self.b * self.h,)
        self.numbers = (self.d**-0.25, math.log(self.f) / 2)
        self.sizes = (self.n, self.blocks, self.h, 1 if log_norm is None else self.h // len(log_norm))
        self.constants = {
            "d": self.d, "f": self.f, "BD": block_of(self.d, x.device), "BF": min(tile, block_of(self.f, x.device)),
            "C": self.chunk, "HAS_NORM": log_norm is not None, "HAS_VALID": valid is not None,
            "PRECISION": dot_precision(torch.float32), **config,
        }  # fmt: skip
        self.inputs = [self.x if t is None else t for t in (self.x, self.directions, self.log_norm, self.valid)]

    def new(self, *shape: int) -> Tensor:
        return torch.empty(self.b, self.h, *shape, device=self.x.device)


def _key(x: Tensor) -> str:
    return "single" if x.dtype == torch.float32 else "half"


def _maxima(x: Tensor, by: ExpMap, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest exponent of every key (b g n) and of every block of keys (b g blocks)."""
    from regard.ops.linear.exp_feature_kernels import exp_feature_maxima

    run = _Launch(x.detach(), by.directions, by.log_norm, valid, kernel_config("exp_features", _key(x), x.device))
    own, maxima = run.new(run.n), run.new(run.blocks)
    strides = run.x.stride()[:3]
    exp_feature_maxima[run.grid](*run.inputs, own, maxima, *strides, *run.numbers, *run.sizes, **run.constants)
    return own, maxima


class _ExpFunction(torch.autograd.Function):
    """The kernels for autograd: features, the log decays of running maxima, and the last of those."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        log_norm: Tensor | None,
        directions: Tensor,
        first: Tensor | None,
        own: Tensor | None,
        maxima: Tensor | None,
        valid: Tensor | None,
        kind: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        from regard.ops.linear.exp_feature_kernels import exp_feature_forward

        run = _Launch(x, directions, log_norm, valid, kernel_config("exp_features", _key(x), x.device))
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        phi = torch.empty(run.b, run.h, run.n, run.f, dtype=dtype, device=x.device)
        top = run.new(run.n)
        log_decay, last = (run.new(run.n), run.new()) if kind == _RUNNING else (None, None)
        first = first.float().contiguous() if first is not None else None
        others = [top if t is None else t for t in (own, maxima, first, phi, top, log_decay, last)]
        exp_feature_forward[run.grid](
            *run.inputs, *others, *run.x.stride()[:3], *run.numbers, min_log_decay(torch.float32), *run.sizes,
            RUNNING=kind, **run.constants,
        )  # fmt: skip
        ctx.save_for_backward(x, log_norm, directions, valid, top)
        ctx.kind = kind
        if log_decay is not None and last is not None:
            ctx.mark_non_differentiable(log_decay, last)
        return phi, log_decay, last

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        from regard.ops.linear.exp_feature_kernels import exp_feature_backward

        x, log_norm, directions, valid, top = ctx.saved_tensors
        none = (None,) * 6
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more

            def f(x: Tensor, log_norm: Tensor | None) -> list[Tensor]:
                return [_plain(x, log_norm, directions, valid, top, ctx.kind).to(grad.dtype)]

            return *differentiable_grads(f, (x, log_norm), [grad]), *none
        run = _Launch(x, directions, log_norm, valid, kernel_config("exp_feature_grads", _key(x), x.device))
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        d_x = torch.empty(run.b, run.n, run.h, run.d, dtype=x.dtype, device=x.device).transpose(1, 2)
        d_norm = run.new(run.blocks)
        exp_feature_backward[run.grid](
            *run.inputs, top, grad, d_x, d_norm, *run.x.stride()[:3], *grad.stride()[:3], *run.numbers, *run.sizes,
            SOFTMAX=ctx.kind == _QUERIES, **run.constants,
        )  # fmt: skip
        if log_norm is None or not ctx.needs_input_grad[1]:
            return d_x, None, *none
        return d_x, d_norm.unflatten(1, (len(log_norm), -1)).sum((0, 2, 3)).to(log_norm.dtype), *none


def _plain(x: Tensor, log_norm: Tensor | None, directions: Tensor, valid: Tensor | None, top: Tensor, kind: int) -> Tensor:
    """The features in differentiable operations, in units that are given."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    most = None
    if log_norm is not None:
        most = (2 * log_norm.to(wide.dtype)).exp().repeat_interleave(x.shape[1] // len(log_norm))[:, None, None]
    logs = exponents(wide, directions, most)
    if kind == _QUERIES:
        return torch.softmax(logs, -1)
    if valid is not None:
        logs = logs.masked_fill(~valid[:, None, :, None], -torch.inf)
    return (logs - top.unsqueeze(-1)).exp()
