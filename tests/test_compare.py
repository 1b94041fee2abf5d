"""A comparison: equal models, equal budgets, the best learning rate on validation, test scores once."""

import math
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from regard.arena.arena_catalogue import arena_task, short_task
from regard.arena.arena_task import IGNORED
from regard.compare.batch_order import BatchOrder, length_groups, one_group
from regard.compare.cell_costs import allocated_peak
from regard.compare.cell_record import CellRecord
from regard.compare.cell_run import CellJob, run_job
from regard.compare.cell_store import CellStore
from regard.compare.cell_training import CellBudget, CellTraining, rate_factor
from regard.compare.compared_model import build_model, matched_model
from regard.compare.comparison import SliceScore, compare_records, wilson
from regard.compare.device_split import load_split
from regard.compare.grid_plan import best_rate, mixer_texts, plan_grid, split_outside
from regard.compare.own_code import read_task
from regard.compare.split_score import arena_score, target_points
from regard.compare.training_step import TrainingStep
from regard.compare.warm_steps import WarmSteps
from regard.compare.worker_pool import Turns, Worker, WorkerPool
from regard.spec import Spec
from small_arena import FILES, run_grid, settings
from warm_processes import warm_start

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("regard.compare.cell_costs.TIMED", 0.002)


def task(text):
    return read_task(text, FILES)


def test_rates_are_searched_with_one_seed_and_only_the_best_is_tested(tmp_path):
    records = run_grid(tmp_path, settings(mixers=["softmax", "linear"], seeds=2))
    for mixer in ("softmax", "linear"):
        own = [record for record in records if record.mixer == mixer]
        search = [record for record in own if record.seed == 0]
        assert sorted(record.lr for record in search) == [1e-3, 1e-2]
        final = [record for record in own if record.final]
        assert [record.seed for record in final] == [0, 1] and len({record.lr for record in final}) == 1
        assert final[0].lr == max(search, key=lambda record: record.val).lr
        assert all(record.test is None and not record.weights for record in own if not record.final)
        assert final[0].costs["train_steps_per_s"] > 0 and not final[1].costs
        assert all((tmp_path / record.weights).is_file() for record in final)
    record = records[0]
    assert [point[0] for point in record.curve] == [3, 6] and record.val == max(point[2] for point in record.curve)
    assert record.floors == {"chance": 0.2} and record.settings["model"]["width"] == 16
    assert {record.family for record in records} == {"softmax", "kernel"}
    final = next(record for record in records if record.final)
    inside = final.slices["first"].values()
    assert final.test_count == 32 == sum(count for _, count in inside)
    assert math.isclose(final.test, sum(score * count for score, count in inside) / 32)
    assert [record.to_json() for record in CellStore(tmp_path).records()] == sorted(
        (record.to_json() for record in records), key=lambda found: found["key"]
    )


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch):
    grid = settings(mixers=["softmax"])
    before = run_grid(tmp_path, grid)
    monkeypatch.setattr("regard.compare.worker_pool.run_job", lambda job: pytest.fail(f"{job.kind} again"))
    after = run_grid(tmp_path, grid)
    assert [record.to_json() for record in before] == [record.to_json() for record in after]


def test_more_seeds_train_the_new_ones_alone(tmp_path, monkeypatch):
    run_grid(tmp_path, settings())
    seen = []
    monkeypatch.setattr("regard.compare.worker_pool.run_job", lambda job: seen.append(job) or run_job(job))
    run_grid(tmp_path, settings(seeds=2))
    assert [(job.kind, job.cell.seed) for job in seen] == [("train and test", 1)]


def test_a_cell_repeats_itself(tmp_path):
    cell = plan_grid(settings())[0].cell
    one, two = (run_job(CellJob("train", cell, str(tmp_path / name))) for name in "ab")
    assert one.val == two.val and [p[:3] for p in one.curve] == [p[:3] for p in two.curve]
    other = run_job(CellJob("train", cell.at(cell.lr, 1), str(tmp_path / "c")))
    assert other.curve[0][1] != one.curve[0][1] and other.key != one.key


