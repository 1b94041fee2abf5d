"""`regard tasks` names what can be learned, `regard train TASK` learns it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import settings
from regard.cli.say import aside, columns, labelled, screen, sentences, stop, write_json
from regard.config import Config
from regard.spec import Spec

if TYPE_CHECKING:
    from regard.tasks import Entry, Task
    from regard.training.fit import Result

RUNS = Path("runs")


def tasks(
    name: Annotated[str | None, typer.Argument(metavar="[TASK]", help="One of them, with all of its settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A machine-readable list, with all settings.")] = False,
) -> None:
    """Name every task, the data it needs, its score, and what training it takes by default."""
    from regard import tasks as known

    with sentences():
        wanted = list(known.TASKS) if name is None else [known.config(name).task]
    entries = {word: known.TASKS[word] for word in wanted}
    if as_json:
        write_json([_entry_json(word, entry) for word, entry in entries.items()])
    elif name is not None:
        _show_settings(name, entries[name])
    else:
        _show_tasks(entries)


def _show_tasks(entries: dict[str, Entry]) -> None:
    table = columns("name", "what it is", "data", "score", "by default")
    for word, entry in entries.items():
        config, score = entry.config(), _best(entry)[0]
        table.add_row(word, entry.summary, _data(entry), score, f"{config.steps:,} updates of {config.batch_tokens:,} tokens")
    console = screen()
    console.print(table, highlight=False)
    console.print("All settings of one: regard tasks reverse      Learn it: regard train reverse", style="dim", highlight=False)


def _show_settings(name: str, entry: Entry) -> None:
    console = screen()
    console.print(f"\n{name}: {entry.summary}", style="bold", markup=False, highlight=False)
    console.print(f"data: {_data(entry)}\n", markup=False, highlight=False)
    told = {key: value for key, value in entry.config().to_json().items() if key != "task"}
    console.print(labelled((key, "none" if value is None else str(value)) for key, value in told.items()), highlight=False)
    console.print(f"\nAnother value: regard train {name} --set width=128", style="dim", highlight=False)


def _data(entry: Entry) -> str:
    """What it needs, and whether it is here."""
    from regard.data.files import DataError
    from regard.data.find import find

    if entry.data is None:
        return "none"
    try:
        find(entry.data)
    except DataError:
        return f"{entry.data} (needs REGARD_DATA)"
    return f"{entry.data} (is there)"


def _best(entry: Entry) -> tuple[str, str]:
    """The score that chooses, and where it is better."""
    return entry.task(entry.config()).best


def _entry_json(word: str, entry: Entry) -> dict[str, object]:
    score, better = _best(entry)
    told = entry.config().to_json()
    return {"name": word, "summary": entry.summary, "data": entry.data, "score": score, "better": better, "settings": told}


def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Its name: see `regard tasks`.")],
    mixer: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="The mechanism, as in `regard show`; several take turns.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another value of a setting: see `regard tasks TASK`.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the data, or above it; else REGARD_DATA.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; that of an interrupted run makes it go on.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Learn a task with any mechanism. What is interrupted goes on with the same --out."""
    from regard import tasks as known

    with sentences():
        kind = settings.device(device)
        config = settings.asked(task, mixer or [], changes or [], out)
        _check_folder(out, config)
        made = known.task(config)
    settings.check(made)
    with sentences():
        fit = _fitter()
        made.read(data)
        folder = _fresh(config) if out is None else out
        aside(f"{task} with {_mixers(config, ', ')} in {folder}")
    try:
        with sentences():
            result = fit(made, folder, accelerator=kind)
    except KeyboardInterrupt:
        stop(_interrupted(task, folder, data), 130)
    _report(made, folder, result, data)


def _check_folder(out: Path | None, config: Config) -> None:
    """A new one, or one with this very run."""
    from regard.training.store import load_config

    if out is None or not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file: a run needs a folder")
    begun = load_config(out)
    if begun is None:
        if any(not path.name.startswith(".") for path in out.iterdir()):
            raise ValueError(f"{out} is not empty and holds no run: choose another folder")
        return
    now = config.to_json()
    if other := [key for key in now if now[key] != begun.get(key, now[key])]:
        told = "; ".join(f"{key} is {begun[key]!r} there, not {now[key]!r}" for key in other)
        raise ValueError(f"{out} holds a run with other settings: {told}. Choose another folder, or leave the settings out")


def _fitter() -> Callable[..., Result]:
    """What trains: the library behind it is loaded, or missed, before the data is."""
    from regard.training.fit import fit

    return fit


def _mixers(config: Config, between: str = "+") -> str:
    texts = [config.mixer] if isinstance(config.mixer, str) else config.mixer
    named = [Spec.of(text) for text in texts]
    return between.join(dict.fromkeys(spec.name if between == "+" else str(spec) for spec in named))


def _fresh(config: Config) -> Path:
    """A folder with a number that was never used, made at once: nobody else gets it."""
    RUNS.mkdir(exist_ok=True)
    stem = f"{config.task}-{_mixers(config)}-"
    taken = [int(found[1]) for path in RUNS.iterdir() if (found := re.fullmatch(re.escape(stem) + r"(\d+)", path.name))]
    number = max(taken, default=0) + 1
    while True:
        folder = RUNS / f"{stem}{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        return folder


def _interrupted(task: str, folder: Path, data: Path | None) -> str:
    from regard.training import store

    if store.load_config(folder) is None:
        return f"stopped before anything was written into {folder}: train again"
    found = store.steps(folder)
    where = f"behind step {found[-1]}" if found else "from its beginning, as nothing was saved yet,"
    again = shlex.join(["regard", "train", task, "--out", str(folder), *(["--data", str(data)] if data else [])])
    return f"stopped; the run goes on {where} with: {again}"


def _report(made: Task, folder: Path, result: Result, data: Path | None) -> None:
    """What was reached, where it lies, and what to do with it."""
    from regard.training.journal import lines

    best = next((line for line in lines(folder / "metrics.jsonl") if line["step"] == result.best_step), {})
    scores = {**best.get("val", {}), **({} if result.score is None else {result.name: result.score})}
    where = ["--data", str(data)] if data else []
    rows = [("validation", "  ".join(f"{name} {value:.4g}" for name, value in scores.items() if value is not None) or "no score")]
    rows += [("run", str(folder))]
    rows += [("evaluate", shlex.join(["regard", "evaluate", str(folder), *where]))]
    rows += [("predict", f"{shlex.join(['regard', 'predict', str(folder)])} {shlex.quote(_sample(made))}")]
    screen().print(labelled(rows), highlight=False)


def _sample(made: Task) -> str:
    """Something that it could be asked."""
    texts = getattr(made, "texts", {}).get("val")
    source = getattr(texts[0], "source", "…") if isinstance(texts, list) and texts else "…"
    return source if len(source) <= 60 else "…"
