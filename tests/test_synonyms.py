"""The names people type: each is answered with the one that is written here, and none of them is read."""

import dataclasses
import inspect

import pytest

from regard.arena.arena_catalogue import ARENA
from regard.catalogue import CATALOGUE
from regard.patterns import PATTERNS, Pattern
from regard.positions import POSITIONS
from regard.spec import Spec
from regard.synonyms import MECHANISMS, OTHER_KINDS, POSITION_NAMES, SYNONYMS
from regard.tasks import TASKS, config, entry_of
from regard.text import TextError, parse_choice

SAID = {
    "full vanilla sdpa SDPA dot mha flash flash_attention_2 flash-attention scaled_dot_product self_attention": "softmax",
    "sliding_window sliding-window window swa windowed_attention": "Local(256)",
    "bigbird_pegasus big_bird Big-Bird BigBird": "bigbird",
    "linear_attention linear_transformer": "linear",
    "gated_linear_attention": "gla",
    "lstm": "rnn(cell='lstm')",
    "gated_deltanet": "delta(gated=True)",
    "nystromformer nystrom_attention": "nystrom",
    "local local_attention": "Local",
    "sparse_attention": "sparse",
    "bigbrd": "bigbird",
}


def spec_error(text: str) -> str:
    with pytest.raises(TextError) as caught:
        Spec.parse(text)
    return caught.value.sentence


@pytest.mark.parametrize(("words", "right"), SAID.items())
def test_a_mechanism_by_another_name_is_answered_with_the_right_one(words, right):
    for word in words.split():
        assert f"nothing is called {word!r}: did you mean {right!r}? There is softmax" in spec_error(word), word


def test_options_do_not_hide_the_name():
    assert "did you mean 'Local(256)'?" in spec_error("sliding_window(64) | Global(first=1)")
    assert "did you mean 'window'?" in spec_error("sinks(sliding_window=64)")


def test_words_with_a_space_or_a_hyphen_are_one_name():
    assert "nothing is called 'sliding window': did you mean 'Local(256)'?" in spec_error("sliding window")
    assert "nothing is called 'x y'" in spec_error("x y")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("mamba", "no state space model here: gla"),
        ("mqa", "kv_heads=1"),
        ("cross_attention", "cross=True"),
        ("rope", "positions='rotary'"),
        ("rotary", "positions='rotary'"),
        ("alibi", "positions='alibi'"),
        ("relative_bias", "positions='relative'"),
    ],
)
def test_what_is_no_mechanism_is_answered_with_where_it_is(word, words):
    assert words in spec_error(word)


@pytest.mark.parametrize(
    ("word", "right"), [("rope", "rotary"), ("relative_bias", "relative"), ("absolute", "learned"), ("nope", "none")]
)
def test_positions_by_another_name(word, right):
    with pytest.raises(TextError, match=f"did you mean '{right}'"):
        parse_choice(word, POSITIONS)


def test_patterns_tasks_and_settings_by_another_name():
    with pytest.raises(TextError, match=r"did you mean 'Everything\(\)'"):
        Pattern.parse("full")
    with pytest.raises(ValueError, match="did you mean 'ewt'"):
        entry_of("pos_tagging")
    for word, right in (("learning_rate", "lr"), ("n_layers", "depth"), ("d_model", "width"), ("num_heads", "heads")):
        with pytest.raises(ValueError, match=f"has no setting '{word}': did you mean '{right}'"):
            config("reverse").set([f"{word}=1"])


def test_a_setting_is_no_mechanism():
    with pytest.raises(ValueError) as caught:
        config("reverse").set(["mamba=1"])
    assert "state space" not in str(caught.value)


def test_every_right_word_can_be_written():
    mechanisms = {*CATALOGUE, *PATTERNS}
    options = {name for row in CATALOGUE.values() for name in inspect.signature(row.make).parameters}
    settings = {field.name for entry in TASKS.values() for field in dataclasses.fields(entry.config())}
    for right in SYNONYMS:
        if right.partition("(")[0] in mechanisms and right not in ("gat",):
            assert str(Spec.parse(right))
        else:
            assert right in {*POSITIONS, *TASKS, *ARENA, *settings, *options, "gat"}, right
    assert set(POSITION_NAMES) <= set(POSITIONS) and CATALOGUE.keys() & MECHANISMS and PATTERNS.keys() & MECHANISMS
    for words in (*SYNONYMS.values(), *OTHER_KINDS):
        assert words == words.lower() and len(set(words.split())) == len(words.split()), words
    for word in " ".join((*SYNONYMS.values(), *OTHER_KINDS)).split():
        assert word not in mechanisms or word in POSITION_NAMES, f"{word} is a mechanism itself"
