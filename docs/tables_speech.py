"""Tables of speech synthesis."""

from __future__ import annotations

from statistics import mean
from typing import Any

from tables_base import Made, not_yet, table

READERS = {"plain": "softmax (`plain`)", "location": "location-aware (`location`)", "monotonic": "monotonic (`monotonic`)"}


def synthesis(made: Made) -> str:
    """Failures by reader and guidance, over seeds."""
    if not made["rows"]:
        return not_yet("synthesis.py")
    by: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in made["rows"]:
        by.setdefault((row["reader"], row["guide"]), []).append(row)
    body = []
    for (reader, guide), own in by.items():
        scores = [row["scores"] for row in own]
        cells = [_range([x[name] for x in scores]) for name in ("failures", "skips", "repeats", "endless", "cer")]
        far = f"{mean(x['distance'] for x in scores):.2f}"
        half = _range([row["val"][0]["failures"] for row in own])
        body.append([READERS[reader], f"{guide:g}", len(own), *cells, far, half, f"{mean(row['seconds'] for row in own):.0f}"])
    first, s, w = made["rows"][0]["scores"], made["settings"], made["made_with"]
    for name, what in (("floor_nearest", "floor: the nearest text of train"), ("floor_mean", "floor: the mean frame")):
        body.append([what, "", "", "", "", "", "", "", f"{first[name]:.2f}", "", ""])
    early = made["rows"][0]["val"][0]["step"]
    head = ["reader", "guide", "seeds", "failures, %", "skips", "repeats", "no stop", "CER, %", "distance"]
    head += [f"failures after {early} updates", "seconds"]
    source = f"({w['device']}, {w['threads']} thread, shared with other work; torch {w['torch']}, commit {w['commit']}.)"
    what = f"`tones`, {s['steps']} updates of one block each way, width {s['width']}; 100 texts; mean over seeds (least to most)."
    return f"{what} {source}\n\n{table(head, body)}"


def _range(values: list[float]) -> str:
    """Mean, and between which numbers it lies."""
    return f"{mean(values):.0f}" + (f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else "")
