"""Tasks that are read from a data set: splits of the files, cut to a number of examples by a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from regard.arena.arena_task import ArenaTask, Examples, ExamplesPart, SideTargets
from regard.arena.hidden_tokens import hide_tokens
from regard.arena.split_cache import cached_split, split_key
from regard.data.locate import find
from regard.data.text_files import DataError

SELECTION_SEED = 1
BYTE_IDS = 256  # token ids of texts


@dataclass(frozen=True)
class ReadTask(ArenaTask):
    """Read splits, all of their examples or some."""

    train: int = 0  # examples, 0: all
    val: int = 0  # examples, 0: all
    test: int = 0  # examples, 0: all

    def check(self) -> None:
        """Refuse numbers of examples below 0."""
        for name in ("train", "val", "test"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 (all examples) or more, not {getattr(self, name)}")

    def examples(self, part: ExamplesPart) -> Examples:
        """Return one split; where REGARD_CACHE names a folder, it is kept there for as long as the files have the same sizes."""
        key, sizes = split_key(self, part), folder_sizes(self.needs)
        return cached_split(key and f"{key} {sizes}", lambda: self.read_examples(part))

    def read_examples(self, part: ExamplesPart) -> Examples:
        """Read one split."""
        raise NotImplementedError

    def selection(self, part: ExamplesPart, there: int) -> np.ndarray:
        """Return the indices of the examples that a split has, in order: all, or some drawn by a fixed seed."""
        count = getattr(self, part)
        if count > there:
            raise ValueError(f"{part}={count:,} is more than {self.name} has: {there:,} examples")
        drawn = np.random.default_rng(SELECTION_SEED).permutation(there)
        return np.sort(drawn[: count or there])


class MaskableBytes(ReadTask):
    """Read bytes, some of which training may hide. A subclass has the option `masked`, the share of them."""

    masked: float

    @property
    def vocab(self) -> int:
        """Return the number of bytes; NUL is padding. The mask, if there is one, follows them."""
        return BYTE_IDS + bool(self.masked)

    @property
    def side_labels(self) -> int:
        """Return the number of bytes that may be asked for."""
        return self.vocab if self.masked else 0

    def side_targets(self, tokens: Tensor, valid: Tensor | None, generator: Generator | None = None) -> SideTargets:
        """Hide some bytes and ask for them."""
        return hide_tokens(tokens, valid, self.masked, self.vocab - 1, generator)


def folder_sizes(name: str) -> dict[str, int]:
    """Return the sizes of the files of a data set."""
    return {path.name: path.stat().st_size for path in sorted(find(name).iterdir()) if path.is_file()}


def check_masked(share: float) -> None:
    """Refuse shares of hidden tokens that are not from 0 to below 1."""
    if not 0 <= share < 1:
        raise ValueError(f"masked must be from 0 to below 1, not {share!r}")


def byte_rows(texts: Sequence[bytes], length: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of texts as uint8 (texts, length), cut or padded with 0, and the lengths."""
    rows = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        kept = np.frombuffer(text[:length], np.uint8)
        row[: len(kept)] = kept
    lengths = torch.tensor([min(len(text), length) for text in texts], dtype=torch.int32)
    return torch.from_numpy(rows), lengths


def text_bytes(text: str, length: int, place: str) -> bytes:
    """Encode a text as UTF-8, cut to a number of bytes. NUL is padding, so that a text with it is refused."""
    cut = text[:length].encode()[:length]
    if b"\0" in cut:
        raise DataError(f"{place}: a text has a NUL character in it; remove it, because 0 is padding")
    return cut


def power_of_two(lengths: Tensor) -> Tensor:
    """Return the largest power of two that is not above each length, 1 for empty ones."""
    return 2 ** lengths.clamp(min=1).double().log2().floor().int()
