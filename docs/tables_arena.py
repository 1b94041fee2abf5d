"""Tables of the arena: its tasks (results/arena_floors.json), scores of comparisons, and steps a second of a card."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from regard.arena.trivial_floors import trivial
from tables_base import Made, code, not_yet, short, table

BITS = "bits per token"
LRA_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
LRA_PAPER = {  # accuracy of Tay et al. 2020, arXiv:2011.04006, in the order of LRA_TASKS
    "softmax": (36.37, 64.27, 57.46, 42.44, 71.40),
    "Local": (15.82, 52.98, 53.39, 41.46, 66.63),
    "sparse_transformer": (17.07, 63.58, 59.59, 44.24, 71.71),
    "longformer": (35.63, 62.85, 56.89, 42.22, 69.71),
    "bigbird": (36.05, 64.02, 59.29, 40.83, 74.87),
    "linear": (16.13, 65.90, 53.09, 42.34, 75.30),
    "performer": (18.01, 65.40, 53.82, 42.77, 77.05),
    "linformer": (35.70, 53.94, 52.27, 38.56, 76.34),
    "reformer": (37.27, 56.10, 53.40, 38.07, 68.50),
    "sinkhorn": (33.67, 61.20, 53.83, 41.23, 67.45),
    "synthesizer": (36.99, 61.68, 54.67, 41.61, 69.45),
}


def arena_tasks(made: Made) -> str:
    """Sizes of every task, and its floors beside them."""
    if not made["rows"]:
        return not_yet("arena_floors.py")
    head = ["task", "form", "n", "classes", "train / val / test", "slices", "floors on test"]
    body = []
    for r in made["rows"]:
        sizes = " / ".join(f"{r[part]:,}" for part in ("train", "val", "test"))
        floors = "<br>".join(f"{name} {_score(value, r['metric'])}" for name, value in r["floors"].items())
        body.append([code(r["task"]), r["form"], f"{r['n']:,}", r["classes"], sizes, ", ".join(r["slices"]), floors])
    return table(head, body)


def _score(value: float, metric: str) -> str:
    """A share in percent; other metrics as they are."""
    return f"**{100 * value:.1f}**" if metric == "accuracy" else f"**{value:.3f}** {metric}"


def arena_scores(made: Made, name: str) -> str:
    """Scores on test by mechanism and task, floors first; the best are bold, what is not above the best floor is in brackets."""
    if not made["rows"]:
        return not_yet(f"arena_results.py {name} FOLDER")
    tasks = made["settings"]["tasks"]
    mixers = _by_mixer(made["rows"])
    order = sorted(mixers, key=lambda mixer: _mean_place(mixer, mixers, made["rows"], len(tasks)))
    body: list[list[str]] = [["best floor", "", *(_best_floor(task) for task in tasks)]]
    for mixer in order:
        own = mixers[mixer]
        if any("score" in row for row in own.values()):
            family = next(iter(own.values()))["family"]
            body.append([code(mixer), family, *(_cell(own.get(number), task) for number, task in enumerate(tasks))])
    head = ["", "family", *_task_heads(tasks)]
    return "\n\n".join([_settings_text(made), table(head, body), _refused_text(mixers), _task_texts(made)]).replace(
        "\n\n\n\n", "\n\n"
    )


def _by_mixer(rows: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["mixer"], {})[row["task"]] = row
    return found


def _mean_place(mixer: str, mixers: dict[str, dict[int, Any]], rows: list[dict[str, Any]], tasks: int) -> tuple[float, str]:
    """The mean rank over tasks; a task without a score counts as the last place. Rows come in order of their score."""
    places = []
    for number in range(tasks):
        names = [row["mixer"] for row in rows if row["task"] == number and "score" in row]
        places.append(names.index(mixer) if mixer in names else len(mixers))
    return sum(places) / max(1, tasks), mixer


def _task_heads(tasks: list[dict[str, Any]]) -> list[str]:
    names = [task["task"].partition("(")[0] for task in tasks]
    seen = Counter(names)
    return [name if seen[name] == 1 else f"{name} {number}" for number, name in enumerate(names, 1)]


def _best_floor(task: dict[str, Any]) -> str:
    best = _floor(task)
    return "" if best is None else _number(best, task["metric"])


def _floor(task: dict[str, Any]) -> float | None:
    values = [value for value in trivial(task["floors"]).values() if value is not None]
    return (min if task["metric"] == BITS else max)(values) if values else None


def _number(value: float, metric: str) -> str:
    return f"{value:.3f}" if metric == BITS else f"{100 * value:.1f}"


def _cell(row: dict[str, Any] | None, task: dict[str, Any]) -> str:
    """A score with half of its interval: bold if it cannot be told apart from the best, in brackets if no floor is beaten."""
    if row is None or "score" not in row:
        return "" if row is None or row.get("reason", "").startswith("refused") else "-"
    text = _number(row["score"], task["metric"])
    if "low" in row:
        half = (row["high"] - row["low"]) / 2
        text += f" ± {_number(half, task['metric'])}"
    floor = _floor(task)
    below = floor is not None and (row["score"] >= floor if task["metric"] == BITS else row["score"] <= floor)
    return f"({text})" if below else f"**{text}**" if row.get("best") else text


def _settings_text(made: Made) -> str:
    """What all tasks share, and the machine."""
    tasks, w = made["settings"]["tasks"], made["made_with"]
    rates = list(dict.fromkeys(_rates(made).values()))
    seeds = sorted({len(row["scores"]) for row in made["rows"] if row.get("scores")})
    text = f"Percent right on test, {_range(seeds)} with the best learning rate on validation, of those below"
    if len(rates) == 1:
        text = f"Percent right on test, {_range(seeds)} with the best of {len(rates[0])} learning rates on validation"
        text += f" ({', '.join(f'{rate:g}' for rate in rates[0])})"
    text += "; the wider interval of seeds and test set, 95 %. "
    text += "Bold: not told apart from the best. In brackets: not above the best floor. -: not finished. "
    return text + f"({tasks[0]['dtype']}; {w.get('device', '')}, torch {w.get('torch', '')}, commit {w.get('commit', '')}.)"


def _rates(made: Made) -> dict[int, tuple[float, ...]]:
    """The learning rates of every task that any row was trained with, by its number."""
    found: dict[int, set[float]] = {}
    for row in made["rows"]:
        found.setdefault(row["task"], set()).update(rate for rate, *_ in row.get("rates", []))
    return {number: tuple(sorted(rates)) for number, rates in found.items()}


def _range(counts: list[int]) -> str:
    if not counts:
        return "no seed"
    return f"{counts[0]} seed{'s' * (counts[0] > 1)}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"


def _refused_text(mixers: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Mechanisms without any score, with the reasons."""
    reasons: dict[str, list[str]] = {}
    for mixer, own in mixers.items():
        if not any("score" in row for row in own.values()):
            reason = next(iter(own.values())).get("reason", "").partition(": ")[2].partition(": ")[0] or "not finished"
            name = mixer.partition("(")[0]
            reasons.setdefault(reason.removeprefix(f"{name} "), []).append(code(mixer))
    found = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return f"Without a score: {'; '.join(found)}." if found else ""


