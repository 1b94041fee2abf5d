"""What the documents say is run: every Python block of the README and CONTRIBUTING, every example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.parametrize(("name", "number"), [(n, i) for n in ("README.md", "CONTRIBUTING.md") for i in range(len(blocks(n)))])
def test_python_in_the_documents_runs(name, number):
    done = subprocess.run([sys.executable, "-c", blocks(name)[number]], capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run_say_something_and_draw_it(path, tmp_path):
    out = tmp_path / "picture.png"
    command = [sys.executable, str(path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_documents_name_files_that_exist():
    for name in ("README.md", "CONTRIBUTING.md", "DESIGN.md", "docs/training.md"):
        text = (ROOT / name).read_text()
        found = re.findall(r"`((?:src|tests|benchmarks|results|docs|examples|mixers|kernels)/[\w/.]*)`", text)
        found += re.findall(r"\]\(([\w/.]+)\)", text)
        bases = (ROOT, ROOT / "src" / "regard", ROOT / "docs")
        missing = [path for path in found if not any((base / path).exists() for base in bases)]
        assert missing == [], name
