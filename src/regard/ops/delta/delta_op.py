"""The delta rule from a given state: a token reads what the state holds under its key, and writes only the difference.

    S_i = a_i S_{i-1} + k_i u_i^T,   u_i = beta_i (v_i - a_i S_{i-1}^T k_i),   out_i = q_i S_i,   a_i = exp(log_decay_i)

Letters: b batch, h query heads, g key-value heads, n tokens, f key dim, e value dim. Head j of h reads the state of head j g / h:
grouped heads are not widened. Keys have a norm of at most 1.

A backend of the operation "delta" is an object with the methods of `DeltaBackend`. Results must have gradients with respect to
every tensor of the call. Where `forward` is made of differentiable operations, autograd finds them. A fused kernel brings its
own backward pass: `forward` then calls a torch.autograd.Function or a custom operator, whose backward takes the gradients of out
and state. What such a kernel cannot compute belongs into `refuses`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from regard.ops.backend import AUTO, choose_backend


class DeltaCall(NamedTuple):
    """Arguments of the delta rule over n >= 1 tokens."""

    q: Tensor | None  # (b h n f); None: the state is written and not read
    k: Tensor  # (b g n f)
    v: Tensor  # (b g n e)
    beta: Tensor  # (b g n 1) from 0 (nothing is written) to 1 (the value is replaced)
    state: Tensor  # (b g f e) before the first token
    log_decay: Tensor | None = None  # (b g n 1), at most 0; None: nothing decays


class RawGates(NamedTuple):
    """How a decoding step makes queries, keys and rates of what a layer projects: vectors of length 1, and sigmoids of gates."""

    silu: bool  # before vectors are scaled to length 1
    root: float  # decays are sigmoids of gates to the power of 1 / root


class DeltaBackend(Protocol):
    """An implementation of the delta rule."""

    name: str
    fuses: bool  # it takes queries, keys and values of half precision beside float32 gates and states, any number at once

    def refuses(self, call: DeltaCall) -> str | None:
        """Return a sentence about what this backend cannot compute in a call, or None."""
        ...

    def forward(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """Read the state after every token: out (b h n e), and the state (b g f e) after the last."""
        ...

    def write(self, call: DeltaCall) -> Tensor:
        """Return the state (b g f e) after the last token; the call has no queries."""
        ...


def takes_halves(x: Tensor, state: Tensor, backend: str = AUTO) -> bool:
    """Return whether the backend that gets tokens x (b h n f) and this state needs no conversion to the type of the state."""
    call = DeltaCall(None, x, x, x[..., :1], state)
    return choose_backend("delta", backend, call).fuses


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, *, log_decay: Tensor | None = None, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Return out (b h n e) and the state (b g f e) after the last token."""
    call = DeltaCall(q, k, v, beta, state, log_decay)
    return choose_backend("delta", backend, call).forward(call)


def raw_delta_step(call: DeltaCall, raw: RawGates, backend: str = AUTO) -> tuple[Tensor, Tensor] | None:
    """Return out (b h 1 e) and the state after one token; None: no kernel does it.

    Queries and keys of the call are not of length 1 yet, and gates are in the place of beta and of the log decay.
    """
    chosen = choose_backend("delta", backend, call)
    step = getattr(chosen, "raw_step", None)
    return None if step is None else step(call, raw)


def delta_write(
    k: Tensor, v: Tensor, beta: Tensor, state: Tensor, *, log_decay: Tensor | None = None, backend: str = AUTO
) -> Tensor:
    """Return the state (b g f e) after the last token, where no token reads it."""
    call = DeltaCall(None, k, v, beta, state, log_decay)
    return choose_backend("delta", backend, call).write(call)
