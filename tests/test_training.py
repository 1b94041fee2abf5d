"""Training: validation, patience, averages, what is said, and sentences for what cannot go on."""

import ast
import io
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from regard.cli.train import _validation_scores
from regard.training import checkpoints, loop, metrics_log, rng
from regard.training.atomic_files import RunError
from regard.training.fit import fit
from regard.training.loop import run_updates
from regard.training.losses import Loss
from regard.training.metrics_log import read_metrics
from regard.training.prefetch import prefetch_batches
from regard.training.progress import Bar, Lines, Progress, progress, span
from regard.training.result import finished
from small_task import Small, small


def train(out, task=None, **changes):
    return fit(task or Small(small(**changes)), out, accelerator="cpu", quiet=True)


# A run


class Scored(Small):
    """Its scores are made up, one for each validation."""

    scores: tuple[float, ...] = ()
    averaged = 0.0

    def score(self, model, split):
        assert not model.training and not torch.is_grad_enabled() and split == "val"
        self.asked = [*getattr(self, "asked", []), {name: x.clone() for name, x in checkpoints.weights_of(model).items()}]
        made = [*self.scores, self.averaged]
        return {"accuracy": made[min(len(self.asked), len(made)) - 1], "asked": len(self.asked)}


def scored(scores, averaged=0.0, **changes) -> Scored:
    task = Scored(small(**{"save_every": 2, "validate_every": 2, **changes}))
    task.scores, task.averaged = scores, averaged
    return task


def test_a_run_leaves_a_folder_that_says_all_about_it(tmp_path):
    result = train(tmp_path)
    assert result.steps == 60 and not result.early and result.averaged is not None
    config, assets, weights = checkpoints.load_run(tmp_path)
    assert small().replace({k: v for k, v in config.items() if k != "task"}) == small()
    assert assets == Small(small()).assets() and (tmp_path / "tensorboard").is_dir()
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["seed"] == 7 and about["device"] == "cpu" and about["torch"] == torch.__version__
    assert about["parameters"] == sum(p.numel() for p in Small(small()).model().parameters())
    lines = metrics_log.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(5, 61, 5))
    assert [line["step"] for line in lines if "val" in line] == list(range(10, 61, 10))
    assert lines[-1]["loss"] < lines[0]["loss"] and {"time", "loss", "nll", "lr", "norm", "tokens"} <= set(lines[0])
    task = Small(small())
    model = task.model()
    checkpoints.put_weights(model, weights, tmp_path)
    assert task.score(model.eval(), "val")["accuracy"] == result.score
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith((".writing", ".removing"))]


def test_a_finished_run_says_so_and_is_not_trained_again(tmp_path, capsys):
    first = train(tmp_path, steps=10)
    again = fit(Small(small(steps=10)), tmp_path, accelerator="cpu")
    assert again == first and "is finished: 10 updates" in capsys.readouterr().out


def test_a_run_with_other_settings_is_refused_and_shows_them(tmp_path):
    train(tmp_path, steps=5)
    with pytest.raises(RunError, match=r"other settings: lr is 0\.01 there and 0\.1 here; heads is 4 there|heads is 4 there"):
        train(tmp_path, steps=5, lr=0.1, heads=2)
    with pytest.raises(RunError, match="holds a run already"):
        fit(Small(small(steps=5)), tmp_path, resume=False, accelerator="cpu", quiet=True)
    other = Small(small(steps=5))
    other.assets = lambda: {"words.json": "[]"}
    with pytest.raises(RunError, match=r"on other data: its words\.json differs"):
        train(tmp_path, other)


def test_a_run_on_other_examples_is_refused(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, broken(at=8))
    task = Small(small())
    task.splits = {**task.splits, "train": task.splits["train"][1:]}
    with pytest.raises(RunError, match="on other data"):
        train(tmp_path, task)


def test_the_best_weights_are_chosen_and_kept_while_others_go(tmp_path):
    task = scored((0.1, 0.9, 0.2, 0.3, 0.4), steps=10, average=1)
    result = train(tmp_path, task)
    assert (result.best, result.best_step, result.chosen, result.averaged) == (0.9, 4, "best", None)
    assert checkpoints.steps(tmp_path) == [4, 8, 10]
    weights = checkpoints.load_run(tmp_path).weights
    assert all(torch.equal(x, task.asked[1][name]) for name, x in weights.items())
    from safetensors import safe_open

    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"step": "4"}


