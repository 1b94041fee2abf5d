"""What every table is made with: a result file, bars and lines, numbers that are as long as they are sure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

Made = dict[str, Any]  # what a benchmark saved: settings, made_with, rows


def result(name: str) -> Made:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def if_there(name: str) -> Made:
    """A result that may not be there yet: then it has no rows."""
    return result(name) if (ROOT / "results" / f"{name}.json").exists() else {"rows": []}


def not_yet(command: str) -> str:
    return f"Not measured yet: `python benchmarks/{command}`."


def table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def code(text: str) -> str:
    """A pattern has bars in it, which a table would take for its own."""
    return "`" + text.replace("|", "\\|") + "`"


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
