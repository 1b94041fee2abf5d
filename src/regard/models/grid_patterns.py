"""Patterns of a grid inside mechanisms: refused where the tokens have another grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from regard.patterns import Neighbourhood
from regard.patterns.algebra import Several
from regard.spec import Named, Spec


def check_grid(mixers: Named | list[str], columns: int, first: int = 0) -> None:
    """Refuse a mechanism with a `Neighbourhood` of other columns than those of the tokens, or of other tokens before the grid."""
    for mixer in mixers if isinstance(mixers, list | tuple) else [mixers]:
        for found in _grids([value for _, value in Spec.of(mixer).items]):
            right = replace(found, columns=columns, first=first)
            if found.columns != columns:
                raise ValueError(f"{found} is for a grid of {found.columns} columns, and this one has {columns}: use {right}")
            if found.first != first:
                raise ValueError(f"the grid of {found} begins at token {found.first}, and this one at token {first}: use {right}")


def _grids(x: Any) -> Iterator[Neighbourhood]:
    """Find the patterns of a grid in an option, however they are combined."""
    if isinstance(x, Neighbourhood):
        yield x
    for part in x.parts if isinstance(x, Several) else x if isinstance(x, list | tuple) else ():
        yield from _grids(part)
