"""Synthetic data sets: functions of a seed, without a download. No example is in two splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, TypeVar

from regard.data import grammar
from regard.data.datasets import LabelledText, Splits, Tagged
from regard.data.text_files import Pair
from regard.text import unknown

Drawn = TypeVar("Drawn", bound=Hashable)

STRING_TASKS: dict[str, Callable[[list[str]], list[str]]] = {"copy": list, "reverse": lambda x: x[::-1], "sort": sorted}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

POSITIVE_WORDS = ["good", "great", "charming", "moving", "clever", "brilliant", "funny", "wonderful", "honest", "lovely"]
NEGATIVE_WORDS = ["bad", "awful", "boring", "clumsy", "stupid", "terrible", "dull", "horrible", "false", "ugly"]
THINGS = [
    "the film",
    "the plot",
    "the acting",
    "this story",
    "the ending",
    "the music",
    "her role",
    "the script",
    "that scene",
    "the camera",
]
IS = [("is", "is not"), ("was", "was never"), ("seems", "hardly seems"), ("looked", "did not look")]
CLAIMS = [  # plain, and denied
    ("i think that", "i do not think that"),
    ("they say that", "they never say that"),
    ("it is true that", "it is not true that"),
    ("we believe that", "we hardly believe that"),
    ("everybody saw that", "nobody saw that"),
    ("she would claim that", "she would not claim that"),
]


def number_words_pairs(
    source: str = "en",
    target: str = "de",
    *,
    most: int = 1_000_000,
    train: int = 10_000,
    val: int = 500,
    test: int = 500,
    seed: int = 1,
) -> Splits[list[Pair]]:
    """Draw pairs of number words in two languages: "twenty-one", "einundzwanzig".

    Numbers go from 0 to most - 1, and short ones are as frequent as long ones.
    """
    spell = _number_words(source, target)
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most!r}")
    digits = len(str(most - 1))

    def draw(rng: Random) -> int:
        return rng.randrange(min(most, 10 ** rng.randint(1, digits)))

    parts = _distinct_splits(draw, (train, val, test), seed, f"numbers below {most:,}")
    return Splits(*([Pair(spell(number, lang=source), spell(number, lang=target)) for number in part] for part in parts))


def tagging_sentences(*, train: int = 5000, val: int = 500, test: int = 500, seed: int = 1) -> Splits[list[Tagged]]:
    """Draw sentences of `data.grammar` with their parts of speech: "saw" is two of them in "i saw the saw .".

    `tagging_floor` is the accuracy that words alone reach.
    """
    parts = _distinct_splits(lambda rng: tuple(grammar.sentence(rng)), (train, val, test), seed, "sentences")
    return Splits(*([_tagged(drawn) for drawn in part] for part in parts))


def _tagged(pairs: Sequence[grammar.Word]) -> Tagged:
    return Tagged([word for word, _ in pairs], [tag for _, tag in pairs])


def tagging_floor(train: Sequence[Tagged], test: Sequence[Tagged]) -> float:
    """Return the accuracy of tagging each word with its most frequent tag in train; a new word gets the most frequent tag."""
    seen: dict[str, Counter[str]] = {}
    for words, tags, _ in train:
        for word, tag in zip(words, tags, strict=True):
            seen.setdefault(word, Counter())[tag] += 1
    overall = sum(seen.values(), Counter()).most_common(1)
    if not overall or not any(example.words for example in test):
        raise ValueError("there is no word to learn from, or none to tag")
    best = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    default = overall[0][0]
    pairs = [pair for words, tags, _ in test for pair in zip(words, tags, strict=True)]
    return sum(best.get(word, default) == tag for word, tag in pairs) / len(pairs)


def string_pairs(
    kind: str = "reverse",
    *,
    letters: str = ALPHABET,
    shortest: int = 1,
    longest: int = 20,
    train: int = 10_000,
    val: int = 500,
    test: int = 500,
    seed: int = 1,
) -> Splits[list[Pair]]:
    """Draw strings of random letters with spaces between them, paired with the same letters copied, reversed or sorted."""
    if kind not in STRING_TASKS:
        raise ValueError(unknown("nothing is done by", kind, STRING_TASKS))
    repeated = len(set(letters)) < len(letters)
    if not letters or repeated or any(letter.isspace() for letter in letters):
        raise ValueError(f"letters must be different characters other than spaces, not {letters!r}")
    if not 1 <= shortest <= longest:
        raise ValueError(f"1 <= shortest <= longest is needed, not shortest = {shortest!r} and longest = {longest!r}")

    def draw(rng: Random) -> str:
        return "".join(rng.choices(letters, k=rng.randint(shortest, longest)))

    parts = _distinct_splits(draw, (train, val, test), seed, f"strings of {shortest} to {longest} of {len(letters)} letters")
    change = STRING_TASKS[kind]
    return Splits(*([Pair(" ".join(drawn), " ".join(change(list(drawn)))) for drawn in part] for part in parts))


def opinion_sentences(*, train: int = 5000, val: int = 500, test: int = 500, seed: int = 1) -> Splits[list[LabelledText]]:
    """Draw opinions, label 1 for praise: a good or a bad word, negated by every denial: "i do not think it was never dull".

    The number of denials is even or odd with equal chance, independent of the word: no single word gives the label, nor does
    the number of denials.
    """
    parts = _distinct_splits(_opinion, (train, val, test), seed, "opinions")
    return Splits(*([LabelledText(*drawn) for drawn in part] for part in parts))


def _opinion(rng: Random) -> tuple[str, int]:
    praise, layers = rng.random() < 0.5, rng.randint(0, 1)
    denied = [rng.random() < 0.5 for _ in range(layers + 1)]
    parts = [rng.choice(CLAIMS)[no] for no in denied[:-1]]
    parts += [rng.choice(THINGS), rng.choice(IS)[denied[-1]]]
    parts.append(rng.choice(POSITIVE_WORDS if praise else NEGATIVE_WORDS))
    odd = sum(denied) % 2 == 1
    return " ".join(parts), int(praise ^ odd)


def _distinct_splits(draw: Callable[[Random], Drawn], sizes: Sequence[int], seed: int, what: str) -> list[list[Drawn]]:
    """Draw sum(sizes) different examples and deal them out at random: rare kinds are not all in the first split."""
    if min(sizes) < 0:
        raise ValueError(f"a split cannot have {min(sizes)} examples")
    rng, total = Random(seed), sum(sizes)
    found: dict[Drawn, None] = {}  # an ordered set
    for _ in range(100 * total + 1000):
        if len(found) == total:
            break
        found[draw(rng)] = None
    if len(found) < total:
        raise ValueError(f"{total:,} different {what} were requested, but only {len(found):,} could be drawn: request fewer")
    order = list(found)
    rng.shuffle(order)
    ends = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    return [order[first:end] for first, end in pairwise(ends)]


def _number_words(*languages: str) -> Callable[..., str]:
    try:
        import num2words  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("number words need num2words: pip install 'regard[train]'") from None
    known: dict[str, Any] = num2words.CONVERTER_CLASSES
    for language in languages:
        if language not in known:
            raise ValueError(unknown("there are no number words in", language, known))
    return num2words.num2words
