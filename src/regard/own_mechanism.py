"""Mechanisms outside of this package: a Core or Mixer class, or a text that names one by its module, `mypkg.mod:MyCore`."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from functools import cache
from typing import NamedTuple

from regard.catalogue import CATALOGUE
from regard.catalogue_row import Example, Row
from regard.checks import shown
from regard.mixers.base import Core, Mixer

OWN_FAMILY = "own"
UNMEASURED = Example()  # of rows that are made from a class alone: nothing is claimed about growth
_OWN = re.compile(r"\s*(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*)\s*(?P<options>\(.*\))?\s*", re.DOTALL)
_UNNAMED: dict[str, type] = {}  # classes that no module has under their name: made by a function, or in a text that was run


class ClassText(NamedTuple):
    name: str  # mypkg.mod:MyCore
    options: str  # (size=3), or empty


def split_own(text: str) -> ClassText | None:
    """Split `mypkg.mod:MyCore(size=3)` into the name of a class and its options; None for any other text."""
    match = _OWN.fullmatch(text)
    return None if match is None else ClassText(match["name"], match["options"] or "")


def class_name(make: type) -> str:
    """Return the name of a mechanism's class: that of its row, if the catalogue has it, or else `mypkg.mod:MyCore`."""
    if not _is_mechanism(make):
        raise TypeError(f"a mechanism is a subclass of regard.Core or regard.Mixer, not {shown(make)}")
    for row in CATALOGUE.values():
        if row.make is make:
            return row.name
    name = f"{make.__module__}:{make.__name__}"
    there = getattr(sys.modules.get(make.__module__), make.__name__, None)
    if there is None:
        _UNNAMED[name] = make
    elif there is not make:
        raise ValueError(f"{make.__module__} has another {make.__name__}: name this class with regard.register")
    return name


def named_class(name: str) -> type[Core] | type[Mixer]:
    """Return the class that `mypkg.mod:MyCore` names. Its module is imported, of the current folder too."""
    if name in _UNNAMED:
        return _UNNAMED[name]
    module, _, kind = name.partition(":")
    made = getattr(_imported(module), kind, None)
    if made is None:
        raise ValueError(f"{module} has no {kind} that is a regard.Core or a regard.Mixer")
    if not _is_mechanism(made):
        raise ValueError(f"{name} is no mechanism: it must be a subclass of regard.Core or regard.Mixer")
    return made


@cache
def own_row(make: type[Core] | type[Mixer]) -> Row:
    """Make the row of a class that the catalogue does not have."""
    about = inspect.cleandoc(make.__doc__ or "").partition("\n")[0]
    return Row(make.__name__.lower(), make, OWN_FAMILY, about, "", (UNMEASURED,))


def _is_mechanism(make: object) -> bool:
    return isinstance(make, type) and issubclass(make, Core | Mixer) and make not in (Core, Mixer)


def _imported(module: str) -> object:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{module} needs {error.name}, which is not installed") from None
        raise ValueError(f"there is no module {module}: write the one that Python imports, as in mypkg.mod:MyCore") from None
    except Exception as error:
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
