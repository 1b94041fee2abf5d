"""How many threads a command takes: what is asked for, what the system says, what a run began with, or what a model is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from regard import tasks
from regard.cli import task_times, threads
from test_cli import refused, run
from test_cli_runs import SETTINGS


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine of four threads, of which no variable says how many to use. They are only counted, as true ones may be busy."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    for name in threads.CHOSEN_OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    yield
    assert now[-1] == 4, "a command leaves them as they were"


def test_small_models_take_one_thread_and_large_ones_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        name: threads.choose_threads(tasks.config(name), None, "cpu")[0]
        for name in ("saw", "reverse", "polarity", "multi30k", "imdb")
    }
    assert found == {"saw": 1, "reverse": 1, "polarity": 1, "multi30k": 4, "imdb": 4}
    saw = tasks.config("saw")
    assert "on 1 thread of 4, as the model is small: --threads 4 uses all" in threads.choose_threads(saw, None, "cpu")[1]
    assert threads.choose_threads(saw, 3, "cpu") == (3, "") and threads.choose_threads(saw, None, "cuda") == (4, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads.choose_threads(saw, None, "cpu") == (4, "") and threads.choose_threads(saw, 2, "cpu") == (2, "")
    for wrong in (0, -1, 10**9):
        with pytest.raises(ValueError, match="threads must be from 1 to 1024"):
            threads.choose_threads(saw, wrong, "cpu")


def test_the_number_that_was_measured_to_be_the_fastest_is_taken() -> None:
    saw = tasks.config("saw")
    task_times.keep_time(saw, task_times.TaskTime({1: 0.3, 2: 0.1, 4: 0.2}))
    longer = saw.replace({"steps": 5, "lr": 0.1})
    count, note = threads.choose_threads(longer, None, "cpu")
    assert count == 2 and note == "on 2 threads of 4, the fastest as measured by `regard tasks --time`"
    assert threads.choose_threads(saw.replace({"width": 128}), None, "cpu")[0] == 1  # other settings: not measured
    task_times.keep_time(saw, task_times.TaskTime({1: 0.3, 2: 0.1}))
    assert "as the model is small" in threads.choose_threads(saw, None, "cpu")[1]  # all four were not among those measured
    task_times.keep_time(saw, task_times.TaskTime({4: 0.1}, "cuda"))
    assert "as the model is small" in threads.choose_threads(saw, None, "cpu")[1]


def test_a_run_goes_on_with_its_own_number_and_says_where_it_does_not(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    done = run("train", "reverse", *SETTINGS, *out, "--threads", "2")
    assert done.exit_code == 0 and json.loads((tmp_path / "run" / "run.json").read_text())["threads"] == 2
    more = run("train", "reverse", *out, "--set", "steps=6")
    assert "on 2 threads, as before" in more.stderr and "threads was" not in more.stdout
    other = run("train", "reverse", *out, "--set", "steps=8", "--threads", "3")
    assert "threads was 2 and is 3: the run goes on, but not bit for bit as it would have" in other.stdout
    assert "threads must be from 1 to 1024, not 0" in refused("predict", str(tmp_path / "run"), "a", "--threads", "0")
    assert run("predict", str(tmp_path / "run"), "a b", "--threads", "2").exit_code == 0
