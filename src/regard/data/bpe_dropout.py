"""BPE dropout: random segmentations of words, by leaving out merges. Provilkov, Emelianenko, Voita 2019, arXiv:1910.13267."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from regard.data.vocabulary import FIRST_TEXT_ID, Subwords


class BpeDropout:
    """Segment texts into the subwords of a vocabulary with BPE dropout.

    Each applicable merge is left out with probability `share`, so 0 gives the vocabulary's own segmentation. Within one round a
    word always has one segmentation, and the same seed gives the same rounds.
    """

    def __init__(self, words: Subwords, share: float, seed: int) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"the share of merges that are left out must be from 0 to 1, not {share!r}")
        model = json.loads(words.tokenizer.to_str())["model"]
        pairs = (tuple(x) if isinstance(x, list) else tuple(x.split(" ")) for x in model["merges"])
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.ids, self.words, self.share, self.seed = model["vocab"], words, share, seed

    def rounds(self, texts: Sequence[str], count: int) -> Iterator[list[list[int]]]:
        """Segment all texts, `count` times."""
        split = [self.words.pieces(text) for text in texts]
        for number in range(count):
            rng = random.Random(f"{self.seed}/{number}")
            segmented: dict[str, list[int]] = {}
            for pieces in split:
                for piece in pieces:
                    if piece not in segmented:
                        segmented[piece] = self.segment(piece, rng)
            yield [[token for piece in pieces for token in segmented[piece]] for pieces in split]

    def segment(self, piece: str, rng: random.Random) -> list[int]:
        """Apply merges to one word in order of rank, each left out by chance, and return subword ids."""
        parts = list(piece)
        while True:
            ranked = ((self.ranks.get(pair), i) for i, pair in enumerate(pairwise(parts)))
            kept = [(rank, i) for rank, i in ranked if rank is not None and rng.random() >= self.share]
            if not kept:
                return [FIRST_TEXT_ID + self.ids[part] for part in parts]
            _, i = min(kept)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
