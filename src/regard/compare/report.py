"""Write the report of a comparison: one HTML page that works offline, and every figure as PNG and SVG."""

from __future__ import annotations

import io
from pathlib import Path

from regard.compare.cell_store import CellStore
from regard.compare.comparison import Comparison, compare_records
from regard.compare.report_page import report_html
from regard.compare.trained_layers import TrainedLayers, trained_layers
from regard.training.atomic_files import replace

REPORT_NAME, FIGURE_FOLDER = "report.html", "figures"
FIGURE_FORMATS = ("png", "svg")
FIGURE_KINDS = ("bubble", "cost", "rates", "training", "slice", "attention", "spectrum")  # names of files begin with them
NO_MATPLOTLIB = "Figures as files need matplotlib: pip install 'regard[draw]', then regard compare --report-only."


def write_report(folder: Path) -> Path:
    """Write FOLDER/report.html and FOLDER/figures from the records of a comparison; returns the path of the page."""
    store = CellStore(folder)
    records = store.records()
    if not records:
        raise ValueError(f"{folder} has no records of a comparison: name the folder that regard compare --out wrote")
    comparison = compare_records(records)
    trained = trained_layers(folder, records)
    notes = [f"A record cannot be read, and is left out: {text}" for text in store.damaged]
    notes += _write_figures(folder / FIGURE_FOLDER, comparison, trained)
    page = folder / REPORT_NAME
    replace(page, report_html(comparison, trained, notes))
    return page


def _remove_old(folder: Path, written: set[Path]) -> None:
    """Remove figures of an earlier report whose task is no longer compared; other files stay."""
    for path in folder.glob("*_*.*"):
        ours = path.stem.split("_")[0] in FIGURE_KINDS and path.suffix[1:] in FIGURE_FORMATS
        if ours and path not in written:
            path.unlink()


def _write_figures(folder: Path, comparison: Comparison, trained: TrainedLayers) -> list[str]:
    """Draw every figure; returns a sentence where they cannot be drawn."""
    try:
        from regard.compare.report_figures import report_figures
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return [NO_MATPLOTLIB]
    written: set[Path] = set()
    for name, figure in report_figures(comparison, trained):
        for kind in FIGURE_FORMATS:
            file = io.BytesIO()
            figure.savefig(file, format=kind)
            path = folder / f"{name}.{kind}"
            replace(path, file.getvalue())
            written.add(path)
    _remove_old(folder, written)
    return [f"Every figure is in {FIGURE_FOLDER}/ too, as PNG and SVG."]
