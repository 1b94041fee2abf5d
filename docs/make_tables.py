"""Rewrites what is generated in README.md: each region between `<!-- name -->` and `<!-- /name -->`.

make tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from regard.catalogue import catalogue_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def code(text: str) -> str:
    """A pattern has bars in it, which a table would take for its own."""
    return "`" + text.replace("|", "\\|") + "`"


def growth() -> str:
    """Milliseconds and MiB by length, and the exponents, for each spec and direction."""
    made = result("growth")
    rows: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in made["rows"]:
        rows.setdefault((row["spec"], row["causal"]), []).append(row)
    lengths = sorted({row["n"] for row in made["rows"]})
    body = []
    for (spec, causal), own in rows.items():
        by = {row["n"]: row for row in own}
        cells = [f"{by[n]['fastest'] * 1e3:.0f} / {by[n]['peak_bytes'] / 2**20:.0f}" if n in by else "" for n in lengths]
        faster = by[8192]["times_faster_than_softmax"]
        exponents = f"{own[0]['time_exponent']:.2f} / {own[0]['memory_exponent']:.2f}"
        body.append([code(spec), "causal" if causal else "", *cells, exponents, f"{faster:.1f} x"])
    head = ["", "", *(f"n = {n:,}" for n in lengths), "grows as n^", "vs softmax at 8,192"]
    return f"Forward + backward, milliseconds / MiB at the peak. {made_by(made)}\n\n" + table(head, body)


def peers() -> str:
    made = result("peers")
    rows = [row for row in made["rows"] if row["pass"] == "forward"]
    body = [
        [code(r["spec"]), r["by"], f"{r['fastest'] * 1e3:.1f}", f"{r['median'] * 1e3:.1f}", f"{r['ratio']:.2f} x"] for r in rows
    ]
    text = f"Forward pass beside others, in one run, n = {made['settings']['n']:,}, milliseconds. {made_by(made)}\n\n"
    return text + table(["pattern", "by", "fastest", "median", "fastest against regard"], body)


def stream() -> str:
    made = result("stream")
    body = [
        [
            code(r["spec"]),
            f"{r['t']:,}",
            f"{r['step_seconds'] * 1e3:.2f}",
            f"{r['step_ratio']:.2f}",
            f"{r['state_bytes'] / 1024:.0f}",
        ]
        for r in made["rows"]
    ]
    text = f"One decoding step after t tokens. {made_by(made)}\n\n"
    return text + table(["", "t", "ms", "against the first", "state, KiB"], body)


def made_by(made: dict[str, Any]) -> str:
    s, w = made["settings"], made["made_with"]
    size = f"{s['heads']} heads x {s['dim']}" if "dim" in s else f"width {s['width']}, {s['heads']} heads"
    return f"({size}, {s['dtype']}; {w['device']}, {w['threads']} threads, torch {w['torch']}, commit {w['commit']}.)"


REGIONS: dict[str, Callable[[], str]] = {"catalogue": catalogue_table, "growth": growth, "peers": peers, "stream": stream}


def render(text: str) -> str:
    """The text with every region made anew; a region that is missing is an error, not a silence."""
    for name, make in REGIONS.items():
        region = re.compile(f"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        text, found = region.subn(lambda _, make=make: f"{make()}\n", text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"README.md needs one region between <!-- {name} --> and <!-- /{name} -->, not {found}")
    return text


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
