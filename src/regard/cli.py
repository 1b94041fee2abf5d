"""The command line: `regard list` names every mechanism, `regard show SPEC` says and draws what one of them does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from regard._version import version
from regard.catalogue import CATALOGUE
from regard.facts import Facts, facts
from regard.mixers.base import Can, Dims
from regard.mixers.patterns import PATTERNS
from regard.positions import POSITIONS
from regard.row import Row, growth
from regard.spec import Spec
from regard.text import TextError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(help="Every way of paying attention.", no_args_is_help=True, add_completion=False)
FORMATS = (".png", ".pdf", ".svg")


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def options(show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show_version:
        _console().print(f"regard {version}", highlight=False)
        raise typer.Exit


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="A machine-readable list.")] = False) -> None:
    """Name every mechanism, what it can do, and how its cost grows with the length."""
    if as_json:
        _write_json([_row_json(row) for row in CATALOGUE.values()])
        return
    table = _table("name", "family", "can do", "cost", "memory", "paper")
    for row in CATALOGUE.values():
        first = row.examples[0]
        table.add_row(row.name, row.family, str(row.can), growth(first.cost, "n"), growth(first.memory, "t"), row.paper)
    console = _console()
    console.print(table)
    console.print(f"patterns   {', '.join(PATTERNS)}", highlight=False)
    console.print(f"positions  {', '.join(POSITIONS)}", highlight=False)
    console.print("\nOne of them in detail: regard show bigbird", style="dim", highlight=False)


@app.command()
def show(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="A name, with options or without, or a pattern: 'Local(256) | Global(first=4)'.")
    ],
    length: Annotated[int, typer.Option(min=1, max=2**17, help="Tokens in the sequence.")] = 1024,
    causal: Annotated[bool, typer.Option("--causal", help="No token sees a later one.")] = False,
    heads: Annotated[int, typer.Option(min=1, max=256)] = 4,
    width: Annotated[int, typer.Option(min=1, max=2**13)] = 256,
    out: Annotated[Path | None, typer.Option(help="Draw it into this file (.png, .pdf or .svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers, machine-readable.")] = False,
) -> None:
    """Say what a mechanism costs and keeps at a length, and draw who looks at whom."""
    with _sentences():
        asked, _ = Spec.parse(spec), Dims(width=width, heads=heads, causal=causal)
        _check_out(out)
    with _sentences(asked):
        known = facts(asked, length, causal=causal, heads=heads, width=width)
        if out is not None:
            _draw(known, out)
    if as_json:
        _write_json(known.to_json())
    else:
        _report(known, out)


def _report(known: Facts, out: Path | None) -> None:
    console = _console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in known.lines():
        table.add_row(label, value)
    python = f"from regard import layer; layer({str(known.spec)!r}, width={known.dims.width}, heads={known.dims.heads}"
    table.add_row("", "")
    length = f", max_len={known.length}" if known.spec.needs_length(known.dims) else ""
    table.add_row("build it", f"{python}{', causal=True' if known.dims.causal else ''}{length})")
    table.add_row("picture", f"{out} is written" if out else f"add --out {known.spec.name}.png")
    console.print(f"\n{known.spec}", style="bold", markup=False, highlight=False)
    console.print(f"{known.spec.row.summary}\n", markup=False, highlight=False)
    console.print(table, highlight=False)


@contextmanager
def _sentences(asked: Spec | None = None) -> Iterator[None]:
    """A user's mistake is a sentence on stderr and exit code 2, never a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        _stop(str(error) if asked is None or isinstance(error, TextError) else str(_placed(error, asked)))
    except OSError as error:
        _stop(f"cannot write {error.filename or 'the picture'}: {error.strerror or error}")


def _placed(error: Exception, asked: Spec) -> TextError:
    """With a caret under the option that the sentence names along with its value, or else under the mechanism."""
    text, sentence = str(asked), str(error)
    blamed = (text.find(f"{o}=") for o, value in asked.items if o in sentence and repr(value) in sentence)
    return TextError(sentence, text, next(blamed, 0))


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _check_out(out: Path | None) -> None:
    """Before any work is done."""
    if out is None:
        return
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw into {str(out)!r}: the name has to end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not out.parent.is_dir():
        raise ValueError(f"cannot draw into {str(out)!r}: there is no folder {str(out.parent)!r}")


def _draw(known: Facts, out: Path) -> None:
    """Under another name first, so that a half-drawn picture never stands there."""
    picture = _painter()
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        picture(known).savefig(part, format=out.suffix[1:].lower())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def _painter() -> Callable[[Facts], Figure]:
    """Matplotlib is slow to load, an extra, and needed for this alone."""
    try:
        from regard.pictures import picture
    except ModuleNotFoundError as error:
        raise ValueError(f"drawing needs {error.name}: pip install 'regard[draw]'") from None
    return picture


def _row_json(row: Row) -> dict[str, object]:
    first, can = row.examples[0], row.can
    return {
        "name": row.name,
        "family": row.family,
        "summary": row.summary,
        "claims": [c.name.lower() for c in Can if c in can and c.name],
        "cost": first.cost,
        "memory": first.memory,
        "paper": row.paper,
        "example": str(Spec(row.name, **first.options)),
    }


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    return table


def _console() -> Console:
    """Wide where nobody looks at it, so that a line stays a line in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _write_json(data: object) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
