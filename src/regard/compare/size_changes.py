"""Changes of models and budgets by name, such as width=32 or batch=128, the same for all tasks of a comparison."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from regard.arena.arena_task import ArenaBudget, ArenaModel
from regard.models.heads import POOLS
from regard.text import unknown

LIMITS: dict[str, tuple[float, float]] = {  # the least and the largest value; others are 0 or more
    **dict.fromkeys(("width", "depth", "heads", "batch", "evaluations", "buckets"), (1, math.inf)),
    **dict.fromkeys(("warmup", "dropout"), (0, 1)),
}
ELSEWHERE = {"steps": "--budget", "rates": "--lr"}  # options of the command


def read_changes(texts: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Read texts such as `width=32`, or raise a ValueError with what is allowed."""
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name:
            raise ValueError(f"--set is a name and a value, such as width=32, not {text!r}")
        found[name] = _read_value(name, value)
    return tuple(found.items())


def changed_sizes(model: ArenaModel, budget: ArenaBudget, changes: Mapping[str, Any]) -> tuple[ArenaModel, ArenaBudget]:
    """Return a model and a budget with other values."""
    own = {name: value for name, value in changes.items() if name in _defaults(ArenaModel)}
    rest = {name: value for name, value in changes.items() if name not in own}
    return replace(model, **own), replace(budget, **rest)


def _defaults(kind: type) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind) if field.name not in ELSEWHERE}


def _read_value(name: str, text: str) -> Any:
    """Read the value of a field, in the type of its default."""
    if name in ELSEWHERE:
        raise ValueError(f"{name} is set by {ELSEWHERE[name]}, not by --set")
    defaults = _defaults(ArenaModel) | _defaults(ArenaBudget)
    if name not in defaults:
        raise ValueError(unknown("--set has no", name, defaults))
    default = defaults[name]
    value: Any
    try:
        value = text if isinstance(default, str) else ast.literal_eval(text.capitalize() if isinstance(default, bool) else text)
    except (ValueError, SyntaxError):
        value = None
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        raise ValueError(f"{name} is a value such as {default}, not {text!r}")
    if isinstance(value, str):
        if name == "pooling" and value not in POOLS:
            raise ValueError(f"pooling must be one of {', '.join(POOLS)}, not {text!r}")
        return value
    least, most = LIMITS.get(name, (0, math.inf))
    if not least <= value <= most:
        limits = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ValueError(f"{name} must be {limits}, not {text!r}")
    return value
