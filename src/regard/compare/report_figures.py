"""The figures of a report, as matplotlib draws them: one of each kind and task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from regard.compare.comparison import ComparedRow, ComparedTask, Comparison
from regard.compare.trained_layers import TrainedLayers
from regard.plots.comparison_plot import AxesWords, Bubble, Curve, bubble_plot, curve_plot, layers_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_MATRICES = 64  # in one figure


def report_figures(comparison: Comparison, trained: TrainedLayers) -> Iterator[tuple[str, Figure]]:
    """Yield figures with names for their files; those without a number are left out."""
    for number, task in enumerate(comparison.tasks, 1):
        rows = [row for row in comparison.of_task(task.name) if row.score is not None]
        name = f"{number}_{file_word(task.label)}"
        for kind, figure in _figures_of(task, rows):
            yield f"{kind}_{name}", figure
        for kind, figure in _layer_figures(task, trained):
            yield f"{kind}_{name}", figure


def file_word(text: str) -> str:
    """Turn a text into a part of a file's name."""
    return re.sub(r"\W+", "_", text).strip("_")[:40] or "task"


def _figures_of(task: ComparedTask, rows: list[ComparedRow]) -> Iterator[tuple[str, Figure]]:
    less = bool(rows) and rows[0].less_is_better
    bubbles = [
        Bubble(r.mixer, r.family, r.costs["train_tokens_per_s"], r.score, r.low, r.high, r.costs.get("peak_bytes"))
        for r in rows
        if r.score is not None and r.costs.get("train_tokens_per_s")
    ]
    if bubbles:
        words = AxesWords(
            task.label, "training, tokens a second (area: memory of a step)", f"test {task.metric}", True, False, less
        )
        yield "bubble", bubble_plot(bubbles, words, task.best_floor)
    costs = [_cost_curve(row) for row in rows if any(point.get("step_ms") for point in row.by_length)]
    if costs:
        lengths = sorted({n for curve in costs for n in curve.x})
        ticks = [(n, f"{n:,.0f}") for n in lengths]
        yield (
            "cost",
            curve_plot(costs, AxesWords(task.label, "tokens of a sequence", "ms of a training step", True, True, ticks=ticks)),
        )
    rates = [_rate_curve(row) for row in rows if any(value is not None for _, value, _ in row.rates)]
    if rates:
        words = AxesWords(task.label, "learning rate", f"best validation {task.metric}", True, False, less)
        yield "rates", curve_plot(rates, words)
    curves = [Curve(r.mixer, r.family, [p[0] for p in r.curve], [p[2] for p in r.curve]) for r in rows if r.curve]
    if curves:
        words = AxesWords(task.label, "steps", f"validation {task.metric}", reversed_y=less)
        yield "training", curve_plot(curves, words)
    for name in dict.fromkeys(name for row in rows for name in row.slices):
        yield f"slice_{file_word(name)}", _slice_figure(task, rows, name, less)


def _cost_curve(row: ComparedRow) -> Curve:
    points = [(point["n"], point["step_ms"]) for point in row.by_length if point.get("step_ms")]
    return Curve(row.mixer, row.family, [n for n, _ in points], [ms for _, ms in points])


def _rate_curve(row: ComparedRow) -> Curve:
    points = [(lr, value) for lr, value, _ in row.rates if value is not None]
    return Curve(row.mixer, row.family, [lr for lr, _ in points], [value for _, value in points])


def _slice_figure(task: ComparedTask, rows: list[ComparedRow], name: str, less: bool) -> Figure:
    values = slice_values([row for row in rows if name in row.slices], name)
    curves = []
    for row in rows:
        own = row.slices.get(name, {})
        points = [(place, own[value]) for place, value in enumerate(values) if value in own]
        if points:
            spread = [(at.low, at.high) for _, at in points]
            curves.append(Curve(row.mixer, row.family, [x for x, _ in points], [at.score for _, at in points], spread))
    ticks = [(float(place), value) for place, value in enumerate(values)]
    return curve_plot(curves, AxesWords(task.label, name, f"test {task.metric}", reversed_y=less, ticks=ticks))


def slice_values(rows: list[ComparedRow], name: str) -> list[str]:
    """Return the values of a slice in order: as numbers where all begin with one."""
    found = list(dict.fromkeys(value for row in rows for value in row.slices[name]))
    numbers = [re.match(r"-?\d+(\.\d+)?", value) for value in found]
    if all(numbers):
        return [value for _, value in sorted((float(n.group()), v) for n, v in zip(numbers, found, strict=True) if n)]
    return found


def _layer_figures(task: ComparedTask, trained: TrainedLayers) -> Iterator[tuple[str, Figure]]:
    layers = [layer for layer in trained.layers if layer.task == task.name]
    if not layers:
        return
    pictures = [(f"{layer.mixer[:16]} L{layer.layer} H1", layer.matrices[0]) for layer in layers]
    yield "attention", layers_plot(pictures[:MOST_MATRICES], f"{task.label}: attention of the trained models, first head")
    curves = []
    for layer in layers:
        count = max(1, len(layer.spectrum) - 1)
        x = [(1 + i * (layer.tokens - 1) / count) / layer.tokens for i in range(len(layer.spectrum))]
        curves.append(Curve(f"{layer.mixer}, layer {layer.layer}", layer.family, x, layer.spectrum))
    yield "spectrum", curve_plot(curves, AxesWords(task.label, "share of the singular values", "share of their sum"))