def test_products_are_rounded_where_they_are_to_be(tmp_path, monkeypatch):
    """The setting is torch's and global: it holds while a cell runs, and not beyond."""
    seen = []
    kept = TrainingStep._run
    monkeypatch.setattr(TrainingStep, "_run", lambda self, n: seen.append(torch.get_float32_matmul_precision()) or kept(self, n))
    before = torch.get_float32_matmul_precision()
    for dtype in ("fp32", "tf32"):
        cell = plan_grid(settings(dtype=dtype, steps=1))[0].cell
        assert run_job(CellJob("train", cell, str(tmp_path / dtype))).status == "done"
    assert seen == [before, "high"] and torch.get_float32_matmul_precision() == before != "high"


def test_a_budget_of_seconds(tmp_path):
    grid = settings(seconds=0.2, rates=(1e-3,))
    record = run_job(CellJob("train", plan_grid(grid)[0].cell, str(tmp_path)))
    assert 0.2 <= record.train_seconds < 2 and record.settings["steps"] > 6
    assert record.settings["budget"]["seconds"] == 0.2 and record.settings["budget"]["steps"] is None


def test_keys_follow_what_decides_a_result():
    cell = plan_grid(settings())[0].cell
    same = replace(cell, note="other words", title="x", grid=replace(cell.grid, seeds=5, lengths=(64,)))
    assert same.key == cell.key
    wider = replace(cell, model=replace(cell.model, ffn=20))
    longer, slower = replace(cell, grid=replace(cell.grid, steps=7)), replace(cell, usual=replace(cell.usual, warmup=0.2))
    others = [wider, longer, slower, replace(cell, source="another file"), cell.at(2e-3, 0), cell.at(cell.lr, 1)]
    assert len({found.key for found in [cell, *others]}) == 7


@pytest.mark.parametrize("mixer", ["fnet", "gla", "identity", "conv", "synthesizer"])
def test_parameters_are_those_of_softmax(mixer):
    own = task("first_token")
    usual = replace(own.model(), width=32, ffn=64, depth=2)
    matched = matched_model(own, mixer, usual)
    goal = sum(p.numel() for p in build_model(own, "softmax", usual).parameters())
    made = sum(p.numel() for p in build_model(own, mixer, matched.model).parameters())
    assert made == matched.parameters and abs(made - goal) <= 0.02 * goal
    assert f"{goal:,}" in matched.note


def test_parameters_that_cannot_be_equal_are_written_down():
    own = task("first_token(tokens=256)")
    matched = matched_model(own, "synthesizer(form='random')", own.model())
    assert "cannot be made up for" in matched.note and matched.model.ffn == 4
    bare = matched_model(own, "fnet", replace(own.model(), ffn=0))
    assert "no feed-forward layer" in bare.note


def test_what_a_mechanism_cannot_do_is_a_row_with_the_reason(tmp_path):
    records = run_grid(tmp_path, settings("echo", mixers=["fnet", "pooled_queries(rate=2)", "softmax"], rates=(1e-3,)))
    refused = {record.mixer: record for record in records if record.status == "refused"}
    assert "causal" in refused["fnet"].reason and "pooled_queries" in refused["pooled_queries(rate=2)"].reason
    rows = compare_records(records).rows
    assert rows[0].mixer == "softmax" and all(row.reason.startswith("refused: ") for row in rows[1:])
    assert CellStore(tmp_path).load(refused["fnet"].key).status == "refused"


def test_warnings_are_in_the_record(tmp_path):
    with pytest.warns(UserWarning, match="nothing"):  # the filter of the tests raises warnings that are not expected
        warnings.warn("nothing", stacklevel=1)
        records = run_grid(tmp_path, settings(mixers=["small_arena:Complaining"], rates=(1e-3,)))
    assert records[0].settings["warnings"] == ["this is slow"]


