"""What a model loses that says all tokens at once.

Letters: b batch, l target tokens, t slots, v vocabulary, c classes: the blank and the l tokens of a row's own target.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.batch import Batch
from regard.mixers.features import wide
from regard.models.lengths import counted
from regard.models.parallel import BLANK, Ctc, Fixed, Length, Masked, Parallel, Read, Seats, fronted
from regard.training.feeding import sequence, unlearned
from regard.training.losses import Loss, cross_entropy

NEVER = -1e4  # a log-probability that is 0 to every float, and yet has finite gradients


def loss(model: Parallel, batch: Batch, *, smoothing: float = 0.0, glance: float = 0.0) -> Loss:
    """Minus the log-probability of the targets, summed over them.

    With `glance` > 0 the model first answers without learning; then that share of the number of its mistakes is drawn from the
    target and shown to it, and it loses what is left to say: the better it is, the less it sees. Qian et al. 2020,
    arXiv:2008.07905. `parts` are "nll", what it loses at slots, without smoothing; "length", what it loses at guessing lengths;
    and "unsayable", the number of targets that need more slots than there are and are left out.
    """
    if not 0 <= glance <= 1:
        raise ValueError(f"glance is a share of the mistakes, from 0 to 1, not {glance!r}")
    sequence(batch)
    if isinstance(model.slots, Masked) and glance:
        raise ValueError("masked is shown tokens by chance already: use glance=0")
    read = model.hear(batch.source, batch.source_valid)
    if isinstance(model.slots, Ctc):
        return _by_paths(model, read, batch, smoothing, glance)
    return _by_slots(model, read, batch, smoothing, glance)


def glance_at(step: int, steps: int, first: float = 0.5, last: float = 0.3) -> float:
    """The share to show at an update: from `first` to `last`, in a line."""
    return first + (last - first) * min(max(step / max(steps, 1), 0.0), 1.0)


def drawn(real: Tensor, count: Tensor) -> Tensor:
    """`count` (b) of the real ones of every row, by chance, each choice as likely as another, (b m)."""
    dice = torch.rand(real.shape, device=real.device).masked_fill(~real, 2)
    return (dice.argsort(1).argsort(1) < count[:, None]) & real


def _by_slots(model: Parallel, read: Read, batch: Batch, smoothing: float, glance: float) -> Loss:
    """A slot for every token."""
    assert batch.target is not None
    target, length = fronted(batch.target, batch.target_valid), counted(batch.target, batch.target_valid)
    if isinstance(model.slots, Fixed):
        seats = model.seats(read)
        target = _fitted(target, length, seats.x.shape[1])
    else:
        valid = None if batch.target_valid is None else torch.arange(target.shape[1], device=target.device) < length[:, None]
        seats = model.seats(read, target.shape[1], valid)
    real = torch.arange(target.shape[1], device=target.device) < length[:, None]
    shown = None
    if isinstance(model.slots, Masked):  # from one hidden slot to all of them, every number as likely as another
        hidden = 1 + (torch.rand(length.shape, device=length.device) * length).long()
        shown = drawn(real, length - hidden)
    elif glance:
        with unlearned():
            wrong = (model.answer(read, seats).argmax(-1) != target) & real
        shown = drawn(real, (glance * wrong.sum(1)).round())
    scores = model.answer(read, seats, target, shown)
    lost = cross_entropy(scores, target, real if shown is None else real & ~shown, smoothing=smoothing)
    if not isinstance(model.slots, Length):
        return lost
    surprise = model.slots.lengths.surprise(read.x, read.valid, length).sum()
    return Loss(lost.total + surprise, lost.over, {**lost.parts, "length": surprise.detach()})


def _fitted(target: Tensor, length: Tensor, slots: int) -> Tensor:
    """Targets (b l) with as many columns as there are slots."""
    if target.shape[1] > slots and bool((length > slots).any()):
        raise ValueError(f"a target of {int(length.max())} tokens, its end counted, but {slots} slots: build it with more")
    return F.pad(target, (0, max(slots - target.shape[1], 0)))[:, :slots]


def _by_paths(model: Parallel, read: Read, batch: Batch, smoothing: float, glance: float) -> Loss:
    """Every way to say the target, summed. What is shown of a path is certain, so the rest of every path goes through it."""
    assert batch.target is not None
    target = fronted(batch.target, batch.target_valid)[:, : max(batch.target.shape[1] - 1, 1)]
    length = (counted(batch.target, batch.target_valid) - 1).clamp_min(0)  # no end is said: blanks are what is left
    seats = model.seats(read)
    room = counted(seats.x, seats.valid)
    classes = same(target)
    sayable = needed(classes, length) <= room
    length = length.masked_fill(~sayable, 0)
    fixed = None if seats.valid is None else ~seats.valid  # a slot that is not there is a sure blank: it changes no sum
    path = torch.zeros(seats.x.shape[:2], dtype=torch.long, device=target.device)
    shown = None
    if glance:
        path, shown = _glance(model, read, seats, target, classes, length, glance)
        fixed = shown if fixed is None else fixed | shown
    columns = F.pad(target, (1, 0), value=BLANK)
    scores = model.answer(read, seats, columns.gather(1, path), shown)
    logs = odds(scores, columns)
    if fixed is not None:
        logs = torch.where(fixed[..., None], certain(path, logs), logs)
    lost = ctc(logs, classes, length).masked_fill(~sayable, 0)
    nll, over = lost.sum(), (length * sayable).sum()
    parts = {"nll": nll.detach(), "unsayable": (~sayable).sum()}
    if not smoothing:
        return Loss(nll, over, parts)
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {smoothing!r}")
    free = torch.ones_like(path, dtype=torch.bool) if fixed is None else ~fixed
    flat = (wide(scores).logsumexp(-1) - wide(scores).mean(-1)).masked_fill(~free, 0).sum(1) / free.sum(1).clamp_min(1)
    return Loss((1 - smoothing) * nll + smoothing * (flat * length).sum(), over, parts)


@unlearned()
def _glance(
    model: Parallel, read: Read, seats: Seats, target: Tensor, classes: Tensor, length: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """The best path of every target (b t), in classes, and the slots where it is shown. Gu & Kong 2020, arXiv:2012.15833."""
    columns = F.pad(target, (1, 0), value=BLANK)
    scores = model.answer(read, seats)
    logs, real = odds(scores, columns), torch.ones(seats.x.shape[:2], dtype=torch.bool, device=target.device)
    if seats.valid is not None:
        real = seats.valid
        logs = torch.where(real[..., None], logs, certain(torch.zeros_like(real, dtype=torch.long), logs))
    path = best_path(logs, classes, length)
    wrong = (scores.argmax(-1) != columns.gather(1, path)) & real
    return path, drawn(real, (share * wrong.sum(1)).round())


def same(target: Tensor) -> Tensor:
    """The class of every token of a row (b l): 1 + where it stands for the first time, so that equal tokens are of one class."""
    return 1 + (target[:, :, None] == target[:, None]).long().argmax(-1)


def needed(classes: Tensor, length: Tensor) -> Tensor:
    """Slots that a row's target needs (b): one a token, and a blank between two that are alike."""
    again = (classes[:, 1:] == classes[:, :-1]) & (torch.arange(1, classes.shape[1], device=length.device) < length[:, None])
    return length + again.sum(1)


