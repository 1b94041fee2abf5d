"""Recordings with their texts, for synthesis: strings of digits by one voice, and any corpus in the layout of LJ Speech."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple
from zlib import crc32

import torch

from regard.data.speech_sets import SpokenDigit
from regard.data.text_files import DataError, read_lines
from regard.data.wav_files import Recording, read_wav
from regard.text import unknown

NUMBER_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_TEXTS = 10  # one text in so many is for test, another for validation
HELD_TAKES = 5  # takes of a digit that are not learned from
CORPUS_LIST, CORPUS_FOLDER = "metadata.csv", "wavs"


class SpokenText(NamedTuple):
    """Hold a recording and what it is of."""

    recording: Recording
    text: str


def part_of_text(text: str) -> str:
    """Return the split that a text belongs to, by its hash: no text is in two of them."""
    return {0: "test", 1: "val"}.get(crc32(text.encode()) % HELD_TEXTS, "train")


def digit_texts(
    found: Sequence[SpokenDigit], voice: str, *, train: int = 800, val: int = 40, test: int = 100, seed: int = 1
) -> dict[str, list[SpokenText]]:
    """Join recordings of one voice to strings of one to three digits; texts and takes of val and test are not in train."""
    voices = sorted({x.speaker for x in found})
    if voice not in voices:
        raise ValueError(unknown("no recording is by", voice, voices))
    own = [x for x in found if x.speaker == voice]
    takes = {part: [x for x in own if (x.take < HELD_TAKES) == (part != "train")] for part in ("train", "val", "test")}
    rng, made = Random(seed), dict[str, list[SpokenText]]()
    for part, count in (("train", train), ("val", val), ("test", test)):
        if not takes[part]:
            raise DataError(
                f"{voice} has no takes {'from' if part == 'train' else 'before'} {HELD_TAKES} on: {part} would be empty"
            )
        made[part] = []
        for _ in range(100 * count):  # few takes have few texts
            chosen = rng.choices(takes[part], k=rng.randint(1, 3))
            text = " ".join(NUMBER_NAMES[int(x.digit)] for x in chosen)
            if part_of_text(text) == part and len(made[part]) < count:
                samples = torch.cat([x.recording.samples for x in chosen])
                made[part].append(SpokenText(Recording(samples, chosen[0].recording.rate), text))
    return made


def read_corpus(folder: Path) -> dict[str, list[SpokenText]]:
    """Read metadata.csv, lines of `name|text` or `name|text|text as it is read`, and wavs/name.wav; every error names the place.

    Where there are three columns the last is taken, as in LJ Speech. Splits are by a hash of the text.
    """
    path, made = folder / CORPUS_LIST, dict[str, list[SpokenText]]()
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        name, *texts = line.split("|")
        if not 1 <= len(texts) <= 2 or not name.strip() or not texts[-1].strip():
            raise DataError(f"{path}, line {number}: a line is name|text, not {line[:60]!r}")
        if Path(name).name != name:
            raise DataError(f"{path}, line {number}: {name!r} is no name of a file in {CORPUS_FOLDER}")
        text = " ".join(texts[-1].split())
        made.setdefault(part_of_text(text), []).append(SpokenText(read_wav(folder / CORPUS_FOLDER / f"{name}.wav"), text))
    for part in ("train", "val", "test"):
        if part not in made:
            raise DataError(f"{path} has too few texts: none is for {part}, which one in {HELD_TEXTS} is")
    return made
