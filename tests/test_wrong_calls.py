"""Every wrong call of every row ends in a ValueError or TypeError that this library raises, with what is allowed."""

import pytest
import torch

from conftest import CASES, modes
from regard.catalogue import CATALOGUE
from regard.mixers.base import Can
from wrong_calls import refused, wrong_builds, wrong_uses

FIRST = [next(c for c in CASES if c.row is row) for row in CATALOGUE.values()]


def ways(case):
    """How a case can be built: causal or not, or to read a context."""
    return modes(case) + ([{"cross": True}] if case.can(Can.CROSS, cross=True) else [])


@pytest.mark.parametrize("case", FIRST, ids=lambda c: c.row.name)
def test_wrong_calls_are_refused_in_a_sentence(case):
    found = {}
    for what, call in wrong_builds(case):
        found[what] = refused(call, accepts=True)
    for way in ways(case):
        m = case.build(dtype=torch.float32, max_len=16, **way)
        for what, call in wrong_uses(m, way.get("cross", False)):
            found[f"{way}: {what}"] = refused(call)
    assert {what: why for what, why in found.items() if why} == {}
    assert len(found) >= 200


def test_an_internal_error_is_no_refusal():
    assert refused(lambda: None) == "accepted"
    assert "IndexError" in refused(lambda: [][0])
    assert "ValueError" in refused(lambda: int("x"))  # not a sentence of this library
