"""Extended vocabularies for copying: out-of-vocabulary (OOV) words of a source get ids behind the vocabulary.

An OOV word of the source has the id len(vocab) + its index among the OOV words of this source, in the order of their first
occurrence (See, Liu, Manning 2017, arXiv:1704.04368). A model can so produce words that are not in its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from regard.data.batch import END, UNKNOWN
from regard.data.vocabulary import FIRST_TEXT_ID, Words


def extend_ids(words: Iterable[str], vocab: Words) -> tuple[list[int], list[str]]:
    """Return ids of a source in its extended vocabulary, and its OOV words. The same word has the same id."""
    new: dict[str, int] = {}
    ids = []
    for word in words:
        known = vocab.ids.get(word)
        if known is None:
            known = new.setdefault(word, len(vocab) + len(new))
        ids.append(known)
    return ids, list(new)


def extend_target_ids(words: Iterable[str], vocab: Words, oov: list[str]) -> list[int]:
    """Return ids of a target in the extended vocabulary of its source: a word that neither has is UNKNOWN."""
    new = {word: len(vocab) + place for place, word in enumerate(oov)}
    return [vocab.ids.get(word, new.get(word, UNKNOWN)) for word in words]


def extended_words(ids: Iterable[int], vocab: Words, oov: list[str]) -> list[str]:
    """Return the words of extended ids, up to the first END; other special ids are left out, as `decode` does."""
    found = []
    for number in ids:
        if not 0 <= number < len(vocab) + len(oov):
            raise ValueError(f"there is no id {number}: the vocabulary has {len(vocab):,} and this source adds {len(oov)}")
        if number == END:
            break
        if number >= len(vocab):
            found.append(oov[number - len(vocab)])
        elif number >= FIRST_TEXT_ID:
            found.append(vocab.words[number - FIRST_TEXT_ID])
    return found
