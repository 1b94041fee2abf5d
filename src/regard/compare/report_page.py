"""The report of a comparison as one HTML page: tables and words are in the page itself, a script draws the figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from regard.arena.arena_catalogue import short_task
from regard.arena.trivial_floors import trivial
from regard.compare.comparison import ComparedRow, ComparedTask, Comparison, full_row, speed_ratio
from regard.compare.recommendation import above_floor, recommendations, score_text
from regard.compare.report_data import report_data, script_json
from regard.compare.small_png import png_url
from regard.compare.trained_layers import TrainedLayer, TrainedLayers, pooled_matrix, spectrum_rank
from regard.plots.colours import family_shades

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
MANY_PICTURES, MOST_PICTURES = 160, 480  # beyond the first, one head a layer is shown; beyond the second, pictures are smaller
FEW_CELLS = 40  # of a smaller picture
CHARTS = (  # id, title, words
    ("bubble", "Quality against speed", "Up is better, right is faster, a larger dot takes more memory."),
    ("cost", "Cost against length", "Milliseconds over tokens of a sequence, both logarithmic. Equal models, random tokens."),
    ("rates", "Learning rates", "Best score on validation of every learning rate that was tried, with the first seed."),
    ("training", "Training", "Validation of the first seed with the chosen learning rate."),
    ("slices", "Slices", "The test score by a property of the targets, mean over seeds."),
    ("spectrum", "Singular values of attention", "Share of their sum in the largest ones, mean over heads. Early is low rank."),
)


def report_html(comparison: Comparison, trained: TrainedLayers, notes: Sequence[str] = ()) -> str:
    """Write the page. Nothing is loaded from elsewhere, and names of tasks and mixers are text, never markup."""
    data = script_json(report_data(comparison, trained))
    body = [_head(comparison), _advice(comparison), _controls()]
    body += [_chart(*chart) for chart in CHARTS[:1]]
    body += [_score_table(task, comparison) for task in comparison.tasks]
    body += [_chart(*chart) for chart in CHARTS[1:2]] + [_cost_table(task, comparison) for task in comparison.tasks]
    body += [_chart(*chart) for chart in CHARTS[2:]]
    body += [_matrices(trained), _failures(comparison), _settings(comparison, notes)]
    style = _resource("report.css") + _family_style(comparison)
    return PAGE.format(policy=POLICY, style=style, body="\n".join(body), data=data, script=_resource("report.js"))


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Comparison of attention mechanisms</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _resource(name: str) -> str:
    return (files("regard.compare") / name).read_text(encoding="utf-8")


def _family_style(comparison: Comparison) -> str:
    """Give every family its colour, one on light and one on dark."""
    shades = list(family_shades(comparison.families).values())
    light = "".join(f"--f{i}:{one};" for i, (one, _) in enumerate(shades))
    dark = "".join(f"--f{i}:{two};" for i, (_, two) in enumerate(shades))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _head(comparison: Comparison) -> str:
    cells, mixers = len(comparison.records), {row.mixer for row in comparison.rows}
    machine = ", ".join(f"{name} {value}" for name, value in comparison.made_with.items() if value is not None)
    counts = f"Tasks: {len(comparison.tasks)}, mixers: {len(mixers)}, cells: {cells}. {machine}"
    return f"<header><h1>Comparison of attention mechanisms</h1><p class=quiet>{escape(counts)}</p></header>"


def _advice(comparison: Comparison) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in recommendations(comparison))
    return f"<section id=advice><h2>Recommendation</h2><ul>{lines}</ul></section>"


def _controls() -> str:
    return (
        '<nav id=controls aria-label="Settings of all figures"><label>Task <select id=task></select></label>'
        "<label>Speed <select id=speed></select></label><label>Memory <select id=memory></select></label>"
        '<div id=families role=group aria-label="Families"></div><button id=all type=button>all families</button>'
        "<button id=csv type=button>CSV</button></nav><noscript><p>The figures need JavaScript; the tables do not.</p></noscript>"
    )


def _chart(name: str, title: str, words: str) -> str:
    return (
        f"<section id={name}><h2>{escape(title)}</h2><p class=quiet>{escape(words)} <span class=choice></span></p>"
        f'<div class=chart role=group aria-label="{escape(title)}"></div><p class="quiet note"></p></section>'
    )


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    return f"<div class=wide><table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _line(row: ComparedRow, cells: Sequence[str]) -> str:
    first, *others = (escape(cell) for cell in cells)
    body = "".join(f"<td>{cell}</td>" for cell in others)
    return f'<tr data-family="{escape(row.family)}"><th scope=row><i></i>{first}</th>{body}</tr>'


def _score_table(task: ComparedTask, comparison: Comparison) -> str:
    head = ["mixer", f"test {task.metric}", "95 % interval", "seeds", "above floor", "validation", "lr", "parameters"]
    head += ["train tokens/s", "against softmax", "inference tokens/s", "decode ms", "MiB of a step", "KiB of state"]
    full = full_row(comparison.rows, task.name)
    rows = [_line(row, _score_cells(row, task, full)) for row in comparison.of_task(task.name) if row.score is not None]
    floors = trivial(task.floors)
    readers = {name: value for name, value in task.floors.items() if name not in floors}
    title = task.title if task.title.endswith((".", "?", "!")) or not task.title else f"{task.title}."
    words = f"{title} {task.length:,} tokens. Floors that need no attention: {_listed(floors, task.metric) or 'none'}.".strip()
    words += f" Readers of a part: {_listed(readers, task.metric)}." if readers else ""
    return (
        f'<section class=of-task data-task="{escape(task.name)}"><h2>Scores on {escape(task.label)}</h2>'
        f"<p class=quiet>{escape(words)}</p>{_table(head, rows)}</section>"
    )


def _listed(floors: dict[str, float], metric: str) -> str:
    return ", ".join(f"{name} ({score_text(value, metric)})" for name, value in floors.items())


def _score_cells(row: ComparedRow, task: ComparedTask, full: ComparedRow | None) -> list[str]:
    metric, costs = task.metric, row.costs
    interval = "" if row.low is None else f"{score_text(row.low, metric)} to {score_text(row.high, metric)} ({row.interval})"
    above = "" if task.best_floor is None else "yes" if above_floor(row, task.best_floor) else "no"
    ratio = speed_ratio(row, full, "train_tokens_per_s")
    cells = [row.mixer, score_text(row.score, metric), interval or row.interval, _seeds(row), above]
    cells += [score_text(row.val, metric), _number(row.lr), "" if row.parameters is None else f"{row.parameters:,}"]
    cells += [_number(costs.get("train_tokens_per_s")), "" if ratio is None else f"{ratio:.2f} x"]
    cells += [_number(costs.get("infer_tokens_per_s")), _number(costs.get("decode_ms"))]
    return [*cells, _size(costs.get("peak_bytes"), 2**20), _size(costs.get("state_bytes"), 2**10)]


def _seeds(row: ComparedRow) -> str:
    return f"{len(row.scores)} ({row.lost})" if row.lost else str(len(row.scores))


def _cost_table(task: ComparedTask, comparison: Comparison) -> str:
    rows = [row for row in comparison.of_task(task.name) if row.by_length]
    lengths = sorted({point["n"] for row in rows for point in row.by_length})
    if not rows:
        return ""
    head = ["mixer", *(f"step ms (MiB) at {n:,}" for n in lengths), "training faster than softmax from", "forward from"]
    full = full_row(rows, task.name)
    lines = []
    for row in rows:
        points = {point["n"]: point for point in row.by_length}
        cells = [_point_text(points.get(n, {})) for n in lengths]
        wins = [_from(row.wins_from, row, full, "step_ms"), _from(row.wins_from_forward, row, full, "forward_ms")]
        lines.append(_line(row, [row.mixer, *cells, *wins]))
    return (
        f'<section class=of-task data-task="{escape(task.name)}"><h2>Costs by length, model of {escape(task.label)}</h2>'
        f"{_table(head, lines)}</section>"
    )


def _point_text(point: dict[str, Any]) -> str:
    if not point.get("step_ms"):
        return point.get("reason") or ""
    size = _size(point.get("peak_bytes"), 2**20)
    return f"{_number(point['step_ms'])}{f' ({size})' if size else ''}"


def _from(length: float | None, row: ComparedRow, full: ComparedRow | None, key: str) -> str:
    """Say from which length a mechanism is faster than softmax, of the lengths at which both were measured."""
    both = [] if full is None or row is full else _measured(row, key) & _measured(full, key)
    if not both:
        return ""
    if length is None:
        return f"not up to {max(both):,}"
    return f"{min(both):,} or less" if length <= min(both) else f"about {length:,.0f}"


def _measured(row: ComparedRow, key: str) -> set[int]:
    return {point["n"] for point in row.by_length if point.get(key)}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _size(value: float | None, unit: int) -> str:
    return "" if value is None else _number(value / unit)


def _matrices(trained: TrainedLayers) -> str:
    if not trained.layers and not trained.notes:
        return ""
    count = sum(len(layer.matrices) for layer in trained.layers)
    side = None if count <= MOST_PICTURES else FEW_CELLS
    heads = 1 if count > MANY_PICTURES else count
    pictures = "".join(_layer_figure(layer, heads, side) for layer in trained.layers)
    notes = "".join(f"<li>{escape(note)}</li>" for note in trained.notes)
    words = "Query down, key across, on the first test example; cells show their largest weight. Dark is large, on its own scale."
    listed = f"<details><summary>Not shown: {len(trained.notes)}</summary><ul>{notes}</ul></details>" if notes else ""
    head = f"<h2>Attention of the trained models</h2><p class=quiet>{words}</p>"
    return f"<section id=matrices>{head}<div class=grid>{pictures}</div>{listed}</section>"


def _layer_figure(layer: TrainedLayer, heads: int, side: int | None) -> str:
    shown = layer.matrices[:heads]
    smaller = shown if side is None else [pooled_matrix(matrix, side) for matrix in shown]
    name = f"{layer.mixer}, layer {layer.layer}"
    images = "".join(
        f'<img src="{png_url(matrix)}" alt="{escape(f"{name}, head {number}")}">' for number, matrix in enumerate(smaller, 1)
    )
    rank = spectrum_rank(layer.spectrum, layer.tokens)
    words = f"{name}: 90 % of the singular values' sum in {rank} of {layer.tokens}"
    return (
        f'<figure class=of-task data-task="{escape(layer.task)}" data-family="{escape(layer.family)}"><div>{images}</div>'
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )


def _failures(comparison: Comparison) -> str:
    failed = [row for row in comparison.rows if row.score is None]
    if not failed:
        return ""
    rows = [_line(row, [row.mixer, short_task(row.task), row.reason]) for row in failed]
    return f"<section id=failures><h2>Without a score</h2>{_table(['mixer', 'task', 'reason'], rows)}</section>"


def _settings(comparison: Comparison, notes: Sequence[str]) -> str:
    shown = {record.task: record for record in reversed(comparison.records)}
    rows = []
    for name, record in shown.items():
        for key, value in sorted(record.settings.items()):
            rows.append(f"<tr><td>{escape(short_task(name))}</td><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>")
    more = "".join(f"<p class=quiet>{escape(note)}</p>" for note in notes)
    listed = f"<details><summary>Of one cell of each task</summary>{_table(['task', 'setting', 'value'], rows)}</details>"
    return f"<section id=settings><h2>Settings</h2>{more}{listed}</section>"
