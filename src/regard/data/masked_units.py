"""Units of texts whose tokens are masked: ids of a vocabulary, or words with their letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.data.batch import BEGIN, MASK, padded
from regard.data.spelled_words import normalized_words, spelled_batch, spelled_words, words_of_line
from regard.data.token_labels import token_labels
from regard.data.vocabulary import FIRST_TEXT_ID, Bytes, Characters, Subwords, Vocabulary, Words, vocabulary

BLANK_SIGN = "[MASK]"
MASKED_UNITS = ("subwords", "words", "characters", "bytes", "spelled")
TokenRow = list[Any]  # tokens of an example: ids, or lists of a word's id and its letters


class MaskedUnits(Protocol):
    """Declare what masked-language modelling needs of its units."""

    front: TokenRow  # what precedes every example

    def __len__(self) -> int: ...

    def encode_all(self, texts: Sequence[str]) -> list[TokenRow]: ...

    def encode_blanks(self, line: str) -> TokenRow:
        """Encode a line with BLANK_SIGN in it, MASK at every blank."""
        ...

    def ids(self, row: TokenRow) -> list[int]: ...

    def labels(self, row: TokenRow) -> list[str]: ...

    def tensor(self, rows: Sequence[TokenRow], multiple: int) -> tuple[Tensor, Tensor | None]: ...

    def forms(self) -> Tensor:
        """Return the input that each token is by itself: (v), or (v, 1 + letters)."""
        ...

    def assets(self) -> dict[str, str]: ...


class PlainUnits:
    """Ids of one vocabulary; every example begins with BEGIN, as those of classifiers do."""

    def __init__(self, known: Vocabulary, *, lower: bool) -> None:
        self.known, self.lower, self.front = known, lower, [BEGIN]

    @classmethod
    def learn(cls, texts: Sequence[str], units: str, size: int, *, lower: bool) -> PlainUnits:
        texts = [text.lower() for text in texts] if lower else texts
        if units == "subwords":
            return cls(Subwords.of(texts, size=size), lower=lower)
        if units == "words":
            return cls(Words.of(texts, size=size), lower=lower)
        return cls(Bytes() if units == "bytes" else Characters.of(texts), lower=lower)

    def __len__(self) -> int:
        return len(self.known)

    def encode_all(self, texts: Sequence[str]) -> list[TokenRow]:
        texts = [text.lower() for text in texts] if self.lower else texts
        known = self.known
        return known.encode_all(texts) if isinstance(known, Subwords) else [known.encode(text) for text in texts]

    def encode_blanks(self, line: str) -> TokenRow:
        parts = line.split(BLANK_SIGN)
        if isinstance(self.known, Subwords):  # the space in front of a word belongs to it
            parts = [part.strip(" ") for part in parts]
        first, *others = self.encode_all(parts)
        return [*first, *(token for row in others for token in (MASK, *row))]

    def ids(self, row: TokenRow) -> list[int]:
        return row

    def labels(self, row: TokenRow) -> list[str]:
        return token_labels(self.known, row)

    def tensor(self, rows: Sequence[TokenRow], multiple: int) -> tuple[Tensor, Tensor | None]:
        return padded(rows, multiple=multiple)

    def forms(self) -> Tensor:
        return torch.arange(len(self))

    def assets(self) -> dict[str, str]:
        return {"vocabulary.json": self.known.to_json()}


class SpelledUnits:
    """Words with their letters, as taggers read them; the id of a word is predicted. A masked word has no letters."""

    def __init__(self, words: Words, characters: Characters, letters: int) -> None:
        self.words, self.characters, self.letters, self.front = words, characters, letters, list[Any]()

    @classmethod
    def learn(cls, texts: Sequence[str], min_count: int, letters: int) -> SpelledUnits:
        """Learn words and letters of texts whose words have spaces between them."""
        lists = [text.split(" ") for text in texts]
        words = Words.of((normalized_words(row) for row in lists), min_count=min_count)
        return cls(words, Characters.of(word for row in lists for word in row), letters)

    def __len__(self) -> int:
        return len(self.words)

    def encode_all(self, texts: Sequence[str]) -> list[TokenRow]:
        return [self._encode(text.split(" ")) for text in texts]

    def _encode(self, words: Sequence[str]) -> TokenRow:
        return spelled_words(words, self.words, self.characters, self.letters)

    def encode_blanks(self, line: str) -> TokenRow:
        first, *others = (self._encode(words_of_line(part)) for part in line.split(BLANK_SIGN))
        return [*first, *(word for row in others for word in ([MASK], *row))]

    def ids(self, row: TokenRow) -> list[int]:
        return [word[0] for word in row]

    def labels(self, row: TokenRow) -> list[str]:
        return token_labels(self.words, self.ids(row))

    def tensor(self, rows: Sequence[TokenRow], multiple: int) -> tuple[Tensor, Tensor | None]:
        _, valid = padded([self.ids(row) for row in rows], multiple=multiple)
        return spelled_batch(rows, self.letters, multiple), valid

    def forms(self) -> Tensor:
        spelled = spelled_words(self.words.words, self.words, self.characters, self.letters)
        special = [[number] for number in range(FIRST_TEXT_ID)]
        return spelled_batch([[*special, *spelled]], self.letters)[0]

    def assets(self) -> dict[str, str]:
        return {"words.json": self.words.to_json(), "characters.json": self.characters.to_json()}


def kept_units(assets: Mapping[str, str], units: str, *, lower: bool, letters: int) -> MaskedUnits:
    """Read the units that a run has kept."""
    if units != "spelled":
        return PlainUnits(vocabulary(assets["vocabulary.json"]), lower=lower)
    words, characters = spelled_vocabularies(assets)
    return SpelledUnits(words, characters, letters)


def spelled_vocabularies(assets: Mapping[str, str]) -> tuple[Words, Characters]:
    """Read the words and the letters of a run that reads spelled words."""
    words, characters = vocabulary(assets["words.json"]), vocabulary(assets["characters.json"])
    if not isinstance(words, Words) or not isinstance(characters, Characters):
        raise ValueError(f"words.json and characters.json hold {words.kind} and {characters.kind}: restore them")
    return words, characters
