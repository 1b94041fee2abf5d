"""A user's own files, from the command line: `regard train classify --csv f.csv`, `regard train text --file book.txt`."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

import regard
from regard.data.batch import END
from regard.data.datasets import LabelledText
from regard.data.naive_bayes import NaiveBayes
from regard.data.own_files import read_labelled_csv, split_labelled
from regard.data.text_files import DataError
from regard.data.vocabulary import FIRST_TEXT_ID, Characters
from regard.tasks import config, make_task
from regard.tasks.trained_run import TrainedRun
from regard.training.checkpoints import load_run
from test_cli import refused, run

STARS = {"1": "awful and dull", "2": "rather dull", "3": "fine, I think", "4": "a great joy"}
SMALL = ["units=words", "width=8", "heads=2", "depth=1", "ffn=8", "warmup=1", "batch_tokens=256", "mixer=softmax", "lr=0.01"]
SETTINGS = [word for text in SMALL for word in ("--set", text)]
OWN = ["--text", "review", "--label", "stars", "--device", "cpu"]


def reviews(count: int = 10) -> list[dict[str, str]]:
    return [
        {"id": f"{i}", "review": f'{text},\nnumber {i} "so"', "stars": star} for star, text in STARS.items() for i in range(count)
    ]


def write_csv(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["id", "review", "stars"])
        writer.writeheader()
        writer.writerows(reviews())
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The file, the run's folder, and the messages of training."""
    place = tmp_path_factory.mktemp("own")
    file, out = write_csv(place / "f.csv"), place / "run"
    steps = ["--set", "steps=4", "--set", "save_every=2"]
    done = run("train", "classify", "--csv", str(file), *OWN, *SETTINGS, *steps, "--out", str(out))
    assert done.exit_code == 0, done.output
    return file, out, done.stderr


