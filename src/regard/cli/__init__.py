"""The command line: mechanisms (`list`, `show`, `check`, `bench`, `advise`, `compare`), kernels (`tune`), tasks and training
(`tasks`, `prepare`, `train`), trained runs (`evaluate`, `predict`, `distil`).
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from regard._version import version
from regard.cli.advise_command import advise
from regard.cli.bench_command import bench
from regard.cli.check_command import check
from regard.cli.compare_command import compare
from regard.cli.console import aside, plain_warnings, screen
from regard.cli.help_examples import help_examples
from regard.cli.infer import distil_, evaluate, predict
from regard.cli.mechanisms import list_, show
from regard.cli.prepare_command import prepare
from regard.cli.signals import Stoppable, handled_signals
from regard.cli.task_list import tasks
from regard.cli.train import TrainCommand, train_
from regard.cli.tune_command import tune

app = typer.Typer(
    cls=Stoppable,
    help="Every way of paying attention.",
    epilog=help_examples("regard"),
    no_args_is_help=True,
)


def main() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the end
    try:
        with handled_signals(), plain_warnings():
            app()
    except SystemExit as ended:
        sys.exit(_flushed() or ended.code)
    except OSError as error:
        aside(f"cannot write the answer: {error.strerror or error}")
        _forget_stdout()
        sys.exit(1)


def _flushed() -> int:
    """Flush stdout; returns 1 if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            aside(f"cannot write the answer: {error.strerror or error}")
        _forget_stdout()
        return 1
    return 0


def _forget_stdout() -> None:
    """Replace stdout: Python would flush it again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@app.callback(invoke_without_command=True)
def options(show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show_version:
        screen().print(f"regard {version}", highlight=False)
        raise typer.Exit


for _command in (list_, show, check, bench, advise, compare, tune, tasks, prepare, train_, evaluate, predict, distil_):
    _name = _command.__name__.rstrip("_")
    app.command(_name, cls=TrainCommand if _command is train_ else None, epilog=help_examples(_name))(_command)
