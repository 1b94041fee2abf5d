"""`regard show RUN TEXT|FILE` prints and draws where a trained model attends: every layer and head, and alignments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.console import aside, labelled, screen, write_json
from regard.cli.infer import trained
from regard.cli.picture_file import check_out, load_plot, save_picture
from regard.cli.threads import used

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.tasks.text_attention import TextAttention
    from regard.tasks.trained_run import TrainedRun

PICTURE = "attention.png"  # in the folder of a run, unless another name is given


def show_attention(
    run: Path,
    text: str,
    changes: Iterable[str],
    device: str,
    checkpoint: str | None,
    out: Path | None,
    as_json: bool,
    patch: str | None = None,
) -> None:
    """Compute the attention of a run on a text, or on the image or recording of a file, and draw it.

    The picture is `out`, or lies in the folder of the run; of JSON it is `out` alone. `patch` is that of an image, "ROW,COLUMN".
    """
    check_out(out)
    place = None if patch is None else _parse_patch(patch)
    found, count = trained(run, changes, device, checkpoint=checkpoint)
    with used(count):
        attention = found.attention([text])[0]
    draw = _drawing(attention, place)
    if not attention.layers:
        raise ValueError(f"{run} has no layer with attention weights: {attention.missing[0]}")
    picture = out if out is not None or as_json else run / PICTURE
    if picture is not None:
        _draw(lambda: draw(attention, _title(found)), picture)
    if as_json:
        write_json({"run": str(run), "update": found.update, **attention.to_json()})
    else:
        _print_attention(found, attention, picture)


def _parse_patch(text: str) -> tuple[int, int]:
    """Read the row and the column of a patch."""
    row, _, column = text.partition(",")
    if not (row.strip().isdecimal() and column.strip().isdecimal()):
        raise ValueError(f"--patch is the row and the column of a patch, counted from 1, as 3,5; not {text!r}")
    return int(row), int(column)


def _drawing(attention: TextAttention, patch: tuple[int, int] | None) -> Callable[[TextAttention, str], Figure]:
    """Choose what draws the attention to an image, to a recording or to a text; it is imported when it draws."""
    from regard.tasks.image_attention import ImageAttention
    from regard.tasks.recording_attention import RecordingAttention

    if isinstance(attention, ImageAttention):
        if patch is not None:
            attention.query_of(*patch)
        return lambda *given: load_plot("patch_plot", "draw_image_attention")(*given, patch)
    if patch is not None:
        raise ValueError("--patch is for a run on images: leave it out")
    if isinstance(attention, RecordingAttention):
        return lambda *given: load_plot("recording_plot", "draw_recording_attention")(*given)
    return lambda *given: load_plot("attention_plot", "draw_attention")(*given)


def _draw(draw: Callable[[], Figure], picture: Path) -> None:
    """Draw into a file; signs that no font has are one sentence, not a warning for each."""
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", "Glyph .* missing")
        save_picture(draw, picture)
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
    asked = "path" if found.task.file_ending else "text"
    rows += [("", ""), ("picture", str(picture)), ("in Python", f"regard.load({str(found.folder)!r}).attention([{asked}])")]
    console: Any = screen()
    console.print(f"\n{_title(found)}", style="bold", markup=False, highlight=False)
    console.print(labelled(rows), highlight=False)
