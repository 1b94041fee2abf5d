"""What a measurement shows: ratios to peers in the same run, and the length from which a mechanism beats full attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from regard.bench.peers import FULL
from regard.bench.speed import OURS, Measured


def time_of(row: Measured, graph: bool) -> float | None:
    """The time of a row in ms: as a CUDA graph or plain."""
    return row.get("graph_ms" if graph else "ms")


def best_time(row: Measured) -> float | None:
    """The time as a CUDA graph where there is one, else the plain time."""
    return row.get("graph_ms") or row.get("ms")


def ratio(ours: Measured, theirs: Measured) -> float | None:
    """How many times as long a peer takes: of graph times where both have one, else of plain times."""
    graph = bool(ours.get("graph_ms") and theirs.get("graph_ms"))
    own, other = time_of(ours, graph), time_of(theirs, graph)
    return other / own if own and other else None


def with_ratios(rows: Sequence[Measured]) -> list[Measured]:
    """Rows of regard with `ratios`, a number for each peer of the same mechanism, form, level, length and pass."""
    found = []
    for row in rows:
        if row["by"] != OURS:
            continue
        peers = [other for other in rows if other["by"] != OURS and _compared(row, other)]
        ratios = {other["by"]: ratio(row, other) for other in peers}
        found.append(row | {"ratios": {name: value for name, value in ratios.items() if value is not None}})
    return found


def _compared(row: Measured, other: Measured) -> bool:
    """Whether two rows measure the same thing; SDPA is a peer of every mechanism."""
    same_spec = row["spec"] == other["spec"] or other["by"] == FULL
    return same_spec and all(row[key] == other[key] for key in ("causal", "level", "n", "pass"))


def crossovers(rows: Sequence[Measured]) -> list[Measured]:
    """For each mechanism, form, level and pass the length from which it beats SDPA over all pairs."""
    found = []
    for key in dict.fromkeys(_curve(row) for row in rows if row["by"] == OURS and row["spec"] != "softmax"):
        spec, causal, level, work = key
        pairs = []
        for row in rows:
            if row["by"] != OURS or _curve(row) != key:
                continue
            full = next((x for x in rows if x["by"] == FULL and _compared(row, x)), None)
            faster = ratio(row, full) if full is not None else None
            if faster is not None:
                pairs.append((row["n"], faster))
        if pairs:
            at = crossing(sorted(pairs))
            found.append({"spec": spec, "causal": causal, "level": level, "pass": work, "from": at, "measured": len(pairs)})
    return found


def _curve(row: Measured) -> tuple[str, bool, str, str]:
    return row["spec"], row["causal"], row["level"], row["pass"]


def crossing(pairs: Sequence[tuple[int, float]]) -> float | None:
    """The length from which a ratio stays above 1, by interpolation between logarithms of length and ratio.

    The shortest length where all ratios are above 1, None where the last one is not.
    """
    if pairs[-1][1] <= 1:
        return None
    low = max((i for i, (_, faster) in enumerate(pairs) if faster <= 1), default=None)
    if low is None:
        return float(pairs[0][0])
    (n, below), (m, above) = pairs[low], pairs[low + 1]
    share = -math.log(below) / (math.log(above) - math.log(below))
    return math.exp(math.log(n) + share * math.log(m / n))
