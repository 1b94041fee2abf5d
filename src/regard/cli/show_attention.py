"""`regard show RUN TEXT` prints and draws where a trained model attends: every layer and head, and alignments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.console import aside, labelled, screen, write_json
from regard.cli.infer import trained
from regard.cli.picture_file import check_out, load_plot, save_picture
from regard.cli.threads import used

if TYPE_CHECKING:
    from regard.tasks.text_attention import TextAttention
    from regard.tasks.trained_run import TrainedRun

PICTURE = "attention.png"  # in the folder of a run, unless another name is given


def show_attention(
    run: Path, text: str, changes: Iterable[str], device: str, checkpoint: str | None, out: Path | None, as_json: bool
) -> None:
    """Compute the attention of a run on a text and draw it into `out`, or into the folder of the run; as JSON only into `out`."""
    check_out(out)
    found, count = trained(run, changes, device, checkpoint=checkpoint)
    with used(count):
        attention = found.attention([text])[0]
    if not attention.layers:
        raise ValueError(f"{run} has no layer with attention weights: {attention.missing[0]}")
    picture = out if out is not None or as_json else run / PICTURE
    if picture is not None:
        _draw(attention, _title(found), picture)
    if as_json:
        write_json({"run": str(run), "update": found.update, **attention.to_json()})
    else:
        _print_attention(found, attention, picture)


def _draw(attention: TextAttention, title: str, picture: Path) -> None:
    """Draw into a file; signs that no font has are one sentence, not a warning for each."""
    draw = load_plot("attention_plot", "draw_attention")
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", "Glyph .* missing")
        save_picture(lambda: draw(attention, title), picture)
    for warning in told:
        if not str(warning.message).startswith("Glyph "):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if any(str(warning.message).startswith("Glyph ") for warning in told):
        aside("no font here has all signs of this text, so that some are boxes: install one that has, such as Noto Sans CJK")


def _title(found: TrainedRun) -> str:
    which = "" if found.update is None else f", update {found.update}"
    return f"{found.folder}{which}: {found.description}"


def _print_attention(found: TrainedRun, attention: TextAttention, picture: Path | None) -> None:
    rows: list[tuple[str, str]] = []
    if attention.answer:
        rows.append(("answer", attention.answer))
    for layer in attention.layers:
        heads, n, m = layer.weights.shape
        rows.append((layer.name, f"{layer.kind}, {layer.mechanism}: {heads} heads, {n} x {m} tokens"))
    rows += [("no weights", sentence) for sentence in attention.missing]
    rows += [("", ""), ("picture", str(picture)), ("in Python", f"regard.load({str(found.folder)!r}).attention([text])")]
    console: Any = screen()
    console.print(f"\n{_title(found)}", style="bold", markup=False, highlight=False)
    console.print(labelled(rows), highlight=False)
