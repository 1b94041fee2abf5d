"""`regard tasks`, `train`, `evaluate`, `predict` and `distil`, as somebody would use them for the first time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from regard import tasks
from regard.cli import app
from regard.cli.train import _fresh, _sample
from regard.data.text_files import Pair
from regard.tasks.task import Task
from regard.tasks.translation import TranslationTask
from test_cli import refused, run

SMALL = [
    "units=characters",
    "width=8",
    "heads=2",
    "depth=1",
    "ffn=8",
    "steps=4",
    "batch_tokens=256",
    "max_len=64",
    "max_new_tokens=4",
    "save_every=2",
]
SETTINGS = [word for text in SMALL for word in ("--set", text)]
TASKS = list(tasks.TASKS)
pytestmark = pytest.mark.usefixtures("few_strings")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, trained for a moment."""
    made = tmp_path_factory.mktemp("runs") / "tiny run"
    done = run("train", "reverse", *SETTINGS, "--out", str(made), "--device", "cpu")
    assert done.exit_code == 0, done.output
    return made


def answered(folder: Path, source: str, given: bytes | None = None) -> list[str]:
    done = CliRunner().invoke(app, ["predict", str(folder), source], input=given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.split("\n")[:-1]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads data, nobody trains."""

    def read(*_: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(TranslationTask, "read", read)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Training that is stopped by Control-C as soon as it has begun."""
    from regard.training import checkpoints, fit, run_info

    def begun(task: Task, out: Path, **_: object) -> None:
        checkpoints.save_run(out, run_info.config_json(task), task.assets(), {})
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "fit", begun)
    monkeypatch.chdir(tmp_path)


# tasks


def test_tasks_names_everything_and_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    said = run("tasks").stdout
    for name, entry in tasks.TASKS.items():
        line = next(line for line in said.splitlines() if line.startswith(f" {name} "))
        config = entry.config()
        assert entry.summary in line and f"{config.steps:,} updates" in line
        made = f"your file ({entry.file})" if entry.file else "none"
        assert (f"{entry.data} (needs REGARD_DATA)" if entry.data else made) in line


def test_tasks_for_machines_and_one_with_all_of_its_settings() -> None:
    rows = json.loads(run("tasks", "--json").stdout)
    assert [row["name"] for row in rows] == TASKS
    for row in rows:
        assert set(row) == {"name", "summary", "data", "file", "score", "better", "settings", "options", "presets", "time"}
        assert row["better"] in ("min", "max")
        assert row["settings"] == tasks.config(row["name"]).to_json()
    said = run("tasks", "reverse").stdout
    assert all(f"\n {key} " in said for key in tasks.config("reverse").to_json() if key != "task")
    assert "spread over all labels" in said and "slots for every source token" in said and " false " in said
    for key, kinds in tasks.config("reverse").families.items():
        for kind, options in rows[0]["options"][key].items():
            assert f"\n {kind} " in said and kind in kinds
            for option in options:
                assert re.search(rf"\n +{option['name']} +{re.escape(option['default'])} +{re.escape(option['comment'])}", said)
    assert "did you mean 'reverse'?" in refused("tasks", "revers")


# train


def test_a_run_says_what_it_reached_and_what_to_do_next(folder: Path) -> None:
    done = run("train", "reverse", "--out", str(folder), "--device", "cpu")  # it is finished: it says so again
    assert done.exit_code == 0
    for words in ("exact", f"regard evaluate '{folder}'", f"regard predict '{folder}' '"):
        assert words in done.stdout.replace("\n", "")
    config = json.loads((folder / "config.json").read_text())
    assert config["width"] == 8 and config["task"] == "reverse" and config["mixer"] == "softmax"


@pytest.mark.usefixtures("interrupted")
def test_control_c_says_how_to_go_on_and_runs_get_fresh_numbers() -> None:
    for number in (1, 2):
        done = run("train", "reverse", *SETTINGS, "--device", "cpu")
        assert done.exit_code == 130
        assert f"with: regard train reverse --out runs/reverse-softmax-{number}\n" in done.stderr.replace(" \n", "\n")
    Path("runs/reverse-softmax-7").mkdir()
    run("train", "reverse", *SETTINGS)
    assert sorted(os.listdir("runs")) == [f"reverse-softmax-{n}" for n in (1, 2, 7, 8)]


