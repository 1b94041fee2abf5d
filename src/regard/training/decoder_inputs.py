"""Inputs of a decoder in training.

Letters: b examples, m target tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.data.batch import BEGIN, Batch
from regard.mixers.base import Core
from regard.models.translator import Translator

DecoderInputs = Callable[[int, Tensor | None], Tensor]


def sequence(batch: Batch) -> Tensor:
    """Return the target (b m); raise ValueError if there is none."""
    target = batch.target
    if target is None or target.dim() != 2 or not target.shape[1]:
        found = "nothing" if target is None else f"shape {tuple(target.shape)}"
        raise ValueError(f"a decoder learns sequences: the target needs shape (batch, length), END included, not {found}")
    return target


def twice(batch: Batch) -> Batch:
    """Repeat a batch: every row, and behind all of them every row again."""
    source, source_valid, target, valid = (None if x is None else torch.cat([x, x]) for x in batch[:4])
    assert source is not None
    return Batch(source, source_valid, target, valid)


def before(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Take x (b m ...) of the real token before each; where there is none, any."""
    if valid is None:
        return torch.cat([x[:, :1], x[:, :-1]], 1)
    at = _previous_real(valid).clamp_min(0)
    inner = [1] * (x.dim() - 2)
    at = at.view(*at.shape, *inner)
    return x.take_along_dim(at, 1)


def at_front(target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mark tokens (b m) without a real one before them."""
    if valid is None:
        at = torch.arange(target.shape[1], device=target.device)
        return (at == 0).expand_as(target)
    return _previous_real(valid) < 0


def previous_tokens(target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Take the true token before each (b m): BEGIN, and all but the last. Padding may lie anywhere."""
    previous = before(target, valid)
    front = at_front(target, valid)
    return previous.masked_fill(front, BEGIN)


def _previous_real(valid: Tensor) -> Tensor:
    """Find the position (b m) of the real token before each, -1 if there is none."""
    at = torch.arange(valid.shape[1], device=valid.device)
    last = torch.where(valid, at, -1).cummax(1).values
    none = torch.full_like(last[:, :1], -1)
    return torch.cat([none, last[:, :-1]], 1)


def needed_mask(model: nn.Module, valid: Tensor | None) -> Tensor | None:
    """Return the mask that a causal decoder needs for padding behind its target: none, unless a mixer learns from its tokens."""
    learns = any(isinstance(module, Core) and module.learns for module in model.modules())
    return valid if learns else None


def step_by_step(model: Translator, batch: Batch, feed: DecoderInputs) -> Tensor:
    """Compute scores (b m v) of a decoder, one token after another.

    `feed(i, scores)` is its input i, tokens (b 1) or vectors (b 1 w), after the scores (b 1 v) of its last real step (None: there
    was none).
    """
    m = sequence(batch).shape[1]
    valid = batch.target_valid
    if valid is not None and bool((valid[:, 1:] <= valid[:, :-1]).all()):
        valid = needed_mask(model, valid)  # all padding lies behind
    state = model.start(batch.source, batch.source_valid)
    steps: list[Tensor] = []
    last: Tensor | None = None
    for i in range(m):
        now = None if valid is None else valid[:, i : i + 1]
        scores, state = model.extend(state, feed(i, last), now)
        steps.append(scores)
        if last is not None and now is not None:
            scores = torch.where(now[..., None], scores, last)
        last = scores
    return torch.cat(steps, 1)


@contextmanager
def no_gradients() -> Iterator[None]:
    """Compute without gradients, and clear what autocast has converted, so that later passes have gradients."""
    try:
        with torch.no_grad():
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; afterwards every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with no_gradients():
            yield
    finally:
        for module in training:
            module.training = True
