"""Training modes of a decoder: losses by what it is fed, true tokens or its own predictions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regard.data.batch import BEGIN, Batch, shifted
from regard.mixers.attention import has_hooks
from regard.models.translator import Translator
from regard.training.decoder_inputs import at_front, needed_mask, previous_tokens, sequence, step_by_step, twice
from regard.training.losses import Loss, cross_entropy, linear_cross_entropy, rdrop_loss
from regard.training.mode_options import FreeRunning, Mode, Parallel, RDrop, Scheduled, TeacherForcing
from regard.training.sampling_schedule import truth_probability
from regard.training.scheduled_sampling import PredictedInputs, parallel_passes, token_by_token, two_pass


def teacher_forcing(model: nn.Module, batch: Batch, *, smoothing: float = 0.0, behind: bool = False) -> Loss:
    """Compute the loss of a decoder fed the true tokens, all steps at once. Williams & Zipser 1989.

    behind=True promises that all padding lies behind the target: a causal decoder cannot see it there, and needs no mask.
    """
    head, x = _decode(model, batch, behind)
    return linear_cross_entropy(head, x, sequence(batch), batch.target_valid, smoothing=smoothing)


def _decode(model: nn.Module, batch: Batch, behind: bool) -> tuple[nn.Module, Tensor]:
    """Compute vectors and the head that makes scores of them; or scores, where a model overrides `forward` or has hooks."""
    target, valid = sequence(batch), batch.target_valid
    inputs, real = (shifted(target), needed_mask(model, valid)) if behind else (previous_tokens(target, valid), valid)
    if getattr(model.forward, "__func__", None) is not Translator.forward or has_hooks(model):
        return nn.Identity(), model(batch.source, batch.source_valid, inputs, real)
    assert isinstance(model, Translator)
    return model.head, model.hidden(model.encode(batch.source, batch.source_valid), inputs, real)


def rdrop(model: nn.Module, batch: Batch, *, smoothing: float = 0.0, weight: float = 5.0, behind: bool = False) -> Loss:
    """Compute teacher forcing twice with different dropout, and the divergence of the two predictions (R-Drop).

    (CE(p) + CE(q)) / 2 + weight / 4 (KL(p || q) + KL(q || p)), summed over real tokens. Wu et al. 2021, arXiv:2106.14448. It
    costs what a batch of twice the size costs. `parts["apart"]` is the sum of the two divergences.
    """
    head, both = _decode(model, twice(batch), behind)
    x, y = both.chunk(2)
    return rdrop_loss(head, x, y, sequence(batch), batch.target_valid, smoothing=smoothing, weight=weight)


def free_running(model: Translator, batch: Batch, *, smoothing: float = 0.0) -> Loss:
    """Compute the loss of a decoder fed its own likeliest tokens, against the true token of every step.

    Gradients flow through the scores and states of all steps, not through the choice of a token.
    """
    target, valid = sequence(batch), batch.target_valid
    front = at_front(target, valid)

    def feed(i: int, last: Tensor | None) -> Tensor:
        one = slice(i, i + 1)
        token = target[:, one] if last is None else last.detach().argmax(-1)
        return token.masked_fill(front[:, one], BEGIN)

    return cross_entropy(step_by_step(model, batch, feed), target, valid, smoothing=smoothing)


# losses of scheduled sampling, called as loss(model, batch, probability of a true token, inputs=PredictedInputs(), smoothing=0.0)
SAMPLED: dict[str, Callable[..., Loss]] = {"scheduled": token_by_token, "two_pass": two_pass, "parallel": parallel_passes}


def mode_loss(
    mode: Mode, model: Translator, batch: Batch, *, step: float, steps: float, smoothing: float = 0.0, behind: bool = False
) -> Loss:
    """Compute the loss of a mode that compares each token with the true one, at an update of a run of so many steps.

    `behind` as in `teacher_forcing`. Modes that reward whole answers are in reinforce.
    """
    match mode:
        case TeacherForcing():
            return teacher_forcing(model, batch, smoothing=smoothing, behind=behind)
        case RDrop():
            return rdrop(model, batch, smoothing=smoothing, weight=mode.alpha, behind=behind)
        case FreeRunning():
            return free_running(model, batch, smoothing=smoothing)
        case Scheduled():
            return _scheduled_loss(mode, model, batch, truth_probability(mode.schedule, step, steps, mode.floor), smoothing)
    raise ValueError(f"{mode.name} rewards whole answers: see regard.training.reinforce")


def _scheduled_loss(mode: Scheduled, model: Translator, batch: Batch, truth: float, smoothing: float) -> Loss:
    inputs = PredictedInputs(mode.inputs, alpha=mode.alpha, through=mode.through)
    passes = {"passes": mode.passes} if isinstance(mode, Parallel) else {}
    return SAMPLED[mode.name](model, batch, truth, inputs=inputs, smoothing=smoothing, **passes)
