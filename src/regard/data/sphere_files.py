"""Recordings in NIST SPHERE files: a header of text, then PCM samples of 16 bits in the byte order that it names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch

from regard.data.text_files import DataError
from regard.data.wav_files import FASTEST, SLOWEST, Recording

SPHERE_SIGN = b"NIST_1A\n"
_HEADER_SIZE = re.compile(rb"NIST_1A\n *(\d+)\n")
_FIELD = re.compile(r"^(\w+) -([ir]|s\d+) (.*)$")
_ORDERS = {"01": "<i2", "10": ">i2"}  # of sample_byte_format: which byte of a sample comes first


def parse_sphere(raw: bytes, name: str) -> Recording:
    """Read the bytes of a SPHERE file of one channel; `name` is the place that errors mention."""
    size = _HEADER_SIZE.match(raw)
    if size is None:
        raise DataError(f"{name} is not a SPHERE file: it does not begin with NIST_1A and the size of its header")
    fields = _fields(raw[: int(size[1])], name)
    coding, width, order = (fields.get(key, usual) for key, usual in _USUAL.items())
    if coding != "pcm" or width != "2" or order not in _ORDERS:
        raise DataError(f"{name} has samples of {coding!r} in {width} bytes of order {order!r}; PCM of 2 bytes is read, 01 or 10")
    count, channels, rate = (_count(fields, key, name) for key in ("sample_count", "channel_count", "sample_rate"))
    if channels != 1:
        raise DataError(f"{name} has {channels} channels, not 1")
    if not SLOWEST <= rate <= FASTEST:
        raise DataError(f"{name} has {rate:,} samples a second, not {SLOWEST:,} to {FASTEST:,}")
    data = raw[int(size[1]) :]
    if count < 1 or len(data) < 2 * count:
        raise DataError(f"{name} is cut off: {len(data):,} of {2 * count:,} bytes of samples are there")
    samples = np.frombuffer(data[: 2 * count], _ORDERS[order]).astype(np.float32) / 2**15
    return Recording(torch.from_numpy(samples), rate)


_USUAL = {"sample_coding": "pcm", "sample_n_bytes": "2", "sample_byte_format": ""}  # what a header without a field means


def _fields(header: bytes, name: str) -> dict[str, str]:
    """Read the lines `name -type value` of a header, up to end_head."""
    lines = header.decode("latin-1").split("\n")[2:]
    if "end_head" not in (ends := [line.strip() for line in lines]):
        raise DataError(f"{name} has no whole header: end_head is missing")
    found = (_FIELD.match(line.rstrip()) for line in lines[: ends.index("end_head")])
    return {field[1]: field[3].strip() for field in found if field is not None}


def _count(fields: Mapping[str, str], key: str, name: str) -> int:
    value = fields.get(key, "")
    if not value.isdecimal():
        raise DataError(f"{name}: its header has {value!r} for {key}, not a number")
    return int(value)
