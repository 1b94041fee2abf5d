"""Shell completion: what a shell is offered behind a few letters, without torch."""

import pytest
from typer.testing import CliRunner

from regard.catalogue import CATALOGUE
from regard.cli import app, completion
from regard.cli.completion import complete_spec, complete_task
from regard.patterns import PATTERNS
from regard.tasks import TASKS


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("regard ev", ["evaluate"]),
        ("regard show bi", ["bigbird"]),
        ("regard show Lo", ["Local"]),
        ("regard tasks sh", ["shakespeare"]),
        ("regard train sh", ["shakespeare"]),
        ("regard train saw --mixer gl", ["gla"]),
        ("regard train saw --dev", ["--device"]),
        ("regard train ewt --preset c", ["cpu"]),
        ("regard train cifar10 --preset c", ["cnn", "cct"]),
        ("regard tasks multi30k --preset c", ["cpu"]),
        ("regard bench --mixers bi", ["bigbird"]),
        ("regard compare --mixers bi", ["bigbird"]),
        ("regard advise --mixers bi", ["bigbird"]),
        ("regard prepare esp", ["espeak"]),
    ],
)
def test_a_shell_is_offered_names(line, words):
    env = {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert CliRunner().invoke(app, [], env=env, prog_name="regard").stdout.split() == words


def test_nothing_typed_offers_everything():
    assert complete_spec("") == [*CATALOGUE, *PATTERNS]
    assert complete_task("") == list(TASKS)
    assert complete_spec("Local(16) | Gl") == []


def test_mechanisms_of_installed_packages_are_offered(monkeypatch):
    monkeypatch.setattr(completion, "installed_mechanisms", lambda: {"warm": "pkg.mod:Warm"})
    assert complete_spec("war") == ["warm"]


def test_it_can_be_installed():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout
    assert "--install-completion" in shown and "--show-completion" in shown
