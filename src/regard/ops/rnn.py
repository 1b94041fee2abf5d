"""A recurrent network over whole sequences, by PyTorch's own kernels, for rows that end early and start from any state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.transforms import transformed


def rnn_scan(
    x: Tensor, state: list[Tensor], weights: list[Tensor], *, both: bool = False, count: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return y (b n hidden), of two directions side by side, and the last state, where x (b n w) has `count` (b) real tokens.

    The state is one tensor (directions b hidden) for a GRU, two for an LSTM.
    The weights are those of torch.nn.GRU and LSTM, in their order.
    """
    if any(h.shape[1] != x.shape[0] for h in state):  # native code would read beyond the end of the state
        raise ValueError(f"the state holds {state[0].shape[1]} sequences but x has {x.shape[0]}: start anew with that many")
    if x.device.type == "meta":
        return _counted(x, state, weights)
    if transformed():
        return _plain_steps(x, state, weights, both, count)
    if count is None:
        y, *last = _steps(state, weights, both)(x)
        return y, last
    some = count.clamp_min(1)  # a row needs a token; what that does to a row without one is undone below
    packed = pack_padded_sequence(x, some.cpu(), batch_first=True, enforce_sorted=False)
    assert packed.sorted_indices is not None and packed.unsorted_indices is not None
    before = [h.index_select(1, packed.sorted_indices) for h in state]
    y, *after = _steps(before, weights, both)(packed.data, packed.batch_sizes)
    y, _ = pad_packed_sequence(packed._replace(data=y), batch_first=True, total_length=x.shape[1])
    last = [h.index_select(1, packed.unsorted_indices) for h in after]
    some_token = count[:, None] > 0
    return y, [torch.where(some_token, new, old) for new, old in zip(last, state, strict=True)]


def _steps(state: list[Tensor], weights: list[Tensor], both: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The network, for tokens (b n w) or for packed ones and their batch sizes."""
    network: Any = torch.gru if len(state) == 1 else torch.lstm
    train = torch.is_grad_enabled()  # cuDNN keeps what a gradient needs in training alone; there is no dropout to differ by

    def run(x: Tensor, *sizes: Tensor) -> tuple[Tensor, ...]:
        batch_first = () if sizes else (True,)
        with warnings.catch_warnings():
            # weights of half precision are computed with as copies, which cuDNN has to put side by side at every call
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            return network(x, *sizes, state[0] if len(state) == 1 else state, weights, True, 1, 0.0, train, both, *batch_first)

    return run


def _plain_steps(
    x: Tensor, state: list[Tensor], weights: list[Tensor], both: bool, count: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The same a token at a time, where a function transform has to follow: the kernels refuse."""
    found, last = [], []
    for way in range(1 + both):
        held, out = [h[way] for h in state], []
        step = -1 if way else 1
        own = weights[4 * way : 4 * way + 4]
        for t in range(x.shape[1])[::step]:
            after = _cell(x[:, t], held, own)
            if count is not None:  # padding is as if absent
                real = (t < count)[:, None]
                after = [torch.where(real, new, old) for new, old in zip(after, held, strict=True)]
            held = after
            out.append(held[0])
        found.append(torch.stack(out[::step], 1))
        last.append(held)
    y = torch.cat(found, -1)
    if count is not None:
        valid = torch.arange(x.shape[1], device=x.device) < count[:, None]
        y = y * valid.unsqueeze(-1)
    return y, [torch.stack(h) for h in zip(*last, strict=True)]


def _cell(x: Tensor, state: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """One step of a GRU or an LSTM: x (b w), state (b hidden) each."""
    w, u, b, c = weights
    new = linear(x, w, b)
    old = linear(state[0], u, c)
    if len(state) == 2:
        i, f, g, o = (new + old).chunk(4, -1)
        memory = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * memory.tanh(), memory]
    r, z, n = new.chunk(3, -1)
    hr, hz, hn = old.chunk(3, -1)
    z = (z + hz).sigmoid()
    kept = 1 - z
    reset = (r + hr).sigmoid()
    proposed = (n + reset * hn).tanh()
    return [kept * proposed + z * state[0]]


def _counted(x: Tensor, state: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Tensors without content need not wait for each other: the products of all steps at once, which are just as many."""
    for matrix in (w for w in weights if w.dim() == 2):
        x.new_empty(*x.shape[:2], matrix.shape[1]) @ matrix.mT
    width = state[0].shape[0] * state[0].shape[2]
    return x.new_empty(*x.shape[:2], width), state
