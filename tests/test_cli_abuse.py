"""What somebody does who did not read the manual: every mistake is a sentence, nothing is ignored, nothing half-done stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from regard import tasks
from regard.cli.console import number, plain_warnings, sentences
from regard.cli.train import _sample
from regard.tasks.translation import TranslationTask
from regard.training import fit
from test_cli import refused, run
from test_cli_runs import SETTINGS, SMALL

pytestmark = pytest.mark.usefixtures("few_strings")
OTHERS = [word for text in SMALL if "max_new" not in text for word in ("--set", text)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "tiny"
    assert run("train", "reverse", *SETTINGS, "--out", str(made), "--device", "cpu").exit_code == 0
    return made


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A finished run that may be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(TranslationTask, "read", read)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# settings


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("decoder_depth=0", "decoder_depth must be at least 1, not 0"),
        ("ffn=0", "ffn must be at least 1, not 0"),
        ("weight_dropout=1", "weight_dropout must be in [0, 1), not 1.0"),
        ("width=64 heads=6", "width 64 is not divisible by 6 heads: use width=60 or 66, or other heads"),
        ("heads=600", "use width=600, or other heads"),
        (f"seed={2**70}", "it must be below 2**63"),
        (f"batch_tokens={2**70}", "it must be below 2**63"),
        ("length_penalty=1e300", "length_penalty is a power of the length, from -10 to 10"),
        ("vocab=0", "vocab must be an integer of at least 6, not 0"),
        ("vocab=200 units=subwords", "vocab must be an integer of at least 261, not 200"),
        ("mode=minimum_risk(samples=0)", "samples must be an integer of at least 1, not 0"),
        ("decoder=ctc(upsample=0)", "upsample must be an integer of at least 1, not 0"),
        ("decoder=ctc(glance=2)", "glance must be from 0 to 1, not 2.0"),
        ("mode=scheduled(floor=-1)", "floor must be from 0 to 1, not -1.0"),
        ("floor=0.2", "reverse has no setting 'floor'"),
        ("mode=rdrop(floor=0.2)", "rdrop has no option 'floor': there is alpha\nrdrop(floor=0.2)\n      ^"),
        ("mode=teacher_forcing(alpha=2)", "teacher_forcing has no option 'alpha'"),
        ("mode=rdrop(alpha=0)", "alpha must be above 0, not 0.0"),
        ("mode=rdrop(alpha='5')", "alpha must be a number, not '5'"),
        ("mode=two_pass(inputs='hard')", "inputs cannot be 'hard'"),
        ("mode=two_pass(alpha=2)", "inputs='argmax' chooses one token: alpha and through are for softmax and gumbel"),
        ("mode=5", "this is a value: write one of teacher_forcing, rdrop"),
        ("decoder=length(slots='end')", "slots cannot be 'end'"),
        ("decoder=length(upsample=2)", "length has no option 'upsample'"),
        ("decoder=masked(glance=0.1)", "masked has no option 'glance'"),
        ("decoder=masked(iterations=2.5)", "iterations must be an integer, not 2.5"),
        ("bpe_dropout=0.1", "bpe_dropout is for units='subwords': words are not merged"),
        ("beam=3 decoder=ctc", "beam does nothing here"),
        ("width=8 width=16", "width is given twice by --set"),
        ("cross=nystrom", "nystrom cannot do stream: a decoder reads the encoder again for every token it generates"),
        ('mixer=["gla","linear","softmax"]', "3 mixers cannot take turns in 2 layers: use depth=3, or name fewer"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_their_own_names(words: str, sentence: str) -> None:
    assert sentence in refused("train", "reverse", *(word for text in words.split() for word in ("--set", text)))


@pytest.mark.parametrize("setting", ["cross=linear", "wiring=each", "decoder_depth=3", "beam=5", "length_penalty=2"])
def test_a_task_without_a_decoder_says_that_settings_of_one_do_nothing(setting: str) -> None:
    assert f"{setting.partition('=')[0]} does nothing here" in refused("train", "saw", "--set", setting)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        *((name, "share=false", "share") for name in ("saw", "tag", "polarity", "classify", "fsdd", "fsdd_strings")),
        ("polarity", "units=bytes vocab=300", "vocab does nothing here: it is for units=subwords or words"),
        ("classify", "vocab=300 units=characters", "vocab"),
        ("reverse", "vocab=300 units=characters", "vocab"),
        ("an4", "ctc_weight=1 smoothing=0.2", "smoothing does nothing here: it is for models with a decoder"),
        ("reverse", "smoothing=0.1 mode=self_critical", "smoothing"),
        ("multi30k", "smoothing=0.1 mode=minimum_risk", "smoothing does nothing here: it is for modes that learn true tokens"),
    ],
)
def test_settings_that_a_choice_makes_useless_are_refused(name: str, words: str, sentence: str) -> None:
    said = refused("train", name, *(word for text in words.split() for word in ("--set", text)))
    assert (sentence if " " in sentence else f"{sentence} does nothing here: it is for ") in said


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("ewt", text) for text in ("letters=1", "spelling=0", "min_count=0", "forget=1", "fine=-1")),
        *(("imdb", text) for text in ("cut=2", "forget=1", "vocab=260")),
        *(("shakespeare", text) for text in ("window=0", "window=9999", "stride=0")),
        *(("wikisql", text) for text in ("cut=0", "max_new_tokens=0", "pointers=0", "coverage=-1", "vocab=5")),
    ],
)
def test_settings_of_every_task_have_limits_before_data_is_read(name: str, setting: str) -> None:
    with pytest.raises(ValueError, match=f"^{setting.partition('=')[0]} "):
        tasks.make_task(tasks.config(name).set([setting]))


def test_edges_are_refused_for_what_they_are(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    said = refused("train", "reverse", "--mixer", "Edges([[0],[1]])", *SETTINGS, *out)
    assert "these edges are of a graph with 2 nodes" in said and "meta" not in said


def test_a_batch_smaller_than_an_example_is_said_at_once_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [text.replace("batch_tokens=256", "batch_tokens=3") for text in SETTINGS]
    for out in ([], ["--out", "made"]):
        assert "tokens, but a batch has 3 at most: use batch_tokens=" in refused("train", "reverse", *small, *out)
    Path("mine").mkdir()
    refused("train", "reverse", *small, "--out", "mine")
    assert sorted(os.listdir()) == ["mine", "runs"] and os.listdir("runs") == [], "an empty folder of mine stays mine"


# what a run starts from


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["init_from=nowhere"], "/nowhere holds no run"),
        (["init_from={}", "heads=4"], "has heads=2, but here it is 4: use the same"),
        (["init_from={}", "lower=true"], "has lower=False, but here it is True: use the same"),
        (["init_from={}", "width=16"], "but the model has it as"),
    ],
)
def test_a_run_begins_from_another_only_if_its_weights_mean_the_same(
    changes: list[str], sentence: str, finished: Path, tmp_path: Path
) -> None:
    keys = [change.partition("=")[0] for change in changes]
    kept = [text for text in SMALL if text.partition("=")[0] not in keys]
    words = [word for text in [*kept, *changes] for word in ("--set", text.format(finished))]
    assert sentence in refused("train", "reverse", *words, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# files of a run


@pytest.mark.parametrize("command", ["predict", "evaluate", "train"])
def test_settings_and_assets_that_were_edited_are_refused(command: str, folder: Path) -> None:
    words = {"predict": [str(folder), "a b"], "evaluate": [str(folder)], "train": ["reverse", "--out", str(folder)]}[command]
    for name, change in (("assets/vocabulary.json", {"more": 1}), ("config.json", {"heads": 4})):
        edit(folder / name, **change)
        assert f"{folder / name} is not as it was written (its SHA-256 differs): restore it" in refused(command, *words)
        shutil.copy(folder / name, folder / "spoilt")
        (folder / name).unlink()
        assert str(folder) in refused(command, *words) or name == "config.json"
        shutil.copy(folder / "spoilt", folder / name)


def test_a_run_whose_weights_are_lost_makes_them_again_from_its_checkpoints(folder: Path) -> None:
    weights = folder / "weights.safetensors"
    before = weights.read_bytes()
    for spoil in (weights.unlink, lambda: weights.write_bytes(before[:100])):
        spoil()
        assert "train in the same folder again, and its checkpoints give it back" in refused("predict", str(folder), "a")
        assert run("train", "reverse", "--out", str(folder)).exit_code == 0 and weights.read_bytes() == before
    weights.unlink()
    shutil.rmtree(folder / "checkpoints")
    assert "there is no checkpoint to make it from" in refused("train", "reverse", "--out", str(folder))
    assert "train again in another folder" in refused("predict", str(folder), "a")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("result.json", b"{}", "result.json is not as it was written: delete it, and the run ends once more"),
        ("result.json", b'{"steps": 4, "more": 1}', "result.json is not as it was written"),
        ("result.json", b"\xff", "result.json is not a whole JSON file (not UTF-8 at line 1, character 1): delete it"),
        ("run.json", b'{"sha256": 3}', "run.json is not as it was written"),
    ],
)
def test_other_files_that_were_edited_are_named(name: str, content: bytes, sentence: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    assert sentence in refused("train", "reverse", "--out", str(folder))


@pytest.mark.parametrize("content", [b"\xff\n", b"3\n", b'{"step": 4, "time": "x"}\n', b'{"step": 4, "time": 1.0, "val": 3}\n'])
def test_a_journal_that_was_edited_is_a_sentence(content: bytes, folder: Path) -> None:
    for name in ("result.json", "metrics.jsonl"):  # of a finished run, and of one that goes on
        (folder / "metrics.jsonl").write_bytes(content)
        done = run("train", "reverse", "--out", str(folder))
        assert done.exit_code == 2 and "metrics.jsonl is not as it was written: delete it, and the run goes on" in done.stderr
        (folder / name).unlink()
    assert run("train", "reverse", "--out", str(folder)).exit_code == 0


def test_a_run_that_does_not_say_on_what_it_was_trained_does_not_go_on(folder: Path) -> None:
    (folder / "result.json").unlink()
    (folder / "run.json").write_text("{}")
    assert "run.json does not hold what it was trained on" in refused("train", "reverse", "--out", str(folder))


# the end of a process


def test_a_terminated_run_is_not_taken_for_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(fit, "fit", killed)
    done = run("train", "reverse", *SETTINGS, "--out", str(tmp_path / "run"))
    assert done.exit_code == 143 and "stopped before anything was written" in done.stderr


def test_a_full_disk_and_a_closed_stdout_are_no_traceback() -> None:
    script = "import sys; sys.stdout = None; from regard.cli import main; sys.argv = ['regard', 'tasks']; main()"
    quiet = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert quiet.returncode == 0 and quiet.stderr == b""
    if not os.path.exists("/dev/full"):
        return
    script = "import sys; from regard.cli import main; sys.argv = ['regard', 'list']; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1 and done.stderr == b"cannot write the answer: No space left on device\n"


def test_a_closed_stdin_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cli import inputs

    monkeypatch.setattr(inputs, "sys", SimpleNamespace(stdin=None))
    assert "stdin is closed" in refused("predict", str(folder), "-")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")])
def test_too_little_memory_is_a_sentence_and_other_errors_are_ours(error: Exception, capsys: pytest.CaptureFixture) -> None:
    import typer

    with pytest.raises(typer.Exit), sentences():
        raise error
    assert "there is too little memory for this" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="shapes"), sentences():
        raise RuntimeError("shapes do not match")


# what is shown


def test_a_warning_of_ours_is_a_plain_sentence(capsys: pytest.CaptureFixture) -> None:
    others: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: others.append(str(message))  # type: ignore[assignment]
        with plain_warnings():
            warnings.warn_explicit("3 lines are left out", UserWarning, "/lib/regard/data/datasets.py", 7)
            warnings.warn_explicit("torch's", UserWarning, "/lib/torch/x.py", 7)
    assert capsys.readouterr().err == "3 lines are left out\n" and others == ["torch's"]


def test_counts_are_whole_and_scores_have_four_digits() -> None:
    assert [number(x) for x in (25148.0, 4025.0, 99.8347, 12.0, 0.00273312, 1e9, -1234.5)] == [
        *("25,148", "4,025", "99.83", "12", "0.002733", "1,000,000,000", "-1234")
    ]


@pytest.mark.parametrize("name", [name for name, entry in tasks.TASKS.items() if not (entry.data or entry.file or entry.package)])
def test_every_task_shows_something_that_it_could_be_asked(name: str) -> None:
    made = tasks.make_task(tasks.config(name))
    made.read()
    assert 1 < len(_sample(made)) <= 60 and _sample(made) in " ".join(made.sample.split())
    made.sample = "x\n " * 100
    assert _sample(made) == "x " * 29 + "x"
    made.sample = ""
    assert _sample(made) == "…"
