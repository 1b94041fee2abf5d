"""The tables of the real tasks, from results/tasks.json, floors.json and nat_speed.json: every row that is there has a line."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.tasks import TASKS
from tables_base import Made, code, not_yet, short, table

Row = dict[str, Any]

NAMES = {
    "bleu": "BLEU",
    "bleu_cased": "BLEU, cased",
    "exact": "exactly right, %",
    "accuracy": "accuracy, %",
    "rouge_l": "ROUGE-L",
    "oov_recall": "out-of-vocabulary recall, %",
    "loss": "loss, nats",
    "bits": "bits",
    "f1": "bracket F1",
    "precision": "precision, %",
    "recall": "recall, %",
    "complete": "whole trees right, %",
    "tagged": "tags right, %",
    "top1": "top-1, %",
    "top5": "top-5, %",
    "top1_moves_1_50": "top-1, moves 1-50",
    "top1_moves_51_150": "51-150",
    "top1_moves_151_on": "151 on",
    "top1_new": "positions that train has not",
}
OTHERS = {  # their groups
    "ewt": "tag",
    "imdb": "sentiment",
    "shakespeare": "language",
    "acl_titles": "copy",
    "wikisql": "copy",
    "gum": "parse",
    "go": "go",
}
AS_IT_IS = {"positions": "sinusoidal", "wiring": "last", "norm": "pre", "mixer": "softmax"}  # parts that are exchanged
COUNTS = ("texts", "words", "sentences", "new", "positions")  # how many were scored, beside how well


def measure(*groups: str) -> str:
    return not_yet(f"tasks.py --work runs/tasks --only {' '.join(groups)}")


def of(made: Made, *groups: str) -> list[Row]:
    return [row for row in made["rows"] if row["group"] in groups]


def answered(row: Row) -> dict[str, Any]:
    """The scores with the settings of the run itself; those of other beams stand beside them, in any order."""
    own = [x for x in row["scores"] if all(row["settings"].get(name) == value for name, value in x["settings"].items())]
    if not own:
        raise ValueError(f"{row['name']} was not scored with its own settings: regard evaluate it without --set")
    return max(own, key=lambda x: x["split"] == "test")


def bleu(row: Row) -> float:
    return answered(row)["scores"]["bleu"]


def watched(row: Row) -> float | None:
    """The validation score of the weights that were chosen."""
    return row["val"]["averaged"] if row["chosen"] == "average" else best(row)


def best(row: Row) -> float | None:
    """The validation score of the best single weights: the one entry that is neither a step nor an average."""
    return next(value for name, value in row["val"].items() if name not in ("step", "averaged"))


def mean(values: Iterable[float | None], digits: int = 2) -> str:
    """Of several: with their standard deviation. Nothing where there is none."""
    many = [value for value in values if value is not None]
    if not many:
        return ""
    spread = f" ± {statistics.stdev(many):.{digits}f}" if len(many) > 1 else ""
    return f"{statistics.mean(many):.{digits}f}{spread}"


def more(value: float | None, than: float | None, digits: int = 2) -> str:
    return "" if value is None or than is None else f"{value - than:+.{digits}f}"


def millions(row: Row) -> str:
    return "" if row["parameters"] is None else f"{row['parameters'] / 1e6:.2f} M"


def made_with(rows: list[Row]) -> str:
    """Where rows were made, by what they record themselves.

    Runs that share a machine wait for one another, so their seconds are no more than a hint.
    """
    device, torch, commit = (", ".join(dict.fromkeys(brief(row[name]) for row in rows)) for name in ("device", "torch", "commit"))
    jobs = max(row["jobs"] for row in rows)
    shared = f"; up to {jobs} runs at a time shared it, and seconds count that" if jobs > 1 else ""
    return f"({device}, torch {torch}, commit {commit}{shared}.)"


def brief(name: str) -> str:
    """The name of a commit is as long as git shows it; others stay."""
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", name)


def learned_from(rows: list[Row]) -> str:
    """How many examples, where runs say it; windows of one text may overlap, so they are those of an epoch."""
    found = dict.fromkeys(f"{x['examples']:,}" for row in rows if (x := row.get("data")))
    return f", {' or '.join(found)} examples an epoch" if found else ""


def floors_of(floors: Made, task: str) -> list[Row]:
    return [row for row in floors["rows"] if row["task"] == task]


def floor_lines(floors: list[Row], keys: Sequence[str], behind: Callable[[Row], list[str]]) -> list[list[str]]:
    """What needs no network, under what does."""
    return [[f"floor: {x['floor']}", *(_cell(key, [x["scores"].get(key)]) for key in keys), *behind(x)] for x in floors]


def _no_floors(floors: list[Row]) -> list[str]:
    return [] if floors else [f"Floors: {not_yet('floors.py')}"]


def signatures(rows: list[Row]) -> str:
    """How scores were computed, once each."""
    found = {(name, how): None for row in rows for name, how in answered(row)["signatures"].items()}
    return "; ".join(f"{NAMES.get(name, name)} is sacreBLEU's `{how}`" for name, how in found) + "." if found else ""


def translation(made: Made, floors: Made) -> str:
    """Seeds and their mean over their floors, then other mixers, which have fewer updates."""
    rows, mixed, low = of(made, "translate"), of(made, "mixers"), floors_of(floors, "multi30k")
    parts = [] if rows else [measure("translate")]
    parts += [_seeds(rows, low)] if rows or low else []
    parts += _no_floors(low)
    parts += [signatures(rows)] if rows else []
    parts += [_mixers(rows, mixed) if mixed else f"The same model with another mixer: {measure('mixers')}"]
    return "\n\n".join([*parts, *([made_with(rows + mixed)] if rows + mixed else [])])


def _plain(rows: list[Row]) -> list[Row]:
    """The lower-cased model of softmax, by seeds: what others are compared with."""
    return [row for row in rows if row["settings"]["lower"]]


def _by_settings(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        own = " ".join(text for text in row["sets"] if not text.startswith("seed="))
        found.setdefault(code(own) if own else "as it is", []).append(row)
    return found


def _seeds(rows: list[Row], floors: list[Row]) -> str:
    keys, plain, cased = ("bleu", "bleu_cased", "exact"), _plain(rows), [row for row in rows if not row["settings"]["lower"]]
    body = []
    for how, own in _by_settings(plain).items():
        body += [_line(f"{'' if i else how + ', '}seed {row['settings']['seed']}", [row]) for i, row in enumerate(own)]
        body += [_line(f"mean of {len(own)} ± their deviation", own)] if len(own) > 1 else []
    body += [_line(f"cased, seed {row['settings']['seed']}", [row]) for row in cased]
    body += floor_lines(floors, keys, lambda _: ["", "", ""])
    return table(["", *(NAMES[key] for key in keys), "parameters", "steps", "seconds"], body)


def _line(name: str, rows: list[Row]) -> list[str]:
    scores = [mean(answered(row)["scores"].get(key) for row in rows) for key in ("bleu", "bleu_cased", "exact")]
    return [name, *scores, millions(rows[0]), f"{rows[0]['steps']:,}", short(statistics.mean(row["seconds"] for row in rows))]


def _mixers(full: list[Row], mixed: list[Row]) -> str:
    """Against the softmax that had as few updates, not against the seeds. One seed each."""
    plain = next((bleu(row) for row in mixed if row["settings"]["mixer"] == "softmax"), None)
    many = ", ".join(dict.fromkeys(f"{row['steps']:,}" for row in mixed))
    plain_steps = [row["steps"] for row in full if row["settings"]["mode"] == "teacher_forcing"]
    instead = f" instead of the {plain_steps[0]:,} above" if plain_steps else ""
    body = []
    for row in mixed:
        mixer = row["settings"]["mixer"]
        named = code(mixer) if isinstance(mixer, str) else ", ".join(map(code, mixer))
        body.append(
            [
                named,
                f"{bleu(row):.2f}",
                more(bleu(row), plain) if mixer != "softmax" else "",
                millions(row),
                short(row["seconds"]),
            ]
        )
    how = f"had the settings of `teacher_forcing` and {many} updates{instead}"
    text = f"The same model with another mixer; all of this table, softmax too, {how}:\n\n"
    return text + table(["", "BLEU", "against softmax", "parameters", "seconds"], body)


def parts(made: Made) -> str:
    """One part of the model exchanged in each line, against the model as it is after as many updates. One seed each."""
    rows = of(made, "parts")
    if not rows:
        return measure("parts")
    plain = next((row for row in rows if all(row["settings"][name] == value for name, value in AS_IT_IS.items())), None)
    body = []
    for row in rows:
        own = {name: row["settings"][name] for name, value in AS_IT_IS.items() if row["settings"][name] != value}
        named = " ".join(f"{name}={value}" for name, value in (own or AS_IT_IS).items())
        against = more(bleu(row), bleu(plain)) if own and plain else ""
        body.append([code(named), f"{bleu(row):.2f}", against, mean([watched(row)]), millions(row), short(row["seconds"])])
    many = ", ".join(dict.fromkeys(f"{row['steps']:,}" for row in rows))
    head = ["", "BLEU", "against the model as it is", "on validation, greedily", "parameters", "seconds"]
    return f"{many} updates each. {made_with(rows)}\n\n{table(head, body)}"


def decodings(made: Made) -> str:
    """What beams, averaging and further training give, or do not."""
    plain = [row for row in _plain(of(made, "translate")) if len(row["scores"]) > 1]
    # those of mixers and of parts are short: ten checkpoints are all that they save, and the first of them knows little
    averaged = [row for row in made["rows"] if row["val"]["averaged"] is not None and row["group"] not in ("mixers", "parts")]
    modes = of(made, "modes")
    return "\n\n".join(
        [
            *([_beams(row) for row in plain] or [measure("translate")]),
            "Averaged weights against the best single ones, on validation (decoded greedily); the better were kept:",
            _averages(averaged) if averaged else measure("translate", "tag", "copy"),
            "Trained further, from a finished run; `teacher_forcing` is the control, which is fed nothing but true tokens:",
            _modes(modes, made["rows"]) if modes else measure("translate", "modes"),
        ]
    )


def _beams(row: Row) -> str:
    """All ways in which one model was asked."""
    ways = [x for x in row["scores"] if x["split"] == "test"]
    ways.sort(key=lambda x: (x["settings"]["beam"], x["settings"]["length_penalty"]))
    greedy = next((x["scores"]["bleu"] for x in ways if x["settings"]["beam"] == 1), None)
    body = [
        [
            beam if (beam := x["settings"]["beam"]) > 1 else "1, greedy",
            x["settings"]["length_penalty"] if beam > 1 else "",
            f"{x['scores']['bleu']:.2f}",
            more(x["scores"]["bleu"], greedy) if beam > 1 else "",
            f"{x['scores']['exact']:.2f}",
        ]
        for x in ways
    ]
    head = ["beams", "length penalty", "BLEU", "against greedy", NAMES["exact"]]
    return f"{row['name']}, by decoding settings:\n\n" + table(head, body)


def _averages(rows: list[Row]) -> str:
    body = []
    for row in rows:
        metric = next(name for name in row["val"] if name not in ("step", "averaged"))
        single, several = best(row), row["val"]["averaged"]
        cells = [mean([single]), mean([several]), more(several, single)]
        body.append([row["name"], NAMES.get(metric, metric), row["settings"]["average"], *cells, row["chosen"]])
    return table(["", "score", "checkpoints", "best single", "their average", "difference", "kept"], body)


def _modes(rows: list[Row], known: list[Row]) -> str:
    body = []
    for row in rows:
        began = _before(row, known)
        before = (bleu(began), watched(began)) if began else (None, None)
        body.append(
            [
                code(row["settings"]["mode"].partition("(")[0]),
                began["name"] if began else Path(row["settings"]["init_from"]).name,
                f"{bleu(row):.2f}",
                more(bleu(row), before[0]),
                mean([watched(row)]),
                more(watched(row), before[1]),
                f"{row['steps']:,}",
                f"{row['settings']['batch_tokens']:,}",
                row["device"] or "",
            ]
        )
    head = ["mode", "after", "BLEU", "difference", "on validation, greedily", "difference", "steps", "tokens a step", "device"]
    return table(head, body)


def _before(row: Row, known: list[Row], what: str = "init_from") -> Row | None:
    """The run it began from, or was taught by: its folder is called as the row is, without signs."""
    folder = Path(row["settings"][what]).name.removesuffix(".taught")
    return next((x for x in known if folder == "".join(c if c.isalnum() or c in "._-" else "-" for c in x["name"])), None)


def parallel(made: Made, speeds: Made) -> str:
    """All at once against word by word: how good, then how fast."""
    rows = of(made, "parallel")
    taught = (_before(row, made["rows"], "distilled") for row in rows)
    slow = next((row for row in taught if row is not None), None) or next(iter(_plain(of(made, "translate"))), None)
    parts = [_at_once(rows, slow) if rows else measure("translate", "parallel")]
    parts.append(_speeds(speeds) if speeds["rows"] else not_yet("nat_speed.py --runs RUN ... --device cuda"))
    return "\n\n".join(parts)


def _at_once(rows: list[Row], slow: Row | None) -> str:
    """The first line is the model that goes word by word, greedily if it was asked so; differences are from that."""
    ways: list[tuple[Row, dict[str, Any]]] = []
    if slow:
        greedy = [x for x in slow["scores"] if x["settings"]["beam"] == 1 and x["split"] == "test"]
        ways += [(slow, x) for x in [*greedy, *(x for x in [answered(slow)] if x not in greedy)]]
    first = ways[0][1]["scores"]["bleu"] if ways else None
    ways += [(row, answered(row)) for row in rows]
    body = []
    for place, (row, x) in enumerate(ways):
        how = ", ".join(f"{name}={value}" for name, value in x["settings"].items() if name in ("beam", "decoder"))
        taught = "distilled targets" if row["settings"]["distilled"] else "the data"
        score = x["scores"]["bleu"]
        cells = [taught, how or "one pass", f"{score:.2f}", more(score, first) if place else "", millions(row)]
        body.append([code(row["settings"]["decoder"]), *cells])
    return table(["decoder", "learned from", "asked with", "BLEU", "against the first line" if slow else "", "parameters"], body)


def _speeds(made: Made) -> str:
    """One sentence at a time; a column for each way to go word by word that others are compared with."""
    w, rows = made["made_with"], made["rows"]
    bases = [key for key in rows[0] if key.startswith("speedup_") and any(row[key] is not None for row in rows)]
    body = []
    for row in rows:
        ratios = ["" if row[key] is None else f"{row[key]:.2f} x" for key in bases]
        numbers = [mean([row["bleu"]]), short(row["ms_per_sentence"]), short(row["tokens_per_second"])]
        body.append([row["name"], row["way"], *numbers, f"{100 * row['same']:.1f}", *ratios])
    text = (
        f"The speed of one sentence, the mean of {made['settings']['sentences']:,}; `ready` is `StaticDecoder` or `NatDecoder`, "
        f"with the BLEU of its model. ({w['device']}, torch {w['torch']}, commit {w['commit']}.)\n\n"
    )
    against = [f"times as fast as {key.removeprefix('speedup_').replace('_', ' ')}" for key in bases]
    return text + table(["run", "", "BLEU", "ms", "tokens a second", "answers as the model's, %", *against], body)


def tasks(made: Made, floors: Made, small: Made) -> str:
    """One table for each task, with all scores that it has, those of its preset for a CPU and its floors."""
    parts, shown = [], list[Row]()
    for name, group in OTHERS.items():
        rows, low = [row for row in of(made, group) if row["task"] == name], floors_of(floors, name)
        presets = [row for row in small["rows"] if row["task"] == name]
        about = f"`{name}`: {TASKS[name].summary} (data: `{TASKS[name].data}`{learned_from(rows)})."
        absent = "The model as it is: n" + measure(group)[1:] if presets else measure(group)
        parts += [" ".join([about, *([] if rows else [absent]), *_no_floors(low)])]
        parts += [_scored(rows, presets, low)] if rows or presets or low else []
        shown += rows
    return "\n\n".join([*parts, *([made_with(shown)] if shown else [])])


def _scored(rows: list[Row], presets: list[Row], floors: list[Row]) -> str:
    found = [answered(row) for row in rows]
    all_scores = [x["scores"] for x in [*found, *presets, *floors]]
    keys = list(dict.fromkeys(key for scores in all_scores for key in scores if not key.startswith("floor")))  # own lines
    body = [
        [
            ", ".join(row["sets"]) or "as it is",
            *(_cell(key, [x["scores"].get(key)]) for key in keys),
            x["split"],
            millions(row),
            f"{row['steps']:,}",
            short(row["seconds"]),
        ]
        for row, x in zip(rows, found, strict=True)
    ]
    for how, own in _by_settings(rows).items():
        if len(own) > 1:
            several = [answered(row) for row in own]
            cells = [_cell(key, [x["scores"].get(key) for x in several]) for key in keys]
            took = short(statistics.mean(row["seconds"] for row in own))
            name = f"mean of {len(own)} ± their deviation" + (f", {how}" if how != "as it is" else "")
            body.append([name, *cells, several[0]["split"], "", "", took])
    for row in presets:
        cells = [_cell(key, [row["scores"].get(key)]) for key in keys]
        took = f"{row['minutes'] * 60:.0f} (CPU, {_threads(row['threads'])})"
        body.append(["`--preset cpu`", *cells, row["split"], millions(row), f"{row['updates']:,}", took])
    body += floor_lines(floors, keys, lambda x: [x["split"], "", "", ""])
    return table(["", *(NAMES.get(key, key) for key in keys), "on", "parameters", "steps", "seconds"], body)


def _cell(key: str, values: list[float | None]) -> str:
    if key in COUNTS:
        return " / ".join(dict.fromkeys("" if value is None else f"{value:,.0f}" for value in values))
    return mean(values, digits=4 if key in ("loss", "bits") else 2)


BOARD_POINTS = 19 * 19
BOARD_SCORES = ("top5", "top1_moves_1_50", "top1_moves_51_150", "top1_moves_151_on")


def boards(made: Made) -> str:
    """Small networks over a board of Go, alike but for what reads it: means over seeds, differences from convolutions alone."""
    rows = of(made, "boards")
    if not rows:
        return measure("boards")
    by_net: dict[str, list[Row]] = {}
    for row in rows:
        by_net.setdefault(row["settings"]["net"], []).append(row)
    plain = {row["settings"]["seed"]: answered(row)["scores"]["top1"] for row in by_net.get("conv", [])}
    body = []
    for net, own in by_net.items():
        scores = [", ".join(f"{answered(row)['scores']['top1']:.2f}" for row in own)]
        scores += [mean(answered(row)["scores"].get(key) for row in own) for key in BOARD_SCORES]
        both = [row for row in own if net != "conv" and row["settings"]["seed"] in plain]
        away = [answered(row)["scores"]["top1"] - plain[row["settings"]["seed"]] for row in both]
        against = ", ".join(f"{value:+.2f}" for value in away)
        took = short(statistics.mean(row["seconds"] for row in own))
        body.append([code(f"net={net}"), len(own), millions(own[0]), *scores, against, took])
    head = [
        "",
        "seeds",
        "parameters",
        "top-1, %, by seed",
        *(NAMES[key] for key in BOARD_SCORES),
        "top-1 against `net=conv`",
        "seconds",
    ]
    settings = rows[0]["settings"]
    size, boards_each = f"Width {settings['width']}, {settings['depth']} blocks", settings["batch_tokens"] // BOARD_POINTS
    about = f"{size}, {rows[0]['steps']:,} updates of {boards_each} boards; mean over seeds ± their deviation."
    return f"{about} {made_with(rows)}\n\n{table(head, body)}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def cpu_presets(made: Made) -> str:
    """Minutes and scores of the presets for a CPU, beside the best floor of each task."""
    if not made["rows"]:
        return not_yet("cpu_presets.py")
    body = []
    count = made["rows"][0]["threads"]
    for row in made["rows"]:
        name, better = TASKS[row["task"]].best
        floors = [(x["scores"][name], x["floor"]) for x in row["floors"] if name in x["scores"]]
        floor = (min if better == "min" else max)(floors, default=None)
        body.append(
            [
                code(row["task"]),
                f"{row['parameters'] / 1e6:.1f} M",
                f"{row['updates']:,}",
                f"{row['minutes']:.0f}" + (f" ({_threads(row['threads'])})" if row["threads"] != count else ""),
                f"{NAMES[name]} on {row['split']}",
                f"{row['scores'][name]:.2f}",
                "" if floor is None else f"{floor[0]:.2f}: {floor[1]}",
            ]
        )
    made_with = made["made_with"]
    commits = ", ".join(dict.fromkeys(row.get("commit", made_with["commit"])[:7] for row in made["rows"]))
    source = f"({made_with['device']}, {_threads(count)}, torch {made_with['torch']}, commit {commits}.)"
    head = ["task", "parameters", "updates", "minutes", "score", "reached", "best floor"]
    return f"Minutes of training, validations included. {source}\n\n{table(head, body)}"
