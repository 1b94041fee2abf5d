"""`regard check SPEC` checks the laws that every mechanism must keep, and prints what is broken, where, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli.completion import complete_spec
from regard.cli.console import columns, screen, sentences, write_json

if TYPE_CHECKING:
    from regard.laws import Finding

_STYLES = {"pass": "green", "failed": "bold red", "does not apply": "dim"}


def check(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC",
            help="Your class, mypkg.mod:MyCore, a name, with options or without, or a pattern.",
            autocompletion=complete_spec,
        ),
    ] = None,
    law: Annotated[list[str] | None, typer.Option(help="Check this law alone; may be given several times.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Every law and its outcome, machine-readable.")] = False,
) -> None:
    """Check the laws that every mechanism must keep; exit code 1 if one is broken. Without SPEC: name all laws."""
    from regard.laws import check_laws
    from regard.spec import Spec

    if spec is None:
        _list_laws(as_json)
        return
    console = screen()
    with sentences():
        parsed = Spec.parse(spec)
    with sentences(parsed):
        found = check_laws(parsed, law, device=device, report=None if as_json else _Report(console))
    failed = sum(finding.failed for finding in found)
    if as_json:
        write_json({"spec": str(parsed), "broken": failed, "laws": [finding.to_json() for finding in found]})
    else:
        unfit = sum(finding.outcome == "does not apply" for finding in found)
        kept = len(found) - failed - unfit
        console.print(Text(f"\n{parsed}: {kept} kept, {failed} broken, {unfit} not applicable"))  # a str may be read as markup
    if failed:
        raise typer.Exit(1)


def _list_laws(as_json: bool) -> None:
    from regard.laws import LAWS

    if as_json:
        write_json([{"law": law.name, "sentence": law.sentence} for law in LAWS.values()])
        return
    table = columns("name", "law")
    for law in LAWS.values():
        table.add_row(law.name, Text(law.sentence))
    console = screen()
    console.print(table, highlight=False)
    console.print("Check a mechanism: regard check mypkg.mod:MyCore", style="dim", highlight=False)


class _Report:
    """Print each law: outcome, name and sentence, and below a broken one the numbers, the smallest case and what to do next."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.raised: dict[str, str] = {}  # errors by their line, and the first law that they broke

    def __call__(self, finding: Finding) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        for width in (14, 30, None):
            table.add_column(width=width, no_wrap=width is not None, overflow="fold")
        about = finding.reason if finding.outcome == "does not apply" else finding.law.sentence
        table.add_row(Text(finding.outcome, _STYLES[finding.outcome]), finding.law.name, Text(about))
        for label, line in self._why(finding).items():
            table.add_row("", Text(label.rjust(30), "dim"), Text(line))
        self.console.print(table, highlight=False)

    def _why(self, finding: Finding) -> dict[str, str]:
        """Return what is printed below a broken law; an error that broke another one already is named alone."""
        if not finding.failed:
            return {}
        first = self.raised.setdefault(finding.raised, finding.law.name)
        if finding.raised and first != finding.law.name:
            return {"broken": f"{finding.raised}, as in {first}"}
        return {"broken": finding.reason, "built": finding.built, "again": finding.smallest, "next": finding.advice}
