"""The loss of speech recognition: CTC, and the cross-entropy of a decoder that attends.

Letters: b batch, n slots, m target tokens with END, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.batch import Batch, shifted
from regard.models.recogniser import CtcRecogniser, CtcSlotLogs, JointRecogniser
from regard.training.ctc import certain, ctc, needed, odds, same
from regard.training.decoder_inputs import needed_mask, sequence
from regard.training.losses import Loss, linear_cross_entropy


def ctc_loss(slots: CtcSlotLogs, target: Tensor, length: Tensor) -> Loss:
    """Compute minus the log-probability of the first `length` (b) target tokens (b m), summed over all paths.

    Padded slots are certain blanks, which changes no sum. `parts["unsayable"]` counts targets that need more slots than there
    are: they are left out.
    """
    classes, logs = same(target), slots.logs
    room = torch.full_like(length, logs.shape[1]) if slots.valid is None else slots.valid.sum(1)
    possible = needed(classes, length) <= room
    own = odds(logs, F.pad(target, (1, 0)))
    if slots.valid is not None:
        blanks = torch.zeros_like(slots.valid, dtype=torch.long)
        own = torch.where(slots.valid[..., None], own, certain(blanks, own))
    terms = ctc(own, classes, length.masked_fill(~possible, 0))
    nll = terms.masked_fill(~possible, 0).sum()
    return Loss(nll, (length * possible).sum(), {"ctc": nll.detach(), "unsayable": (~possible).sum()})


def speech_loss(model: CtcRecogniser | JointRecogniser, batch: Batch, *, ctc_weight: float = 1.0, smoothing: float = 0.0) -> Loss:
    """Compute ctc_weight times the CTC loss plus (1 - ctc_weight) times that of the decoder, summed over target tokens.

    Targets have their END, which CTC leaves out, and all padding behind them.
    """
    target = sequence(batch)
    count = torch.full_like(target[:, 0], target.shape[1]) if batch.target_valid is None else batch.target_valid.sum(1)
    slots = model.slots(batch.source, batch.source_valid)
    loss = ctc_loss(slots, target[:, : max(target.shape[1] - 1, 1)], count - 1)
    if not isinstance(model, JointRecogniser):
        return loss._replace(over=count.sum())
    x = model.hidden(model.memory(slots.encoded), shifted(target), needed_mask(model, batch.target_valid))
    decoder = linear_cross_entropy(model.head, x, target, batch.target_valid, smoothing=smoothing)
    total = ctc_weight * loss.total + (1 - ctc_weight) * decoder.total
    return Loss(total, count.sum(), {**loss.parts, "nll": decoder.parts["nll"]})
