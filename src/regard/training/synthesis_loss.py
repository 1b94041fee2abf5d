"""The loss of speech synthesis: frames, the stop, and guidance of the readers.

Letters: b batch, n characters, m steps, r frames of a step, f features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.mixers.feature_math import upcast
from regard.models.guided import record_alignments
from regard.models.synthesiser import Synthesiser
from regard.training.decoder_inputs import needed_mask
from regard.training.guided_loss import guided_attention_loss
from regard.training.losses import Loss

FRAME_LOSSES = ("l1", "l2", "l1+l2")
STOP_WEIGHT = 5.0  # of the one step of an utterance that stops, against each that does not


def last_frames(frames: Tensor, reduction: int) -> Tensor:
    """Return the inputs (b m f) of steps: zeros, then the last frame of every step but the last, of frames (b m r, f)."""
    last = frames[:, reduction - 1 :: reduction]
    return torch.cat([torch.zeros_like(last[:, :1]), last[:, :-1]], 1)


def frame_errors(made: Tensor, frames: Tensor, kind: str = "l1") -> Tensor:
    """Return the mean error of the frames of every step (b m): made (b m r f), frames (b m r, f)."""
    apart = made - frames.reshape(made.shape).to(made.dtype)
    error = torch.zeros_like(apart)
    if kind in ("l1", "l1+l2"):
        error = error + apart.abs()
    if kind in ("l2", "l1+l2"):
        error = error + apart.square()
    return error.mean(-1)


def stop_errors(scores: Tensor, valid: Tensor | None) -> Tensor:
    """Return the binary cross-entropy (b m) of stops (b m): 1 at the last real step, 0 before."""
    count = torch.full_like(scores[:, 0], scores.shape[1]) if valid is None else valid.sum(1)
    at = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    last = (at == count[:, None]).to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, last, reduction="none") * (1 + (STOP_WEIGHT - 1) * last)


def synthesis_loss(
    model: Synthesiser,
    source: Tensor,
    source_valid: Tensor | None,
    frames: Tensor,
    valid: Tensor | None,
    *,
    reduction: int,
    kind: str = "l1",
    guide: float = 0.0,
    sharpness: float = 0.2,
) -> Loss:
    """Compute errors of frames and stops, and `guide` times the guided attention loss of all readers, summed over real steps.

    `source` (b n) are characters, `frames` (b m r, f) what they sound like, `valid` (b m) the steps that are real.
    """
    inputs = last_frames(frames, reduction)
    with record_alignments(model) as weights:
        y = upcast(model(source, source_valid, inputs, needed_mask(model, valid)))
    real = torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if valid is None else valid
    own = frame_errors(y[..., :-1], frames, kind).masked_fill(~real, 0).sum()
    stop = stop_errors(y[..., -1], valid).masked_fill(~real, 0).sum()
    parts = {"frames": own.detach(), "stop": stop.detach()}
    total = own + stop
    if guide:
        far = [guided_attention_loss(x, source_valid, valid, sharpness=sharpness).total for x in weights]
        away = torch.stack(far).mean()
        total, parts["guide"] = total + guide * away, away.detach()
    return Loss(total, real.sum(), parts)
