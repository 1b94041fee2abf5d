"""The tables of speed on a GPU, from results/bench_*.json: times, floors, ratios to peers, crossovers, whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.bench.floors import TRAINING
from regard.bench.summary import best_time, ratio
from tables_base import Made, code, not_yet, short, table
from tables_models import model_tables

SETS = {
    "windows": "Sliding windows",
    "patterns": "Windows with global tokens, Longformer, BigBird",
    "linear": "Linear attention, retention, gated linear attention, the delta rule",
    "others": "Random features, hashes, clusters, sorts and low ranks",
    "softmax": "Softmax beside the bare operation of PyTorch",
    "steps": "One decoding step of a layer",
}
MODELS, LENGTHS, COMPILED = "models", "lengths", "compiled"
NAMES = (*SETS, MODELS, LENGTHS, COMPILED)
PLACE = {"core": "operation", "layer": "layer"}
OURS, FULL = "regard", "SDPA"

Row = dict[str, Any]


def speed(results: dict[str, Made]) -> str:
    """One table for each set; `results` has a record by the name of each, without rows where it was not measured."""
    parts = [f"### {title}\n{_set_table(results[name], name)}" for name, title in SETS.items()]
    models = results[MODELS] | {"rows": results[MODELS]["rows"] + results[LENGTHS]["rows"]}
    parts.append(f"### Whole models\n{model_tables(models, results[COMPILED])}")
    return "\n\n".join(parts)


def _set_table(made: Made, name: str) -> str:
    """One line for each mechanism, form, level and length, the passes side by side."""
    if not made["rows"]:
        return not_yet(f"bench_gpu.py --only {name}")
    own = [row for row in made["rows"] if row["by"] == OURS]
    passes = list(dict.fromkeys(row["pass"] for row in own))
    keys = dict.fromkeys(_place(row) for row in own)
    body = [_line([row for row in own if _place(row) == key], made["rows"]) for key in keys]
    head = ["mechanism", "", "n", "ms", "as a graph", "launches", "MiB", "of the floor", "peers: ms, times as fast"]
    return f"{' / '.join(passes)}. {_setting(made)}\n\n{table(head, body)}{_missing(made)}{_crossed(made)}"


def decoders(made: Made) -> str:
    """Decoders that were measured at several lengths: time of a training pass against that of softmax, one line each."""
    rows = [row for row in made["rows"] if row["model"] == "decoder" and not row["compiled"] and "ms" in row]
    times = {(row["spec"], row["n"]): row["ms"] for row in rows}
    full = sorted(n for spec, n in times if spec == "softmax")
    if not full:
        return not_yet("bench_gpu.py --only models")
    own = [spec for spec in dict.fromkeys(spec for spec, _ in times) if all((spec, n) in times for n in full)]
    body = [[code(spec), *(f"{times['softmax', n] / times[spec, n]:.2f} x" for n in full)] for spec in own if spec != "softmax"]
    given = made["settings"]["parts"][0]
    setting = (
        f"{given['depth']} layers of width {given['width']}, {given['dtype']}, {given['tokens']:,} tokens in all or one sequence"
    )
    made_with = f"{made['made_with']['device']}, torch {made['made_with']['torch']}, commit {made['made_with']['commit']}"
    head = ["decoder, forward + backward, times as fast as softmax", *(f"n = {n:,}" for n in full)]
    return f"{table(head, body)}\n\n{setting}, not compiled; {made_with}."


def _place(row: Row) -> tuple[Any, ...]:
    return row["spec"], row["causal"], row["level"], row["n"]


def _line(own: list[Row], rows: list[Row]) -> list[str]:
    first = own[0]
    form = "causal" if first["causal"] else "full"
    used = ", ".join(dict.fromkeys(name.split(": ")[1] for row in own for name in row.get("backends", [])))
    where = ", ".join(filter(None, (form, PLACE[first["level"]], used)))
    start = [code(first["spec"]), where, f"{first['n']:,}"]
    if not any("ms" in row for row in own):
        return [*start, "", "", "", "", "", first.get("reason", "")]
    cells = [
        _cells(own, lambda row: short(row["ms"]) if "ms" in row else "-"),
        _cells(own, lambda row: short(row["graph_ms"]) if row.get("graph_ms") else "-"),
        _cells(own, lambda row: f"{row['launches']:,}" if "launches" in row else "-"),
        _cells(own, lambda row: f"{row['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in row else "-"),
        _cells(own, lambda row: f"{100 * row['fraction']:.0f} % {row['floor_of']}" if "fraction" in row else "-"),
    ]
    names = dict.fromkeys(row["by"] for mine in own for row in _own_peers(rows, mine))
    return [*start, *cells, "; ".join(_peer(name, own, rows) for name in names)]


def _cells(own: list[Row], text: Callable[[Row], str]) -> str:
    return " / ".join(text(row) for row in own)


def _peer(name: str, own: list[Row], rows: list[Row]) -> str:
    """Times of a peer in every pass, and how many times as long it takes; or why there are none."""
    found = [(mine, next((x for x in _own_peers(rows, mine) if x["by"] == name), None)) for mine in own]
    reasons = [peer["reason"] for _, peer in found if peer is not None and "reason" in peer]
    if reasons and len(reasons) == len(found):
        return f"{name}: {reasons[0]}"
    times = " / ".join("-" if peer is None or not best_time(peer) else short(best_time(peer) or 0) for _, peer in found)
    ratios = [None if peer is None else ratio(mine, peer) for mine, peer in found]
    faster = " / ".join("-" if value is None else f"**{value:.2f}**" for value in ratios)
    return f"{name} {times}: {faster} x"


def _own_peers(rows: list[Row], row: Row) -> list[Row]:
    """Peers of a row, SDPA over all pairs first."""
    keys = ("causal", "level", "n", "pass")
    alike = [x for x in rows if x["by"] != OURS and all(x[key] == row[key] for key in keys)]
    full = [x for x in alike if x["by"] == FULL][:1]
    return full + [x for x in alike if x["by"] != FULL and x["spec"] == row["spec"]]


def _setting(made: Made) -> str:
    s, w = made["settings"], made["made_with"]
    size = f"{s['heads']} heads x {s['dim']}, {s['dtype']}, {s['tokens']:,} tokens in all"
    rates = made["rates"]
    reached = f"copies {rates['bytes'] / 1e12:.1f} TB/s, products of matrices {rates['flops'] / 1e12:.0f} TFLOP/s"
    return f"({size}; {w['device']}: {reached}; torch {w['torch']}, commit {w['commit']}.)"


def _missing(made: Made) -> str:
    absent = [name for name, why in made.get("peers", {}).items() if "not installed" in why]
    return f"\n\nNot installed in this run: {', '.join(absent)}." if absent else ""


def _crossed(made: Made) -> str:
    """From which length a mechanism beats SDPA over all pairs, forward + backward."""
    found: dict[str, list[str]] = {}
    for row in made.get("crossovers", []):
        if row["pass"] == TRAINING:
            at = "at none of these lengths" if row["from"] is None else f"from n = {row['from']:,.0f}"
            form = "causal" if row["causal"] else "full"
            found.setdefault(row["spec"], []).append(f"{at} ({form}, {PLACE[row['level']]})")
    if not found:
        return ""
    texts = [f"`{spec}` {', '.join(dict.fromkeys(where))}" for spec, where in found.items()]
    return "\n\nForward + backward is faster than SDPA over all pairs: " + "; ".join(texts) + "."


def advise_error(made: Made) -> str:
    """Predicted and measured milliseconds of a training step, and the error, by mechanism and length."""
    if not made["rows"]:
        return not_yet("advise_error.py")
    lengths = sorted({row["n"] for row in made["rows"]})
    found = {(row["spec"], row["n"]): row for row in made["rows"]}
    body = []
    for spec in dict.fromkeys(row["spec"] for row in made["rows"]):
        cells = []
        for n in lengths:
            row = found.get((spec, n), {})
            cells.append(_predicted(row) if "error" in row else row.get("reason", ""))
        body.append([code(spec), *cells])
    model, machine = made["settings"]["model"], made["made_with"]
    worst = max(abs(row["error"]) for row in made["rows"] if "error" in row)
    text = (
        f"An encoder of {model['depth']} layers, width {model['width']}, {model['heads']} heads, {model['tokens']:,} tokens in "
        f"all, {model['dtype']}, on {machine['device']} (torch {machine['torch']}, commit {machine['commit']}): milliseconds of "
        f"a training step, predicted from the model with `{made['settings']['base']}` / measured (error). The largest error is "
        f"{100 * worst:.1f} %."
    )
    return f"{text}\n\n{table(['', *(f'n = {n:,}' for n in lengths)], body)}"


def _predicted(row: dict[str, Any]) -> str:
    return f"{short(row['predicted_ms'])} / {short(row['measured_ms'])} ({100 * row['error']:+.1f} %)"


def training(made: Made) -> str:
    """Tokens a second of whole runs of `regard train` in mixed precision."""
    if not made["rows"]:
        return not_yet("train_speed.py")
    s, w = made["settings"], made["made_with"]
    found = {(row["mixer"], row["form"]): row for row in made["rows"]}
    forms = list(dict.fromkeys(row["form"] for row in made["rows"]))
    mixers = dict.fromkeys(row["mixer"] for row in made["rows"])
    body = [[code(mixer), *(_tokens(found, mixer, form) for form in forms)] for mixer in mixers]
    text = (
        f"`regard train --set precision={s['precision']}`: depth {s['depth']}, width {s['width']}, windows of {s['window']:,} "
        f"characters, {s['batch_tokens']:,} tokens an update, optimiser and data included. ({w['device']}, torch {w['torch']}, "
        f"commit {w['commit']}.)"
    )
    heads = {"eager": "thousand tokens a second (against softmax)", "graphs": "with `--set graphs=true`"}
    return f"{text}\n\n{table(['mechanism', *(heads[form] for form in forms)], body)}"


def _tokens(found: dict[tuple[str, str], Row], mixer: str, form: str) -> str:
    """Thousand tokens a second of a run, and how many times those of softmax in the same form."""
    row, full = (found.get((name, form), {}) for name in (mixer, "softmax"))
    if "tokens_per_second" not in row:
        return row.get("reason", "")
    own = row["tokens_per_second"]
    against = f" ({own / full['tokens_per_second']:.2f} x)" if "tokens_per_second" in full and mixer != "softmax" else ""
    return f"{own / 1e3:,.0f}{against}"


def peers_cpu(made: Made) -> str:
    """Milliseconds of packages and of ours on a CPU, forward + backward, and how many times as fast ours is."""
    if not made["rows"]:
        return not_yet("peers_cpu.py")
    lengths = sorted({row["n"] for row in made["rows"]})
    found = {(row["spec"], row["causal"], row["peer"], row["level"], row["n"]): row for row in made["rows"]}
    body = []
    for spec, causal, peer in dict.fromkeys(key[:3] for key in found):
        cells = [_beside(found.get((spec, causal, peer, level, n), {})) for level in PLACE for n in lengths]
        if any(cells):
            body.append([code(spec) + (", causal" if causal else ""), peer, *cells])
    settings, machine = made["settings"], made["made_with"]
    clock = {"wall": "time that passed", "cpu": "time in which the process ran"}[settings["clock"]]
    text = (
        f"Forward + backward on a CPU: milliseconds of the package / of regard, and the median of the ratios of calls in turn "
        f"({settings['heads']} heads x {settings['dim']}, one sequence, {settings['dtype']}, {settings['threads']} thread(s), "
        f"{clock}; {machine['device']}, torch {machine['torch']}, commit {machine['commit']})."
    )
    head = ["", "package", *(f"{name}, n = {n:,}" for name in PLACE.values() for n in lengths)]
    return f"{text}\n\n{table(head, body)}"


def _beside(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return row.get("reason", "")
    return f"{short(row['peer_ms'])} / {short(row['ms'])} ({row['ratio']:.2f} x)"
