"""`regard tasks` names what can be learned, and every setting of one of them. Imports no torch."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from regard.cli.completion import complete_task
from regard.cli.console import columns, screen, sentences, write_json
from regard.options import Options, field_comments, option_lines
from regard.tasks import TASKS, Entry, entry_of


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="One of them, with all of its settings.", autocompletion=complete_task),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A machine-readable list, with all settings.")] = False,
) -> None:
    """Name every task, the data it needs, its score, and what training it takes by default."""
    with sentences():
        entries = TASKS if name is None else {name: entry_of(name)}
    if as_json:
        write_json([_entry_json(word, entry) for word, entry in entries.items()])
    elif name is not None:
        _show_settings(name, entries[name])
    else:
        _show_tasks(entries)


def _show_tasks(entries: dict[str, Entry]) -> None:
    table = columns("name", "what it is", "data", "score", "by default")
    for word, entry in entries.items():
        config, score = entry.config(), entry.best[0]
        table.add_row(word, entry.summary, _data(entry), score, f"{config.steps:,} updates of {config.batch_tokens:,} tokens")
    console = screen()
    console.print(table, highlight=False)
    console.print("All settings of one: regard tasks reverse      Learn it: regard train reverse", style="dim", highlight=False)


def _show_settings(name: str, entry: Entry) -> None:
    console, config = screen(), entry.config()
    console.print(f"\n{name}: {entry.summary}", style="bold", markup=False, highlight=False)
    console.print(f"data: {_data(entry)}", markup=False, highlight=False)
    table, comments = columns("name", "by default", "what it is"), field_comments(type(config))
    for key, value in config.to_json().items():
        if key != "task":
            table.add_row(key, Text(_written(value)), Text(comments.get(key, "")))
    console.print(table, highlight=False)
    for key, kinds in config.families.items():
        console.print(_options_table(key, kinds), highlight=False)
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
    from regard.data.locate import find
    from regard.data.text_files import DataError

    if entry.file:
        return f"your file ({entry.file})"
    if entry.data is None:
        return "none"
    try:
        find(entry.data)
    except DataError:
        return f"{entry.data} (needs REGARD_DATA)"
    return f"{entry.data} (is there)"


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
    }
