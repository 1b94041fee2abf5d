"""The delta rule in linear time: chunks of tokens, one triangular solve each, no loop over tokens.

A token reads what the memory holds under its key and writes only the difference:

    S_i = a_i S_{i-1} + k_i u_i^T,   u_i = beta_i (v_i - a_i S_{i-1}^T k_i),   out_i = q_i S_i

Inside a chunk that begins with the state S, let L_i be the sum of log a up to i. Unrolled, what is there before i is written is

    a_i S_{i-1} = exp(L_i) S + sum_{j < i} exp(L_i - L_j) k_j u_j^T

and the u_i solve a system with ones on its diagonal and, below it, T_ij = beta_i exp(L_i - L_j) k_i . k_j:

    (I + T) U = beta (V - exp(L) K S),   so   U = X - Y S   with   (I + T) X = beta V,   (I + T) Y = beta exp(L) K

X and Y need no state, so all chunks are solved at once. With K' = exp(L_last - L) K, a chunk turns its state into

    S' = exp(L_last) S + K'^T U = (exp(L_last) I - K'^T Y) S + K'^T X

which is one product of matrices a chunk: the only thing done one after the other. Answers are then those of linear attention
with U for its values. Letters as in `chunks`; f is also the width of the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.linear import torch as chunks

MIN_GRAPH_CHUNKS = 8  # chunks that a graph of torch.compile has steps for, or more


def delta_step(k: Tensor, v: Tensor, beta: Tensor, s: Tensor, decay: Tensor | None = None) -> Tensor:
    """The state after one token, k (b g 1 f), v (b g 1 e), beta and decay (b g 1 1): the rule as it is written down."""
    s = s if decay is None else decay.exp() * s
    return s + k.mT @ (beta * (v - k @ s))


def delta_write(k: Tensor, v: Tensor, beta: Tensor, s: Tensor, decay: Tensor | None = None) -> Tensor:
    """The state after n >= 1 tokens, k (b g n f), v (b g n e), beta and decay (b g n 1), from the state s (b g f e)."""
    _, k, v, level = chunks.chunk_inputs(k, k, v, decay)
    return _delta_states(k, *_solved(k, v, chunks.split_chunks(beta, k.shape[3]), level), level, s)[1]


def delta_scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, s: Tensor, decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All answers q_i S_i (b h n e), q (b h n f), and the state after the last token. Time n (p + f) (f + e), memory n."""
    n = k.shape[2]
    q, k, v, level = chunks.chunk_inputs(q, k, v, decay)
    x, y = _solved(k, v, chunks.split_chunks(beta, k.shape[3]), level)
    before, after = _delta_states(k, x, y, level, s)
    inside = chunks.chunk_scores(q, k, level)
    q = q if level is None else q * level.exp().unsqueeze(4)
    out = q.flatten(3, 4) @ before + inside @ (x - y @ before)
    return chunks.join_chunks(out, n, k.shape[3]), after


def _solved(k: Tensor, v: Tensor, beta: Tensor, level: Tensor | None) -> tuple[Tensor, Tensor]:
    """X (b g c p e) and Y (b g c p f) of every chunk."""
    triangle = (beta * chunks.chunk_scores(k.unsqueeze(4), k, level)).tril(-1)
    eye = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
    solve = torch.linalg.solve_triangular(triangle, eye.expand_as(triangle), upper=False, unitriangular=True) * beta.mT
    return solve @ v, solve @ (k if level is None else k * level.exp())


def _delta_states(k: Tensor, x: Tensor, y: Tensor, level: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk (b g c f e), and after the last."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    if level is not None:
        last = level[:, :, :, -1:]
        eye, k = last.exp() * eye, k * (last - level).exp()
    turns, new = eye - k.mT @ y, k.mT @ x
    if torch.compiler.is_compiling():
        return _states_of_any(turns, new, s)
    states = _turned(turns, new, s)
    return torch.stack(states[:-1], 1).unflatten(0, s.shape[:2]), states[-1].view_as(s)


def _turned(turns: Tensor, new: Tensor, s: Tensor) -> list[Tensor]:
    """The states (b*g f e) before the first chunk and after each."""
    states = [s.flatten(0, 1)]
    for turn, add in zip(*(x.flatten(0, 1).unbind(1) for x in (turns, new)), strict=True):
        states.append(torch.baddbmm(add, turn, states[-1]))
    return states


def _states_of_any(turns: Tensor, new: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """As `_delta_states`, in one graph for all numbers of chunks below FEW, and in one more for each time they double."""
    count, most = turns.shape[2], MIN_GRAPH_CHUNKS
    while count >= most:
        most *= 2
    states = torch.stack(_turned(chunks.pad_tokens(turns, most), chunks.pad_tokens(new, most), s), 1).unflatten(0, s.shape[:2])
    return states[:, :, :count], states[:, :, count : count + 1].squeeze(2)  # an index would make a graph for each count
