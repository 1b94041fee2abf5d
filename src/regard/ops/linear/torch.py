"""Causal linear attention in linear time, from ordinary differentiable operations: chunks of tokens, no loop over tokens.

Behind every kernel mechanism is one recurrence, read after each write:

    S_i = exp(decay_i) S_{i-1} + k_i v_i^T,   out_i = q_i S_i,   so   out_i = sum_{j <= i} (q_i exp(L_i - L_j) . k_j) v_j

with L the running sum of decay: nothing (plain sums), one number a token (retention, a gate, a running maximum) or one a
feature. No exponent here is ever positive and no factor ever looks ahead, so nothing overflows and the future stays unseen.

Letters: b batch, h query heads, g key-value heads, r = h / g, n tokens, c chunks of p tokens, f features, e value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.transforms import exporting

CHUNK = 64  # tokens in a chunk, at most; a power of two
PREFIX_STEPS = 16  # steps taken one after the other by `prefix_scan`; every block takes its step at the same time
TensorTuple = tuple[Tensor, ...]


def linear_scan(q: Tensor, k: Tensor, v: Tensor, s: Tensor, decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All n >= 1 answers q_i S_i at once (b h n e), going on from the state s (b g f e), and the state after them.

    q (b h n f), k (b g n f), v (b g n e), decay (b g n 1) or (b g n f), at most 0. Time n p (f + e) + n f e, memory n.
    """
    n, (q, k, v, level) = k.shape[2], chunk_inputs(q, k, v, decay)
    out, s = _chunk_outputs(chunk_scores(q, k, level), q, k, v, level, s)
    return join_chunks(out, n, k.shape[3]), s


