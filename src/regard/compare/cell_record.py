"""The record of one cell of a comparison, (task, mixer, learning rate, seed): what was trained, how well, and at what cost.

One JSON file a cell: FOLDER/cells/KEY.json. KEY is a hash of the cell's settings. Scores are those of the task's metric: more is
better, except for "bits per token". Numbers that were not measured are null, never 0. A group is all cells of one task and mixer.

First every learning rate is trained with seed 0. The best of them on validation is chosen, other seeds are trained with it, and
only those cells are `final`: they have `test` and `slices`. `costs` and `cost_by_length` are measured apart from training, with
nothing else running: the final cell with seed 0 has them, all others have empty ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

CellStatus = Literal["done", "refused", "crashed", "diverged", "missing data"]
STATUSES: tuple[str, ...] = get_args(CellStatus)
RECORD_FORMAT = 1  # grows when a field changes its meaning
WORDS = ("notes", "reason")  # of costs
LESS_IS_BETTER = ("bits per token",)


@dataclass
class CellRecord:
    """Hold everything about one cell. A cell that is not `done` has a `reason` of one sentence."""

    key: str  # name of the file, and of its weights
    task: str  # as a text: recall(length=128, pairs=8)
    mixer: str  # as a text: Local(16), performer(features=32), mypkg.mod:MyCore(size=3)
    family: str  # that of the catalogue; "own" for a mechanism of your own
    lr: float
    seed: int
    status: CellStatus = "done"
    reason: str = ""
    final: bool = False  # of the chosen learning rate: it has a test score
    title: str = ""  # of the task, one line
    metric: str = "accuracy"
    length: int = 0  # tokens of the longest example
    causal: bool = False
    # {"model": {width, depth, …}, "budget": {steps or seconds, batch, …}, "device", "dtype", "made_with": {torch, commit, …}}
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    parameters_note: str = ""  # how the total was made equal to that of softmax, or why it is not
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)  # step, train loss, val score, seconds of training
    val: float | None = None  # the best evaluation of the curve, whose weights are kept and tested
    test: float | None = None
    test_count: int | None = None  # targets of the test score
    slices: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # slice -> value of it -> test score, targets
    floors: dict[str, float] = field(default_factory=dict)  # test scores that need no attention, by name
    # train_steps_per_s, train_tokens_per_s, infer_tokens_per_s, decode_ms, peak_bytes (of a training step, beyond what it
    # starts with), state_bytes (of one sequence after n tokens), n (tokens of a sequence), batch; null where there is none,
    # with the reason under "notes": {name: sentence}
    costs: dict[str, Any] = field(default_factory=dict)
    cost_by_length: list[dict[str, Any]] = field(default_factory=list)  # n, batch, forward_ms, step_ms, peak_bytes, reason
    train_seconds: float | None = None  # of training steps, evaluations excluded
    weights: str = ""  # safetensors of a final cell, relative to FOLDER
    format: int = RECORD_FORMAT

    @property
    def group(self) -> tuple[str, str]:
        return self.task, self.mixer

    def to_json(self) -> dict[str, Any]:
        """Return plain values; NaN and infinity, which JSON has not, become null."""
        return _finite(asdict(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CellRecord:
        """Read a record, or raise a ValueError with what is wrong with it."""
        allowed = {f.name for f in fields(CellRecord)}
        needed = {"key", "task", "mixer", "family", "lr", "seed", "status", "format"}
        if missing := sorted(needed - data.keys()):
            raise ValueError(f"a record of a cell needs {', '.join(missing)}")
        if more := sorted(data.keys() - allowed):
            raise ValueError(f"a record of a cell has no {', '.join(more)}: it was written by another version")
        if data["format"] != RECORD_FORMAT:
            raise ValueError(f"the record has format {data['format']!r}, and this version reads {RECORD_FORMAT}")
        if data["status"] not in STATUSES:
            raise ValueError(f"the status of a cell is one of {', '.join(STATUSES)}, not {data['status']!r}")
        kinds = get_type_hints(CellRecord)
        if wrong := [name for name, value in data.items() if not _fits(value, kinds[name])]:
            raise ValueError(f"{', '.join(wrong)} of the record cannot be read")
        lengths = data.get("cost_by_length", [])
        if not all(map(_measured, [data.get("costs", {}), *lengths])) or not all(type(row.get("n")) is int for row in lengths):
            raise ValueError("costs of the record cannot be read")
        record = CellRecord(**data)
        record.curve = [tuple(point) for point in record.curve]  # type: ignore[misc]
        record.slices = {name: {at: tuple(pair) for at, pair in found.items()} for name, found in record.slices.items()}  # type: ignore[misc]
        return record


def is_better(metric: str, one: float, two: float | None) -> bool:
    """Return whether a score is better than another; anything is better than none."""
    if two is None or math.isnan(two):
        return True
    return one < two if metric in LESS_IS_BETTER else one > two


def _fits(value: Any, kind: Any, inside: bool = False) -> bool:
    """Return whether a value of JSON has the type of a field. Inside of containers a number may be null: it was not finite."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or origin is Literal:
        return kind is Any or value in parts
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(part, parts[1], True) for part in value.values())
    if origin is list:
        return isinstance(value, list) and all(_fits(part, parts[0], True) for part in value)
    if origin is tuple:
        whole = isinstance(value, list | tuple) and len(value) == len(parts)
        return whole and all(_fits(one, part, True) for one, part in zip(value, parts, strict=True))
    if kind is float:
        return (inside and value is None) or type(value) in (int, float)
    return type(value) is kind


def _measured(costs: Mapping[str, Any]) -> bool:
    """Return whether costs are numbers, or null where nothing was measured, beside words about them."""
    return all(_fits(value, float, True) for name, value in costs.items() if name not in WORDS)


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, in lists and dicts too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
