"""Checkpoints are whole or not there, and what is not as it was written is refused with a sentence."""

import errno
import json
import os

import pytest
import torch
from torch import nn

from regard.training import atomic_files, checkpoints
from regard.training.atomic_files import RunError
from regard.training.averaging import average
from regard.training.checkpoints import Checkpoint
from regard.training.learner import optimizer, optimizer_state, put_optimizer_state
from small_task import Reader, small

STATE = {"seconds": 1.5, "best": None, "waited": 0, "stopped": False, "skipped": 0, "scaler": None, "dice": {}}


def checkpoint(step: int, fill: float = 1.0) -> Checkpoint:
    return Checkpoint({"w": torch.full((2, 3), fill)}, {"w/exp_avg": torch.ones(2, 3)}, {"step": step, **STATE})


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    path = checkpoints.save_checkpoint(tmp_path, checkpoint(400, 2.5))
    found = checkpoints.load_checkpoint(path)
    assert path.name == "step-000400" and checkpoints.latest(tmp_path) == path and found.step == 400
    assert torch.equal(found.weights["w"], torch.full((2, 3), 2.5)) and list(found.optimizer) == ["w/exp_avg"]
    assert {key: found.state[key] for key in STATE} == STATE
    assert {p.name for p in path.iterdir()} == {checkpoints.WEIGHTS, checkpoints.OPTIMIZER, checkpoints.STATE}


def test_the_latest_is_the_highest_step_and_not_the_last_in_the_alphabet(tmp_path):
    for step in (999_995, 1_000_000, 5):
        checkpoints.save_checkpoint(tmp_path, checkpoint(step))
    assert checkpoints.steps(tmp_path) == [5, 999_995, 1_000_000] and checkpoints.latest(tmp_path).name == "step-1000000"
    assert checkpoints.latest(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", [checkpoints.WEIGHTS, checkpoints.OPTIMIZER, checkpoints.STATE])
@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "gone"])
def test_a_damaged_file_is_refused_by_its_name_with_what_to_do(tmp_path, name, damage):
    path = checkpoints.save_checkpoint(tmp_path, checkpoint(20)) / name
    if damage == "flipped":
        path.write_text(path.read_text().replace("1.5", "1.25")) if name == checkpoints.STATE else flip(path)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 40 if damage == "cut" else 0])
    with pytest.raises(RunError, match=rf"{path}.*: delete the folder {path.parent} to go on from the checkpoint before it"):
        checkpoints.load_checkpoint(path.parent)
    assert checkpoints.latest(tmp_path) == path.parent  # never skipped in silence


def test_a_state_that_lacks_something_is_refused_even_if_it_is_sealed(tmp_path):
    path = checkpoints.save_checkpoint(tmp_path, checkpoint(20)) / checkpoints.STATE
    state = json.loads(path.read_text())
    for key in ("dice", "seal"):
        del state[key]
    path.write_text(json.dumps({**state, "seal": checkpoints._seal(state)}))
    with pytest.raises(RunError, match="lacks 'dice'"):
        checkpoints.load_checkpoint(path.parent)


