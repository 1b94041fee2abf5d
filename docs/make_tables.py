"""Rewrites what is generated in the documents: each region between `<!-- name -->` and `<!-- /name -->`.

make tables
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from regard.analysis.position_properties import positions_table
from regard.cli.mechanism_table import catalogue_table
from regard.pretrained.families import families_table

sys.path.insert(0, str(Path(__file__).parent))  # a test runs this file from elsewhere
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import house
import tables_arena
import tables_bars
import tables_conversion
import tables_detection
import tables_features
import tables_graphs
import tables_hf
import tables_images
import tables_recipes
import tables_speech
import tables_speed
import tables_tasks as real
from tables_base import ROOT, Made, code, if_there, not_yet, result, short, table


def growth(name: str = "growth", at: int = 8192) -> str:
    """Milliseconds and MiB by length, and the exponents, for each spec and direction."""
    made = result(name)
    rows: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in made["rows"]:
        rows.setdefault((row["spec"], row["causal"]), []).append(row)
    lengths = sorted({row["n"] for row in made["rows"]})
    body = []
    for (spec, causal), own in rows.items():
        by = {row["n"]: row for row in own}
        cells = [f"{short(by[n]['fastest'] * 1e3)} / {mebibytes(by[n]['peak_bytes'])}" if n in by else "" for n in lengths]
        faster = by[at]["times_faster_than_softmax"] if at in by else None
        exponents = " / ".join(
            "" if own[0][key] is None else f"{own[0][key]:.2f}" for key in ("time_exponent", "memory_exponent")
        )
        body.append([code(spec), "causal" if causal else "", *cells, exponents, "" if faster is None else f"{faster:.1f} x"])
    head = ["", "", *(f"n = {n:,}" for n in lengths), "grows as n^", f"vs softmax at {at:,}"]
    return f"Forward + backward, milliseconds / MiB at the peak. {made_by(made)}\n\n" + table(head, body)


def mebibytes(number: int | None) -> str:
    return "?" if number is None else f"{number / 2**20:.0f}"


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


def recall() -> str:
    """Who can look up what it was told, and why not."""
    made = result("recall")
    s, body = made["settings"], []
    for r in made["rows"]:
        if "error" in r:
            body.append([code(r["spec"]), "", "", "", r["error"]])
        else:
            body.append([code(r["spec"]), r["form"], f"{r['accuracy']:.2f}", r["steps_to_99"] or "", r["why"]])
    text = (
        f"{s['pairs']} pairs of a key and a value, then {s['length'] - 2 * s['pairs']} keys: how many values are right. "
        f"A guess is right in {1 / s['values']:.2f}, one among the values told in {1 / s['pairs']:.2f}. "
        f"The same {s['depth']} blocks for all, at most {s['steps']:,} steps of {s['batch']} sequences. {made_by(made)}\n\n"
    )
    return text + table(["", "form", "accuracy", "steps to 99 %", "why not"], body)


def decoding(made: Made) -> str:
    """Beside Hugging Face's generate, with the same weights."""
    names = {"transformers": "transformers", "ready": "regard, `fast_decoder(model)`", "model": "regard, the model itself"}
    body = [
        [
            r["model"],
            r["batch"],
            "greedy" if r["beams"] == 1 else f"beam {r['beams']}",
            names.get(r["by"], r["by"]),
            short(r["tokens_per_second"]),
            f"{r['step_ms']:.1f}",
            f"{r['ratio']:.2f} x",
        ]
        for r in made["rows"]
    ]
    least = min(r.get("same", 1.0) for r in made["rows"])
    same = f" Of the tokens of beams, {100 * least:.2f} % or more are equal." if least < 1 else ""
    text = f"Depth {made['settings']['depth']}, a prompt of {made['settings']['prompt']} tokens.{same} {made_by(made)}\n\n"
    return text + table(["", "batch", "search", "by", "tokens a second", "ms a step", "against transformers"], body)


