"""Subwords that are not always the same, so that a model learns what words are made of.

BPE-dropout: now and then a merge is left out. Provilkov, Emelianenko, Voita 2019, arXiv:1910.13267.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from regard.data.vocabulary import FIRST_TEXT_ID, Subwords


class BpeDropout:
    """Spellings of texts in the subwords of a vocabulary. Each merge that could come next is left out with probability `share`,
    so 0 spells as the vocabulary does. In one round a word is always spelled alike, and the same seed gives the same rounds.
    """

    def __init__(self, words: Subwords, share: float, seed: int) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"the share of merges that are left out must be from 0 to 1, not {share!r}")
        model = json.loads(words.tokenizer.to_str())["model"]
        pairs = (tuple(x) if isinstance(x, list) else tuple(x.split(" ")) for x in model["merges"])
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.ids, self.words, self.share, self.seed = model["vocab"], words, share, seed

    def rounds(self, texts: Sequence[str], count: int) -> Iterator[list[list[int]]]:
        """All texts, `count` times."""
        cut = [self.words.pieces(text) for text in texts]
        for number in range(count):
            dice, known = random.Random(f"{self.seed}/{number}"), dict[str, list[int]]()
            for pieces in cut:
                for piece in pieces:
                    if piece not in known:
                        known[piece] = self.spelled(piece, dice)
            yield [[token for piece in pieces for token in known[piece]] for pieces in cut]

    def spelled(self, piece: str, dice: random.Random) -> list[int]:
        parts = list(piece)
        while True:
            able = ((self.ranks.get(pair), i) for i, pair in enumerate(pairwise(parts)))
            kept = [(rank, i) for rank, i in able if rank is not None and dice.random() >= self.share]
            if not kept:
                return [FIRST_TEXT_ID + self.ids[part] for part in parts]
            _, i = min(kept)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
