"""The table of aims on a GPU: what each mechanism should reach beside its peers, and what it reached in results/bench_*.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from regard.bench.floors import FORWARD, TRAINING
from regard.bench.summary import ratio
from regard.bench.token_step import STEP
from regard.mixers.cluster import Reformer
from tables_base import Made, code, not_yet, short, table

K = 1024
OURS, FULL, FLEX, FLA = "regard", "SDPA", "FlexAttention", "flash-linear-attention"
WINDOWS = ("Local(128)", "Local(256)")
GLOBAL = "Local(128) | Global(first=2)"
BOTH = (FORWARD, TRAINING)
MOST_MEMORY = 1.25

Row = dict[str, Any]
Records = dict[str, Made]
Values = list[tuple[str, float]]  # what was measured, and its number


@dataclass(frozen=True)
class Bar:
    """Hold one aim: its text, the number to reach (`most`: not to exceed), and how the numbers are read from the records."""

    text: str
    limit: float
    values: Callable[[Records], Values]
    most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit


def faster(
    name: str, peer: str, lengths: Sequence[int], works: Sequence[str] = (TRAINING,), *, plain: bool = False, **only: Any
) -> Callable[[Records], Values]:
    """Times as fast as a peer in the same run; `only` gives values that rows have, `specs` those that start so."""
    specs = only.pop("specs", ("",))

    def values(records: Records) -> Values:
        rows = records[name]["rows"]
        found: Values = []
        for row in _own(rows, specs, lengths, works, only):
            other = _peer(rows, row, peer)
            value = None if other is None else _plain_ratio(row, other) if plain else ratio(row, other)
            if value is not None:
                found.append((_label(row), value))
        return found

    return values


def _own(rows: list[Row], specs: Sequence[str], lengths: Sequence[int], works: Sequence[str], only: dict[str, Any]) -> list[Row]:
    return [
        row
        for row in rows
        if row["by"] == OURS
        and row["n"] in lengths
        and row.get("pass", TRAINING) in works
        and any(row["spec"] == spec or row["spec"].startswith(spec + "(") or not spec for spec in specs)
        and all(row[key] == value for key, value in only.items())
    ]


def _peer(rows: list[Row], row: Row, peer: str) -> Row | None:
    keys = ("causal", "level", "n", "pass") if peer == FULL else ("spec", "causal", "level", "n", "pass")
    return next((x for x in rows if x["by"] == peer and all(x[key] == row[key] for key in keys)), None)


def _plain_ratio(ours: Row, theirs: Row) -> float | None:
    return theirs["ms"] / ours["ms"] if "ms" in ours and "ms" in theirs else None


def _label(row: Row) -> str:
    form = "causal" if row.get("causal", True) else "full"
    return f"{code(row['spec'])} {row.get('model', form)}, n = {row['n']:,}, {row.get('pass', TRAINING)}"


def linear_growth(records: Records) -> Values:
    """Tokens a second at 1M tokens against those at 256k."""
    rows = [row for row in records["windows"]["rows"] if row["by"] == OURS and row["spec"] == "Local(256)" and row["causal"]]
    by = {(row["n"], row["pass"]): row["ms"] for row in rows if "ms" in row}
    works = [work for work in BOTH if (1024 * K, work) in by and (256 * K, work) in by]
    return [(f"`Local(256)` causal, {work}", 4 * by[256 * K, work] / by[1024 * K, work]) for work in works]


def copy_fraction(records: Records) -> Values:
    rows = [row for row in records["linear"]["rows"] if row["by"] == OURS and row["spec"] == "linear" and not row["causal"]]
    return [(_label(row), row["fraction"]) for row in rows if row["pass"] == FORWARD and row.get("fraction")]


def rank_fraction(records: Records) -> Values:
    """Part of the floor that mechanisms of blocks and low ranks reach: most of their work are products of matrices."""
    names = ("sinkhorn", "linformer", "compressed", "nystrom")
    rows = _own(records["others"]["rows"], names, (4 * K, 16 * K), BOTH, {})
    return [(_label(row), row["fraction"]) for row in rows if row.get("fraction")]


def rounds_memory(records: Records) -> Values:
    """Peak memory of forward and backward against queries and values, by round of hashing."""
    made = records["others"]
    if not made["rows"]:
        return []
    s = made["settings"]
    inputs = 2 * s["tokens"] * s["heads"] * s["dim"] * 2  # queries, which are the keys, and values of two bytes
    rounds = Reformer.__init__.__kwdefaults__["rounds"]
    rows = _own(made["rows"], ("reformer",), (4 * K, 16 * K), (TRAINING,), {"level": "core"})
    return [(_label(row), row["peak_bytes"] / inputs / rounds) for row in rows if "peak_bytes" in row]


def memory(records: Records) -> Values:
    """Peak memory against SDPA's in the same run, from n = 8k on."""
    found: Values = []
    for name, specs in (("windows", ("",)), ("linear", ("",)), ("others", ("performer", "efficient"))):
        rows = records[name]["rows"]
        for row in _own(rows, specs, (16 * K, 64 * K), (TRAINING,), {"level": "core"}):
            other = _peer(rows, row, FULL)
            if other is not None and "peak_bytes" in row and "peak_bytes" in other:
                found.append((_label(row), row["peak_bytes"] / other["peak_bytes"]))
    return found


def models(length: int) -> Callable[[Records], Values]:
    """Passes of a decoder against one with softmax, without torch.compile."""

    def values(records: Records) -> Values:
        rows = [row for row in records["models"]["rows"] if row["model"] == "decoder" and not row["compiled"] and "ms" in row]
        times = {row["spec"]: row for row in rows if row["n"] == length}
        if "softmax" not in times:
            return []
        chosen = [spec for spec in ("Local(256)", "linear", "retention") if spec in times]
        return [(_label(times[spec]), times["softmax"]["ms"] / times[spec]["ms"]) for spec in chosen]

    return values