def linear_scan_normalized(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, decay: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As scan, with the answers q_i z_i (b h n 1) of the state z (b g f) whose values are all 1: out, norm, s, z."""
    n, (q, k, v, level) = k.shape[2], chunk_inputs(q, k, v, decay)
    inside = chunk_scores(q, k, level)
    out, s = _chunk_outputs(inside, q, k, v, level, s)
    norm, sums = _chunk_outputs(inside, q, k, torch.ones_like(v[..., :1]), level, z.unsqueeze(-1))
    return join_chunks(out, n, k.shape[3]), join_chunks(norm, n, k.shape[3]), s, sums.squeeze(-1)


def prefix_sum(x: Tensor, first: Tensor, keep: Tensor | None = None) -> Tensor:
    """y_i = keep_i y_{i-1} + x_i along the third dimension, from y_{-1} = first; plain sums without keep."""
    if keep is None:
        if torch.compiler.is_compiling():
            return x.cumsum(2) + first.unsqueeze(2)
        return prefix_scan(lambda a, b: (a[0] + b[0],), (x,), (first,))[0]
    return prefix_scan(_join_decay, (keep, x), (torch.ones_like(keep[:, :, 0]), first))[1]


def cumulative_max(x: Tensor, first: Tensor) -> Tensor:
    """The largest so far, along the third dimension."""
    if torch.compiler.is_compiling():
        return torch.maximum(x.cummax(2).values, first.unsqueeze(2))
    return prefix_scan(lambda a, b: (torch.maximum(a[0], b[0]),), (x,), (first,))[0]


def prefix_scan(join: Callable[[TensorTuple, TensorTuple], TensorTuple], parts: TensorTuple, first: TensorTuple) -> TensorTuple:
    """y_i = join(y_{i-1}, x_i) along the third dimension of parts (b g n ...), from y_{-1} = first (b g ...); join associates.

    All blocks of RUN tokens walk at once, then their ends are scanned in the same way: work n, RUN log n / log RUN steps.
    """
    n = parts[0].shape[2]
    if torch.compiler.is_compiling():
        return _prefix_of_any(join, parts, first, PREFIX_STEPS // 2)
    if n <= PREFIX_STEPS:
        return tuple(torch.stack(y, 2) for y in zip(*_prefix_steps(join, parts, 2, first), strict=True))
    local = _prefix_steps(join, tuple(split_chunks(x, PREFIX_STEPS) for x in parts), 3)
    ends = prefix_scan(join, local[-1], first)
    starts = tuple(_shift(y, y0).unsqueeze(3) for y, y0 in zip(ends, first, strict=True))
    joined = join(starts, tuple(torch.stack(y, 3) for y in zip(*local, strict=True)))
    return tuple(y.flatten(2, 3)[:, :, :n] for y in joined)


def _prefix_of_any(
    join: Callable[[TensorTuple, TensorTuple], TensorTuple], parts: TensorTuple, first: TensorTuple, most: int
) -> TensorTuple:
    """The same in one graph for all n < most, and in one more for each factor of RUN: `most` steps, some of them for nothing."""
    n = parts[0].shape[2]
    if n < most:
        steps = _prefix_steps(join, tuple(pad_tokens(x, most) for x in parts), 2, first)
        return tuple(torch.stack(y, 2)[:, :, :n] for y in zip(*steps, strict=True))
    local = _prefix_steps(join, tuple(split_chunks(x, PREFIX_STEPS) for x in parts), 3)
    ends = _prefix_of_any(join, local[-1], first, 2 * PREFIX_STEPS)
    starts = tuple(_shift(y, y0).unsqueeze(3) for y, y0 in zip(ends, first, strict=True))
    joined = join(starts, tuple(torch.stack(y, 3) for y in zip(*local, strict=True)))
    return tuple(y.flatten(2, 3)[:, :, :n] for y in joined)


def pad_tokens(x: Tensor, size: int) -> Tensor:
    """(b g n ...) -> (b g size ...) with zeros behind."""
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, size - x.shape[2]))


def _prefix_steps(
    join: Callable[[TensorTuple, TensorTuple], TensorTuple], parts: TensorTuple, dim: int, first: TensorTuple | None = None
) -> list[TensorTuple]:
    walked: list[TensorTuple] = []
    for step in zip(*(x.unbind(dim) for x in parts), strict=True):
        last = walked[-1] if walked else first
        walked.append(step if last is None else join(last, step))
    return walked


def _join_decay(a: TensorTuple, b: TensorTuple) -> TensorTuple:
    """Two stretches of y -> keep y + x are one."""
    return a[0] * b[0], torch.addcmul(b[1], b[0], a[1])


def _shift(y: Tensor, first: Tensor) -> Tensor:
    """What was there before each step, from what is there after it."""
    if torch.compiler.is_compiling():  # where one step less could be one step: a size that has graphs of its own
        return torch.cat([first.unsqueeze(2), y], 2)[:, :, : y.shape[2]]
    return torch.cat([first.unsqueeze(2), y[:, :, :-1]], 2)


def chunk_inputs(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q (b g c p r f), the r queries of a token side by side; k, v (b g c p ...); decay summed up from its chunk's start."""
    size = _chunk_size(k.shape[2])
    q = q.unflatten(1, (k.shape[1], -1)).transpose(2, 3)
    return (
        split_chunks(q, size),
        split_chunks(k, size),
        split_chunks(v, size),
        None if decay is None else split_chunks(decay, size).cumsum(3),
    )


def _chunk_outputs(inside: Tensor, q: Tensor, k: Tensor, v: Tensor, level: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor]:
    """What queries get (b g c p*r e) from their own chunk, by its scores, and from all before; the state after the last."""
    out, after = _between(q, k, v, level, first)
    out = torch.baddbmm(out.flatten(0, 2), inside.flatten(0, 2), v.flatten(0, 2))  # adds without another pass over out
    return out.unflatten(0, k.shape[:3]), after


def _between(q: Tensor, k: Tensor, v: Tensor, level: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor]:
    """What queries get from the chunks before their own, and the state after the last chunk."""
    if level is None:
        before, after = _chunk_states(k.mT @ v, first)
        return q.flatten(3, 4) @ before, after
    last = level[:, :, :, -1:]
    late, whole = (last - level).exp(), last.mT.exp()
    if level.shape[-1] > 1:
        before, after = _chunk_states((k * late).mT @ v, first, whole)
        return (q * level.exp().unsqueeze(4)).flatten(3, 4) @ before, after
    before, after = _chunk_states(k.mT @ (v * late), first, whole)  # one number a token is cheaper on v and on the answer
    answer = (q.flatten(3, 4) @ before).unflatten(3, q.shape[3:5])
    return (answer * level.exp().unsqueeze(4)).flatten(3, 4), after


def _chunk_states(new: Tensor, first: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after the last; a chunk adds new (b g c f e) and keeps whole (b g c f 1) of what was."""
    after = prefix_sum(new, first, whole)
    return _shift(after, first), after[:, :, -1]


def chunk_scores(q: Tensor, k: Tensor, level: Tensor | None) -> Tensor:
    """q_i exp(L_i - L_j) . k_j for j <= i of one chunk, else 0: (... p r f), (... p f) -> (... p*r p)."""
    if level is not None and level.shape[-1] > 1:
        return _halved(q.flatten(0, 2), k.flatten(0, 2), level.flatten(0, 2)).unflatten(0, k.shape[:3])
    size = k.shape[3]
    future = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    products = q.flatten(3, 4) @ k.mT
    if level is None:
        return products.masked_fill_(future.repeat_interleave(q.shape[4], 0), 0)
    weight = (level - level.mT).masked_fill(future, -torch.inf).exp()
    return (products.unflatten(3, (size, -1)) * weight.unsqueeze(4)).flatten(3, 4)


def _halved(q: Tensor, k: Tensor, level: Tensor) -> Tensor:
    """Scores under a decay per feature: q (b p r f), k and level (b p f) -> (b p*r p), p a power of two.

    exp(L_i - L_j) differs by feature, so it must be split between q and k; taken apart at the last token of the first
    half, both factors are at most 1 for i in the second half and j in the first. The two halves are blocks of their own.
    """
    b, size = q.shape[:2]
    if size == 1:
        return q.squeeze(1) @ k.mT
    near = _halved(*(x.unflatten(1, (2, -1)).flatten(0, 1) for x in (q, k, level)))
    first, second = near.unflatten(0, (b, 2)).unbind(1)
    (_, q2), (k1, _), (level1, level2) = (x.chunk(2, 1) for x in (q, k, level))
    turn = level1[:, -1:]
    far = (q2 * (level2 - turn).exp().unsqueeze(2)).flatten(1, 2) @ (k1 * (turn - level1).exp()).mT
    return torch.cat([torch.cat([first, torch.zeros_like(first)], 2), torch.cat([far, second], 2)], 1)


def _chunk_size(n: int) -> int:
    """Tokens in a chunk: a power of two, and not much longer than the sequence; one size for all in a graph for any length."""
    return CHUNK if torch.compiler.is_compiling() else min(CHUNK, 1 << max(n - 1, 0).bit_length())


def split_chunks(x: Tensor, size: int) -> Tensor:
    """(b g n ...) -> (b g c size ...), filled up with zeros: a token of zeros writes nothing and decays nothing.

    Under torch.compile there are always two chunks or more and something to fill up: graphs differ for sizes of 0 and 1.
    """
    if exporting() and isinstance(x.shape[2], torch.SymInt):  # torch cannot prove that the chunks hold every length of a range
        raise NotImplementedError(
            "kernels that go in chunks are exported for one length: leave the length out of dynamic_shapes, the batch may stay"
        )
    if torch.compiler.is_compiling():
        chunks = max(x.shape[2] // size + 1, 2)
        return pad_tokens(x, chunks * size).unflatten(2, (chunks, size))
    if missing := -x.shape[2] % size:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    return x.contiguous().unflatten(2, (-1, size))


def join_chunks(x: Tensor, n: int, size: int) -> Tensor:
    """(b g c size*r e) -> (b h n e), the inverse of how queries were cut."""
    x = x.unflatten(3, (size, -1)).flatten(2, 3)[:, :, :n]
    return x.transpose(2, 3).flatten(1, 2)
