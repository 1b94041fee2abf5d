"""What tasks have in common: batches of inference, the device of a model, lines that are too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.checks import need
from regard.config import Config
from regard.data.batch import BEGIN, END, MASK, PAD, UNKNOWN
from regard.data.strict_json import JsonError, read_value
from regard.data.vocabulary import FIRST_TEXT_ID
from regard.decoding import Constraints, beam, generate
from regard.runtime.static_decoder import StaticDecoder, why_not_static
from regard.training.decoder_inputs import evaluating

__all__ = [
    "check_lengths",
    "check_vocab",
    "constraints_of",
    "device_under",
    "evaluating",
    "generate_answers",
    "in_order",
    "kept_labels",
    "learned",
    "task_decoder",
]

V = TypeVar("V")
ItemT = TypeVar("ItemT")
R = TypeVar("R")
Answers = list[list[int]]


def device_under(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def in_order(
    examples: Sequence[ItemT], size: Callable[[ItemT], int], most: int, answer: Callable[[list[ItemT]], Sequence[R]]
) -> list[R]:
    """Answer every example, in their order, computed in batches of similar size, of at most `most` tokens with padding."""
    order = sorted(range(len(examples)), key=lambda i: -size(examples[i]))
    found: list[R | None] = [None] * len(examples)
    while order:
        many = max(1, most // max(1, size(examples[order[0]])))
        now, order = order[:many], order[many:]
        for i, value in zip(now, answer([examples[i] for i in now]), strict=True):
            found[i] = value
    return cast(list[R], found)  # every one of them is there now


def learned(vocabulary: V | None) -> V:
    """Return the vocabulary; raise RuntimeError if there is none yet."""
    if vocabulary is None:
        raise RuntimeError("a task learns its vocabulary from data, or gets it from a run: call read() or restore() first")
    return vocabulary


def kept_labels(assets: Mapping[str, str], name: str, key: str | None = None) -> list[Any]:
    """Read the list of labels in an asset of JSON, or that of one key in it."""
    try:
        found = read_value(assets[name])
        found = found if key is None else found[key]
        whole = isinstance(found, list) and all(type(label) in (int, str) for label in found)
    except (JsonError, TypeError, KeyError) as error:
        if error.args == (name,):  # the asset is not there
            raise
        whole = False
    if not whole:
        raise ValueError(f"{name} holds no list of labels{f' as {key!r}' if key else ''}: restore it")
    return found


def constraints_of(config: Config, most: int) -> Constraints:
    """Limit an answer to `most` tokens, within the positions of the model, and to tokens that are not special."""
    return Constraints(END, max_new_tokens=min(most, config.max_len), banned=(PAD, UNKNOWN, BEGIN, MASK))


def task_decoder(model: Any, most: int) -> Any:
    """Give a model a static KV cache for `most` tokens, on a CPU if it can have one; on a GPU each shape would need a graph."""
    return model if device_under(model).type != "cpu" or why_not_static(model) else StaticDecoder(model, room=most + 1)


def generate_answers(
    model: Any,
    state: Any,
    rows: Tensor,
    *,
    config: Config,
    most: int,
    beams: int,
    early: bool = False,
    grammar: Callable[[Tensor], Tensor] | None = None,
) -> Answers:
    """Generate the answers of a decoder from a state of as many rows: greedily, or by beam search."""
    constraints = constraints_of(config, most)._replace(grammar=grammar)
    begin = torch.full((len(rows), 1), BEGIN, device=rows.device)
    if beams == 1:
        return generate(model, state, begin, constraints=constraints)
    best = beam(model, state, begin, constraints=constraints, width=beams, penalty=config.length_penalty, early=early)
    return [row[0] if row else [] for row in best.answers(END)]


def check_lengths(rows: Sequence[Sequence[Any]], most: int) -> None:
    for number, row in enumerate(rows, 1):
        if len(row) > most:
            raise ValueError(
                f"line {number} has {len(row):,} tokens, but this model reads at most {most:,}: "
                "cut it, or train with a larger max_len"
            )


def check_vocab(units: str, size: int) -> None:
    """Refuse a vocabulary without room for what every vocabulary has."""
    if units in ("subwords", "words"):
        need("vocab", size, FIRST_TEXT_ID + 256 if units == "subwords" else FIRST_TEXT_ID + 1)
