"""Settings of a run, put together and checked before anything is read or trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.blocks.feedforward import FeedForward
from regard.cli.console import sentences
from regard.config import Config
from regard.mixers.base import Can, Dims
from regard.models.build import stack
from regard.models.embedding import add_positions
from regard.models.translator import CrossWiring
from regard.spec import Spec
from regard.text import unknown

if TYPE_CHECKING:
    from regard.tasks import Task

STRONGEST = 10  # length ** 10: all that anybody could mean, and no float overflows


def asked(name: str, mixers: Sequence[str], changes: Sequence[str], out: Path | None) -> Config:
    """What a task begins with, or what the run in `out` was begun with, and the changes to it."""
    from regard import tasks
    from regard.training.checkpoints import load_config

    begun = load_config(out) if out is not None else None
    config = tasks.config(name)
    if begun is not None:
        config = restored(begun, f"{out}/config.json", name)
    keys = named(changes)
    if mixers:
        if "mixer" in keys:
            raise ValueError("the mixer is given twice: by --mixer and by --set")
        config = config.replace({"mixer": mixers[0] if len(mixers) == 1 else list(mixers)})
    return config.set(changes)


def named(changes: Sequence[str]) -> list[str]:
    """The settings that are to change, each of them once."""
    keys = [change.partition("=")[0].strip() for change in changes]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{twice} is given twice by --set: which one is meant?")
    return keys


def restored(begun: dict[str, Any], where: str, name: str | None = None) -> Config:
    """The settings of a run from its config.json."""
    from regard import tasks

    task = begun.get("task")
    if not isinstance(task, str):
        raise ValueError(f"{where} does not say of which task it is: restore it, or train again in another folder")
    if name is not None and task != name:
        raise ValueError(f"{where} is of a run of {task}, not of {name}: choose another folder")
    try:
        return tasks.config(task).replace({key: value for key, value in begun.items() if key != "task"})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def decoding(config: Config, changes: Sequence[str]) -> Config:
    """With other settings for its answers; all others are what the weights were trained with."""
    from regard import tasks

    allowed = tasks.task(config).answering
    for key in named(changes):
        if hasattr(config, key) and key not in allowed:
            can = f"only {', '.join(allowed)} can" if allowed else "nothing of it can"
            raise ValueError(f"{key} cannot change after training: {can}")
        if key not in allowed:
            raise ValueError(unknown(f"{config.task} has no setting for answers", key, allowed))
    changed = config.set(changes)
    _check_decoding(changed)
    return changed


def device(name: str) -> str:
    """cpu or cuda, as asked, or what there is."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"the device is auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here: use --device cpu, or auto to take what there is")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _check_decoding(config: Config) -> None:
    for name in ("beam", "most", "iterations", "lengths"):
        if getattr(config, name, 1) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)!r}")
    if not getattr(config, "temperature", 1.0) > 0:
        raise ValueError(f"temperature must be above 0, not {getattr(config, 'temperature', None)!r}")
    if abs(config.penalty) > STRONGEST:
        raise ValueError(f"penalty is a power of the length, from -{STRONGEST} to {STRONGEST}, not {config.penalty!r}")


def check_model(task: Task) -> None:
    """Every part of the model is built of nothing, and every setting of training is looked at: a sentence now, not in an hour."""
    config, forms = task.config, _forms(task)
    with sentences():
        specs = [Spec.of(text) for text in ([config.mixer] if isinstance(config.mixer, str) else config.mixer)]
        _check_sizes(config, len(specs), max(_depth(config, form) for form in forms))
        dims = Dims(config.width, config.heads, max_len=config.max_len, dropout=config.weight_dropout)
        inside = add_positions(config.positions, dims)[1]
        FeedForward(8, config.ffn, activation=config.activation, gated=config.gated, dropout=config.dropout)
    with torch.device("cpu" if "Edges" in f"{config.mixer} {config.cross}" else "meta"):  # edges of nothing cannot be looked at
        for spec in specs:
            for form in forms:
                with sentences(spec):
                    _build(spec, replace(dims, causal=form["causal"]), inside, config.task)
        if any(form["reads"] for form in forms):
            with sentences(_parsed_spec(config.cross)):
                _check_cross(Spec.of(config.cross), replace(dims, cross=True), step_by_step=forms[-1]["causal"])
        with sentences():
            bodies = [stack(config, **form, depth=_depth(config, form)) for form in forms]
            if len(bodies) == 2:
                CrossWiring(config.wiring, bodies[0], bodies[1], config.width)
    with sentences():
        _check_training(task)


def _check_sizes(config: Config, mixers: int, depth: int) -> None:
    """By the names that --set has for them."""
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
            raise ValueError(f"{error}; what says one word after another, as {name} does, sees the past alone") from None
        raise


def _check_cross(spec: Spec, dims: Dims, *, step_by_step: bool) -> None:
    spec.build(dims)
    if step_by_step and Can.STREAM not in spec.row.can:
        raise ValueError(f"{spec.name} cannot do stream: what says one word after another reads the encoder again for each")


def _parsed_spec(text: str) -> Spec:
    with sentences():
        return Spec.of(text)


def _forms(task: Task) -> list[dict[str, bool]]:
    """The bodies of its model: an encoder, unless it is a language model; and a decoder, where there is one."""
    from regard.tasks.copying import CopyTask
    from regard.tasks.language_modeling import LanguageTask
    from regard.tasks.translation import TranslationTask

    if isinstance(task, LanguageTask):
        return [{"causal": True, "reads": False}]
    forms = [{"causal": False, "reads": False}]
    if isinstance(task, TranslationTask | CopyTask):
        one_by_one = getattr(task.config, "decoder", "autoregressive") == "autoregressive"
        forms.append({"causal": one_by_one, "reads": True})
    return forms


def _depth(config: Config, form: dict[str, bool]) -> int:
    return config.depth if not form["reads"] or config.decoder_depth is None else config.decoder_depth


def check_used(task: Task, changes: Sequence[str]) -> None:
    """That nobody waits for what a setting does where it does nothing."""
    config, reads = task.config, any(form["reads"] for form in _forms(task))
    mode, decoder = getattr(config, "mode", "teacher"), getattr(config, "decoder", "autoregressive")
    sampled = mode in ("scheduled", "two_pass", "parallel")
    used = {
        **{name: (reads, "models with a decoder that reads an encoder") for name in ("cross", "wiring", "decoder_depth")},
        **{name: (name in task.answering, "answers of one token after another") for name in ("beam", "penalty", "most")},
        "iterations": (decoder == "masked", "decoder=masked"),
        "lengths": (decoder in ("masked", "length"), "decoder=masked or length"),
        **{name: (sampled, "mode=scheduled, two_pass or parallel") for name in ("truth", "floor", "own", "alpha", "through")},
        "samples": (mode == "minimum_risk", "mode=minimum_risk"),
        "agree": (mode == "agree", "mode=agree"),
        "upsample": (decoder == "ctc", "decoder=ctc"),
        "slots": (decoder == "length", "decoder=length"),
        "glance": (decoder in ("ctc", "length", "fixed"), "decoder=ctc, length or fixed"),
    }
    for key in named(changes):
        if key in used and not used[key][0]:
            raise ValueError(f"{key} does nothing here: it is for {used[key][1]}. Leave it out")


def _check_training(task: Task) -> None:
    from regard.training.learner import TYPES
    from regard.training.run_info import check_settings

    if task.config.precision not in TYPES:
        raise ValueError(unknown("there is no precision", task.config.precision, TYPES))
    if not 0 <= task.config.smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {task.config.smoothing!r}")
    _check_decoding(task.config)
    check_settings(task)
