"""A user's pairs, from the command line: `regard train translate --pairs a.txt b.txt`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from regard.data.own_files import HELD_PAIRS, split_pairs
from regard.data.text_files import Pair
from regard.training.checkpoints import load_run
from test_cli import refused, run

SMALL = ["width=8", "heads=2", "depth=1", "ffn=8", "warmup=1", "batch_tokens=256", "vocab=300", "max_new_tokens=4", "beam=1"]
SETTINGS = [word for text in SMALL for word in ("--set", text)]
SCHEDULE = [word for text in ("schedule=constant", "save_every=2", "validate_every=2", "average=1") for word in ("--set", text)]
FRENCH = ["Un chat noir numéro {}.", "Le chien {} dort."]
ENGLISH = ["A black cat number {}.", "The dog {} sleeps."]


def write_pairs(place: Path) -> list[str]:
    """Write 40 pairs, and a line that is empty in both files."""
    for name, texts in {"a.fr": FRENCH, "b.en": ENGLISH}.items():
        lines = [texts[i % 2].format(i) for i in range(40)]
        (place / name).write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    return [str(place / "a.fr"), str(place / "b.en")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, str]:
    """The files, the run's folder, and the messages of training."""
    place = tmp_path_factory.mktemp("pairs")
    files, out = write_pairs(place), place / "run"
    done = run(
        "train", "translate", "--pairs", *files, *SETTINGS, *SCHEDULE, "--set", "steps=4", "--out", str(out), "--device", "cpu"
    )
    assert done.exit_code == 0, done.output
    return files, out, done.stderr


def test_pairs_are_split_described_trained_scored_and_translated(trained: tuple[list[str], Path, str]) -> None:
    files, out, messages = trained
    assert f"40 pairs of {files[0]} and {files[1]}: 32 train, 4 val, 4 test, by a hash of each source" in messages
    assert "left out: lines that are empty in both files, 1 in all" in messages and "subwords of both sides of train" in messages
    assert "floor: the source, said again, has BLEU" in messages
    assert json.loads((out / "config.json").read_text())["pairs"] == files
    scores = json.loads(run("evaluate", str(out), "--json").stdout)["scores"]
    assert {"bleu", "bleu_cased", "exact", "floor"} <= set(scores) and f"{scores['floor']:.2f} on test" in messages
    assert run("predict", str(out), "Un chat dort.", "--set", "beam=2").exit_code == 0
    answers = out.parent / "answers.txt"
    assert run("distil", str(out), "--out", str(answers)).exit_code == 0 and len(answers.read_text().splitlines()) == 32


