"""`regard prepare` converts a data set as it is downloaded to the files that a task reads. Imports no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.completion import ESPEAK, complete_set
from regard.cli.console import aside, labelled, screen, sentences
from regard.data.downloads import DOWNLOADS
from regard.data.espeak_corpus import corpus_texts, espeak_program, make_corpus
from regard.data.prepared_files import write_prepared
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
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Its folder; else one of its name in that of REGARD_DATA.")
    ] = None,
    voice: Annotated[str, typer.Option(help="espeak: the voice, of `espeak-ng --voices`.")] = "en",
    most: Annotated[int, typer.Option(metavar="N", help="espeak: the first so many texts.")] = 2000,
) -> None:
    """Convert a data set as it is downloaded to the files that its tasks read, or make one by espeak-ng."""
    with sentences():
        if name not in (*DOWNLOADS, ESPEAK):
            raise ValueError(unknown("there is nothing to prepare for", name, (*DOWNLOADS, ESPEAK)))
        root = os.environ.get("REGARD_DATA")
        if out is None and not root:
            raise ValueError("where to? Give --out DIR, or name the folder of all data sets by REGARD_DATA")
        place = "tts" if name == ESPEAK else DOWNLOADS[name].folder
        folder = (out if out is not None else Path(root or "") / place).expanduser()
        if name == ESPEAK:
            return _speak(download.expanduser(), folder, out is not None, voice, most)
        if not download.expanduser().exists():
            raise DataError(f"there is no file or folder {download}: it is {DOWNLOADS[name].what}")
        aside(f"reading {download}")
        files = DOWNLOADS[name].files(download.expanduser())
        _check_free(folder, files)
        write_prepared(folder, files)
    rows = [(file, prepared.amount) for file, prepared in files.items()]
    where = "" if out is None else f" --data {shlex.quote(str(folder))}"
    following = [("train", f"regard train {task}{where}") for task in DOWNLOADS[name].tasks]
    screen().print(labelled([*rows, ("in", str(folder)), *following]), highlight=False)


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


def _check_free(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        for ending in COMPRESSED_SUFFIXES:
            if (folder / (name + ending)).exists():
                raise DataError(f"{folder / (name + ending)} is there already: delete it, or choose another folder by --out")
