"""`regard tasks` names what can be learned, and every setting of one of them. Imports no torch."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from regard.cli.completion import complete_preset, complete_task
from regard.cli.console import aside, columns, screen, sentences, write_json
from regard.cli.task_times import TaskTime, keep_time, kept_time
from regard.options import Options, field_comments, option_lines
from regard.tasks import TASKS, Entry, config, entry_of

NOT_COUNTED = "updates alone: reading data and validations come on top"


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="One of them, with all of its settings.", autocompletion=complete_task),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A machine-readable list, with all settings.")] = False,
    timed: Annotated[
        bool, typer.Option("--time", help="Measure a few updates of each task whose data is here, and how many threads suit it.")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With TASK: its settings in a preset, such as cpu.", autocompletion=complete_preset),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --time: the folder of the data, or above it; else REGARD_DATA.")
    ] = None,
) -> None:
    """Name every task, the data it needs, its score, and what training it takes by default."""
    with sentences():
        entries = TASKS if name is None else {name: entry_of(name)}
        if preset is not None and name is None:
            raise ValueError("which task? A preset is one of a task: regard tasks multi30k --preset cpu")
        if preset is not None:
            entries = {word: _with_preset(word, preset) for word in entries}
        if timed:
            _measure(entries, data, must=name is not None)
    if as_json:
        write_json([_entry_json(word, entry) for word, entry in entries.items()])
    elif name is not None:
        _show_settings(name, entries[name])
    else:
        _show_tasks(entries)


def _with_preset(name: str, preset: str) -> Entry:
    """Return the row of a task that begins with the settings of a preset."""
    made = config(name, preset)
    return entry_of(name)._replace(config=lambda: made)


def _measure(entries: Mapping[str, Entry], data: Path | None, must: bool) -> None:
    """Measure and keep the times of tasks; those without their data are left out, or refused where one `must` be measured."""
    import torch

    from regard.data.text_files import DataError
    from regard.training.update_time import thread_counts, update_seconds

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    counts = thread_counts(torch.get_num_threads()) if kind == "cpu" else [torch.get_num_threads()]
    for word, entry in entries.items():
        made = entry.make(entry.config())
        try:
            made.read(data)
        except DataError as error:
            if must:
                raise
            aside(f"{word} is left out: {str(error).partition('. ')[0]}")
            continue
        measured = TaskTime(update_seconds(made, kind, counts), kind)
        keep_time(made.config, measured)
        aside(f"{word}: {measured.describe(made.config)}{f' ({measured.others()})' if measured.others() else ''}")


def _show_tasks(entries: dict[str, Entry]) -> None:
    times = {word: kept_time(entry.config()) for word, entry in entries.items()}
    here = ["here"] if any(times.values()) else []
    table = columns("name", "what it is", "data", "score", "by default", *here)
    for word, entry in entries.items():
        config, score, measured = entry.config(), entry.best[0], times[word]
        updates = f"{config.steps:,} updates of {config.batch_tokens:,} tokens"
        took = [measured.describe(config).partition(":")[0] if measured else ""] if here else []
        table.add_row(word, entry.summary, _data(entry), score, updates, *took)
    console = screen()
    console.print(table, highlight=False)
    console.print(NOT_COUNTED if here else "How long they take here: regard tasks --time", style="dim", highlight=False)
    console.print("All settings of one: regard tasks reverse      Learn it: regard train reverse", style="dim", highlight=False)


def _show_settings(name: str, entry: Entry) -> None:
    console, config = screen(), entry.config()
    console.print(f"\n{name}: {entry.summary}", style="bold", markup=False, highlight=False)
    console.print(f"data: {_data(entry)}", markup=False, highlight=False)
    if (measured := kept_time(config)) is not None:
        others = f" ({measured.others()})" if measured.others() else ""
        console.print(f"time: {measured.describe(config)}{others}; {NOT_COUNTED}", markup=False, highlight=False)
    table, comments = columns("name", "by default", "what it is"), field_comments(type(config))
    for key, value in config.to_json().items():
        if key != "task":
            table.add_row(key, Text(_written(value)), Text(comments.get(key, "")))
    console.print(table, highlight=False)
    for key, kinds in config.families.items():
        console.print(_options_table(key, kinds), highlight=False)
    for word in entry.presets:
        what = "Settings for a machine without a GPU" if word == "cpu" else "Other settings"
        console.print(f"{what}: --preset {word}", style="dim", highlight=False)
    console.print(f"Another value: regard train {name} --set width=128", style="dim", highlight=False)
    for key, kinds in config.families.items():
        example = str(next(kind for kind in kinds.values() if option_lines(kind))())
        console.print(f"With options: --set {shlex.quote(f'{key}={example}')}", style="dim", markup=False, highlight=False)


def _options_table(key: str, kinds: Mapping[str, type[Options]]) -> Table:
    """List the choices of a setting, and below each of them its options."""
    table = columns(key, "option", "by default", "what it is")
    for word, kind in kinds.items():
        table.add_row(word, "", "", Text(inspect.getdoc(kind) or ""))
        for line in option_lines(kind):
            table.add_row("", line.name, Text(line.default), Text(line.comment))
    return table


def _written(value: Any) -> str:
    """Write a value as --set reads it."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _data(entry: Entry) -> str:
    """Name the data set that a task needs, and whether it is here."""
    from regard.data.locate import stored_form
    from regard.data.text_files import DataError

    if entry.file:
        return f"your file ({entry.file})"
    if entry.data is None:
        return "none"
    try:
        return f"{stored_form(entry.data)} (is there)"
    except DataError:
        return f"{entry.data} (needs REGARD_DATA)"


def _entry_json(word: str, entry: Entry) -> dict[str, object]:
    score, better = entry.best
    config = entry.config()
    options = {
        key: {name: [line._asdict() for line in option_lines(kind)] for name, kind in kinds.items()}
        for key, kinds in config.families.items()
    }
    return {
        "name": word,
        "summary": entry.summary,
        "data": entry.data,
        "file": entry.file or None,
        "score": score,
        "better": better,
        "settings": config.to_json(),
        "options": options,
        "presets": {name: dict(changes) for name, changes in entry.presets.items()},
        "time": None if (measured := kept_time(config)) is None else measured._asdict(),
    }
