"""`regard.load`: a run in Python, finished or not, gives the answers of the command line; what is not there is a sentence."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.data import synthetic
from regard.data.datasets import Splits
from regard.data.text_files import Pair
from regard.tasks import config, copying, language_modeling, make_task
from regard.tasks.trained_run import TrainedRun, load
from regard.training import atomic_files, checkpoints
from regard.training.fit import fit
from test_cli import refused, run

SMALL = {"width": 8, "heads": 2, "depth": 1, "ffn": 8, "batch_tokens": 256, "max_len": 64}
SAVED = {"steps": 3, "save_every": 1, "validate_every": 2, "average": 3, "warmup": 0}
KINDS = {
    "reverse": {"units": "characters", "max_new_tokens": 4},
    "saw": {"spelling": 8},
    "polarity": {"units": "words", "vocab": 50},
    "shakespeare": {"window": 8, "max_new_tokens": 4},
    "wikisql": {"max_new_tokens": 4, "cut": 8},
}
LINES = ["they saw the duck", "", "good fish", "  ", "a b c"]
TEXT = "to be or not to be\n" * 20
PAIRS = [Pair("how many fish", "SELECT fish"), Pair("a b c", "SELECT b")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run of every kind, of three updates on a few examples."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("string_pairs", "tagging_sentences", "opinion_sentences"):
            parts = getattr(synthetic, name)(*["reverse"] * (name == "string_pairs"))
            patch.setattr(synthetic, name, lambda *_, few=[part[:20] for part in parts]: few)
        patch.setattr(language_modeling, "find", lambda *_: None)
        patch.setattr(language_modeling, "read_shakespeare", lambda _: Splits(TEXT, TEXT, ""))
        patch.setattr(copying, "find", lambda *_: None)
        patch.setitem(copying.COPY_READERS, "wikisql", lambda _: (PAIRS, PAIRS, PAIRS))
        for name, changes in KINDS.items():
            task = make_task(config(name).replace({**SMALL, **SAVED, **changes}))
            task.read()
            fit(task, folder / name, accelerator="cpu", quiet=True)
        yield folder


@pytest.fixture
def unfinished(runs: Path, tmp_path: Path) -> Path:
    """A run that was stopped before its end."""
    out = Path(shutil.copytree(runs / "reverse", tmp_path / "run"))
    (out / checkpoints.RESULT).unlink()
    (out / checkpoints.WEIGHTS).unlink()
    return out


def same_weights(found: TrainedRun, saved: dict[str, torch.Tensor]) -> bool:
    own = checkpoints.weights_of(found.model)
    return own.keys() == saved.keys() and all(torch.equal(x, saved[name]) for name, x in own.items())


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_command_line(kind: str, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(LINES) + "\n")
    found = regard.load(runs / kind, device="cpu")
    answers = found.predict(LINES)
    said = run("predict", str(runs / kind), str(file), "--device", "cpu").stdout.split("\n")[:-1]
    assert [answer.replace("\n", "\\n") for answer in answers] == said
    assert [bool(answer) for answer in answers[1::2]] == [False, False] and any(answers)
    assert not found.model.training and found.config.task == kind and found.update is None and found.note == ""
    assert kind in repr(found) and found.description in repr(found) and "final weights" in repr(found)
    assert same_weights(found, atomic_files.read_tensors(runs / kind / checkpoints.WEIGHTS))


@pytest.mark.parametrize("kind", ["reverse", "saw"])
def test_scores_are_those_of_the_command_line(kind: str, runs: Path) -> None:
    found = load(str(runs / kind), device="cpu")
    told = json.loads(run("evaluate", str(runs / kind), "--json", "--split", "val", "--device", "cpu").stdout)
    assert found.evaluate("val") == told["scores"] and set(found.evaluate()) == set(told["scores"])


def test_many_lines_are_answered_in_their_order(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(runs / "saw", device="cpu")
    whole = found.predict(line for line in LINES)
    monkeypatch.setattr("regard.tasks.trained_run.LINES_PER_BATCH", 2)
    assert found.predict(LINES) == whole and found.predict([]) == []


def test_settings_of_inference_are_arguments(runs: Path) -> None:
    assert load(runs / "reverse", beam=3, max_new_tokens=1).config.beam == 3
    assert all(len(answer) <= 1 for answer in load(runs / "reverse", max_new_tokens=1).predict(LINES))
    for changes, sentence in (
        ({"beem": 3}, "reverse has no setting for answers 'beem': did you mean 'beam'?"),
        ({"beam": 0}, "beam must be at least 1, not 0"),
        ({"width": 16}, "width cannot change after training: only beam"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            load(runs / "reverse", **changes)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(("name", "step"), [("best", 2), ("last", 3), ("step-000001", 1), ("step-000003", 3), (1, 1), ("1", 1)])
def test_every_checkpoint_has_a_name(name: str | int, step: int, finished: bool, runs: Path, unfinished: Path) -> None:
    out = runs / "reverse" if finished else unfinished
    saved = [checkpoints.load_checkpoint(checkpoints.at(out, k)) for k in (1, 2, 3)]
    step = saved[-1].state["best"]["step"] if name == "best" else step
    found = load(out, checkpoint=name, device="cpu")
    assert found.update == step and found.note == "" and f"weights of update {step}" in repr(found)
    assert same_weights(found, saved[step - 1].weights) and len(found.predict(LINES)) == len(LINES)


def test_an_unfinished_run_gives_its_best_checkpoint_with_a_warning(unfinished: Path) -> None:
    best = checkpoints.load_checkpoint(checkpoints.latest(unfinished)).state["best"]["step"]
    with pytest.warns(
        UserWarning, match=rf"is not finished \(update 3 of 3\): these are the weights of update {best}, the best"
    ) as made:
        found = load(unfinished)
    assert found.update == best and made[0].filename == __file__
    assert same_weights(found, checkpoints.load_checkpoint(checkpoints.at(unfinished, best)).weights)


def test_the_command_line_takes_checkpoints_by_name(unfinished: Path) -> None:
    out = str(unfinished)
    done = run("predict", out, "a b c", "--checkpoint", "1")
    assert done.stderr == "" and done.stdout.split("\n")[:-1] == load(out, checkpoint=1).predict(["a b c"])
    assert json.loads(run("evaluate", out, "--checkpoint", "last", "--json").stdout)["update"] == 3
    assert "has no checkpoint 'lats'; there is best, last, step-000001" in refused("predict", out, "a", "--checkpoint", "lats")


# what is not there


def test_folders_without_a_run_and_checkpoints_that_are_not_there(runs: Path, unfinished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, sentence in (("no", "there is no folder"), ("file", "is a file, not the folder"), ("", "holds no run")):
        for name in (None, "best"):
            with pytest.raises(ValueError, match=sentence):
                load(tmp_path / folder, checkpoint=name)
    for name in (7, "step-000007", "step-", "newest", "../run"):
        with pytest.raises(ValueError, match=r"; there is best, last, step-000001, step-000002, step-000003$"):
            load(runs / "reverse", checkpoint=name)
    shutil.rmtree(unfinished / "checkpoints")
    for name, sentence in ((None, "is not finished, it has saved nothing yet"), ("last", "no checkpoint 'last'; there is none")):
        with pytest.raises(ValueError, match=sentence):
            load(unfinished, checkpoint=name)
    with pytest.raises(ValueError, match="the device is auto, cpu or cuda, not 'gpu'"):
        load(runs / "reverse", device="gpu")


def test_without_a_validation_none_is_the_best(unfinished: Path) -> None:
    last = checkpoints.load_checkpoint(checkpoints.latest(unfinished))
    checkpoints.save_checkpoint(unfinished, last._replace(state={**last.state, "best": None}))
    with pytest.raises(ValueError, match="was validated yet, so none is the best: use 'last', update 3"):
        load(unfinished, checkpoint="best")


def test_a_damaged_checkpoint_does_not_hide_the_others(unfinished: Path) -> None:
    (checkpoints.at(unfinished, 3) / checkpoints.WEIGHTS).write_bytes(b"cut")
    assert load(unfinished, checkpoint=1).update == 1
    with pytest.raises(ValueError, match=r"step-000003/weights\.safetensors is not as it was written"):
        load(unfinished, checkpoint="last")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights.popitem(), "lacks '.*', which the model has: it is of another model or another version"),
        (lambda weights: weights.update(old=torch.zeros(1)), "has 'old', which the model lacks: it is of another model or"),
        (lambda weights: weights.update({min(weights): torch.zeros(99)}), r"as \(99,\), but the model has it as"),
    ],
)
def test_weights_of_another_version_or_shape(change, sentence: str, unfinished: Path) -> None:
    last = checkpoints.load_checkpoint(checkpoints.latest(unfinished))
    change(last.weights)
    checkpoints.save_checkpoint(unfinished, last)
    with pytest.raises(ValueError, match=sentence):
        load(unfinished, checkpoint="last")


def test_lines_that_cannot_be_answered_are_named(runs: Path) -> None:
    found = load(runs / "reverse")
    with pytest.raises(ValueError, match=r"^line 2: it has 100 tokens, but this model reads at most 64"):
        found.predict(["a", "x" * 100])
    with pytest.raises(TypeError, match=r"a list of lines, not one text: predict\(\[text\]\)"):
        found.predict("a text")
    with pytest.raises(TypeError, match="lines of text, not 3"):
        found.predict(["a", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the split is test or val, not 'train'"):
        found.evaluate("train")
    with pytest.raises(ValueError, match="shakespeare has no test split: use val"):
        load(runs / "shakespeare").evaluate()


def test_without_safetensors_it_is_a_sentence(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard\[train\]'"):
        load(runs / "reverse")


LAYERS = {"reverse": ["encoder 1", "decoder 1", "decoder 1"], "wikisql": ["encoder 1", *["decoder 1"] * 2, "copying"]}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_every_kind_of_run(kind: str, runs: Path) -> None:
    found = load(runs / kind, device="cpu")
    one, other = found.attention(["a b c", "they saw"])
    names = [layer.name for layer in one.layers if layer.name not in ("decoder 2", "decoder 3", "decoder 4")]
    assert names == LAYERS.get(kind, ["layer 1"]) and one.missing == [] and other.text == "they saw"
    for layer in one.layers:
        rows, columns = layer.weights.shape[1:]
        assert (rows, columns) == (len(layer.queries), len(layer.keys)) and layer.mechanism.startswith("softmax")
        assert torch.allclose(layer.weights.sum(-1), torch.ones(len(layer.weights), rows))
    assert kind == "shakespeare" or one.answer == found.predict(["a b c"])[0]
    assert not found.model.training


def test_a_decoder_is_fed_its_own_answer(runs: Path) -> None:
    found = load(runs / "reverse", device="cpu").attention(["a b c"])[0]
    encoder, own, cross = found.layers
    assert "".join(encoder.queries) == "".join(cross.keys) == "a b c"
    assert own.queries == ["<begin>", *cross.queries[:-1]] and "".join(cross.queries).removesuffix("<end>") == found.answer


def test_show_draws_a_run_on_a_text(runs: Path, unfinished: Path, tmp_path: Path) -> None:
    done = run("show", str(unfinished), "a b c", "--checkpoint", "1", "--device", "cpu")
    assert (unfinished / "attention.png").stat().st_size > 10_000 and "update 1: a string turned around" in done.stdout
    assert "decoder 1  cross, softmax: 2 heads" in done.stdout and str(unfinished / "attention.png") in done.stdout
    told = json.loads(run("show", str(runs / "saw"), "they saw", "--json").stdout)
    assert told["layers"][0]["queries"] == ["they", "saw"] and len(told["layers"][0]["weights"]) == 2
    assert not (runs / "saw" / "attention.png").exists()
    run("show", str(runs / "saw"), "they saw", "--out", str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text().count("<image") == 2 + 1


def test_what_show_cannot_draw_of_a_run_is_a_sentence(runs: Path) -> None:
    out = str(runs / "reverse")
    assert f"{out} is a folder: to see where a trained run attends, regard show {out} TEXT" in refused("show", out)
    assert "there is no folder nowhere" in refused("show", "nowhere", "a text")
    assert "line 1 is empty: there is nothing to attend to" in refused("show", out, " ")
    assert "a run has its own, leave them out" in refused("show", out, "a", "--causal")
    assert "are for a run and a text: regard show RUN TEXT" in refused("show", "linear", "--checkpoint", "best")
    assert "65 tokens, but this model reads at most 64" in refused("show", out, "a" * 65)
    for wrong, sentence in (("a text", "attention takes a list of lines"), ([3], "attention takes lines of text, not 3")):
        with pytest.raises(TypeError, match=sentence):
            load(out).attention(wrong)  # type: ignore[arg-type]


def test_signs_that_no_font_has_are_one_sentence(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.plots.attention_plot.FONTS", ())
    done = run("show", str(runs / "saw"), "鸭 子 only")
    assert done.stderr.count("\n") == 1 and "no font here has all signs of this text" in done.stderr
