"""Words that only their source knows: for copying, the vocabulary goes on behind its end, anew for every source.

A word of the source that the vocabulary does not have gets the id len(vocab) + its place among such words, in the order in which
they first appear (See, Liu, Manning 2017, arXiv:1704.04368). So a model may say a word it has never seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from regard.data.batch import END, UNKNOWN
from regard.data.vocabulary import FIRST_TEXT_ID, Words


def extend_ids(words: Iterable[str], vocab: Words) -> tuple[list[int], list[str]]:
    """The source in ids that go on behind the vocabulary, and the words that these stand for. The same word has the same id."""
    new: dict[str, int] = {}
    ids = []
    for word in words:
        known = vocab.ids.get(word)
        ids.append(new.setdefault(word, len(vocab) + len(new)) if known is None else known)
    return ids, list(new)


def extend_target_ids(words: Iterable[str], vocab: Words, oov: list[str]) -> list[int]:
    """The target in the same ids: what neither the vocabulary nor the source has is UNKNOWN."""
    new = {word: len(vocab) + place for place, word in enumerate(oov)}
    return [vocab.ids.get(word, new.get(word, UNKNOWN)) for word in words]


def extended_words(ids: Iterable[int], vocab: Words, oov: list[str]) -> list[str]:
    """The words of such ids, up to the first END; other special ids are left out, as `decode` does."""
    found = []
    for number in ids:
        if not 0 <= number < len(vocab) + len(oov):
            raise ValueError(f"there is no id {number}: the vocabulary has {len(vocab):,} and this source adds {len(oov)}")
        if number == END:
            break
        if number >= FIRST_TEXT_ID:
            found.append(vocab.words[number - FIRST_TEXT_ID] if number < len(vocab) else oov[number - len(vocab)])
    return found
