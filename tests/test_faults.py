"""A run that is killed, wherever and however often, ends with the same bits as one that was left alone."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from regard.training import atomic_files, checkpoints
from regard.training.atomic_files import RunError
from regard.training.fit import fit
from regard.training.metrics_log import TIMES, read_metrics
from small_task import Small, small
from warm_processes import warm_start


def train(out: str, die_at: int = 0) -> None:
    """In a process of its own; it may kill itself in the middle of the n-th file that a checkpoint writes."""
    torch.set_num_threads(1)
    written, real = [0], atomic_files.write_synced

    def write(path: Path, data: bytes) -> None:
        written[0] += path.parent.name.startswith(checkpoints.WRITING)
        if die_at and written[0] == die_at:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, data)

    atomic_files.write_synced = write
    fit(Small(small()), Path(out), accelerator="cpu", quiet=True)


def run(out: Path, die_at: int = 0, kill=None) -> int | None:
    """Until it ends; `kill` says when to end it. Its exit code, -9 where it was killed."""
    process = warm_start().Process(target=train, args=(str(out), die_at))
    process.start()
    while process.is_alive() and not (kill and kill()):
        time.sleep(0.001)
    if process.is_alive():
        process.kill()
    process.join()
    return process.exitcode


def remembered(out: Path) -> tuple:
    """All that a finished run says, but for times."""
    told = [{name: x for name, x in line.items() if name not in TIMES} for line in read_metrics(out / "metrics.jsonl")]
    result = json.loads((out / "result.json").read_text())
    last = checkpoints.latest(out)
    told.append({name: x for name, x in checkpoints.load_checkpoint(last).state.items() if name != "seconds"})
    bits = [path.read_bytes() for path in (out / checkpoints.WEIGHTS, last / checkpoints.WEIGHTS, last / checkpoints.OPTIMIZER)]
    return told, {name: x for name, x in result.items() if name not in TIMES}, checkpoints.steps(out), bits


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple:
    out = tmp_path_factory.mktemp("undisturbed")
    assert run(out) == 0
    return remembered(out)


def test_a_run_killed_while_it_trains_ends_with_the_same_bits(tmp_path, undisturbed):
    dice = random.Random(1)
    for step in (0, 15, 40):
        until = [None]

        def kill(step=step, until=until) -> bool:
            """A moment after this step was saved."""
            if until[0] is None and (step == 0 or step in checkpoints.steps(tmp_path)):
                until[0] = time.monotonic() + dice.uniform(0, 0.05)
            return until[0] is not None and time.monotonic() >= until[0]

        assert run(tmp_path, kill=kill) == -signal.SIGKILL
        assert not (tmp_path / "result.json").exists()
    assert run(tmp_path) == 0
    assert remembered(tmp_path) == undisturbed


def test_a_run_killed_while_it_saves_ends_with_the_same_bits(tmp_path, undisturbed):
    for die_at in (1, 5, 9):  # the weights, the optimiser and the state, of the first, second and third save of a process
        assert run(tmp_path, die_at) == -signal.SIGKILL
        assert len(list((tmp_path / "checkpoints").glob(".writing-*"))) == 1
        assert len(checkpoints.steps(tmp_path)) > 0 or die_at == 1
    assert run(tmp_path) == 0
    assert remembered(tmp_path) == undisturbed
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_run_killed_just_before_its_end_only_ends_once_more(tmp_path, undisturbed):
    assert run(tmp_path, kill=(tmp_path / checkpoints.WEIGHTS).exists) in (0, -signal.SIGKILL)
    (tmp_path / "result.json").unlink(missing_ok=True)
    (tmp_path / checkpoints.WEIGHTS).unlink()
    before = (tmp_path / "metrics.jsonl").stat().st_size
    assert run(tmp_path) == 0
    assert remembered(tmp_path) == undisturbed and (tmp_path / "metrics.jsonl").stat().st_size == before


class Stops(Exception):
    pass


def interrupted(out: Path, **changes) -> Path:
    """A run that failed behind step 12; the last step it has saved is 10."""
    task = Small(small(**changes))
    plain = task.loss

    def loss(model, batch, step):
        if step > 12:
            raise Stops
        return plain(model, batch, step)

    task.loss = loss
    with pytest.raises(Stops):
        fit(task, out, accelerator="cpu", quiet=True)
    return checkpoints.latest(out)


def go_on(out: Path, **changes):
    return fit(Small(small(**changes)), out, accelerator="cpu", quiet=True)


@pytest.mark.parametrize("precision, accumulate", [("32", 3), ("bf16-mixed", 1), ("16-mixed", 1)])
def test_a_run_goes_on_exactly_in_every_precision_and_with_accumulation(tmp_path, precision, accumulate):
    changes = {"precision": precision, "accumulate": accumulate, "steps": 20, "dropout": 0.2}
    go_on(tmp_path / "whole", **changes)
    interrupted(tmp_path / "cut", **changes)
    go_on(tmp_path / "cut", **changes)
    assert remembered(tmp_path / "cut") == remembered(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_checkpoint_stops_a_run_until_it_is_deleted_and_then_all_is_as_it_was(tmp_path, undisturbed, damage):
    path = interrupted(tmp_path) / checkpoints.WEIGHTS
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    with pytest.raises(RunError, match=f"{path} is not as it was written .*delete the folder {path.parent} to go on"):
        go_on(tmp_path)
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    go_on(tmp_path)
    assert remembered(tmp_path)[0][:2] == undisturbed[0][:2]
    assert remembered(tmp_path) == undisturbed


def test_a_damaged_checkpoint_that_is_needed_at_the_end_says_how_to_make_it_anew(tmp_path, undisturbed):
    go_on(tmp_path)
    (tmp_path / "result.json").unlink()
    path = checkpoints.at(tmp_path, 55)
    (path / checkpoints.WEIGHTS).write_bytes(b"")
    with pytest.raises(RunError, match=f"delete {path} and the folders of all later steps"):
        go_on(tmp_path)
    for step in (55, 60):
        shutil.rmtree(checkpoints.at(tmp_path, step))
    go_on(tmp_path)
    assert remembered(tmp_path) == undisturbed


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = interrupted(tmp_path)
    task = Small(small())
    plain = task.model
    task.model = lambda: torch.nn.Sequential(plain())
    with pytest.raises(RunError, match=rf"{path / checkpoints.WEIGHTS} lacks '0.table.weight', which the model has"):
        fit(task, tmp_path, accelerator="cpu", quiet=True)


def test_a_full_disk_ends_a_run_which_goes_on_when_there_is_room(tmp_path, undisturbed, monkeypatch):
    real = atomic_files.write_synced

    def full(path, data):
        if "step-000020" in str(path):
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(atomic_files, "write_synced", full)
    with pytest.raises(RunError, match=r"cannot write .*step-000020: No space left on device"):
        go_on(tmp_path)
    assert not list(tmp_path.rglob(".writing-*")) and checkpoints.steps(tmp_path)[-1] == 15
    monkeypatch.undo()
    go_on(tmp_path)
    assert remembered(tmp_path) == undisturbed


def test_control_c_is_passed_on_and_the_key_stays_alive(tmp_path, undisturbed):
    task = Small(small())
    plain = task.loss

    def loss(model, batch, step):
        if step == 12:
            signal.raise_signal(signal.SIGINT)
        return plain(model, batch, step)

    task.loss, before = loss, signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(task, tmp_path, accelerator="cpu", quiet=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    go_on(tmp_path)
    assert remembered(tmp_path) == undisturbed
