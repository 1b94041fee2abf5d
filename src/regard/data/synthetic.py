"""Tasks that need no download. All are a function of their seed, and no example is in two splits."""

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

GOOD = ["good", "great", "charming", "moving", "clever", "brilliant", "funny", "wonderful", "honest", "lovely"]
BAD = ["bad", "awful", "boring", "clumsy", "stupid", "terrible", "dull", "horrible", "false", "ugly"]
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
SAYS = [  # plain, and denied
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
    """Number words of one language in another: "twenty-one" is "einundzwanzig".

    Numbers go from 0 to most - 1, and short ones are as frequent as long ones.
    """
    say = _number_words(source, target)
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most!r}")
    digits = len(str(most - 1))

    def draw(dice: Random) -> int:
        return dice.randrange(min(most, 10 ** dice.randint(1, digits)))

    parts = _distinct_splits(draw, (train, val, test), seed, f"numbers below {most:,}")
    return Splits(*([Pair(say(number, lang=source), say(number, lang=target)) for number in part] for part in parts))


def tagging_sentences(*, train: int = 5000, val: int = 500, test: int = 500, seed: int = 1) -> Splits[list[Tagged]]:
    """Draw sentences of `data.grammar` with their parts of speech: "saw" is two of them in "i saw the saw .".

    `tagging_floor` is the accuracy that words alone reach.
    """
    parts = _distinct_splits(lambda dice: tuple(grammar.sentence(dice)), (train, val, test), seed, "sentences")
    return Splits(*([Tagged([word for word, _ in said], [tag for _, tag in said]) for said in part] for part in parts))


def tagging_floor(train: Sequence[Tagged], test: Sequence[Tagged]) -> float:
    """The share of right tags where every word gets the tag it has most often in train; a new word gets the most frequent one."""
    seen: dict[str, Counter[str]] = {}
    for words, tags, _ in train:
        for word, tag in zip(words, tags, strict=True):
            seen.setdefault(word, Counter())[tag] += 1
    overall = sum(seen.values(), Counter()).most_common(1)
    if not overall or not any(example.words for example in test):
        raise ValueError("there is no word to learn from, or none to tag")
    best = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    right = [best.get(word, overall[0][0]) == tag for words, tags, _ in test for word, tag in zip(words, tags, strict=True)]
    return sum(right) / len(right)


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
    """Random letters with a space between them, and the same ones copied, reversed or sorted: "c a b" is "b a c" by reverse."""
    if kind not in STRING_TASKS:
        raise ValueError(unknown("nothing is done by", kind, STRING_TASKS))
    if not letters or len(set(letters)) < len(letters) or any(letter.isspace() for letter in letters):
        raise ValueError(f"letters must differ and be no spaces: {letters!r} will not do")
    if not 1 <= shortest <= longest:
        raise ValueError(f"1 <= shortest <= longest is needed, not shortest = {shortest!r} and longest = {longest!r}")

    def draw(dice: Random) -> str:
        return "".join(dice.choices(letters, k=dice.randint(shortest, longest)))

    parts = _distinct_splits(draw, (train, val, test), seed, f"strings of {shortest} to {longest} of {len(letters)} letters")
    change = STRING_TASKS[kind]
    return Splits(*([Pair(" ".join(drawn), " ".join(change(list(drawn)))) for drawn in part] for part in parts))


def opinion_sentences(*, train: int = 5000, val: int = 500, test: int = 500, seed: int = 1) -> Splits[list[LabelledText]]:
    """Is it praise (1)? A good or a bad word, and every denial before it turns it around: "i do not think it was never dull".

    Denials are even or odd as a coin says, whatever the word is: no word alone tells the label, nor their number.
    """
    return Splits(
        *([LabelledText(*drawn) for drawn in part] for part in _distinct_splits(_opinion, (train, val, test), seed, "opinions"))
    )


def _opinion(dice: Random) -> tuple[str, int]:
    praise, layers = dice.random() < 0.5, dice.randint(0, 1)
    denied = [dice.random() < 0.5 for _ in range(layers + 1)]
    said = [dice.choice(SAYS)[no] for no in denied[:-1]]
    said += [dice.choice(THINGS), dice.choice(IS)[denied[-1]], dice.choice(GOOD if praise else BAD)]
    return " ".join(said), int(praise ^ (sum(denied) % 2 == 1))


def _distinct_splits(draw: Callable[[Random], Drawn], sizes: Sequence[int], seed: int, what: str) -> list[list[Drawn]]:
    """So many different draws, dealt out by chance: what there is little of is not all in the first split."""
    if min(sizes) < 0:
        raise ValueError(f"a split cannot have {min(sizes)} examples")
    dice, total = Random(seed), sum(sizes)
    found: dict[Drawn, None] = {}  # a set that knows its order
    for _ in range(100 * total + 1000):
        if len(found) == total:
            break
        found[draw(dice)] = None
    if len(found) < total:
        raise ValueError(f"{total:,} different {what} are more than can be found: {len(found):,} were. Ask for fewer")
    order = list(found)
    dice.shuffle(order)
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
