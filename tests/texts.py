"""Random texts: what a user could write, what a user could get wrong, and what nobody should. For the tests and for the fuzzer.

answer(kind, text)      what the library makes of a text: "value", or the type of its refusal
text_of(seed)           a kind (pattern, spec, positions, layer) and a text of that kind, the same for the same seed
"""

from __future__ import annotations

import random
import string
from typing import Any

import torch

from regard import Dims, layer
from regard.catalogue import CATALOGUE
from regard.patterns import PATTERNS, Pattern
from regard.positions import POSITIONS, positions
from regard.spec import Spec, _spec_options

ODD = "éß漢字🙂\u200b\u202e\x00\x1b\ud800\t\n\\'\"`$@!?;:#%^~{}<>"
SIGNS = "()[]{},|&=-+*/. '\"\\\n0123456789_eExX"
WORDS = ["True", "False", "None", "nan", "inf", "lambda", "if", "not", "in", "import", "print", "size", "first", "at"]
OPTIONS = sorted(
    {o for name in CATALOGUE for o in _spec_options(name)} | {"size", "step", "around", "count", "block", "past", "edges"}
)


def text_of(seed: int) -> tuple[str, str]:
    """A kind and a text of it."""
    dice = random.Random(seed)
    kind = dice.choice(["pattern", "pattern", "spec", "positions", "layer"])
    made = dice.choice([_right, _right, _written, _written, _written, _long, _deep, _noise])(dice, kind)
    for _ in range(dice.choice([0, 0, 0, 1, 2, 5])):
        made = _damaged(dice, made)
    return kind, made


def answer(kind: str, text: str) -> str:
    """Read, print, compare and hash a text; a layer is built, without memory for its weights."""
    try:
        if kind == "layer":
            with torch.device("meta"):
                made = layer(text, width=16, heads=2, max_len=64)
            assert sum(p.numel() for p in (*made.parameters(), *made.buffers())) <= 2**31
            return "value"
        if kind == "positions":
            with torch.device("meta"):
                positions(text, Dims(16, 2, max_len=64))
            return "value"
        value: Any = Pattern.parse(text) if kind == "pattern" else Spec.parse(text)
        assert value == (Pattern if kind == "pattern" else Spec).parse(str(value))
        assert hash(value) == hash(value)
        assert value == value and value != 3
        return "value"
    except (ValueError, TypeError) as error:
        sentence = str(error)
        assert sentence and len(sentence) < 2000, (kind, text[:200], len(sentence))
        return type(error).__name__


def _number(dice: random.Random) -> str:
    match dice.randrange(8):
        case 0 | 1 | 2:
            return str(dice.randint(0, 20))
        case 3:
            return str(-dice.randint(0, 2**40))
        case 4:
            return str(dice.choice([2**31, 2**31 + 1, 2**62, 2**63 - 1, 2**63, 10**12, 10**18, 2**16, 2**16 + 1, 1000]))
        case 5:
            return "9" * dice.choice([1, 5, 18, 19, 20, 400, 4300, 5000])
        case 6:
            return str(dice.uniform(-1e3, 1e3))
    return dice.choice(["1e400", "1e18", "-0.0", "1e-400", "0x10", "0b1", "1_000", "007", "1j", "3.", ".5", "10**12", "1e5"])


def _value(dice: random.Random, kind: str, depth: int) -> str:
    match dice.randrange(9):
        case 0 | 1 | 2 | 3:
            return _number(dice)
        case 4:
            return dice.choice(["True", "False", "None"])
        case 5:
            letters = string.ascii_letters + ODD
            return repr("".join(dice.choice(letters) for _ in range(dice.randint(0, 12))))
        case 6:
            return "[" + ", ".join(_value(dice, kind, depth + 1) for _ in range(dice.randint(0, 4) if depth < 4 else 0)) + "]"
        case 7:
            return repr(dice.choice(["sum", "count", "first", "ends", "fixed", "full", "gla", "Local(3)", "learned", "random"]))
    return _written(dice, "pattern", depth + 1) if depth < 4 else "Local(2)"


