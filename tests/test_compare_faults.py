"""A comparison that is killed, damaged, or given mechanisms that fail loses at most the cells in flight, and reports it."""

import errno
import json
import random
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.compare.cell_record import CellRecord
from regard.compare.cell_run import CannotStore
from regard.compare.cell_store import CellStore
from regard.data.text_files import DataError
from regard.training import atomic_files
from small_arena import FILES, grid_in_a_process, run_grid, settings
from warm_processes import warm_start

GRID = settings(mixers=["softmax", "identity", "linear"], rates=(1e-3, 1e-2), steps=30)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("regard.compare.cell_costs.TIMED", 0.002)


def scores(records):
    return {record.key: (record.val, record.test, record.final) for record in records}


def test_a_grid_that_is_killed_goes_on(tmp_path):
    """Records that were there when it was killed are there afterwards, and the end is that of an undisturbed grid."""
    dice, folder, kept = random.Random(5), tmp_path / "killed", {}
    for _ in range(3):
        process = warm_start().Process(target=grid_in_a_process, args=(str(folder), GRID))
        process.start()
        before, end = len(kept), time.monotonic() + 20
        while process.is_alive() and time.monotonic() < end:
            if len(list((folder / "cells").glob("*.json"))) > before:
                time.sleep(dice.random() * 0.2)
                break
            time.sleep(0.002)
        process.kill()
        process.join()
        store = CellStore(folder)
        found = {record.key: record for record in store.records()}
        assert not store.damaged and all(found[key].val == record.val for key, record in kept.items())
        kept = found
    assert len(kept) >= 2
    assert scores(run_grid(folder, GRID)) == scores(run_grid(tmp_path / "alone", GRID))


