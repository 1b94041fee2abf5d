"""The files that commands draw into: names are checked before any work, and no picture is half drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")


def check_out(out: Path | None) -> None:
    """Check the name of the picture, before any work is done."""
    if out is None:
        return
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw into {str(out)!r}: the name has to end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not out.parent.is_dir():
        raise ValueError(f"cannot draw into {str(out)!r}: there is no folder {str(out.parent)!r}")


def load_plot(module: str, name: str) -> Callable[..., Figure]:
    """Import a function of `regard.plots` that draws a figure. Matplotlib is an extra, slow to load, needed for this alone."""
    try:
        return getattr(import_module(f"regard.plots.{module}"), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"drawing needs {error.name}: pip install 'regard[draw]'") from None


def save_picture(draw: Callable[[], Figure], out: Path) -> None:
    """Draw a figure into another file first, so that no picture is half drawn."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        draw().savefig(part, format=out.suffix[1:].lower())
        os.replace(part, out)
    except OSError as error:
        raise ValueError(f"cannot draw into {str(out)!r}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
