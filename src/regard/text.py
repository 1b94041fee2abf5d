"""Parse patterns and specs from text: known names, calls of them, literals, `|` and `&`. Nothing else is evaluated.

Python's own parser builds the syntax tree, and a reader of its own evaluates it, so a text is never run as Python.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import NoReturn, TypeVar

from regard.synonyms import elsewhere, right_word

MAX_TEXT = 100_000  # characters: a graph of 4,096 edges, written out
MAX_SIGNS = 8_500  # signs between names and numbers; each becomes an object of a few hundred bytes
MAX_CALLS = 2_000  # names with their options
MAX_OPERATORS = ",|&([{=<>+-*/%^~@!.:"
MAX_DEPTH = 100  # calls, lists and operators inside each other; far below Python's own limit
MAX_NUMBER = 2**63  # numbers end up in tensors
UNKNOWN_NAME = "nothing is called"  # the beginning of the sentence about a name that there is not

_SEVERAL_WORDS = re.compile(r"[^\W\d]\w*([ -]+\w+)+")  # one name as people write it: sliding-window, big bird

Parsed = TypeVar("Parsed")
NamedMakers = Mapping[str, Callable[..., object]]


class TextError(ValueError):
    """Report an error in a text: a sentence, the text, and a caret under the place."""

    def __init__(self, sentence: str, text: str, at: int = 0) -> None:
        super().__init__(sentence, text, at)
        self.sentence, self.text, self.at = sentence, text, at

    def __str__(self) -> str:
        return f"{self.sentence}\n{_underline(self.text, self.at)}"


def parse(text: str, names: NamedMakers) -> object:
    """Evaluate a text such as `Local(256) | Global(first=4)` with the callables of `names`. `softmax` is `softmax()`."""
    if len(text) > MAX_TEXT:
        raise TextError(f"{len(text):,} characters are too many: {MAX_TEXT:,} is the limit", text)
    line = re.sub(r"\s", " ", text).strip()  # one line: a place is one number
    if not line:
        raise TextError("there is nothing to read: write a name, such as " + " or ".join(list(names)[:2]), line)
    signs = sum(map(line.count, MAX_OPERATORS))
    if signs > MAX_SIGNS:
        raise TextError(f"{signs:,} commas, brackets and signs are too many: {MAX_SIGNS:,} is the limit", line)
    if _SEVERAL_WORDS.fullmatch(line):
        raise TextError(unknown(UNKNOWN_NAME, line, names), line)
    try:
        return _Reader(line, names).value(_tree(line))
    except (RecursionError, MemoryError):  # Python's parser has limits of its own
        raise TextError(f"this is nested too deeply: {MAX_DEPTH} levels is the limit", line) from None


def parse_choice(text: str, makers: Mapping[str, Callable[..., Parsed]]) -> partial[Parsed]:
    """Parse a text such as `relative(clip=8)` to one of the makers with its options bound, without its first argument."""
    made = parse(text, {name: _with_options(make) for name, make in makers.items()})
    if not isinstance(made, partial):
        raise TextError(f"this is a value: write one of {', '.join(makers)}", text)
    return made


def _with_options(make: Callable[..., object]) -> Callable[..., partial]:
    """Return a function of a maker's options alone: all of its arguments but the first."""
    options = list(inspect.signature(make).parameters.values())[1:]
    signature = inspect.Signature([p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in options])

    def take(*args: object, **given: object) -> partial:
        return partial(make, **signature.bind(*args, **given).arguments)

    take.__signature__ = signature  # type: ignore[attr-defined]  # the parser checks options against it
    return take


def unknown(what: str, word: str, allowed: Iterable[str]) -> str:
    """Return an error message for an unknown word: the allowed one that is meant, or is nearest, and then all of them."""
    word, by_lower = _shortened(word), {name.lower(): name for name in allowed}
    names = list(by_lower.values())
    near = get_close_matches(word.lower(), by_lower, n=1)
    hint = "there is "
    if right := right_word(word, names):
        hint = f"did you mean {right!r}? There is "
    elif why := elsewhere(word, names):
        hint = f"{why}. There is "
    elif near:
        hint = f"did you mean {by_lower[near[0]]!r}? There is "
    return f"{what} {word!r}: {hint}{', '.join(names) or 'none to choose from'}"


_POWERS: dict[float | None, str] = {0: "1", 1: "{}", 2: "{}²", None: "none"}


def growth(power: float | None, letter: str) -> str:
    """Write a power of a length: 1, n, n², n^1.5, and none where nothing grows."""
    return _POWERS.get(power, f"{letter}^{power}").format(letter)


def _tree(line: str) -> ast.expr:
    try:
        return ast.parse(line, mode="eval").body
    except SyntaxError as error:
        raise TextError(f"this cannot be read: {error.msg.split(':')[0]}", line, (error.offset or 1) - 1) from None
    except ValueError as error:  # characters that are not text: nulls, lone surrogates
        raise TextError(f"this cannot be read: {error}", line) from None