@pytest.mark.parametrize("name", ["first_token", "echo", "next_one", "pairs"])
def test_every_form_of_task(name, tmp_path):
    grid = settings(name, mixers=["Local(3)"], rates=(1e-3,), lengths=(16,))
    record = run_grid(tmp_path, grid)[0]
    assert record.status == "done" and record.test > 0 and record.test_count == {"echo": 64, "next_one": 256}.get(name, 32)
    assert record.cost_by_length[0]["n"] == 16 and record.cost_by_length[0]["step_ms"] > 0
    decodes = name in ("echo", "next_one")
    assert (record.costs["decode_ms"] is not None) == decodes == (record.costs["state_bytes"] is not None)
    assert decodes or record.costs["notes"]["decode_ms"]
    assert record.costs["peak_bytes"] > 8 * 8 * 16 * 4  # more than one activation


def test_scores_count_only_targets():
    own = task("echo")
    split, made = load_split(own, "test", CPU)
    assert split.targets.shape == (32, 2) and not (split.targets == IGNORED).any()
    places = split.at[0].tolist()
    assert places == [3, 7]
    right = torch.zeros(32, 8, 6)
    right[:, 3].scatter_(1, made.targets[:, 3, None], 1.0)

    class Known(torch.nn.Module):
        def forward(self, tokens, _, at):
            return right[: len(tokens)].take_along_dim(at[..., None], 1)

    points = target_points(Known(), split, "accuracy", 64, torch.float32)
    score = arena_score(points, split, made, {})
    assert score.count == 64 and score.slices["place"]["3"] == (1.0, 32)
    named = arena_score(points, split, made, {"place": "abcdefgh"})
    assert named.slices["place"] == {"abcdefgh"[int(at)]: value for at, value in score.slices["place"].items()}
    assert score.slices["place"]["7"] == pytest.approx((float((made.targets[:, 7] == 0).float().mean()), 32))


def test_bits_are_those_of_the_cross_entropy():
    split, made = load_split(task("next_one"), "test", CPU)

    class Even(torch.nn.Module):
        def forward(self, tokens, *_):
            return torch.zeros(*tokens.shape, 6)

    points = target_points(Even(), split, "bits per token", 5, torch.float32)
    assert points.shape == (32, 8) and torch.allclose(points, torch.tensor(math.log2(6)))
    split.targets[:, :3] = IGNORED
    score = arena_score(target_points(Even(), split, "bits per token", 5, torch.float32), split, made, {})
    assert score.count == 32 * 5 and score.value == pytest.approx(math.log2(6))


@pytest.mark.parametrize("metric", ["accuracy", "bits per token"])
def test_scores_that_are_not_numbers_count(metric):
    split, made = load_split(task("next_one"), "test", CPU)
    split.targets[:, :2], split.targets[:, 2:] = IGNORED, 0

    class Partial(torch.nn.Module):
        def forward(self, tokens, *_):
            scores = torch.zeros(*tokens.shape, 6)
            scores[..., 0], scores[:, 6:] = 1.0, torch.nan
            return scores

    score = arena_score(target_points(Partial(), split, metric, 5, torch.float32), split, made, {})
    assert score.count == 32 * 6 and score.value == (4 / 6 if metric == "accuracy" else math.inf)


def test_less_is_better_for_bits():
    records = [CellRecord("k", "t", "m", "f", lr, 0, val=val, metric="bits per token") for lr, val in ((1.0, 2.5), (2.0, 1.5))]
    assert best_rate(records) == 2.0
    assert best_rate([replace(record, metric="accuracy") for record in records]) == 1.0
    assert best_rate([replace(record, status="diverged") for record in records]) is None


def test_the_rate_rises_and_falls():
    values = [rate_factor(x / 10, 0.2) for x in range(11)]
    assert values[0] == 0 and values[1] == 0.5 and values[2] == 1 and abs(values[10]) < 1e-9
    assert values[6] == pytest.approx(0.5) and sorted(values[2:], reverse=True) == values[2:]


