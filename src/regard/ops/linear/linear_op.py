"""Linear attention from a given state: one function for reading after every token, one for writing alone, one for sums.

    S_i = exp(log_decay_i) S_{i-1} + k_i v_i^T,   out_i = q_i S_i
    z_i = exp(log_decay_i) z_{i-1} + k_i,         norm_i = q_i . z_i

Letters: b batch, h query heads, g key-value heads, n tokens, f features, e value dim. Head j of h reads the state of head
j g / h: grouped heads are not widened. A log decay is at most 0: one for each token and head, or one for each feature.

A backend of the operation "linear" is an object with the methods of `LinearBackend`. Results must have gradients with respect to
every tensor of the call. Where `forward` is made of differentiable operations, autograd finds them. A fused kernel brings its
own backward pass: `forward` then calls a torch.autograd.Function or a custom operator, whose backward takes the gradients of all
results (out, state, norm, norm_state). What such a kernel cannot compute (second derivatives, a function transform, float64)
belongs into `refuses`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from regard.ops.backend import AUTO, choose_backend


class LinearCall(NamedTuple):
    """Arguments of linear attention over n >= 1 tokens."""

    q: Tensor | None  # (b h n f); None: the state is written and not read
    k: Tensor  # (b g n f)
    v: Tensor  # (b g n e)
    state: Tensor  # (b g f e) before the first token
    log_decay: Tensor | None = None  # (b g n 1) or (b g n f), at most 0; None: nothing decays
    norm_state: Tensor | None = None  # (b g f) before the first token; None: there is no norm


class PrefixCall(NamedTuple):
    """Arguments of a prefix sum over n >= 1 tokens."""

    x: Tensor  # (b g n f)
    first: Tensor  # (b g f) before the first token
    log_decay: Tensor | None = None  # (b g n 1) or (b g n f)


class LinearResult(NamedTuple):
    """Results of linear attention."""

    out: Tensor  # (b h n e)
    state: Tensor  # (b g f e) after the last token
    norm: Tensor | None = None  # (b h n 1), where the call has a norm state
    norm_state: Tensor | None = None  # (b g f)


class LinearBackend(Protocol):
    """An implementation of linear attention."""

    name: str

    def refuses(self, call: LinearCall | PrefixCall) -> str | None:
        """Return a sentence about what this backend cannot compute in a call, or None."""
        ...

    def forward(self, call: LinearCall) -> LinearResult:
        """Read the state after every token."""
        ...

    def write(self, call: LinearCall) -> Tensor:
        """Return the state (b g f e) after the last token; the call has neither queries nor a norm."""
        ...

    def prefix_sum(self, call: PrefixCall) -> Tensor:
        """Return y_i = exp(log_decay_i) y_{i-1} + x_i, (b g n f)."""
        ...


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, log_decay: Tensor | None = None, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Return out (b h n e) and the state (b g f e) after the last token."""
    call = LinearCall(q, k, v, state, log_decay)
    result = choose_backend("linear", backend, call).forward(call)
    return result.out, result.state


def normalized_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    norm_state: Tensor,
    *,
    log_decay: Tensor | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (b h n e), norm (b h n 1), and both states after the last token. The division is the caller's."""
    call = LinearCall(q, k, v, state, log_decay, norm_state)
    result = choose_backend("linear", backend, call).forward(call)
    return result.out, result.norm, result.state, result.norm_state


def linear_write(k: Tensor, v: Tensor, state: Tensor, *, log_decay: Tensor | None = None, backend: str = AUTO) -> Tensor:
    """Return the state (b g f e) after the last of n >= 0 tokens, where no token reads it."""
    call = LinearCall(None, k, v, state, log_decay)
    return choose_backend("linear", backend, call).write(call)


def decayed_prefix_sum(x: Tensor, first: Tensor, *, log_decay: Tensor | None = None, backend: str = AUTO) -> Tensor:
    """Return the sums y_i = exp(log_decay_i) y_{i-1} + x_i (b g n f) of x (b g n f), from y_{-1} = first (b g f)."""
    call = PrefixCall(x, first, log_decay)
    return choose_backend("linear", backend, call).prefix_sum(call)
