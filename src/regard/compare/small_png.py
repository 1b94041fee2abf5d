"""Small pictures of matrices as PNG, with the standard library alone: one palette, a byte a cell."""

from __future__ import annotations

import base64
import struct
import zlib

from torch import Tensor

SHADE_LEVELS = 32
ANCHORS = ((255, 255, 255), (253, 212, 120), (240, 110, 60), (180, 30, 110), (60, 15, 110))  # from weight 0 to the largest


def palette(levels: int = SHADE_LEVELS) -> bytes:
    """Interpolate the colours of all levels between the anchors."""
    colours = bytearray()
    for level in range(levels):
        place = level / (levels - 1) * (len(ANCHORS) - 1)
        low = min(int(place), len(ANCHORS) - 2)
        part = place - low
        colours += bytes(round(a + part * (b - a)) for a, b in zip(ANCHORS[low], ANCHORS[low + 1], strict=True))
    return bytes(colours)


def matrix_png(matrix: Tensor) -> bytes:
    """Encode a matrix of weights from 0 on; shades follow the square root, so that small weights are visible."""
    height, width = matrix.shape
    largest = max(float(matrix.max()), 1e-30)
    shades = (matrix.clamp_min(0) / largest).sqrt() * (SHADE_LEVELS - 1)
    rows = shades.round().byte().tolist()
    data = b"".join(b"\0" + bytes(row) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette()), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_url(matrix: Tensor) -> str:
    """Return a picture of a matrix as a data URL."""
    return "data:image/png;base64," + base64.b64encode(matrix_png(matrix)).decode()
