"""Whom a decoder hears while it learns: the truth or itself, as defined one example and one token at a time."""

import pytest
import torch
from torch.nn import functional as F

from conftest import DEVICE, close
from decoders import VOCAB, batch_of, gradients, rows, small
from regard.data.batch import BEGIN, Batch, padded, shifted
from regard.options import parse_options
from regard.training.decoder_inputs import previous_tokens
from regard.training.decoder_modes import free_running, mode_loss, rdrop, teacher_forcing
from regard.training.losses import apart, cross_entropy
from regard.training.mode_options import MODES, MinimumRisk, SelfCritical
from regard.training.scheduled_sampling import PredictedInputs, parallel_passes, token_by_token, two_pass

PADDINGS = ("none", "behind", "anywhere")
TOKEN_MODES = [mode() for mode in MODES.values() if mode not in (SelfCritical, MinimumRisk)]
every_mode = pytest.mark.parametrize("mode", TOKEN_MODES, ids=str)


def loss_of(mode, model, batch, smoothing=0.0):
    """At the end of a run, where half of the tokens are true ones under every schedule."""
    return mode_loss(mode, model, batch, step=10, steps=10, smoothing=smoothing)


def one_by_one(model, batch, truth, smoothing=0.0):
    """No padding, no state: every token from the whole text anew, after the truth or after what the model said."""
    total, count = 0.0, 0
    for source, target in rows(batch):
        heard, source = [BEGIN], torch.tensor([source], device=DEVICE)
        for token in target:
            scores = model(source, None, torch.tensor([heard], device=DEVICE))[:, -1]
            loss = cross_entropy(scores, torch.tensor([token], device=DEVICE), smoothing=smoothing)
            total, count = total + loss.total, count + 1
            heard.append(token if truth else int(scores.argmax()))
    return total, count


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("mode", "truth"), [(teacher_forcing, True), (free_running, False)])
def test_a_mode_is_its_definition_in_value_and_gradient(mode, truth, padding):
    model, batch = small(), batch_of(padding=padding)
    loss = mode(model, batch, smoothing=0.1)
    total, count = one_by_one(model, batch, truth, 0.1)
    assert loss.over == count
    close(loss.total, total)
    close(gradients(model, loss.total), gradients(model, total))


@pytest.mark.parametrize("padding", PADDINGS)
def test_two_passes_that_agree_are_one_pass(padding):
    model, batch = small(), batch_of(padding=padding)
    loss, one = rdrop(model, batch, smoothing=0.1), teacher_forcing(model, batch, smoothing=0.1)
    assert loss.over == one.over
    close(loss.total, one.total)
    close(loss.parts["nll"], one.parts["nll"])
    close(loss.parts["apart"], torch.zeros_like(loss.parts["apart"]))
    close(gradients(model, loss.total), gradients(model, one.total))


@pytest.mark.parametrize("padding", PADDINGS)
def test_two_passes_that_do_not_agree_pay_for_it(padding):
    """Dropout that falls by rows: with the same dice, the two halves of a batch given twice are its two passes."""
    model, batch = small(dropout=0.3).train(), batch_of(padding=padding)
    torch.manual_seed(4)
    loss = rdrop(model, batch, smoothing=0.1, weight=3.0)
    torch.manual_seed(4)
    twice = Batch(*(None if x is None else torch.cat([x, x]) for x in batch[:4]))
    heard = previous_tokens(twice.target, twice.target_valid)
    logs = model(twice.source, twice.source_valid, heard, twice.target_valid).log_softmax(-1).chunk(2)
    real = torch.ones_like(batch.target, dtype=torch.bool) if batch.target_valid is None else batch.target_valid
    far = sum(F.kl_div(a[real], b[real], reduction="sum", log_target=True) for a, b in (logs, logs[::-1]))
    each = [cross_entropy(x, batch.target, batch.target_valid, smoothing=0.1).total for x in logs]
    total = sum(each) / 2 + 3 / 4 * far
    assert loss.parts["apart"] > 0.1
    close(loss.parts["apart"], far)
    close(loss.total, total)
    close(gradients(model, loss.total), gradients(model, total))


def test_two_passes_need_not_agree_on_padding_that_nobody_told_them_of():
    model, batch, found = small(dropout=0.3).train(), batch_of(padding="behind"), []
    for behind in (False, True):
        torch.manual_seed(4)
        found.append(rdrop(model, batch, weight=3.0, behind=behind))
    close(found[0].total, found[1].total)
    close(found[0].parts["apart"], found[1].parts["apart"])


