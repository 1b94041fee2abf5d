"""`regard prepare` converts a data set as it is downloaded to the files that a task reads. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.completion import ESPEAK, complete_set
from regard.cli.console import labelled, screen, sentences
from regard.data.downloads import DOWNLOADS, Records
from regard.data.espeak_corpus import corpus_texts, espeak_program, make_corpus
from regard.data.text_files import COMPRESSED_SUFFIXES, DataError
from regard.text import unknown


def prepare(
    name: Annotated[
        str,
        typer.Argument(
            metavar="SET", help=f"{', '.join(DOWNLOADS)} or {ESPEAK}; others are read as they are.", autocompletion=complete_set
        ),
    ],
    download: Annotated[
        Path,
        typer.Argument(
            metavar="DOWNLOAD", help="The file, or the folder that was unpacked from it; for espeak texts, one a line."
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Its folder; else SET in the folder of REGARD_DATA.")] = None,
    voice: Annotated[str, typer.Option(help="espeak: the voice, of `espeak-ng --voices`.")] = "en",
    most: Annotated[int, typer.Option(metavar="N", help="espeak: the first so many texts.")] = 2000,
) -> None:
    """Convert a data set as it is downloaded to the files that its task reads, or make one by espeak-ng."""
    with sentences():
        if name not in (*DOWNLOADS, ESPEAK):
            raise ValueError(unknown("there is nothing to prepare for", name, (*DOWNLOADS, ESPEAK)))
        root = os.environ.get("REGARD_DATA")
        if out is None and not root:
            raise ValueError("where to? Give --out DIR, or name the folder of all data sets by REGARD_DATA")
        task = "tts" if name == ESPEAK else name
        folder = (out if out is not None else Path(root or "") / task).expanduser()
        if name == ESPEAK:
            return _speak(download.expanduser(), folder, out is not None, voice, most)
        parts = DOWNLOADS[name].convert(download.expanduser())
        _check_free(folder, list(parts))
        folder.mkdir(parents=True, exist_ok=True)
        for file, records in parts.items():
            _write(folder / file, records)
    rows = [(file, f"{len(records):,} lines") for file, records in parts.items()]
    where = "" if out is None else f" --data {folder}"
    screen().print(labelled([*rows, ("in", str(folder)), ("train", f"regard train {name}{where}")]), highlight=False)


def _speak(texts: Path, folder: Path, named: bool, voice: str, most: int) -> None:
    """Make a corpus of the texts of a file by espeak-ng."""
    espeak_program()
    if most < 1:
        raise ValueError(f"--most is a number of texts, at least 1, not {most}")
    found = corpus_texts(texts, most)
    _check_free(folder, ["metadata.csv"])
    make_corpus(found, folder, voice=voice)
    rows = [("metadata.csv", f"{len(found):,} lines"), ("in", str(folder))]
    again = f"regard train tts{f' --data {folder}' if named else ''}"
    screen().print(labelled([*rows, ("train", again)]), highlight=False)


def _check_free(folder: Path, names: list[str]) -> None:
    for name in names:
        for ending in COMPRESSED_SUFFIXES:
            if (folder / (name + ending)).exists():
                raise DataError(f"{folder / (name + ending)} is there already: delete it, or choose another folder by --out")


def _write(path: Path, records: Records) -> None:
    """Write records as JSON, one a line; a file is whole or not there."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    beside.replace(path)
