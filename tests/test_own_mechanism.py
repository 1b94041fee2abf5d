"""The mechanisms that CONTRIBUTING and an example print, as rows of the catalogue: all laws hold for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch

from regard import CATALOGUE, Core, Dims, Spec, layer, register
from regard.catalogue_row import Example, Row
from regard.laws import check_laws
from regard.mixers.attention import Attention
from test_docs import ROOT, blocks


def printed(text: str, name: str) -> type[Core]:
    """The class of this name, from a program that defines it."""
    made: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        exec(compile(text, name, "exec"), made)
    return made[name]


CLASSES = {
    "taylor": printed(blocks("CONTRIBUTING.md")[0], "Taylor"),
    "average": printed((ROOT / "examples" / "new_mechanism.py").read_text(), "Average"),
}
# Compiling a loop over 40 tokens takes 15 seconds, and is torch's business alone.
ROWS = [Row(name, own, "own", "", "", (Example(cost=1, memory=0),), compiles=False) for name, own in CLASSES.items()]


@contextmanager
def unchanged_catalogue() -> Iterator[None]:
    """The catalogue, left afterwards as it was before."""
    before = dict(CATALOGUE)
    try:
        yield
    finally:
        CATALOGUE.clear()
        CATALOGUE.update(before)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_printed_mechanism_keeps_the_laws(row: Row) -> None:
    with unchanged_catalogue():
        register(row)
        found = check_laws(row.name)
    assert [(finding.law.name, finding.reason) for finding in found if finding.outcome != "pass"] == [
        ("dropout_keeps_the_mean", "it does not claim dropout")
    ]


class Scaled(CLASSES["average"]):  # type: ignore[misc, valid-type]
    """A mechanism with an option."""

    def __init__(self, dims: Dims, *, factor: float, flag: bool = False) -> None:
        super().__init__(dims)
        self.factor, self.flag = factor, flag


def test_a_registered_mechanism_has_a_name_in_texts() -> None:
    assert "scaled" not in CATALOGUE
    with unchanged_catalogue():
        row = register("scaled", Scaled, summary="An average.", examples=(Example({"factor": 2.0}, cost=1, memory=0),))
        assert CATALOGUE["scaled"] is row and row.summary == "An average."
        for text in ("scaled(factor=2.0)", "scaled(2.0, flag=False)"):
            made = layer(text, width=8, heads=2, causal=True)
            assert isinstance(made, Attention) and type(made.core) is Scaled and made.core.factor == 2.0
            assert made(torch.randn(2, 5, 8)).shape == (2, 5, 8)
        assert str(Spec.parse("scaled(3.0)")) == "scaled(factor=3.0)"
        with pytest.raises(ValueError, match="has no option"):
            layer("scaled(size=3)", width=8, heads=2)
    with pytest.raises(ValueError, match="scaled"):
        layer("scaled(factor=2.0)", width=8, heads=2)


@pytest.mark.parametrize(
    ("name", "make", "kind", "message"),
    [
        ("softmax", Scaled, ValueError, "softmax is taken"),
        ("Local", Scaled, ValueError, "lower case"),
        ("two words", Scaled, ValueError, "lower case"),
        ("lambda", Scaled, ValueError, "lower case"),
        (3, Scaled, ValueError, "lower case"),
        ("scaled", Scaled(Dims(8, 2), factor=1.0), TypeError, "is a class"),
        ("scaled", dict, TypeError, "is a class"),
    ],
)
def test_a_row_that_cannot_be_registered_is_refused(name: Any, make: Any, kind: type[Exception], message: str) -> None:
    with unchanged_catalogue(), pytest.raises(kind, match=message):
        register(name, make)
    assert CATALOGUE["softmax"].make.__name__ == "Softmax"


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=CATALOGUE)
def test_refusals_call_a_mechanism_by_its_name_in_the_catalogue(row: Row) -> None:
    made = row.make(Dims(width=32, heads=4, max_len=64), **row.examples[0].options)
    assert made.name == row.name and Spec(row.name, **row.examples[0].options).build(made.dims).name == row.name
