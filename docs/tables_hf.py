"""Tables of mechanisms inside models of transformers."""

from __future__ import annotations

from tables_base import Made, code, not_yet, short, table


def bert(made: Made, command: str) -> str:
    """Seconds of passes of BERT by attention, beside SDPA's in the same run."""
    if not made["rows"]:
        return not_yet(command)
    settings, with_ = made["settings"], made["made_with"]
    clock = "seconds" if settings["device"].startswith("cuda") else "processor_seconds"
    theirs = {row["pass"]: row[clock] for row in made["rows"] if row["mechanism"] == "sdpa"}
    body = []
    for row in made["rows"]:
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        ratio = f"{theirs[row['pass']] / row[clock]:.2f} x"
        far = f"{row['mean_distance_to_sdpa']:.1g}"
        body.append([row["pass"], code(row["mechanism"]), short(row[clock] * 1e3), ratio, memory, far])
    size = f"{settings['batch']} x {settings['length']:,} tokens, {settings['dtype']}, {settings['repeats']} repeats"
    source = f"({size}; {with_['device']}, {settings['threads']} threads, torch {with_['torch']}, commit {with_['commit']}.)"
    what = "Milliseconds" if clock == "seconds" else "Milliseconds of the processor"
    head = ["pass", "attention", "ms", "speed against SDPA", "peak, GiB", "mean distance to SDPA"]
    return f"{what}. {source}\n\n{table(head, body)}"
