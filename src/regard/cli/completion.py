"""Names that a shell completes: mechanisms, patterns, tasks, presets and data sets. Imports no torch."""

from __future__ import annotations

from typing import Any

from regard.cli.mechanism_table import read_mechanisms
from regard.data.downloads import DOWNLOADS
from regard.installed_mechanisms import installed_mechanisms
from regard.tasks import TASKS

ESPEAK = "espeak"  # a data set that is made, for the task tts


def complete_spec(incomplete: str) -> list[str]:
    """Return the mechanisms, also those of installed packages, and patterns that begin so; nothing behind the first name."""
    known = read_mechanisms()
    names = [*(row["name"] for row in known["mechanisms"]), *installed_mechanisms(), *known["patterns"]]
    return [name for name in names if name.startswith(incomplete)]


def complete_preset(ctx: Any, incomplete: str) -> list[str]:
    """Return the presets that begin so, of the task that the command names, or of any."""
    named = next((word for word in ctx.args if word in TASKS), None)  # an option without its value leaves words unread
    entries = TASKS.values() if named is None else [TASKS[named]]
    names = dict.fromkeys(name for entry in entries for name in entry.presets)
    return [name for name in names if name.startswith(incomplete)]


def complete_set(incomplete: str) -> list[str]:
    """Return the data sets that `regard prepare` makes and that begin so."""
    return [name for name in (*DOWNLOADS, ESPEAK) if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    """Return the tasks that begin so."""
    return [name for name in TASKS if name.startswith(incomplete)]
