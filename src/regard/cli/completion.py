"""Names that a shell completes: mechanisms, patterns and tasks. Imports no torch."""

from __future__ import annotations

from regard.cli.mechanism_table import read_mechanisms
from regard.tasks import TASKS


def complete_spec(incomplete: str) -> list[str]:
    """Return the mechanisms and patterns that begin so; behind the first name nothing is completed."""
    known = read_mechanisms()
    names = [*(row["name"] for row in known["mechanisms"]), *known["patterns"]]
    return [name for name in names if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    """Return the tasks that begin so."""
    return [name for name in TASKS if name.startswith(incomplete)]
