"""Several models trained as one: the same losses, weights and records as each of them alone."""

import runpy
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from regard.compare import cell_run
from regard.compare.cell_run import CellJob
from regard.compare.cell_training import CellBudget, CellTraining
from regard.compare.compared_model import build_model
from regard.compare.device_split import load_split
from regard.compare.grid_plan import plan_grid
from regard.compare.stack_plan import AS_HEADS, MOST_STACKED, SIDE_BY_SIDE, stack_form, stack_size, stacks
from regard.compare.stacked_model import StackedModel
from regard.compare.stacked_step import STACKED_TOKENS, StackedStep
from regard.compare.stacked_training import StackedTraining
from regard.compare.training_step import TrainingStep
from regard.compare.worker_pool import Worker, WorkerPool, _serve
from small_arena import Echo, FirstToken, Pairs, run_grid, settings

CPU = torch.device("cpu")
RATES, SEEDS = (1e-3, 3e-2, 1e-2), (0, 0, 1)
ECHO = Echo(tokens=12, every=2)
STACKED = (
    *(
        "softmax",
        "linear",
        "gla",
        "delta",
        "Local(3)",
        "conv(kernel=3)",
        "window_fc(window=3)",
        "gmlp(expand=2, tiny=4)",
        "reformer",
    ),
    *("performer(features=8)", "rfa(features=8)", "additive(hidden=4)", "hybrid(pattern=Local(3))", "sinkhorn(block=4)"),
    *("gat(pattern=Local(3))", "routing(clusters=2, window=4)", "synthesizer", "linformer(rank=4)", "compressed(rate=3)"),
)


def models(task, mixer, seeds=SEEDS, **changes):
    made = []
    for seed in seeds:
        torch.manual_seed(seed)
        made.append(build_model(task, mixer, replace(task.model(), **changes)).double())
    return made


def both_ways(task, mixer, steps=10, clip=0.5, **changes):
    """Train models alone and as one; returns the outcomes of each."""
    train, val = (load_split(task, part, CPU)[0] for part in ("train", "val"))
    usual = replace(task.budget(), clip=clip, weight_decay=0.1, evaluations=2, warmup=0.2)
    budget = CellBudget(usual, steps=steps)
    alone = []
    for model, lr, seed in zip(models(task, mixer, **changes), RATES, SEEDS, strict=True):
        step = TrainingStep(model, task, train, usual)
        alone.append(CellTraining(step, val, budget, lr, seed).run())
    step = StackedStep(StackedModel(models(task, mixer, **changes)), task, train, usual, RATES)
    training = StackedTraining(step, val, budget, SEEDS)
    training.run()
    return alone, [training.trained(number) for number in range(len(SEEDS))]


