"""Rewrites what is generated in README.md: each region between `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from regard.catalogue import catalogue_table

README = Path(__file__).parents[1] / "README.md"
REGIONS: dict[str, Callable[[], str]] = {"catalogue": catalogue_table}


def render(text: str) -> str:
    """The text with every region made anew; a region that is missing is an error, not a silence."""
    for name, make in REGIONS.items():
        region = re.compile(f"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        text, found = region.subn(lambda _, make=make: f"{make()}\n", text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"README.md needs one region between <!-- {name} --> and <!-- /{name} -->, not {found}")
    return text


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
