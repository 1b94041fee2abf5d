"""A language model of bytes over whole papers, with its loss by position: which mechanisms gain from a long context?"""

from __future__ import annotations

import gzip
import hashlib
import lzma
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaModel, Examples, ExamplesPart, TaskForm
from regard.arena.example_draws import log_buckets
from regard.arena.read_task import ReadTask, byte_rows, text_bytes
from regard.data.locate import find
from regard.data.paper_pairs import read_papers
from regard.options import check_positive

BYTES = 256
WHOLE_PAPER = 1 << 40  # bytes of a paper that are read
HELD_OUT_TENTHS: dict[ExamplesPart, tuple[int, ...]] = {"test": (0,), "val": (1,), "train": tuple(range(2, 10))}
LEAST_BUCKET = 64  # positions below are one bucket
BATCH, EPOCHS_OF_PAPERS = 8, 6


@dataclass(frozen=True)
class Papers(ReadTask):
    """Predict the next byte of papers. A paper is cut into windows; every byte but its first is scored once, whatever the length.

    Papers are split, eight tenths for training, by a hash of their text. The slice `position` is the position in the window,
    hence the context that a model has, in powers of two.
    """

    name: ClassVar[str] = "papers"
    form: ClassVar[TaskForm] = "next"
    causal: ClassVar[bool] = True
    metric: ClassVar[str] = "bits per token"
    title: ClassVar[str] = "papers, byte by byte"
    source: ClassVar[str] = "AAN, Radev et al. 2009, texts of scisumm-corpus"
    needs: ClassVar[str] = "aan_scisumm"

    length: int = 8192  # bytes of a window

    def check(self) -> None:
        """Refuse a length below 1."""
        super().check()
        check_positive("length", self.length)

    @property
    def vocab(self) -> int:
        """Return the number of bytes; NUL is padding."""
        return BYTES

    @property
    def classes(self) -> int:
        """Return the number of bytes."""
        return BYTES

    def read_examples(self, part: ExamplesPart) -> Examples:
        """Return the windows of one split."""
        windows = [
            text[first : first + self.length + 1]
            for text in split_texts(part)
            for first in range(0, max(1, len(text) - 1), self.length)
        ]
        kept = [windows[row] for row in self.selection(part, len(windows))]
        tokens, lengths = byte_rows([window[:-1] for window in kept], self.length)
        following, _ = byte_rows([window[1:] for window in kept], self.length)
        places = torch.arange(self.length)
        targets = following.to(torch.int16).masked_fill_(places >= lengths[:, None], IGNORED)
        position = log_buckets(places, LEAST_BUCKET).to(torch.int32).expand(len(kept), -1)
        return Examples(tokens, targets, None if (lengths == self.length).all() else lengths, {"position": position})

    def floors(self) -> dict[str, float]:
        """Return bits per byte of test without attention: n-grams counted on train, and compressors on the whole of test."""
        found = dict(
            zip(("unigrams", "bigrams", "trigrams"), ngram_bits(self.examples("train"), self.examples("test")), strict=True)
        )
        text = b"".join(split_texts("test"))
        for name, packed in (("gzip", gzip.compress(text)), ("lzma", lzma.compress(text))):
            found[name] = 8 * len(packed) / len(text)
        return found

    def model(self) -> ArenaModel:
        """Return a model of three million weights; no paper has one for this task."""
        return ArenaModel(width=256, depth=4, heads=4, ffn=1024)

    def budget(self) -> ArenaBudget:
        """Return six epochs of the whole set in batches of eight windows."""
        windows = self.train or 40_000_000 // self.length
        steps = EPOCHS_OF_PAPERS * -(-windows // BATCH)
        return ArenaBudget(steps, BATCH, (3e-4, 1e-3, 3e-3), weight_decay=0.1)


def split_texts(part: ExamplesPart) -> list[bytes]:
    """Return the different papers of a split, in the order of the file; equal texts are in one split."""
    texts = dict.fromkeys(
        text_bytes(text, WHOLE_PAPER, f"paper {name}") for name, text in read_papers(find("aan_scisumm")).items()
    )
    return [text for text in texts if len(text) > 1 and _tenth(text) in HELD_OUT_TENTHS[part]]


def _tenth(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") % 10


def ngram_bits(train: Examples, test: Examples) -> tuple[float, float, float]:
    """Return bits per byte of 1-, 2- and 3-grams, interpolated by Witten and Bell: what is new after a context has the
    weight of its different followers."""
    (one, two, nxt), (one_test, two_test, nxt_test) = _contexts(train), _contexts(test)
    counts = np.bincount(nxt, minlength=BYTES)
    share = (counts + 1) / (counts.sum() + BYTES)
    lower = share[nxt_test]
    found = [lower]
    for context, context_test, kinds in ((one, one_test, BYTES), (two, two_test, BYTES * BYTES)):
        real = context >= 0  # a window's first byte has no other in front of it
        cells = np.bincount(context[real] * BYTES + nxt[real], minlength=kinds * BYTES).reshape(kinds, BYTES)
        total, followers = cells.sum(1), (cells > 0).sum(1)
        at = np.maximum(context_test, 0)
        seen = (context_test >= 0) & (total[at] > 0)
        mixed = (cells[at, nxt_test] + followers[at] * lower) / np.maximum(total + followers, 1)[at]
        lower = np.where(seen, mixed, lower)
        found.append(lower)
    bits = [float(-np.log2(chances).mean()) for chances in found]
    return bits[0], bits[1], bits[2]


def _contexts(examples: Examples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the byte in front of each scored byte, the two in front as one number (-1 at the first), and the byte itself."""
    tokens = examples.tokens.to(torch.int32)
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    two = torch.where(before < 0, -1, before * BYTES + tokens)
    scored = examples.targets != IGNORED
    return _flat(tokens, scored), _flat(two, scored), _flat(examples.targets, scored)


def _flat(values: Tensor, scored: Tensor) -> np.ndarray:
    return values[scored].long().numpy()
