"""Linear attention in linear time, from differentiable operations: chunks of tokens, no loop over tokens.

    out_i = q_i S_i = sum_{j <= i} (q_i exp(L_i - L_j) . k_j) v_j

with L the cumulative sum of the log decay: nothing (plain sums), one number a token (retention, a gate, a running maximum) or one
a feature. No exponent is ever positive and no factor depends on a later token, so nothing overflows and causality is exact.

Letters: b batch, h query heads, g key-value heads, r = h / g, n tokens, c chunks of p tokens, f features, e value dim.
Time n p (f + e) + n f e, memory n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.budget import budget
from regard.ops.linear.linear_op import (
    LinearCall,
    LinearResult,
    PrefixCall,
    ReadCall,
    plain_inputs,
    plain_read,
    plain_result,
)
from regard.ops.linear.prefix import decay_to_end, prefix_sum, shift_tokens, split_chunks


class TorchLinear:
    """Chunks of tokens: scores inside a chunk, a prefix scan over the states between chunks."""

    name = "torch"
    fuses = False

    def refuses(self, call: LinearCall | ReadCall | PrefixCall) -> str | None:  # noqa: ARG002 - it computes every call
        return None

    def forward(self, call: LinearCall) -> LinearResult:
        return plain_result(call, self._forward(plain_inputs(call)))

    def _forward(self, call: LinearCall) -> LinearResult:
        assert call.q is not None
        n = call.k.shape[2]
        q, k, v, level = chunk_inputs(call.q, call.k, call.v, call.log_decay)
        inside = chunk_scores(q, k, level)
        out, state = _chunk_outputs(inside, q, k, v, level, call.state)
        out = join_chunks(out, n, k.shape[3])
        if call.norm_state is None:
            return LinearResult(out, state)
        ones = torch.ones_like(v[..., :1])
        norm, sums = _chunk_outputs(inside, q, k, ones, level, call.norm_state.unsqueeze(-1))
        norm = join_chunks(norm, n, k.shape[3])
        return LinearResult(out, state, norm, sums.squeeze(-1))

    def write(self, call: LinearCall) -> tuple[Tensor, Tensor | None]:
        call = plain_inputs(call)
        keys, state, norm_state = call.k, call.state, call.norm_state
        if call.log_decay is not None:
            kept = call.log_decay.sum(2).exp()
            keys = keys * decay_to_end(call.log_decay)
            state = kept.unsqueeze(-1) * state
            norm_state = None if norm_state is None else kept * norm_state
        # values times keys, not keys times values: the gradient of the many features then needs no copy
        if norm_state is None:
            return state + (call.v.mT @ keys).mT, None
        ones = torch.ones_like(call.v[..., :1])
        both = torch.cat([call.v, ones], -1).mT @ keys  # one product, and one of its gradient
        return state + both[..., :-1, :].mT, norm_state + both[..., -1, :]

    def read(self, call: ReadCall) -> Tensor:
        return plain_read(call)

    def prefix_sum(self, call: PrefixCall) -> Tensor:
        x, first, log_decay = call
        if log_decay is None:
            return x.cumsum(2) + first.unsqueeze(2)
        if torch.compiler.is_compiling() and log_decay.shape[-1] == 1:  # chunks of ones have far fewer steps to trace
            one = torch.ones_like(log_decay)
            sums = LinearCall(one, one, x, first.unsqueeze(2), log_decay)
            return self.forward(sums).out
        return prefix_sum(x, first, log_decay.exp())


def chunk_inputs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cut into chunks: q (b g c p r f), the r queries of a token side by side; k, v (b g c p ...); decay summed in its chunk."""
    size = _chunk_size(k)
    q = q.unflatten(1, (k.shape[1], -1)).transpose(2, 3)
    q = split_chunks(q, size)
    k = split_chunks(k, size)
    v = split_chunks(v, size)
    if log_decay is None:
        return q, k, v, None
    level = split_chunks(log_decay, size).cumsum(3)
    return q, k, v, level


