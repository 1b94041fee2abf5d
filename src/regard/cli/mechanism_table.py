"""What `regard list` shows, read from a file: the catalogue itself would import torch, which takes seconds.

python docs/make_list.py writes the file anew from the catalogue, and a test compares the two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.text import growth

TABLE = Path(__file__).with_name("mechanisms.json")


def read_mechanisms() -> dict[str, Any]:
    """Read the table: "mechanisms", a list of rows, and the names of "patterns" and "positions"."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def options_text(options: dict[str, dict[str, Any]]) -> str:
    """Write options with their defaults as in a call: `pattern, scale=None`."""
    parts = [f"{name}={about['default']!r}" if "default" in about else name for name, about in options.items()]
    return ", ".join(parts)


def make_mechanisms() -> dict[str, Any]:
    """Make the table from the catalogue."""
    from regard.catalogue import CATALOGUE
    from regard.patterns import PATTERNS
    from regard.positions import POSITIONS

    return {"mechanisms": [_row(row) for row in CATALOGUE.values()], "patterns": list(PATTERNS), "positions": list(POSITIONS)}


def _row(row: Any) -> dict[str, Any]:
    from regard.mixers.base import Can
    from regard.spec import Spec, option_defaults

    first, can = row.examples[0], row.can
    return {
        "name": row.name,
        "family": row.family,
        "summary": row.summary,
        "claims": [c.name.lower() for c in Can if c in can and c.name],
        "cost": first.cost,
        "memory": first.memory,
        "paper": row.paper,
        "options": option_defaults(row.name),
        "example": str(Spec(row.name, **first.options)),
    }


def catalogue_table() -> str:
    """Make the README's table, in Markdown."""
    lines = ["| name | what it does | options | claims | cost | memory | paper |", "|---|---|---|---|---|---|---|"]
    for row in make_mechanisms()["mechanisms"]:
        options = options_text(row["options"])
        cells = [f"`{row['name']}`", row["summary"], f"`{options}`" if options else "", ", ".join(row["claims"]) or "nothing"]
        cells += [growth(row["cost"], "n"), growth(row["memory"], "t"), row["paper"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_mechanisms() -> None:
    """Write the table into its file."""
    TABLE.write_text(json.dumps(make_mechanisms(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