@pytest.mark.parametrize("averaged, chosen", [(0.8, "best"), (0.95, "average")])
def test_the_average_is_kept_only_if_it_does_better(tmp_path, averaged, chosen):
    task = scored((0.1, 0.9, 0.2, 0.3, 0.4), averaged, steps=10, average=3)
    result = train(tmp_path, task)
    assert (result.best, result.averaged, result.chosen) == (0.9, averaged, chosen)
    assert result.score == max(0.9, averaged) and checkpoints.steps(tmp_path) == [4, 6, 8, 10]
    assert result.averaged_scores == ({"accuracy": averaged, "asked": 6} if chosen == "average" else None)
    assert _validation_scores(read_metrics(tmp_path / "metrics.jsonl"), result) == {
        "accuracy": result.score,
        "asked": 6 if chosen == "average" else 2,  # all scores are those of the weights that are kept
    }
    assert finished(tmp_path) == result
    expected = task.asked[1]
    if chosen == "average":
        expected = {name: sum(w[name].double() for w in task.asked[2:5]) / 3 for name in expected}
    for name, x in checkpoints.load_run(tmp_path).weights.items():
        torch.testing.assert_close(x, expected[name].float(), rtol=0, atol=1e-7)


def test_states_with_counts_are_averaged_and_the_counts_are_the_last_ones(tmp_path):
    class Counted(Scored):
        def model(self):
            made = super().model()
            made.register_buffer("seen", torch.tensor(0))  # as num_batches_tracked of a norm
            return made

        def loss(self, model, batch, step):
            model.seen += model.training
            return super().loss(model, batch, step)

    task = Counted(scored((), steps=10, average=3).config)
    task.scores, task.averaged = (0.1, 0.2, 0.3, 0.4, 0.5), 0.9
    assert train(tmp_path, task).chosen == "average"
    assert checkpoints.load_run(tmp_path).weights["seen"] == 10


def test_what_is_smaller_can_be_better(tmp_path):
    task = scored((0.3, 0.1, 0.2), steps=6, average=1)
    task.best = ("accuracy", "min")
    assert train(tmp_path, task).best_step == 4


def test_a_best_step_between_two_saves_is_saved_but_not_averaged(tmp_path):
    task = scored((0.1, 0.9, 0.2), 0.95, steps=9, save_every=4, validate_every=3, average=3)
    train(tmp_path, task)
    from safetensors import safe_open

    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata()["step"] == "average of 4, 8, 9"
    assert checkpoints.steps(tmp_path) == [4, 6, 8, 9]


def test_patience_ends_a_run_early_and_it_stays_ended(tmp_path):
    task = scored((0.1, 0.5, 0.4, 0.5, 0.6), steps=60, patience=2, average=1)
    result = train(tmp_path, task)
    assert result.early and result.steps == 8 and result.best_step == 4 and len(task.asked) == 4
    (tmp_path / "result.json").unlink()  # as if it had been killed just before
    again = train(tmp_path, scored((), steps=60, patience=2, average=1))
    assert (again.steps, again.best, again.early) == (8, 0.5, True)


def test_patience_is_remembered_by_a_run_that_goes_on(tmp_path):
    task = scored((0.1, 0.5, 0.4), steps=60, patience=2, average=1)
    task.loss = broken(at=7).loss
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, task)
    result = train(tmp_path, scored((0.3,), steps=60, patience=2, average=1))
    assert (result.steps, result.best_step, result.early) == (8, 4, True)


def test_dice_that_are_put_back_throw_what_they_would_have_thrown():
    def thrown():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()

    rng.seed_all(3)
    np.random.randn()  # of the two that it makes, one is left for later
    held = json.loads(json.dumps(rng.rng_state()))
    first = thrown()
    assert thrown() != first
    rng.set_rng_state(held)
    assert thrown() == first


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    result = train(tmp_path, scored((math.nan, 0.1, math.inf), steps=6, average=1))
    assert (result.best, result.best_step) == (0.1, 4)
    result = train(tmp_path / "none", scored((math.nan,), math.nan, steps=4, average=2))
    assert (result.best, result.averaged, result.chosen, result.score) == (None, None, "last", None)
    assert metrics_log.read_metrics(tmp_path / "none" / "metrics.jsonl")[0]["val"]["accuracy"] is None


