"""Tables that `regard bench` prints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.console import columns, screen

if TYPE_CHECKING:
    from rich.table import Table


def print_speed(record: dict[str, Any], json_file: Path | None, out: Path | None) -> None:
    """Print times of mechanisms and peers, crossovers, missing peers, and what to do next."""
    from regard.bench.speed import OURS
    from regard.bench.summary import with_ratios

    console = screen()
    rows = record["rows"]
    groups = dict.fromkeys((row["pass"], row["level"], row["causal"]) for row in rows)
    ratios = {_key(row): row["ratios"] for row in with_ratios(rows)}
    for work, level, causal in groups:
        own = [row for row in rows if (row["pass"], row["level"], row["causal"]) == (work, level, causal)]
        what = "operation on q, k, v" if level == "core" else "whole layer"
        console.print(f"\n{work}, {'causal' if causal else 'bidirectional'}, {what}", style="bold", highlight=False)
        console.print(_speed_table(own, ratios, OURS), highlight=False)
    _print_crossovers(record)
    _print_missing(record)
    _print_next(record, json_file, out)


def _speed_table(rows: list[dict[str, Any]], ratios: dict[Any, dict[str, float]], ours: str) -> Table:
    table = columns("mechanism", "by", "n", "batch", "ms", "graph ms", "launches", "MiB", "of floor", "times as fast as")
    for row in rows:
        used = f" ({', '.join(row['backends'])})" if row.get("backends") else ""
        cells = [row["spec"], row["by"] + used, f"{row['n']:,}", str(row["batch"])]
        if "ms" not in row:
            table.add_row(*cells, "", "", "", "", "", row.get("reason", ""))
            continue
        numbers = [_short(row["ms"]), _short(row.get("graph_ms")), _count(row.get("launches")), _mebibytes(row)]
        floor = f"{100 * row['fraction']:.0f} % {row['floor_of']}" if "fraction" in row else ""
        beside = ratios.get(_key(row), {}) if row["by"] == ours else {}
        text = ", ".join(f"{name} {value:.2f} x" for name, value in beside.items())
        table.add_row(*cells, *numbers, floor, text)
    return table


def print_models(record: dict[str, Any], json_file: Path | None, _out: Path | None) -> None:
    """Print tokens a second and memory of whole models."""
    console = screen()
    settings = record["settings"]
    shape = f"{settings['depth']} layers, width {settings['width']}, {settings['tokens']:,} tokens, {settings['dtype']}"
    console.print(f"\nforward + backward of whole models, {shape}", style="bold", highlight=False)
    table = columns("mechanism", "model", "form", "n", "batch", "tokens a second", "ms", "MiB", "against softmax")
    for row in record["rows"]:
        form = "compiled" if row["compiled"] else "eager"
        cells = [row["spec"], row["model"], form, f"{row['n']:,}", str(row["batch"])]
        if "ms" not in row:
            table.add_row(*cells, "", "", "", row.get("reason", ""))
            continue
        full = next((x for x in record["rows"] if _same_model(x, row) and "ms" in x), None)
        ratio = f"{full['ms'] / row['ms']:.2f} x" if full else ""
        table.add_row(*cells, f"{row['tokens_per_second']:,.0f}", _short(row["ms"]), _mebibytes(row), ratio)
    console.print(table, highlight=False)
    _print_next(record, json_file, None)


def _same_model(other: dict[str, Any], row: dict[str, Any]) -> bool:
    keys = ("model", "compiled", "n")
    return other["spec"] == "softmax" and all(other[key] == row[key] for key in keys)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("spec", "causal", "level", "n", "pass"))


def _print_crossovers(record: dict[str, Any]) -> None:
    found = record.get("crossovers", [])
    if not found:
        return
    console = screen()
    console.print("\nfaster than SDPA over all pairs", style="bold", highlight=False)
    longest = max(row["n"] for row in record["rows"])
    table = columns("mechanism", "form", "level", "pass", "from n")
    for row in found:
        at = row["from"]
        text = f"not up to {longest:,}" if at is None else f"{at:,.0f}"
        table.add_row(row["spec"], "causal" if row["causal"] else "full", row["level"], row["pass"], text)
    console.print(table, highlight=False)


def _print_missing(record: dict[str, Any]) -> None:
    absent = [f"{name} ({why})" for name, why in record.get("peers", {}).items() if "pip install" in why or "needs" in why]
    if absent:
        screen().print(f"\nPeers that were not measured: {'; '.join(absent)}", style="dim", highlight=False, markup=False)


def _print_next(record: dict[str, Any], json_file: Path | None, out: Path | None) -> None:
    device = record["made_with"]["device"]
    kept = [f"numbers in {json_file}"] if json_file else ["--json FILE keeps the numbers"]
    if record["benchmark"] == "bench":
        kept.append(f"picture in {out}" if out else "--out speed.png draws them")
        kept.append("regard show SPEC explains a mechanism, regard bench --model measures whole models")
    else:
        kept.append("--compile adds torch.compile, --lengths 1k,4k,16k,64k,256k,1M goes further")
    screen().print(f"\n{device}. Next: {'; '.join(kept)}.", style="dim", highlight=False, markup=False)


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _mebibytes(row: dict[str, Any]) -> str:
    size = row.get("peak_bytes")
    return "" if size is None else f"{size / 2**20:,.0f}"
