"""Advice in words: what limits a model, from which length attention dominates, what would help. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WORTH = 1.1  # a gain below this is none
SMALL_SHARE = 0.25  # of attention in a step: below it no mechanism helps much


def shares_of(parts: dict[str, float]) -> dict[str, float]:
    """Divide parts by their sum; what is below zero by noise is zero."""
    known = {kind: max(0.0, value) for kind, value in parts.items()}
    total = sum(known.values())
    if not total:
        return dict.fromkeys(known, 0.0)
    return {kind: value / total for kind, value in known.items()}


def advice_lines(record: dict[str, Any]) -> list[str]:
    """Write what the numbers mean, one sentence or two for each length, and how far predictions are off."""
    lines = [""]
    for row in record["shares"]:
        if "ms" in row:
            lines.append(_length_advice(row, record["predictions"], record.get("error")))
    lines.append(_from_text(record["attention_from"], record["shares"]))
    lines.append(_error_text(record["checks"], record.get("error"), record["shares"]))
    return lines


def _length_advice(row: dict[str, Any], predictions: Sequence[dict[str, Any]], error: float | None) -> str:
    n, share = row["n"], shares_of(row["parts_ms"]).get("attention", 0.0)
    now = f"n = {n:,}: attention takes {100 * share:.0f} % of a step of {row['ms']:.4g} ms"
    if row["bound"] == "host":
        return f"{now}; the host limits it, not the device: CUDA graphs or torch.compile help, another mechanism does not."
    ranked = sorted((x for x in predictions if x["n"] == n and "ms" in x), key=lambda x: x["ms"])
    threshold = max(WORTH, 1 + (error or 0.0))
    useful = [x for x in ranked if x["gain"] > threshold and x["ms"] + x.get("spread_ms", 0.0) < row["ms"]]
    if not useful:
        largest = max(row["parts_ms"], key=row["parts_ms"].get)
        return f"{now}, and no mechanism makes it more than {100 * (threshold - 1):.0f} % faster. The largest part: {largest}."
    named = ", ".join(f"{x['spec']} {x['gain']:.2f} x" for x in useful[:3])
    limit = f" At most {1 / max(1 - share, 1e-3):.2f} x is possible." if share < SMALL_SHARE else ""
    return f"{now}. Faster end to end, by prediction: {named}.{limit}"


def _from_text(found: dict[str, float | None], shares: Sequence[dict[str, Any]]) -> str:
    measured = [row["n"] for row in shares if "ms" in row]
    if not measured:
        return "Nothing could be measured."
    half = found.get("half")
    if half is None:
        return f"Attention takes less than half of a step up to n = {max(measured):,}."
    if half <= min(measured):
        return f"Attention takes more than half of a step at every length that was measured, from n = {min(measured):,} on."
    return f"Attention takes more than half of a step from about n = {half:,.0f} on."


def _error_text(checks: Sequence[dict[str, Any]], error: float | None, shares: Sequence[dict[str, Any]]) -> str:
    done = [row for row in checks if "error" in row]
    if error is None or not done:
        return "No whole model was measured: the error of the predictions is unknown (--checks 2 measures two)."
    each = ", ".join(f"{row['spec']} at {row['n']:,}: {100 * row['error']:+.1f} %" for row in done)
    unchecked = [f"{row['n']:,}" for row in shares if "ms" in row and row["n"] not in {x["n"] for x in done}]
    more = f" None at n = {', '.join(unchecked)}: more --checks measure there too." if unchecked else ""
    return (
        f"Predictions against whole models that were measured: {each}.{more} "
        "Speed alone is predicted: quality is for `regard compare`."
    )