def test_a_header_that_lies_is_refused_even_if_its_digest_is_right(tmp_path):
    path = checkpoints.save_checkpoint(tmp_path, checkpoint(20))
    data = b"\xff" * 64
    (path / checkpoints.WEIGHTS).write_bytes(data)
    state = json.loads((path / checkpoints.STATE).read_text())
    state["sha256"][checkpoints.WEIGHTS] = atomic_files.digest(data)
    del state["seal"]
    (path / checkpoints.STATE).write_text(json.dumps({**state, "seal": checkpoints._seal(state)}))
    with pytest.raises(RunError, match="not a whole safetensors file"):
        checkpoints.load_checkpoint(path)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_disk_leaves_no_part_of_a_checkpoint(tmp_path, monkeypatch, number):
    checkpoints.save_checkpoint(tmp_path, checkpoint(5))
    before, written, real = sorted(tmp_path.rglob("*")), [], atomic_files.write_synced

    def full(path, data):
        written.append(path)
        real(path, data[:10] if len(written) == number else data)
        if len(written) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(atomic_files, "write_synced", full)
    with pytest.raises(RunError, match=r"cannot write .*step-000010: No space left on device\. Nothing was left half-written"):
        checkpoints.save_checkpoint(tmp_path, checkpoint(10))
    assert sorted(tmp_path.rglob("*")) == before and checkpoints.load_checkpoint(checkpoints.latest(tmp_path)).step == 5


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    atomic_files.replace(tmp_path / "a.json", "old")

    def full(path, data):
        path.write_bytes(data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_files, "write_synced", full)
    with pytest.raises(RunError, match="No space left"):
        atomic_files.replace(tmp_path / "a.json", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


def test_what_was_being_written_or_removed_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    kept = checkpoints.save_checkpoint(tmp_path, checkpoint(5))
    for name in (".writing-step-000010", ".removing-step-000003"):
        (kept.parent / name).mkdir()
        (kept.parent / name / checkpoints.WEIGHTS).write_bytes(b"half")
    (tmp_path / ".writing-weights.safetensors").write_bytes(b"half")
    assert checkpoints.steps(tmp_path) == [5]
    checkpoints.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        ["checkpoints", "step-000005", *(p.name for p in kept.iterdir())]
    )


def test_pruning_renames_before_it_deletes(tmp_path, monkeypatch):
    for step in (5, 10, 15):
        checkpoints.save_checkpoint(tmp_path, checkpoint(step))
    seen = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda path, **_: seen.append(path.name))
    checkpoints.prune(tmp_path, {10, 15})
    assert set(seen) == {".removing-step-000005"} and checkpoints.steps(tmp_path) == [10, 15]


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints.save_checkpoint(tmp_path, checkpoint(5, 1.0))
    checkpoints.save_checkpoint(tmp_path, checkpoint(5, 2.0))
    assert checkpoints.load_checkpoint(checkpoints.at(tmp_path, 5)).weights["w"][0, 0] == 2


def test_a_folder_has_one_trainer_at_a_time(tmp_path):
    with checkpoints.locked(tmp_path), pytest.raises(RunError, match="another process is training"), checkpoints.locked(tmp_path):
        pass
    with checkpoints.locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=f"cannot write {out}"), checkpoints.locked(out):
            pass


def test_a_table_with_two_names_is_kept_once_and_goes_back_into_both():
    model, other = Reader(small()), Reader(small())
    weights = checkpoints.weights_of(model)
    assert "table.weight" in weights and "out.weight" not in weights
    checkpoints.put_weights(other, weights, "here")
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in model.state_dict().items())
    assert other.out.weight is other.table.weight


def test_weights_of_another_model_are_refused():
    model = nn.Linear(3, 2)
    weights = {name: x.clone() for name, x in checkpoints.weights_of(model).items()}
    with pytest.raises(RunError, match=r"w\.safetensors lacks 'bias'"):
        checkpoints.put_weights(model, {"weight": weights["weight"]}, "w.safetensors")
    with pytest.raises(RunError, match=r"w\.safetensors has 'more', which the model lacks"):
        checkpoints.put_weights(model, {**weights, "more": torch.ones(1)}, "w.safetensors")
    with pytest.raises(RunError, match=r"has 'bias' as \(3,\), but the model has it as \(2,\)"):
        checkpoints.put_weights(model, {**weights, "bias": torch.ones(3)}, "w.safetensors")
    assert torch.equal(model.bias, weights["bias"])