@pytest.mark.usefixtures("interrupted")
def test_several_mixers_make_a_hybrid() -> None:
    two = ["--mixer", "Local(3)", "--mixer", "conv(kernel=3)"]
    assert "2 mixers cannot take turns in 1 layer: use depth=2" in refused("train", "copy", *two, *SETTINGS)
    done = run("train", "copy", *two, *(text.replace("depth=1", "depth=2") for text in SETTINGS))
    folder = "runs/copy-Local-3+conv-kernel=3-1"
    assert f"copy with Local(3), conv(kernel=3) in {folder}" in done.stderr
    assert json.loads(Path(folder, "config.json").read_text())["mixer"] == ["Local(3)", "conv(kernel=3)"]


def test_folders_are_named_after_the_mechanism_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for mixer, name in (
        ("Local(256) | Global(first=4)", "saw-Local-256-Global-first=4-1"),
        ("mypkg.mod:MyCore(size=3)", "saw-mypkg.mod-MyCore-size=3-1"),
        (["gla", "Local(8)", "gla"], "saw-gla+Local-8-1"),
        (f"PerHead([{', '.join(['Local(8)'] * 40)}])", f"saw-PerHead-{'Local-8-' * 9}1"),
    ):
        assert _fresh(tasks.config("saw").replace({"mixer": mixer})).name == name and len(name) < 100


@pytest.mark.usefixtures("interrupted")
def test_a_run_goes_on_with_its_own_settings_and_no_others() -> None:
    def again(*words: str) -> str:
        return run("train", "reverse", "--out", "a", *words).stderr

    run("train", "reverse", "--out", "a", "--mixer", "linear", *SETTINGS)
    assert "reverse with linear in a" in again() and "reverse with linear in a" in again("--set", "width=8")
    assert "a holds a run with other settings: width is 8 there, not 16" in again("--set", "width=16")
    assert "a/config.json is of a run of reverse, not of copy" in refused("train", "copy", "--out", "a")
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("years of work")
    assert "full is not empty and holds no run" in refused("train", "reverse", "--out", "full")
    assert "full/thesis.tex is a file" in refused("train", "reverse", "--out", "full/thesis.tex")


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mixer", "bigbrd"], "nothing is called 'bigbrd': did you mean 'bigbird'?"),
        (["--mixer", "fnet"], "fnet cannot do causal: it can do padding; reverse generates one token after another"),
        (["--mixer", "conv(kernel=3)", "--set", "positions=rotary"], "has no queries and keys"),
        (["--mixer", "linear", "--set", "mixer=softmax"], "the mixer is given twice"),
        (["--set", "mixer=[]"], "a model needs a mixer"),
        (["--set", "cross=conv"], "cannot do cross"),
        (["--set", "widht=3"], "reverse has no setting 'widht': did you mean 'width'?"),
        (["--set", "heads=3"], "not divisible by 3 heads"),
        (["--set", "positions=rotry"], "did you mean 'rotary'?"),
        (["--set", "activation=tanh"], "activation must be one of relu, gelu"),
        (["--set", "norm=sandwich"], "'pre' or 'post', not 'sandwich'"),
        (["--set", "wiring=all"], "wiring must be one of last, each, both, mixed, not 'all'"),
        (["--set", "wiring=both", "--set", "decoder_depth=1"], "as many encoder as decoder layers, not 2 and 1"),
        (["--set", "wiring=each", "--set", "decoder_depth=1"], "as many encoder as decoder layers, not 2 and 1"),
        (["--set", "dropout=1"], "dropout must be in [0, 1), not 1.0"),
        (["--set", "smoothing=-1"], "smoothing must be in [0, 1), not -1.0"),
        (["--set", "precision=8"], "there is no precision '8'"),
        (["--set", "schedule=cosin"], "did you mean 'cosine'?"),
        (["--set", "steps=0"], "steps must be at least 1, not 0"),
        (["--set", "betas=[0.9]"], "betas must be two numbers in [0, 1), not [0.9]"),
        (["--set", "beam=0"], "beam must be at least 1, not 0"),
        (["--set", "units=syllables"], "units cannot be 'syllables'"),
        (["--device", "gpu"], "the device is auto, cpu or cuda, not 'gpu'"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_read(words: list[str], sentence: str) -> None:
    assert sentence in refused("train", "reverse", *words)


@pytest.mark.usefixtures("unread")
def test_the_caret_stands_under_the_mistake() -> None:
    said = refused("train", "reverse", "--mixer", "softmax", "--mixer", "relu(scale=2.0, norm='max')")
    assert said.splitlines()[1:] == ["relu(norm='max', scale=2.0)", " " * 5 + "^"]


def test_missing_data_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "name the folder above it by REGARD_DATA or --data" in refused("train", "multi30k")
    assert f"there is no folder {tmp_path / 'multi30k'}" in refused("train", "multi30k", "--data", str(tmp_path))
    assert os.listdir(tmp_path) == [], "no empty run is left behind"


def test_training_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "regard.training.fit", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'regard[train]'" in refused("train", "reverse")


# evaluate


def test_scores_are_shown_and_kept_by_split_and_settings(folder: Path) -> None:
    path = folder / "scores.json"
    told = json.loads(run("evaluate", str(folder), "--json").stdout)
    assert told["split"] == "test" and told["task"] == "reverse" and "exact" in told["scores"] and told["settings"]["beam"] == 1
    assert "exact" in run("evaluate", str(folder), "--split", "val").stdout
    for _ in range(2):
        assert run("evaluate", str(folder), "--set", "beam=2", "--set", "max_new_tokens=2").exit_code == 0
    kept = [
        (line["split"], line["settings"]["beam"], line["settings"]["max_new_tokens"]) for line in json.loads(path.read_text())
    ]
    assert kept == [("test", 1, 4), ("val", 1, 4), ("test", 2, 2)]
    before = path.read_bytes()
    path.write_text("[{]")
    assert "scores.json is not as it was written" in refused("evaluate", str(folder))
    path.write_bytes(before)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "width=3"], "width cannot change after training: only beam, length_penalty, max_new_tokens"),
        (["--set", "beem=3"], "reverse has no setting for answers 'beem': did you mean 'beam'?"),
        (["--set", "beam=0"], "beam must be at least 1, not 0"),
        (["--split", "train"], "the split is test or val, not 'train'"),
    ],
)
def test_a_mistake_in_evaluating_is_a_sentence(words: list[str], sentence: str, folder: Path) -> None:
    assert sentence in refused("evaluate", str(folder), *words)