def same(one, two):
    assert [point[0] for point in one.curve] == [point[0] for point in two.curve]
    for mine, theirs in zip(one.curve, two.curve, strict=True):
        assert mine[1:3] == pytest.approx(theirs[1:3], rel=2e-6)
    assert one.steps == two.steps
    assert one.weights.keys() == two.weights.keys()
    for name, x in one.weights.items():
        torch.testing.assert_close(two.weights[name], x, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mixer", STACKED)
def test_stacked_training_is_that_of_each_model_alone(mixer, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x: x.fill_(1.0))  # sinkhorn draws noise in training
    for one, two in zip(*both_ways(ECHO, mixer), strict=True):
        same(one, two)


@pytest.mark.parametrize("task", [Pairs(tokens=6), FirstToken(tokens=6)])
@pytest.mark.parametrize("changes", [{"positions": "learned"}, {"positions": "rotary", "conv": 3, "gated": True}])
def test_padding_positions_and_heads_of_all_forms(task, changes):
    for one, two in zip(*both_ways(task, "softmax", steps=4, **changes), strict=True):
        same(one, two)


@pytest.mark.parametrize("mixer", ["fnet", "nystrom(landmarks=2)", "pooled_queries(rate=3)", "linformer(rank=4)"])
def test_mechanisms_that_are_not_causal(mixer):
    for one, two in zip(*both_ways(FirstToken(), mixer, steps=4), strict=True):
        same(one, two)


@pytest.mark.parametrize("mixer", STACKED)
def test_what_is_not_a_number_in_one_model_stays_there(mixer):
    train = load_split(ECHO, "train", CPU)[0]
    index = torch.arange(8).expand(3, 8)
    found = []
    for spoilt in (False, True):
        model = StackedModel(models(ECHO, mixer))
        if spoilt:
            model.flat.data[1] = torch.nan
        step = StackedStep(model, ECHO, train, ECHO.budget(), RATES)
        torch.manual_seed(0)
        for _ in range(2):
            step(index, 1.0)
        found.append((step.total_loss.clone(), model.flat.detach().clone()))
    (loss, flat), (other_loss, other_flat) = found
    assert torch.equal(loss[::2], other_loss[::2]) and torch.equal(flat[::2], other_flat[::2])
    assert other_loss[1].isnan()


def test_a_model_that_diverges_and_one_that_has_learned_end_by_themselves():
    train, val = (load_split(ECHO, part, CPU)[0] for part in ("train", "val"))
    usual = replace(ECHO.budget(), evaluations=4, stop=0.01)
    model = StackedModel(models(ECHO, "softmax"))
    model.flat.data[0] = torch.nan
    training = StackedTraining(StackedStep(model, ECHO, train, usual, RATES), val, CellBudget(usual, steps=8), SEEDS)
    training.run()
    assert training.diverged == {0: "the loss was not finite at step 1: a smaller learning rate may help"}
    assert training.learned == {1, 2} and [found.steps for found in training.each] == [0, 2, 2]
    assert training.found.steps == 2 and not training.trained(0).weights


def test_what_cannot_be_stacked_says_why():
    for mixer, why in {"rnn": "rnn has weights of its own", "small_arena:Complaining": "your own"}.items():
        assert why in stack_form(ECHO, mixer, ECHO.model())[1]
    first = FirstToken()
    assert "project_k has no weights of each head" in stack_form(first, "linformer(rank=4, share='head')", first.model())[1]
    assert "mlp_mixer has weights of its own" in stack_form(first, "mlp_mixer(hidden=4)", first.model())[1]
    assert stack_form(ECHO, "softmax", ECHO.model()) == (SIDE_BY_SIDE, "")
    assert stack_form(ECHO, "sinkhorn(block=4)", ECHO.model()) == (AS_HEADS, "")


def test_the_size_of_a_stack_is_bounded_by_its_tokens():
    cell = plan_grid(settings("echo"))[0].cell
    assert stack_size(cell) == MOST_STACKED
    assert stack_size(replace(cell, length=STACKED_TOKENS // 8 // 3)) == 3
    assert stack_size(replace(cell, length=STACKED_TOKENS)) == 1
    assert stack_size(replace(cell, grid=replace(cell.grid, seconds=1.0))) == 1
    assert [len(part) for part in stacks([cell] * 7, 3)] == [2, 2, 3]


def test_a_grid_has_the_same_records_both_ways(tmp_path):
    grid = settings("echo", mixers=("softmax", "conv(kernel=3)", "rnn"), seeds=3, costs=False)
    alone, stacked = (run_grid(tmp_path / str(way), grid, stacked=way) for way in (False, True))
    assert [record.key for record in alone] == [record.key for record in stacked]
    for one, two in zip(alone, stacked, strict=True):
        assert (one.status, one.final, one.test_count, bool(one.weights)) == (
            two.status,
            two.final,
            two.test_count,
            bool(two.weights),
        )
        assert [point[0] for point in one.curve] == [point[0] for point in two.curve]
        assert [point[1] for point in one.curve] == pytest.approx([point[1] for point in two.curve], rel=1e-4)
    notes = {record.mixer: record.settings["graph"] for record in stacked if record.seed == 0}
    assert "2 models as one" in notes["softmax"] and "as one" not in notes["rnn"]
    assert stacked == run_grid(tmp_path / "True", grid, stacked=True)  # nothing is trained again


def test_cells_that_fail_as_one_are_trained_by_themselves(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("it is too wide")

    monkeypatch.setattr("regard.compare.stacked_step.StackedStep._run", fail)
    records = run_grid(tmp_path, settings("echo", seeds=2, costs=False), stacked=True)
    assert [record.status for record in records] == ["done"] * 3
    assert all("not trained as one: RuntimeError: it is too wide" in record.settings["warnings"][0] for record in records[:2])
    assert "warnings" not in records[2].settings  # the group is not tried again


def test_a_cell_of_a_stack_that_diverges_is_a_row_with_its_reason(tmp_path, monkeypatch):
    def spoilt(cell, task, made=cell_run._seeded_model):
        model = made(cell, task)
        if cell.lr == 1e-2:
            model.head.map.bias.data.fill_(torch.nan)
        return model

    monkeypatch.setattr(cell_run, "_seeded_model", spoilt)
    found = run_grid(tmp_path, settings("echo", costs=False), stacked=True)
    assert [record.status for record in found] == ["done", "diverged"]
    assert "not finite at step 1" in found[1].reason and found[0].final


def test_a_process_sends_the_records_of_a_stack_together_and_one_that_dies_is_trained_apart(tmp_path):
    cells = plan_grid(settings("echo"))[0].search()
    job = CellJob("train and test", cells[0], str(tmp_path), beside=tuple(cells[1:]))
    own, other = Pipe()
    own.send(job)
    own.send(job._replace(cell=replace(cells[0], task="nothing")))

    def serve():
        with pytest.raises(EOFError):
            _serve(other)

    serving = Thread(target=serve, daemon=True)
    serving.start()
    found = {}
    while len(found) < 2:
        kind, _, value = own.recv()
        found |= {kind: value} if kind != "share" else {}
    own.close()
    serving.join()
    assert {record.key for record in found["record"]} == {cell.key for cell in cells}
    assert all(record.final for record in found["record"])
    assert "nothing" in found["apart"]
    pool, worker = WorkerPool(1), Worker.__new__(Worker)
    worker.process, worker.jobs = SimpleNamespace(join=lambda: None, exitcode=-9), {job.cell.key: job}  # type: ignore[assignment]
    pool.workers = [worker]
    (event,) = pool._died(worker)
    assert [again.cell for again in event.again] == cells and all(again.alone and not again.beside for again in event.again)


def test_the_benchmark_counts_steps_of_all_models(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    made = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "grid_speed.py"))
    assert made["read_forms"]("5,5x8,none") == ((5, 1), (5, 8))
    data = made["LaneData"]("recall(length=16, pairs=2, vocab=32, train=64, test=16)", ("batch=4", "width=8"), CPU)
    (row,) = made["stacked_models"]("linear", data, ((3, 1),), 1e-3)
    assert row["mode"] == "stack of 3" and row["steps_per_s"] > 0 and not row["note"]
    lane = made["Lane"]("softmax", data, stacked=2)
    assert made["steps_a_second"]([lane], 1e-3) > 0 and lane.steps % (2 * made["CHECKED"]) == 0
