"""The one table is complete, and what it says is well formed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import torch

import regard.mixers
from regard.analysis.probe import has_weights
from regard.catalogue import CATALOGUE
from regard.catalogue_row import Example, Row
from regard.cli.mechanism_table import catalogue_table
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Free, Mixer
from regard.spec import Spec
from regard.text import growth

ROOT = Path(__file__).parents[1]
EXAMPLES = [(row, example) for row in CATALOGUE.values() for example in row.examples]


def mechanisms() -> set[type]:
    """Every finished mechanism in the package: a public class that is not only a base for others."""
    found: set[type] = set()
    for module in pkgutil.iter_modules(regard.mixers.__path__):
        classes = vars(importlib.import_module(f"regard.mixers.{module.name}")).values()
        found |= {c for c in classes if inspect.isclass(c) and issubclass(c, Core | Mixer) and not c.__name__.startswith("_")}
    return found - {Core, Mixer, Free, Attention}


def test_every_mechanism_has_a_row() -> None:
    named = {row.make for row in CATALOGUE.values()}
    bases = {base for c in named for base in c.__mro__[1:]} - named
    assert mechanisms() - bases == named


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=CATALOGUE)
def test_a_row_is_well_formed(row: Row) -> None:
    assert CATALOGUE[row.name] is row
    assert re.fullmatch(r"[a-z][a-z_]*", row.name)
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\S+", row.paper)
    assert row.summary.endswith(".")
    assert row.summary.count(". ") == 0
    assert row.examples
    assert row.make.__doc__ != inspect.getmro(row.make)[1].__doc__, "a docstring of its own"
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\S+", row.make.__doc__ or "") or row.name in ("identity", "sparse")


@pytest.mark.parametrize(("row", "example"), EXAMPLES, ids=[f"{r.name}-{r.examples.index(e)}" for r, e in EXAMPLES])
def test_an_example_builds_and_runs(row: Row, example: Example) -> None:
    spec = Spec(row.name, **example.options)
    mixer = spec.build(Dims(width=32, heads=4, max_len=64)).eval()
    assert mixer(torch.randn(1, 40, 32)).shape == (1, -(-40 // mixer.rate), 32)
    assert Spec.parse(str(spec)) == spec
    streams = Can.CAUSAL in mixer.can and Can.STREAM in spec.build(Dims(width=32, heads=4, causal=True, max_len=64)).can
    assert streams == (example.memory is not None), "memory is None exactly where it does not stream"
    assert (isinstance(mixer, Attention) and has_weights(mixer.core)) == example.weights


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=CATALOGUE)
def test_a_refusal_names_the_mechanism_as_the_catalogue_does(row: Row) -> None:
    made = row.make(Dims(width=32, heads=4, max_len=64), **row.examples[0].options)
    assert made.name == row.name
    assert Spec(row.name, **row.examples[0].options).build(Dims(width=32, heads=4, max_len=64)).name == row.name


def test_growth_is_written_as_people_write_it() -> None:
    assert [growth(p, "n") for p in (0, 1, 2, 1.5, None)] == ["1", "n", "n²", "n^1.5", "none"]


def test_the_table_names_every_row() -> None:
    lines = catalogue_table().splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == list(CATALOGUE)
    assert len({line.count("|") for line in lines}) == 1


TABLES = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))


@pytest.mark.parametrize("name", TABLES["REGIONS"])
def test_the_tables_in_the_documents_are_up_to_date(name: str) -> None:
    assert TABLES["render"](name) == (ROOT / name).read_text(encoding="utf-8"), "run `make tables`"


def test_every_mutant_applies_exactly_once():
    """A mutant that changes nothing is a law that is never tried."""
    from mutants import ROOT, all_of_them

    found = {name: (ROOT / path).read_text().count(old) for name, (path, old, *_) in all_of_them().items()}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert len(found) > 240


def test_the_tests_of_every_mutant_exist():
    from mutants import ROOT, all_of_them

    named = {test for *_, tests in all_of_them().values() for test in tests.split()}
    assert [test for test in sorted(named) if not (ROOT / f"tests/test_{test}.py").is_file()] == []