def test_an_epoch_has_every_example_once():
    order = BatchOrder(one_group(10), 5, 3, CPU)
    first = torch.cat([order(0), order(1)])
    assert sorted(first.tolist()) == list(range(10)) and order.length(1) is None
    assert torch.equal(BatchOrder(one_group(10), 5, 3, CPU)(1), first[5:]) and not torch.equal(order(2), first[:5])


def test_batches_of_one_length_are_cut_to_it():
    """Every example is in one group that has room for it; an epoch mixes the groups, and repeats by its step."""
    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0))
    groups = length_groups(lengths, 3, 8, 490 + 10)
    assert [group.length for group in groups] == [192, 384, 500]
    assert torch.equal(torch.cat([group.rows for group in groups]).sort().values, torch.arange(1000))
    order = BatchOrder(groups, 8, 3, CPU)
    seen, padded = torch.cat([order(step) for step in range(order.in_epoch)]), [order.length(s) for s in range(order.in_epoch)]
    assert len(seen.unique()) == len(seen) > 1000 - 3 * 8 and padded != sorted(padded)
    assert all(lengths[order(step)].max() <= order.length(step) for step in range(order.in_epoch))
    assert torch.equal(BatchOrder(groups, 8, 3, CPU)(7), order(7)) and not torch.equal(order(order.in_epoch), order(0))
    few = length_groups(torch.tensor([10] * 20 + [100] * 3 + [200] * 5), 4, 8, 256)
    assert [(group.length, len(group.rows)) for group in few] == [(64, 20), (256, 8)]
    assert [(group.length, len(group.rows)) for group in length_groups(torch.tensor([10] * 20 + [200] * 5), 4, 8, 256)] == [
        (256, 25)
    ]


def test_peak_memory_is_what_was_held_at_once():
    def call():
        first = torch.zeros(1000)
        second = first + 1
        del first
        return second + torch.zeros(1000)

    assert 8000 <= allocated_peak(call) < 14000


def test_lists_of_mechanisms():
    assert split_outside("softmax, Local(4) | Global(first=2); sparse(pattern='Local(1), x'),") == [
        "softmax",
        "Local(4) | Global(first=2)",
        "sparse(pattern='Local(1), x')",
    ]
    assert mixer_texts(["linformer, softmax", "Local(8), softmax"]) == ("linformer(rank=8)", "softmax", "Local(8)")
    assert len(mixer_texts(["all"])) > 30
    assert Spec.parse("small_arena:Raising(scale=1.0)").row.family == "own"


def test_a_process_that_dies_ends_its_own_cell_alone(tmp_path):
    grid = settings(mixers=["small_arena:Dying", "softmax"], rates=(1e-3,))
    warm_start()
    records = run_grid(tmp_path, grid, WorkerPool(1))
    found = {record.mixer: record for record in records}
    assert found["small_arena:Dying"].status == "crashed" and "signal 9" in found["small_arena:Dying"].reason
    assert found["softmax"].status == "done" and found["softmax"].final and found["softmax"].costs


def test_cells_that_share_a_process_end_as_if_alone(tmp_path):
    """Several cells at a time in one process; where it dies, each is run again with none beside it."""
    grid = settings(mixers=["softmax", "small_arena:Dying", "identity"], rates=(1e-2,), steps=30)
    warm_start()
    shared = run_grid(tmp_path / "shared", grid, WorkerPool(1, lanes=4))
    statuses = {(record.mixer, record.status) for record in shared}
    assert statuses == {("softmax", "done"), ("small_arena:Dying", "crashed"), ("identity", "done")}
    alone = run_grid(tmp_path / "alone", settings(mixers=["softmax", "identity"], rates=(1e-2,), steps=30))
    found = {record.key: (record.val, record.test) for record in shared}
    assert all(found[record.key] == (record.val, record.test) for record in alone)


