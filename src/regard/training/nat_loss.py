"""Losses of non-autoregressive models.

A pass whose slots come from a source or from a length reads no number from the device, so it can be captured (`GraphedStep`).

Letters: b batch, l target tokens, t slots, v vocabulary, c classes: the blank and the l tokens of a row's own target.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.batch import Batch
from regard.mixers.feature_math import upcast
from regard.models.length_predictor import length_targets
from regard.models.nat import (
    BLANK,
    CtcSlots,
    EncodedSource,
    FixedSlots,
    LengthSlots,
    MaskedSlots,
    NatTranslator,
    SlotInputs,
    left_aligned,
)
from regard.training.ctc import best_path, certain, ctc, needed, odds, same
from regard.training.decoder_inputs import no_gradients, sequence, twice
from regard.training.losses import Loss, between, check_smoothing, cross_entropy

Fraction = float | Tensor  # of 0 dimensions


def nat_loss(model: NatTranslator, batch: Batch, *, smoothing: float = 0.0, glance: Fraction = 0.0, rdrop: float = 0.0) -> Loss:
    """Compute minus the log-probability of the targets, summed over them.

    With `glance` > 0 the model first answers without learning; then that share of the number of its mistakes is drawn from the
    target and revealed to it, and the loss is that of the other tokens: the better it is, the less is revealed. Qian et al. 2020,
    arXiv:2008.07905. A fraction on the device, a tensor, is taken as it is. `parts` are "nll", the loss of slots,
    without smoothing; "length", the loss of predicted lengths; and "unsayable", the number of targets that need more slots
    than there are and are left out.

    With `rdrop` > 0 there are two passes with different dropout: the loss is the mean of both losses and rdrop / 4
    (KL(p || q) + KL(q || p)), summed over the slots that are not revealed; that sum is in `parts` as
    "apart". Wu et al. 2021, arXiv:2106.14448; for paths Yao et al. 2024, arXiv:2410.05101.
    """
    scalar = glance.dim() == 0 if isinstance(glance, Tensor) else 0 <= glance <= 1
    if not scalar:
        raise ValueError(f"glance is a share of the mistakes, from 0 to 1, not {glance!r}")
    sequence(batch)
    if isinstance(model.slots, MaskedSlots) and _glances(glance):
        raise ValueError("masked is shown tokens by chance already: use glance=0")
    if rdrop < 0:
        raise ValueError(f"rdrop must not be below 0, but it is {rdrop!r}")
    if rdrop:
        batch = twice(batch)
    read = model.encode(batch.source, batch.source_valid)
    loss_of = _by_paths if isinstance(model.slots, CtcSlots) else _by_slots
    return loss_of(model, read, batch, smoothing, glance, rdrop)


def glancing(step: int | Tensor, steps: int, first: float = 0.5, last: float = 0.3) -> Fraction:
    """Compute the fraction to reveal at an update: from `first` to `last`, in a line; on the device, if the step is there."""
    done = step / max(steps, 1)
    done = done.clamp(0, 1) if isinstance(done, Tensor) else min(max(done, 0.0), 1.0)
    return first + (last - first) * done


def _glances(share: Fraction) -> bool:
    """Decide whether anything may be revealed: a fraction on the device may be any."""
    return isinstance(share, Tensor) or share > 0


def random_slots(real: Tensor, count: Tensor) -> Tensor:
    """Draw `count` (b) of the real slots of every row (b m), each choice as likely as another."""
    dice = torch.rand(real.shape, device=real.device)
    dice = dice.masked_fill(~real, 2)
    rank = dice.argsort(1).argsort(1)
    return (rank < count[:, None]) & real


def _by_slots(model: NatTranslator, read: EncodedSource, batch: Batch, smoothing: float, glance: Fraction, rdrop: float) -> Loss:
    """Compute the loss of models with one slot for every token."""
    assert batch.target is not None
    target = left_aligned(batch.target, batch.target_valid)
    length = length_targets(batch.target, batch.target_valid)
    if isinstance(model.slots, FixedSlots):
        slots = model.slot_inputs(read)
        target = _fitted(target, length, slots.x.shape[1])
        real = _front(target, length)
    else:
        real = _front(target, length)
        valid = None if batch.target_valid is None else real
        slots = model.slot_inputs(read, target.shape[1], valid)
    shown = _shown_slots(model, read, slots, target, length, real, glance, rdrop)
    scores = model.answer(read, slots, target, shown)
    counted = real if shown is None else real & ~shown
    loss = cross_entropy(scores, target, counted, smoothing=smoothing)
    if isinstance(model.slots, LengthSlots):
        surprise = model.slots.lengths.surprise(read.x, read.valid, length).sum()
        parts = {**loss.parts, "length": surprise.detach()}
        loss = Loss(loss.total + surprise, loss.over, parts)
    if not rdrop:
        return loss
    logs = upcast(scores).log_softmax(-1)
    return _with_divergence(loss, logs, counted, rdrop)


def _front(target: Tensor, length: Tensor) -> Tensor:
    """Return the mask (b m) of the first `length` (b) columns of the target."""
    columns = torch.arange(target.shape[1], device=target.device)
    return columns < length[:, None]


def _shown_slots(
    model: NatTranslator,
    read: EncodedSource,
    slots: SlotInputs,
    target: Tensor,
    length: Tensor,
    real: Tensor,
    glance: Fraction,
    rdrop: float,
) -> Tensor | None:
    """Draw the slots (b m) whose token is revealed, the same in both passes of R-Drop; None: no slot."""
    shown = None
    one = _once(len(target), rdrop)
    if isinstance(model.slots, MaskedSlots):  # from one hidden slot to all of them, every number as likely as another
        own = length[one]
        draws = torch.rand(own.shape, device=length.device)
        hidden = 1 + (draws * own).long()
        shown = random_slots(real[one], own - hidden)
    elif _glances(glance):
        with no_gradients():
            scores = model.answer(read.at(one), slots.at(one))
            wrong = scores.argmax(-1) != target[one]
            mistakes = (wrong & real[one]).sum(1)
        shown = random_slots(real[one], (glance * mistakes).round())
    if rdrop and shown is not None:
        shown = torch.cat([shown, shown])
    return shown


def _once(rows: int, rdrop: float) -> slice:
    """Select the rows of the first pass."""
    if rdrop:
        rows = rows // 2
    return slice(rows)


def _with_divergence(loss: Loss, logs: Tensor, counted: Tensor, rdrop: float) -> Loss:
    """Add the divergence of the two passes, at the slots of `counted` (b t), from their log-probabilities (b t v)."""
    one, other = logs.chunk(2)
    divergence = between(one, other)
    apart = divergence.masked_fill(~counted[: len(one)], 0).sum()
    parts = {name: x / 2 for name, x in loss.parts.items()}
    parts["apart"] = apart.detach()
    total = loss.total / 2 + rdrop / 4 * apart
    return Loss(total, loss.over // 2, parts)


def _fitted(target: Tensor, length: Tensor, slots: int) -> Tensor:
    """Pad or cut targets (b l) to as many columns as there are slots."""
    if target.shape[1] > slots and bool((length > slots).any()):
        raise ValueError(f"a target of {int(length.max())} tokens, its end counted, but {slots} slots: build it with more")
    missing = max(slots - target.shape[1], 0)
    return F.pad(target, (0, missing))[:, :slots]


def _by_paths(model: NatTranslator, read: EncodedSource, batch: Batch, smoothing: float, glance: Fraction, rdrop: float) -> Loss:
    """Compute the CTC loss, the sum over all paths. A revealed slot is certain, so every path goes through it."""
    assert batch.target is not None
    columns = max(batch.target.shape[1] - 1, 1)
    target = left_aligned(batch.target, batch.target_valid)[:, :columns]
    length = length_targets(batch.target, batch.target_valid)
    length = (length - 1).clamp_min(0)  # without END: all other slots are blanks
    slots = model.slot_inputs(read)
    room = length_targets(slots.x, slots.valid)
    classes = same(target)
    possible = needed(classes, length) <= room
    length = length.masked_fill(~possible, 0)
    fixed = None if slots.valid is None else ~slots.valid  # a slot that is not there is a sure blank: it changes no sum
    path = torch.zeros(slots.x.shape[:2], dtype=torch.long, device=target.device)
    shown = None
    if _glances(glance):
        one = _once(len(target), rdrop)
        path, shown = _glance(model, read.at(one), slots.at(one), target[one], classes[one], length[one], glance)
        if rdrop:
            path = torch.cat([path, path])
            shown = torch.cat([shown, shown])
        fixed = shown if fixed is None else fixed | shown
    ids = F.pad(target, (1, 0), value=BLANK)
    filled = ids.gather(1, path)
    scores = upcast(model.answer(read, slots, filled, shown)).log_softmax(-1)
    logs = odds(scores, ids)
    if fixed is not None:
        logs = torch.where(fixed[..., None], certain(path, logs), logs)
    terms = ctc(logs, classes, length)
    nll = terms.masked_fill(~possible, 0).sum()
    over = (length * possible).sum()
    loss = Loss(nll, over, {"nll": nll.detach(), "unsayable": (~possible).sum()})
    free = torch.ones_like(path, dtype=torch.bool) if fixed is None else ~fixed
    if smoothing:
        check_smoothing(smoothing)
        uniform = -scores.mean(-1).masked_fill(~free, 0).sum(1)
        flat = uniform / free.sum(1).clamp_min(1)
        total = (1 - smoothing) * nll + smoothing * (flat * length).sum()
        loss = loss._replace(total=total)
    if not rdrop:
        return loss
    counted = free & possible[:, None]
    return _with_divergence(loss, scores, counted, rdrop)


@no_gradients()
def _glance(
    model: NatTranslator, read: EncodedSource, slots: SlotInputs, target: Tensor, classes: Tensor, length: Tensor, share: Fraction
) -> tuple[Tensor, Tensor]:
    """Return the best path of every target (b t), in classes, and its revealed slots. Gu & Kong 2020, arXiv:2012.15833."""
    columns = F.pad(target, (1, 0), value=BLANK)
    scores = model.answer(read, slots)
    logs = odds(upcast(scores).log_softmax(-1), columns)
    real = torch.ones(slots.x.shape[:2], dtype=torch.bool, device=target.device)
    if slots.valid is not None:
        real = slots.valid
        blanks = torch.zeros_like(real, dtype=torch.long)
        logs = torch.where(real[..., None], logs, certain(blanks, logs))
    path = best_path(logs, classes, length)
    wrong = scores.argmax(-1) != columns.gather(1, path)
    mistakes = (wrong & real).sum(1)
    return path, random_slots(real, (share * mistakes).round())