class _Reader:
    """Evaluate a syntax tree; refuse every node that is not part of the grammar."""

    def __init__(self, line: str, names: NamedMakers) -> None:
        self.line, self.names, self.calls = line, names, 0

    def value(self, node: ast.expr, depth: int = 1) -> object:
        if depth > MAX_DEPTH:
            self.fail(f"this is nested too deeply: {MAX_DEPTH} levels is the limit", node)
        match node:
            case ast.Constant():
                return self.literal(node)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if type(number) is not bool:
                self.literal(node.operand)
                return -number
            case ast.List():
                return [self.item(item, depth + 1) for item in node.elts]
            case ast.Tuple():
                return tuple(self.value(item, depth + 1) for item in node.elts)
            case ast.BinOp(op=ast.BitOr() | ast.BitAnd()):
                return self.joined(node, depth)
            case ast.Name():
                return self.made(node, node, [], [], depth)
            case ast.Call(func=ast.Name() as name):
                return self.made(node, name, node.args, node.keywords, depth)
        self.fail("this has no meaning here: write names, calls of them, literals, `|` and `&`", node)

    def item(self, node: ast.expr, depth: int) -> object:
        """Evaluate an item of a list; integers, of which there may be thousands, take a short path."""
        number = type(node) is ast.Constant and type(node.value) is int and node.value < MAX_NUMBER
        return node.value if number else self.value(node, depth)  # type: ignore[attr-defined]

    def literal(self, node: ast.expr) -> object:
        value = node.value if isinstance(node, ast.Constant) else None
        if value is not None and not isinstance(value, bool | int | float | str):
            self.fail("this has no meaning here: write a number, a string, True, False or None", node)
        if isinstance(value, int | float) and not value < MAX_NUMBER:
            self.fail("this number is too large: 2**63 is the limit", node)
        return value

    def joined(self, node: ast.BinOp, depth: int) -> object:
        """Apply `|` or `&` to two patterns; the same operators of numbers and lists are refused."""
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        sign, join = ("|", operator.or_) if isinstance(node.op, ast.BitOr) else ("&", operator.and_)
        for side, value in ((node.left, left), (node.right, right)):
            if isinstance(value, bool | int | list | tuple):
                self.fail(f"`{sign}` joins two patterns, but {value!r} is not one", side)
        try:
            return join(left, right)
        except (TypeError, ValueError) as error:
            why = f": {error}" if isinstance(error, ValueError) else ""
            self.fail(f"`{sign}` joins two patterns, which {left} and {right} are not{why}", node)

    def made(self, node: ast.expr, name: ast.Name, args: list[ast.expr], keywords: list[ast.keyword], depth: int) -> object:
        if name.id not in self.names:
            self.fail(unknown(UNKNOWN_NAME, name.id, self.names), name)
        make = self.names[name.id]
        self.calls += 1
        if self.calls > MAX_CALLS:
            self.fail(f"too many names: {MAX_CALLS:,} is the limit", name)
        self.check_keywords(name.id, make, keywords)
        positional = [self.value(arg, depth + 1) for arg in args]
        named = {keyword.arg: self.value(keyword.value, depth + 1) for keyword in keywords if keyword.arg}
        try:
            _signature(make).bind(*positional, **named)
        except TypeError as error:
            self.fail(f"{name.id}: {error}; it is written {name.id}{_signature_text(make)}", node)
        try:
            return make(*positional, **named)
        except (TypeError, ValueError, ArithmeticError) as error:
            why = error.sentence if isinstance(error, TextError) else str(error)  # of a text inside this text
            self.fail(why if why.startswith(name.id) else f"{name.id}: {why}", node)

    def check_keywords(self, name: str, make: Callable[..., object], keywords: list[ast.keyword]) -> None:
        options, seen = list(_signature(make).parameters), set()
        for keyword in keywords:
            if keyword.arg is None:
                self.fail("`**` has no meaning here: write the options by name", keyword)
            if keyword.arg not in options:
                self.fail(unknown(f"{name} has no option", keyword.arg, options), keyword)
            if keyword.arg in seen:
                self.fail(f"{name} is given {keyword.arg!r} twice", keyword)
            seen.add(keyword.arg)

    def fail(self, sentence: str, node: ast.expr | ast.keyword) -> NoReturn:
        at = len(self.line.encode()[: node.col_offset].decode())  # the parser counts bytes
        raise TextError(_shortened(sentence, 600), self.line, at) from None


_signature = lru_cache(maxsize=1024)(inspect.signature)


def _shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[:most] + "…"


def _signature_text(make: Callable[..., object]) -> str:
    """Format options as in a call: (size, around=0)."""
    parameters = _signature(make).parameters.values()
    parts = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    return f"({', '.join(parts)})"


def _underline(text: str, at: int, room: int = 100) -> str:
    """Return the text near a place, with unprintable characters replaced, and a caret below the place."""
    first = max(0, min(at - room // 2, len(text) - room))
    end = first + room
    excerpt = "".join(c if c.isprintable() else "?" for c in text[first:end])
    left = "…" if first > 0 else ""
    right = "…" if end < len(text) else ""
    indent = " " * (len(left) + at - first)
    return f"{left}{excerpt}{right}\n{indent}^"
