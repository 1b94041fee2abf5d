"""A user's tagged words, from the command line: `regard train tag --conll f.conllu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from regard.data.datasets import Tagged
from regard.data.own_files import read_tagged, split_tagged
from regard.data.text_files import DataError
from regard.training.checkpoints import load_run
from test_cli import refused, run

SMALL = ["mixer=softmax", "width=8", "heads=2", "depth=1", "ffn=8", "spelling=8", "warmup=1", "batch_tokens=256"]
SCHEDULE = ["schedule=constant", "save_every=2", "validate_every=2", "average=1"]
SETTINGS = [word for text in (*SMALL, *SCHEDULE) for word in ("--set", text)]
WORDS = [("Das", "ART"), ("Haus", "NN"), ("ist", "VAFIN"), ("groß", "ADJD"), (".", "$.")]


def tagged_lines(separator: str = "\t") -> str:
    """40 sentences in two columns, with a tag set that is not the universal one."""
    sentences = [[*WORDS[: 2 + i % 4], (f"{i}", "CARD")] for i in range(40)]
    return "\n".join("".join(f"{word}{separator}{tag}\n" for word, tag in sentence) for sentence in sentences)


def conllu_lines(text: str) -> str:
    """The same sentences as CoNLL-U, each with a multiword token and an empty node."""
    found = []
    for number, sentence in enumerate(text.strip().split("\n\n")):
        rows = [line.split("\t") for line in sentence.split("\n")]
        lines = [f"{i}\t{word}\t_\t{tag}\tx{tag}\t_\t_\t_\t_\t_" for i, (word, tag) in enumerate(rows, 1)]
        extra = ["1-2\tmulti" + "\t_" * 8, *lines, f"{len(rows)}.1\tempty" + "\t_" * 8]
        found.append("\n".join([f"# sent_id = {number}", *extra, ""]))
    return "\n".join(found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The file, the run's folder, and the messages of training."""
    place = tmp_path_factory.mktemp("tags")
    file, out = place / "f.conllu", place / "run"
    file.write_text(conllu_lines(tagged_lines()), encoding="utf-8")
    done = run("train", "tag", "--conll", str(file), *SETTINGS, "--set", "steps=4", "--out", str(out), "--device", "cpu")
    assert done.exit_code == 0, done.output
    return file, out, done.stderr


def test_a_treebank_is_split_described_trained_scored_and_asked(trained: tuple[Path, Path, str]) -> None:
    file, out, messages = trained
    assert f"40 sentences, 180 words of {file}: 32 train, 4 val, 4 test, by a hash of each sentence" in messages
    assert "6 tags: ART (40), NN (40), CARD (40), VAFIN (30), ADJD (20), $. (10)" in messages
    assert "floor: each word's most frequent tag is right for 100.0 % of val and 100.0 % of test" in messages
    assert json.loads((out / "assets/tags.json").read_text())["tags"] == ["$.", "ADJD", "ART", "CARD", "NN", "VAFIN"]
    scores = json.loads(run("evaluate", str(out), "--json").stdout)["scores"]
    assert scores["floor"] == 100 and scores["words"] > 0 and "accuracy" in scores
    said = run("predict", str(out), "Das Haus-Tier , groß.").stdout.split()
    assert [word.rpartition("/")[0] for word in said] == ["Das", "Haus-Tier", ",", "groß."]


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_was_not_stopped(
    trained: tuple[Path, Path, str], tmp_path: Path
) -> None:
    file, whole, _ = trained
    out = str(tmp_path / "parts")
    words = ["--device", "cpu", "--out", out]
    assert run("train", "tag", "--conll", str(file), *SETTINGS, "--set", "steps=2", *words).exit_code == 0
    assert run("train", "tag", "--set", "steps=4", *words).exit_code == 0
    one, other = load_run(Path(out)).weights, load_run(whole).weights
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_file_that_has_changed_is_refused_and_one_that_has_moved_is_found(
    trained: tuple[Path, Path, str], tmp_path: Path
) -> None:
    file, out, _ = trained
    text = file.read_bytes()
    try:
        (tmp_path / file.name).write_bytes(text)
        file.write_bytes(text.replace(b"Haus", b"Hund"))
        assert "its SHA-256 differs" in refused("evaluate", str(out))
        assert run("evaluate", str(out), "--data", str(tmp_path)).exit_code == 0
    finally:
        file.write_bytes(text)


