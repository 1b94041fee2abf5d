"""Specs: a mechanism as a value, `Spec("bigbird", window=3)`, as a text, `bigbird(window=3)`, or as JSON."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from keyword import iskeyword
from typing import Any, get_args, get_type_hints

import torch

from regard.catalogue import CATALOGUE
from regard.catalogue_row import Example, Row
from regard.checks import check_flag, shown
from regard.installed_mechanisms import GROUP, installed_mechanisms
from regard.mixers.attention import Attention
from regard.mixers.base import Core, Dims, LengthNeeded, Mixer
from regard.mixers.head_readout import refuse_readout
from regard.mixers.position_interface import Positions
from regard.own_mechanism import UNMEASURED, class_name, named_class, own_row, split_own
from regard.patterns import PATTERNS, Pattern
from regard.positions import positions as make_positions
from regard.text import MAX_DEPTH, MAX_NUMBER, TextError, parse, unknown

Value = bool | int | float | str | Pattern | tuple["Value", ...] | None


@dataclass(frozen=True, init=False, repr=False)
class Spec:
    """Hold a mechanism's name and options, in the order of its constructor. Specs compare, hash, print and parse.

    The name is one of the catalogue, or `mypkg.mod:MyCore`, whose module is imported; the class itself may be given for it.

    `options` are those of the mechanism; what is not given has its default, and `str(spec)` leaves it out.

    >>> from regard import Spec
    >>> spec = Spec("bigbird", random=1, block=32)
    >>> str(spec)
    'bigbird(block=32, random=1)'
    >>> Spec.parse("bigbird(block=32, random=1)") == spec
    True
    """

    name: str
    items: tuple[tuple[str, Value], ...]

    def __init__(self, name: str | type[Core] | type[Mixer], /, **options: Any) -> None:
        name = _known_name(name)
        allowed = _spec_options(name)
        for option in options:
            if option not in allowed:
                raise ValueError(unknown(f"{name} has no option", option, allowed))
        object.__setattr__(self, "name", name)
        given = [option for option in allowed if option in options]
        items = tuple((option, _value(name, option, options[option])) for option in given)
        object.__setattr__(self, "items", items)

    @property
    def options(self) -> dict[str, Value]:
        return dict(self.items)

    @property
    def row(self) -> Row:
        return _row(self.name)

    def __str__(self) -> str:
        if not self.items:
            return self.name
        options = [f"{option}={_literal(value)}" for option, value in self.items]
        return f"{self.name}({', '.join(options)})"

    def __repr__(self) -> str:
        options = [f"{option}={value!r}" for option, value in self.items]
        parts = [repr(self.name), *options]
        return f"Spec({', '.join(parts)})"

    @staticmethod
    def parse(text: str) -> Spec:
        """`bigbird(window=3)`, `softmax`, a pattern, which means sparse(pattern), or `mypkg.mod:MyCore(size=3)`."""
        first = re.match(r"\s*(\w+)", text)
        if first is not None and first[1] not in PATTERNS:
            _add_installed(first[1])
        rows = [(row.name, row.make) for row in CATALOGUE.values()]
        names = _names(*rows)
        if own := split_own(text):
            name, called = _known_name(own.name), own.name.partition(":")[2]
            text, names = called + own.options, {**names, called: _maker(name, _row(name).make)}
        value = parse(text, names)
        if not isinstance(value, Spec | Pattern):
            raise TextError("this is a value, not a mechanism: write a name, such as softmax, or a pattern", text)
        return Spec.of(value)

    @staticmethod
    def of(x: Named) -> Spec:
        """Convert anything that names a mechanism to a Spec: a Spec, a text, a JSON object, a pattern, or a class."""
        match x:
            case Spec():
                return x
            case str():
                return Spec.parse(x)
            case Pattern():
                return Spec("sparse", pattern=x)
            case Mapping():
                return Spec.from_json(x)
            case type():
                return _class_spec(x)
        raise TypeError(f"a mechanism is a Spec, a text, a Pattern, a class or a dict with its name, not {shown(x)}")

    def to_json(self) -> dict[str, Any]:
        options = {option: _json_value(value) for option, value in self.items}
        return {"name": self.name, "options": options}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Spec:
        name = data.get("name")
        options = data.get("options", {})
        more = set(data) - {"name", "options"}
        if not isinstance(name, str) or not isinstance(options, Mapping) or more:
            raise ValueError(f'a mechanism in JSON is {{"name": ..., "options": {{...}}}}, not {shown(dict(data))}')
        return Spec(name, **options)

    def needs_length(self, dims: Dims) -> bool:
        """Return whether the mechanism can only be built with a max_len."""
        try:
            with torch.device("meta"):
                unlimited = replace(dims, max_len=None)
                self.row.make(unlimited, **self.options)
        except LengthNeeded:
            return True
        return False

    def build(
        self,
        dims: Dims,
        *,
        shared_qk: bool = False,
        positions: str | Positions | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
    ) -> Mixer:
        """Build the layer. A core gets projections q, k, v and out around it, with biases or without; a mixer has its own."""
        check_flag("shared_qk", shared_qk)
        made = self.row.make(dims, **self.options)
        if isinstance(made, Core):
            inside = None
            if positions is not None:
                inside = make_positions(positions, dims)
            mixer: Mixer = Attention(dims, made, shared_qk=shared_qk, bias=bias, out_bias=out_bias, positions=inside)
            mixer.spec = str(self)
            if inside is not None:
                mixer.spec = f"{self} with {inside.name} positions"
            return mixer
        if positions is not None:
            raise ValueError(f"{self.name} has no queries and keys for positions to act on: add positions to the tokens")
        if shared_qk or not bias or out_bias is not None:
            raise ValueError(f"{self.name} has projections of its own: leave out shared_qk, bias and out_bias")
        made.spec = str(self)
        return made


Named = Spec | str | Pattern | Mapping[str, Any] | type[Core] | type[Mixer]


def core(spec: Named, dims: Dims) -> Core:
    """Build the core alone, without projections, for given q, k and v: see `attend`.

    `spec` is a mechanism as in `layer`, `dims` are its sizes.

    >>> from regard import Dims, core
    >>> type(core("performer(features=32)", Dims(width=64, heads=4))).__name__
    'Performer'
    """
    spec = Spec.of(spec)
    made = spec.row.make(dims, **spec.options)
    if not isinstance(made, Core):
        raise ValueError(f"{spec.name} is a whole layer without a core of its own: use layer({str(spec)!r}, ...)")
    refuse_readout(made, f"a core has none: use layer({str(spec)!r}, ...), or leave them out")
    return made


def layer(
    spec: Named,
    *,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    context_width: int | None = None,
    causal: bool = False,
    cross: bool = False,
    max_len: int | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    shared_qk: bool = False,
    positions: str | Positions | None = None,
) -> Mixer:
    """Build a layer that mixes tokens, (b n w) -> (b n w): `layer("bigbird(window=3)", width=512, heads=8)`.

    `spec` is a text, a Spec, a pattern, or a mechanism of your own: its class, or `"mypkg.mod:MyCore(size=3)"`.

    `width`, `heads`, `kv_heads`, `key_dim`, `value_dim`, `context_width`, `causal`, `cross`, `max_len`, `dropout` and `backend`
    are those of `Dims`. `shared_qk` uses one map for queries and keys. `positions` act inside attention: "rotary",
    "relative(clip=8)". What a mechanism cannot do raises a ValueError that names what it can.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("Local(4) | Global(first=1)", width=16, heads=2, causal=True, positions="rotary")
    >>> x = torch.randn(2, 10, 16)
    >>> tuple(mixer(x).shape)
    (2, 10, 16)
    >>> layer("fnet", width=16, heads=2, causal=True)
    Traceback (most recent call last):
    ValueError: fnet cannot do causal: it can do padding
    """
    dims = Dims(width, heads, kv_heads, key_dim, value_dim, context_width, causal, cross, max_len, dropout, backend)
    return Spec.of(spec).build(dims, shared_qk=shared_qk, positions=positions)


def register(
    name: str | Row,
    make: type[Core] | type[Mixer] | None = None,
    *,
    family: str = "own",
    summary: str = "",
    paper: str = "",
    examples: tuple[Example, ...] = (Example(),),
    compiles: bool = True,
    chooses: bool = False,
) -> Row:
    """Add a mechanism to the catalogue of this process, so that `layer("name(...)")` builds it and `regard.CATALOGUE` lists it.

    `make` is a `Core` or a `Mixer`, built as make(dims, *, options). `examples` are options to show and test it with, and how its
    cost grows with the number of tokens. A name that the catalogue or a pattern has already is refused. A `Row` holds all of
    that: register(Row("mine", MyCore, "own", "What it does.", "", (Example(cost=1, memory=0),))).

    `family` is its group in tables, `summary` one sentence, `paper` its source. `compiles`: torch.compile makes one graph of it.
    `chooses`: it compares, as buckets do, so that half precision may turn a near tie over.

    >>> from regard import CATALOGUE, Dims, Example, layer, register
    >>> from regard.mixers.softmax import Softmax
    >>> class Soft(Softmax):
    ...     '''Softmax attention with smaller scores.'''
    ...     def __init__(self, dims: Dims, *, scale: float = 0.1) -> None:
    ...         super().__init__(dims, scale=scale)
    >>> register("soft", Soft, summary="Softmax with smaller scores.", examples=(Example(),)).name
    'soft'
    >>> mixer = layer("soft(scale=0.2)", width=16, heads=2)
    >>> del CATALOGUE["soft"]  # for this example alone
    """
    if isinstance(name, Row):
        if make is not None:
            raise TypeError("a Row has a class already: call register(row) without another one")
        row = name
    else:
        row = Row(name, make, family, summary, paper, tuple(examples), compiles, chooses)  # type: ignore[arg-type]  # checked below
    _check_row(row)
    CATALOGUE[row.name] = row
    return row


def _check_row(row: Row) -> None:
    """Refuse a name that is no name or taken, and a class that is no mechanism."""
    name = row.name
    named = isinstance(name, str) and name.isidentifier() and name == name.lower()
    if not named or iskeyword(name):
        raise ValueError(f"a mechanism needs a name such as 'my_attention', lower case without spaces, not {shown(name)}")
    if name in CATALOGUE or name in PATTERNS:
        raise ValueError(f"{name} is taken: give your mechanism another name")
    if not isinstance(row.make, type) or not issubclass(row.make, Core | Mixer):
        raise TypeError(f"a mechanism is a class, a Core or a Mixer, not {shown(row.make)}")
    if not row.examples:
        raise ValueError(f"{name} needs an example of its options: examples=(Example(),)")


def option_defaults(name: str) -> dict[str, dict[str, Any]]:
    """Return the options of a mechanism for JSON: {"default": value} for each, {"required": True} for one that must be given."""
    options = _spec_options(name).values()
    return {p.name: {"required": True} if p.default is p.empty else {"default": _json_value(p.default)} for p in options}


def _known_name(name: str | type) -> str:
    """Return the name of a mechanism of the catalogue, or that of a class outside of it as `mypkg.mod:MyCore`."""
    if isinstance(name, type):
        return class_name(name)
    if isinstance(name, str):
        _add_installed(name)
    if name in CATALOGUE:
        return name
    if not isinstance(name, str) or (own := split_own(name)) is None or own.options:
        raise ValueError(unknown("nothing is called", str(name), CATALOGUE))
    make = named_class(own.name)
    return next((row.name for row in CATALOGUE.values() if row.make is make), own.name)


def _add_installed(name: str) -> None:
    """Add a mechanism to the catalogue if it has none of this name and an installed package does."""
    if name in CATALOGUE or (own := installed_mechanisms().get(name)) is None:
        return
    if split_own(own) is None:
        raise ValueError(f"the entry point {name} of {GROUP} must name one class, as in mypkg.mod:MyCore, not {own}")
    make: Any = named_class(own)
    if name not in CATALOGUE:  # the module may register it
        register(name, make, summary=own_row(make).summary, examples=(UNMEASURED,))


def _row(name: str) -> Row:
    """Return the row of a known name."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    make: Any = named_class(name)
    return own_row(make)


