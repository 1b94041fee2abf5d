"""One update: its rate, its gradient however it is cut into passes, its norm, what decays."""

import math

import pytest
import torch
from torch import nn

from regard.data.batch import Batch
from regard.training.fit import fit
from regard.training.learner import Learner, optimizer
from regard.training.losses import Loss
from regard.training.lr_schedule import LR_SCHEDULES, lr_factor
from small_task import Small, small


def train(out, task=None, **changes):
    return fit(task or Small(small(**changes)), out, accelerator="cpu", quiet=True)


def learner(task, **changes) -> Learner:
    """One without a loop around it."""
    torch.manual_seed(0)
    made = Learner(task.model().double(), task.loss, small(**changes), "cpu")
    made.begin()
    return made


# Rates


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_every_rate_rises_to_one_at_the_end_of_the_warm_up_and_never_beyond(schedule, warmup):
    config = small(schedule=schedule, warmup=warmup, steps=100)
    rates = [lr_factor(config, step) for step in range(1, 101)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert warmup == 0 or rates[warmup - 1] == 1
    assert rates[: max(warmup - 1, 0)] == [step / warmup for step in range(1, warmup)]
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)


def test_rates_have_the_values_of_their_formulas():
    def at(schedule, step):
        return lr_factor(small(schedule=schedule, warmup=100, steps=1100), step)

    assert at("constant", 1100) == 1
    assert at("linear", 600) == 0.5 and at("linear", 1100) == 0
    assert at("cosine", 600) == pytest.approx(0.5) and at("cosine", 350) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert at("inverse_sqrt", 400) == 0.5 and at("inverse_sqrt", 50) == 0.5
    width, step = 512, 237  # the formula as it is printed in the paper, its lr at its highest
    paper = width**-0.5 * min(step**-0.5, step * 100**-1.5)
    assert at("inverse_sqrt", step) == pytest.approx(paper / (width**-0.5 * 100**-0.5))


def test_an_unknown_schedule_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        lr_factor(small(schedule="cosin"), 1)
    with pytest.raises(ValueError, match="counted from 1"):
        lr_factor(small(), 0)
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        train(tmp_path / "new", schedule="liner")
    assert not (tmp_path / "new").exists()


# One update


def passes(task: Small, cuts: list[int]) -> list[Batch]:
    rows = task.splits["train"][: cuts[-1]]
    return [task.batch(rows[first:end]) for first, end in zip([0, *cuts], cuts, strict=False)]


class Double(Small):
    """With a loss in float64, which the library's own never is."""

    def loss(self, model, batch, step):  # noqa: ARG002
        scores = model(batch.source, batch.source_valid)
        total = nn.functional.cross_entropy(scores.flatten(0, 1), batch.target.flatten(), reduction="sum")
        return Loss(total, (batch.target != -100).sum(), {"nll": total.detach()})


@pytest.mark.parametrize("cuts", [[3, 8, 15, 24], [1, 2, 23, 24], [24]])
def test_an_update_is_the_same_however_it_is_cut_into_passes(cuts):
    task = Double(small(dropout=0.0))
    whole, cut = (learner(task, dropout=0.0, clip=0.0) for _ in range(2))
    seen = []
    for one, parts in ((whole, [24]), (cut, cuts)):
        one.optimizer.step = lambda one=one: seen.append([None if p.grad is None else p.grad.clone() for p in one.wanted])
        one.update(passes(task, parts))
    assert len(seen[0]) == len(seen[1])
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    a, b = (one.measured(str) for one in (whole, cut))
    assert a == pytest.approx(b, rel=1e-9) and a["tokens"] == sum(len(row) for row in task.splits["train"][:24])


def test_a_pass_without_anything_to_predict_adds_nothing():
    task = Double(small(dropout=0.0))
    empty = task.batch(task.splits["train"][:3])
    empty = empty._replace(target=torch.full_like(empty.target, -100))
    one, two = (learner(task, dropout=0.0) for _ in range(2))
    one.update(passes(task, [8]))
    two.update([empty, *passes(task, [8])])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one.wanted, two.wanted, strict=True))


def test_the_gradient_is_clipped_by_its_norm_which_is_reported_unclipped():
    task = Small(small())
    free, held = learner(task, clip=0.0), learner(task, clip=0.01)
    seen = []
    for one in (free, held):
        one.optimizer.step = lambda one=one: seen.append(nn.utils.get_total_norm([p.grad for p in one.wanted]).item())
        torch.manual_seed(3)
        one.update(passes(task, [8]))
    assert seen[1] == pytest.approx(0.01, rel=1e-3) and seen[0] > 0.1
    assert free.measured(str)["norm"] == pytest.approx(held.measured(str)["norm"]) == pytest.approx(seen[0])


def test_a_scaled_gradient_is_clipped_as_if_it_were_not_scaled():
    task, moved = Small(small(dropout=0.0)), []
    for precision in ("32", "16-mixed"):
        one = learner(task, dropout=0.0, clip=0.01, precision=precision)
        one.update(passes(task, [8]))
        moved.append(nn.utils.get_total_norm([one.optimizer.state[p]["exp_avg"] for p in one.wanted]).item())
        assert 0.1 < one.measured(str)["norm"] < 100
    assert moved == pytest.approx([0.1 * 0.01] * 2, rel=1e-2)  # the first mean of gradients is 1 - beta of the first one


def test_decay_spares_biases_norms_and_embeddings():
    model = Small(small()).model()
    made = optimizer(model, small(decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, spared = ([names[id(p)] for p in group["params"]] for group in made.param_groups)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert sorted(decayed + spared) == sorted(names.values())
    assert decayed and all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert {"table.weight", "places.weight"} <= set(spared) and all(".norm" in n or "bias" in n or "." in n for n in spared)


def test_the_rate_of_an_update_is_that_of_the_schedule():
    task = Small(small())
    one = learner(task, warmup=4, lr=0.5)
    for step in range(1, 7):
        one.update(passes(task, [4]))
        expected = 0.5 * min(step / 4, math.sqrt(4 / step))
        assert [group["lr"] for group in one.optimizer.param_groups] == pytest.approx([expected] * 2)
        assert one.measured(str)["lr"] == pytest.approx(expected)