def test_records_of_other_settings_are_set_aside(tmp_path):
    before = run_grid(tmp_path, settings(rates=(1e-3,), steps=4))
    after = run_grid(tmp_path, settings(rates=(1e-3,), steps=6))
    assert [record.key for record in CellStore(tmp_path).records()] == [record.key for record in after]
    assert [path.stem for path in (tmp_path / "replaced").iterdir()] == [record.key for record in before]


def test_the_weights_of_the_best_evaluation_are_kept(monkeypatch):
    own = task("first_token")
    (train, _), (val, _) = load_split(own, "train", CPU), load_split(own, "val", CPU)
    step = TrainingStep(build_model(own, "softmax", own.model()), own, train, own.budget())
    seen = []

    def falling(model, *_):
        seen.append(model.head.map.weight.detach().clone())
        return torch.tensor([1.0 / len(seen)])

    monkeypatch.setattr("regard.compare.cell_training.target_points", falling)
    found = CellTraining(step, val, CellBudget(own.budget()), 1e-2, 0).run()
    assert found.val == 1.0 and len(seen) == 2 and not torch.equal(seen[0], seen[1])
    assert torch.equal(found.weights["head.map.weight"], seen[0])


def test_a_step_that_is_used_again_trains_as_a_new_one():
    """The weights, buffers and the state of the optimizer are those of a new model: the same bits."""
    own = task("first_token")
    (train, _), (val, _) = load_split(own, "train", CPU), load_split(own, "val", CPU)

    def model(seed):
        torch.manual_seed(seed)
        return build_model(own, "routing(clusters=2, window=4)", own.model())

    def trained(step, seed):
        return CellTraining(step, val, CellBudget(own.budget()), 1e-2, seed).run()

    used = TrainingStep(model(0), own, train, own.budget())
    trained(used, 0)
    used.restart(model(1))
    again, fresh = trained(used, 1), trained(TrainingStep(model(1), own, train, own.budget()), 1)
    assert [point[:3] for point in again.curve] == [point[:3] for point in fresh.curve]
    assert all(torch.equal(again.weights[name], fresh.weights[name]) for name in fresh.weights)


def test_captured_steps_are_kept_for_cells_of_the_same_model():
    cell = plan_grid(settings())[0].cell
    own = task("first_token")
    step = TrainingStep(build_model(own, "softmax", own.model()), own, load_split(own, "train", CPU)[0], own.budget())
    warm = WarmSteps(most=2)
    warm.give(cell, step)
    assert not warm.idle  # it was not captured
    step.captured = {None: "captured"}
    warm.give(cell, step)
    assert warm.take(replace(cell, model=replace(cell.model, ffn=20)), step.model) is None
    assert warm.take(cell.at(0.5, 3), step.model) is step and not warm.idle
    for _ in range(3):
        warm.give(cell, step)
    assert len(warm.idle) == 2


def test_cells_of_a_group_follow_each_other_where_its_model_is_warm(monkeypatch):
    groups = plan_grid(settings(mixers=["softmax", "identity", "linear"], rates=(1e-3, 1e-2)))
    queue = [CellJob("train", cell, "") for group in groups for cell in group.search()]

    class Idle(Worker):
        def __init__(self, _):
            self.jobs, self.warm, self.link = {}, Counter(), SimpleNamespace(send=lambda _: None)

    monkeypatch.setattr("regard.compare.worker_pool.Worker", Idle)
    pool = WorkerPool(2, lanes=2)
    assert pool.choose([]) is None
    begun = []
    for _ in range(4):
        begun.append(queue.pop(pool.choose(queue)))
        pool.submit(begun[-1])
    assert [job.cell.mixer for job in begun] == ["softmax", "identity", "linear", "softmax"] and pool.choose(queue) is None
    home = next(worker for worker in pool.workers if begun[1].cell.key in worker.jobs)
    home.end(begun[1].cell.key)
    place = pool.choose(queue)
    assert queue[place].cell.mixer == "identity"
    pool.submit(queue[place])
    assert queue[place].cell.key in home.jobs and not home.warm