def test_a_score_that_does_not_choose_is_refused(tmp_path):
    task = Small(small(steps=5))
    task.best = ("acuracy", "max")
    with pytest.raises(ValueError, match="did you mean 'accuracy'"):
        train(tmp_path, task)


# What goes wrong


def broken(at: int, value: float | None = None, **changes) -> Small:
    """From this update on the loss is a value, or an error."""
    task = Small(small(**changes))
    plain = task.loss

    def loss(model, batch, step):
        total, over, parts = plain(model, batch, step)
        if step >= at and value is None:
            raise ZeroDivisionError
        return Loss(total * value if step >= at else total, over, parts)

    task.loss = loss
    return task


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_training_with_the_step_and_the_last_good_checkpoint(tmp_path, value):
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at update 12: the last good checkpoint is .*step-000010\. Try"):
        train(tmp_path, broken(12, value))
    assert checkpoints.steps(tmp_path) == [5, 10]
    assert all(x.isfinite().all() for x in checkpoints.load_checkpoint(checkpoints.latest(tmp_path)).weights.values())
    with pytest.raises(RunError, match="at update 2: no checkpoint has been saved yet"):
        train(tmp_path / "early", broken(2, value))


def test_a_gradient_that_is_no_number_ends_training_before_it_is_saved(tmp_path):
    task = Small(small())
    plain = task.loss

    def loss(model, batch, step):
        total, over, parts = plain(model, batch, step)
        if step == 10:
            total = total + (model.table.weight * 0).abs().sqrt().sum()  # 0, but its slope is 0 * inf
        return Loss(total, over, parts)

    task.loss = loss
    with pytest.raises(RunError, match="the gradient is not finite at update 10"):
        train(tmp_path, task)
    assert checkpoints.steps(tmp_path) == [5]


