"""Colours of text, lines and empty cells in all figures, and one colour for each family of mechanisms."""

from collections.abc import Iterable

INK, GREY, LINE, NOTHING = "#16181d", "#6f7580", "#d9dce1", "#f3f4f6"
FAMILY_SHADES = (  # on a light ground, and on a dark one
    ("#1d4ed8", "#7aa2ff"),
    ("#c2410c", "#ff9d66"),
    ("#15803d", "#5fd08a"),
    ("#7e22ce", "#c792ff"),
    ("#0e7490", "#55c7e3"),
    ("#be185d", "#ff86b8"),
    ("#a16207", "#e5b94d"),
    ("#4338ca", "#a5a0ff"),
    ("#b91c1c", "#ff8a8a"),
    ("#0f766e", "#56cfc0"),
    ("#4d7c0f", "#a9d65a"),
    ("#57534e", "#c9c3bb"),
)
FAMILY_ORDER = (
    "softmax",
    "sparse",
    "kernel",
    "low_rank",
    "cluster",
    "hybrid",
    "free",
    "baselines",
    "sinkhorn",
    "synthesizer",
    "graph",
    "own",
)


def family_shades(families: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colours of families, (on light, on dark): those of the catalogue always have the same."""
    found: dict[str, tuple[str, str]] = {}
    for family in families:
        place = FAMILY_ORDER.index(family) if family in FAMILY_ORDER else len(FAMILY_ORDER) + len(found)
        found[family] = FAMILY_SHADES[place % len(FAMILY_SHADES)]
    return found
