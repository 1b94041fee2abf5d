"""Linear attention as it is defined: one token after the other, in any dtype, differentiable in every way."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.linear.linear_op import (
    LinearCall,
    LinearResult,
    PrefixCall,
    ReadCall,
    plain_inputs,
    plain_read,
    plain_result,
)


class ReferenceLinear:
    """The recurrence, token by token."""

    name = "reference"
    fuses = False

    def refuses(self, call: LinearCall | ReadCall | PrefixCall) -> str | None:  # noqa: ARG002 - it computes every call
        return None

    def forward(self, call: LinearCall) -> LinearResult:
        return plain_result(call, self._forward(plain_inputs(call)))

    def _forward(self, call: LinearCall) -> LinearResult:
        assert call.q is not None
        state, norm_state = call.state, call.norm_state
        queries = call.q.unflatten(1, (call.k.shape[1], -1))  # (b g r n f): r query heads read one state
        outs, norms = [], []
        for i in range(call.k.shape[2]):
            q, k, v = queries[:, :, :, i], call.k[:, :, i], call.v[:, :, i]
            keep = _keep(call.log_decay, i)
            if keep is not None:
                state = keep.unsqueeze(-1) * state
            state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
            outs.append((q @ state).flatten(1, 2))
            if norm_state is not None:
                if keep is not None:
                    norm_state = keep * norm_state
                norm_state = norm_state + k
                norms.append((q @ norm_state.unsqueeze(-1)).flatten(1, 2))
        norm = torch.stack(norms, 2) if norms else None
        return LinearResult(torch.stack(outs, 2), state, norm, norm_state)

    def write(self, call: LinearCall) -> tuple[Tensor, Tensor | None]:
        call = plain_inputs(call)
        state, norm_state = call.state, call.norm_state
        for i in range(call.k.shape[2]):
            keep = _keep(call.log_decay, i)
            if keep is not None:
                state = keep.unsqueeze(-1) * state
            state = state + call.k[:, :, i].unsqueeze(-1) * call.v[:, :, i].unsqueeze(-2)
            if norm_state is not None:
                kept = norm_state if keep is None else keep * norm_state
                norm_state = kept + call.k[:, :, i]
        return state, norm_state

    def read(self, call: ReadCall) -> Tensor:
        return plain_read(call)

    def prefix_sum(self, call: PrefixCall) -> Tensor:
        total, sums = call.first, []
        for i in range(call.x.shape[2]):
            keep = _keep(call.log_decay, i)
            if keep is not None:
                total = keep * total
            total = total + call.x[:, :, i]
            sums.append(total)
        return torch.stack(sums, 2)


def _keep(log_decay: Tensor | None, i: int) -> Tensor | None:
    """The share of the state that token i keeps, (b g 1) or (b g f)."""
    if log_decay is None:
        return None
    return log_decay[:, :, i].exp()
