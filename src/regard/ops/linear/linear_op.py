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

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.backend import _BACKENDS, AUTO, choose_backend
from regard.ops.linear.feature_maps import divided_by_last, feature_map, log_gate, safe_ratio
from regard.ops.triton_support import interpreting


class LinearCall(NamedTuple):
    """Arguments of linear attention over n >= 1 tokens."""

    q: Tensor | None  # (b h n f); None: the state is written and not read
    k: Tensor  # (b g n f)
    v: Tensor  # (b g n e)
    state: Tensor  # (b g f e) before the first token
    log_decay: Tensor | None = None  # (b g n 1) or (b g n f), at most 0; None: nothing decays
    norm_state: Tensor | None = None  # (b g f) before the first token; None: there is no norm
    valid: Tensor | None = None  # (b n) keys that are written; None: all
    feature: str = "identity"  # map of queries and keys, of `feature_maps.FEATURES`, before everything else
    scale: float = 1.0  # factor of the features of the queries
    normalize: bool = False  # divide out by the norm: 0 where that has no digits left
    gain: Tensor | None = None  # (b g n 1) constant factor of every output, without a gradient; not together with normalize
    gate_root: float = (
        0.0  # above 0: log_decay holds gates x, and log decays are logsigmoid(x) / gate_root, 0 for keys not written
    )


class ReadCall(NamedTuple):
    """Arguments of reading one state with n >= 1 queries."""

    q: Tensor  # (b h n f)
    state: Tensor  # (b g f e)
    norm_state: Tensor | None = None  # (b g f)
    feature: str = "identity"
    scale: float = 1.0
    normalize: bool = False


class PrefixCall(NamedTuple):
    """Arguments of a prefix sum over n >= 1 tokens."""

    x: Tensor  # (b g n f)
    first: Tensor  # (b g f) before the first token
    log_decay: Tensor | None = None  # (b g n 1) or (b g n f)


class LinearResult(NamedTuple):
    """Results of linear attention."""

    out: Tensor  # (b h n e)
    state: Tensor  # (b g f e) after the last token
    norm: Tensor | None = None  # (b h n 1), where the call has a norm state and out is not divided by it
    norm_state: Tensor | None = None  # (b g f)


class LinearBackend(Protocol):
    """An implementation of linear attention."""

    name: str
    fuses: bool  # features and norms cost no memory, and inputs need not be converted to the type of the sums

    def refuses(self, call: LinearCall | ReadCall | PrefixCall) -> str | None:
        """Return a sentence about what this backend cannot compute in a call, or None."""
        ...

    def forward(self, call: LinearCall) -> LinearResult:
        """Read the state after every token."""
        ...

    def write(self, call: LinearCall) -> tuple[Tensor, Tensor | None]:
        """Return the state (b g f e) after the last token, and the norm state (b g f); the call has no queries."""
        ...

    def read(self, call: ReadCall) -> Tensor:
        """Return q_i S, divided by q_i . z if the call normalizes, (b h n e)."""
        ...

    def prefix_sum(self, call: PrefixCall) -> Tensor:
        """Return y_i = exp(log_decay_i) y_{i-1} + x_i, (b g n f)."""
        ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    scale: float = 1.0,
    gain: Tensor | None = None,
    gate_root: float = 0.0,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Return out (b h n e) and the state (b g f e) after the last token."""
    call = LinearCall(q, k, v, state, log_decay, valid=valid, scale=scale, gain=gain, gate_root=gate_root)
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


def divided_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    norm_state: Tensor,
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    feature: str = "identity",
    backend: str = AUTO,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out / norm (b h n e), 0 where the norm has no digits left, and both states after the last token."""
    call = LinearCall(q, k, v, state, log_decay, norm_state, valid, feature, normalize=True)
    result = choose_backend("linear", backend, call).forward(call)
    return result.out, result.state, result.norm_state


def linear_write(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    gate_root: float = 0.0,
    backend: str = AUTO,
) -> Tensor:
    """Return the state (b g f e) after the last of n >= 0 tokens, where no token reads it."""
    call = LinearCall(None, k, v, state, log_decay, valid=valid, gate_root=gate_root)
    return choose_backend("linear", backend, call).write(call)[0]