def test_two_columns_and_conllu_have_the_same_words_and_tags(tmp_path: Path) -> None:
    file = tmp_path / "f"
    found = []
    for text in (tagged_lines(), tagged_lines("  "), tagged_lines() + "\n\n\n", conllu_lines(tagged_lines())):
        file.write_text(text, encoding="utf-8")
        found.append([(x.words, x.tags) for x in read_tagged(file)])
    assert all(x == found[0] for x in found) and len(found[0]) == 40
    assert found[0][3] == (["Das", "Haus", "ist", "groß", ".", "3"], ["ART", "NN", "VAFIN", "ADJD", "$.", "CARD"])
    file.write_text("#\tSYM\n10 000\tNUM\n")
    assert read_tagged(file) == [Tagged(["#", "10 000"], ["SYM", "NUM"])]


def test_the_tag_may_be_in_any_column(tmp_path: Path) -> None:
    file = tmp_path / "ner.txt"
    file.write_text("EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\n")
    assert [x.tags for x in read_tagged(file, 4)] == [["B-ORG", "O"], ["B-PER"]]
    assert [x.tags for x in read_tagged(file, 2)] == [["NNP", "VBZ"], ["NNP"]]
    for column, sentence in {0: "It has 4 columns: name that of the tag, --set column=4", 5: "it is one from 2 to 4"}.items():
        with pytest.raises(DataError, match=sentence):
            read_tagged(file, column)
    file.write_text("1\tSie\tsie\tPRON\tPPER\tCase=Nom\t0\troot\t_\t_\n")
    assert read_tagged(file, 5) == [(["Sie"], ["PPER"], ["PRON Case=Nom"])]
    assert read_tagged(file) == read_tagged(file, 4) == [(["Sie"], ["PRON"], ["PPER Case=Nom"])]


def test_two_columns_are_trained_and_scored(tmp_path: Path) -> None:
    file, out = tmp_path / "f.tsv", str(tmp_path / "run")
    file.write_text(tagged_lines(" "), encoding="utf-8")
    done = run("train", "tag", "--conll", str(file), *SETTINGS, "--set", "steps=2", "--out", out, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "floor" in json.loads(run("evaluate", out, "--split", "val", "--json").stdout)["scores"]


def test_no_sentence_is_in_two_splits() -> None:
    sentences = [Tagged([f"{i % 50}", "Text" if i % 2 else "text"], ["A", "B"]) for i in range(101)]
    parts = split_tagged(sentences, "f")
    keys = [{x.words[0] for x in part} for part in parts]
    assert [len(part) for part in keys] == [40, 5, 5] and len(set.union(*keys)) == 50 and sum(map(len, parts)) == 101
    assert {x.words[0] for x in split_tagged(sentences[::-1], "f").test} == keys[2]


CONLLU = "1\ta\t_\tX\t_\t_\t_\t_\t_\t_\n"
MISTAKES = {
    "three columns": ("a X\nb Y z\n", "f, line 2: a line is a word and its tag, with a tab or spaces between them"),
    "no tag": ("a X\n\nb\n", "f, line 3: a line is a word and its tag"),
    "no word": ("a\tX\n\tX\n", "f, line 2: a line is a word and its tag"),
    "first line": ("\none two three\n", "f, line 2: neither the 10 columns of CoNLL-U, with a tab between them, nor a word and"),
    "columns": ("# a comment\n" + CONLLU + "2\tb\n", "f, line 3: 2 columns instead of the 10 of CoNLL-U"),
    "number": (CONLLU + CONLLU, "f, line 2: word '1' of a sentence is where word 2 should be"),
    "no UPOS": (CONLLU.replace("X", "_"), "f, line 1: the word 'a' has no tag, which is the fourth column (UPOS)"),
    "encoding": (b"a X\ncaf\xe9 Y\n", "f, line 2: not UTF-8 at byte 4"),
    "few": ("a X\n\nA Y\n", "f: 1 different sentence, too few to be split into train, val and test: 5 are needed"),
    "nothing": ("", "f: 0 different sentences, too few"),
    "one tag": ("".join(f"{i} X\n\n" for i in range(9)), "every word of train has the tag 'X', but a tagger needs two tags"),
    "long": (
        "".join(f"{i} X\n" + "a Y\n" * 600 + "\n" for i in range(9)),
        "has 601 words, but max_len=512: use --set max_len=601",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_file_is_answered_by_a_sentence(mistake: str, tmp_path: Path) -> None:
    content, sentence = MISTAKES[mistake]
    (tmp_path / "f").write_bytes(content.encode() if isinstance(content, str) else content)
    assert sentence in refused("train", "tag", "--conll", str(tmp_path / "f"), *SETTINGS, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_options_that_do_not_fit_are_answered_by_a_sentence(tmp_path: Path) -> None:
    assert "Give --conll FILE" in refused("train", "tag")
    assert "--conll does nothing here: it is for tag" in refused("train", "saw", "--conll", "f")
    assert f"there is no file {tmp_path / 'gone'}" in refused("train", "tag", "--conll", str(tmp_path / "gone"))
