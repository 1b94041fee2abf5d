"""Texts as tones: every letter is a chord with a length of its own, so that synthesis has data without a download.

`read_tones` finds the letters of energies again, which scores what a model has made without listening to it.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import groupby, islice
from random import Random

import torch
from torch import Tensor

from regard.data.speech_features import log_mel
from regard.data.spoken_texts import SpokenText
from regard.data.wav_files import Recording

TONE_LETTERS = "abcdefghijkl"
TONE_RATE = 8000
PAUSE = 0.06  # seconds of a space
LOWEST_TONE = 300.0  # Hz; letters are a quarter of an octave apart, each with its fifth
SHORTEST_RUN = 3  # windows of a letter or a pause that is counted
QUIETER = 5.0  # log energy below the loudest window, from which on a window is a pause


def tone_texts(*, train: int = 600, val: int = 40, test: int = 100, seed: int = 1) -> dict[str, list[SpokenText]]:
    """Draw texts of two to four words, none twice, and make their recordings: the same for the same seed."""
    rng, counts = Random(seed), {"train": train, "val": val, "test": test}
    texts: dict[str, None] = {}
    while len(texts) < sum(counts.values()):
        texts[_drawn_text(rng)] = None
    found = iter(texts)
    return {name: [SpokenText(tones(text), text) for text in islice(found, many)] for name, many in counts.items()}


def _drawn_text(rng: Random) -> str:
    """Draw words of two to four letters, no letter twice in a row: two equal chords would be one long one."""
    text = ""
    for _ in range(rng.randint(2, 4)):
        text += " " if text else ""
        for _ in range(rng.randint(2, 4)):
            before = text.replace(" ", "")[-1:]
            text += rng.choice([letter for letter in TONE_LETTERS if letter != before])
    return text


def tones(text: str) -> Recording:
    """Make the recording of a text: a chord for each letter, a pause for a space. Other characters are refused."""
    for sign in text:
        if sign != " " and sign not in TONE_LETTERS:
            raise ValueError(f"{sign!r} has no tone: letters are {TONE_LETTERS}")
    edge = torch.zeros(round(PAUSE * TONE_RATE / 2))
    samples = torch.cat([edge, *map(_sound_of, text), edge])
    noise = torch.randn(len(samples), generator=torch.Generator().manual_seed(len(samples)))
    return Recording(samples + 0.0005 * noise, TONE_RATE)


@cache
def _sound_of(sign: str) -> Tensor:
    """Make the samples of a character: 50 to 110 ms of a letter, which swells and fades."""
    if sign == " ":
        return torch.zeros(round(PAUSE * TONE_RATE))
    place = TONE_LETTERS.index(sign)
    n = round((0.05 + 0.01 * (5 * place % 7)) * TONE_RATE)
    at = torch.arange(n, dtype=torch.float64)
    low = LOWEST_TONE * 2 ** (place / 4)
    chord = sum((2 * math.pi * hertz / TONE_RATE * at).sin() for hertz in (low, 1.5 * low))
    assert isinstance(chord, Tensor)
    return (0.3 * chord * (math.pi * (at + 0.5) / n).sin().sqrt()).float()


@cache
def _chord_energies(mels: int, low: float, high: float) -> Tensor:
    """Compute the mean shares of the energy (letters, mels) in each filter, for every letter."""
    found = [log_mel(_sound_of(letter).repeat(2), TONE_RATE, mels=mels, low=low, high=high) for letter in TONE_LETTERS]
    return torch.nn.functional.normalize(torch.stack([x.exp().mean(0).sqrt() for x in found]), dim=-1)


def read_tones(mel: Tensor, *, low: float, high: float) -> str:
    """Find the text of log-mel energies (t f): the nearest chord of each window, and of those the runs that are long enough."""
    loudness = mel.exp().sum(1).log()
    chords = _chord_energies(mel.shape[1], low, high)
    nearest = (torch.nn.functional.normalize((mel / 2).exp(), dim=-1) @ chords.mT).argmax(1)
    signs = torch.where(loudness < loudness.max() - QUIETER, len(TONE_LETTERS), nearest).tolist()
    runs = [(sign, len(list(run))) for sign, run in groupby(signs)]
    return "".join((TONE_LETTERS + " ")[sign] for sign, length in runs if length >= SHORTEST_RUN).strip()