def test_a_folder_that_holds_no_run_is_a_sentence(tmp_path: Path, folder: Path) -> None:
    assert "there is no folder" in refused("evaluate", str(tmp_path / "no"))
    assert "holds no run" in refused("predict", str(tmp_path), "a")
    for name in ("config.json", "assets"):
        broken = tmp_path / name
        subprocess.run(["cp", "-r", str(folder), str(broken)], check=True)
        subprocess.run(["rm", "-r", str(broken / name)], check=True)
        said = refused("predict", str(broken), "a")
        assert "holds no run" in said if name == "config.json" else "assets/vocabulary.json cannot be read" in said


# predict


def test_a_text_a_file_and_stdin_are_answered_alike(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "asked.txt"
    file.write_bytes(b"\xef\xbb\xbfa b c\r\n\n  \nd e\nf")
    from_file, from_stdin = answered(folder, str(file)), answered(folder, "-", file.read_bytes())
    assert from_file == from_stdin and len(from_file) == 5 and from_file[1] == from_file[2] == ""
    assert [answered(folder, text) for text in ("a b c", "", "d e", "a b c\nf")] == [
        [from_file[0]],
        [""],
        [from_file[3]],
        [from_file[0], from_file[4]],
    ]
    assert answered(folder, "-", b"") == [] and answered(folder, "km/h") and answered(folder, "and/or 😀 e\u0301 \u2028 a")


@pytest.mark.parametrize("kind", ["file", "stdin"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a b\n\xff\xfe\n", "line 2: not UTF-8 at byte 1"),
        (b"a b\n\nc\0d\n", "line 3: a NUL character at byte 2: this is not text"),
        (b"a b\n" + b"x " * 50_000, "line 2: it has 100,000 tokens, but this model reads at most 64"),
    ],
)
def test_lines_that_cannot_be_answered_are_named(kind: str, content: bytes, sentence: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "asked.txt"
    file.write_bytes(content)
    source, given = (str(file), None) if kind == "file" else ("-", content)
    done = CliRunner().invoke(app, ["predict", str(folder), source], input=given, catch_exceptions=False)
    assert done.exit_code == 2 and f"{file if kind == 'file' else 'stdin'}, {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("source", ["missing.txt", "./missing", "/no/such/file", "../no/such", "tests/missing"])
def test_a_file_that_is_not_there_is_not_taken_for_a_text(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert f"there is no file {source}" in refused("predict", str(folder), source)


def test_other_things_that_are_no_text(folder: Path, tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder" in refused("predict", str(folder), str(tmp_path))
    assert "this text: it has 100,000 tokens" in refused("predict", str(folder), "x" * 100_000)
    assert "not UTF-8" in refused("predict", str(folder), "a \udcff")


def test_one_answer_stays_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TranslationTask, "predict", lambda self, model, lines: [f"{line}\r\n!" for line in lines])  # noqa: ARG005
    assert answered(folder, "-", b"a\nb\n") == ["a\\r\\n!", "b\\r\\n!"]


def test_a_true_process_answers_each_line_as_it_comes(folder: Path) -> None:
    command = [sys.executable, "-m", "regard", "predict", str(folder), "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for line, expected in ((b"a b c\n", answered(folder, "a b c")), (b"\n", [""]), (b"d\n", answered(folder, "d"))):
            process.stdin.write(line)
            process.stdin.flush()
            assert [process.stdout.readline().decode().rstrip("\n")] == expected  # before the next line is asked
        process.stdin.write(b"\xff\n")
        process.stdin.close()
        assert process.wait(60) == 2 and process.stderr.read() == b"stdin, line 4: not UTF-8 at byte 1\n"


# distil


def test_a_teachers_answers_are_whole_and_a_student_can_read_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tasks.make_task(tasks.config("reverse"))
    few.read()
    train = few.texts["train"][:5]  # type: ignore[attr-defined]
    monkeypatch.setattr(type(few), "pairs", lambda self, folder: (train, train[:2], train[:2]))  # noqa: ARG005
    out = tmp_path / "taught.txt"
    done = run("distil", str(folder), "--out", str(out))
    assert done.exit_code == 0 and f"distilled={out}" in done.stdout
    wanted = [answered(folder, pair.source)[0] for pair in train]
    assert out.read_text().split("\n") == [*wanted, ""]
    student = tasks.make_task(tasks.config("reverse").set([f"distilled={out}"]))
    student.read()
    assert [pair.target for pair in student.texts["train"]] == wanted  # type: ignore[attr-defined]
    assert "is there already" in refused("distil", str(folder), "--out", str(out))
    assert "there is no folder" in refused("distil", str(folder), "--out", str(tmp_path / "no" / "x"))


def test_only_translation_teaches(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cli import infer

    tagger = SimpleNamespace(config=SimpleNamespace(task="saw"))
    monkeypatch.setattr(infer, "trained", lambda *_: (SimpleNamespace(task=tagger, model=None), 1))
    assert "is a run of saw: only translation" in refused("distil", str(folder), "--out", str(tmp_path / "x"))


# every task, by fakes of its data alone


@pytest.mark.parametrize("name", TASKS)
def test_settings_of_every_task_are_checked_and_sound(name: str) -> None:
    from regard.cli.model_check import check_model

    check_model(tasks.make_task(tasks.config(name)))


@pytest.mark.parametrize("decoder", ["ctc", "masked", "length", "length(slots='begin')", "fixed"])
def test_a_model_that_says_everything_at_once_is_trained_and_answers(
    decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [Pair("a b", "b a"), Pair("c d", "d c"), Pair("e", "e")]
    monkeypatch.setattr(type(tasks.make_task(tasks.config("reverse"))), "pairs", lambda self, folder: [pairs] * 3)  # noqa: ARG005
    out = tmp_path / "run"
    at_once = ["--set", f"decoder={decoder}", "--mixer", "fnet", "--out", str(out)]
    assert "max_new_tokens does nothing here: it is for answers of one token after another" in refused(
        "train", "reverse", *SETTINGS, *at_once
    )
    done = run("train", "reverse", *(word for text in SMALL if "max_new" not in text for word in ("--set", text)), *at_once)
    assert done.exit_code == 0, done.output
    assert len(answered(out, "a b\nc")) == 2
    assert run("evaluate", str(out)).exit_code == 0


def test_what_predict_could_be_given_is_a_file_where_it_reads_files():
    assert _sample(tasks.make_task(tasks.config("fsdd"))) == "input.wav"
    assert _sample(tasks.make_task(tasks.config("reverse"))) == "…"  # whose data is not read yet
