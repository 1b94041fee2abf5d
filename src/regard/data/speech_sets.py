"""Readers of speech: FSDD, spoken digits as wav files, and AN4, utterances as cepstra with their words."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.locate import file
from regard.data.text_files import DataError, read_binary, why_no_archive, why_no_array
from regard.data.wav_files import Recording, parse_wav

AN4_CEPSTRA, AN4_MELS = 13, 40
AN4_RATE, AN4_RANGE = 16_000, (130.0, 6800.0)  # samples a second, and the Hz of its filters
FSDD_NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
AN4_HELD_OUT = 9  # every ninth voice of the training part is for validation


class SpokenDigit(NamedTuple):
    """Hold a recording of one digit."""

    recording: Recording
    digit: str
    speaker: str
    take: int  # from 0, of the recordings of this digit by this speaker
    name: str


class CepstraText(NamedTuple):
    """Hold the cepstra of an utterance and its words."""

    cepstra: np.ndarray  # float32 (windows, 13)
    text: str
    speaker: str
    name: str


def read_fsdd(folder: Path) -> list[SpokenDigit]:
    """Read all recordings in fsdd_recordings.tar, by digit, speaker and index; every error names the file."""
    path = file(folder, "fsdd_recordings.tar")
    found: list[SpokenDigit] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(read_binary(path))) as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or not name.endswith(".wav"):
                    continue
                parts = FSDD_NAME.fullmatch(name)
                if parts is None:
                    raise DataError(f"{path}: {member.name} is not called digit_speaker_index.wav")
                stored = archive.extractfile(member)
                assert stored is not None  # it is a file
                recording = parse_wav(stored.read(), f"{path}: {member.name}")
                found.append(SpokenDigit(recording, parts[1], parts[2], int(parts[3]), member.name))
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} is not a whole tar file: {why_no_archive(error)}") from None
    if not found:
        raise DataError(f"{path} has no wav files in it")
    return sorted(found, key=lambda x: (x.digit, x.speaker, x.take))


def read_an4(folder: Path) -> tuple[list[CepstraText], list[CepstraText], list[CepstraText]]:
    """Read the utterances for training, validation (every ninth voice of the training part, all of its utterances) and test."""
    train, test = (_an4_part(file(folder, f"an4_{part}_mfcc13.npz")) for part in ("train", "test"))
    held_out = set(sorted({x.speaker for x in train})[::AN4_HELD_OUT])
    kept = [x for x in train if x.speaker not in held_out]
    return kept, [x for x in train if x.speaker in held_out], test


def _an4_part(path: Path) -> list[CepstraText]:
    arrays = _npz(path, ("feat", "offset", "text", "id"))
    cepstra, offset, texts, names = arrays
    if cepstra.ndim != 2 or cepstra.shape[1] != AN4_CEPSTRA or cepstra.dtype.kind != "f":
        raise DataError(
            f"{path}: feat is {cepstra.dtype} of shape {cepstra.shape}, not numbers of shape (windows, {AN4_CEPSTRA})"
        )
    if not np.isfinite(cepstra).all():
        raise DataError(f"{path}: feat has numbers that are not finite")
    fits = offset.shape == (len(texts) + 1,) and len(texts) == len(names) and len(texts) > 0
    if not fits or offset[0] != 0 or offset[-1] != len(cepstra) or (np.diff(offset) < 1).any():
        raise DataError(f"{path}: offset does not cut {len(cepstra):,} windows into {len(texts):,} utterances")
    found = []
    for low, high, text, name in zip(offset[:-1], offset[1:], texts.tolist(), names.tolist(), strict=True):
        if not text.strip():
            raise DataError(f"{path}: {name} has no words")
        found.append(CepstraText(cepstra[low:high].astype(np.float32), text, name.split("/")[-2], name))
    return found


def _npz(path: Path, names: tuple[str, ...]) -> list[Any]:
    try:
        with np.load(io.BytesIO(read_binary(path)), allow_pickle=False) as found:
            return [found[name] for name in names]
    except KeyError as error:
        raise DataError(f"{path} lacks an array: {error.args[0]}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a whole .npz file: {why_no_array(error)}") from None
