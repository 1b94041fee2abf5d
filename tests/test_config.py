"""Settings: types are those of the fields, an unknown key is answered with the nearest, and JSON brings them back."""

import dataclasses
import json
from typing import ClassVar

import pytest

from regard.config import Config
from regard.options import Options, family, field_comments, option_lines, parse_options
from regard.text import TextError


@dataclasses.dataclass
class Own(Config):
    """A task with fields of its own."""

    letters: int = 5
    kinds: list[str] = dataclasses.field(default_factory=list)
    teacher: str | None = None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("width=64", 64),
        ("steps=100_000", 100_000),
        (" depth = 2 ", 2),
        ("lr=3e-4", 3e-4),
        ("decay=1", 1.0),
        ("gated=true", True),
        ("gated=False", False),
        ("decoder_depth=3", 3),
        ("decoder_depth=none", None),
        ("decoder_depth=None", None),
        ("positions=relative(clip=8)", "relative(clip=8)"),
        ("mixer=bigbird(block=8, random=2)", "bigbird(block=8, random=2)"),
        ("mixer=[]", []),
        ('mixer=["linear", "Local(3)"]', ["linear", "Local(3)"]),
        ("betas=[0.9, 1]", [0.9, 1.0]),
        ("precision=32", "32"),
        ("letters=7", 7),
        ("teacher=none", "none"),
        ("kinds=[]", []),
    ],
)
def test_a_text_becomes_the_fields_type(text, value):
    before = Own(task="x")
    after, key = before.set([text]), text.partition("=")[0].strip()
    assert getattr(after, key) == value and type(getattr(after, key)) is type(value)
    assert before == Own(task="x"), "the old one is as it was"
    assert after.replace({key: getattr(before, key)}) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("widht=64", "x has no setting 'widht': did you mean 'width'? There is accumulate, activation"),
        ("task=y", "x has no setting 'task'"),
        ("width", "a setting is written key=value, not 'width'"),
        ("=3", "a setting is written key=value, not '=3'"),
        ("width=", "width must be an integer, not ''"),
        ("width=6.5", "width must be an integer, not '6.5'"),
        ("width=true", "width must be an integer, not 'true'"),
        ("lr=fast", "lr must be a number, not 'fast'"),
        ("lr=nan", "lr must be a number, not 'nan'"),
        ("clip=inf", "clip must be a number, not 'inf'"),
        ("gated=1", "gated must be true or false, not '1'"),
        ("decoder_depth=some", "decoder_depth must be an integer or none, not 'some'"),
        ("mixer=[1, 2]", "mixer must be a text or a list of texts, not '[1, 2]'"),
        ("mixer=[linear]", "mixer must be a text or a list of texts, not '[linear]'"),
        ("betas=0.9", "betas must be a list of numbers, not '0.9'"),
        ('betas=[0.9, "x"]', "betas must be a list of numbers"),
        ("betas=" + "[" * 100_000, "betas must be a list of numbers"),
    ],
)
def test_a_mistake_is_a_sentence(text, sentence):
    with pytest.raises(ValueError) as error:
        Own(task="x").set(["depth=2", text])
    assert sentence in str(error.value)


@pytest.mark.parametrize("value", [True, 1.5, None, [1], {"a": 1}])
def test_values_of_json_are_held_to_their_types_too(value):
    with pytest.raises(ValueError, match="width must be an integer, not"):
        Own().replace({"width": value})


def test_json_brings_settings_back():
    config = Own(task="x").set(['mixer=["linear", "softmax"]', "decoder_depth=2", "lr=0.1", "letters=9", "gated=true"])
    told = json.loads(json.dumps(config.to_json()))
    assert told.pop("task") == "x" and Own(task="x").replace(told) == config
    assert set(told) == {f.name for f in dataclasses.fields(Own)} - {"task"}


def test_changes_come_one_after_another_and_the_last_one_counts():
    assert Config().set(["width=8", "width=16"]).width == 16
    assert Config().set([]) == Config()


def test_two_configurations_share_no_list():
    one, two = Config(), Config()
    one.betas.append(3)
    assert two.betas == [0.9, 0.98]


def test_an_integer_of_any_size_is_an_integer():
    assert Config().set(["steps=" + "9" * 400]).steps == 10**400 - 1


# settings with options of their own


@dataclasses.dataclass(frozen=True)
class Plain(Options):
    """Nothing to choose."""

    name = "plain"


@dataclasses.dataclass(frozen=True)
class Rich(Options):
    """One option of each type."""

    name = "rich"
    size: int = 3  # how large
    rate: float = 0.5  # how fast
    kind: str = "a"  # of which kind
    exact: bool = False

    def check(self):
        if self.size < 1:
            raise ValueError(f"size must be at least 1, not {self.size}")


KINDS = family((Plain, Rich))


@dataclasses.dataclass
class Chosen(Config):
    families: ClassVar = {"part": KINDS}
    part: str = "plain"  # which one


def test_options_are_written_in_full_and_read_back():
    text = "rich(size=3, rate=2.0, kind='a', exact=False)"
    config = Chosen(task="x").set(["part=rich( rate = 2 )"])
    assert config.part == text and config.options("part") == Rich(rate=2.0)
    assert Chosen(task="x").replace({"part": text}) == config == Chosen(task="x", part="rich(rate=2.0)")
    assert str(parse_options("plain()", KINDS)) == Chosen().part == "plain"
    assert type(config.options("part").rate) is float


@pytest.mark.parametrize(
    ("text", "sentence", "caret"),
    [
        ("rihc", "nothing is called 'rihc': did you mean 'rich'?", 0),
        ("rich(rates=2)", "rich has no option 'rates': did you mean 'rate'?", 5),
        ("plain(size=2)", "plain has no option 'size': there is none to choose from", 6),
        ("rich(size=0)", "rich: size must be at least 1, not 0", 0),
        ("rich(size=2.0)", "rich: size must be an integer, not 2.0", 0),
        ("rich(size=True)", "rich: size must be an integer, not True", 0),
        ("rich(rate=True)", "rich: rate must be a number, not True", 0),
        ("rich(rate='fast')", "rich: rate must be a number, not 'fast'", 0),
        ("rich(kind=1)", "rich: kind must be a text in quotes, not 1", 0),
        ("rich(exact=1)", "rich: exact must be True or False, not 1", 0),
        ("rich(size=plain)", "rich: size must be an integer, not", 0),
        ("3", "this is a value: write one of plain, rich", 0),
        ("plain | rich", "`|` joins two patterns", 0),
        ("rich(", "this cannot be read", 4),
        ("", "there is nothing to read", 0),
    ],
)
def test_a_wrong_option_is_refused_with_a_caret(text, sentence, caret):
    with pytest.raises(TextError) as error:
        Chosen(task="x").set([f"part={text}"])
    assert str(error.value).startswith(sentence) and error.value.at == caret


def test_options_are_listed_with_defaults_and_comments():
    assert [tuple(line) for line in option_lines(Rich)] == [
        ("size", "3", "how large"),
        ("rate", "0.5", "how fast"),
        ("kind", "'a'", "of which kind"),
        ("exact", "False", ""),
    ]
    assert field_comments(Chosen)["part"] == "which one" and field_comments(Chosen)["beam"] == "width of beam search; 1: greedy"
