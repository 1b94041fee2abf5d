"""Labels of tokens, one text for each id: for pictures and tables."""

from __future__ import annotations

from collections.abc import Iterable

from regard.data.batch import SPECIAL
from regard.data.vocabulary import FIRST_TEXT_ID, Bytes, Characters, Subwords, Vocabulary, Words


def token_labels(vocabulary: Vocabulary, ids: Iterable[int]) -> list[str]:
    """Name every id: a word, a character, a subword with the space before it, a byte; special ids as <begin>.

    A byte that is no printable ASCII character is its two hexadecimal digits.
    """
    return [SPECIAL[number] if number < FIRST_TEXT_ID else _label(vocabulary, number) for number in ids]


def _label(vocabulary: Vocabulary, number: int) -> str:
    at = number - FIRST_TEXT_ID
    if isinstance(vocabulary, Words):
        return vocabulary.words[at]
    if isinstance(vocabulary, Characters):
        return vocabulary.characters[at]
    if isinstance(vocabulary, Bytes):
        return chr(at) if 32 <= at < 127 else f"{at:02x}"
    assert isinstance(vocabulary, Subwords)
    return vocabulary.tokenizer.decode([at])
