"""A wheel is built from the sources, installed apart from them, and has all of their files: offline, in a few seconds."""

import os
import shutil
import subprocess
import sys
import zipfile
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

    site = tmp_path / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, *pip, "--target", str(site), str(wheel), folder=tmp_path)
    where = run(sys.executable, "-c", "import regard; print(regard.__file__)", folder=tmp_path, PYTHONPATH=str(site))
    assert Path(where.strip()) == site / "regard" / "__init__.py"
    assert "bigbird" in run(str(site / "bin" / "regard"), "list", folder=tmp_path, PYTHONPATH=str(site))