def step(made: Made) -> str:
    """What a step asks of the machine, before and now: one column each, where there is one."""
    if not made["rows"]:
        return not_yet("step.py --beside PATH")
    by: dict[str, dict[str, dict[str, Any]]] = {}
    for row in made["rows"]:
        by.setdefault(row["what"], {})[row["which"]] = row
    names = {"kernels": "kernels", "megabytes": "MB walked over", "cuda_kernels": "kernels on the GPU", "cuda_ms": "GPU ms"}
    names = {key: name for key, name in names.items() if any(key in row for row in made["rows"])}
    times = [which for which in ("before", "now") if any(row["which"] == which for row in made["rows"])]
    body = [[what, *(_count(own.get(which, {}).get(key)) for key in names for which in times)] for what, own in by.items()]
    s, w = made["settings"], made["made_with"]
    size = f"Width {s['width']}, depth {s['depth']}, a vocabulary of {s['vocab']:,}, {s['tokens']:,} tokens"
    head = ["", *(f"{name}, {which}" for name in names.values() for which in times)]
    return f"{size} in rows of {s['length']}. ({w['device']}, torch {w['torch']}, commit {w['commit']}.)\n\n" + table(head, body)


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def faults() -> str:
    """Runs that were killed, beside one that was not."""
    made = result("faults")
    kills = [kill["while"] for row in made["rows"] for kill in row["kills"]]
    same = ("same_last_weights", "same_chosen_weights", "same_optimizer", "same_metrics")
    equal = [f"{sum(row[key] for row in made['rows'])} of {len(made['rows'])}" for key in same]
    head = ["kill -9 while training", "while saving", "runs", "last weights equal", "chosen weights", "optimiser", "metrics"]
    return table(head, [[kills.count("training"), kills.count("saving"), len(made["rows"]), *equal]])


def made_by(made: dict[str, Any]) -> str:
    s, w = made["settings"], made["made_with"]
    size = f"{s['heads']} heads x {s['dim']}" if "dim" in s else f"width {s['width']}, {s['heads']} heads"
    return f"({size}, {s['dtype']}; {w['device']}, {w['threads']} threads, torch {w['torch']}, commit {w['commit']}.)"


def files() -> str:
    """Every file of the package with the first line of its docstring, by room in the order of imports."""

    def place(path: Path) -> tuple[int, str]:
        parts = path.relative_to(house.SOURCE).parts
        return house.ORDER.index(parts[0].removesuffix(".py")), str(path)

    rows = []
    for path in sorted(house.modules(house.SOURCE), key=place):
        if path.name != "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows.append([code(path.relative_to(house.SOURCE).as_posix()), doc.split("\n")[0].replace("|", "\\|")])
    return table(["file", "content"], rows)


def decode_step(made: Made) -> str:
    """Milliseconds of a decoding step by mechanism, and how much faster than `model.extend`."""
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in made["rows"]:
        rows.setdefault((row["mixer"], row["batch"], row["dtype"]), {})[row["by"]] = row
    ways = {"model.extend": "model.extend", "GraphedDecoder": "GraphedDecoder", "StaticDecoder": "StaticDecoder"}
    ways |= {"older": "the decoder before"} if any("older" in by for by in rows.values()) else {}
    body = []
    for (mixer, batch, dtype), by in rows.items():
        cells = []
        for name in ways:
            found = by.get(name)
            faster = f" ({found['speedup']:.1f} x)" if found and "speedup" in found else ""
            cells.append("" if found is None else f"{found['step_ms']:.2f}{faster}")
        body.append([code(mixer), str(batch), dtype, *cells])
    head = ["mechanism", "batch", "type", *ways.values()]
    made_with = made["made_with"]
    source = f"({made_with['device']}, torch {made_with['torch']}, commit {made_with['commit']}.)"
    text = f"Milliseconds of a step, and how many times as fast as `model.extend`. {source}"
    return f"{text}\n\n{table(head, body)}"


def speeds() -> dict[str, Made]:
    """The records of `regard bench` on a GPU by set."""
    return {name: if_there(f"bench_{name}") for name in tables_speed.NAMES}