def greedy(records: Records) -> Values:
    """Tokens a second of greedy decoding, each in its fastest way, against softmax in its own."""
    best: dict[tuple[str, int], float] = {}
    for row in records["decode_step"]["rows"]:
        if row["dtype"] == "bfloat16":
            key = row["mixer"], row["batch"]
            best[key] = max(best.get(key, 0.0), row["tokens_per_second"])
    pairs = [key for key in best if key[0] in ("gla", "Local(64)") and ("softmax", key[1]) in best]
    return [(f"{code(mixer)}, {batch} rows", best[mixer, batch] / best["softmax", batch]) for mixer, batch in pairs]


BARS = (
    Bar("windows against FlexAttention, forward", 1.5, faster("windows", FLEX, (4 * K, 16 * K), (FORWARD,), specs=WINDOWS)),
    Bar("windows against FlexAttention, forward + backward", 1.3, faster("windows", FLEX, (4 * K, 16 * K), specs=WINDOWS)),
    Bar("windows against causal SDPA, n = 4k", 2, faster("windows", FULL, (4 * K,), BOTH, specs=WINDOWS, causal=True)),
    Bar("windows against causal SDPA, n = 64k", 10, faster("windows", FULL, (64 * K,), BOTH, specs=WINDOWS, causal=True)),
    Bar("speed at 1M tokens against that at 256k", 0.9, linear_growth),
    Bar(
        "windows with global tokens, bigbird, longformer against FlexAttention, n = 4k",
        4,
        faster("patterns", FLEX, (4 * K,), BOTH),
    ),
    Bar(
        "longformer against Hugging Face's layer",
        10,
        faster("patterns", "transformers Longformer", (4 * K, 16 * K), BOTH, level="layer"),
    ),
    Bar(
        "bigbird against Hugging Face's layer",
        10,
        faster("patterns", "transformers BigBird", (4 * K, 16 * K), BOTH, level="layer"),
    ),
    Bar("windows with global tokens against SDPA, n = 2k", 1, faster("patterns", FULL, (2 * K,), specs=(GLOBAL,))),
    Bar("bigbird against SDPA, n = 4k", 1, faster("patterns", FULL, (4 * K,), specs=("bigbird",))),
    Bar("linear against flash-linear-attention, normalised", 4, faster("linear", FLA, (4 * K, 64 * K), specs=("linear",))),
    Bar(
        "retention, gla, delta against flash-linear-attention",
        1.5,
        faster("linear", FLA, (4 * K, 16 * K, 64 * K), specs=("retention", "gla", "delta")),
    ),
    Bar("bidirectional linear, forward: part of the bandwidth of a copy", 0.5, copy_fraction),
    Bar("performer against performer-pytorch", 15, faster("others", "performer-pytorch", (4 * K, 16 * K))),
    Bar("reformer against reformer-pytorch", 10, faster("others", "reformer-pytorch", (4 * K, 16 * K))),
    Bar("routing against routing-transformer", 5, faster("others", "routing-transformer", (4 * K, 16 * K))),
    Bar("sinkhorn against sinkhorn-transformer", 5, faster("others", "sinkhorn-transformer", (4 * K, 16 * K))),
    Bar("nystrom against nystrom-attention", 5, faster("others", "nystrom-attention", (4 * K, 16 * K))),
    Bar("linformer against linformer", 5, faster("others", "linformer", (4 * K, 16 * K))),
    Bar("sinkhorn, linformer, nystrom: part of the rate of plain products", 0.5, rank_fraction),
    Bar("memory of reformer a round, against its inputs", 4, rounds_memory, most=True),
    Bar("softmax against SDPA, launches included", 0.97, faster("softmax", FULL, (4 * K, 16 * K, 64 * K), BOTH, plain=True)),
    Bar("decoders of Local(256), linear, retention against softmax, n = 4k", 1, models(4 * K)),
    Bar("the same, n = 16k", 1.5, models(16 * K)),
    Bar("the same, n = 64k", 5, models(64 * K)),
    Bar(
        "a decoding step after 16k tokens, 32 rows, against SDPA with a KV cache",
        3,
        faster("steps", FULL, (16 * K,), (STEP,), specs=("linear", "Local(256) | Global(first=4)")),
    ),
    Bar("greedy decoding of gla and a window against softmax", 1, greedy),
    Bar("memory of windows and linear rows against SDPA, n = 16k and 64k", MOST_MEMORY, memory, most=True),
)


def bars(records: Records) -> str:
    """One line for each aim: the worst and the best number, and the cases that miss it."""
    body = []
    for bar in BARS:
        values = bar.values(records)
        aim = f"{'at most' if bar.most else 'at least'} {bar.limit:g}"
        if not values:
            body.append([bar.text, aim, "not measured", ""])
            continue
        numbers = sorted((value for _, value in values), reverse=bar.most)
        reached = short(numbers[0]) if len(numbers) == 1 else f"{short(numbers[0])} to {short(numbers[-1])}"
        missed = [f"{label}: {short(value)}" for label, value in values if not bar.met(value)]
        body.append(
            [bar.text, aim, reached, f"missed in {len(missed)} of {len(values)}: {'; '.join(missed)}" if missed else "yes"]
        )
    if all(line[2] == "not measured" for line in body):
        return not_yet("bench_gpu.py")
    return table(["aim", "", "reached, worst to best", "met"], body)
