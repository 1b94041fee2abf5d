"""Summarise the records of a comparison: a row for each task and mixer, with intervals and costs beside softmax."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regard.arena.arena_catalogue import short_task
from regard.arena.trivial_floors import trivial
from regard.bench.summary import crossing
from regard.compare.cell_record import LESS_IS_BETTER, CellRecord, is_better
from regard.plots.colours import FAMILY_ORDER

FULL_MIXER = "softmax"
NORMAL = 1.96  # standard deviations of a 95 % interval
STUDENT = (  # the same for few seeds, by degrees of freedom from 1 on
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_LOST = {"missing data": "without data"}
SPEEDS = ("train_tokens_per_s", "infer_tokens_per_s", "decode_tokens_per_s")
MEMORIES = ("peak_bytes", "state_bytes")


class SliceScore(NamedTuple):
    """Hold the score of the targets that have one value of a slice."""

    score: float  # the mean over seeds
    targets: int
    low: float | None  # of the 95 % interval
    high: float | None


@dataclass
class ComparedRow:
    """Hold the result of one mixer on one task."""

    task: str
    mixer: str
    family: str
    metric: str
    length: int
    reason: str = ""  # why there is no score
    scores: list[float] = field(default_factory=list)  # on test, one a seed
    score: float | None = None  # their mean
    low: float | None = None  # of the 95 % interval
    high: float | None = None
    interval: str = ""  # how it was made
    val: float | None = None
    lr: float | None = None
    parameters: int | None = None
    note: str = ""
    lost: str = ""  # how many seeds of the chosen learning rate have no score, and why: "1 of 3 seeds diverged"
    costs: dict[str, Any] = field(default_factory=dict)
    by_length: list[dict[str, Any]] = field(default_factory=list)
    wins_from: float | None = None  # tokens of a sequence from which a training step is faster than that of softmax
    wins_from_forward: float | None = None  # the same of a forward pass
    rates: list[tuple[float, float | None, str]] = field(default_factory=list)  # lr, val, status
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)  # step, loss, val, seconds, with the chosen lr
    slices: dict[str, dict[str, SliceScore]] = field(default_factory=dict)
    train_seconds: float | None = None
    weights: str = ""  # of the first seed

    @property
    def less_is_better(self) -> bool:
        return self.metric in LESS_IS_BETTER

    @property
    def told_name(self) -> str:
        """Return the mixer, with the seeds that have no score behind it."""
        return f"{self.mixer} ({self.lost})" if self.lost else self.mixer


@dataclass
class ComparedTask:
    """Hold what all rows of a task share."""

    name: str
    title: str
    metric: str
    length: int
    causal: bool
    floors: dict[str, float]

    @property
    def label(self) -> str:
        """Return the name with those of its options that are not the usual ones."""
        return short_task(self.name)

    @property
    def best_floor(self) -> float | None:
        found = [value for value in trivial(self.floors).values() if math.isfinite(value)]
        if not found:
            return None
        return min(found) if self.metric in LESS_IS_BETTER else max(found)


@dataclass
class Comparison:
    """Hold the whole comparison: tasks, rows (the best first in every task), and the settings that all cells share."""

    tasks: list[ComparedTask]
    rows: list[ComparedRow]
    records: list[CellRecord]
    made_with: dict[str, Any]

    def of_task(self, name: str) -> list[ComparedRow]:
        return [row for row in self.rows if row.task == name]

    @property
    def families(self) -> list[str]:
        """Return the families that occur, those of the catalogue in its order."""
        places = {family: place for place, family in enumerate(FAMILY_ORDER)}
        return sorted({row.family for row in self.rows}, key=lambda family: (places.get(family, len(places)), family))


def compare_records(records: Sequence[CellRecord]) -> Comparison:
    """Summarise records. Groups without a score come last, with the reason."""
    groups: dict[tuple[str, str], list[CellRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    rows = [_compared(found) for found in groups.values()]
    tasks = {record.task: _task(record) for record in sorted(records, key=lambda record: record.task)}
    for record in records:
        tasks[record.task].floors |= record.floors
    names = list(tasks)
    rows.sort(key=lambda row: (names.index(row.task), *_order(row)))
    for row in rows:
        _add_crossings(row, rows)
    machine: dict[str, Any] = next((record.settings["made_with"] for record in records if "made_with" in record.settings), {})
    return Comparison(list(tasks.values()), rows, list(records), machine)


def _task(record: CellRecord) -> ComparedTask:
    return ComparedTask(record.task, record.title, record.metric, record.length, record.causal, dict(record.floors))


def _order(row: ComparedRow) -> tuple[bool, float, str]:
    score = row.score or 0.0
    return row.score is None, score if row.less_is_better else -score, row.mixer


def _compared(records: Sequence[CellRecord]) -> ComparedRow:
    first = records[0]
    row = ComparedRow(first.task, first.mixer, first.family, first.metric, first.length)
    row.parameters = first.parameters
    row.note = first.parameters_note
    row.rates = sorted(((r.lr, r.val, r.status) for r in records if r.seed == 0), key=lambda point: point[0])
    final = _chosen_cells([r for r in records if r.final and r.test is not None])
    if not final:
        failed = next((r for r in records if r.status != "done"), None)
        row.reason = "not finished" if failed is None else f"{failed.status}: {failed.reason}"
        return row
    row.scores = [r.test for r in final if r.test is not None]
    row.score = statistics.fmean(row.scores)
    row.low, row.high, row.interval = score_interval(row.scores, final[0].test_count, first.metric)
    head = final[0]
    row.val, row.lr, row.curve, row.train_seconds, row.weights = head.val, head.lr, head.curve, head.train_seconds, head.weights
    row.lost = _lost_seeds([r for r in records if r.lr == row.lr])
    row.note = "; ".join(filter(None, [row.note, row.lost]))
    row.slices = _mean_slices(final)
    row.costs = _with_decoding(next((r.costs for r in final if r.costs), {}))
    row.by_length = next((r.cost_by_length for r in final if r.cost_by_length), [])
    return row


def _chosen_cells(final: Sequence[CellRecord]) -> list[CellRecord]:
    """Return final cells by seed; where an earlier run chose another learning rate, those of the best on validation."""
    best: CellRecord | None = None
    for record in final:
        if record.seed == 0 and record.val is not None and (best is None or is_better(record.metric, record.val, best.val)):
            best = record
    chosen = [record for record in final if best is None or record.lr == best.lr]
    return sorted(chosen, key=lambda record: record.seed)


def _lost_seeds(records: Sequence[CellRecord]) -> str:
    """Say how many seeds of one learning rate have no score, by the reason."""
    seeds = {record.seed: record.status for record in records}
    counts = Counter(status for status in seeds.values() if status != "done")
    return ", ".join(f"{count} of {len(seeds)} seeds {_LOST.get(status, status)}" for status, count in counts.items())


def _with_decoding(costs: dict[str, Any]) -> dict[str, Any]:
    """Add the tokens a second of decoding, beside the milliseconds of a token."""
    ms = costs.get("decode_ms")
    return costs | {"decode_tokens_per_s": 1e3 / ms} if ms else dict(costs)


def _mean_slices(records: Sequence[CellRecord]) -> dict[str, dict[str, SliceScore]]:
    found: dict[str, dict[str, SliceScore]] = {}
    for name, values in records[0].slices.items():
        found[name] = {}
        for value, (_, count) in values.items():
            scores = [r.slices[name][value][0] for r in records if value in r.slices.get(name, {})]
            known = [score for score in scores if score is not None]
            if known:
                low, high, _ = score_interval(known, count, records[0].metric)
                found[name][value] = SliceScore(statistics.fmean(known), count, low, high)
    return found


def score_interval(scores: Sequence[float], count: int | None, metric: str) -> tuple[float | None, float | None, str]:
    """Return a 95 % interval and how it was made: over seeds, or of the test set (accuracies alone); the wider one of both."""
    mean = statistics.fmean(scores)
    found: list[tuple[float, float, str]] = []
    if len(scores) > 1:
        degrees = len(scores) - 1
        factor = STUDENT[degrees - 1] if degrees <= len(STUDENT) else NORMAL
        half = factor * statistics.stdev(scores) / math.sqrt(len(scores))
        found.append((mean - half, mean + half, f"{len(scores)} seeds, Student's t"))
    if metric == "accuracy" and count:
        found.append((*wilson(mean, count), f"{count:,} targets, Wilson"))
    if not found:
        return None, None, "one seed: no interval"
    low, high, how = max(found, key=lambda one: one[1] - one[0])
    if metric == "accuracy":
        low, high = max(0.0, low), min(1.0, high)
    return low, high, how


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of so many trials. Wilson 1927."""
    square = NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    spread = share * (1 - share) / count + square / (4 * count)
    half = NORMAL * math.sqrt(max(0.0, spread)) / (1 + square)
    return middle - half, middle + half


