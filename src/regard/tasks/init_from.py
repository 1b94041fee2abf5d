"""Start of training: weights of another run, examples that fit the model, targets that fit its slots."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from regard.config import Config
from regard.training.checkpoints import SavedRun, load_run, put_weights, weights_of

ExampleT = TypeVar("ExampleT")
SAME = ("heads", "norm", "activation", "positions", "units", "lower")  # weights fit another one of these, and mean nothing there

ENCODER_SIZES = ("width", "heads", "depth", "ffn", "activation", "gated", "norm", "positions")


def initialized_from(config: Any) -> SavedRun:
    """Load the run that `init_from` names, if its weights mean the same here."""
    where = f"init_from={config.init_from}"
    try:
        run = load_run(Path(config.init_from))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if "vocabulary.json" not in run.assets:
        raise ValueError(f"{where}: this is a run of another kind, without a vocabulary.json")
    for name in SAME:
        if run.config.get(name) != getattr(config, name):
            raise ValueError(f"{where} has {name}={run.config.get(name)}, but here it is {getattr(config, name)}: use the same")
    return run


def encoder_run(config: Any, assets: Sequence[str], same: Sequence[str]) -> SavedRun:
    """Load the run that `init_from` names, if its encoder and its vocabulary, the files `assets`, can be those of this model.

    `same` are settings that must agree beside those of the encoder.
    """
    where = f"init_from={config.init_from}"
    try:
        run = load_run(Path(config.init_from))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if missing := [name for name in assets if name not in run.assets]:
        units = "units=spelled" if "words.json" in assets else f"units={config.units}"
        first = f"`regard train mlm --set {units}` makes one that it can start from"
        raise ValueError(f"{where} is a run of {run.config.get('task')} without {missing[0]}, which {config.task} needs: {first}")
    if other := [name for name in (*ENCODER_SIZES, *same) if run.config.get(name) != getattr(config, name)]:
        there = ", ".join(f"{name}={run.config.get(name)}" for name in other)
        here = ", ".join(f"{name}={getattr(config, name)}" for name in other)
        raise ValueError(f"{where} has {there}, but here it is {here}: both stages need the same")
    return run


def put_encoder(model: nn.Module, run: SavedRun, where: str) -> None:
    """Copy the embeddings and the encoder of a run into a model, which keeps its own head."""
    own = {name: x for name, x in weights_of(model).items() if not name.startswith("encoder.")}
    given = {name: x for name, x in run.weights.items() if name.startswith("encoder.")}
    put_weights(model, {**own, **given}, f"init_from={where}")


def slots_of(model: nn.Module) -> dict[str, Tensor]:
    """Collect the weights that a non-autoregressive model has beside an autoregressive one: it keeps its own."""
    return {name: x for name, x in weights_of(model).items() if name.startswith("slots.")}


def short_enough(examples: Sequence[ExampleT], size: Callable[[ExampleT], int], config: Config) -> list[ExampleT]:
    """Keep the examples that fit max_len; warn about the number of the others."""
    kept = [example for example in examples if size(example) <= config.max_len]
    if examples and not kept:
        least = min(map(size, examples))
        raise ValueError(f"all training examples are longer than max_len={config.max_len}: the shortest has {least:,} tokens")
    if gone := len(examples) - len(kept):
        _left_out(gone, len(examples), f"they are longer than max_len={config.max_len}")
    return kept


def check_slots(pairs: Sequence[tuple[list[int], list[int]]], upsample: int) -> None:
    """Check that targets (without END) fit their CTC slots: one for each token, and a blank between two equal ones."""
    gone = sum(len(target) - 1 + _repeats(target) > upsample * len(source) for source, target in pairs)
    why = f"they need more than upsample={upsample} slots for every source token"
    if pairs and gone == len(pairs):
        raise ValueError(f"no training target fits: {why}")
    if gone:
        _left_out(gone, len(pairs), why)


def _repeats(target: list[int]) -> int:
    return sum(one == other for one, other in pairwise(target[:-1]))


def _left_out(gone: int, of: int, why: str) -> None:
    warnings.warn(f"{gone:,} of {of:,} training examples teach nothing: {why}", stacklevel=3)