REGIONS: dict[str, dict[str, Callable[[], str]]] = {
    "DESIGN.md": {"files": files},
    "README.md": {
        "catalogue": catalogue_table,
        "positions": positions_table,
        "decoders": lambda: tables_speed.decoders(if_there("bench_models")),
    },
    "docs/advise.md": {"advise_error": lambda: tables_speed.advise_error(if_there("advise_error"))},
    "docs/arena.md": {
        "arena_tasks": lambda: tables_arena.arena_tasks(if_there("arena_floors")),
        "arena_small": lambda: tables_arena.arena_scores(if_there("arena_small"), "arena_small"),
        "arena_rates": lambda: tables_arena.arena_rates(if_there("arena_small"), "recall"),
        "arena_mad": lambda: tables_arena.arena_scores(if_there("arena_mad"), "arena_mad"),
        "arena_mad_rates": lambda: tables_arena.arena_rates(if_there("arena_mad"), "mad_recall"),
        "arena_lra": lambda: tables_arena.arena_scores(if_there("arena_lra"), "arena_lra"),
        "arena_lra_rates": lambda: tables_arena.arena_rates(if_there("arena_lra"), "listops"),
        "lra_ranking": lambda: tables_arena.lra_ranking(if_there("arena_lra")),
        "recipes": lambda: tables_recipes.recipes(if_there("recipes")),
    },
    "docs/compare.md": {
        name: lambda name=name: tables_arena.grid_speed(if_there(name)) for name in ("grid_speed", "grid_speed_mad")
    },
    "docs/huggingface_conversion.md": {
        name: partial(lambda make: make(if_there("hf_convert")), getattr(tables_conversion, name))
        for name in ("conversion_quality", "conversion_errors", "conversion_speed", "conversion_answers")
    }
    | {"untrained_answers": lambda: tables_conversion.untrained_answers(if_there("hf_answers"))},
    "docs/huggingface.md": {
        "hf_bert_cpu": lambda: tables_hf.bert(if_there("hf_bert_cpu"), "hf_bert.py"),
        "hf_bert_cuda": lambda: tables_hf.bert(if_there("hf_bert_cuda"), "hf_bert.py --device cuda"),
    },
    "docs/numbers.md": {
        "growth": growth,
        "growth_kept": partial(growth, "growth_kept"),
        "recall": recall,
        "random_features": lambda: tables_features.random_features(if_there("random_features")),
        "peers": peers,
        "peers_cpu": lambda: tables_speed.peers_cpu(if_there("peers_cpu")),
        "bars": lambda: tables_bars.bars(speeds() | {"decode_step": if_there("decode_step")}),
        "train_speed": lambda: tables_speed.training(if_there("train_speed")),
        "speed": lambda: tables_speed.speed(speeds()),
        "stream": stream,
        "decoding": lambda: decoding(result("decoding")),
        "decoding_gpu": lambda: (
            decoding(made) if (made := if_there("decoding_gpu"))["rows"] else not_yet("decoding.py --device cuda")
        ),
        "decode_step": lambda: decode_step(result("decode_step")),
        "step": lambda: step(if_there("step")),
        "translation": lambda: real.translation(if_there("tasks"), if_there("floors")),
        "parts": lambda: real.parts(if_there("tasks")),
        "decodings": lambda: real.decodings(if_there("tasks")),
        "parallel": lambda: real.parallel(if_there("tasks"), if_there("nat_speed")),
        "tasks": lambda: real.tasks(if_there("tasks"), if_there("floors"), if_there("cpu_presets")),
        "boards": lambda: real.boards(if_there("tasks")),
        "cora": lambda: tables_graphs.cora(if_there("cora")),
        "tox21": lambda: tables_graphs.tox21(if_there("tox21")),
        "images": lambda: tables_images.image_scores(if_there("images")),
        "detection": lambda: tables_detection.detection(if_there("detection")),
        "gan": lambda: tables_detection.gan(if_there("gan")),
        "faults": faults,
    },
    "docs/speech.md": {
        "speech": lambda: tables_speech.speech(if_there("speech")),
        "synthesis": lambda: tables_speech.synthesis(if_there("synthesis")),
    },
    "docs/weights.md": {"families": families_table},
    "docs/training.md": {"cpu_presets": lambda: real.cpu_presets(if_there("cpu_presets"))},
}


def render(name: str) -> str:
    """A document with every region made anew; a region that is missing is an error, not a silence."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for region, make in REGIONS[name].items():
        found = re.compile(f"(?<=<!-- {region} -->\n).*?(?=<!-- /{region} -->)", re.DOTALL)
        text, count = found.subn(lambda _, make=make: f"{make()}\n", text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{name} needs one region between <!-- {region} --> and <!-- /{region} -->, not {count}")
    return text


if __name__ == "__main__":
    for document in REGIONS:
        (ROOT / document).write_text(render(document), encoding="utf-8")
