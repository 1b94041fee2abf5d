"""Mechanisms that installed packages name, by the entry points `regard.mechanisms`. Imports neither torch nor those packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from types import MappingProxyType

GROUP = "regard.mechanisms"


def installed_mechanisms() -> Mapping[str, str]:
    """Return the class of every name, `mypkg.mod:MyCore`. A name that several packages give to several classes has them all."""
    return _installed(tuple(sys.path))


@lru_cache(maxsize=4)
def _installed(_paths: tuple[str, ...]) -> Mapping[str, str]:
    """Read the entry points of all packages on the path, which takes milliseconds."""
    found: dict[str, set[str]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, set()).add(point.value)
    return MappingProxyType({name: " and ".join(sorted(found[name])) for name in sorted(found)})
