"""Ways for a decoder to learn: whom it hears while it speaks, the truth or itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regard.data.batch import BEGIN, Batch, shifted
from regard.mixers.attention import has_hooks
from regard.models.translator import Translator
from regard.training.decoder_inputs import at_front, heeded, sequence, step_by_step, told, twice
from regard.training.losses import Loss, cross_entropy, linear_cross_entropy, rdrop_loss
from regard.training.scheduled_sampling import parallel_passes, token_by_token, two_pass


def teacher_forcing(model: nn.Module, batch: Batch, *, smoothing: float = 0.0, behind: bool = False) -> Loss:
    """Every step is told the truth before it, so all of them are learned at once. Williams & Zipser 1989.

    behind=True promises that all padding stands behind the target: a causal decoder cannot see it there, and need not be told.
    """
    head, x = _decode(model, batch, behind)
    return linear_cross_entropy(head, x, sequence(batch), batch.target_valid, smoothing=smoothing)


def _decode(model: nn.Module, batch: Batch, behind: bool) -> tuple[nn.Module, Tensor]:
    """Vectors, and the head that makes scores of them; or scores, where a model has its own way or somebody listens to it."""
    target, valid = sequence(batch), batch.target_valid
    heard, real = (shifted(target), heeded(model, valid)) if behind else (told(target, valid), valid)
    if getattr(model.forward, "__func__", None) is not Translator.forward or has_hooks(model):
        return nn.Identity(), model(batch.source, batch.source_valid, heard, real)
    assert isinstance(model, Translator)
    return model.head, model.hidden(model.hear(batch.source, batch.source_valid), heard, real)


def rdrop(model: nn.Module, batch: Batch, *, smoothing: float = 0.0, weight: float = 5.0, behind: bool = False) -> Loss:
    """Teacher forcing twice, each time with a dropout of its own, and both must say the same: a guard against learning by heart.

    (CE(p) + CE(q)) / 2 + weight / 4 (KL(p || q) + KL(q || p)), summed over real tokens. Wu et al. 2021, arXiv:2106.14448. It
    costs what a batch of twice the size costs. `parts["apart"]` is the sum of the two divergences.
    """
    head, both = _decode(model, twice(batch), behind)
    x, y = both.chunk(2)
    return rdrop_loss(head, x, y, sequence(batch), batch.target_valid, smoothing=smoothing, weight=weight)


def free_running(model: Translator, batch: Batch, *, smoothing: float = 0.0) -> Loss:
    """Every step is told what the model itself found likeliest before it, and should still say what the truth says there.

    Gradients go through the scores of all steps and what they remember, not through the choice of a token.
    """
    target, valid = sequence(batch), batch.target_valid
    front = at_front(target, valid)

    def feed(i: int, last: Tensor | None) -> Tensor:
        one = slice(i, i + 1)
        said = target[:, one] if last is None else last.detach().argmax(-1)
        return said.masked_fill(front[:, one], BEGIN)

    return cross_entropy(step_by_step(model, batch, feed), target, valid, smoothing=smoothing)


# by name, called as sampled(model, batch, share of the truth, own=Own(), smoothing=0.0)
SAMPLED: dict[str, Callable[..., Loss]] = {"scheduled": token_by_token, "two_pass": two_pass, "parallel": parallel_passes}

# by name, called as mode(model, batch, share of the truth, smoothing)
MODES: dict[str, Callable[[Translator, Batch, float, float], Loss]] = {
    "teacher": lambda model, batch, _, smoothing: teacher_forcing(model, batch, smoothing=smoothing),
    "agree": lambda model, batch, _, smoothing: rdrop(model, batch, smoothing=smoothing),
    "free": lambda model, batch, _, smoothing: free_running(model, batch, smoothing=smoothing),
    "scheduled": lambda model, batch, share, smoothing: token_by_token(model, batch, share, smoothing=smoothing),
    "two_pass": lambda model, batch, share, smoothing: two_pass(model, batch, share, smoothing=smoothing),
    "parallel": lambda model, batch, share, smoothing: parallel_passes(model, batch, share, smoothing=smoothing),
}
