"""The tables of whole models on a GPU: tokens a second and memory by mechanism and length, compiled or not."""

from __future__ import annotations

from typing import Any

from tables_base import Made, code, not_yet, table

Row = dict[str, Any]
KINDS = {"decoder": "Decoders (causal)", "encoder": "Encoders"}
FULL = "softmax"


def model_tables(made: Made, compiled: Made) -> str:
    """One table for each kind of model with a column for each length, and the same of models that were compiled."""
    if not made["rows"]:
        return not_yet("bench_gpu.py --only models")
    s, w = made["settings"], made["made_with"]
    text = (
        f"Forward + backward of {s['depth']} layers of width {s['width']}, {s['tokens']:,} tokens in all or one sequence, "
        f"{s['dtype']} by autocast: thousand tokens a second (times as fast as softmax) / GiB at the peak. "
        f"({w['device']}, torch {w['torch']}, commit {w['commit']}.)"
    )
    tables = [_length_table(made["rows"], kind) for kind in KINDS]
    return "\n\n".join([text, *filter(None, tables), _compiled_tables(compiled, made["rows"])])


def _length_table(rows: list[Row], kind: str) -> str:
    own = [row for row in rows if row["model"] == kind and not row["compiled"]]
    if not own:
        return ""
    lengths = sorted({row["n"] for row in own})
    found = {(row["spec"], row["n"]): row for row in own}
    body = [[code(spec), *(_cell(found, spec, n) for n in lengths)] for spec in dict.fromkeys(row["spec"] for row in own)]
    return f"{KINDS[kind]}:\n\n{table(['mechanism', *(f'n = {n:,}' for n in lengths)], body)}"


def _cell(found: dict[tuple[str, int], Row], spec: str, n: int) -> str:
    row = found.get((spec, n))
    if row is None:
        return ""
    if "ms" not in row:
        return row["reason"]
    full = found.get((FULL, n), {})
    faster = f" ({full['ms'] / row['ms']:.2f} x)" if "ms" in full and spec != FULL else ""
    return f"{row['tokens_per_second'] / 1e3:,.0f}{faster} / {row['peak_bytes'] / 2**30:.1f}"


def _compiled_tables(made: Made, rows: list[Row]) -> str:
    """Models by torch.compile, one table for each kind of model, beside the same ones without it."""
    if not made["rows"]:
        return f"Models by torch.compile: {not_yet('bench_gpu.py --compiled 12')}"
    plain = {(row["spec"], row["model"], row["n"]): row for row in rows if not row["compiled"] and "ms" in row}
    w = made["made_with"]
    text = (
        "The same by torch.compile, block by block (`regard.blocks.compile_blocks`): thousand tokens a second (times as fast as "
        "not compiled) / GiB at the peak. A model is compiled once, with dynamic shapes, for all lengths; those with an asterisk "
        "for one length: their weights depend on it, or (causal `sinkhorn`) inductor cannot split loops over a number of blocks "
        "that it does not know. What was left out or ran out of memory without torch.compile is left out here; an empty cell was "
        "not measured. "
        f"({w['device']}, torch {w['torch']}, commit {w['commit']}.)"
    )
    tables = []
    for kind, title in KINDS.items():
        own = [row for row in made["rows"] if row["model"] == kind]
        lengths = sorted({row["n"] for row in own})
        found = {(row["spec"], row["n"]): row for row in own}
        order = dict.fromkeys(row["spec"] for row in rows if row["model"] == kind)
        specs = [spec for spec in order if any((spec, n) in found for n in lengths)]
        body = [[code(spec), *(_compiled_cell(found.get((spec, n)), plain) for n in lengths)] for spec in specs]
        if body:
            tables.append(f"{title}, compiled:\n\n{table(['mechanism', *(f'n = {n:,}' for n in lengths)], body)}")
    return "\n\n".join([text, *tables])


def _compiled_cell(row: Row | None, plain: dict[tuple[str, str, int], Row]) -> str:
    if row is None:
        return ""
    if "ms" not in row:
        return row["reason"]
    without = plain.get((row["spec"], row["model"], row["n"]))
    faster = f" ({without['ms'] / row['ms']:.2f} x)" if without else ""
    mark = "" if row.get("dynamic") else "*"
    return f"{row['tokens_per_second'] / 1e3:,.0f}{mark}{faster} / {row['peak_bytes'] / 2**30:.1f}"
