"""A corpus of synthetic speech by espeak-ng, in the layout of LJ Speech. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from regard.data.text_files import DataError, read_lines

CORPUS_SPLIT = "|"  # which no text may hold
LONGEST_TEXT = 200  # characters


def espeak_program() -> str:
    """Return the path of espeak-ng; raise DataError with how to install it."""
    found = shutil.which("espeak-ng")
    if found is None:
        raise DataError("there is no espeak-ng here, which makes the recordings: sudo apt-get install espeak-ng")
    return found


def corpus_texts(path: Path, most: int) -> list[str]:
    """Read the first `most` different texts of a file, one a line, with single spaces and in lower case."""
    texts: dict[str, None] = {}
    for line in read_lines(path):
        text = " ".join(line.replace(CORPUS_SPLIT, " ").lower().split())
        if 1 < len(text) <= LONGEST_TEXT:
            texts[text] = None
        if len(texts) == most:
            break
    if not texts:
        raise DataError(f"{path} has no lines of 2 to {LONGEST_TEXT} characters")
    return list(texts)


def make_corpus(
    texts: list[str], folder: Path, *, voice: str = "en", speed: int = 160, done: Callable[[int], None] = lambda _: None
) -> None:
    """Write wavs/00001.wav and so on, and then metadata.csv: `speed` is in words a minute, `done` gets the number of each."""
    program, wavs = espeak_program(), folder / "wavs"
    wavs.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts, 1):
        out = wavs / f"{number:05}.wav"
        command = [program, "-v", voice, "-s", str(speed), "-w", str(out), "--", text]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode or not out.is_file():
            why = (ended.stderr.strip() or f"it ended with {ended.returncode}").splitlines()[0]
            raise DataError(f"espeak-ng cannot make {out} of {text[:40]!r}: {why}")
        done(number)
    lines = "".join(f"{number:05}{CORPUS_SPLIT}{text}\n" for number, text in enumerate(texts, 1))
    beside = folder / "metadata.csv.part"
    beside.write_text(lines, encoding="utf-8")
    beside.replace(folder / "metadata.csv")
