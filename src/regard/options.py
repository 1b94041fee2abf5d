"""Settings with options of their own, as a text: `decoder="ctc(upsample=3, glance=0.5)"`. Imports no torch.

A family of such settings is a table of `Options` classes by name. The text is read by the grammar of `regard.text`, so that an
unknown name or option is refused with a caret under it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

from regard.text import TextError, parse, unknown

OptionsT = TypeVar("OptionsT", bound="Options")


@dataclass(frozen=True)
class Options:
    """One choice and its options: a frozen dataclass whose fields are booleans, integers, numbers or texts, all with defaults."""

    name: ClassVar[str] = ""  # in the grammar

    def __post_init__(self) -> None:
        """Check the types of all options, then their values."""
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked_type(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError if the value of an option makes no sense."""

    def __str__(self) -> str:
        """Write the choice with all of its options, as `parse_options` reads it."""
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
        return f"{self.name}({values})" if values else self.name


class OptionLine(NamedTuple):
    """What a user reads about one option."""

    name: str
    default: str
    comment: str


def family(kinds: Iterable[type[OptionsT]]) -> dict[str, type[OptionsT]]:
    """Make the table of some classes by their names."""
    return {kind.name: kind for kind in kinds}


def parse_options(text: str, kinds: Mapping[str, type[OptionsT]]) -> OptionsT:
    """Read a text such as `ctc(upsample=2)`: a name of the table, with options or without."""
    made = parse(text, kinds)
    if not isinstance(made, Options):
        raise TextError(f"this is a value: write one of {', '.join(kinds)}", text)
    return made  # type: ignore[return-value]  # the reader makes nothing but what the table holds


def option_lines(kind: type[Options]) -> list[OptionLine]:
    """List the options of a class with their defaults and the comments beside them."""
    comments = field_comments(kind)
    return [OptionLine(field.name, repr(field.default), comments.get(field.name, "")) for field in dataclasses.fields(kind)]


def field_comments(kind: type) -> dict[str, str]:
    """Collect the comment beside each field of a dataclass and of those it extends: written once, read in both places."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        if dataclasses.is_dataclass(part):
            found |= dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", inspect.getsource(part), re.MULTILINE))
    return found


def check_choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return the value, if it is one of those allowed."""
    known = list(allowed)
    if value not in known:
        raise ValueError(unknown(f"{name} cannot be", value, known))
    return value


def check_probability(name: str, value: float) -> None:
    """Refuse a number that is not from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, not {value!r}")


def check_positive(name: str, value: int) -> None:
    """Refuse a number below 1."""
    if value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def _checked_type(name: str, value: Any, kind: type) -> Any:
    """Check the type of a value; an integer is a number too."""
    wrong = isinstance(value, bool) and kind is not bool
    if kind is float and isinstance(value, int | float) and not wrong and math.isfinite(value):
        return float(value)
    if wrong or not isinstance(value, kind) or kind is float:
        wanted = {bool: "True or False", int: "an integer", float: "a number", str: "a text in quotes"}[kind]
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return value
