"""The documentation site: every family and every public name has its place. `make docs` builds it, and a warning fails."""

import doctest
import inspect
import pydoc
import re
import shlex
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from regard.catalogue import CATALOGUE
from regard.cli import app
from regard.spec import Spec
from regard.tasks import config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import make_site  # noqa: E402
import site_api  # noqa: E402
import site_families  # noqa: E402

MEASURED = {
    "settings": {"heads": 8, "dim": 64, "dtype": "bf16"},
    "made_with": {"device": "a GPU", "torch": "2.0"},
    "rows": [{"spec": spec, "causal": True, "level": "core", "n": n} for spec in ("linear", "gla", "delta") for n in (4096, 512)],
    "crossovers": [
        {"spec": spec, "causal": True, "level": "core", "pass": "forward + backward", "from": at}
        for spec, at in (("linear", 512.0), ("gla", 700.0), ("delta", None))
    ],
}


def test_every_mechanism_is_on_the_page_of_its_family():
    families = site_families.by_family()
    assert set(families) == set(site_families.FAMILIES)
    assert [row["name"] for rows in families.values() for row in rows if row["name"] not in CATALOGUE] == []
    page = site_families.family_page("kernel", families["kernel"], {"linear": MEASURED})
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == ["Cost", *(row["name"] for row in families["kernel"])]
    assert "| `features` | `256` |" in page and "| `performer` | n | 1 |" in page and "arXiv:2009.14794" in page


def test_lengths_from_which_a_mechanism_pays_are_those_measured():
    text = site_families.pays_from("kernel", {"linear": MEASURED})
    assert "| `linear` | causal | operation | 512 | the shortest length measured |" in text
    assert "| `gla` | causal | operation | 700 |  |" in text
    assert "| `delta` | causal | operation | at no length measured |  |" in text
    assert site_families.pays_from("graph", {"linear": MEASURED}).startswith("Not measured")


@pytest.mark.parametrize("package", site_api.PACKAGES)
def test_every_public_name_is_described_once(package):
    page = site_api.api_page(package)
    own = [name for name, value in site_api.public_names(package).items() if site_api.home(package, value) == package]
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == own
    elsewhere = [name for name in site_api.public_names(package) if name not in own]
    assert [name for name in elsewhere if f"[{name}](regard" not in page] == []


@pytest.mark.parametrize("package", site_api.PACKAGES)
def test_every_public_name_states_its_parameters_and_has_an_example(package):
    lacking = {}
    for name, value in site_api.public_names(package).items():
        text, call = site_api.described(name, value), site_api.signature(name, value)
        given = inspect.signature(value).parameters.values() if call else ()
        wanted = [p.name for p in given if p.kind is not p.VAR_POSITIONAL and not re.search(rf"\b{p.name}\b", text)]
        if wanted or ">>> " not in text:
            lacking[name] = wanted or "an example"
    assert lacking == {}


@pytest.mark.parametrize("package", site_api.PACKAGES)
def test_examples_of_public_names_run(package, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = []
    for name, value in site_api.public_names(package).items():
        if site_api.home(package, value) == package:
            example = doctest.DocTestParser().get_doctest(site_api.described(name, value), {}, name, None, None)
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(example, out=said.append)
    assert "".join(said) == ""


def test_all_packages_with_public_names_have_a_page():
    inits = (ROOT / "src" / "regard").glob("*/__init__.py")
    packages = {f"regard.{path.parent.name}" for path in inits if "__all__" in path.read_text()}
    assert packages | {"regard"} == set(site_api.PACKAGES)


def test_signatures_are_written_as_code():
    def made(width: "int", *, kind: "str | None" = None, make=dict) -> "tuple[int, ...]":
        """Do nothing."""

    assert site_api.signature("made", made) == "made(width: int, *, kind: str | None = None, make=dict) -> tuple[int, ...]"


def test_docstrings_become_markdown():
    text = "Add x_i to *all*.\n\n>>> 1 + 1\n2\n>>> x = 3\n\nA formula:\n  y = a_i"
    wanted = "Add x\\_i to \\*all\\*.\n\n```pycon\n>>> 1 + 1\n2\n>>> x = 3\n```\n\n```text\nA formula:\n  y = a_i\n```"
    assert site_api.sections(text) == wanted


def test_every_page_of_the_documents_is_in_the_contents():
    listed = {page for pages in make_site.contents().values() for page in pages}
    found = {path.relative_to(ROOT).with_suffix("").as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
    assert listed == found


@pytest.mark.parametrize("page", ["lectures", "glossary"])
def test_a_page_names_what_is_there(page):
    """Dotted names can be imported; commands, and the tasks, settings and mechanisms that they name, are known."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\\|", "|")
    for name in set(re.findall(r"`(regard(?:\.\w+)+)`", text)):
        assert pydoc.locate(name) is not None, name
    lines = [shlex.split(line) for line in re.findall(r"`regard ([^`]+)`", text)]
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {line[0] for line in lines} <= known
    for command, *words in lines:
        given = list(pairwise(words))
        if command == "train":
            config(words[0]).set([value for option, value in given if option == "--set"])
        mixers = [part for option, value in given if option in ("--mixer", "--mixers") for part in value.split(", ")]
        if command in ("show", "check"):
            mixers += [word for word in words[:1] if word != "RUN"]
        for mixer in mixers:
            Spec.parse(mixer)
