"""The backend "triton": attention over all pairs by kernels that make scores of a tile at a time, forward and backward.

Memory beside inputs and outputs: one number for every query, in float32; additive scores also keep the exponentials of tokens.
Additive scores take features of queries and keys between -43 and 43. Those beyond are moved to these bounds, where tanh is 1
or -1, unless both features are as large and of different sign.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.pair.pair_compiled import compiled_pair_attention
from regard.ops.pair.pair_launch import pair_backward_pass, pair_forward_pass
from regard.ops.pair.pair_op import PAIR_TENSORS, PAIR_VARIABLES, PairCall
from regard.ops.pair.torch import TorchPairs
from regard.ops.triton_support import WIDEST_HEAD, triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

WIDEST_FACTOR = 256  # columns of y


class TritonPairs:
    """Fused kernels: float16, bfloat16 and float32 on CUDA devices."""

    name = "triton"
    devices = ("cuda",)

    def refuses(self, call: PairCall) -> str | None:
        additive = call.w is not None
        if why := triton_cannot_run(call.q, call.k, call.v, call.table, call.x, call.y):
            return why
        if call.bias is not None:
            return "its kernels add no bias by distance to these scores"
        if not additive and not call.q.dtype == call.k.dtype == call.v.dtype:
            return "its kernels take queries, keys and values of one type"
        if additive and call.k.shape[1] != call.q.shape[1]:
            return "its kernels of additive scores take keys with a head for every query head"
        if max(0 if additive else call.q.shape[-1], call.v.shape[-1]) > WIDEST_HEAD:
            return f"its kernels take heads of up to {WIDEST_HEAD} dimensions"
        if call.y is not None and call.y.shape[-1] > WIDEST_FACTOR:
            return f"its kernels take factors of up to {WIDEST_FACTOR} columns, not {call.y.shape[-1]}"
        learned = any(x is not None and x.requires_grad for x in (call.table, call.share))
        if call.at is not None and learned and torch.is_grad_enabled():
            return "its kernels have no gradient of a table for rows at positions of their own"
        return None

    def forward(self, call: PairCall) -> Tensor:
        if needs_plain_ops():
            return TorchPairs().forward(call)
        fields = call[:-1]  # without the bias
        if torch.compiler.is_compiling():
            return compiled_pair_attention(fields)
        return _PairFunction.apply(*fields)


class _PairFunction(torch.autograd.Function):
    """The kernels for autograd. Arguments: the fields of a call."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        call = PairCall(*fields)
        out, stat = pair_forward_pass(call)
        ctx.save_for_backward(*fields[:PAIR_TENSORS], out, stat)
        ctx.rest = fields[PAIR_TENSORS:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, stat = ctx.saved_tensors
        call = PairCall(*tensors, *ctx.rest)
        none = [None] * (len(call) - 1 - PAIR_VARIABLES)
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *_differentiable_backward(call, grad), *none
        grads = pair_backward_pass(call, out, stat, grad, any(ctx.needs_input_grad[4:6]))
        unread = call.q.shape[-1] == 0  # queries and keys without columns have no gradients, as with plain operations
        return *((None, None, *grads[2:]) if unread else grads), *none


def _differentiable_backward(call: PairCall, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients as functions of everything they depend on."""

    def f(*variables: Tensor | None) -> tuple[Tensor]:
        return (TorchPairs().forward(PairCall(*variables, *call[PAIR_VARIABLES:])),)  # type: ignore[arg-type]

    variables = call.q, call.k, call.v, call.w, call.table, call.share, call.x, call.y
    return differentiable_grads(f, variables, (grad,))