def test_an_optimiser_goes_on_from_its_saved_state_exactly():
    def step(model, made, seed):
        torch.manual_seed(seed)
        model(torch.randn(5, 3)).square().sum().backward()
        made.step()
        made.zero_grad()

    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    made = optimizer(model, small())
    step(model, made, 0)
    weights = {name: x.clone() for name, x in checkpoints.weights_of(model).items()}
    state = {name: x.clone() for name, x in optimizer_state(model, made).items()}
    step(model, made, 1)
    other = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    again = optimizer(other, small())
    checkpoints.put_weights(other, weights, "here")
    put_optimizer_state(other, again, state, "here")
    step(other, again, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(RunError, match="which the model lacks"):
        put_optimizer_state(other, again, {"strange/exp_avg": torch.ones(1)}, "here")
    with pytest.raises(RunError, match="another shape"):
        put_optimizer_state(other, again, {"0.weight/exp_avg": torch.ones(7)}, "here")


def finished(out):
    weights = atomic_files.tensors_to_bytes({"w": torch.ones(2)}, {"step": "step 5"})
    checkpoints.save_run(out, {"task": "small"}, {"words.json": "[]"}, {})
    atomic_files.replace(out / checkpoints.WEIGHTS, weights)
    atomic_files.replace(out / "result.json", atomic_files.as_json({"sha256": atomic_files.digest(weights)}))


def test_a_run_is_read_back_as_it_was_kept(tmp_path):
    finished(tmp_path)
    config, assets, weights = checkpoints.load_run(tmp_path)
    assert config == {"task": "small"} and assets == {"words.json": "[]"} and torch.equal(weights["w"], torch.ones(2))


def test_a_folder_that_is_no_finished_run_says_what_is_missing(tmp_path):
    with pytest.raises(RunError, match=r"holds no run: it has no config\.json"):
        checkpoints.load_run(tmp_path)
    checkpoints.save_run(tmp_path, {"task": "small"}, {}, {})
    with pytest.raises(RunError, match="is not finished, it has saved nothing yet"):
        checkpoints.load_run(tmp_path)
    checkpoints.save_checkpoint(tmp_path, checkpoint(20))
    with pytest.raises(RunError, match="is not finished, it is at step 20"):
        checkpoints.load_run(tmp_path)
    finished(tmp_path)
    flip(tmp_path / checkpoints.WEIGHTS)
    with pytest.raises(RunError, match="not as it was written"):
        checkpoints.load_run(tmp_path)
    (tmp_path / checkpoints.WEIGHTS).unlink()
    with pytest.raises(RunError, match=r"weights\.safetensors cannot be read"):
        checkpoints.load_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json is not a whole JSON file"):
        checkpoints.load_run(tmp_path)


def test_an_asset_stays_in_its_folder(tmp_path):
    for name in ("../evil", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="named like a file"):
            checkpoints.save_run(tmp_path, {}, {name: ""}, {})


def test_the_average_is_the_mean_summed_in_double_precision(tmp_path):
    many = [{"w": torch.tensor([x, 1e8 * x]), "n": torch.tensor([1, 2])} for x in (1.0, 2.0, 4.5)]
    mean = average(many)
    assert torch.equal(mean["w"], torch.tensor([2.5, 2.5e8])) and torch.equal(mean["n"], torch.tensor([1, 2]))
    halves = [{"w": torch.full((1,), x, dtype=torch.bfloat16)} for x in (256.0, 257.0 - 1, 258.0)]  # 770 is no bfloat16
    assert average(halves)["w"].dtype is torch.bfloat16 and average(halves)["w"].item() == 256
    paths = [checkpoints.save_checkpoint(tmp_path, checkpoint(step, float(step))) for step in (1, 2)]
    assert torch.equal(average([paths[0], paths[1] / checkpoints.WEIGHTS])["w"], torch.full((2, 3), 1.5))
    assert torch.equal(many[0]["w"], torch.tensor([1.0, 1e8]))  # nothing given is changed
    counted = [{"w": torch.ones(1), "n": torch.tensor(x)} for x in (50, 100)]  # as the batches that a norm has seen
    assert average(counted)["n"].item() == 100


def test_weights_of_different_models_have_no_average():
    one = {"w": torch.ones(2), "n": torch.tensor([1])}
    for other, word in (
        ({"w": torch.ones(2)}, "differ in 'n'"),
        ({"w": torch.ones(3), "n": torch.tensor([1])}, r"'w' is torch.float32 \(3,\) in number 2"),
        ({"w": torch.ones(2, dtype=torch.float64), "n": torch.tensor([1])}, "'w' is torch.float64"),
    ):
        with pytest.raises(ValueError, match=word):
            average([one, other])
    with pytest.raises(ValueError, match="nothing to average"):
        average([])
