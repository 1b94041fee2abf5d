"""The folder of a comparison: one JSON record a cell, weights of final cells, all written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.compare.cell_record import CellRecord
from regard.training.atomic_files import (
    RunError,
    as_json,
    bytes_to_tensors,
    cannot_write,
    read_bytes,
    read_json,
    replace,
    tensors_to_bytes,
)

CELLS, WEIGHTS_FOLDER, GRID = "cells", "weights", "grid.json"
REPLACED = "replaced"
AGAIN = "it is run again"


class CellStore:
    """Read and write the records of a folder. A record that cannot be read counts as none, and is listed in `damaged`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[str] = []

    def begin(self, settings: dict[str, Any]) -> None:
        """Write down what is compared; raises a RunError where the folder cannot be written."""
        if self.folder.exists() and not self.folder.is_dir():
            raise RunError(f"cannot write into {self.folder}: it is a file; choose another folder")
        replace(self.folder / GRID, as_json(settings))

    def load(self, key: str) -> CellRecord | None:
        """Return the record of a cell; None where there is none or it is damaged."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return self._read(path)
        except (RunError, ValueError, TypeError, AttributeError) as error:
            text = str(error) if str(path) in str(error) else f"{path}: {error}"
            if text not in self.damaged:
                self.damaged.append(text)
            return None

    def save(self, record: CellRecord) -> None:
        replace(self._path(record.key), as_json(record.to_json()))

    def records(self) -> list[CellRecord]:
        """Return all records of the folder that can be read. Files with a dot are torn: a process was killed while it wrote."""
        paths = sorted((self.folder / CELLS).glob("[!.]*.json"))
        found = [self.load(path.stem) for path in paths]
        return [record for record in found if record is not None]

    def save_weights(self, key: str, weights: dict[str, Tensor], metadata: dict[str, str]) -> str:
        """Write the weights of a cell; returns their path in the folder."""
        name = f"{WEIGHTS_FOLDER}/{key}.safetensors"
        replace(self.folder / name, tensors_to_bytes(weights, metadata))
        return name

    def load_weights(self, record: CellRecord) -> dict[str, Tensor]:
        path = self.folder / record.weights
        return bytes_to_tensors(read_bytes(path, AGAIN), path, AGAIN)

    def drop_weights(self, records: Iterable[CellRecord]) -> None:
        """Delete the weights of cells that were not chosen, and their names in the records."""
        for record in records:
            if record.weights:
                (self.folder / record.weights).unlink(missing_ok=True)
                record.weights = ""
                self.save(record)

    def set_aside(self, record: CellRecord) -> None:
        """Move a record to the folder of those that others have replaced: its settings or its code are not those of now."""
        target = self.folder / REPLACED / f"{record.key}.json"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self._path(record.key), target)
        except OSError as error:
            raise RunError(cannot_write(target, error)) from error

    def _path(self, key: str) -> Path:
        return self.folder / CELLS / f"{key}.json"

    def _read(self, path: Path) -> CellRecord:
        record = CellRecord.from_json(read_json(path, AGAIN))
        if record.key != path.stem:
            raise ValueError(f"it holds the record of {record.key}")
        return record
