"""What the documents print runs: every Python block of the README and CONTRIBUTING, every example.

In this process, where torch is imported already; one block shows that a fresh process needs nothing else.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.compare.cell_store import CellStore
from regard.data import synthetic
from regard.pretrained import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
TUTORIALS = sorted(path.name for path in (ROOT / "docs").glob("tutorial_*.md"))
QUICKLY = {"alignments.py": ["--quick"], "constant_memory.py": ["--prompt", "100", "--length", "300"]}  # every line still runs


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def loads(name: str, number: int) -> bool:
    """Whether a block loads a trained run, which a test must make first."""
    return "regard.load(" in blocks(name)[number]


PAGES = ("README.md", "CONTRIBUTING.md", "docs/huggingface_conversion.md", "docs/first_steps.md", "docs/speech.md")


@pytest.mark.parametrize(("name", "number"), [(n, i) for n in PAGES for i in range(len(blocks(n))) if not loads(n, i)])
def test_python_in_the_documents_runs(name, number):
    exec(compile(blocks(name)[number], f"{name}, block {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ["README.md", "docs/training.md"])
def test_python_that_loads_a_run_runs(name, tmp_path, monkeypatch):
    """In a folder with a run of that name, trained for two updates; runs of Multi30k are replaced by such of strings."""
    (block,) = (blocks(name)[i] for i in range(len(blocks(name))) if loads(name, i))
    (out,) = set(re.findall(r'regard\.load\("(.*?)"', block))
    tiny = ["width=8", "heads=2", "depth=1", "ffn=8", "steps=2", "batch_tokens=256", "save_every=1"]
    words = [word for text in tiny for word in ("--set", text)]
    monkeypatch.chdir(tmp_path)
    for drawn in ("string_pairs", "tagging_sentences"):
        monkeypatch.setattr(synthetic, drawn, partial(getattr(synthetic, drawn), train=50, val=5, test=5))
    made = CliRunner().invoke(app, ["train", "saw" if "saw" in out else "reverse", *words, "--out", out, "--device", "cpu"])
    assert made.exit_code == 0, made.output
    exec(compile(block, f"{name}, regard.load", "exec"), {"__name__": "__main__"})


def test_the_page_of_weights_runs_and_names_every_architecture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("docs/weights.md")
    exec(compile(block, "docs/weights.md", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "my-llama" / "model.safetensors").is_file()
    text = (ROOT / "docs/weights.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []


def test_the_first_block_runs_in_a_fresh_process():
    done = subprocess.run([sys.executable, "-c", blocks("README.md")[0]], capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run_say_something_and_draw_it(path, tmp_path, monkeypatch, capsys):
    out = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(out), *QUICKLY.get(path.name, ())])
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_documents_name_files_that_exist():
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "DESIGN.md",
        "docs/training.md",
        "docs/compare.md",
        "docs/weights.md",
        "docs/first_steps.md",
        "docs/lectures.md",
        "docs/glossary.md",
        *(f"docs/{name}" for name in TUTORIALS),
    ):
        text = (ROOT / name).read_text()
        found = re.findall(r"`((?:src|tests|benchmarks|results|docs|examples|mixers|kernels)/[\w/.]*)`", text)
        found += re.findall(r"\]\(([\w/.]+)\)", text)
        bases = (ROOT, ROOT / "src" / "regard", ROOT / "docs")
        missing = [path for path in found if not any((base / path).exists() for base in bases)]
        assert missing == [], name


def test_the_examples_of_the_page_about_comparisons_run(tmp_path, monkeypatch):
    """docs/compare.md: a mechanism and a task of your own, as they are printed there."""
    page = (ROOT / "docs" / "compare.md").read_text()
    mechanism, task = blocks("docs/compare.md")
    assert len(task.splitlines()) < 40
    (tmp_path / "mymixers.py").write_text(mechanism)
    (tmp_path / "mytask.py").write_text(task)
    lines = [shlex.split(line) for line in re.findall(r"^\$ regard compare (.*?)(?:#.*)?$", page, re.MULTILINE)]
    own = next(line for line in lines if "mytask.py" in line)
    mixers = next(line for line in lines if "mymixers:Average" in " ".join(line))
    monkeypatch.chdir(tmp_path)
    chosen = [*own[: own.index("--mixers")], *mixers, "--budget", "2", "--lr", "1e-3"]
    given = ["compare", *chosen, "--set", "evaluations=1", "--jobs", "0", "--lengths", "none", "--device", "cpu", "--out", "out"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    records = CellStore(tmp_path / "out").records()
    assert sorted(record.mixer for record in records) == ["mymixers:Average", "mymixers:Average(sharpness=2.0)", "softmax"]
    assert all(record.final and record.task == "first_mark(length=64)" for record in records)
    assert {record.family for record in records} == {"own", "softmax"}


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    """Python and commands as they are printed, in one folder, the Python in one namespace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = re.findall(r"```(python|console)\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    namespace = {"__name__": "__main__"}
    before = set(sys.modules)
    for number, (kind, text) in enumerate(found):
        if kind == "python":
            exec(compile(text, f"{name}, block {number}", "exec"), namespace)
            continue
        for line in re.findall(r"^\$ regard (.*)$", text, re.MULTILINE):
            done = CliRunner().invoke(app, shlex.split(line))
            assert done.exit_code == 0, f"{line}\n{done.output}"
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[module]
