"""`regard distil` that is stopped goes on behind the answers it has, and its file is whole or not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from regard import tasks
from regard.tasks import translation
from regard.tasks.translation import TranslationTask
from test_cli import refused, run
from test_cli_runs import SETTINGS

pytestmark = pytest.mark.usefixtures("few_strings")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "teacher"
    assert run("train", "reverse", *SETTINGS, "--out", str(made), "--device", "cpu").exit_code == 0
    return made


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seven sources, two at a time: `calls` are how many were answered each time, Control-C comes in front of call `stop`."""
    made = tasks.make_task(tasks.config("reverse"))
    made.read()
    train = made.texts["train"][:7]  # type: ignore[attr-defined]
    monkeypatch.setattr(type(made), "pairs", lambda self, folder: (train, train[:2], train[:2]))  # noqa: ARG005
    monkeypatch.setattr(translation, "SOURCES_PER_CHUNK", 2)
    told, plain = SimpleNamespace(calls=[], stop=None), TranslationTask.answers

    def answers(self, model, sources, **options):
        if len(told.calls) == told.stop:
            raise KeyboardInterrupt
        told.calls.append(len(sources))
        return plain(self, model, sources, **options)

    monkeypatch.setattr(TranslationTask, "answers", answers)
    return told


def test_it_goes_on_behind_what_it_has(teacher: Path, few: SimpleNamespace, tmp_path: Path) -> None:
    whole, out, partial = (tmp_path / name for name in ("whole", "taught.txt", "taught.txt.partial"))
    assert run("distil", str(teacher), "--out", str(whole)).exit_code == 0 and few.calls == [2, 2, 2, 1]
    for count, more in ((0, 0), (2, 1), (6, 2)):  # each time it goes on from the one before
        few.calls, few.stop = [], more
        done = run("distil", str(teacher), "--out", str(out))
        assert done.exit_code == 130 and not out.exists()
        again = f"regard distil {teacher} --out {out}"
        assert f"stopped; {count} of 7 answers are kept in {partial}, go on with: {again}\n" in done.stderr.replace(" \n", "\n")
        with open(partial, "ab") as file:
            file.write(b'["torn')  # by a process that died
    few.calls, few.stop = [], None
    done = run("distil", str(teacher), "--out", str(out))
    assert done.exit_code == 0 and f"going on behind 6 of 7 answers in {partial}" in done.stderr and "7 answers" in done.stdout
    assert few.calls == [1], "what was answered is not answered again"
    assert out.read_bytes() == whole.read_bytes() and not partial.exists()


def test_answers_of_others_and_damaged_ones_are_refused(teacher: Path, few: SimpleNamespace, tmp_path: Path) -> None:
    out, partial = tmp_path / "taught.txt", tmp_path / "taught.txt.partial"
    few.stop = 1
    assert run("distil", str(teacher), "--out", str(out)).exit_code == 130
    few.stop = None
    asked = ["distil", str(teacher), "--out", str(out)]
    assert "holds answers of another run, other settings or other data" in refused(*asked, "--set", "beam=2")
    kept = partial.read_bytes()
    for content in (kept + b"[3]\n", kept + b"[[[\n", b"\xff\n", b"3\n"):
        partial.write_bytes(content)
        assert "partial is not as it was written: delete it" in (said := refused(*asked)) or "answers of another run" in said
    assert not out.exists()
