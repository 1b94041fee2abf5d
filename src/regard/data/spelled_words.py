"""Words with their spelling: of every word its number and those of its letters, for models that read both."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.data.vocabulary import Characters, Words


def normalized_words(words: Sequence[str]) -> list[str]:
    """Normalise words for the vocabulary: lower case, all digits 0. Their letters are encoded as written."""
    return [re.sub(r"\d", "0", word.lower()) for word in words]


def spelled_words(words: Sequence[str], known: Words, characters: Characters, letters: int) -> list[list[int]]:
    """Encode each word as its number and its letters; of a long word the first and the last, at most `letters`."""
    numbers, half = known.encode_words(normalized_words(words)), letters // 2
    found = []
    for number, word in zip(numbers, words, strict=True):
        spelling = characters.encode(word)
        found.append([number, *(spelling if len(spelling) <= 2 * half else spelling[:half] + spelling[-half:])])
    return found


def spelled_batch(sentences: Sequence[Sequence[Sequence[int]]], letters: int, multiple: int = 1) -> Tensor:
    """Pad sentences of spelled words to one tensor (b n 1 + letters), with PAD = 0 behind letters and words.

    n is rounded up to a multiple, as `padded` does.
    """
    longest = -(-max(map(len, sentences), default=0) // multiple) * multiple
    spelled = np.zeros((len(sentences), longest, 1 + letters), np.int64)
    for i, sentence in enumerate(sentences):
        for j, word in enumerate(sentence):
            spelled[i, j, : len(word)] = word
    return torch.from_numpy(spelled)


def words_of_line(line: str) -> list[str]:
    """Split a line into words: letters and digits, a contracted not, clitics behind an apostrophe, single signs."""
    return re.findall(r"\w+(?:[-.]\w+)*(?=n't\b)|n't\b|\w+(?:[-.]\w+)*|'\w+|[^\w\s]", line)
