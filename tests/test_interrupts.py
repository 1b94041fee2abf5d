"""Control-C and `kill` save what was learned, end in a sentence, and the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.training import atomic_files, checkpoints
from regard.training.fit import fit
from small_task import Small, small
from test_cli import run
from test_faults import remembered

SHORT = {"steps": 20, "schedule": "constant"}
SRC = Path(__file__).parent.parent / "src"


def task(**changes) -> Small:
    return Small(small(**SHORT | changes))


def train(out: Path, made: Small | None = None, **changes):
    return fit(made or task(**changes), out, accelerator="cpu", quiet=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple:
    out = tmp_path_factory.mktemp("undisturbed")
    train(out)
    return remembered(out)


@pytest.fixture(autouse=True)
def usual():
    """Handlers as a program in the foreground has them: pytest in a shell's background ignores Control-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the key stays alive"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, before)


def signals(name: str, number: int, at: int, times: int = 1) -> Small:
    """A task that gets a signal inside its `at`-th call of this method."""
    made, calls = task(), [0]
    plain = getattr(made, name)

    def method(*words):
        calls[0] += 1
        for _ in range(times if calls[0] == at else 0):
            signal.raise_signal(number)
        return plain(*words)

    setattr(made, name, method)
    return made


INT, TERM = (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)


@pytest.mark.parametrize(
    "where, at, step, kind",
    [
        ("loss", 1, 1, INT),
        ("loss", 7, 7, INT),
        ("loss", 10, 10, TERM),  # a validation and a checkpoint are due behind it
        ("loss", 20, 20, INT),  # the last update
        ("score", 1, 10, INT),
        ("score", 2, 20, TERM),  # the last validation
    ],
)
def test_a_signal_saves_the_update_that_is_being_made_and_the_run_goes_on_exactly(where, at, step, kind, tmp_path, undisturbed):
    number, ends = kind
    with pytest.raises(ends) as ended:
        train(tmp_path, signals(where, number, at))
    assert ends is KeyboardInterrupt or ended.value.code == 143
    assert checkpoints.steps(tmp_path)[-1] == step and not list(tmp_path.rglob(".writing-*"))
    assert not (tmp_path / "result.json").exists()
    train(tmp_path)
    assert remembered(tmp_path) == undisturbed


def test_a_second_signal_does_not_wait_for_the_update_and_nothing_is_half_written(tmp_path, undisturbed):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, signals("loss", signal.SIGINT, 7, times=2))
    assert checkpoints.steps(tmp_path) == [5] and not list(tmp_path.rglob(".writing-*"))
    train(tmp_path)
    assert remembered(tmp_path) == undisturbed


@pytest.mark.parametrize("name", [checkpoints.WEIGHTS, checkpoints.STATE])
def test_signals_while_a_checkpoint_is_written_wait_until_it_is_whole(name, tmp_path, undisturbed, monkeypatch):
    real = atomic_files.write_synced

    def write(path, data):
        if path.name == name and "step-000010" in str(path):
            path.write_bytes(data[: len(data) // 2])
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
        real(path, data)

    monkeypatch.setattr(atomic_files, "write_synced", write)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    monkeypatch.undo()
    assert (
        10 in checkpoints.steps(tmp_path)
        and checkpoints.load_checkpoint(checkpoints.at(tmp_path, 10))
        and not list(tmp_path.rglob(".writing-*"))
    )
    train(tmp_path)
    assert remembered(tmp_path) == undisturbed


def test_control_c_while_a_run_begins_or_a_file_is_replaced_leaves_nothing_half_done(tmp_path, monkeypatch):
    real = atomic_files.write_synced

    def write(path, data):
        if path.name == ".writing-config.json":
            path.write_bytes(data[:5])
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(atomic_files, "write_synced", write)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [".lock"]
    monkeypatch.setattr(atomic_files, "write_synced", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save_checkpoint(tmp_path, checkpoints.Checkpoint({}, {}, {"step": 1}))
    assert not list(tmp_path.rglob("*step*"))


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, undisturbed):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(tmp_path, signals("loss", signal.SIGINT, 7))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and remembered(tmp_path) == undisturbed
    signal.signal(signal.SIGINT, signal.default_int_handler)


# in the command line


@pytest.mark.parametrize(
    "command", ["list", "show softmax", "tasks", "train saw", "evaluate x", "predict x y", "distil x --out y"]
)
def test_control_c_in_any_command_is_a_sentence(command, monkeypatch):
    from typer.core import TyperCommand

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TyperCommand, "invoke", interrupted)
    done = run(*command.split())
    assert done.exit_code == 130 and done.stderr == "stopped by Control-C\n" and done.stdout == ""


def command(*words: str, path: Path = SRC) -> subprocess.Popen:
    """The installed command, with a Control-C of its own: not that of this process, and not one that a shell has switched off."""
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import regard_command; regard_command.main()"
    )
    folders = os.pathsep.join([str(path), str(SRC)])
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
    )


def test_control_c_while_it_starts_is_a_sentence(tmp_path):
    """While it imports: a package in the place of ours gets the signal as soon as it is imported."""
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard" / "__init__.py").write_text("")
    (tmp_path / "regard" / "cli.py").write_text(
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept BaseException: pass"
    )
    process = command("train", "saw", path=tmp_path)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 130 and said == "stopped by Control-C while starting\n" and out == ""


def test_a_true_run_is_stopped_answers_and_goes_on(tmp_path):
    out = tmp_path / "run"
    settings = ["width=8", "heads=2", "depth=1", "ffn=8", "spelling=8", "steps=100000", "validate_every=20", "save_every=100000"]
    words = ["saw", "--out", str(out), *(word for text in settings for word in ("--set", text))]
    process = command("train", *words)
    until = time.monotonic() + 300
    while not checkpoints.steps(out) and process.poll() is None and time.monotonic() < until:  # the first that did best
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=300)[1]
    step = checkpoints.steps(out)[-1]
    assert process.returncode == 130 and "Traceback" not in said, said
    assert said.endswith(f"stopped; update {step} is saved, and the run goes on from there with: regard train saw --out {out}\n")
    best = checkpoints.load_checkpoint(checkpoints.latest(out)).state["best"]["step"]
    answer = run("predict", str(out), "i saw a saw")
    assert answer.exit_code == 0 and answer.stdout.startswith("i/")
    assert f"is not finished (update {step} of 100000): these are the weights of update {best}, the best" in answer.stderr