def odds(scores: Tensor, columns: Tensor) -> Tensor:
    """Log-probabilities (b t c) of the tokens `columns` (b c) of each row, of all that scores (b t v) speak of."""
    own = scores.gather(2, columns[:, None].expand(-1, scores.shape[1], -1))
    return wide(own) - wide(scores).logsumexp(-1, keepdim=True)


def certain(path: Tensor, logs: Tensor) -> Tensor:
    """Log-probabilities shaped as `logs` (b t c) of someone who is sure of the path (b t)."""
    here = path[..., None] == torch.arange(logs.shape[2], device=logs.device)
    return torch.where(here, 0.0, NEVER).to(logs.dtype)


def ctc(logs: Tensor, classes: Tensor, length: Tensor) -> Tensor:
    """-log of the probability of all paths that say the first `length` (b) of these classes (b l), from logs (b t c): (b).

    Only the classes of a row's own target are looked at, c of them and not v. torch's gradient is right only if probabilities of
    all classes sum to 1, as it adds p to each; here they need not, so it is taken off again.
    """
    length = length.cpu()
    slots = torch.full_like(length, logs.shape[1])
    lost = F.ctc_loss(logs.transpose(0, 1), classes, slots, length, blank=0, reduction="none", zero_infinity=False)
    p = logs.exp().sum((1, 2))
    return lost - (p - p.detach())


def best_path(logs: Tensor, classes: Tensor, length: Tensor) -> Tensor:
    """The likeliest of all paths that say the first `length` (b) of these classes (b l), by logs (b t c): a class a slot (b t).

    Viterbi's algorithm over the states blank, first, blank, second, ..., blank; each slot stays, takes a step, or skips a blank
    that stands between two different tokens.
    """
    b, t, _ = logs.shape
    states = classes.new_zeros(b, 2 * classes.shape[1] + 1)
    states[:, 1::2] = classes
    emit = logs.gather(2, states[:, None].expand(-1, t, -1)).unbind(1)
    price = logs.new_zeros(*states.shape, 3)  # of coming from two states before, from one before, from itself
    price[:, :, 0] = -torch.inf
    price[:, 1::2, 0] = torch.where(classes == F.pad(classes, (1, 0))[:, :-1], -torch.inf, 0.0).to(logs.dtype)
    best = logs.new_full((b, states.shape[1] + 2), -torch.inf)
    best[:, 1] = 0  # in front of the first state
    moves = []
    for here in emit:
        top = (best.unfold(1, 3, 1) + price).max(-1)
        best = F.pad(top.values + here, (2, 0), value=-torch.inf)
        moves.append(2 - top.indices)
    last = 2 * length[:, None]
    state = last - (best.gather(1, last + 1) > best.gather(1, last + 2)).long()
    path = []
    for move in reversed(moves):
        path.append(state)
        state = state - move.gather(1, state)
    return states.gather(1, torch.cat(path[::-1], 1))
