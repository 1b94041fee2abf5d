"""Recordings in wav files: PCM samples of 8 to 32 bits, read strictly; several channels become their mean."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.text_files import DataError, read_binary

SLOWEST, FASTEST = 4_000, 192_000  # samples a second
PCM_TAG, EXTENSIBLE_TAG = b"\x01\x00", b"\xfe\xff"  # of the fmt chunk
PCM_SUBFORMAT = PCM_TAG + bytes.fromhex("0000000010008000 00aa00389b71")  # of an extensible one


class Recording(NamedTuple):
    """Hold the samples of one channel."""

    samples: Tensor  # (n) float32, from -1 to 1
    rate: int  # samples a second


def read_wav(path: Path | str) -> Recording:
    """Read a wav file; every error names it."""
    if Path(path).is_dir():
        raise DataError(f"{path} is a folder, not a wav file")
    return parse_wav(read_binary(path), str(path))


def parse_wav(raw: bytes, name: str) -> Recording:
    """Read the bytes of a wav file; `name` is the place that errors mention."""
    try:
        with wave.open(io.BytesIO(_plain_header(raw))) as file:
            channels, width, rate, count = file.getparams()[:4]
            data = file.readframes(count)
    except (wave.Error, EOFError, RuntimeError) as error:
        raise DataError(f"{name} is not a wav file of PCM samples: {str(error) or 'it is cut off'}") from None
    if len(data) != count * channels * width:
        raise DataError(f"{name} is cut off: {len(data):,} of {count * channels * width:,} bytes of samples are there")
    if count == 0:
        raise DataError(f"{name} has no samples")
    if not SLOWEST <= rate <= FASTEST:
        raise DataError(f"{name} has {rate:,} samples a second, not {SLOWEST:,} to {FASTEST:,}")
    numbers = _numbers(data, width, name).reshape(count, channels)
    return Recording(torch.from_numpy(numbers.mean(1).astype(np.float32)), rate)


def _plain_header(raw: bytes) -> bytes:
    """Write an extensible header of PCM samples as a plain one, which Python 3.11 needs; anything else stays as it is."""
    at = 12  # behind RIFF, the size and WAVE
    while raw[:4] == b"RIFF" and at + 24 <= len(raw):
        name, size = struct.unpack_from("<4sI", raw, at)
        if name == b"fmt ":
            tag, pcm = raw[at + 8 : at + 10], raw[at + 32 : at + 48] == PCM_SUBFORMAT
            return raw[: at + 8] + PCM_TAG + raw[at + 10 :] if tag == EXTENSIBLE_TAG and size >= 40 and pcm else raw
        at += 8 + size + size % 2
    return raw


def write_wav(path: Path | str, recording: Recording) -> None:
    """Write a recording with 16 bits a sample; samples beyond -1 and 1 are clipped."""
    whole = (recording.samples.clamp(-1, 1) * 32767).round().to(torch.int16).cpu().numpy()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(recording.rate)
        file.writeframes(whole.astype("<i2").tobytes())


def _numbers(data: bytes, width: int, name: str) -> np.ndarray:
    """Convert the bytes of samples to numbers from -1 to 1: unsigned for 8 bits, signed for more."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    if width in (2, 4):
        return np.frombuffer(data, f"<i{width}").astype(np.float64) / 2.0 ** (8 * width - 1)
    if width == 3:
        low, middle, high = np.frombuffer(data, np.uint8).reshape(-1, 3).T.astype(np.int64)
        whole = low + (middle << 8) + (high << 16)
        return np.where(whole >= 1 << 23, whole - (1 << 24), whole) / 2.0**23
    raise DataError(f"{name} has samples of {8 * width} bits, not 8, 16, 24 or 32")
