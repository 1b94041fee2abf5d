"""The table of random features: how far each estimate is from what it estimates."""

from __future__ import annotations

from tables_base import Made, code, not_yet, table


def random_features(made: Made) -> str:
    """Errors by size of q and k, or by scale, with equal weights beside them."""
    if not made["rows"]:
        return not_yet("random_features.py")
    s, w = made["settings"], made["made_with"]
    text = (
        f"The norm of output minus exact output over that of the exact one, the mean of {s['draws']} draws, on {s['n']} Gaussian "
        f"tokens, {s['heads']} heads x {s['dim']}, {s['dtype']}. (torch {w['torch']}, commit {w['commit']}.)"
    )
    return "\n\n".join([text, _part(made, "softmax", "deviation of q, k"), _part(made, "cosines", "scale"), _largest(made)])


def _part(made: Made, what: str, size: str) -> str:
    rows = [row for row in made["rows"] if row["what"] == what]
    counts = sorted({row["features"] for row in rows})
    found: dict[tuple[float, str], dict[int, float]] = {}
    equal = {row["size"]: row["equal"] for row in rows}
    for row in rows:
        found.setdefault((row["size"], row["by"]), {})[row["features"]] = row["error"]
    body = [[f"{at:g}", by, *(f"{own[f]:.2f}" for f in counts), f"{equal[at]:.2f}"] for (at, by), own in found.items()]
    return table([size, "by", *(f"{f} features" for f in counts), "equal weights"], body)


def _largest(made: Made) -> str:
    rows = [row for row in made["rows"] if row["by"] == "rfa"]
    most, value = max(row["largest"] for row in rows), made["settings"]["largest_value"]
    return f"The largest output of {code('rfa')} at any scale is {most:.2f}, the largest value {value:.2f}."
