"""The command line: mechanisms (`list`, `show`), tasks and their training (`tasks`, `train`), and what a run can do then."""

from __future__ import annotations

from typing import Annotated

import typer

from regard._version import version
from regard.cli.learn import tasks, train
from regard.cli.mechanisms import list_, show
from regard.cli.say import screen
from regard.cli.use import distil, evaluate, predict

app = typer.Typer(help="Every way of paying attention.", no_args_is_help=True, add_completion=False)


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def options(show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show_version:
        screen().print(f"regard {version}", highlight=False)
        raise typer.Exit


app.command("list")(list_)
for _command in (show, tasks, train, evaluate, predict, distil):
    app.command()(_command)
