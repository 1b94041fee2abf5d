"""Linear attention in fused Triton kernels: features, decays, sums and the division by the norm in one pass over the tokens.

The kernels are in `triton_kernels.py`, `triton_queries.py` and `triton_keys.py`, the order of their launches in
`triton_launch.py`; those modules are imported by the first call. Second derivatives and function transforms use the formulas of
the torch backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.linear.linear_op import LinearCall, LinearResult, PrefixCall, ReadCall
from regard.ops.linear.torch import TorchLinear
from regard.ops.triton_support import triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

LARGEST = 256  # features, and numbers of a value
_TENSORS = 6  # that have gradients: q, k, v, state, log_decay, norm_state
PLAIN = TorchLinear()


class TritonLinear:
    """Fused kernels for CUDA devices."""

    name = "triton"
    devices = ("cuda",)
    fuses = True

    def refuses(self, call: LinearCall | ReadCall | PrefixCall) -> str | None:
        if why := triton_cannot_run(*_numbers(call)):
            return why
        if isinstance(call, PrefixCall):
            return None
        if isinstance(call, LinearCall) and call.gain is not None and call.norm_state is not None:
            return "its kernels multiply outputs by a gain or compute norms, not both"
        largest = max(call.state.shape[-2:])
        if largest > LARGEST:
            return f"its kernels take up to {LARGEST} features and as many numbers in a value, not {largest}"
        return None

    def forward(self, call: LinearCall) -> LinearResult:
        if needs_plain_ops() or call.k.numel() == 0:
            return PLAIN.forward(call)
        if _is_step(call):
            from regard.ops.linear.triton_step import linear_step

            return linear_step(call)
        out, norm, state, norm_state = _computed(call)
        assert out is not None
        norm = None if norm is None or call.normalize else norm.unsqueeze(-1)
        return LinearResult(out, state, norm, norm_state)

    def counted_step(self, call: LinearCall, tokens: Tensor, norm: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute a decoding step that counts its tokens: see `linear_op.counted_step`."""
        if needs_plain_ops() or call.k.numel() == 0 or not _is_step(call):
            return None
        from regard.ops.linear.triton_step import StepCount, linear_step

        tokens = tokens.contiguous()  # after a prompt they are a column of a matrix
        after = torch.empty_like(tokens)
        found = linear_step(call, StepCount(tokens, after, norm))
        return found.out, found.state, after

    def write(self, call: LinearCall) -> tuple[Tensor, Tensor | None]:
        if needs_plain_ops() or call.k.numel() == 0:
            return PLAIN.write(call)
        _, _, state, norm_state = _computed(call)
        return state, norm_state

    def read(self, call: ReadCall) -> Tensor:
        if needs_plain_ops() or call.q.numel() == 0:
            return PLAIN.read(call)
        out = _computed(call)[0]
        assert out is not None
        return out

    def prefix_sum(self, call: PrefixCall) -> Tensor:
        if needs_plain_ops() or torch.compiler.is_compiling() or call.x.numel() == 0:
            return PLAIN.prefix_sum(call)
        from regard.ops.linear.triton_prefix import PrefixFunction

        return PrefixFunction.apply(*call, False)


def _numbers(call: LinearCall | ReadCall | PrefixCall) -> tuple[Tensor | None, ...]:
    """The tensors of a call but for its mask."""
    if isinstance(call, LinearCall):
        return call.q, call.k, call.v, call.state, call.log_decay, call.norm_state, call.gain
    if isinstance(call, ReadCall):
        return call.q, call.state, call.norm_state
    return call


def _is_step(call: LinearCall) -> bool:
    """Return whether a call is one token without gradients: a decoding step."""
    if call.k.shape[2] != 1 or torch.compiler.is_compiling():
        return False
    tensors = (x for x in call if isinstance(x, Tensor))
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _flat(call: LinearCall | ReadCall) -> tuple[Any, ...]:
    """The arguments of the kernels in one order: tensors that have gradients, the validity, options."""
    if isinstance(call, ReadCall):
        return call.q, None, None, call.state, None, call.norm_state, None, call.feature, call.scale, call.normalize, None, 0.0
    return tuple(call)


Results = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


def _computed(call: LinearCall | ReadCall) -> Results:
    """Compute out (b h n e), norm (b h n), and both states behind the last token."""
    flat = _flat(call)
    if torch.compiler.is_compiling():
        return _opaque(*flat)
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in flat[:_TENSORS]]):
        return _LinearFunction.apply(*flat)
    from regard.ops.linear.triton_launch import LinearInputs, launch_forward

    return launch_forward(LinearInputs(*flat), keep=False)[:4]


def _opaque(*flat: Any) -> Results:
    """Compute the same by an operator that a compiler does not trace."""
    from regard.ops.linear.triton_compiled import linear_operator

    q, k, _, state, _, norm_state, *_ = flat
    out, norm, last, last_norm = linear_operator(*flat)
    has_norm = norm_state is not None
    if k is None:
        last, last_norm = state, norm_state
    return None if q is None else out, norm if has_norm and q is not None else None, last, last_norm if has_norm else None


def _plain(*flat: Any) -> Results:
    """Compute the same in differentiable operations."""
    q, k, _, state, _, norm_state, _, feature, scale, normalize, *_ = flat
    if k is None:
        out = PLAIN.read(ReadCall(q, state, norm_state, feature, scale, normalize))
        return out, None, state, norm_state
    call = LinearCall(*flat)
    if q is None:
        last, last_norm = PLAIN.write(call)
        return None, None, last, last_norm
    out, last, norm, last_norm = PLAIN.forward(call)
    return out, None if norm is None else norm.squeeze(-1), last, last_norm


class _LinearFunction(torch.autograd.Function):
    """The kernels for autograd. Arguments: those of `_flat`."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Results:
        from regard.ops.linear.triton_launch import LinearInputs, launch_forward, linear_launch

        inputs = LinearInputs(*flat)
        ctx.run = linear_launch(inputs)
        out, norm, last, last_norm, kept = launch_forward(inputs, keep=True, run=ctx.run)
        ctx.save_for_backward(*flat[: _TENSORS + 1], *kept)
        ctx.options = flat[_TENSORS + 1 :]  # a gain is a constant
        ctx.set_materialize_grads(False)
        if flat[1] is None:  # a state that is read does not change
            return out, None, None, None  # type: ignore[return-value]
        return out, None if inputs.normalize else norm, last, last_norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from regard.ops.linear.triton_launch import LinearInputs, LinearStates
        from regard.ops.linear.triton_launch_backward import launch_backward

        saved = ctx.saved_tensors
        inputs, kept = saved[: _TENSORS + 1], saved[_TENSORS + 1 :]
        none = [None] * (1 + len(ctx.options))
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *_differentiable_grads(inputs, ctx.options, grads), *none
        flat = LinearInputs(*inputs, *ctx.options)
        needs = ctx.needs_input_grad
        wanted = {"decay_grad": needs[4], "state_grad": needs[3] or needs[5], "beside": True}
        found = launch_backward(flat, LinearStates(*kept), *grads, **wanted, run=ctx.run)
        return *[g if needed else None for g, needed in zip(found, needs, strict=False)], *none


def _differentiable_grads(inputs: tuple, options: tuple, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients as functions of everything they depend on."""
    made = [g is not None for g in grads]

    def f(*tensors: Tensor | None) -> list[Tensor]:
        results = _plain(*tensors, inputs[_TENSORS], *options)
        return [y for y, used in zip(results, made, strict=True) if used and y is not None]

    return differentiable_grads(f, inputs[:_TENSORS], [g for g in grads if g is not None])
