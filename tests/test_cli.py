"""The command line: what it prints, draws and refuses, each refusal a sentence and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from inspect import signature
from pathlib import Path

import pytest
from typer.models import OptionInfo
from typer.testing import CliRunner, Result

from regard._version import version
from regard.catalogue import CATALOGUE
from regard.cli import app
from regard.cli.mechanism_table import options_text
from regard.patterns import PATTERNS
from regard.positions import POSITIONS
from regard.spec import Spec

PNG = b"\x89PNG\r\n\x1a\n"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def refused(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_options_are_named_where_their_metavar_is_their_name() -> None:
    """typer 0.27 calls such an option --TASKS unless its name is given."""
    named, silent = [], []
    for command in app.registered_commands:
        for name, parameter in signature(command.callback, eval_str=True).parameters.items():
            for info in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(info, OptionInfo) and (info.metavar or "").lower() == name:
                    (named if info.default is not ... else silent).append(name)  # typer keeps the first name there
    assert {"tasks", "mixers", "file"} <= set(named) and silent == []


def test_list_names_everything() -> None:
    result = run("list")
    assert result.exit_code == 0
    for row in CATALOGUE.values():
        assert row.name in result.stdout
        assert row.summary in result.stdout
    assert all(name in result.stdout for name in (*PATTERNS, *POSITIONS))


def test_list_for_machines() -> None:
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(CATALOGUE)
    for row in rows:
        assert set(row) == {"name", "family", "summary", "claims", "cost", "memory", "paper", "options", "example"}
        assert Spec.parse(row["example"]).name == row["name"]


def test_list_has_options_with_defaults() -> None:
    said = run("list", "--options").stdout
    for words in (
        "block=64, window=3, globals=2, random=3, special='first', seed=0",
        "pattern, scale=None",
        "causal, cross, padding, stream, dropout",
    ):
        assert words in said
    for row in json.loads(run("list", "--json").stdout):
        given = {name: about["default"] for name, about in row["options"].items() if "default" in about}
        if given.keys() == row["options"].keys():
            assert Spec(row["name"], **given) == Spec.parse(f"{row['name']}({options_text(row['options'])})")


def test_show_says_what_it_costs_and_how_to_go_on() -> None:
    said = run("show", "sparse(Local(8))", "--length", "4096", "--causal").stdout
    for words in (
        "Softmax over the pairs",
        "mixing grows as n\n",
        "optionspattern, scale=None",
        "does not grow",
        "4,096 tokens, causal",
        "arXiv:1904.10509",
    ):
        assert words in said.replace("  ", "").replace(" \n", "\n")
    assert "layer('sparse(pattern=Local(8))', width=256, heads=4, causal=True)" in said
    assert "add --out sparse.png" in said


def test_the_line_it_prints_builds_the_layer() -> None:
    said = run("show", "relu('sum')", "--heads", "2", "--width", "8", "--length", "16").stdout
    line = next(part for part in said.splitlines() if part.startswith("build it")).removeprefix("build it").strip()
    names: dict[str, object] = {}
    exec(line.replace("; ", "; made = "), names)
    assert names["made"].dims.width == 8  # type: ignore[attr-defined]


def test_show_for_machines() -> None:
    told = json.loads(run("show", "Local(8)", "--length", "128", "--json").stdout)
    assert told["spec"] == {"name": "sparse", "options": {"pattern": "Local(8)"}}
    assert told["options"] == {"pattern": {"required": True}, "scale": {"default": None}}
    assert told["length"] == 128
    assert told["pairs"]["per_head"] == 128 * 15 - 8 * 7
    assert told["work"]["growth"] == pytest.approx(1, abs=0.1)
    assert told["state"]["growth"] == pytest.approx(0, abs=0.1)
    (chosen,) = told["ran"]["backends"]
    assert chosen.startswith("tile: ") and {"device", "dtype"} < set(told["ran"])


@pytest.mark.parametrize(("spec", "words"), [("gla", "linear: "), ("delta", "delta: "), ("softmax", "one implementation")])
def test_show_names_the_backend_that_ran(spec: str, words: str) -> None:
    said = run("show", spec, "--length", "64", "--width", "32", "--causal").stdout
    line = next(part for part in said.splitlines() if part.startswith("backend here"))
    assert words in line and line.rstrip().endswith(("(cpu, float32)", "(cuda, bfloat16)"))


def test_out_draws(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    result = run("show", "softmax", "--length", "32", "--heads", "2", "--width", "32", "--out", str(path))
    assert result.exit_code == 0
    assert "is written" in result.stdout
    assert path.read_bytes().startswith(PNG)
    assert os.listdir(tmp_path) == ["picture.png"], "nothing else is left behind"


def test_a_failed_drawing_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def broken(self: Figure, path: Path, **_: object) -> None:  # noqa: ARG001
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Figure, "savefig", broken)
    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    said = refused("show", "softmax", "--length", "8", "--out", str(path))
    assert "No space left on device" in said
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["picture.png"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("bigbrd",), "nothing is called 'bigbrd': did you mean 'bigbird'?"),
        (("Local(0)",), "integer of at least 1"),
        (("softmax", "--heads", "3"), "not divisible by 3 heads"),
        (("softmax", "--out", "picture.gif"), "has to end in .png, .pdf or .svg"),
        (("softmax", "--out", "/no/such/folder/picture.png"), "there is no folder"),
        (("sparse_transformer", "--heads", "1"), "odd number"),
        (("Edges([[0], [1]])", "--length", "9"), "a graph with 2 nodes"),
        (("softmax", "--length", "0"), "--length"),
        (("softmax", "--length", "many"), "--length"),
    ],
)
def test_a_mistake_is_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("show", *words)


def test_the_caret_stands_under_the_mistake() -> None:
    assert refused("show", "bigbird(windw=3)").splitlines()[1:] == ["bigbird(windw=3)", " " * 8 + "^"]
    assert refused("show", "relu(scale=2.0, norm='max')").splitlines()[1:] == ["relu(norm='max', scale=2.0)", " " * 5 + "^"]


def test_drawing_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "regard.plots.mechanism_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'regard[draw]'" in refused("show", "softmax", "--length", "8", "--out", str(tmp_path / "x.png"))


def test_version_and_help() -> None:
    assert run("--version").stdout == f"regard {version}\n"
    assert run().exit_code == 2
    assert "SPEC" in run("show", "--help").stdout
