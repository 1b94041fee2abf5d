"""AN4 as CMU has it: recordings in SPHERE or wav files, or cepstra of Sphinx, with transcriptions, as arrays for each part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from regard.data.prepared_files import PreparedFile, named_arrays
from regard.data.source_files import source_files, utf8_text
from regard.data.speech_features import mfcc
from regard.data.speech_sets import AN4_CEPSTRA, AN4_MELS, AN4_RANGE, AN4_RATE
from regard.data.sphere_files import SPHERE_SIGN, parse_sphere
from regard.data.text_files import DataError
from regard.data.wav_files import parse_wav

_WANTED = re.compile(
    r"(?:^|/)(?:etc/an4_(train|test)\.(fileids|transcription)|(?:feat|wav)/(\w+/[^/]+/[^/]+)\.(mfc|sph|wav|raw))$"
)
_LINE = re.compile(r"^(?:<s>)?(.*?)(?:</s>)?\s*\(([^()\s]+)\)$")
_PREFERRED = ("mfc", "sph", "wav")  # where a download has an utterance in several forms


def an4_arrays(source: Path) -> dict[str, PreparedFile]:
    """Read etc/an4_{train,test}.{fileids,transcription}, and feat/*.mfc or wav/*.sph of a folder or an archive.

    Cepstra of recordings are computed as `regard predict` computes those of a wav file; those of .mfc files are Sphinx's.
    """
    lists: dict[tuple[str, str], str] = {}
    found: dict[str, tuple[int, np.ndarray]] = {}
    raw_files = 0
    for path, raw in source_files(source, _WANTED):
        parts, where = _WANTED.search(path), f"{source}, {path}"
        assert parts is not None
        if parts[1]:
            lists[parts[1], parts[2]] = utf8_text(raw, where)
        elif parts[4] == "raw":
            raw_files += 1
        else:
            rank = _PREFERRED.index(parts[4])
            if parts[3] not in found or rank < found[parts[3]][0]:
                found[parts[3]] = rank, _cepstra(raw, where, parts[4])
    if not found and raw_files:
        raise DataError(f"{source} has samples without a header, whose byte order nothing says: use an4_sphere.tar.gz")
    if not found:
        raise DataError(f"{source} has no recordings: files such as wav/an4_clstk/fash/an251-fash-b.sph are needed")
    return {f"an4_{part}_mfcc{AN4_CEPSTRA}.npz": _part(source, part, lists, found) for part in ("train", "test")}


def _part(
    source: Path, part: str, lists: Mapping[tuple[str, str], str], found: Mapping[str, tuple[int, np.ndarray]]
) -> PreparedFile:
    """Put the utterances of a part together, in the order of its list."""
    for kind in ("fileids", "transcription"):
        if (part, kind) not in lists:
            raise DataError(f"{source} lacks etc/an4_{part}.{kind}")
    texts = _texts(lists[part, "transcription"], f"{source}, etc/an4_{part}.transcription")
    names = [line.strip() for line in lists[part, "fileids"].splitlines() if line.strip()]
    where = f"{source}, etc/an4_{part}.fileids"
    if not names:
        raise DataError(f"{where} has no lines")
    for name in names:
        if name not in found:
            raise DataError(f"{where} lists {name}, which is not there")
        if name.rpartition("/")[2] not in texts:
            raise DataError(f"{where} lists {name}, which has no transcription")
    cepstra = [found[name][1] for name in names]
    arrays = {
        "feat": np.concatenate(cepstra),
        "offset": np.cumsum([0, *map(len, cepstra)]),
        "text": np.array([texts[name.rpartition("/")[2]] for name in names]),
        "id": np.array(names),
    }
    return named_arrays(arrays, f"{len(names):,} utterances, {len(arrays['feat']) / 100 / 60:.0f} minutes")


def _texts(content: str, where: str) -> dict[str, str]:
    """Read lines such as `<s> GO </s> (an253-fash-b)`: texts by names."""
    found: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        parts = _LINE.match(line.strip())
        if parts is None or not parts[1].strip():
            raise DataError(f"{where}, line {number} is not words and a name in parentheses: {line.strip()[:60]!r}")
        found[parts[2]] = " ".join(parts[1].split())
    return found


def _cepstra(raw: bytes, where: str, form: str) -> np.ndarray:
    """Return the cepstra (windows, 13) of a file."""
    if form == "mfc":
        return _sphinx(raw, where)
    recording = parse_sphere(raw, where) if raw.startswith(SPHERE_SIGN) or form == "sph" else parse_wav(raw, where)
    if recording.rate != AN4_RATE:
        raise DataError(f"{where} has {recording.rate:,} samples a second, not {AN4_RATE:,}")
    low, high = AN4_RANGE
    found = mfcc(recording.samples.to(torch.float64), AN4_RATE, cepstra=AN4_CEPSTRA, mels=AN4_MELS, low=low, high=high)
    return found.numpy().astype(np.float32)


def _sphinx(raw: bytes, where: str) -> np.ndarray:
    """Read cepstra of Sphinx: how many numbers, as an integer, then the numbers, in the byte order in which that fits."""
    for order in ("<", ">"):
        if len(raw) >= 4 and int(np.frombuffer(raw[:4], f"{order}i4")[0]) == len(raw) // 4 - 1 and len(raw) % 4 == 0:
            numbers = np.frombuffer(raw[4:], f"{order}f4").astype(np.float32)
            if len(numbers) % AN4_CEPSTRA or not len(numbers) or not np.isfinite(numbers).all():
                raise DataError(f"{where} has {len(numbers):,} numbers: they are no windows of {AN4_CEPSTRA} finite cepstra")
            return numbers.reshape(-1, AN4_CEPSTRA)
    raise DataError(f"{where} is no file of cepstra: its first number does not count the others")
