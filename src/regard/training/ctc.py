"""Connectionist temporal classification (CTC): the total probability of all alignments of a target, and the best alignment.

A path is a class for every slot. Its output is the path with repeated classes merged and blanks removed. A path goes through the
states blank, first, blank, second, ..., blank; each slot stays, takes a step, or skips a blank between two different tokens.
Nothing here synchronises with the device: a pass can be captured as a CUDA graph.

Letters: b batch, l target tokens, t slots, v vocabulary, c classes: the blank and the l tokens of a row's own target,
s = 2 l + 1 states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CTC_LOG_ZERO = -1e4  # its exponential is 0 in every float type, with finite gradients


def same(target: Tensor) -> Tensor:
    """Return the class of every token of a row (b l): 1 + the index of its first occurrence, so equal tokens share a class."""
    equal = target[:, :, None] == target[:, None]
    first = equal.long().argmax(-1)
    return 1 + first


def needed(classes: Tensor, length: Tensor) -> Tensor:
    """Count the slots that each target needs (b): one a token, and a blank between two equal tokens."""
    real = torch.arange(1, classes.shape[1], device=length.device) < length[:, None]
    repeated = classes[:, 1:] == classes[:, :-1]
    again = repeated & real
    return length + again.sum(1)


def odds(logs: Tensor, columns: Tensor) -> Tensor:
    """Gather log-probabilities (b t c) of the tokens `columns` (b c) of each row from those of the vocabulary (b t v)."""
    index = columns[:, None].expand(-1, logs.shape[1], -1)
    return logs.gather(2, index)


def certain(path: Tensor, logs: Tensor) -> Tensor:
    """Return log-probabilities shaped as `logs` (b t c) with all probability on a path (b t)."""
    classes = torch.arange(logs.shape[2], device=logs.device)
    here = path[..., None] == classes
    return torch.where(here, 0.0, CTC_LOG_ZERO).to(logs.dtype)


def ctc(logs: Tensor, classes: Tensor, length: Tensor) -> Tensor:
    """Compute -log of the probability of all paths whose output is the first `length` (b) of the classes (b l): (b).

    `logs` (b t c) holds only the classes of each row's own target, c of them and not v. Without such a path the loss is inf
    and its gradient 0. Graves et al. 2006.
    """
    if not logs.shape[1]:
        return logs.sum((1, 2)).masked_fill(length > 0, torch.inf)
    return _CtcLoss.apply(logs, classes, length)


@torch.no_grad()
def best_path(logs: Tensor, classes: Tensor, length: Tensor) -> Tensor:
    """Find the most probable path whose output is the first `length` (b) of the classes (b l), by logs (b t c): (b t).

    Viterbi's algorithm.
    """
    if not logs.shape[1]:
        return classes.new_zeros(len(logs), 0)
    states, emit, skip = _ctc_states(logs, classes)
    transition = F.pad(skip[..., None], (0, 2))  # scores from two states before, from one before, from itself
    front = torch.arange(states.shape[1], device=logs.device) < 2
    start = front.to(logs.dtype).log()
    best = F.pad(start + emit[:, 0], (2, 0), value=-torch.inf)
    moves = []
    for here in emit.unbind(1)[1:]:
        arriving = best.unfold(1, 3, 1) + transition
        top = arriving.max(-1)
        torch.add(top.values, here, out=best[:, 2:])
        moves.append(top.indices)
    last = 2 * length[:, None]
    token = best.gather(1, last + 1)
    blank = best.gather(1, last + 2)
    state = last - (token > blank).long()
    path = [state]
    for move in reversed(moves):
        state = state - 2 + move.gather(1, state)
        path.append(state)
    visited = torch.cat(path[::-1], 1)
    return states.gather(1, visited)


class States(NamedTuple):
    """Hold the states of paths."""

    classes: Tensor  # (b s)
    emit: Tensor  # (b t s) log-probabilities
    skip: Tensor  # (b s) score of a transition from two states before: 0, or -inf where a blank must not be skipped


def _ctc_states(logs: Tensor, classes: Tensor) -> States:
    count = 2 * classes.shape[1] + 1
    states = classes.new_zeros(len(classes), count)
    states[:, 1::2] = classes
    alike = states == states.roll(2, 1)  # irrelevant for the first two, which have no such transition
    skip = logs.new_zeros(states.shape).masked_fill(alike, -torch.inf)
    return States(states, odds(logs, states), skip)


class _CtcLoss(torch.autograd.Function):
    """Compute the loss by the forward-backward algorithm.

    With forward sums `to` over all paths to a state and backward sums `on` over all paths from it,

        d loss / d logs[i, k] = -sum over states j of class k of to[i, j] p[i, j] on[i, j] / total,

    the share of paths with class k in slot i; total is that sum over all states, in every slot. The backward sums are forward
    sums of the reversed problem: both are computed in one batch. The gradient is computed along with the loss.
    """

    @staticmethod
    def forward(ctx: Any, logs: Tensor, classes: Tensor, length: Tensor) -> Tensor:
        states, emit, skip = _ctc_states(logs, classes)
        here = torch.arange(states.shape[1], device=logs.device).expand_as(states)
        left = 2 * length[:, None] - here
        front = here < 2  # first states of paths
        end = (left == 0) | (left == 1)  # last states
        if not ctx.needs_input_grad[0]:
            last = _path_sums(front, emit, skip)[-1]
            return -_log_total(last + emit[:, -1], end)
        to, on = _both_sums(front, end, emit, skip).chunk(2)  # (b t s) each
        to = to + emit
        total = _log_total(to[:, -1], end)
        impossible = (total == -torch.inf)[:, None, None]
        share = (to + on.flip(1, 2)).softmax(-1)
        share = share.masked_fill(impossible, 0)
        grad = torch.zeros_like(logs)
        index = classes[:, None].expand(-1, logs.shape[1], -1)
        grad.scatter_add_(2, index, share[..., 1::2])
        torch.sum(share[..., ::2], -1, out=grad[..., 0])
        ctx.save_for_backward(grad)
        return -total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * -up[:, None, None], None, None


def _both_sums(front: Tensor, end: Tensor, emit: Tensor, skip: Tensor) -> Tensor:
    """Compute logs of forward sums of the problem and, behind them, of the reversed problem: (2b t s)."""
    fronts = torch.cat([front, end.flip(1)])
    emits = torch.cat([emit, emit.flip(1, 2)])
    backward = skip.flip(1).roll(2, 1)
    skips = torch.cat([skip, backward])
    return _path_sums(fronts, emits, skips).transpose(0, 1)


def _path_sums(front: Tensor, emit: Tensor, skip: Tensor) -> Tensor:
    """Compute logs of forward sums from the states `front` (b s), before the emission of each slot: (t b s)."""
    b, t, s = emit.shape
    sums = emit.new_empty(t, b, s)
    now = emit.new_full((b, s + 2), -torch.inf)  # two unreachable states in front
    torch.log(front.to(emit.dtype), out=sums[0])
    for i in range(1, t):
        torch.add(sums[i - 1], emit[:, i - 1], out=now[:, 2:])
        stay_or_step = torch.logaddexp(now[:, 2:], now[:, 1:-1])
        torch.logaddexp(stay_or_step, now[:, :-2] + skip, out=sums[i])
    return sums


def _log_total(last: Tensor, end: Tensor) -> Tensor:
    """Compute the log of the sum over all paths (b) from the sums of all states after the last slot (b s)."""
    last = last.masked_fill(~end, -torch.inf)
    return last.logsumexp(1)
