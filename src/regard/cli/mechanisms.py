"""`regard list` names every mechanism, `regard show SPEC` prints and draws what one of them does, `regard show RUN TEXT` has a
module of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from regard.cli.completion import complete_spec
from regard.cli.console import aside, columns, labelled, screen, sentences, write_json
from regard.cli.infer import Changes, CheckpointName, Device
from regard.cli.mechanism_table import options_text, read_mechanisms
from regard.cli.picture_file import check_out, load_plot, save_picture
from regard.cli.show_attention import show_attention
from regard.installed_mechanisms import installed_mechanisms
from regard.text import growth

if TYPE_CHECKING:
    from regard.analysis.cost import Cost
    from regard.mixers.base import Dims
    from regard.spec import Spec

SHOWN_HEADS, SHOWN_WIDTH = 4, 256  # of a mechanism that is shown


def list_(
    options: Annotated[bool, typer.Option("--options", help="What each can do, and its options with their defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A machine-readable list, with all options.")] = False,
) -> None:
    """Name every mechanism, what it does, and how its cost grows with the length."""
    known = read_mechanisms()
    if as_json:
        own = [{"name": name, "family": "own", "class": make} for name, make in _installed(known).items()]
        write_json([*known["mechanisms"], *own])
    elif options:
        _print_options(known)
    else:
        _print_list(known)


def _installed(known: dict[str, Any]) -> dict[str, str]:
    """Return the classes of installed packages by name, without importing them; one whose name is taken is left out and named."""
    taken = {*(row["name"] for row in known["mechanisms"]), *known["patterns"]}
    found = installed_mechanisms()
    for name in found.keys() & taken:
        aside(f"{found[name]} is left out: its name {name} is taken")
    return {name: make for name, make in found.items() if name not in taken}


def _print_options(known: dict[str, Any]) -> None:
    table = columns("name", "can do", "options")
    for row in known["mechanisms"]:
        claims = ", ".join(row["claims"]) or "nothing"
        table.add_row(row["name"], claims, Text(options_text(row["options"]) or "none"))
    console = screen()
    console.print(table, highlight=False)
    _print_installed(console, known)


def _print_installed(console: Console, known: dict[str, Any]) -> None:
    for name, make in _installed(known).items():
        console.print(f"installed  {name}: {make}", highlight=False, markup=False)


def _print_list(known: dict[str, Any]) -> None:
    table = columns("name", "what it does", "cost", "memory")
    for row in known["mechanisms"]:
        table.add_row(row["name"], row["summary"], growth(row["cost"], "n"), growth(row["memory"], "t"))
    console = screen()
    console.print(table)
    console.print(f"patterns   {', '.join(known['patterns'])}", highlight=False)
    console.print(f"positions  {', '.join(known['positions'])}", highlight=False)
    _print_installed(console, known)
    after = "\nOne in detail, with its paper: regard show bigbird      What each can do, and its options: regard list --options"
    console.print(after, style="dim", highlight=False)


def show(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|RUN",
            help="A name, with options or without, or a pattern: 'Local(256) | Global(first=4)'; or the folder of a run.",
            autocompletion=complete_spec,
        ),
    ],
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT|FILE", help="With RUN: what the trained model reads: a text, an image, a wav file."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=2**17, help="Tokens in the sequence; several windows of a pattern unless given.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="No token sees a later one.")] = False,
    heads: Annotated[int, typer.Option(min=1, max=256)] = SHOWN_HEADS,
    width: Annotated[int, typer.Option(min=1, max=2**13)] = SHOWN_WIDTH,
    patch: Annotated[
        str | None, typer.Option(metavar="ROW,COLUMN", help="With RUN and an image: also draw what this patch reads: 3,5.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draw it into this file (.png, .pdf or .svg).")] = None,
    checkpoint: CheckpointName = None,
    changes: Changes = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The numbers, machine-readable.")] = False,
) -> None:
    """Print what a mechanism costs and keeps at a length, and draw which query reads which key; or, with the folder of a run and
    a text, an image or a recording, draw the attention of every layer and head of the trained model on it, and alignments.
    """
    if text is not None:
        with sentences():
            if length is not None or causal or (heads, width) != (SHOWN_HEADS, SHOWN_WIDTH):
                raise ValueError("length, causal, heads and width are for a mechanism: a run has its own, leave them out")
            show_attention(Path(spec), text, changes or [], device, checkpoint, out, as_json, patch)
        return
    from regard.analysis.cost import cost
    from regard.bench.backend_log import backends_here
    from regard.mixers.base import Dims

    with sentences():
        if checkpoint is not None or changes or device != "auto" or patch is not None:
            raise ValueError("--checkpoint, --set, --device and --patch are for a run and a text: regard show RUN TEXT")
        parsed, dims = _parsed(spec), Dims(width=width, heads=heads, causal=causal)
        check_out(out)
    with sentences(parsed):
        length = _usual_length(parsed, dims) if length is None else length
        known = cost(parsed, length, causal=causal, heads=heads, width=width)
        ran = backends_here(parsed, dims, length)
        if out is not None:
            picture = load_plot("mechanism_plot", "picture")
            save_picture(lambda: picture(known), out)
    if as_json:
        write_json(known.to_json() | {"ran": ran})
    else:
        _print_cost(known, ran, out)


def _parsed(text: str) -> Spec:
    """Parse a mechanism; the folder of a run needs a text."""
    from regard.spec import Spec

    try:
        return Spec.parse(text)
    except ValueError:
        if not Path(text).is_dir():
            raise
        raise ValueError(f"{text} is a folder: to see where a trained run attends, regard show {text} TEXT") from None


def _usual_length(spec: Spec, dims: Dims) -> int:
    """Several windows of its pattern, or a length that suits any mechanism."""
    import torch

    from regard.analysis.cost import pattern_of
    from regard.patterns.density import several_windows

    with torch.device("meta"):
        return several_windows(pattern_of(spec.build(replace(dims, max_len=64))))


def _print_cost(known: Cost, ran: dict[str, Any], out: Path | None) -> None:
    from regard.spec import option_defaults

    console = screen()
    table = labelled([("default options", options_text(option_defaults(known.spec.name)) or "none"), *known.lines()])
    python = f"from regard import layer; layer({str(known.spec)!r}, width={known.dims.width}, heads={known.dims.heads}"
    table.add_row("backend here", f"{', '.join(ran['backends']) or 'one implementation'} ({ran['device']}, {ran['dtype']})")
    table.add_row("", "")
    length = f", max_len={known.length}" if known.spec.needs_length(known.dims) else ""
    table.add_row("build it", f"{python}{', causal=True' if known.dims.causal else ''}{length})")
    table.add_row("picture", f"{out} is written" if out else f"add --out {known.spec.row.name}.png")
    console.print(f"\n{known.spec}", style="bold", markup=False, highlight=False)
    console.print(f"{known.spec.row.summary}\n", markup=False, highlight=False)
    console.print(table, highlight=False)
