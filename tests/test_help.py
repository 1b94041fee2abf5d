"""The `--help` of every command: it ends in examples, whose options, names and settings exist."""

import re
import shlex
from types import SimpleNamespace

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from regard.arena.arena_catalogue import arena_task
from regard.cli import app
from regard.cli.bench_command import _check_use
from regard.cli.help_examples import COMMAND_EXAMPLES
from regard.spec import Spec
from regard.tasks import config

COMMANDS = get_command(app).commands
LINES = [(name, line) for name, lines in COMMAND_EXAMPLES.items() for line in lines]


def test_every_command_has_examples_and_its_help_shows_them():
    assert ["regard", *COMMANDS] == list(COMMAND_EXAMPLES)
    for name, lines in COMMAND_EXAMPLES.items():
        shown = CliRunner().invoke(app, [*([name] if name in COMMANDS else []), "--help"], env={"COLUMNS": "80"}).stdout
        assert 1 <= len(lines) <= 3
        assert all(line in shown for line in lines), name  # on one line each


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_can_be_typed(name, line, monkeypatch):
    """Its options are those of the command, and what they name is there."""
    called = []
    program, command, *words = shlex.split(line.partition(" > ")[0])
    assert program == "regard" and (command == name or name in ("regard", "distil"))
    monkeypatch.setattr(COMMANDS[command], "callback", lambda **given: called.append(given))
    COMMANDS[command].main(words, standalone_mode=False)
    (given,) = called
    mixers = [given["mixer"]] if isinstance(given.get("mixer"), str) else given.get("mixer") or []
    for text in [*mixers, *(given.get("mixers") or []), *([given["spec"]] if "spec" in given and not given.get("text") else [])]:
        for part in re.split(r"; |, ", text):
            assert part == "all" or Spec.parse(part)
    if command == "bench":
        sources = {option: SimpleNamespace(name="COMMANDLINE") for option in given if f"--{option}" in words}
        context = SimpleNamespace(get_parameter_source=sources.get)
        _check_use(context, given["model"], given["compiled"], given["passes"])
    if command == "train":
        config(given["task"]).set(given["changes"] or [])
    if command == "compare" and given["tasks"]:
        assert all(arena_task(part) for part in given["tasks"].split(", "))