def normalized_linear_write(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    norm_state: Tensor,
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    feature: str = "identity",
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Return the state (b g f e) and the norm state (b g f) after the last of n >= 0 tokens, where no token reads them."""
    call = LinearCall(None, k, v, state, log_decay, norm_state, valid, feature)
    return choose_backend("linear", backend, call).write(call)


def linear_read(
    q: Tensor,
    state: Tensor,
    norm_state: Tensor | None = None,
    *,
    feature: str = "identity",
    scale: float = 1.0,
    backend: str = AUTO,
) -> Tensor:
    """Return q_i S (b h n e) of n >= 1 queries, divided by q_i . z where there is a norm state."""
    call = ReadCall(q, state, norm_state, feature, scale, norm_state is not None)
    return choose_backend("linear", backend, call).read(call)


def decayed_prefix_sum(x: Tensor, first: Tensor, *, log_decay: Tensor | None = None, backend: str = AUTO) -> Tensor:
    """Return the sums y_i = exp(log_decay_i) y_{i-1} + x_i (b g n f) of x (b g n f), from y_{-1} = first (b g f)."""
    call = PrefixCall(x, first, log_decay)
    return choose_backend("linear", backend, call).prefix_sum(call)


def counted_step(call: LinearCall, tokens: Tensor, norm: bool, backend: str = AUTO) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return out (b h 1 e), the state, and the number of tokens (b) after one token without padding; None: no kernel does it.

    The call has one log decay a head, the same for all tokens, and `tokens` (b) were written before. norm: outputs are divided by
    the root of the sum of exp(log_decay)^j over j < tokens + 1.
    """
    chosen = choose_backend("linear", backend, call)
    step = getattr(chosen, "counted_step", None)
    return None if step is None else step(call, tokens, norm)


def fuses_features(q: Tensor, state: Tensor, backend: str = AUTO) -> bool:
    """Return whether the backend that reads this state with queries q (b h n f) computes features inside of its kernels."""
    if torch.compiler.is_compiling():
        return _fuses(None, q, state, backend)
    runs = q.is_cuda or interpreting()
    every = tuple(_BACKENDS["linear"].values())
    key = (q.dtype, state.dtype, state.shape[-2:], q.get_device(), state.get_device(), runs, backend, every)
    return _kept_fuses(key, q, state, backend)


def _fuses(key: Hashable, q: Tensor, state: Tensor, backend: str) -> bool:  # noqa: ARG001 - the key of a cache
    return choose_backend("linear", backend, ReadCall(q, state)).fuses


_kept_fuses = signature_cache(_fuses)  # a mechanism decides by it in every call, before the backend of the call is chosen


# What backends without fused kernels compute first and last.


def plain_inputs(call: LinearCall) -> LinearCall:
    """Apply the features, the scale and the validity of a call in plain operations, in the type of its state."""
    dtype = torch.promote_types(call.k.dtype, call.state.dtype)
    call = with_decays(call)
    q, k = call.q, feature_map(call.k.to(dtype), call.feature)
    if call.valid is not None:
        k = k.masked_fill(~call.valid[:, None, :, None], 0)
    if q is not None:
        q = plain_queries(q.to(dtype), call.feature, call.scale)
    return LinearCall(q, k, call.v.to(dtype), call.state, call.log_decay, call.norm_state, normalize=call.normalize)


def with_decays(call: LinearCall) -> LinearCall:
    """Replace the gates of a call by the log decays that they stand for, in the type of its state."""
    if not call.gate_root or call.log_decay is None:
        return call
    gate = call.log_decay.to(torch.promote_types(call.log_decay.dtype, call.state.dtype))
    return call._replace(log_decay=log_gate(gate, call.valid, call.gate_root), gate_root=0.0)


def plain_queries(q: Tensor, feature: str, scale: float) -> Tensor:
    """Apply the feature map and the scale to queries."""
    q = feature_map(q, feature)
    return q if scale == 1 else q * scale


def plain_result(call: LinearCall, result: LinearResult) -> LinearResult:
    """Divide by the norm if a call demands it, and return to the type of its values."""
    out, norm = result.out, result.norm
    if call.normalize:
        assert norm is not None
        out, norm = safe_ratio(out, norm), None
    if call.gain is not None:
        out = out * gain_of_heads(call.gain, out.shape[1]).unsqueeze(-1)
    return LinearResult(out.to(call.v.dtype), result.state, norm, result.norm_state)


def gain_of_heads(gain: Tensor, heads: int) -> Tensor:
    """Return the factors (b h n) of all query heads, from those of key-value heads (b g n 1)."""
    gain = gain.detach().squeeze(-1)
    if gain.shape[1] == heads:
        return gain
    return gain.repeat_interleave(heads // gain.shape[1], 1)


def plain_read(call: ReadCall) -> Tensor:
    """Read a state with the queries of a key-value head side by side."""
    dtype = torch.promote_types(call.q.dtype, call.state.dtype)
    q = plain_queries(call.q.to(dtype), call.feature, call.scale)
    grouped = q.unflatten(1, (call.state.shape[1], -1)).flatten(2, 3)
    state = call.state
    if call.normalize:
        assert call.norm_state is not None
        state = torch.cat([state, call.norm_state.unsqueeze(-1)], -1)  # one product, and one of its gradient
    out = (grouped @ state).reshape(*q.shape[:3], state.shape[-1])
    if call.normalize:
        out = divided_by_last(out)
    return out.to(call.q.dtype)
