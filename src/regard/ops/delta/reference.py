"""The delta rule as it is defined: one token after the other, in any dtype, differentiable in every way."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.delta.delta_op import DeltaCall


class ReferenceDelta:
    """The recurrence, token by token."""

    name = "reference"
    fuses = False

    def refuses(self, call: DeltaCall) -> str | None:  # noqa: ARG002 - it computes every call
        return None

    def forward(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        assert call.q is not None
        state, outs = call.state, []
        queries = call.q.unflatten(1, (call.k.shape[1], -1))  # (b g r n f): r query heads read one state
        for i in range(call.k.shape[2]):
            state = _after_token(call, i, state)
            outs.append((queries[:, :, :, i] @ state).flatten(1, 2))
        return torch.stack(outs, 2), state

    def write(self, call: DeltaCall) -> Tensor:
        state = call.state
        for i in range(call.k.shape[2]):
            state = _after_token(call, i, state)
        return state


def _after_token(call: DeltaCall, i: int, state: Tensor) -> Tensor:
    """The state (b g f e) after token i, from that before it."""
    k, v, beta = call.k[:, :, i], call.v[:, :, i], call.beta[:, :, i]
    if call.log_decay is not None:
        state = call.log_decay[:, :, i].exp().unsqueeze(-1) * state
    stored = (k.unsqueeze(-2) @ state).squeeze(-2)
    return state + k.unsqueeze(-1) * (beta * (v - stored)).unsqueeze(-2)
