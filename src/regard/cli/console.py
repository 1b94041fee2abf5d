"""Output of every command: answers on stdout, messages on stderr, and exit code 2 for a mistake. Imports no torch."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.text import TextError

if TYPE_CHECKING:
    from regard.spec import Spec

TOO_LARGE = "there is too little memory for this: use a smaller batch_tokens (and accumulate more), or a smaller model"


@contextmanager
def sentences(spec: Spec | None = None) -> Iterator[None]:
    """Turn a user's mistake into a sentence on stderr and exit code 2, never a traceback."""
    try:
        yield
    except MemoryError:
        stop(TOO_LARGE)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; on a CPU torch raises a plain one
        if "memory" not in str(error) and type(error).__name__ != "OutOfMemoryError":
            raise
        stop(TOO_LARGE)
    except (ValueError, TypeError) as error:
        stop(str(error) if spec is None or isinstance(error, TextError) else str(_placed(error, spec)))
    except ModuleNotFoundError as error:
        if "pip install" not in str(error):  # a mistake of ours
            raise
        stop(str(error))
    except BrokenPipeError:  # the reader is gone: typer ends quietly
        raise
    except OSError as error:
        stop(f"cannot read or write {error.filename or 'a file'}: {error.strerror or error}")


def _placed(error: Exception, spec: Spec) -> TextError:
    """Add a caret under the option that the sentence names along with its value, or else under the mechanism."""
    text, sentence = str(spec), str(error)
    blamed = (text.find(f"{o}=") for o, value in spec.items if o in sentence and repr(value) in sentence)
    return TextError(sentence, text, next(blamed, 0))


def stop(message: str, code: int = 2) -> NoReturn:
    aside(message)
    raise typer.Exit(code)


def aside(message: str) -> None:
    """Print a message that is not part of the answer."""
    Console(stderr=True, emoji=False).print(message, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of this package as plain messages, without their place in the code."""
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        ours = category is UserWarning and "regard" in Path(filename).parts
        aside(str(message)) if ours else shown(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return a value that is allowed, or raise a ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return value


def check_place(path: Path) -> None:
    """Refuse a file in a folder that does not exist, and one that is a folder."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")


def progress_reporter() -> Callable[[int, int, str], None]:
    """Return a function that shows progress on stderr, with the time left: steps done, all steps, a text."""
    from regard.training.progress import Progress, progress

    shown: list[Progress] = []

    def report(done: int, total: int, text: str) -> None:
        if not shown:
            shown.append(progress(total, console=Console(stderr=True, emoji=False)))
        shown[0].score = text
        shown[0].step(done)
        if done == total:
            shown[0].close()

    return report


def number(value: float) -> str:
    """Format a count as an integer and a score with four digits."""
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 1000 else f"{value:.4g}"


def columns(*names: str) -> Table:
    made = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    for name in names:
        made.add_column(name, no_wrap=name == "name")
    return made


def labelled(rows: Iterable[tuple[str, str]]) -> Table:
    """Make a table of two columns: a label and its value."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for label, value in rows:
        made.add_row(label, Text(value))
    return made


def screen() -> Console:
    """Make the console of stdout: 160 columns in a pipe, so that a row stays one line."""
    return Console(width=None if sys.stdout.isatty() else 160, emoji=False)  # :smile: in a name stays as it is


def write_json(data: object) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