def _chunk_size(k: Tensor) -> int:
    """Tokens in a chunk: a power of two, and not much longer than the sequence; one size for all in a graph for any length."""
    most = budget(k.device).chunk
    if torch.compiler.is_compiling():
        return most
    bits = max(k.shape[2] - 1, 0).bit_length()
    return min(most, 1 << bits)


def join_chunks(x: Tensor, n: int, size: int) -> Tensor:
    """Return the outputs (b h n e) of queries in chunks (b g c size*r e)."""
    x = x.unflatten(3, (size, -1)).flatten(2, 3)
    return x[:, :, :n].transpose(2, 3).flatten(1, 2)


def _chunk_outputs(inside: Tensor, q: Tensor, k: Tensor, v: Tensor, level: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs (b g c p*r e) from the scores inside each chunk and from all chunks before; the state after the last."""
    out, after = _between(q, k, v, level, first)
    out = torch.baddbmm(out.flatten(0, 2), inside.flatten(0, 2), v.flatten(0, 2))  # adds without another pass over out
    return out.unflatten(0, k.shape[:3]), after


def _between(q: Tensor, k: Tensor, v: Tensor, level: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs from the chunks before each query's own, and the state after the last chunk."""
    if level is None:
        before, after = _chunk_states(k.mT @ v, first)
        return q.flatten(3, 4) @ before, after
    last = level[:, :, :, -1:]
    late = (last - level).exp()
    whole = last.mT.exp()
    if level.shape[-1] > 1:
        new = (k * late).mT @ v
        before, after = _chunk_states(new, first, whole)
        decayed = q * level.exp().unsqueeze(4)
        return decayed.flatten(3, 4) @ before, after
    new = k.mT @ (v * late)  # one number a token is cheaper on v and on the output
    before, after = _chunk_states(new, first, whole)
    out = q.flatten(3, 4) @ before
    out = out.unflatten(3, q.shape[3:5]) * level.exp().unsqueeze(4)
    return out.flatten(3, 4), after


def _chunk_states(new: Tensor, first: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after the last; a chunk adds new (b g c f e) and keeps whole (b g c f 1) of the state."""
    after = prefix_sum(new, first, whole)
    return shift_tokens(after, first), after[:, :, -1]


def chunk_scores(q: Tensor, k: Tensor, level: Tensor | None) -> Tensor:
    """Return q_i exp(L_i - L_j) . k_j for j <= i of one chunk, else 0: (... p r f), (... p f) -> (... p*r p)."""
    if level is not None and level.shape[-1] > 1:
        scores = _halved(q.flatten(0, 2), k.flatten(0, 2), level.flatten(0, 2))
        return scores.unflatten(0, k.shape[:3])
    size = k.shape[3]
    future = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    products = q.flatten(3, 4) @ k.mT
    if level is None:
        hidden = future.repeat_interleave(q.shape[4], 0)
        return products.masked_fill_(hidden, 0)
    weight = (level - level.mT).masked_fill(future, -torch.inf)
    weight = weight.exp()
    scores = products.unflatten(3, (size, -1)) * weight.unsqueeze(4)
    return scores.flatten(3, 4)


def _halved(q: Tensor, k: Tensor, level: Tensor) -> Tensor:
    """Scores under a decay per feature: q (b p r f), k and level (b p f) -> (b p*r p), p a power of two.

    exp(L_i - L_j) differs by feature, so it must be split between q and k; taken apart at the last token of the first
    half, both factors are at most 1 for i in the second half and j in the first. The two halves are blocks of their own.
    """
    b, size = q.shape[:2]
    if size == 1:
        return q.squeeze(1) @ k.mT
    halves = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in (q, k, level)]
    near = _halved(*halves)
    first, second = near.unflatten(0, (b, 2)).unbind(1)
    (_, q2), (k1, _), (level1, level2) = (x.chunk(2, 1) for x in (q, k, level))
    turn = level1[:, -1:]
    late = q2 * (level2 - turn).exp().unsqueeze(2)
    early = k1 * (turn - level1).exp()
    far = late.flatten(1, 2) @ early.mT
    upper = torch.cat([first, torch.zeros_like(first)], 2)
    lower = torch.cat([far, second], 2)
    return torch.cat([upper, lower], 1)