def _class_spec(make: type) -> Spec:
    """Return the Spec of a class with the defaults of its options, all of which must have one."""
    spec = Spec(make)
    if needed := [option for option, p in _spec_options(spec.name).items() if p.default is p.empty]:
        given = ", ".join(f"{option}=..." for option in needed)
        raise ValueError(f"{make.__name__} needs {' and '.join(needed)}: write Spec({make.__name__}, {given})")
    return spec


def _spec_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a mechanism: all of its constructor but the dims, in a text also without their names."""
    make: Any = _row(name).make
    return _constructor_options(make)


@cache
def _constructor_options(make: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(make).parameters
    options = list(parameters.values())[1:]
    options.sort(key=lambda p: p.default is not p.empty)  # those that must be given come first
    return {p.name: p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in options}


def _patterned(name: str) -> frozenset[str]:
    """Return the options that are patterns, so that a text can be given for them."""
    make: Any = _row(name).make
    return _constructor_patterns(make)


@cache
def _constructor_patterns(make: Any) -> frozenset[str]:
    hints = get_type_hints(make.__init__)
    kinds = {option: hints.get(option) for option in _constructor_options(make)}
    return frozenset(option for option, kind in kinds.items() if kind is Pattern or Pattern in get_args(kind))


@cache
def _names(*rows: tuple[str, Any]) -> dict[str, Callable[..., object]]:
    """Return what a text may call: every pattern, and every mechanism of these names and classes."""
    mechanisms = {name: _maker(name, own) for name, own in rows}
    return {**mechanisms, **PATTERNS}


def _maker(name: str, own: Any) -> Callable[..., Spec]:
    options = _constructor_options(own)
    signature = inspect.Signature(list(options.values()))

    def make(*args: object, **options: object) -> Spec:
        bound = signature.bind(*args, **options)
        return Spec(name, **bound.arguments)

    make.__signature__ = signature  # type: ignore[attr-defined]  # the parser checks options against it
    return make


def _value(name: str, option: str, value: object, depth: int = 1) -> Value:
    """Normalise an option: hashable, printable, and a pattern exactly where the constructor takes one."""
    if isinstance(value, list | tuple):
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{name} cannot take lists inside each other {depth} times as {option}: {MAX_DEPTH} levels is the limit"
            )
        return tuple(_value(name, option, part, depth + 1) for part in value)
    if isinstance(value, str | Pattern) and option in _patterned(name):
        return Pattern.of(value)
    if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
        raise ValueError(f"{name} needs a smaller {option}: {shown(value)} is too large to be written down")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name} cannot take {shown(value)} as {option}: only numbers, strings and lists of them can be written down"
    )


def _literal(value: Value) -> str:
    if isinstance(value, tuple):
        parts = ", ".join(map(_literal, value))
        return f"[{parts}]"
    if isinstance(value, Pattern):
        return str(value)
    return repr(value)


def _json_value(value: Value) -> Any:
    if isinstance(value, tuple):
        return [_json_value(part) for part in value]
    if isinstance(value, Pattern):
        return str(value)
    return value