def full_row(rows: Sequence[ComparedRow], task: str) -> ComparedRow | None:
    """Return the row of softmax on a task."""
    return next((row for row in rows if row.task == task and row.mixer == FULL_MIXER), None)


def _add_crossings(row: ComparedRow, rows: Sequence[ComparedRow]) -> None:
    full = full_row(rows, row.task)
    if full is None or row is full:
        return
    row.wins_from = _crossing(row, full, "step_ms")
    row.wins_from_forward = _crossing(row, full, "forward_ms")


def _crossing(row: ComparedRow, full: ComparedRow, key: str) -> float | None:
    exact = {point["n"]: point.get(key) for point in full.by_length}
    pairs = [(point["n"], exact.get(point["n"]), point.get(key)) for point in row.by_length]
    known = sorted((n, theirs / ours) for n, theirs, ours in pairs if theirs and ours)
    return crossing(known) if known else None


def speed_ratio(row: ComparedRow, full: ComparedRow | None, key: str) -> float | None:
    """Return how many times as fast as softmax a mechanism is, or how many times as much memory it takes."""
    ours = row.costs.get(key)
    theirs = None if full is None else full.costs.get(key)
    return ours / theirs if ours and theirs else None


def alike_best(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Return the rows of one task whose interval reaches the score of the best: those that cannot be told apart from it."""
    scored = [row for row in rows if row.score is not None]
    if not scored:
        return []
    best = scored[0]
    for row in scored[1:]:
        if is_better(row.metric, row.score or 0.0, best.score):
            best = row
    return [row for row in scored if row is best or _reaches(row, best)]


def _reaches(row: ComparedRow, best: ComparedRow) -> bool:
    if row.score == best.score:
        return True
    if row.less_is_better:
        low = row.score if row.low is None else row.low
        high = best.score if best.high is None else best.high
        return low is not None and high is not None and low <= high
    high = row.score if row.high is None else row.high
    low = best.score if best.low is None else best.low
    return low is not None and high is not None and high >= low


def settings_of(record: CellRecord) -> Mapping[str, Any]:
    """Return the settings that all cells of a task share, without the machine."""
    return {name: value for name, value in record.settings.items() if name != "made_with"}