def test_half_precision_may_skip_updates_but_not_forever(tmp_path):
    changes = {"precision": "16-mixed", "steps": 40, "save_every": 40, "validate_every": 40}
    with pytest.raises(RunError, match="the loss is nan at update 35 for the 26th time in a row"):
        train(tmp_path, broken(10, math.nan, **changes))
    task = Small(small(**changes))
    plain = task.loss
    task.loss = lambda model, batch, step: plain(model, batch, step)._replace(
        total=plain(model, batch, step).total * (math.inf if step in (5, 6) else 1)
    )
    assert train(tmp_path / "fine", task).steps == 40
    state = checkpoints.load_checkpoint(checkpoints.latest(tmp_path / "fine")).state
    assert state["skipped"] == 0 and state["scaler"]["scale"] == 2**16 / 4


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
def test_every_precision_learns_with_weights_in_float32(tmp_path, precision):
    train(tmp_path, precision=precision, steps=20)
    lines = metrics_log.read_metrics(tmp_path / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {x.dtype for x in checkpoints.load_run(tmp_path).weights.values()} == {torch.float32}


def test_settings_that_mean_nothing_are_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    for changes, word in (
        ({"steps": 0}, "steps must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"clip": -1.0}, "clip must not be below 0"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"betas": [0.9]}, "betas must be two numbers"),
        ({"precision": "16-mixd"}, "did you mean '16-mixed'"),
    ):
        with pytest.raises(ValueError, match=word):
            train(out, **changes)
    assert not out.exists()
    with pytest.raises(ValueError, match="did you mean 'cuda'"):
        fit(Small(small()), out, accelerator="cda", quiet=True)
    empty = Small(small())
    empty.splits = {"train": empty.splits["train"]}
    with pytest.raises(ValueError, match="no examples to validate on"):
        train(out, empty)
    assert not out.exists()


def test_a_task_that_draws_while_it_batches_is_refused(tmp_path):
    for draw in (random.random, lambda: torch.rand(1)):
        task = Small(small())
        plain = task.batch
        task.batch = lambda examples, draw=draw, plain=plain: (draw(), plain(examples))[1]
        with pytest.raises(ValueError, match=r"Small\.batch draws random numbers"):
            train(tmp_path, task)


def test_an_error_in_a_batch_reaches_the_caller(tmp_path):
    task = Small(small())
    plain, made = task.batch, []

    def batch(examples):
        made.append(1)
        if len(made) == 9:
            raise ZeroDivisionError("here")
        return plain(examples)

    task.batch = batch
    with pytest.raises(ZeroDivisionError, match="here"):
        train(tmp_path, task)


def test_batches_made_ahead_are_those_of_their_updates():
    task = Small(small(steps=9, accumulate=2))
    with prefetch_batches(task, 0, "cpu") as every:
        whole = list(every)
    with prefetch_batches(task, 5, "cpu") as rest:
        later = list(rest)
    assert len(whole) == 9 and len(later) == 4 and all(len(update) == 2 for update in whole)
    for a, b in zip(whole[5:], later, strict=True):
        assert all(torch.equal(x.source, y.source) for x, y in zip(a, b, strict=True))


# What it says


def test_a_line_now_and_then_says_where_it_is_and_how_long_it_takes():
    now, told = [0.0], io.StringIO()
    lines = Lines(100, 20, console=Console(file=told), clock=lambda: now[0])
    for step in range(21, 61):
        now[0] += 1
        lines.measured(2.5)
        lines.step(step)
    said = told.getvalue().splitlines()
    assert said[0] == "step 30/100  train loss 2.5  1:10 left" and len(said) == 4
    lines.note("the run in :smile: [bold] is finished")
    assert told.getvalue().splitlines()[-1] == "the run in :smile: [bold] is finished"
    lines.validated("bleu", 20.0, 30.0)
    assert told.getvalue().splitlines()[-1] == "step 60/100  train loss 2.5  val bleu 20 (best 30)  40 s left"


def test_a_terminal_gets_a_bar():
    told = io.StringIO()
    made = progress(10, console=Console(file=told, force_terminal=True, width=120))
    assert isinstance(made, Bar)
    made.measured(1.5)
    made.validated("bleu", 3.0, 3.0)
    made.step(10)
    made.note("[done]")
    made.close()
    assert "step 10/10  train loss 1.5  val bleu 3" in told.getvalue() and "[done]" in told.getvalue()
    assert type(progress(10, quiet=True)) is Progress and type(progress(10, console=Console(file=io.StringIO()))) is Lines


def test_spans_of_time_are_short():
    assert [span(x) for x in (0.4, 59, 125, 3723, math.nan)] == ["0 s", "59 s", "2:05", "1:02:03", "?"]


def test_a_journal_forgets_what_is_behind_the_step_it_goes_on_from(tmp_path):
    made = metrics_log.MetricsLog(tmp_path, 0)
    for step in (5, 10, 15):
        made.write({"step": step, "loss": math.nan if step == 10 else 1.0})
    made.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "lo')
    metrics_log.MetricsLog(tmp_path, 10).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 5, "loss": 1.0}\n{"step": 10, "loss": null}\n'
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(RunError, match="not as it was written"):
        metrics_log.MetricsLog(tmp_path, 10)


# the loop


def test_a_loop_needs_no_gradients_around_it(tmp_path):
    plain = train(tmp_path / "plain", steps=4)
    with torch.no_grad():
        inside = train(tmp_path / "inside", steps=4)
    assert inside.sha256 == plain.sha256


def test_updates_end_with_the_batches_or_when_they_are_stopped():
    made, steps = SimpleNamespace(step=0), []

    def update(passes):
        made.step += len(passes)

    made.update = update
    run_updates(made, [[1]] * 3, after=steps.append, stopped=lambda: False)
    assert steps == [1, 2, 3]
    run_updates(made, [[1]] * 9, after=steps.append, stopped=lambda: made.step == 5)
    run_updates(made, [[1]], after=steps.append, stopped=lambda: True)
    assert steps == [1, 2, 3, 4, 5]


def test_training_imports_no_task():
    """Not for types either: it works with any object that has the methods of `Learnable`."""
    folder = Path(loop.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith(("regard.tasks", "regard.cli")) for name in names), path