def test_a_csv_of_four_labels_is_split_described_trained_scored_and_asked(trained: tuple[Path, Path, str]) -> None:
    file, out, messages = trained
    assert f"40 texts of {file}: 32 train, 4 val, 4 test, by a hash of each text" in messages
    assert "4 labels: 1 (10), 2 (10), 3 (10), 4 (10)" in messages
    assert "floor: the most frequent label, 1, is right for 25.0 % of val and 25.0 % of test" in messages
    assert "floor: naive Bayes of the words is right for 100.0 % of val and 100.0 % of test" in messages
    kept = json.loads((out / "config.json").read_text())
    assert kept["csv"] == str(file) and kept["text"] == "review" and kept["label"] == "stars"
    assert len(json.loads((out / "assets/data.json").read_text())["sha256"]) == 64
    scores = json.loads(run("evaluate", str(out), "--json").stdout)["scores"]
    assert scores["texts"] == 4 and scores["floor"] == 25 and scores["bayes"] == 100 and "accuracy" in scores
    assert run("predict", str(out), "a great joy").stdout.strip() in STARS


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_was_not_stopped(
    trained: tuple[Path, Path, str], tmp_path: Path
) -> None:
    file, _, _ = trained
    schedule = ["--set", "schedule=constant"]
    steps = ["--set", "steps=2", "--set", "save_every=2", "--set", "validate_every=2"]
    for name, words in {"parts": steps, "whole": ["--set", "steps=4", *steps[2:]]}.items():
        done = run("train", "classify", "--csv", str(file), *OWN, *SETTINGS, *schedule, *words, "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.output
    assert run("train", "classify", "--out", str(tmp_path / "parts"), "--set", "steps=4", "--device", "cpu").exit_code == 0
    parts, whole = (load_run(tmp_path / name).weights for name in ("parts", "whole"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_answers_and_results_for_scripts(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, out, _ = trained
    (tmp_path / "lines.txt").write_text("a great joy\n\n“dull”\n", encoding="utf-8")
    plain = run("predict", str(out), str(tmp_path / "lines.txt")).stdout
    lines = [json.loads(line) for line in run("predict", str(out), str(tmp_path / "lines.txt"), "--json").stdout.splitlines()]
    assert [line["text"] for line in lines] == ["a great joy", "", "“dull”"]
    assert [line["answer"] for line in lines] == plain.split("\n")[:3]
    again = run("train", "classify", "--out", str(out), "--json", "--device", "cpu")
    found = json.loads(again.stdout)
    assert found["run"] == str(out) and found["result"] == json.loads((out / "result.json").read_text())
    assert found["split"] == "val" and found["scores"]["floor"] == 25
    assert "leave --live or --json out" in refused("predict", str(out), "dull", "--live", "--json")


def test_python_trains_what_the_command_does(
    trained: tuple[Path, Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out, _ = trained
    small = dict(text.split("=") for text in SMALL)
    own = {"csv": file, "text": "review", "label": "stars"}
    found = regard.train("classify", tmp_path / "run", device="cpu", steps=4, save_every=2, **own, **small)
    assert "4 labels: " in capfd.readouterr().out
    ours, theirs = (load_run(folder).weights for folder in (tmp_path / "run", out))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert found.predict(["a great joy"]) == [run("predict", str(out), "a great joy").stdout.strip()]
    again = regard.train("classify", tmp_path / "run", device="cpu", steps=5, quiet=True)  # it goes on, and knows its file
    assert again.config.steps == 5 and not capfd.readouterr().out


def test_mistakes_in_python_are_sentences(tmp_path: Path) -> None:
    for settings, sentence in {
        ("csvs", "f.csv"): "classify has no setting 'csvs': did you mean 'csv'",
        ("csv", str(tmp_path / "f.csv")): "there is no file",
        ("cross", "linear"): "cross does nothing here",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            regard.train("classify", tmp_path / "run", device="cpu", **dict([settings]))
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_gone_moved_or_changed(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    file, out, _ = trained
    text = file.read_bytes()
    try:
        file.rename(tmp_path / "f.csv")
        assert f"there is no file {file}: check its name" in refused("evaluate", str(out))
        assert run("predict", str(out), "fine").exit_code == 0
        for place in (tmp_path, tmp_path / "f.csv"):
            assert run("evaluate", str(out), "--data", str(place)).exit_code == 0
        file.write_bytes(text + b"99,good,4\r\n")
        assert "is not as it was when this run was trained (its SHA-256 differs)" in refused("evaluate", str(out))
        assert "holds a run on other data: its data.json differs" in refused("train", "classify", "--out", str(out))
    finally:
        file.write_bytes(text)


def test_jsonl_gives_the_same_splits_and_labels_of_any_kind(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    rows = [{**row, "stars": row["stars"] if row["stars"] != "4" else True} for row in reviews()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("train", "classify", "--jsonl", str(file), *OWN, *SETTINGS, "--set", "steps=1", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert "32 train, 4 val, 4 test" in done.stderr and "true (10)" in done.stderr
    assert json.loads((tmp_path / "run/assets/labels.json").read_text()) == ["1", "2", "3", "true"]


def test_no_text_is_in_two_splits_and_every_label_is_in_train() -> None:
    texts = [LabelledText(f"{i % 50}  Text", f"{i % 50 % 3}") for i in range(150)]
    texts += [LabelledText("0 text", "rare"), LabelledText("only one", "single"), *(LabelledText(f"1 {x}", "0") for x in "ab")]
    parts = split_labelled(texts, "f.csv")
    assert parts == split_labelled(texts, "f.csv") and sum(map(len, parts)) == len(texts)
    keys = [{x.text.lower().replace("  ", " ") for x in part} for part in parts]
    assert not keys[0] & keys[1] and not keys[0] & keys[2] and not keys[1] & keys[2]
    assert {x.label for x in parts.train} == {"0", "1", "2", "rare", "single"}
    assert [len(part) for part in keys] == [41, 6, 6]
    assert {x.label for x in parts.val} == {x.label for x in parts.test} == {"0", "1", "2"}
    other = split_labelled(list(reversed(texts)), "f.csv")
    assert {x.text for x in other.test} == {x.text for x in parts.test}  # the order of the file is of no effect


def test_texts_with_two_labels_are_in_train() -> None:
    both = [LabelledText(f"both {i}", label) for i in range(20) for label in "xy"]
    parts = split_labelled([*both, *(LabelledText(f"one {i}", "x") for i in range(10))], "f.csv")
    assert set(both) <= set(parts.train) and [len(part) for part in parts] == [48, 1, 1]


def test_naive_bayes_of_three_labels_by_hand() -> None:
    train = [LabelledText(*pair) for pair in (("good good film", "a"), ("bad film", "b"), ("bad plot", "b"), ("long", "c"))]
    label_of = NaiveBayes(train)
    # v = 5 words; film: a 1/4 * 2/7, b 1/2 * 2/9, c 1/4 * 1/6; good: a 1/4 * 2/7, b 1/2 * 1/9
    assert [label_of(text) for text in ("film", "GOOD", "long", "unheard of", "good film")] == ["b", "a", "c", "b", "a"]
    assert label_of.accuracy([LabelledText("film", "b"), LabelledText("film", "a")]) == 50


def test_fields_of_a_csv_file_may_be_long_and_hold_line_breaks(tmp_path: Path) -> None:
    file, limit = tmp_path / "f.csv", csv.field_size_limit()
    file.write_bytes(b'text,label\r\n"a ""b""\r\nc, d", x \r\n\r\n' + b"e" * 200_000 + b",y\r\n")
    assert read_labelled_csv(file, "text", "label") == [('a "b"\nc, d', "x"), ("e" * 200_000, "y")]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_the_header_of_a_csv_file_decides_what_is_between_its_columns(sign: str, tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text(sign.join(["a, b; c", "text", "label"]).replace("a, b; c", '"a, b; c"') + f"\n1{sign}an answer{sign}x\n")
    assert read_labelled_csv(file, "text", "label") == [("an answer", "x")]


def test_a_refused_csv_file_leaves_no_limit_behind(tmp_path: Path) -> None:
    file, limit = tmp_path / "f.csv", csv.field_size_limit()
    file.write_text("text,label\na,b,c\n")
    with pytest.raises(DataError, match="3 fields") as held:  # and its frames
        read_labelled_csv(file, "text", "label")
    assert csv.field_size_limit() == limit and held.value
    file.write_text("text;label\na;b\n")
    with pytest.raises(DataError, match=r"Is it separated otherwise\? Then add --set delimiter=semicolon"):
        read_labelled_csv(file, "text", "label", "tab")


GOOD = "text,label\n" + "".join(f"t{i},{i % 2}\n" for i in range(20))
MISTAKES = {
    "missing column": ("f.csv", "review,stars\na,b\n", "it has 'review', 'stars'. Name that of the texts by --text"),
    "missing column of labels": ("f.csv", "text,stars\na,b\n", "it has 'text', 'stars'. Name that of the labels by --label"),
    "columns of semicolons": ("f.csv", "review;stars\na;b\n", "f.csv has no column 'text': it has 'review', 'stars'"),
    "twice": ("f.csv", "text,text,label\n", "has 2 columns that are called 'text'"),
    "nothing": ("f.csv", "", "f.csv is empty: its first line must name its columns"),
    "no row": ("f.csv", "text,label\n", "there is no text in it, but a classifier needs two labels"),
    "empty text": ("f.csv", GOOD + '"  ",1\n', "f.csv, line 22: 'text' is empty: fill it in, or delete the row"),
    "empty label": ("f.csv", GOOD + "a,\n", "f.csv, line 22: 'label' is empty"),
    "fields": ("f.csv", GOOD + '"a\nb",1\na,b,c\n', "f.csv, line 24: 3 fields, but the header has 2"),
    "quote": ("f.csv", GOOD + '"a,1\n', "f.csv, line 22: not CSV that can be read: unexpected end of data"),
    "one label": ("f.csv", "text,label\na,1\nb,1\n", "every text has the label '1', but a classifier needs two labels"),
    "few": ("f.csv", "text,label\na,1\nb,2\n", "no label has 5 different texts"),
    "encoding": ("f.csv", GOOD.encode() + b"caf\xe9,1\n", "f.csv, line 22: not UTF-8 at byte 4"),
    "broken JSON": ("f.jsonl", '{"text": "a", "label": 1}\n{"text": "b"', "f.jsonl, line 2: not JSON that can be read"),
    "missing key": (
        "f.jsonl",
        '{"text": "a", "stars": 1}\n',
        "f.jsonl, line 1: no 'label' in this record; it has 'text', 'stars'. Name that of the labels by --label",
    ),
    "missing key of texts": (
        "f.jsonl",
        '{"review": "a", "label": 1}\n',
        "f.jsonl, line 1: no 'text' in this record; it has 'review', 'label'. Name that of the texts by --text",
    ),
    "label": ("f.jsonl", '{"text": "a", "label": null}\n', "line 1: 'label' must be a text, a number, true or false, not null"),
    "text": ("f.jsonl", '{"text": 3, "label": 1}\n', "f.jsonl, line 1: 'text' must be a text, not 3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_file_is_answered_by_a_sentence(mistake: str, tmp_path: Path) -> None:
    name, content, sentence = MISTAKES[mistake]
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    words = ["--set", "width=8", "--set", "heads=1", "--set", "ffn=8", "--out", str(tmp_path / "run")]
    assert sentence in refused("train", "classify", f"--{name[2:]}", str(file), *words)
    assert not (tmp_path / "run").exists()


def test_options_that_do_not_fit_are_answered_by_a_sentence(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.csv")
    assert f"there is no file {gone}: check its name" in refused("train", "classify", "--csv", gone)
    assert "Give --csv FILE or --jsonl FILE" in refused("train", "classify")
    assert "give --csv, --jsonl or --folder, not two of them" in refused("train", "classify", "--csv", gone, "--jsonl", gone)
    assert "--csv does nothing here: it is for classify" in refused("train", "saw", "--csv", gone)
    assert "csv is given twice: by --csv and by --set" in refused("train", "classify", "--csv", gone, "--set", "csv=x")
    assert "--csv names the file itself: leave --data out" in refused("train", "classify", "--csv", gone, "--data", ".")
    assert "delimiter" in refused("train", "classify", "--csv", gone, "--set", "delimiter=|")
    for words in (["--jsonl", gone], ["--folder", str(tmp_path)]):
        assert "delimiter does nothing here: it is for --csv" in refused("train", "classify", *words, "--set", "delimiter=tab")
    for name in ("text", "label"):
        said = refused("train", "classify", "--folder", str(tmp_path), f"--{name}", "x")
        assert f"{name} does nothing here: it is for --csv and --jsonl" in said
    with pytest.raises(DataError, match="is a folder"):
        read_labelled_csv(tmp_path, "text", "label")


BOOK = "It is a truth, universally acknowledged: a café.\n" * 20
TINY = [
    "window=16",
    "stride=4",
    "width=8",
    "heads=2",
    "depth=1",
    "ffn=8",
    "steps=2",
    "batch_tokens=256",
    "max_len=64",
    "max_new_tokens=4",
]


@pytest.mark.parametrize("units", ["characters", "bytes", "subwords"])
def test_a_book_is_split_described_trained_scored_and_continued(units: str, tmp_path: Path) -> None:
    file, out = tmp_path / "book.txt", str(tmp_path / "run")
    file.write_text(BOOK + "Ω", encoding="utf-8")
    words = [word for text in (*TINY, f"units={units}") for word in ("--set", text)]
    done = run("train", "text", "--file", str(file), *words, "--out", out, "--device", "cpu")
    assert done.exit_code == 0, done.output
    sizes = {
        "characters": "981 characters of {}: 784 train, 98 val, 99 test",
        "bytes": "1,002 bytes of {}: 800 train, 100 val, 102 test",
        "subwords": "245 subwords of {}: ",
    }
    assert sizes[units].format(file) in done.stderr
    assert ("not in train, and not told apart: 1 of the characters" in done.stderr) == (units == "characters")
    scores = json.loads(run("evaluate", out, "--json").stdout)["scores"]
    assert 3 < scores["floor_bits"] < 6 and f"{scores['floor_bits']:.3f} on test, in bits" in done.stderr
    assert ("bits_per_byte" in scores) == (units == "subwords")
    assert run("predict", out, "It is").stdout.startswith("It is")
    file.write_text(BOOK)
    assert "its SHA-256 differs" in refused("evaluate", out)


@pytest.mark.parametrize("changes", [{"mixer": "gmlp", "positions": "none"}, {"positions": "learned"}])
@pytest.mark.parametrize("most", [3, 40, 300])
def test_a_continuation_ends_where_the_positions_of_the_model_end(changes: dict[str, str], most: int) -> None:
    small = {"width": 8, "heads": 2, "depth": 1, "ffn": 8, "max_len": 16, "window": 16, "max_new_tokens": most}
    task = make_task(config("text").replace({**small, **changes}))
    task.restore({"characters.json": Characters.of([BOOK]).to_json(), "data.json": '{"sha256": ""}'})
    model = task.model().eval()
    model.head.register_forward_hook(lambda *call: call[-1].index_fill(-1, torch.tensor(END), -torch.inf))  # it never ends
    for prompt in ("I", "It is", BOOK):
        read = min(len(prompt), max(16 - most, 8))
        assert len(task.predict(model, [prompt])[0]) == len(prompt) + min(most, 16 - read + 1)


def test_the_printed_command_takes_a_text_that_begins_with_a_dash(tmp_path: Path) -> None:
    file, out = tmp_path / "book.txt", tmp_path / "run"
    file.write_text("--set it down, he said.\n" * 40)
    words = [word for text in TINY for word in ("--set", text)]
    done = run("train", "text", "--file", str(file), *words, "--out", str(out), "--device", "cpu")
    printed = re.search(rf"regard (predict {out} -- '--set it.*')", done.stdout)
    assert printed, done.output
    answer = run(*shlex.split(printed[1]))
    assert answer.exit_code == 0 and answer.stdout.startswith("--set it"), answer.output


def test_bytes_take_any_file(tmp_path: Path) -> None:
    file, out, raw = tmp_path / "any.bin", str(tmp_path / "run"), b"caf\xe9 \xc3\xa9\0\r\n\xff" * 100
    file.write_bytes(raw)
    made = make_task(config("text").replace({"file": str(file), "units": "bytes", "window": 4}))
    made.read()
    read = bytes(number - FIRST_TEXT_ID for split in ("train", "val", "test") for number in made.texts[split].tolist())  # type: ignore[attr-defined]
    assert read == raw
    words = [word for text in (*TINY, "units=bytes") for word in ("--set", text)]
    done = run("train", "text", "--file", str(file), *words, "--out", out, "--device", "cpu")
    assert done.exit_code == 0 and f"1,100 bytes of {file}: " in done.stderr, done.output
    assert run("evaluate", out).exit_code == 0 and run("predict", out, "caf").stdout.startswith("caf")


@pytest.mark.parametrize(("units", "unit"), [("characters", "character"), ("bytes", "byte"), ("subwords", "subword")])
def test_the_description_of_a_run_names_its_units(units: str, unit: str) -> None:
    made = make_task(config("text").replace({"units": units}))
    found = TrainedRun(Path("run"), made, torch.nn.Identity())
    assert found.description == f"the next {unit} of your text"


def test_the_floor_of_a_text_is_the_cross_entropy_of_its_frequencies(tmp_path: Path) -> None:
    file = tmp_path / "ab.txt"
    file.write_text("a" * 6 + "b" * 2 + "ab" * 1)
    made = make_task(config("text").replace({"file": str(file), "window": 4}))
    with pytest.raises(DataError, match="10 characters: too few to be split"):
        made.read()
    file.write_text("aaab" * 4 + "ab" + "ab")
    made = make_task(config("text").replace({"file": str(file), "window": 4}))
    made.read()
    assert made.describe_data()[-1].startswith(
        f"floor: characters by their frequency in train alone have {math.log2(19 / 5):.3f} on val"
    )


def test_a_text_that_cannot_be_learned_is_answered_by_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("a line\n" * 10)
    assert "its training part has 56 characters, but a window of 128 needs 129: use --set window=55" in refused(
        "train", "text", "--file", str(file)
    )
    file.write_bytes(b"caf\xe9\n" * 100)
    for units in ("characters", "subwords"):
        said = refused("train", "text", "--file", str(file), "--set", f"units={units}")
        assert f"line 1: not UTF-8 at byte 4. {units.capitalize()} need UTF-8: --set units=bytes takes any file" in said
    assert "Give --file FILE" in refused("train", "text")
    assert "--label does nothing here: it is for classify" in refused("train", "text", "--file", str(file), "--label", "x")
    assert "units" in refused("train", "text", "--file", str(file), "--set", "units=words")
