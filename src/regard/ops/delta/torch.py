"""The delta rule in linear time: chunks of tokens, one triangular solve each, no loop over tokens.

    S_i = a_i S_{i-1} + k_i u_i^T,   u_i = beta_i (v_i - a_i S_{i-1}^T k_i),   out_i = q_i S_i

Inside a chunk that begins with the state S, let L_i be the sum of log a up to i. Unrolled, the state before i is written is

    a_i S_{i-1} = exp(L_i) S + sum_{j < i} exp(L_i - L_j) k_j u_j^T

and the u_i solve a system with ones on its diagonal and, below it, T_ij = beta_i exp(L_i - L_j) k_i . k_j:

    (I + T) U = beta (V - exp(L) K S),   so   U = X - Y S   with   (I + T) X = beta V,   (I + T) Y = beta exp(L) K

X and Y need no state, so all chunks are solved at once. With K' = exp(L_last - L) K, a chunk turns its state into

    S' = exp(L_last) S + K'^T U = (exp(L_last) I - K'^T Y) S + K'^T X

which is one product of matrices a chunk: the only sequential step. Outputs are then those of linear attention with U for its
values. Letters as in `regard.ops.linear.torch`; f is also the width of the keys. Time n (p + f) (f + e), memory n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.budget import budget
from regard.ops.delta.delta_op import DeltaCall
from regard.ops.linear.prefix import pad_tokens, split_chunks
from regard.ops.linear.torch import chunk_inputs, chunk_scores, join_chunks


class TorchDelta:
    """Chunks of tokens: a triangular solve for each, then one product of matrices from chunk to chunk."""

    name = "torch"
    fuses = False

    def refuses(self, call: DeltaCall) -> str | None:  # noqa: ARG002 - it computes every call
        return None

    def forward(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        assert call.q is not None
        n = call.k.shape[2]
        q, k, v, level = chunk_inputs(call.q, call.k, call.v, call.log_decay)
        x, y = _solved(k, v, split_chunks(call.beta, k.shape[3]), level)
        before, after = _delta_states(k, x, y, level, call.state)
        inside = chunk_scores(q, k, level)
        if level is not None:
            q = q * level.exp().unsqueeze(4)
        earlier = q.flatten(3, 4) @ before
        out = earlier + inside @ (x - y @ before)
        return join_chunks(out, n, k.shape[3]), after

    def write(self, call: DeltaCall) -> Tensor:
        if call.k.shape[2] == 1:
            return _one_token(call)
        _, k, v, level = chunk_inputs(call.k, call.k, call.v, call.log_decay)
        x, y = _solved(k, v, split_chunks(call.beta, k.shape[3]), level)
        return _delta_states(k, x, y, level, call.state)[1]


def _one_token(call: DeltaCall) -> Tensor:
    """The state after one token, by the rule itself."""
    state = call.state if call.log_decay is None else call.log_decay.exp() * call.state
    difference = call.v - call.k @ state
    return state + call.k.mT @ (call.beta * difference)


def _solved(k: Tensor, v: Tensor, beta: Tensor, level: Tensor | None) -> tuple[Tensor, Tensor]:
    """X (b g c p e) and Y (b g c p f) of every chunk."""
    triangle = chunk_scores(k.unsqueeze(4), k, level)
    triangle = (beta * triangle).tril(-1)
    eye = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
    solve = torch.linalg.solve_triangular(triangle, eye.expand_as(triangle), upper=False, unitriangular=True)
    solve = solve * beta.mT
    x = solve @ v
    if level is not None:
        k = k * level.exp()
    return x, solve @ k


def _delta_states(k: Tensor, x: Tensor, y: Tensor, level: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk (b g c f e), and after the last."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    if level is not None:
        last = level[:, :, :, -1:]
        eye = last.exp() * eye
        k = k * (last - level).exp()
    turns = eye - k.mT @ y
    new = k.mT @ x
    if torch.compiler.is_compiling():
        return _states_of_any(turns, new, s)
    states = _turned(turns, new, s)
    return torch.stack(states[:-1], 1).unflatten(0, s.shape[:2]), states[-1].view_as(s)


def _turned(turns: Tensor, new: Tensor, s: Tensor) -> list[Tensor]:
    """The states (b*g f e) before the first chunk and after each."""
    states = [s.flatten(0, 1)]
    each = [x.flatten(0, 1).unbind(1) for x in (turns, new)]
    for turn, add in zip(*each, strict=True):
        states.append(torch.baddbmm(add, turn, states[-1]))
    return states


def _states_of_any(turns: Tensor, new: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """As `_delta_states`, in one graph for all numbers of chunks below `compiled_chunks`, and in one more for each doubling."""
    count, most = turns.shape[2], budget(turns.device).compiled_chunks
    while count >= most:
        most *= 2
    every = _turned(pad_tokens(turns, most), pad_tokens(new, most), s)
    states = torch.stack(every, 1).unflatten(0, s.shape[:2])
    return states[:, :, :count], states[:, :, count : count + 1].squeeze(2)  # an index would make a graph for each count