def _task_texts(made: Made) -> str:
    """The model and the budget of each task; tasks with equal ones share a line."""
    lines: dict[str, list[str]] = {}
    rates = _rates(made)
    for number, task in enumerate(made["settings"]["tasks"]):
        m, b = task["model"], task["budget"]
        steps = f"{b['steps']:,} steps" if b.get("steps") else f"{b['seconds'] / 60:.3g} minutes"
        layers = f"feed-forward layers of {m['ffn']}{' (gated)' * m['gated']}" if m["ffn"] else "no feed-forward layers"
        conv = f", a convolution of {m['conv']} in front" if m["conv"] else ""
        text = f"{m['depth']} layers of width {m['width']}, {m['heads']} heads, {layers}{conv}; {steps} of {b['batch']}"
        if b.get("buckets", 1) > 1:
            text += f", padded to one of {b['buckets']} lengths"
        if len(set(rates.values())) > 1:
            text += f"; learning rates {', '.join(f'{rate:g}' for rate in rates[number])}"
        lines.setdefault(text, []).append(code(task["task"]))
    return "\n".join(f"- {text}: {', '.join(names)}" for text, names in lines.items())


def lra_ranking(made: Made) -> str:
    """Scores beside those of the LRA paper, of mechanisms that are in both, and how alike the two rankings are."""
    numbers = (
        {task["task"].partition("(")[0]: number for number, task in enumerate(made["settings"]["tasks"])} if made["rows"] else {}
    )
    tasks = [name for name in LRA_TASKS if name in numbers]
    found: dict[str, dict[str, float]] = {}
    for row in made["rows"]:
        name = row["mixer"].partition("(")[0]
        for task in tasks:
            if name in LRA_PAPER and row["task"] == numbers[task] and "score" in row:
                found.setdefault(name, {})[task] = 100 * row["score"]
    if not found:
        return not_yet("arena_results.py arena_lra FOLDER")
    body = []
    for name, own in found.items():
        paper = dict(zip(LRA_TASKS, LRA_PAPER[name], strict=True))
        body.append([code(name), *(f"{own[task]:.1f} / {paper[task]:.1f}" if task in own else "" for task in tasks)])
    pairs = {
        task: [(own[task], LRA_PAPER[n][LRA_TASKS.index(task)]) for n, own in found.items() if task in own] for task in tasks
    }
    body.append(["rank correlation", *(f"{rank_correlation(pairs[task]):.2f}" if len(pairs[task]) > 2 else "" for task in tasks)])
    return "Percent right here / in the LRA paper, and Spearman's correlation of the two:\n\n" + table(["", *tasks], body)


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's: the correlation of the ranks, where equal values share the mean of their ranks."""
    columns = [[_rank(x, values) for x in values] for values in zip(*pairs, strict=True)]
    means = [sum(ranks) / len(ranks) for ranks in columns]
    one, two = ([x - mean for x in ranks] for ranks, mean in zip(columns, means, strict=True))
    spread = math.sqrt(sum(x * x for x in one) * sum(y * y for y in two))
    return sum(x * y for x, y in zip(one, two, strict=True)) / spread if spread else 0.0