def test_how_far_two_choices_are_apart_has_its_gradient():
    p, q = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(apart, (p, q))
    close(apart(p, q), apart(q + 1, p - 2))  # whoever comes first, and whatever is added to all scores


def test_the_two_differ_because_the_model_is_wrong_sometimes():
    model, batch = small(), batch_of()
    assert abs(teacher_forcing(model, batch).total - free_running(model, batch).total) > 0.1


@pytest.mark.parametrize("mixer", ["linear", "gla", "rnn", "longformer(window=2)", "reformer(rounds=1, buckets=2, chunk=2)"])
def test_mechanisms_of_every_kind_run_free(mixer):
    model, batch = small(mixer=mixer), batch_of(padding="anywhere")
    loss, (total, _) = free_running(model, batch), one_by_one(model, batch, False)
    close(loss.total, total, 1e-8)
    close(gradients(model, loss.total), gradients(model, total), 1e-8)


@pytest.mark.parametrize("wiring", ["each", "both", "mixed"])
def test_it_runs_free_over_every_wiring(wiring):
    model, batch = small(wiring=wiring, depth=2), batch_of(padding="anywhere")
    close(free_running(model, batch).total, one_by_one(model, batch, False)[0])


@every_mode
def test_what_padding_holds_changes_nothing(mode):
    model, batch = small(), batch_of(padding="anywhere")
    other = batch._replace(
        source=torch.where(batch.source_valid, batch.source, 9), target=torch.where(batch.target_valid, batch.target, 8)
    )
    losses = []
    for one in (batch, other):
        torch.manual_seed(2)
        losses.append(loss_of(mode, model, one, 0.1).total)
    close(*losses)


@every_mode
def test_every_mode_teaches_every_weight_in_training_under_autocast_too(mode):
    model, batch = small(dropout=0.1).float().train(), batch_of()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = loss_of(mode, model, batch, 0.1)
    loss.mean.backward()
    assert loss.total.dtype == torch.float32 and torch.isfinite(loss.total)
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_what_is_told_is_the_shifted_truth_with_padding_behind_or_without():
    target, valid = padded([[5, 6, 7, 3], [8, 3], [9, 9, 3]])
    assert torch.equal(previous_tokens(target), shifted(target))
    assert torch.equal(previous_tokens(target, valid)[valid], shifted(target)[valid])


def test_what_is_told_looks_past_padding():
    target, valid = torch.tensor([[0, 5, 0, 6, 3]]), torch.tensor([[False, True, False, True, True]])
    assert previous_tokens(target, valid)[valid].tolist() == [BEGIN, 5, 6]


@pytest.mark.parametrize("target", [None, torch.zeros(3, dtype=torch.long), torch.zeros(3, 0, dtype=torch.long)])
@every_mode
def test_a_batch_without_sequences_to_say_is_refused(mode, target):
    with pytest.raises(ValueError, match="target needs shape"):
        loss_of(mode, small(), Batch(torch.full((3, 2), VOCAB - 1), None, target))


def test_a_mode_by_its_options_is_the_loss_with_these_options():
    model, batch = small(dropout=0.3).train(), batch_of(padding="behind")

    def same(mode, plain, **options):
        losses = []
        for loss in (
            lambda: mode_loss(parse_options(mode, MODES), model, batch, step=2, steps=4),
            lambda: plain(model, batch, **options),
        ):
            torch.manual_seed(3)
            losses.append(loss().total)
        torch.testing.assert_close(*losses, rtol=0, atol=0)

    same("teacher_forcing", teacher_forcing)
    same("rdrop(alpha=2)", rdrop, weight=2.0)
    same("free_running", free_running)
    same("scheduled(floor=0.5)", token_by_token, share=0.75)
    same("two_pass(schedule='inverse_sigmoid', floor=0)", two_pass, share=0.5)
    same("parallel(floor=0, passes=4, inputs='gumbel')", parallel_passes, share=0.5, passes=4, inputs=PredictedInputs("gumbel"))


def test_a_mode_that_rewards_whole_answers_has_no_loss_by_tokens():
    with pytest.raises(ValueError, match="minimum_risk rewards whole answers"):
        mode_loss(MinimumRisk(), small(), batch_of(), step=1, steps=1)
