"""Labels of a user's data in lines: how many examples each has, and those that train alone has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

LABELS_SHOWN = 12  # labels that are printed with their counts


def label_line(counts: Mapping[str, Counter[int]], labels: Sequence[int | str]) -> str:
    """Describe the labels of all splits, those that most examples have first; `counts` are of places in `labels`."""
    total = sum(counts.values(), Counter())
    shown = [f"{labels[place]} ({count:,})" for place, count in total.most_common(LABELS_SHOWN)]
    more = f" and {len(total) - len(shown):,} more" if len(total) > len(shown) else ""
    return f"{len(total):,} labels: {', '.join(shown)}{more}"


def train_alone(counts: Mapping[str, Counter[int]], labels: Sequence[int | str]) -> list[tuple[str, list[str]]]:
    """Describe labels of train that val or test does not have, in a line for each set of them, with their names."""
    lacking: dict[tuple[int, ...], list[str]] = {}
    for split in ("val", "test"):
        if absent := tuple(sorted(counts["train"].keys() - counts[split].keys())):
            lacking.setdefault(absent, []).append(split)
    lines = []
    for absent, splits in lacking.items():
        names = [str(labels[place]) for place in absent]
        more = f" and {len(names) - LABELS_SHOWN:,} more" if len(names) > LABELS_SHOWN else ""
        line = f"labels of train that are not in {' and '.join(splits)}: {', '.join(names[:LABELS_SHOWN])}{more}"
        lines.append((line, names))
    return lines