def _rank(x: float, values: tuple[float, ...]) -> float:
    return sum(y < x for y in values) + (sum(y == x for y in values) - 1) / 2


def arena_rates(made: Made, name: str) -> str:
    """Scores on validation by learning rate, of the first task of this name; the chosen rate is bold."""
    tasks = made["settings"]["tasks"] if made["rows"] else []
    number = next((place for place, task in enumerate(tasks) if task["task"].partition("(")[0] == name), -1)
    rows = [row for row in made["rows"] if row["task"] == number and row.get("rates")]
    if not rows:
        return not_yet("arena_results.py arena_small FOLDER")
    rates = sorted({rate for row in rows for rate, *_ in row["rates"]})
    body = []
    for row in rows:
        by = {rate: (value, status) for rate, value, status in row["rates"]}
        cells = [_rate_cell(by.get(rate), rate == row.get("lr"), tasks[number]["metric"]) for rate in rates]
        body.append([code(row["mixer"]), *cells])
    head = ["", *(f"{rate:g}" for rate in rates)]
    return f"Validation of {code(tasks[number]['task'])} by learning rate:\n\n" + table(head, body)


def _rate_cell(found: tuple[float | None, str] | None, chosen: bool, metric: str) -> str:
    if found is None:
        return ""
    value, status = found
    if value is None or math.isnan(value):
        return status
    return f"**{_number(value, metric)}**" if chosen else _number(value, metric)


def grid_speed(made: Made) -> str:
    """Training steps a second of one card, by how many models it trains at a time."""
    if not made["rows"]:
        return not_yet("grid_speed.py")
    forms: dict[tuple[str, int, int], None] = {}
    by: dict[str, dict[tuple[str, int, int], dict[str, Any]]] = {}
    for row in made["rows"]:
        if "steps_per_s" in row:
            form = (row["mode"], row["processes"], row["models"])
            forms[form] = None
            by.setdefault(row["mixer"], {})[form] = row
    body = []
    for mixer, own in by.items():
        first = own.get(("eager", 1, 1), {}).get("steps_per_s")
        most = max(row["steps_per_s"] for row in own.values())
        cells = [short(own[form]["steps_per_s"]) if form in own else "" for form in forms]
        body.append([code(mixer), *cells, f"{most / first:.1f} x" if first else ""])
    head = ["", *(f"{mode}, {models if processes == 1 else f'{processes} x {models}'}" for mode, processes, models in forms)]
    s, w = made["settings"], made["made_with"]
    about = f"{code(s['task'])}, {', '.join(s['changes'])}, one model or several at a time, in one process or several. "
    return (
        about + f"({w['device']}, torch {w['torch']}, commit {w['commit']}.)\n\n" + table([*head, "best against the first"], body)
    )
