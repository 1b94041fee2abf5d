"""The delta rule by fused kernels on CUDA devices: chunks in parallel, one recurrence over their states, its own backward pass.

Eager calls go through an autograd.Function, torch.compile gets one opaque operator, a decoding step is one kernel. Function
transforms, second derivatives and export use the formulas of `regard.ops.delta.torch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.delta.delta_launch import DeltaChunks, chunk_tokens, delta_chunk_grads, delta_chunks, turn_type
from regard.ops.delta.delta_op import DeltaCall, RawGates
from regard.ops.delta.torch import TorchDelta
from regard.ops.triton_support import triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

WIDEST_KEY = {2: 256, 4: 128}  # columns of a key, by bytes of a number: a state of more does not fit a program
CALL_TENSORS = len(DeltaCall._fields)


class TritonDelta:
    """Kernels that solve all chunks at the same time, walk over their states, and read them."""

    name = "triton"
    devices = ("cuda",)
    fuses = True

    def refuses(self, call: DeltaCall) -> str | None:
        why = triton_cannot_run(*call)
        if why is not None:
            return why
        widest = WIDEST_KEY[call.k.element_size()]
        if call.k.shape[-1] > widest:
            return f"its kernels take keys of at most {widest} columns of this type, not {call.k.shape[-1]}"
        if len({x.dtype for x in (call.q, call.k, call.v) if x is not None}) > 1:
            return "its kernels take queries, keys and values of one type"
        return None

    def forward(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        return _computed(call)

    def raw_step(self, call: DeltaCall, raw: RawGates) -> tuple[Tensor, Tensor] | None:
        """Compute a decoding step of raw queries, keys and gates: see `delta_op.raw_delta_step`."""
        if needs_plain_ops() or torch.compiler.is_compiling() or call.k.numel() == 0 or call.v.numel() == 0 or _traced(call):
            return None
        from regard.ops.delta.delta_step import delta_step

        return delta_step(call, raw)

    def write(self, call: DeltaCall) -> Tensor:
        return _computed(call)[1]


def _traced(call: DeltaCall) -> bool:
    """Return whether a call has gradients."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call)


def _computed(call: DeltaCall) -> tuple[Tensor, Tensor]:
    """Compute out (b h n e) and the state (b g f e); without queries, out has no heads."""
    if needs_plain_ops() or call.k.numel() == 0 or call.v.numel() == 0:
        return _plain(*call)
    if torch.compiler.is_compiling():
        out, state, *_ = _delta_operator(*call)
        return out, state
    if call.k.shape[2] == 1 and not _traced(call):
        from regard.ops.delta.delta_step import delta_step

        return delta_step(call)
    return _DeltaFunction.apply(*call)


def _plain(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same in differentiable operations, in the type of the state or a better one."""
    own = DeltaCall(*tensors)  # type: ignore[arg-type]
    dtype = torch.promote_types(own.v.dtype, own.state.dtype)
    call = DeltaCall(*(None if x is None else x.to(dtype) for x in own))  # type: ignore[arg-type]
    if call.q is None:
        return own.v[:, :0], TorchDelta().write(call).to(own.state.dtype)
    out, state = TorchDelta().forward(call)
    return out.to(own.v.dtype), state.to(own.state.dtype)


class _DeltaFunction(torch.autograd.Function):
    """The kernels for autograd. Arguments: the fields of a call."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        call = DeltaCall(*tensors)  # type: ignore[arg-type]
        out, state, saved = delta_chunks(call)
        ctx.save_for_backward(*call, *saved)
        return out, state.to(call.state.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        call, saved = DeltaCall(*tensors[:CALL_TENSORS]), DeltaChunks(*tensors[CALL_TENSORS:])
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return tuple(differentiable_grads(_plain, call, (d_out, d_state)))
        found = iter(delta_chunk_grads(call, saved, d_out, d_state))
        return tuple(None if x is None else next(found) for x in call)


@torch.library.custom_op("regard::delta_rule", mutates_args=())
def _delta_operator(
    q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, after, saved = delta_chunks(DeltaCall(q, k, v, beta, state, log_decay))
    return out, after.to(state.dtype), *saved


@torch.library.custom_op("regard::delta_rule_backward", mutates_args=())
def _delta_operator_backward(
    d_out: Tensor,
    d_state: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    inverse: Tensor,
    lost: Tensor,
    whole: Tensor,
    states: Tensor,
) -> list[Tensor]:
    call = DeltaCall(q, k, v, beta, state, log_decay)
    saved = DeltaChunks(inverse, lost, whole, states)
    return delta_chunk_grads(call, saved, d_out, d_state)


@_delta_operator.register_fake
def fake_delta_rule(q, k, v, beta, state, log_decay):  # noqa: ARG001
    (b, g, n, f), e = k.shape, v.shape[-1]
    chunk = chunk_tokens(k)
    chunks = (n + chunk - 1) // chunk
    heads = 0 if q is None else q.shape[1]
    matrices = k.new_empty(b, g, chunks, chunk, chunk), k.new_empty(b, g, chunks, f, f, dtype=turn_type(k.dtype))
    states = k.new_empty(b, g, chunks, dtype=torch.float32), k.new_empty(b, g, chunks, f, e)
    out = v.new_empty(b, n, heads, e).transpose(1, 2)
    return out, state.new_empty(b, g, f, e), *matrices, *states


@_delta_operator_backward.register_fake
def fake_delta_rule_backward(d_out, d_state, q, k, v, beta, state, log_decay, *saved):  # noqa: ARG001
    grads = [torch.empty_like(x) for x in (q, k, v) if x is not None]
    rest = [x.new_empty(x.shape) for x in (beta, state, log_decay) if x is not None]
    return grads + rest


def keep_call(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, *output[2:])


def delta_grads(ctx: Any, d_out: Tensor, d_state: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator: one for each tensor that is there."""
    found = iter(_delta_operator_backward(d_out, d_state, *ctx.saved_tensors))
    return tuple(None if x is None else next(found) for x in ctx.saved_tensors[:CALL_TENSORS])


_delta_operator.register_autograd(delta_grads, setup_context=keep_call)
