"""Pages of the site that come from the catalogue: one for each family, with options, costs and measured lengths."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from regard import CATALOGUE, Spec
from regard.bench.floors import TRAINING
from regard.cli.mechanism_table import make_mechanisms
from regard.text import growth
from tables_base import Made, code, if_there, table
from tables_speed import PLACE, SETS

FAMILIES = {
    "softmax": (
        "Full attention",
        "Take it first: at short lengths nothing here is faster, and every other family is an approximation of it or a choice "
        "against it. `additive` and `relu` are other scores and other weights at the same cost; `identity` is the control that "
        "tells whether a task needs a mixer at all.",
    ),
    "sparse": (
        "Patterns",
        "Take it where what matters is near, or at known places: windows for text and for long generation, global tokens for a "
        "question or a [CLS], strides for images, `sinks` for a stream without end. It is exact softmax over fewer pairs, so "
        "that a pretrained model keeps its weights. Every pair outside of the pattern is lost to the layer.",
    ),
    "kernel": (
        "Kernels and gated memories",
        "Take it for causal models of long sequences and for decoding in constant memory: the past is one matrix per head. "
        "What has to be found again word by word needs a large matrix, gates (`gla`) or the delta rule (`delta`), or some "
        "layers of softmax beside it. `performer` and `rfa` estimate softmax, `hedgehog` is made to imitate it.",
    ),
    "hybrid": (
        "Hybrids",
        "Take it where a window is too short and a kernel too blurred: near tokens are seen exactly, others through a memory.",
    ),
    "free": (
        "Without attention",
        "Take it as a cheap encoder, and to see what attention is worth: weights depend on positions, not on tokens. "
        "`fnet` learns nothing in its mixer. `gmlp` alone is causal.",
    ),
    "baselines": (
        "What came before",
        "Take one of them as the baseline of a comparison: a window of neighbours, a convolution, a recurrent network.",
    ),
    "sinkhorn": (
        "Sorted blocks",
        "Take it where a block needs one other block that is far away and not known in advance.",
    ),
    "graph": (
        "Graphs",
        "Take it where the data says who sees whom: citations, molecules, parse trees. The cost is that of the edges.",
    ),
    "cluster": (
        "Hashes and clusters",
        "Take it where the few keys that matter are known by similarity and may stand anywhere. In half precision a near tie may "
        "put a token into another bucket.",
    ),
    "synthesizer": (
        "Synthesized weights",
        "Take it to see how far weights come that compare no queries with keys; with `mix` it is added to softmax.",
    ),
    "low_rank": (
        "Fewer keys or queries",
        "Take it for encoders of a known length: `linformer` and `nystrom` pay for a few slots in place of n keys, `compressed` "
        "shortens the memory by a factor, `pooled_queries` the answers.",
    ),
}


def by_family() -> dict[str, list[dict[str, Any]]]:
    """Rows of the table of mechanisms by family, in the order of the catalogue."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in make_mechanisms()["mechanisms"]:
        found.setdefault(row["family"], []).append(row)
    return found


def family_page(family: str, rows: list[dict[str, Any]], results: dict[str, Made]) -> str:
    """Write the page of one family."""
    title, when = FAMILIES[family]
    parts = [f"# {title}", when, f"![the weights of each mechanism, and how it grows]({family}.png)"]
    parts.append("## Cost\nHow the FLOPs of a pass grow with n tokens, and the bytes of the streaming state after t tokens.")
    costs = [[code(r["name"]), growth(r["cost"], "n"), growth(r["memory"], "t"), ", ".join(r["claims"])] for r in rows]
    parts += [table(["", "cost", "memory", "can do"], costs), "## From which length it pays", pays_from(family, results)]
    parts.append(on_a_cpu(family, results["growth"]))
    return "\n\n".join([*parts, *(_mechanism(row) for row in rows)]) + "\n"


def _mechanism(row: dict[str, Any]) -> str:
    about = inspect.getdoc(CATALOGUE[row["name"]].make) or ""
    first, _, rest = about.partition("\n\n")
    options = [
        [code(name), code(repr(o["default"])) if "default" in o else "must be given"] for name, o in row["options"].items()
    ]
    built = f'```python\nlayer("{row["example"]}", width=256, heads=4)\n```'
    parts = [f"## {row['name']}", row["summary"], built]
    parts.append(table(["option", "default"], options) if options else "It has no options.")
    parts.append(f"{first}\n\n```text\n{rest.strip()}\n```")
    return "\n\n".join([*parts, f"Paper: {row['paper']}."])


def pays_from(family: str, results: dict[str, Made]) -> str:
    """Say from which measured length a training pass of each mechanism is faster than SDPA over all pairs."""
    body, settings = [], ""
    for made in (results[name] for name in SETS if name in results):
        shortest = {(r["spec"], r["causal"], r["level"]): r["n"] for r in sorted(made["rows"], key=lambda r: -r["n"])}
        for row in made.get("crossovers", []):
            if row["pass"] != TRAINING or Spec.of(row["spec"]).row.family != family:
                continue
            least = row["from"] == shortest[row["spec"], row["causal"], row["level"]]
            at = "at no length measured" if row["from"] is None else f"{row['from']:,.0f}"
            note = "the shortest length measured" if least else ""
            body.append([code(row["spec"]), "causal" if row["causal"] else "full", PLACE[row["level"]], at, note])
            given, w = made["settings"], made["made_with"]
            settings = f"{given['heads']} heads of {given['dim']}, {given['dtype']}, {w['device']}, torch {w['torch']}"
    if not body:
        return "On a GPU this family has not been measured."
    head = ["", "", "", "from n =", ""]
    return f"Forward + backward is faster than SDPA over all pairs ({settings}):\n\n{table(head, body)}"


def on_a_cpu(family: str, made: Made) -> str:
    """Say how many times as fast as softmax a training pass of each mechanism is, at the lengths measured on a CPU."""
    found: dict[tuple[str, bool], dict[int, float]] = {}
    for row in made["rows"]:
        if (
            row["times_faster_than_softmax"] is not None
            and row["spec"] != "softmax"
            and Spec.of(row["spec"]).row.family == family
        ):
            found.setdefault((row["spec"], row["causal"]), {})[row["n"]] = row["times_faster_than_softmax"]
    if not found:
        return "On a CPU this family has not been measured."
    lengths = sorted({n for times in found.values() for n in times})
    body = [
        [code(spec), "causal" if causal else "full", *(f"{times[n]:.2g} x" if n in times else "" for n in lengths)]
        for (spec, causal), times in found.items()
    ]
    given, w = made["settings"], made["made_with"]
    settings = f"{given['heads']} heads of {given['dim']}, {given['dtype']}, {w['device']}, torch {w['torch']}"
    text = f"Times as fast as softmax, forward + backward, on a CPU ({settings}); below 1 it is slower:"
    return f"{text}\n\n{table(['', '', *(f'n = {n:,}' for n in lengths)], body)}"


def draw_family(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the mechanisms of a family, with all patterns beside those of the family `sparse`."""
    from regard.plots.gallery import sheet

    specs = [row["example"] for row in rows]
    sheet(specs, patterns=rows[0]["family"] == "sparse").savefig(path)


def write_families(folder: Path) -> list[str]:
    """Write a page and a picture for each family, and return the names of the pages."""
    results = {name: if_there(f"bench_{name}") for name in SETS} | {"growth": if_there("growth")}
    folder.mkdir(parents=True)
    for family, rows in by_family().items():
        (folder / f"{family}.md").write_text(family_page(family, rows, results), encoding="utf-8")
        draw_family(rows, folder / f"{family}.png")
    return list(by_family())
