"""The tables of converted models: bits per byte by stage, errors by layer, speed and memory of long sequences, long answers."""

from __future__ import annotations

from typing import Any

from tables_base import Made, code, not_yet, short, table

COMMAND = "hf_convert.py --device cuda"
SHARES = {0.0: "none", 0.25: "1/4", 0.5: "1/2"}


def conversion_quality(made: Made) -> str:
    """Bits per byte: the teacher, swapped without training, aligned, distilled."""
    rows = _of(made, "quality")
    teacher = _of(made, "teacher")
    if not rows or not teacher:
        return not_yet(COMMAND)
    (first,) = teacher
    s = made["settings"]
    size = f"{s['layers']} layers of width {s['width']} ({first['weights'] / 1e6:.1f} M weights)"
    seen = f"{first['tokens'] / 1e6:.0f} M bytes of papers in {first['seconds']:.0f} s, windows of {s['length']:,} bytes"
    text = f"A teacher of {size}, {seen}: **{first['bits']:.3f} bits per byte** of test. {made_where(made)}"
    body = [
        [
            row["mechanism"],
            SHARES.get(row["share"], row["share"]),
            ", ".join(map(str, row["kept"])),
            f"{row['swapped']:.3f}",
            "nothing to align" if row["aligned"] is None else f"{row['aligned']:.3f}",
            f"{row['distilled']:.3f}",
            f"{row['distilled'] - first['bits']:+.3f}",
            f"{row['tokens'] / 1e6:.1f} M",
        ]
        for row in rows
    ]
    head = ["attention", "kept", "layers", "swapped", "aligned", "distilled", "against the teacher", "bytes of distillation"]
    specs = "; ".join(f"{name}: {code(spec)}" for name, spec in s["mechanisms"].items())
    return f"{text}\n\n{specs}.\n\n{table(head, body)}"


def conversion_errors(made: Made) -> str:
    """Relative squared errors of each layer before and after alignment, the worst head, and which layers to keep."""
    rows = _of(made, "align")
    if not rows:
        return not_yet(COMMAND)
    parts = []
    for row in rows:
        before, after = row["error_before"], row["error_after"]
        layers = range(len(before))
        body = [
            ["before", *(f"{_mean(before[layer]):.3f}" for layer in layers)],
            ["after", *(f"{_mean(after[layer]):.3f}" for layer in layers)],
            ["worst head after", *(f"{max(after[layer]):.3f}" for layer in layers)],
        ]
        said = " ".join(row["sentences"][key] for key in ("0.25", "0.5") if key in row["sentences"])
        trained = f"{row['tokens'] / 1e6:.1f} M bytes in {row['seconds']:.0f} s" if row["steps"] else "no parameters to train"
        parts.append(f"{row['mechanism']} ({trained}). {said}\n\n" + table(["", *(f"layer {layer}" for layer in layers)], body))
    return "\n\n".join(parts)


def conversion_speed(made: Made) -> str:
    """Tokens a second and memory of one long sequence."""
    rows = _of(made, "speed")
    if not rows:
        return not_yet(COMMAND)
    (base,) = [row for row in rows if row["mechanism"] == "softmax"] or [rows[0]]
    body = []
    for row in rows:
        cells = [row["mechanism"], "all" if row["mechanism"] == "softmax" else SHARES.get(row["share"], row["share"])]
        for name in ("forward", "train"):
            speed = row[f"{name}_tokens_per_second"]
            cells += [f"{speed / 1e3:,.0f} k", f"{speed / base[f'{name}_tokens_per_second']:.2f} x", _gib(row[f"{name}_bytes"])]
        body.append(cells)
    head = ["attention", "kept", "forward, tokens a second", "", "GiB", "forward + backward", "", "GiB"]
    return f"One sequence of {made['settings']['long']:,} tokens, bfloat16. {made_where(made)}\n\n" + table(head, body)


def conversion_answers(made: Made) -> str:
    """Milliseconds a token and memory along one long answer of `generate`."""
    rows = [row for row in _of(made, "generate") if row["points"]]
    if not rows:
        return not_yet(COMMAND)
    usual = "; softmax with the usual cache" if any(row["mechanism"] == "softmax" for row in rows) else ""
    text = f"`model.generate` with `past_key_values=regard.hf.memory(model)`{usual}. One row, sampled."
    return f"{text} {made_where(made)}\n\n" + _along(rows)


def untrained_answers(made: Made) -> str:
    """The same by untrained weights, on another device."""
    rows = _of(made, "generate")
    if not rows:
        return not_yet("hf_convert.py --answers hybrid linear")
    count = made["made_with"]["threads"]
    threads = "one thread" if count == 1 else f"{count} threads"
    text = "The same model with random weights, whose speed and memory are the same, whole answers on a CPU: "
    text += f"{threads}, float32, time of the processor."
    return f"{text} {made_where(made)}\n\n" + _along(rows)


def _along(rows: list[dict[str, Any]]) -> str:
    """Five points of each answer."""
    body = []
    for row in rows:
        points = row["points"]
        chosen = sorted({round(i * (len(points) - 1) / 4) for i in range(5)})
        for place in chosen:
            point = points[place]
            memory = f"{point['cache_bytes'] / 2**20:.2f}"
            body.append([row["mechanism"], f"{point['t']:,}", f"{point['ms']:.2f}", short(1e3 / point["ms"]), memory])
    return table(["attention", "t", "ms a token", "tokens a second", "cache, MiB"], body)


def made_where(made: Made) -> str:
    w = made["made_with"]
    return f"({w['device']}, torch {w['torch']}, commit {w['commit']}.)"


def _of(made: Made, what: str) -> list[dict[str, Any]]:
    return [row for row in made["rows"] if row["what"] == what]


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _gib(number: int | None) -> str:
    return "?" if number is None else f"{number / 2**30:.2f}"
