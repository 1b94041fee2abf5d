"""The grammar: what it reads, and that everything else is a sentence with a caret."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.patterns import Edges, Local, Pattern
from regard.text import MAX_TEXT, TextError, parse
from texts import answer, text_of


@dataclass(frozen=True)
class Thing:
    """Stands for anything that can be named, joined and wrong."""

    size: int = 1
    label: object = None

    def __post_init__(self) -> None:
        if self.size == 0:
            raise ValueError("size must not be 0")

    def __or__(self, other: object) -> object:
        return ("or", self, other) if isinstance(other, Thing) else NotImplemented

    def __and__(self, other: object) -> object:
        return ("and", self, other) if isinstance(other, Thing) else NotImplemented


NAMES = {"Thing": Thing, "Other": lambda: "other"}


def fails(text: str) -> TextError:
    with pytest.raises(TextError) as caught:
        parse(text, NAMES)
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Thing", Thing()),
        ("Thing()", Thing()),
        ("  Thing(3,\n\tlabel='a b')  ", Thing(3, "a b")),
        ("Thing(size=-3)", Thing(-3)),
        ("Thing(label=[1, -2.5, (True, False, None), 'x'])", Thing(label=[1, -2.5, (True, False, None), "x"])),
        ("Thing(label=Thing(2))", Thing(label=Thing(2))),
        ("Thing | Thing(2)", ("or", Thing(), Thing(2))),
        ("(Thing) & Thing(label='é')", ("and", Thing(), Thing(label="é"))),
        ("Other", "other"),
        ("[Thing, 3]", [Thing(), 3]),
    ],
)
def test_reads(text: str, value: object) -> None:
    assert parse(text, NAMES) == value


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("Thinh(3)", "Thinh", "did you mean 'Thing'? There is Thing, Other"),
        ("thing", "thing", "did you mean 'Thing'?"),
        ("Thing | Thinh", "Thinh", "did you mean 'Thing'?"),
        ("'é' | Thinh", "Thinh", "did you mean 'Thing'?"),
        ("Thing(sise=3)", "sise", "no option 'sise': did you mean 'size'? There is size, label"),
        ("Other(size=3)", "size", "none to choose from"),
        ("Thing(1, 2, 3)", "Thing", "too many positional arguments; it is written Thing(size=1, label=None)"),
        ("Thing(1, size=2)", "Thing", "multiple values"),
        ("Thing(size=1, size=2)", "size=2", "twice"),
        ("Thing | Thing(size=0)", "Thing(size", "size must not be 0"),
        ("Thing | 3", "3", "joins two patterns, but 3 is not one"),
        ("Thing | Other", "Thing", "joins two patterns"),
        ("Thing(3", "(", "never closed"),
        ("Thing(3) Thing(4)", "Thing(4)", "cannot be read"),
        ("Thing(9223372036854775808)", "92", "too large"),
        ("Thing(1e999)", "1e999", "too large"),
        ("Thing(-True)", "-True", "no meaning"),
        ("Thing(-False)", "-False", "no meaning"),
        ("Thing(1 + 2)", "1 +", "no meaning"),
        ("Thing(2j)", "2j", "no meaning"),
        ("Thing.size", "Thing.size", "no meaning"),
        ("Thing(**{})", "**", "no meaning"),
        ("Thing(*[1])", "*", "no meaning"),
    ],
)
def test_says_what_is_wrong_and_where(text: str, place: str, words: str) -> None:
    error = fails(text)
    sentence, shown, caret = str(error).split("\n")
    assert words in sentence
    assert shown == text
    assert caret == " " * text.index(place) + "^"


HOSTILE = {
    "import": "__import__('os').system('touch /tmp/regard_was_here')",
    "lambda": "(lambda: 1)()",
    "comprehension": "[Thing for _ in ()]",
    "walrus": "(x := Thing)",
    "f-string": "f'{Thing}'",
    "attribute": "Thing.__class__.__mro__",
    "subscript": "Thing[0]",
    "dictionary": "{}",
    "bytes": "Thing(b'')",
    "parentheses": "(" * 10_000,
    "lists": "[" * 150 + "]" * 150,
    "calls": "Thing(" * 5_000 + ")" * 5_000,
    "minus": "-" * 100_000 + "1",
    "not": "not " * 100_000 + "1",
    "chain": "Thing" + " | Thing" * 100_000,
    "digits": "9" * 10_000,
    "a long word": "x" * 900_000,
    "a long value": "Thing | [" + "1, " * 10_000 + "]",
    "ten megabytes": "'" + "x" * 10_000_000 + "'",
    "null": "Thing(\0)",
    "surrogate": "Thing('\ud800')",
    "escape codes": "\x1b[31mThing",
    "nothing": "",
    "blank": " \n\t ",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_gets_a_short_sentence(text: str) -> None:
    began = time.perf_counter()
    message = str(fails(text))
    assert len(message) < 1000
    assert message.count("\n") == 2
    assert "\x1b" not in message
    assert time.perf_counter() - began < 5


def test_fuzzed_texts_are_values_or_sentences_at_once():
    """A part of what benchmarks/fuzz_texts.py reads: patterns, specs, positions and layers, within 50 ms each."""
    outcomes, slow = Counter(), []
    answer("positions", "floater")  # loads its solver
    for seed in range(1500):
        kind, text = text_of(seed)
        began = time.process_time()
        outcomes[answer(kind, text)] += 1
        if time.process_time() - began > 0.05:
            slow.append((kind, text))
    assert set(outcomes) == {"value", "TextError", "ValueError", "TypeError"}
    assert outcomes["value"] > 200
    gc.collect()
    for kind, text in slow:  # once more: a collection of garbage may have come between
        began = time.process_time()
        answer(kind, text)
        assert time.process_time() - began < 0.05, (kind, text[:100])


def test_the_largest_graph_that_is_written_out_can_be_read():
    """4,096 edges between numbers of ten digits are just short enough."""
    graph = Edges([list(range(2**31 - 4096, 2**31)), list(range(2**31 - 4096, 2**31))], nodes=2**31) | Local(3)
    began = time.process_time()
    assert Pattern.parse(str(graph)) == graph
    assert time.process_time() - began < 0.5


def test_long_texts_are_shown_around_the_caret() -> None:
    text = "Thing(label=[" + "0, " * 1_000 + "oops, " + "0, " * 1_000 + "])"
    _, shown, caret = str(fails(text)).split("\n")
    assert shown[caret.index("^") :].startswith("oops")
    assert len(shown) < 120
    assert len(text) < MAX_TEXT


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("Thing(size=0)|&[]',-. 12é\n\\"), max_size=30) | st.text(max_size=20))
def test_any_text_is_a_value_or_a_sentence(text: str) -> None:
    try:
        parse(text, NAMES)
    except TextError as error:
        assert str(error).endswith("^")