def test_a_damaged_record_is_reported_and_run_again(tmp_path):
    grid = settings(rates=(1e-3,))
    (record,) = run_grid(tmp_path, grid)
    path = tmp_path / "cells" / f"{record.key}.json"
    whole = path.read_bytes()
    damages = [whole[: len(whole) // 2], b"\xff\x00", b"[1]", b"{}", whole.replace(b'"status": "done"', b'"status": "fine"')]
    for damage in [*damages, whole.replace(record.key.encode(), b"0" * 16)]:
        path.write_bytes(damage)
        store = CellStore(tmp_path)
        assert store.load(record.key) is None and len(store.damaged) == 1 and str(path) in store.damaged[0]
    (again,) = run_grid(tmp_path, grid)
    assert scores([again]) == scores([record])
    assert CellStore(tmp_path).load(record.key).test == record.test


def test_a_file_that_was_being_written_is_no_record(tmp_path):
    (record,) = run_grid(tmp_path, settings(rates=(1e-3,)))
    path = tmp_path / "cells" / f"{record.key}.json"
    path.with_name(f".writing-{path.name}").write_bytes(path.read_bytes())
    store = CellStore(tmp_path)
    assert [found.key for found in store.records()] == [record.key] and not store.damaged


def test_lost_weights_are_trained_again(tmp_path):
    (record,) = run_grid(tmp_path, settings(rates=(1e-3,)))
    store = CellStore(tmp_path)
    untested = store.load(record.key)
    untested.final, untested.test = False, None
    store.save(untested)
    (tmp_path / record.weights).write_bytes(b"torn")
    (again,) = run_grid(tmp_path, settings(rates=(1e-3,)))
    assert scores([again]) == scores([record])


def test_mechanisms_that_fail_are_rows(tmp_path, monkeypatch):
    monkeypatch.delenv("REGARD_DATA", raising=False)
    mixers = ["small_arena:Raising", "small_arena:Diverging", "small_arena:Narrowing", "softmax"]
    records = run_grid(tmp_path, settings("first_token", "absent", mixers=mixers, rates=(1e-3,)))
    found = {(record.task.partition("(")[0], record.mixer): record for record in records}
    assert len(found) == 8
    raising, diverging, narrowing = (found["first_token", mixer] for mixer in mixers[:3])
    assert narrowing.status == "crashed"
    assert "small_arena:Narrowing makes (2, 1, 16) of tokens (2, 6, 16), where (2, 6, 16) should be" in narrowing.reason
    assert raising.status == "crashed" and raising.reason == "RuntimeError: it fell"
    assert diverging.status == "diverged" and "step 1" in diverging.reason
    assert found["first_token", "softmax"].status == "done"
    assert {record.status for (name, _), record in found.items() if name == "absent"} == {"missing data"}
    assert "REGARD_DATA" in found["absent", "softmax"].reason


def test_a_crash_is_tried_again_and_a_divergence_is_not(tmp_path, monkeypatch):
    grid = settings(mixers=["small_arena:Raising", "small_arena:Diverging"], rates=(1e-3,))
    run_grid(tmp_path, grid)
    seen = []
    done = CellRecord("", "", "", "", 0.0, 0).status
    monkeypatch.setattr("regard.compare.worker_pool.run_job", lambda job: seen.append(job.cell.mixer) or job.cell.record())
    records = run_grid(tmp_path, grid)
    assert seen == ["small_arena:Raising"] and [record.status for record in records] == [done, "diverged"]


def test_finished_cells_stay_where_the_data_set_is_missing(tmp_path, monkeypatch):
    """They are shown as before, whatever the keys of models are that cannot be built now; other cells say what is missing."""
    data, run = tmp_path / "data", tmp_path / "run"
    (data / "imdb").mkdir(parents=True)
    for part in ("train", "test"):
        (data / "imdb" / f"{part}.jsonl").write_text("{}")
    monkeypatch.setenv("REGARD_DATA", str(data))
    grid = settings("absent", mixers=["softmax", "gla"])
    before = [record.to_json() for record in run_grid(run, grid)]
    assert {record["status"] for record in before} == {"done"}
    files = {path.name: path.read_bytes() for path in (run / "cells").iterdir()}
    monkeypatch.delenv("REGARD_DATA")
    more = replace(grid, mixers=("softmax", "gla", "linear"))
    found = [record.to_json() for record in run_grid(run, more)]
    by_key = sorted(before, key=lambda record: record["key"])
    assert sorted(found[:-1], key=lambda record: record["key"]) == by_key
    assert (found[-1]["mixer"], found[-1]["status"]) == ("linear", "missing data")
    assert not (run / "replaced").exists()
    assert files.items() <= {path.name: path.read_bytes() for path in (run / "cells").iterdir()}.items()
    monkeypatch.setenv("REGARD_DATA", str(data))
    again = run_grid(run, more)
    assert [record.to_json() for record in again if record.mixer != "linear"] == before
    assert {record.status for record in again} == {"done"}


@pytest.mark.parametrize("kind", [RuntimeError, DataError])
def test_costs_that_crashed_are_measured_again(tmp_path, monkeypatch, kind):
    def fall(*_):
        raise kind("it fell")

    with monkeypatch.context() as broken:
        broken.setattr("regard.compare.cell_run.cell_costs", fall)
        (record,) = run_grid(tmp_path, settings(rates=(1e-3,)))
    assert record.costs["notes"] == {"costs": f"{kind.__name__}: it fell"} and record.final
    (again,) = run_grid(tmp_path, settings(rates=(1e-3,)))
    assert again.costs["train_steps_per_s"] > 0 and again.test == record.test


@pytest.mark.parametrize("name", ["first_token", "next_one"])
def test_answers_that_are_not_numbers_are_no_score(tmp_path, name):
    """What is NaN in evaluation alone is wrong, or diverged where bits are counted: never left out."""
    (record,) = run_grid(tmp_path, settings(name, mixers=["small_arena:Forgetful"], rates=(1e-2,)))
    if name == "next_one":
        assert (record.status, record.reason) == ("diverged", "no score on validation is a finite number")
    else:
        assert record.status == "done" and record.val == record.test == 0.0 and record.test_count == 32


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_full_disk_ends_the_grid_with_a_sentence(tmp_path, monkeypatch, suffix):
    real, written = atomic_files.write_synced, []

    def full(path, data):
        if path.suffix == suffix:
            written.append(path)
            if len(written) > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(atomic_files, "write_synced", full)
    with pytest.raises(CannotStore, match="No space left on device"):
        run_grid(tmp_path, GRID)
    monkeypatch.undo()
    kept = CellStore(tmp_path).records()
    assert kept and not list(tmp_path.rglob(".writing-*"))


def command(*options):
    return CliRunner().invoke(app, ["compare", "--jobs", "0", "--lengths", "none", "--device", "cpu", *options])


def own_task(*options):
    return command("--task", FILES[0], "--tasks", "first_token", *options)


def test_the_command_ends_with_a_table_a_picture_and_what_to_do_next(tmp_path):
    out = tmp_path / "out"
    mixers = ["--mixers", "softmax, fnet", "--mixers", "small_arena:Raising"]
    result = own_task(*mixers, "--lr", "1e-3", "--budget", "4", "--out", str(out))
    assert result.exit_code == 0, result.output
    for word in ("softmax", "fnet", "chance", "crashed: RuntimeError: it fell", "bubble_1_first_token", "report.html", "Next:"):
        assert word in result.output
    assert (out / "report.html").stat().st_size > 5000
    again = command("--report-only", "--out", str(out))
    assert again.exit_code == 0 and "softmax" in again.output and "report.html" in again.output
    assert "has no records" in command("--report-only", "--out", str(tmp_path / "empty")).output
    settings = json.loads((out / "grid.json").read_text())["settings"]
    assert settings["steps"] == 4 and settings["rates"] == [1e-3]
    assert all(record.curve[-1][0] == 4 for record in CellStore(out).records() if record.status == "done")


def test_control_c_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.compare.worker_pool.run_job", stop)
    result = own_task("--mixers", "softmax", "--out", str(tmp_path))
    assert result.exit_code == 130 and "0 of 3 cells are kept" in result.output and "goes on" in result.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--mixers", "softmax", "--budget", "soon"], "a number of steps, such as 500, or of minutes, such as 2m, not 'soon'"),
        (["--mixers", "softmax", "--budget", "0"], "not '0'"),
        (["--mixers", "softmax", "--lr", "fast"], "--lr is a list of learning rates between 0 and 10"),
        (["--mixers", ","], "--mixers names no mechanism"),
        (["--mixers", "sofmax"], "sofmax"),
        (["--mixers", "softmax", "--tasks", "nothing"], "nothing"),
        (["--mixers", "softmax", "--task", "absent.py"], "absent.py' with a task"),
        (["--mixers", "softmax", "--dtype", "int8"], "dtype must be one of fp32, tf32, bf16"),
        (["--mixers", "softmax", "--dtype", "tf32", "--device", "cpu"], "tf32 is for products of a GPU, and this is a CPU"),
        (["--mixers", "softmax", "--set", "width=0"], "width must be at least 1, not '0'"),
        (["--mixers", "softmax", "--set", "batch=0"], "batch must be at least 1, not '0'"),
        (["--mixers", "softmax", "--set", "warmup=5"], "warmup must be between 0 and 1, not '5'"),
        (["--mixers", "softmax", "--set", "conv=-1"], "conv must be at least 0, not '-1'"),
        (["--mixers", "softmax", "--set", "pooling=last"], "pooling must be one of token, mean, max, smooth, not 'last'"),
        (["--mixers", "softmax", "--out", "/proc/nowhere"], "cannot write /proc/nowhere/grid.json"),
        (["--mixers", "softmax", "--out", __file__], "it is a file; choose another folder"),
    ],
)
def test_mistakes_are_sentences(options, sentence, tmp_path):
    given = options if "--out" in options else [*options, "--out", str(tmp_path)]
    result = own_task(*given)
    assert result.exit_code == 2 and sentence in result.output.replace("\n", " "), result.output
    assert not (tmp_path / "cells").exists()


def test_a_file_without_a_task(tmp_path):
    path = tmp_path / "mytask.py"
    path.write_text("x = 1\n")
    assert "defines no task" in command("--task", str(path), "--mixers", "softmax", "--out", str(tmp_path)).output
    path.write_text("import nothing_like_this\n")
    assert "cannot be imported: ModuleNotFoundError" in command("--task", str(path), "--mixers", "softmax").output