@pytest.mark.parametrize("apart", [[], ["--valid", "--test"]])
def test_the_command_that_distil_prints_trains_a_student(
    apart: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "own texts"
    place.mkdir()
    files = write_pairs(place)
    given = ["--pairs", *files, *(word for option in apart for file in files for word in (option, file))]
    small = [*SETTINGS, "--set", "steps=1", "--device", "cpu"]
    assert run("train", "translate", *given, *small, "--out", "teacher").exit_code == 0
    place.rename(tmp_path / "moved texts")
    done = run("distil", "teacher", "--out", "taught.txt", "--data", "moved texts")
    assert done.exit_code == 0, done.output
    printed = next(line.removeprefix("learn    ") for line in done.stdout.splitlines() if line.startswith("learn "))
    words = shlex.split(printed)
    assert words[:2] == ["regard", "train"] and f"distilled={tmp_path / 'taught.txt'}" in words
    assert [word for word in words if word.startswith("--") and word != "--set"] == ["--pairs"] + 2 * apart[:1] + 2 * apart[1:]
    monkeypatch.chdir(tmp_path.parent)  # every path is absolute
    small = [word for text in [*SMALL[:-2], "steps=1"] for word in ("--set", text)]  # nothing of an autoregressive decoder
    done = run(*words[1:], *small, "--device", "cpu", "--out", str(tmp_path / "student"))
    assert done.exit_code == 0, done.output


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_was_not_stopped(
    trained: tuple[list[str], Path, str], tmp_path: Path
) -> None:
    files, whole, _ = trained
    out = str(tmp_path / "parts")
    words = [*SETTINGS, *SCHEDULE, "--device", "cpu", "--out", out]
    assert run("train", "translate", "--pairs", *files, *words, "--set", "steps=2").exit_code == 0
    assert run("train", "translate", "--out", out, "--set", "steps=4", "--device", "cpu").exit_code == 0
    one, other = load_run(Path(out)).weights, load_run(whole).weights
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_files_that_are_gone_moved_or_changed(trained: tuple[list[str], Path, str], tmp_path: Path) -> None:
    files, out, _ = trained
    target = Path(files[1])
    text = target.read_bytes()
    try:
        for path in map(Path, files):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        target.unlink()
        assert f"there is no file {target}: check its name" in refused("evaluate", str(out))
        assert run("predict", str(out), "Le chien").exit_code == 0
        assert run("evaluate", str(out), "--data", str(tmp_path)).exit_code == 0
        assert "--data names the folder that has all of them" in refused("evaluate", str(out), "--data", str(tmp_path / "a.fr"))
        target.write_bytes(text.replace(b"dog", b"cow"))
        assert "its SHA-256 differs" in refused("evaluate", str(out))
        assert "its target_data.json differs" in refused("train", "translate", "--out", str(out))
    finally:
        target.write_bytes(text)


def test_no_source_is_in_two_splits_and_those_held_out_are_bounded() -> None:
    pairs = [Pair(f"{i % 50}  Text", f"{i}") for i in range(100)]
    pairs.append(Pair("3 text", "another"))
    parts = split_pairs(pairs, "files")
    keys = [{x.source.lower().replace("  ", " ") for x in part} for part in parts]
    assert [len(part) for part in keys] == [40, 5, 5] and len(set.union(*keys)) == 50 and sum(map(len, parts)) == 101
    other = split_pairs(pairs[::-1], "files")
    assert {x.source for x in other.test} == {x.source for x in parts.test}  # the order of the files is of no effect
    many = split_pairs([Pair(f"{i}", "x") for i in range(HELD_PAIRS * 12)], "files")
    assert [len(part) for part in many] == [HELD_PAIRS * 10, HELD_PAIRS, HELD_PAIRS]


MISTAKES = {
    "unequal": (
        "a\nb\nc\n",
        "a\nb\n",
        "a.txt has 3 lines and {b} has 2: line i of one belongs to line i of the other, and line 3",
    ),
    "empty source": ("a\n \nc\n", "a\nb\nc\n", "a.txt, line 2: empty, while this line of {b} is not"),
    "empty target": ("a\nb\nc\n", "a\nb\n\n", "b.txt, line 3: empty, while this line of {a} is not"),
    "encoding": ("a\n", b"caf\xe9\n", "b.txt, line 1: not UTF-8 at byte 4"),
    "few": ("a\nA\nb\n", "x\ny\nz\n", "2 different sources, too few to be split into train, val and test: 5 are needed"),
    "nothing": ("", "", "0 different sources, too few"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_files_are_answered_by_a_sentence(mistake: str, tmp_path: Path) -> None:
    *contents, sentence = MISTAKES[mistake]
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    for path, content in zip((a, b), contents, strict=True):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    said = refused("train", "translate", "--pairs", str(a), str(b), *SETTINGS, "--out", str(tmp_path / "run"))
    assert sentence.format(a=a, b=b) in said
    assert not (tmp_path / "run").exists()


def test_options_that_do_not_fit_are_answered_by_a_sentence(tmp_path: Path) -> None:
    files = write_pairs(tmp_path)
    assert "Give --pairs SOURCES TARGETS" in refused("train", "translate")
    assert "--pairs does nothing here: it is for translate" in refused("train", "saw", "--pairs", *files)
    assert "--pairs names the file itself: leave --data out" in refused("train", "translate", "--pairs", *files, "--data", ".")
    for rest in (["--set", "steps=2"], ["--out", str(tmp_path / "run")], []):
        assert "--pairs takes two files" in refused("train", "translate", "--pairs", files[0], *rest)
    assert "--pairs takes two files" in refused("train", "translate", f"--pairs={files[0]}", "--set", "steps=2")
    assert "pairs are two files" in refused("train", "translate", "--set", 'pairs=["a.txt"]')
    assert f"there is no file {tmp_path / 'gone'}" in refused("train", "translate", "--pairs", files[0], str(tmp_path / "gone"))
