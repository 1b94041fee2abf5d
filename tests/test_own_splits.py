"""A user's folders of texts, files that are split already, and a book in subwords, from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from regard.data.own_files import split_text
from regard.data.own_folders import folder_digest, read_labelled_folder, split_folders
from regard.data.vocabulary import Subwords
from regard.tasks import config, make_task
from test_cli import refused, run
from test_own_data import BOOK, OWN, SETTINGS, STARS, TINY, reviews, write_csv
from test_own_pairs import SETTINGS as PAIR_SETTINGS
from test_own_pairs import write_pairs
from test_own_tags import SETTINGS as TAG_SETTINGS
from test_own_tags import tagged_lines

ONE = ["--set", "steps=1", "--device", "cpu"]


def write_folder(place: Path, count: int = 10) -> Path:
    """One folder for each number of stars, with as many texts, and a file beside the folders."""
    for row in reviews(count):
        (place / row["stars"]).mkdir(parents=True, exist_ok=True)
        (place / row["stars"] / f"{row['id']}.txt").write_text(row["review"])
    (place / "README").write_text("Reviews.")
    (place / ".DS_Store").write_text("")
    return place


def test_folders_of_labels_are_split_trained_scored_and_asked(tmp_path: Path) -> None:
    texts, out = write_folder(tmp_path / "reviews"), str(tmp_path / "run")
    done = run("train", "classify", "--folder", str(texts), *SETTINGS, *ONE, "--out", out)
    assert done.exit_code == 0, done.output
    assert f"40 texts of {texts}: 32 train, 4 val, 4 test, by a hash of each text" in done.stderr
    assert "4 labels: 1 (10), 2 (10), 3 (10), 4 (10)" in done.stderr
    assert "left out: files beside the folders of labels, 1 in all" in done.stderr
    assert run("predict", out, "a great joy").stdout.strip() in STARS
    texts.rename(tmp_path / "moved")
    assert f"there is no folder {texts}: check its name" in refused("evaluate", out)
    assert run("evaluate", out, "--data", str(tmp_path / "moved")).exit_code == 0
    (tmp_path / "moved/1/3.txt").write_text("another text")
    assert "Restore the folder" in refused("evaluate", out, "--data", str(tmp_path / "moved"))


def test_names_are_printed_as_they_are_and_need_not_be_utf8(tmp_path: Path) -> None:
    texts, other = write_folder(tmp_path / ":smile:" / "[bold]"), os.fsdecode(b"caf\xe9")
    (texts / "1" / other).write_text("quite dull")
    words = [*SETTINGS, *ONE]
    done = run("train", "classify", "--folder", str(texts), *words, "--out", str(tmp_path / ":heart:"))
    assert done.exit_code == 0 and f"41 texts of {texts}: " in done.stderr, done.output
    again = run("train", "classify", "--out", str(tmp_path / ":heart:"), "--device", "cpu")
    assert f"in {tmp_path}/:heart:" in again.stderr and f"the run in {tmp_path}/:heart: is finished" in again.stdout
    (texts / "1").rename(texts / other)
    assert f"the name of the folder {texts}/caf\\xe9 is not UTF-8" in refused("train", "classify", "--folder", str(texts), *words)
    for option in ("--folder", "--csv"):
        said = refused("train", "classify", option, str(tmp_path / other), *words)
        assert f"{tmp_path}/caf\\xe9 is not UTF-8, and no run can keep such a path" in said


def test_folders_of_train_and_test_are_kept_and_validation_is_held_out(tmp_path: Path) -> None:
    texts = tmp_path / "acl"
    write_folder(texts / "train")
    write_folder(texts / "test", 2)
    done = run("train", "classify", "--folder", str(texts), *SETTINGS, *ONE, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert f"48 texts of {texts}: 36 train, 4 val, 8 test, test by its folder, val by a hash of each text" in done.stderr
    assert "left out: files beside the folders of labels, 2 in all" in done.stderr
    assert "also in train: 7 of the texts of test" in done.stderr  # one of the eight is held out for validation
    write_folder(texts / "dev", 1)
    again = run("train", "classify", "--folder", str(texts), *SETTINGS, *ONE, "--out", str(tmp_path / "other"))
    assert f"52 texts of {texts}: 40 train, 4 val, 8 test, val and test by their folders" in again.stderr
    both = ["--folder", str(texts), "--test", str(texts / "test")]
    assert "has folders for train and val and test in it: leave --valid and --test out" in refused("train", "classify", *both)
    (texts / "valid").mkdir()
    assert "has several folders for validation: keep one of dev, test, train, valid" in refused("train", "classify", *both)


def test_labels_that_train_alone_has_are_named(tmp_path: Path) -> None:
    texts = tmp_path / "acl Imdb"
    for split, labels in {"train": ["neg", "pos", "unsup"], "test": ["neg", "pos"]}.items():
        for label in labels:
            (texts / split / label).mkdir(parents=True)
            for number in range(10):
                (texts / split / label / f"{number}.txt").write_text(f"{split} {label} {number}")
    made = make_task(config("classify").replace({"folder": str(texts)}))
    made.read()
    line = next(line for line in made.describe_data() if line.startswith("labels of train that are not in test: unsup"))
    assert line.endswith(f"this looks like aclImdb: regard prepare imdb '{texts}' leaves unsup out, for regard train imdb")
    for path in [*(texts / "train" / "pos").iterdir()][:8]:
        path.unlink()
    (texts / "train" / "pos").rename(texts / "train" / "good")
    (texts / "test" / "pos").rename(texts / "test" / "unsup")
    made = make_task(config("classify").replace({"folder": str(texts)}))
    made.read()
    assert "labels of train that are not in val and test: good" in made.describe_data()
    (texts / "train" / "good").rename(tmp_path / "good")
    made = make_task(config("classify").replace({"folder": str(texts)}))
    made.read()
    assert not [line for line in made.describe_data() if "labels of train" in line]


def test_what_a_folder_of_labels_is(tmp_path: Path) -> None:
    texts = write_folder(tmp_path / "reviews", 1)
    assert [x.label for x in read_labelled_folder(texts)] == ["1", "2", "3", "4"] and split_folders(texts) == {}
    before = folder_digest(texts)
    (texts / "1/.hidden").write_text("x")
    assert folder_digest(texts) == before
    (texts / "1/0.txt").rename(texts / "1/1.txt")
    assert folder_digest(texts) != before
    (texts / "train").mkdir()
    assert split_folders(texts) == {}  # there are other folders: it is the name of a label


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("1/empty.txt", "", "empty.txt is empty: write its text, or delete it"),
        ("1/latin.txt", b"caf\xe9", "latin.txt, line 1: not UTF-8 at byte 4"),
        ("1/deep/a.txt", "a", "deep is a folder in the folder of a label, where every file is a text: move it away"),
        ("", "", "has no folders in it: one for each label is needed, with a text in every file"),
    ],
)
def test_a_bad_folder_is_answered_by_a_sentence(name: str, content: str | bytes, sentence: str, tmp_path: Path) -> None:
    texts = tmp_path / "reviews"
    if name:
        write_folder(texts)
    (texts / name).parent.mkdir(parents=True, exist_ok=True)
    texts.mkdir(exist_ok=True)
    if name:
        (texts / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert sentence in refused("train", "classify", "--folder", str(texts), *SETTINGS)


def test_files_that_are_split_already_are_kept_and_texts_in_two_of_them_are_counted(tmp_path: Path) -> None:
    file, test, out = write_csv(tmp_path / "f.csv"), tmp_path / "g.csv", str(tmp_path / "run")
    test.write_text("review,stars\nnew and dull,1\nnew joy,4\n" + '"rather dull,\nnumber 3 ""so""",2\n')
    done = run("train", "classify", "--csv", str(file), "--test", str(test), *OWN, *SETTINGS, *ONE, "--out", out)
    assert done.exit_code == 0, done.output
    assert f"43 texts: 36 train and 4 val of {file}, by a hash of each text; 3 test of {test}" in done.stderr
    assert "also in train: 1 of the texts of test" in done.stderr
    assert json.loads(run("evaluate", out, "--json").stdout)["scores"]["texts"] == 3
    assert set(json.loads((Path(out) / "assets/test_data.json").read_text())) == {"file", "sha256"}
    assert "one file: --data names the folder that has all of them" in refused("evaluate", out, "--data", str(file))
    test.write_text(test.read_text() + "more,1\n")
    assert "g.csv is not as it was when this run was trained" in refused("evaluate", out)
    test.write_text("review,stars\n")
    given = ["train", "classify", "--csv", str(file), "--test", str(test), *OWN, *SETTINGS]
    assert "g.csv has no text in it" in refused(*given)
    test.write_text("review,stars\na,5\n")
    assert "no training text has the label '5'" in refused(*given)
    assert "--valid takes one file, not 2" in refused(*given, "--valid", str(test), "--valid", str(test))
    assert "--valid does nothing here: it is for classify and images and text and mlm and translate and tag" in refused(
        "train", "saw", "--valid", "f"
    )