def test_a_cell_with_slow_steps_leaves_time_to_the_others(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("regard.compare.worker_pool.time.perf_counter", lambda: clock[0])

    class Run:
        def __init__(self, seconds):
            self.seconds, self.parts = seconds, 0

        def advance(self):
            clock[0] += self.seconds
            self.parts += 1

    turns, slow, quick = Turns(), Run(0.8), [Run(0.01) for _ in range(3)]
    for run in (slow, *quick):
        turns.add(run)
    while slow.parts < 5:
        for run in turns.next_round():
            turns.advance(run)
    assert all(run.parts > 4 * 0.7 / 0.01 for run in quick)
    late = Run(0.01)
    turns.add(late)  # it is owed nothing for the time before it
    assert turns.spent[late] == min(turns.spent.values())
    for run in (slow, late):
        turns.remove(run)
    assert turns.next_round() == quick and not turns.advance(quick[0])
    reader = Run(60)  # the first part of the cell that reads a data set
    turns.add(reader)
    turns.advance(reader)
    assert turns.spent[reader] <= 1 + min(turns.spent.values())


def test_training_ends_with_a_score_that_is_good_enough(monkeypatch):
    own = task("first_token")
    (train, _), (val, _) = load_split(own, "train", CPU), load_split(own, "val", CPU)
    monkeypatch.setattr("regard.compare.cell_training.target_points", lambda *_: torch.tensor([0.99]))
    for stop, steps in ((0.0, 6), (0.5, 3), (0.999, 6)):
        usual = replace(own.budget(), stop=stop)
        found = CellTraining(
            TrainingStep(build_model(own, "softmax", own.model()), own, train, usual), val, CellBudget(usual), 1e-2, 0
        )
        assert found.run().steps == steps


def test_there_are_no_more_evaluations_than_steps():
    own = task("first_token")
    (train, _), (val, _) = load_split(own, "train", CPU), load_split(own, "val", CPU)
    usual = replace(own.budget(), evaluations=10, steps=4)
    found = CellTraining(
        TrainingStep(build_model(own, "softmax", own.model()), own, train, usual), val, CellBudget(usual), 1e-2, 0
    ).run()
    assert [point[0] for point in found.curve] == [1, 2, 3, 4] and all(point[1] > 0 for point in found.curve)


def test_gradients_are_not_clipped_where_clip_is_zero():
    own = task("first_token")
    train, _ = load_split(own, "train", CPU)
    weights = []
    for clip in (0.0, 1e9):
        torch.manual_seed(0)
        step = TrainingStep(build_model(own, "softmax", own.model()), own, train, replace(own.budget(), clip=clip))
        step(torch.arange(8), 1e-2)
        weights.append(step.model.head.map.weight)
    assert torch.equal(*weights)


def test_a_task_in_two_spellings_is_one():
    groups = plan_grid(settings("first_token", "first_token()", "first_token(steps=6, tokens=8)"))
    assert [group.cell.task for group in groups] == ["first_token(tokens=8, steps=6)"]


def test_a_task_is_shown_with_the_options_that_are_not_the_usual_ones():
    texts = {"recall(pairs=4, length=128)": "recall(pairs=4)", "listops": "listops", "own(steps=3)": "own(steps=3)"}
    for text, shown in texts.items():
        whole = str(arena_task(text)) if text != shown or text == "listops" else text
        assert short_task(whole) == shown


def test_slices_have_intervals():
    slices = {"depth": {"3": (0.5, 400), "10": (0.25, 4)}}
    records = [
        CellRecord(
            str(seed), "recall", "m", "f", 0.1, seed, val=0.5, test=0.5, test_count=404, slices=slices, final=True, status="done"
        )
        for seed in range(2)
    ]
    (row,) = compare_records(records).rows
    assert row.slices["depth"]["3"] == SliceScore(0.5, 400, *wilson(0.5, 400))
    few = row.slices["depth"]["10"]
    assert few.targets == 4 and few.low < 0.1 and few.high > 0.6
