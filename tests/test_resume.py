"""A finished run goes on when it may make more updates, and one that is not finished answers already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.training import atomic_files, checkpoints
from regard.training.atomic_files import RunError
from regard.training.fit import fit
from regard.training.run_weights import run_weights
from small_task import Small, small
from test_cli import run
from test_cli_runs import SETTINGS
from test_faults import interrupted, remembered


def train(out: Path, *, quiet: bool = True, **changes):
    return fit(Small(small(**{"steps": 20, "schedule": "inverse_sqrt"} | changes)), out, accelerator="cpu", quiet=quiet)


def test_a_finished_run_goes_on_as_if_it_had_been_asked_for_all_updates_at_once(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole)
    train(parts, steps=10)
    train(parts, quiet=False)
    assert remembered(parts) == remembered(whole)
    said = capsys.readouterr().out
    assert "steps was 10 and is 20 from here on" in said and "going on behind step 10" in said
    assert "schedule=inverse_sqrt does not depend on the number of updates" in said
    assert train(parts).steps == 20  # finished again
    assert (parts / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    checkpoints.check_seals(parts)


def test_a_schedule_with_an_end_goes_on_as_that_of_the_larger_number_and_says_so(tmp_path, capsys):
    train(tmp_path, steps=10, schedule="cosine", warmup=0)
    train(tmp_path, schedule="cosine", warmup=0, quiet=False)
    rates = [line["lr"] for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert rates[1] == 0 and rates[2] == pytest.approx(0.01 * (1 + 2**0.5 / -2) / 2)  # at 10 of 10, and at 15 of 20
    assert "schedule=cosine is that of 20 updates from here on: the rate at update 11 is 0.422 x lr" in capsys.readouterr().out


def test_patience_grows_too_and_a_run_that_it_stopped_goes_on(tmp_path):
    first = train(tmp_path, lr=1e-30, patience=1, validate_every=5)
    assert first.early and first.steps == 10
    last = train(tmp_path, lr=1e-30, patience=0, validate_every=5)
    assert not last.early and last.steps == 20


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 5}, r"steps is 10 there and 5 here \(steps and patience may only grow\)"),
        ({"patience": 3}, r"patience is 0 there and 3 here \(steps and patience may only grow\)"),
        ({"steps": 30, "lr": 0.1}, r"other settings: lr is 0\.01 there and 0\.1 here\. Choose"),
    ],
)
def test_other_settings_do_not_change(changes, sentence, tmp_path):
    train(tmp_path, steps=10)
    with pytest.raises(RunError, match=sentence):
        train(tmp_path, **{"steps": 10} | changes)
    assert train(tmp_path, steps=10).steps == 10  # and nothing was written


def without_a_setting(out: Path, name: str) -> None:
    """Make a run look as if it had been begun before a setting was added."""
    kept = json.loads((out / "config.json").read_text())
    del kept[name]
    checkpoints.change_run(out, kept)


def test_a_run_of_an_earlier_version_goes_on_where_a_new_setting_is_as_it_was(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole)
    train(parts, steps=10)
    without_a_setting(parts, "ema")
    with pytest.raises(RunError, match=r"other settings: ema is 0\.0 there and 0\.9 here"):
        train(parts, ema=0.9)
    train(parts)
    assert remembered(parts) == remembered(whole)


def test_without_a_checkpoint_a_finished_run_stays_as_it_is(tmp_path):
    train(tmp_path, steps=5)
    for path in (tmp_path / "checkpoints").rglob("*.*"):
        path.unlink()
    for path in (tmp_path / "checkpoints").iterdir():
        path.rmdir()
    with pytest.raises(RunError, match="there is no checkpoint left to go on from"):
        train(tmp_path, steps=10)
    assert run_weights(tmp_path).update is None


@pytest.mark.parametrize("survives", [0, 1, 2])
def test_settings_that_grow_are_the_old_or_the_new_ones_whenever_a_process_dies(survives, tmp_path, monkeypatch):
    """It dies in front of the first, second or third file that it writes for them."""
    train(tmp_path, steps=10)
    written, real = [0], atomic_files.replace

    def replace(path, data):
        if path.name in (checkpoints.CONFIG, checkpoints.ABOUT):
            if written[0] == survives:
                raise KeyboardInterrupt
            written[0] += 1
        real(path, data)

    monkeypatch.setattr(atomic_files, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    monkeypatch.undo()
    checkpoints.check_seals(tmp_path)
    steps = checkpoints.load_config(tmp_path)["steps"]
    assert steps == (20 if survives == 2 else 10)
    assert train(tmp_path, steps=steps).steps == steps
    assert train(tmp_path).steps == 20
    checkpoints.check_seals(tmp_path)


def test_an_unfinished_run_gives_the_best_that_it_has_saved(tmp_path):
    interrupted(tmp_path)  # behind step 12, with a validation at 10
    found = run_weights(tmp_path)
    assert found.update == 10 and "(update 10 of 60): these are the weights of update 10, the best on validation" in found.note
    train(tmp_path / "b", steps=5, validate_every=100)
    (tmp_path / "b" / "result.json").unlink()
    state = checkpoints.load_checkpoint(checkpoints.latest(tmp_path / "b"))
    checkpoints.save_checkpoint(tmp_path / "b", state._replace(state={**state.state, "best": None, "step": 3}))
    checkpoints.save_checkpoint(tmp_path / "b", state._replace(state={**state.state, "best": {"step": 3, "score": 1.0}}))
    assert run_weights(tmp_path / "b").update == 3
    checkpoints.save_checkpoint(tmp_path / "b", state._replace(state={**state.state, "best": None}))
    assert run_weights(tmp_path / "b").update == 5 and "the newest, as none was validated yet" in run_weights(tmp_path / "b").note
    with pytest.raises(RunError, match="is not finished"):
        checkpoints.load_run(tmp_path)  # what another run begins from must not change
    checkpoints.save_run(tmp_path / "c", {"task": "small"}, {}, {})
    with pytest.raises(RunError, match="has saved nothing yet"):
        run_weights(tmp_path / "c")


def test_in_the_command_line(tmp_path):
    out = str(tmp_path / "run")
    assert run("train", "reverse", *SETTINGS, "--out", out, "--device", "cpu").exit_code == 0
    assert (
        "steps is 4 there, not 3 (steps and patience may only grow)"
        in run("train", "reverse", "--out", out, "--set", "steps=3").stderr
    )
    done = run("train", "reverse", "--out", out, "--set", "steps=6", "--device", "cpu")
    assert done.exit_code == 0 and "steps was 4 and is 6 from here on" in done.stdout
    (tmp_path / "run" / "result.json").unlink()
    done = run("evaluate", out, "--json")
    assert (
        done.exit_code == 0 and json.loads(done.stdout)["update"] in (4, 6) and "is not finished (update 6 of 6)" in done.stderr
    )
    assert run("evaluate", out).exit_code == 0 and len(json.loads((tmp_path / "run" / "scores.json").read_text())) == 1


def test_scores_of_weights_that_are_gone_are_removed(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "run" / "scores.json"
    sizes = ["width=8", "heads=2", "depth=1", "ffn=8", "spelling=8", "batch_tokens=256", "validate_every=2", "save_every=2"]
    words = ["train", "saw", "--out", str(folder), "--device", "cpu", "--json"]
    words += [word for text in sizes for word in ("--set", text)]

    def evaluated(*options: str) -> list[tuple]:
        assert run("evaluate", str(folder), *options).exit_code == 0
        return [(line["split"], line.get("update"), line.get("weights")) for line in json.loads(path.read_text())]

    assert run(*words, "--set", "steps=2").exit_code == 0
    first, _ = evaluated(), evaluated("--checkpoint", "2")
    assert first == [("test", None, json.loads((folder / "result.json").read_text())["sha256"])]
    early = json.loads(path.read_text())[1]["weights"]
    old = {"split": "val", "settings": {"beam": 1}, "scores": {}}  # of a version that did not keep the SHA-256
    path.write_text(json.dumps([*json.loads(path.read_text()), old]))
    assert run(*words, "--set", "steps=6").exit_code == 0
    now = json.loads((folder / "result.json").read_text())["sha256"]
    assert evaluated("--split", "val") == [("test", 2, early), ("val", None, None), ("val", None, now)] and now != first[0][2]