def test_pairs_that_are_split_already(tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path)
    (tmp_path / "dev").mkdir()
    other = write_pairs(tmp_path / "dev")
    given = ["--valid", other[0], "--valid", other[1], "--test", other[0], "--test", other[1]]
    done = run("train", "translate", "--pairs", source, target, *given, *PAIR_SETTINGS, *ONE, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    held = " and ".join(other)
    assert f"120 pairs: 40 train of {source} and {target}; 40 val of {held}; 40 test of {held}" in done.stderr
    assert "also in train: 40 of the sources of val" in done.stderr
    assert {path.name for path in (tmp_path / "run/assets").glob("*_data.json")} == {
        f"{split}{side}_data.json" for split in ("", "val_", "test_") for side in ("source", "target")
    }
    one = ["--pairs", source, target, "--test", other[0]]
    assert "--test takes 2 files, one behind the other, for sources and targets, not 1" in refused("train", "translate", *one)


def test_sentences_that_are_split_already_and_tags_that_train_lacks(tmp_path: Path) -> None:
    file, dev = tmp_path / "train.tsv", tmp_path / "dev.tsv"
    file.write_text(tagged_lines(), encoding="utf-8")
    dev.write_text("Das ART\nTier NE\n\n", encoding="utf-8")
    given = ["--conll", str(file), "--valid", str(dev), *TAG_SETTINGS, *ONE, "--out", str(tmp_path / "run")]
    done = run("train", "tag", *given)
    assert done.exit_code == 0, done.output
    assert f"41 sentences, 182 words: 36 train and 4 test of {file}, by a hash of each sentence; 1 val of {dev}" in done.stderr
    assert "not in train, and never right: NE (1)" in done.stderr
    dev.write_text("\n")
    assert "dev.tsv has no sentence in it" in refused("train", "tag", *given[:-1], str(tmp_path / "other"))


def test_a_book_that_is_split_already(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.txt" for name in ("train", "dev", "test")]
    for path in paths:
        path.write_text(BOOK + path.stem)
    words = [word for text in TINY for word in ("--set", text)]
    given = ["--file", str(paths[0]), "--valid", str(paths[1]), "--test", str(paths[2])]
    done = run("train", "text", *given, *words, "--out", str(tmp_path / "run"), "--device", "cpu")
    assert done.exit_code == 0, done.output
    size, more = len(BOOK), "characters of val and test"
    assert f"{size + 5:,} train of {paths[0]}; {size + 3:,} val of {paths[1]}; {size + 4:,} test of {paths[2]}" in done.stderr
    assert more not in done.stderr
    assert [len(part) for part in split_text("x" * 20, ["val"])] == [18, 2, 0]
    assert [len(part) for part in split_text("x" * 20, [])] == [20, 0, 0]


def test_a_continuation_in_subwords_keeps_its_spaces_and_bits_are_those_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "book.txt"
    file.write_text(BOOK)
    made = make_task(config("text").replace({"file": str(file), "units": "subwords", "window": 8, "max_new_tokens": 3}))
    made.read()
    known = made.characters  # type: ignore[attr-defined]
    assert isinstance(known, Subwords) and known.decode(made.texts["train"].tolist()) == BOOK[:784]  # type: ignore[attr-defined]
    assert known.byte_count(made.texts["train"].tolist()) == 1 + len(BOOK[:784].encode())  # type: ignore[attr-defined]
    model = made.model().eval()
    monkeypatch.setattr("regard.tasks.language_modeling.generate", lambda *_, **__: [known.encode("truth")])
    assert made.predict(model, ["It is a", "\n"]) == ["It is a truth", "\n truth"]
    scores = made.score(model, "val")
    assert scores["bits_per_byte"] < scores["bits"]
    assert "vocab must be an integer of at least 261, not 100" in refused(
        "train", "text", "--file", str(file), "--set", "units=subwords", "--set", "vocab=100"
    )
    assert "vocab does nothing here: it is for units=subwords" in refused(
        "train", "text", "--file", str(file), "--set", "vocab=300"
    )
