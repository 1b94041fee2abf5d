"""Settings of a run, put together and checked before anything is read or trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.blocks.feedforward import FeedForward
from regard.cli.say import sentences
from regard.config import Config
from regard.mixers.base import Dims
from regard.models.build import stack
from regard.models.embed import placed
from regard.models.translator import Wires
from regard.spec import Spec
from regard.text import unknown

if TYPE_CHECKING:
    from regard.tasks import Task

DECODING = ("beam", "penalty", "most", "temperature", "iterations", "lengths")  # what may change after training


def asked(name: str, mixers: Sequence[str], changes: Sequence[str], out: Path | None) -> Config:
    """What a task begins with, or what the run in `out` was begun with, and the changes to it."""
    from regard import tasks
    from regard.training.store import load_config

    begun = load_config(out) if out is not None else None
    config = tasks.config(name)
    if begun is not None:
        config = restored(begun, f"{out}/config.json", name)
    if mixers:
        if any(change.partition("=")[0].strip() == "mixer" for change in changes):
            raise ValueError("the mixer is given twice: by --mixer and by --set")
        config = config.replace({"mixer": mixers[0] if len(mixers) == 1 else list(mixers)})
    return config.set(changes)


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
    allowed = [name for name in DECODING if hasattr(config, name)]
    for change in changes:
        key = change.partition("=")[0].strip()
        if hasattr(config, key) and key not in allowed:
            raise ValueError(f"{key} cannot change after training: only {', '.join(allowed)} can")
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


def check(task: Task) -> None:
    """Every part of the model is built of nothing, and every setting of training is looked at: a sentence now, not in an hour."""
    config = task.config
    with sentences():
        specs = [Spec.of(text) for text in ([config.mixer] if isinstance(config.mixer, str) else config.mixer)]
        if not specs:
            raise ValueError("a model needs a mixer: name at least one")
        dims = Dims(config.width, config.heads, max_len=config.max_len, dropout=config.weight_dropout)
        inside = placed(config.positions, dims)[1]
        FeedForward(8, config.ffn, activation=config.activation, gated=config.gated, dropout=config.dropout)
    forms = _forms(task)
    with torch.device("meta"):
        for spec in specs:
            for form in forms:
                with sentences(spec):
                    _build(spec, replace(dims, causal=form["causal"]), inside, config.task)
        if any(form["reads"] for form in forms):
            with sentences(_parsed(config.cross)):
                Spec.of(config.cross).build(replace(dims, cross=True))
        with sentences():
            bodies = [stack(config, **form, depth=_depth(config, form)) for form in forms]
            if len(bodies) == 2:
                Wires(config.wiring, bodies[0], bodies[1], config.width)
    with sentences():
        _check_training(task)


def _build(spec: Spec, dims: Dims, inside: str | None, name: str) -> None:
    try:
        spec.build(dims, positions=inside)
    except ValueError as error:
        if "cannot do causal" in str(error):
            raise ValueError(f"{error}; what says one word after another, as {name} does, sees the past alone") from None
        raise


def _parsed(text: str) -> Spec:
    with sentences():
        return Spec.of(text)


def _forms(task: Task) -> list[dict[str, bool]]:
    """The bodies of its model: an encoder, unless it is a language model; and a decoder, where there is one."""
    from regard.tasks.copying import CopyTask
    from regard.tasks.language import LanguageTask
    from regard.tasks.translation import TranslationTask

    if isinstance(task, LanguageTask):
        return [{"causal": True, "reads": False}]
    forms = [{"causal": False, "reads": False}]
    if isinstance(task, TranslationTask | CopyTask):
        one_by_one = getattr(task.config, "decoder", "autoregressive") == "autoregressive"
        forms.append({"causal": one_by_one, "reads": True})
    return forms


def _depth(config: Config, form: dict[str, bool]) -> int:
    return config.decoder_depth or config.depth if form["reads"] else config.depth


def _check_training(task: Task) -> None:
    from regard.training.about import check_settings
    from regard.training.learner import TYPES

    if task.config.precision not in TYPES:
        raise ValueError(unknown("there is no precision", task.config.precision, TYPES))
    if not 0 <= task.config.smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {task.config.smoothing!r}")
    _check_decoding(task.config)
    check_settings(task)
