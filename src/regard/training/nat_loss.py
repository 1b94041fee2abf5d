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
    if glance.dim() > 0 if isinstance(glance, Tensor) else not 0 <= glance <= 1:
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
    return first + (last - first) * (done.clamp(0, 1) if isinstance(done, Tensor) else min(max(done, 0.0), 1.0))


def _glances(share: Fraction) -> bool:
    """Decide whether anything may be revealed: a fraction on the device may be any."""
    return isinstance(share, Tensor) or share > 0


def random_slots(real: Tensor, count: Tensor) -> Tensor:
    """Draw `count` (b) of the real slots of every row (b m), each choice as likely as another."""
    dice = torch.rand(real.shape, device=real.device).masked_fill(~real, 2)
    return (dice.argsort(1).argsort(1) < count[:, None]) & real


def _by_slots(model: NatTranslator, read: EncodedSource, batch: Batch, smoothing: float, glance: Fraction, rdrop: float) -> Loss:
    """Compute the loss of models with one slot for every token."""
    assert batch.target is not None
    target, length = left_aligned(batch.target, batch.target_valid), length_targets(batch.target, batch.target_valid)
    if isinstance(model.slots, FixedSlots):
        seats = model.slot_inputs(read)
        target = _fitted(target, length, seats.x.shape[1])
    else:
        valid = None if batch.target_valid is None else torch.arange(target.shape[1], device=target.device) < length[:, None]
        seats = model.slot_inputs(read, target.shape[1], valid)
    real = torch.arange(target.shape[1], device=target.device) < length[:, None]
    shown, one = None, _once(len(target), rdrop)
    if isinstance(model.slots, MaskedSlots):  # from one hidden slot to all of them, every number as likely as another
        hidden = 1 + (torch.rand(length[one].shape, device=length.device) * length[one]).long()
        shown = random_slots(real[one], length[one] - hidden)
    elif _glances(glance):
        with no_gradients():
            wrong = (model.answer(read.at(one), seats.at(one)).argmax(-1) != target[one]) & real[one]
        shown = random_slots(real[one], (glance * wrong.sum(1)).round())
    shown = torch.cat([shown, shown]) if rdrop and shown is not None else shown
    scores = model.answer(read, seats, target, shown)
    counted = real if shown is None else real & ~shown
    loss = cross_entropy(scores, target, counted, smoothing=smoothing)
    if isinstance(model.slots, LengthSlots):
        surprise = model.slots.lengths.surprise(read.x, read.valid, length).sum()
        loss = Loss(loss.total + surprise, loss.over, {**loss.parts, "length": surprise.detach()})
    return _with_divergence(loss, upcast(scores).log_softmax(-1), counted, rdrop) if rdrop else loss


def _once(rows: int, rdrop: float) -> slice:
    """Select the rows of the first pass."""
    return slice(rows // 2 if rdrop else rows)


def _with_divergence(loss: Loss, logs: Tensor, counted: Tensor, rdrop: float) -> Loss:
    """Add the divergence of the two passes, at the slots of `counted` (b t), from their log-probabilities (b t v)."""
    one, other = logs.chunk(2)
    apart = between(one, other).masked_fill(~counted[: len(one)], 0).sum()
    parts = {name: x / 2 for name, x in loss.parts.items()}
    return Loss(loss.total / 2 + rdrop / 4 * apart, loss.over // 2, {**parts, "apart": apart.detach()})


def _fitted(target: Tensor, length: Tensor, slots: int) -> Tensor:
    """Pad or cut targets (b l) to as many columns as there are slots."""
    if target.shape[1] > slots and bool((length > slots).any()):
        raise ValueError(f"a target of {int(length.max())} tokens, its end counted, but {slots} slots: build it with more")
    return F.pad(target, (0, max(slots - target.shape[1], 0)))[:, :slots]


def _by_paths(model: NatTranslator, read: EncodedSource, batch: Batch, smoothing: float, glance: Fraction, rdrop: float) -> Loss:
    """Compute the CTC loss, the sum over all paths. A revealed slot is certain, so every path goes through it."""
    assert batch.target is not None
    target = left_aligned(batch.target, batch.target_valid)[:, : max(batch.target.shape[1] - 1, 1)]
    length = (length_targets(batch.target, batch.target_valid) - 1).clamp_min(0)  # without END: all other slots are blanks
    seats = model.slot_inputs(read)
    room = length_targets(seats.x, seats.valid)
    classes = same(target)
    sayable = needed(classes, length) <= room
    length = length.masked_fill(~sayable, 0)
    fixed = None if seats.valid is None else ~seats.valid  # a slot that is not there is a sure blank: it changes no sum
    path = torch.zeros(seats.x.shape[:2], dtype=torch.long, device=target.device)
    shown = None
    if _glances(glance):
        one = _once(len(target), rdrop)
        path, shown = _glance(model, read.at(one), seats.at(one), target[one], classes[one], length[one], glance)
        path, shown = (torch.cat([x, x]) if rdrop else x for x in (path, shown))
        fixed = shown if fixed is None else fixed | shown
    columns = F.pad(target, (1, 0), value=BLANK)
    scores = upcast(model.answer(read, seats, columns.gather(1, path), shown)).log_softmax(-1)
    logs = odds(scores, columns)
    if fixed is not None:
        logs = torch.where(fixed[..., None], certain(path, logs), logs)
    nll = ctc(logs, classes, length).masked_fill(~sayable, 0).sum()
    free = torch.ones_like(path, dtype=torch.bool) if fixed is None else ~fixed
    loss = Loss(nll, (length * sayable).sum(), {"nll": nll.detach(), "unsayable": (~sayable).sum()})
    if smoothing:
        check_smoothing(smoothing)
        flat = -scores.mean(-1).masked_fill(~free, 0).sum(1) / free.sum(1).clamp_min(1)
        loss = loss._replace(total=(1 - smoothing) * nll + smoothing * (flat * length).sum())
    return _with_divergence(loss, scores, free & sayable[:, None], rdrop) if rdrop else loss


@no_gradients()
def _glance(
    model: NatTranslator, read: EncodedSource, seats: SlotInputs, target: Tensor, classes: Tensor, length: Tensor, share: Fraction
) -> tuple[Tensor, Tensor]:
    """The best path of every target (b t), in classes, and the slots where it is shown. Gu & Kong 2020, arXiv:2012.15833."""
    columns = F.pad(target, (1, 0), value=BLANK)
    scores = model.answer(read, seats)
    logs = odds(upcast(scores).log_softmax(-1), columns)
    real = torch.ones(seats.x.shape[:2], dtype=torch.bool, device=target.device)
    if seats.valid is not None:
        real = seats.valid
        logs = torch.where(real[..., None], logs, certain(torch.zeros_like(real, dtype=torch.long), logs))
    path = best_path(logs, classes, length)
    wrong = (scores.argmax(-1) != columns.gather(1, path)) & real
    return path, random_slots(real, (share * wrong.sum(1)).round())
