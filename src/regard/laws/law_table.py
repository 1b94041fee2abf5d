"""The table of laws: name, sentence, advice, and the mechanisms that each applies to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

from regard.laws.law_case import Case
from regard.mixers.base import Can

LawT = TypeVar("LawT", bound=Callable[..., None])


@dataclass(frozen=True)
class Law:
    """Hold one law: a function of a case and of sizes that raises LawBroken, and what it is for.

    `name` and `sentence` are those of the function `holds`, `advice` is what to do where it is broken, `given` the sizes and
    types that it is checked with, `claim` what a mechanism must claim, `core` whether it must be a core in a layer, `dims` how
    it is built.

    >>> from regard.laws import LAWS, Case
    >>> LAWS["cross_attention"].fits(Case("linear")), LAWS["cross_attention"].fits(Case("conv"))
    (True, False)
    """

    name: str
    sentence: str
    advice: str  # what to do next where it is broken
    holds: Callable[..., None]  # (case, **given)
    given: tuple[dict[str, Any], ...] = ({},)  # the sizes and types that it is checked with, beside the defaults of the function
    claim: Can = Can.NOTHING
    core: bool = False  # for cores in a layer alone
    dims: dict[str, Any] = field(default_factory=dict)  # how it is built where the claim is made

    def fits(self, case: Case) -> bool:
        """Return whether the mechanism makes the claims that the law is about."""
        return case.can(self.claim, self.core, **self.dims)

    def sizes(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments beside the case: those given, and defaults."""
        parameters = [*inspect.signature(self.holds).parameters.values()][1:]
        return {p.name: given.get(p.name, p.default) for p in parameters}

    def why_not(self, case: Case) -> str:
        """Return why the law is not about a mechanism."""
        if self.core and not case.can(Can.NOTHING, core=True):
            return "it is a whole layer without a core"
        claims = " and ".join(c.name.lower() for c in Can if c in self.claim and c.name)
        built = " and ".join(f"{name}={value}" for name, value in self.dims.items())
        return f"it does not claim {claims}{f' when it is built with {built}' if case.can(self.claim) else ''}"


#: Every law by its name, in the order in which they are checked.
#:
#: >>> from regard.laws import LAWS
#: >>> LAWS["empty_inputs"].sentence
#: 'No token, one token and a batch without rows are fine.'
LAWS: dict[str, Law] = {}


def each(**values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Make every combination of values: each(n=(1, 7)) is ({"n": 1}, {"n": 7})."""
    return tuple(dict(zip(values, found, strict=True)) for found in product(*values.values()))


def law(
    advice: str, claim: Can = Can.NOTHING, *, core: bool = False, given: tuple[dict[str, Any], ...] = ({},), **dims: Any
) -> Callable[[LawT], LawT]:
    """Add a function to the table: its name is that of the law, the first line of its docstring the sentence."""

    def add(holds: LawT) -> LawT:
        sentence = inspect.cleandoc(holds.__doc__ or "").partition("\n")[0]
        LAWS[holds.__name__] = Law(holds.__name__, sentence, advice, holds, given, claim, core, dims)
        return holds

    return add
