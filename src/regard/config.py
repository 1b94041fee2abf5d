"""Settings of a run: one flat object, so that `--set lr=0.001` changes one of them and a file shows all of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args, get_type_hints

from regard.options import Options, parse_options
from regard.text import unknown


@dataclass
class Config:
    """Settings that all tasks share; a task adds fields of its own in a subclass, and its defaults in a function that makes one.

    A field about a part (a decoder, beams) is for models that have it; `Task.unused` names the others. What a part cannot do is
    refused when it is built. A setting with options of its own (`families`) is a text: `mode="rdrop(alpha=5)"`. It is stored with
    all of its options.
    """

    families: ClassVar[Mapping[str, Mapping[str, type[Options]]]] = {}  # settings that are Options, and their tables

    task: str = ""
    # the model
    mixer: str | list[str] = "softmax"  # the text of a Spec; several of them take turns
    cross: str = "softmax"  # how a decoder reads the encoder
    wiring: str = "last"  # encoder layers it reads: last, each (layer i), both (layer i and last), mixed (all, learned weights)
    width: int = 256
    heads: int = 4
    depth: int = 4
    decoder_depth: int | None = None  # of a decoder that reads an encoder: as deep as that unless given
    ffn: int = 1024
    activation: str = "relu"
    gated: bool = False
    norm: str = "pre"  # in front of every part, or behind it: post
    positions: str = "sinusoidal"  # added to tokens, or inside every mixer, if it can: see `regard.positions`
    dropout: float = 0.1  # of embeddings, of what layers add, and of the hidden layer
    weight_dropout: float = 0.0  # of attention weights; a mixer that has none refuses it
    max_len: int = 1024
    share: bool = True  # one embedding table for source, target and output, where they have one vocabulary
    # training
    steps: int = 2000  # updates at most
    batch_tokens: int = 4096  # padding counted, in one pass
    accumulate: int = 1  # passes an update
    lr: float = 1e-3  # at its highest
    schedule: str = "inverse_sqrt"  # constant, linear, cosine, inverse_sqrt
    warmup: int = 200
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.98])
    decay: float = 0.0  # of matrices; embeddings, norms and biases are spared
    clip: float = 1.0  # of the gradient's norm; 0: not at all
    smoothing: float = 0.0  # label smoothing: fraction of the target probability that is spread over all labels
    precision: str = "32"  # 32, tf32 (matrix products of a GPU, rounded), bf16-mixed, 16-mixed
    graphs: bool = False  # on CUDA: a pass is captured as a CUDA graph for each shape of batch, which speeds up small models
    seed: int = 1
    validate_every: int = 200  # updates
    save_every: int = 200  # updates
    patience: int = 0  # validations without a better one before it stops; 0: never
    average: int = 1  # the last so many saved weights are averaged at the end
    ema: float = 0.0  # decay of a moving average of the weights, such as 0.999, which is then validated and kept; 0: none
    # decoding
    beam: int = 1  # width of beam search; 1: greedy
    length_penalty: float = 1.0  # beams are compared by log-probability / length ** length_penalty

    def __post_init__(self) -> None:
        """Write settings with options in full, so that equal settings are equal texts."""
        for name in self.families:
            setattr(self, name, str(self.options(name)))

    def options(self, name: str) -> Options:
        """Parse a setting with options of its own."""
        return parse_options(getattr(self, name), self.families[name])

    def set(self, changes: Iterable[str]) -> Self:
        """Apply `key=value` texts: types are those of the fields, and an unknown key is answered with the nearest one."""
        return self.replace(dict(key_value(text) for text in changes))

    def replace(self, changes: Mapping[str, Any]) -> Self:
        """Apply changes by name, each a text or a JSON value."""
        hints, known = get_type_hints(type(self)), {f.name for f in dataclasses.fields(self)}
        for key in changes:
            if key not in known or key == "task":
                raise ValueError(unknown(f"{self.task or 'this task'} has no setting", key, sorted(known - {"task"})))
        return dataclasses.replace(self, **{key: _typed(key, value, hints[key]) for key, value in changes.items()})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def key_value(text: str) -> tuple[str, str]:
    """Split a text such as `beam=5` into a setting and its value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"a setting is written key=value, not {text!r}")
    return key.strip(), value.strip()


def _typed(key: str, value: Any, hint: Any) -> Any:
    """Convert a text or a JSON value to the type of a field."""
    kinds = get_args(hint) if "|" in str(hint) else (hint,)
    for kind in kinds:
        found = _as(value, kind)
        if found is not _NOT:
            return found
    wanted = " or ".join(_NAMES.get(kind, str(kind)) for kind in kinds)
    raise ValueError(f"{key} must be {wanted}, not {value!r}")


_NOT = object()
_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "none",
    list[str]: "a list of texts",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
}


def _as(value: Any, kind: Any) -> Any:
    """Convert a text or a JSON value to this type; _NOT if it is none."""
    text = value if isinstance(value, str) else None
    if kind is type(None):
        return None if value is None or (text or "").lower() in ("none", "null") else _NOT
    if kind is bool:
        found = value if text is None else {"true": True, "false": False}.get(text.lower())
        return found if isinstance(found, bool) else _NOT
    if kind in (int, float):
        return _number(value if text is None else text.replace("_", ""), kind)
    if kind is str:
        return _NOT if text is None or text.startswith("[") else text
    return _list(value, get_args(kind)[0])


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str if kind is int else int | float | str):
        return _NOT
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        return _NOT
    return number if isinstance(number, int) or math.isfinite(number) else _NOT


def _list(value: Any, kind: Any) -> Any:
    """Convert a list, which a text holds as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return _NOT
    if not isinstance(value, list):
        return _NOT
    parts = [_as(part, kind) for part in value]
    return _NOT if any(part is _NOT for part in parts) else parts
