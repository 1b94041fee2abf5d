"""The claims of a mechanism and the sizes of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Flag, auto

from regard.checks import check_flag, need
from regard.ops.backend import AUTO, check_backend


class Can(Flag):
    """A claim is a promise that has a law testing it; a use that is not claimed raises.

    CAUSAL: no output depends on a later token. CROSS: queries may come from another sequence. PADDING: a token with valid=False
    is as if absent. STREAM: `start` and `extend` in any cuts equal one pass. DROPOUT: it has weights that can be dropped.
    ROTARY: it takes queries and keys that are turned by their positions. RELATIVE: its scores take a term by distance. As with
    every flag of Python, `value` (or several claims joined by `|`) is all that a caller gives; `names`, `module`, `qualname`,
    `type`, `start` and `boundary` are those of enum.Flag.

    >>> from regard import CATALOGUE, Can
    >>> Can.STREAM in CATALOGUE["linear"].can, Can.STREAM in CATALOGUE["fnet"].can
    (True, False)
    >>> print(Can.CAUSAL | Can.PADDING)
    causal, padding
    """

    CAUSAL = auto()  # no output depends on a later token
    CROSS = auto()  # queries may come from another sequence than keys and values
    PADDING = auto()  # a token with valid=False is as if absent
    STREAM = auto()  # start / extend in any cuts equals one forward pass
    DROPOUT = auto()  # it has attention weights that can be dropped in training
    ROTARY = auto()  # it sees q and k through q.k alone, so that turning both by their positions leaves their distance
    RELATIVE = auto()  # its scores take one more term, by how far apart two tokens are
    NOTHING = 0

    def __str__(self) -> str:
        names = [c.name.lower() for c in Can if c in self and c.name]
        return ", ".join(names) or "nothing"


@dataclass(frozen=True)
class Dims:
    """What the outside world fixes about a mixer: its widths, its heads, and how it will be used.

    `width` is that of the tokens, `heads` the number of query heads, `kv_heads` that of key-value heads (a divisor; as many
    unless given), `key_dim` and `value_dim` the sizes of a head (width / heads unless given). With `cross` queries read a
    context of `context_width`; with `causal` no token sees a later one. `max_len` is the longest sequence, for mechanisms with a
    weight for each position. `dropout` is that of attention weights, `backend` the implementation: auto, triton, torch or
    reference.

    >>> from regard import Dims
    >>> dims = Dims(width=64, heads=8, kv_heads=2, causal=True)
    >>> dims.d, dims.e, dims.g  # size of a key, size of a value, key-value heads
    (8, 8, 2)
    """

    width: int
    heads: int
    kv_heads: int | None = None  # fewer key-value heads than query heads: grouped (1: multi-query) attention
    key_dim: int | None = None  # d, per head; width // heads unless given
    value_dim: int | None = None  # e, per head; width // heads unless given
    context_width: int | None = None  # width of the sequence that cross attention reads
    causal: bool = False
    cross: bool = False
    max_len: int | None = None
    dropout: float = 0.0  # of attention weights, in training
    backend: str = AUTO  # of the operations: see `regard.ops.backend`

    d: int = field(init=False, repr=False, compare=False)  # key dim of a head
    e: int = field(init=False, repr=False, compare=False)  # value dim of a head
    g: int = field(init=False, repr=False, compare=False)  # key-value heads

    def __post_init__(self) -> None:
        self._check_sizes()
        object.__setattr__(self, "d", self.key_dim or self.width // self.heads)
        object.__setattr__(self, "e", self.value_dim or self.width // self.heads)
        object.__setattr__(self, "g", self.kv_heads or self.heads)
        self._check_use()

    def _check_sizes(self) -> None:
        for name in ("width", "heads", "kv_heads", "key_dim", "value_dim", "context_width", "max_len"):
            value = getattr(self, name)
            if value is not None or name in ("width", "heads"):
                need(name, value)
        if (self.key_dim is None or self.value_dim is None) and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not divisible by {self.heads} heads: "
                f"use width {self.width // self.heads * self.heads or self.heads}, or give key_dim and value_dim"
            )

    def _check_use(self) -> None:
        check_flag("causal", self.causal)
        check_flag("cross", self.cross)
        if self.heads % self.g:
            raise ValueError(f"{self.heads} heads cannot share {self.g} key-value heads evenly: use a divisor of {self.heads}")
        if self.causal and self.cross:
            raise ValueError("a mixer is either causal over its own tokens or reads a context: a decoder has one mixer of each")
        if self.context_width is not None and not self.cross:
            raise ValueError("context_width is for cross attention: set cross=True, or leave it out")
        number = isinstance(self.dropout, int | float) and not isinstance(self.dropout, bool)
        if not number or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout!r}")
        check_backend(self.backend)


def need_claims(name: str, can: Can, asked: Can, instead: str = "") -> None:
    """Refuse what is not claimed, in a sentence."""
    if asked._value_ & ~can._value_:  # as integers, because flags take microseconds in every call
        lacking = asked & ~can
        raise ValueError(f"{name} cannot do {lacking}: it can do {can}" + (f"; {instead}" if instead else ""))


class LengthNeeded(ValueError):
    """A mechanism with weights for every position was built without the number of positions."""


def needed_length(name: str, dims: Dims) -> int:
    """The longest sequence, for a mechanism with weights for each position."""
    if dims.max_len is None:
        raise LengthNeeded(f"{name} has weights for every position: say how many with max_len=...")
    return dims.max_len
