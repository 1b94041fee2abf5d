"""How long a task takes here: `regard tasks --time` measures a few updates and keeps what it found. Presets of tasks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from regard import tasks
from regard.cli import task_times
from regard.cli.task_times import TaskTime, duration, keep_time, kept_time
from regard.data import synthetic
from regard.tasks.presets import CPU_PRESETS
from regard.training import update_time
from test_cli import refused, run
from test_cli_runs import SETTINGS


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(synthetic, "string_pairs", partial(synthetic.string_pairs, train=300, val=5, test=5))


def test_updates_are_measured_kept_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_time, "MEASURED_BATCHES", 1)
    monkeypatch.setattr(update_time, "thread_counts", lambda _: [1, 2])
    small = tasks.config("reverse").replace({"width": 8, "heads": 2, "depth": 1, "ffn": 8, "batch_tokens": 128})
    monkeypatch.setitem(tasks.TASKS, "reverse", tasks.TASKS["reverse"]._replace(config=lambda: small))
    assert " here " not in run("tasks").stdout and "regard tasks --time" in run("tasks").stdout
    before = torch.get_num_threads()
    done = run("tasks", "reverse", "--time")
    assert done.exit_code == 0 and torch.get_num_threads() == before
    kept = kept_time(small)
    assert kept is not None and set(kept.seconds) == {1, 2} and all(x > 0 for x in kept.seconds.values())
    said = kept.describe(small)
    assert f"reverse: {said}" in done.stderr and f"time: {said}" in done.stdout.replace("\n", " ")
    table = run("tasks").stdout
    assert " here " in table and "validations come on top" in table
    found = {row["name"]: row["time"] for row in json.loads(run("tasks", "--json").stdout)}
    assert found["reverse"] == {"seconds": {str(n): x for n, x in kept.seconds.items()}, "device": "cpu"} and found["saw"] is None


def test_tasks_without_their_data_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    monkeypatch.setattr(update_time, "update_seconds", lambda *_: {1: 2.0})
    few = {name: tasks.TASKS[name] for name in ("reverse", "ewt", "text")}
    monkeypatch.setattr("regard.cli.task_list.TASKS", few)
    done = run("tasks", "--time")
    assert done.exit_code == 0 and "reverse: about 50 min on 1 thread: 1,500 updates of 2 s\n" in done.stderr
    assert "ewt is left out: ud_english_ewt is" in done.stderr and "text is left out: which file has the text?" in done.stderr
    assert "ud_english_ewt is" in refused("tasks", "ewt", "--time")


def test_times_are_those_of_this_machine_and_of_settings_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    saw = tasks.config("saw")
    assert kept_time(saw) is None
    path = keep_time(saw, TaskTime({1: 0.25, 2: 0.125}))
    keep_time(tasks.config("copy"), TaskTime({1: 1.0}, "cuda"))
    assert kept_time(saw) == TaskTime({1: 0.25, 2: 0.125}) and kept_time(saw.replace({"steps": 9})) is not None
    assert kept_time(saw.replace({"width": 16})) is None
    found = TaskTime({1: 0.25, 2: 0.125})
    assert found.describe(saw) == "about 1 min on 2 threads: 700 updates of 125 ms" and found.others() == "250 ms on 1"
    assert TaskTime({2: 1.0}, "cuda").describe(saw) == "about 12 min on the GPU: 700 updates of 1 s"
    with monkeypatch.context() as patch:
        patch.setattr(task_times.platform, "node", lambda: "another")
        assert kept_time(saw) is None
    path.write_text("{")
    assert kept_time(saw) is None
    assert [duration(x) for x in (0.0123, 2.34, 150, 9000)] == ["12.3 ms", "2.3 s", "2 min", "2.5 h"]
    assert update_time.thread_counts(1) == [1] and update_time.thread_counts(6) == [1, 2, 4, 6]


# presets


@pytest.mark.parametrize("name", CPU_PRESETS)
def test_a_preset_makes_a_smaller_model_that_can_be_built(name: str) -> None:
    config, default = tasks.config(name, "cpu"), tasks.config(name)
    assert {key: getattr(config, key) for key in CPU_PRESETS[name]} == CPU_PRESETS[name]
    tasks.make_task(config)
    assert config.steps * config.batch_tokens * config.width < default.steps * default.batch_tokens * default.width
    assert "--preset cpu" in run("tasks", name).stdout


def test_a_preset_is_trained_with_changes_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"width": 8, "heads": 2, "steps": 2}
    monkeypatch.setitem(tasks.TASKS, "reverse", tasks.TASKS["reverse"]._replace(presets={"cpu": small}))
    words = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    changes = [word for word in SETTINGS if word != "--set" and word.partition("=")[0] not in ("width", "heads", "steps")]
    given = [word for text in (*changes, "steps=3") for word in ("--set", text)]
    done = run("train", "reverse", "--preset", "cpu", *given, *words)
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "run/config.json").read_text())
    assert kept["width"] == 8 and kept["steps"] == 3
    assert run("train", "reverse", *words).exit_code == 0
    assert "steps is 3 there, not 2 (steps and patience may only grow)" in refused("train", "reverse", "--preset", "cpu", *words)


def test_a_preset_that_is_not_there_is_answered_by_a_sentence() -> None:
    assert "saw has no presets: cpu is one of multi30k, ewt, imdb, shakespeare" in refused("train", "saw", "--preset", "cpu")
    assert "multi30k has no preset 'gpu'" in refused("train", "multi30k", "--preset", "gpu")
    assert "which task? A preset is one of a task" in refused("tasks", "--preset", "cpu")
    shown = run("tasks", "multi30k", "--preset", "cpu").stdout
    assert f" {CPU_PRESETS['multi30k']['vocab']} " in shown
