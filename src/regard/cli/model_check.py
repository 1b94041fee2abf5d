"""Every part of a model, built without memory before data is read, so that a mistake is found at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from regard.blocks.feedforward import FeedForward
from regard.checks import need
from regard.cli.console import sentences
from regard.config import Config
from regard.mixers.base import Can, Dims
from regard.models.build import stack
from regard.models.embedding import add_positions
from regard.models.translator import CrossWiring
from regard.spec import Spec
from regard.tasks.run_settings import check_decoding, installed_here
from regard.tasks.task import Body, Task
from regard.text import unknown


def check_model(task: Task, folder: Path | None = None) -> None:
    """Build every part of the model on the meta device, and check every setting of training; `folder` is that of the run."""
    config, bodies = task.config, task.bodies
    if not bodies:  # layers of its own, which the task has checked
        with sentences():
            for name in ("width", "heads"):
                need(name, getattr(config, name))
            return _check_training(task)
    with sentences(), installed_here(folder):
        specs = [Spec.of(text) for text in ([config.mixer] if isinstance(config.mixer, str) else config.mixer)]
        _check_sizes(config, len(specs), max(_depth(config, body) for body in bodies))
        dims = Dims(config.width, config.heads, max_len=config.max_len, dropout=config.weight_dropout)
        inside = add_positions(config.positions, dims)[1]
        FeedForward(8, config.ffn, activation=config.activation, gated=config.gated, dropout=config.dropout)
    with sentences():
        task.check_mixers()
    with torch.device("cpu" if "Edges" in f"{config.mixer} {config.cross}" else "meta"):  # edges without memory cannot be read
        for spec in specs:
            for body in bodies:
                with sentences(spec):
                    _build(spec, replace(dims, causal=body.causal), inside, config.task)
        if any(body.reads for body in bodies):
            with sentences(_parsed_spec(config.cross)):
                _check_cross(Spec.of(config.cross), replace(dims, cross=True), step_by_step=bodies[-1].causal)
        with sentences():
            stacks = [stack(config, causal=b.causal, reads=b.reads, depth=_depth(config, b)) for b in bodies]
            if len(stacks) == 2:
                CrossWiring(config.wiring, stacks[0], stacks[1], config.width)
    with sentences():
        _check_training(task)


def _check_sizes(config: Config, mixers: int, depth: int) -> None:
    """Check the sizes of the model, by the names of their settings."""
    if not mixers:
        raise ValueError("a model needs a mixer: name at least one")
    for name in ("width", "heads", "depth", "decoder_depth", "ffn", "max_len"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value!r}")
    if left := config.width % config.heads:
        below, above = config.width - left, config.width - left + config.heads
        fits = f"width={above}" if not below else f"width={below} or {above}"
        raise ValueError(f"width {config.width} is not divisible by {config.heads} heads: use {fits}, or other heads")
    if not 0 <= config.weight_dropout < 1:
        raise ValueError(f"weight_dropout must be in [0, 1), not {config.weight_dropout!r}")
    if mixers > depth:
        raise ValueError(
            f"{mixers} mixers cannot take turns in {depth} layer{'s' * (depth > 1)}: use depth={mixers}, or name fewer"
        )


def _build(spec: Spec, dims: Dims, inside: str | None, name: str) -> None:
    try:
        spec.build(dims, positions=inside)
    except ValueError as error:
        if "cannot do causal" in str(error):
            raise ValueError(f"{error}; {name} generates one token after another, which sees the past alone") from None
        raise


def _check_cross(spec: Spec, dims: Dims, *, step_by_step: bool) -> None:
    made = spec.build(dims)
    if step_by_step and Can.STREAM not in made.can:
        raise ValueError(f"{spec.name} cannot do stream: a decoder reads the encoder again for every token it generates")


def _parsed_spec(text: str) -> Spec:
    with sentences():
        return Spec.of(text)


def _depth(config: Config, body: Body) -> int:
    return config.depth if not body.reads or config.decoder_depth is None else config.decoder_depth


def _check_training(task: Task) -> None:
    from regard.training.learner import TYPES
    from regard.training.run_info import check_settings

    if task.config.precision not in TYPES:
        raise ValueError(unknown("there is no precision", task.config.precision, TYPES))
    if not 0 <= task.config.smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {task.config.smoothing!r}")
    check_decoding(task.config)
    check_settings(task)