def _written(dice: random.Random, kind: str, depth: int = 0) -> str:
    """Names that exist, with some of their options and with any values."""
    if kind == "pattern" or (kind in ("spec", "layer") and dice.random() < 0.2):
        roll = dice.random()
        if depth < 4 and roll < 0.3:
            parts = [_written(dice, "pattern", depth + 1) for _ in range(dice.randint(2, 4))]
            return "(" + dice.choice([" | ", " & ", "|", "&"]).join(parts) + ")"
        if depth < 4 and roll < 0.4:
            return "PerHead([" + ", ".join(_written(dice, "pattern", depth + 1) for _ in range(dice.randint(1, 3))) + "])"
        name, options = dice.choice(sorted(PATTERNS)), ["size", "step", "first", "at", "last", "around", "count", "block", "seed"]
        edges = f"Edges([[{_number(dice)}, {_number(dice)}], [0, {_number(dice)}]], nodes={_number(dice)}, loops=True)"
        if name == "Edges" and dice.random() < 0.7:
            return edges
    elif kind == "positions":
        name = dice.choice(sorted(POSITIONS))
        options = ["base", "clip", "values", "hidden", "step", "every"]
    else:
        name = dice.choice(sorted(CATALOGUE))
        options = list(_spec_options(name)) or ["scale"]
    given = [_value(dice, kind, depth) for _ in range(dice.choice([0, 0, 1, 1, 2, 3]))] if kind == "pattern" else []
    named = dice.sample(options, min(len(options), dice.choice([0, 1, 1, 2, 3])))
    given += [f"{option}={_value(dice, kind, depth)}" for option in named]
    return f"{name}({', '.join(given)})"


RIGHT = ["Local({})", "Truncated({}, {})", "Dilated({}, {})", "Stride({})", "Blocks({}, around={})", "Global(first={}, at=[{}])",
         "Rows({})", "Columns(last={})", "Tail(99, {})", "Random({}, {})", "Edges([[0], [2]], nodes={})", "Causal"]  # fmt: skip
CLOSED = {"": "", "[": "]", "PerHead([": "])", "Edges([[": "], [0]])", "Global(at=[": "])", "softmax(": ")", "'": "'",
          "sparse(PerHead([": "]))", "sparse_transformer(": ")"}  # fmt: skip
PIECES = [
    "1, ",
    "12345678, ",
    "Local(3) | ",
    "Local(3), ",
    "Causal & ",
    "a=1, ",
    "-",
    "not ",
    "x",
    "é",
    " ",
    "1 < ",
    "'a', ",
    "[], ",
]
NESTED = {"(": ")", "[": "]", "PerHead([": "])", "Local(": ")", "(Global(1) | Local(2)) & (": ")", "-": "", "sparse(": ")",
          "hybrid(pattern=": ")", "{": "}", "Local(3) | (": ")"}  # fmt: skip


def _right(dice: random.Random, kind: str, depth: int = 0) -> str:
    """A text that most likely means something."""
    if kind == "positions":
        return dice.choice(["rotary", "alibi", "none", "relative(clip={})", "sinusoidal(base=1{}0)", "floater(every={})"]).format(
            dice.randint(1, 99)
        )
    if kind != "pattern" and dice.random() < 0.7:
        name = dice.choice(sorted(CATALOGUE))
        return str(Spec(name, **dice.choice(CATALOGUE[name].examples).options))
    if depth < 5 and dice.random() < 0.5:
        parts = [_right(dice, "pattern", depth + 1) for _ in range(dice.randint(2, 3))]
        return dice.choice(["({} | {})", "({} & {})", "PerHead([{}, {}])"]).format(*parts)
    return dice.choice(RIGHT).format(*(dice.randint(3, 90) for _ in range(2)))


def _long(dice: random.Random, kind: str) -> str:  # noqa: ARG001 - the same for all kinds
    start, end = dice.choice(list(CLOSED.items()))
    part, many = dice.choice(PIECES), dice.choice([100, 1000, 9000, 30_000, 99_000, 200_000])
    return start + part * (many // len(part) + 1) + dice.choice(["", end, "1" + end, "Local(3)" + end])


def _deep(dice: random.Random, kind: str) -> str:  # noqa: ARG001 - the same for all kinds
    start, end = dice.choice(list(NESTED.items()))
    many = dice.choice([5, 50, 95, 99, 100, 150, 1000, 20_000])
    return start * many + dice.choice(["Local(3)", "1", "softmax", ""]) + end * (many if dice.random() < 0.8 else many // 2)


def _noise(dice: random.Random, kind: str) -> str:  # noqa: ARG001 - the same for all kinds
    letters = dice.choice([SIGNS, SIGNS + ODD, string.printable, ODD])
    words = [*WORDS, *OPTIONS, *PATTERNS, *CATALOGUE, *POSITIONS]
    return "".join(
        dice.choice(words) if dice.random() < 0.2 else dice.choice(letters) for _ in range(dice.choice([0, 1, 5, 20, 60, 300]))
    )


def _damaged(dice: random.Random, text: str) -> str:
    """One character lost, added or swapped, or a piece said twice."""
    at = dice.randint(0, len(text))
    match dice.randrange(4):
        case 0:
            return text[:at] + text[at + 1 :]
        case 1:
            return text[:at] + dice.choice(SIGNS + ODD) + text[at:]
        case 2:
            return text[:at] + dice.choice(["(", ")", ",", "|", "9", "-", "="]) + text[at + 1 :]
    return text[:at] + text[max(0, at - dice.randint(0, 30)) :]
