"""What a run is made of: one flat object, so that `--set lr=0.001` says it all and a file shows it all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args, get_type_hints

from regard.text import unknown


@dataclass
class Config:
    """What all tasks share; a task adds fields of its own in a subclass, and its defaults in a function that makes one."""

    task: str = ""
    # the model
    mixer: str | list[str] = "softmax"  # the text of a Spec; several of them take turns
    cross: str = "softmax"  # how a decoder reads the encoder
    wiring: str = "last"  # which encoder layers it reads: last, each (layer i reads layer i), mixed (all, by learned weights)
    width: int = 256
    heads: int = 4
    depth: int = 4
    decoder_depth: int | None = None  # that of the encoder unless given
    ffn: int = 1024
    activation: str = "relu"
    gated: bool = False
    norm: str = "pre"
    positions: str = "sinusoidal"
    dropout: float = 0.1
    weight_dropout: float = 0.0
    max_len: int = 1024
    share: bool = True  # one table of embeddings for source, target and output, where they have one vocabulary
    # training
    steps: int = 2000  # updates at most
    batch_tokens: int = 4096  # padding counted, in one pass
    accumulate: int = 1  # passes an update
    lr: float = 1e-3  # at its highest
    schedule: str = "inverse_sqrt"  # constant, linear, cosine, inverse_sqrt
    warmup: int = 200
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.98])
    decay: float = 0.0  # of weights that are matrices
    clip: float = 1.0  # of the gradient's norm; 0: not at all
    smoothing: float = 0.0
    precision: str = "32"  # 32, bf16-mixed, 16-mixed
    seed: int = 1
    validate_every: int = 200  # updates
    save_every: int = 200  # updates
    patience: int = 0  # validations without a better one before it stops; 0: never
    average: int = 1  # the last so many saved weights are averaged at the end
    # decoding
    beam: int = 1
    penalty: float = 1.0

    def set(self, changes: Iterable[str]) -> Self:
        """With `key=value` texts applied: types are those of the fields, and an unknown key is answered with the nearest one."""
        return self.replace(dict(_pair(text) for text in changes))

    def replace(self, changes: Mapping[str, Any]) -> Self:
        hints, known = get_type_hints(type(self)), {f.name for f in dataclasses.fields(self)}
        for key in changes:
            if key not in known or key == "task":
                raise ValueError(unknown(f"{self.task or 'this task'} has no setting", key, sorted(known - {"task"})))
        return dataclasses.replace(self, **{key: _typed(key, value, hints[key]) for key, value in changes.items()})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"a setting is written key=value, not {text!r}")
    return key.strip(), value.strip()


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the field's type, from a text or from JSON."""
    kinds = [kind for kind in (get_args(hint) if "|" in str(hint) else (hint,))]
    for kind in kinds:
        found = _as(value, kind)
        if found is not _NOT:
            return found
    wanted = " or ".join(_NAMES.get(kind, str(kind)) for kind in kinds)
    raise ValueError(f"{key} must be {wanted}, not {value!r}")


_NOT = object()
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "none", list[str]: "a list"}


def _as(value: Any, kind: Any) -> Any:
    text = value if isinstance(value, str) else None
    if kind is type(None):
        return None if value is None or text in ("none", "null") else _NOT
    if kind is bool:
        return (
            {"true": True, "false": False}.get(text.lower(), _NOT)
            if text is not None
            else value
            if isinstance(value, bool)
            else _NOT
        )
    if kind in (int, float):
        try:
            number = kind(text.replace("_", "")) if text is not None else value
        except ValueError:
            return _NOT
        whole = isinstance(number, int) and not isinstance(number, bool)
        return (
            number if whole and kind is int else float(number) if kind is float and (whole or isinstance(number, float)) else _NOT
        )
    if kind is str:
        return _NOT if text is None or text.startswith("[") else text
    if isinstance(value, list):
        return value
    try:
        parsed = json.loads(text or "")
    except json.JSONDecodeError:
        return _NOT
    return parsed if isinstance(parsed, list) else _NOT
