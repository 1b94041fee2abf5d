"""A recommendation in plain words, derived from the rows of a comparison. Every number in it is on the page."""

from __future__ import annotations

from collections.abc import Sequence

from regard.compare.cell_record import is_better
from regard.compare.comparison import ComparedRow, ComparedTask, Comparison, alike_best, full_row, speed_ratio

NAMED = 3  # mechanisms in a sentence


def score_text(value: float | None, metric: str) -> str:
    """Format a score: accuracies in percent."""
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.3f}"


def recommendations(comparison: Comparison) -> list[str]:
    """Write a sentence or two for every task, and one for every length at which costs were measured."""
    lines = [_task_line(task, comparison.of_task(task.name), comparison.rows) for task in comparison.tasks]
    return [line for line in [*lines, *_length_lines(comparison)] if line]


def above_floor(row: ComparedRow, floor: float | None) -> bool:
    """Return whether the whole interval of a score is better than the best trivial score."""
    if row.score is None:
        return False
    worst = row.high if row.less_is_better else row.low
    return is_better(row.metric, row.score if worst is None else worst, floor)


def good_rows(comparison: Comparison, task: ComparedTask) -> list[ComparedRow]:
    """Return the rows of a task that cannot be told apart from the best, if they are above the floor."""
    rows = alike_best(comparison.of_task(task.name))
    return [row for row in rows if above_floor(row, task.best_floor)]


def _task_line(task: ComparedTask, rows: Sequence[ComparedRow], every: Sequence[ComparedRow]) -> str:
    scored = [row for row in rows if row.score is not None]
    name = f"{task.label} (n = {task.length:,})"
    if not scored:
        return f"{name}: no mixer has a score."
    best = scored[0]
    score = score_text(best.score, task.metric)
    if not above_floor(best, task.best_floor):
        return f"{name}: {_at_floor(best, task)}"
    good = [row for row in alike_best(rows) if above_floor(row, task.best_floor)]
    timed = [row for row in good if row.costs.get("train_tokens_per_s")]
    if not timed:
        return f"{name}: {best.told_name} is the best, {score}. No speed was measured."
    fastest = max(timed, key=lambda row: row.costs["train_tokens_per_s"])
    alike = "it is the best" if len(good) == 1 else f"the fastest of {len(good)} mixers that cannot be told apart from the best"
    beside = _beside(fastest, full_row(every, task.name))
    beyond = "" if fastest is best else f" ({best.told_name}, {score})"
    own = f"{score_text(fastest.score, task.metric)}; {alike}{beyond}"
    return f"{name}: take {fastest.told_name}, {own}.{beside}{_faster(fastest, scored, task)}"


def _also(words: str) -> str:
    return f", {words}" if words else ""


def _at_floor(best: ComparedRow, task: ComparedTask) -> str:
    """Describe a best score that is not certainly better than a trivial one."""
    floor, score = score_text(task.best_floor, task.metric), score_text(best.score, task.metric)
    if best.score is not None and not is_better(task.metric, best.score, task.best_floor):
        found = f"the best score, {score} of {best.told_name}"
        return f"nothing was learned: {found}, does not reach the floor of {floor}. Train longer."
    interval = f"{score_text(best.low, task.metric)} to {score_text(best.high, task.metric)}"
    best_text = f"the best score, {score} of {best.told_name} (95 %: {interval})"
    return f"{best_text}, cannot be told apart from the floor of {floor}. Train more seeds."


def _faster(chosen: ComparedRow, rows: Sequence[ComparedRow], task: ComparedTask) -> str:
    """Name what is faster at the price of quality: each is the best among all that are as fast."""
    key = "train_tokens_per_s"
    above = [row for row in rows if row.costs.get(key) and above_floor(row, task.best_floor)]  # the best first
    found: list[ComparedRow] = [chosen]
    for row in above:
        if row.costs[key] > found[-1].costs[key]:
            found.append(row)
    named = [
        f"{row.mixer} ({row.costs[key] / chosen.costs[key]:.2f} x, {score_text(row.score, row.metric)}{_also(row.lost)})"
        for row in found[1:]
    ]
    return f" Faster, with worse scores: {', '.join(named[:NAMED])}." if named else ""


def _beside(row: ComparedRow, full: ComparedRow | None) -> str:
    """Compare cost with softmax, in a sentence."""
    if full is None or row is full:
        return ""
    speed = speed_ratio(row, full, "train_tokens_per_s")
    memory = speed_ratio(row, full, "peak_bytes")
    parts = [f"trains {speed:.2f} times as fast as softmax"] if speed else []
    parts += [f"takes {memory:.2f} times its memory"] if memory else []
    return f" It {' and '.join(parts)}." if parts else ""


def _length_lines(comparison: Comparison) -> list[str]:
    """For every length: the fastest mixer among those that are good on every task they have a score for."""
    rows = comparison.rows
    lengths = sorted({point["n"] for row in rows for point in row.by_length if point.get("step_ms")})
    good = _good_everywhere(comparison)
    machine = comparison.made_with.get("device", "this machine")
    return [line for n in lengths if (line := _length_line(comparison, n, good, str(machine)))]


def _good_everywhere(comparison: Comparison) -> set[str]:
    """Return mixers that are among the best on every task on which something was learned."""
    found: set[str] | None = None
    for task in comparison.tasks:
        names = {row.mixer for row in good_rows(comparison, task)}
        if names:
            found = names if found is None else found & names
    return found or set()


def step_times(comparison: Comparison, n: int) -> dict[str, float]:
    """Return the milliseconds of a training step at a length by mixer: of the first task that measured it."""
    found: dict[str, float] = {}
    for row in comparison.rows:
        for point in row.by_length:
            if point["n"] == n and point.get("step_ms"):
                found.setdefault(row.mixer, point["step_ms"])
    return found


def _length_line(comparison: Comparison, n: int, good: set[str], machine: str) -> str:
    times = step_times(comparison, n)
    exact = times.get("softmax")
    ranked = sorted((name for name in times if name in good), key=lambda name: times[name])
    if not ranked:
        quickest = min(times, key=lambda name: times[name])
        learned = any(good_rows(comparison, task) for task in comparison.tasks)
        why = "no mixer is among the best on all tasks" if learned else "nothing was learned on any task"
        only = f"{quickest} is the fastest, {_ms(times[quickest])} a step, but {why}."
        return f"For n = {n:,} on {machine}: {only}"
    lost = {row.mixer: row.lost for row in comparison.rows if row.lost}
    named = ", ".join(f"{name} ({_step_text(times[name], exact, name)}{_also(lost.get(name, ''))})" for name in ranked[:NAMED])
    return (
        f"For n = {n:,} on {machine}: by time of a training step, among the best mixers of all tasks that were learned: {named}."
    )


def _step_text(ms: float, exact: float | None, name: str) -> str:
    ratio = f", {exact / ms:.2f} x softmax" if exact and name != "softmax" else ""
    return f"{_ms(ms)}{ratio}"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
