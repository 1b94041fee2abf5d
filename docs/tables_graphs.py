"""Tables of tasks on graphs and molecules."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from tables_base import Made, not_yet, table

PUBLISHED = {"gat": "83.0 ± 0.7", "gcn": "81.5"}
PAIRS = {"pairs": "with biases of bonds and paths", "no_pairs": "atoms as a set (`paths=0`, `bonds=false`)"}
RECIPES = {"gat": "`--mixer gat`, as published", "gcn": "`--mixer gcn`, the control"}


def cora(made: Made) -> str:
    """Accuracy on the 1,000 test papers by recipe, and the floors that need no network."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in made["rows"]:
        if "network" in row:
            rows.setdefault(row["network"], []).append(row)
    if not rows:
        return not_yet("cora.py --seeds 20")
    body = []
    for name, own in rows.items():
        updates, seconds = (mean(row[key] for row in own) for key in ("updates", "seconds"))
        scores = (_spread([row[split] for row in own]) for split in ("val", "test"))
        body.append([RECIPES[name], len(own), *scores, PUBLISHED[name], f"{updates:.0f}", f"{seconds:.0f}"])
    first = made["rows"][0]
    for name, key in (("labels spread along edges", "propagation"), ("the most frequent label", "floor")):
        body.append([f"floor: {name}", "", "", f"{first[key]:.1f}", "", "", ""])
    w = made["made_with"]
    source = f"({w['device']}, {w['threads']} thread, shared with other work; torch {w['torch']}, commit {w['commit']}.)"
    head = ["network", "seeds", "validation, %", "test, %", "published", "updates", "seconds"]
    return f"Cora, accuracy, mean ± standard deviation over seeds. {source}\n\n{table(head, body)}"


def tox21(made: Made) -> str:
    """ROC-AUC on the test molecules with and without biases of pairs, and the floor by fingerprints."""
    if not made["rows"]:
        return not_yet("tox21.py --seeds 5")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in made["rows"]:
        rows.setdefault(row["row"], []).append(row)
    body = []
    for name, own in rows.items():
        s = own[0]["settings"]
        size = f"{s['depth']} x {s['width']}, {s['steps']:,} updates"
        scores = (_spread([row[split] for row in own]) for split in ("val", "test"))
        body.append([PAIRS[name], size, len(own), *scores, f"{mean(row['seconds'] for row in own):.0f}"])
    body.append(["floor: labels of similar molecules", "", "", "", f"{made['rows'][0]['floor']:.1f}", ""])
    body.append(["floor: chance", "", "", "", "50.0", ""])
    w = made["made_with"]
    source = f"({w['device']}, {w['threads']} thread, shared with other work; torch {w['torch']}, commit {w['commit']}.)"
    head = ["scores", "model", "seeds", "validation", "test", "seconds"]
    return f"Tox21, split by scaffold: mean ROC-AUC of twelve labels, from 0 to 100. {source}\n\n{table(head, body)}"


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of percentages."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
