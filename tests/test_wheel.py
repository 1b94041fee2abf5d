"""A wheel is built from the sources, has all of their files, and works in an environment with torch and numpy alone: offline."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IGNORED = ("__pycache__", "*.egg-info")
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"  # what `pip wheel .` calls


def run(*words: str, folder: Path, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=kept | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_every_file_and_its_command_runs(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns(*IGNORED))
    sources = {path.relative_to(tmp_path / "src").as_posix() for path in (tmp_path / "src").rglob("*") if path.is_file()}
    run(sys.executable, "-c", BUILD, folder=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("regard-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert sources - packed == set(), "add them to package-data in pyproject.toml"
    assert packed - sources == set()

    python = clean_environment(tmp_path / "clean", ["torch", "numpy"])
    pip = (
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-compile",
        "--disable-pip-version-check",
    )
    run(sys.executable, *pip, str(wheel), folder=tmp_path)  # what it requires is there, else pip fails
    assert (
        run(str(python), "-c", LAYER, folder=tmp_path) == f"{packages(python)}/regard/__init__.py torch.Size([1, 4, 8]) False\n"
    )
    link(["typer", "rich"], packages(python))
    assert "bigbird" in run(str(python.parent / "regard"), "list", folder=tmp_path)


LAYER = """
import importlib.util, regard, torch
y = regard.layer("Local(2)", width=8, heads=2)(torch.randn(1, 4, 8))
print(regard.__file__, y.shape, importlib.util.find_spec("rich") is not None)
"""


def clean_environment(folder: Path, needed: list[str]) -> Path:
    """Make an environment without any package but those, and what they require; returns its python."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    link(needed, packages(python))
    return python


def packages(python: Path) -> Path:
    (found,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return found


def link(needed: list[str], site: Path) -> None:
    """Link installed packages, and those that they require without an extra, into another environment."""
    left, seen = list(needed), set()
    while left:
        name = left.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # required elsewhere: on another system, by another Python
            continue
        if name in seen:
            continue
        seen.add(name)
        left += [re.split(r"[^\w.-]", word)[0] for word in found.requires or () if "extra ==" not in word]
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
