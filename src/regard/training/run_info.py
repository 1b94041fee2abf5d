"""Start of a run: its settings are checked, its folder compared with them, and versions and sizes written down."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard._version import version
from regard.text import unknown
from regard.training import atomic_files, checkpoints
from regard.training.atomic_files import RunError
from regard.training.learnable import Learnable
from regard.training.learner import TYPES
from regard.training.lr_schedule import lr_factor

POSITIVE = ("steps", "batch_tokens", "accumulate", "validate_every", "save_every", "average")
NOT_NEGATIVE = ("warmup", "decay", "clip", "patience", "seed")
MAX_SEED = 2**63
GROWS = ("steps", "patience")  # settings of a run that may become larger: it goes on from where it ended
ENDING = ("linear", "cosine")  # schedules that depend on the number of updates


def check_task(task: Learnable) -> None:
    """Check the settings of training, and that there is data to train on."""
    check_settings(task)
    for split in ("train", "val"):
        if not task.splits.get(split):
            wanted = "learn from" if split == "train" else "validate on"
            raise ValueError(f"{task.config.task or 'this task'} has no examples to {wanted}")
    longest, room = max(map(task.size, task.splits["train"])), task.config.batch_tokens
    if longest > room:
        raise ValueError(f"an example has {longest:,} tokens, but a batch has {room:,} at most: use batch_tokens={longest}")


def check_settings(task: Learnable) -> None:
    """Check the settings of training, before there is data."""
    config = task.config
    for name, value in vars(config).items():
        if isinstance(value, int) and abs(value) >= MAX_SEED:
            raise ValueError(f"{name} is {value}, which no machine counts to: it must be below 2**63")
    for name in POSITIVE:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)!r}")
    for name in NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise ValueError(f"{name} must not be below 0, but it is {getattr(config, name)!r}")
    if not 0 <= config.ema < 1:
        raise ValueError(f"ema must be from 0 to below 1, not {config.ema!r}")
    if not config.lr > 0:
        raise ValueError(f"lr must be above 0, not {config.lr!r}")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas must be two numbers in [0, 1), not {config.betas!r}")
    lr_factor(config, 1)  # a schedule that there is
    if config.precision not in TYPES:
        raise ValueError(unknown("there is no precision", config.precision, TYPES))
    if config.graphs and (config.precision == "16-mixed" or not task.steady):
        unsteady = "its loss changes from update to update, or reads from the device"
        why = "a scaler of 16-mixed decides on the host" if task.steady else unsteady
        raise ValueError(f"graphs=true cannot be used here, because {why}: leave it out")
    if task.best[1] not in ("min", "max"):
        raise ValueError(f"a score is better at its 'min' or its 'max', not at its {task.best[1]!r}")


def config_json(task: Learnable) -> dict[str, Any]:
    """Convert the configuration to what a JSON file gives back."""
    return json.loads(json.dumps(task.config.to_json()))


def kept_settings(there: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the settings of a run as the class of `config` writes them now, as JSON values.

    An earlier version kept some paths as they were given, and lacked settings that were added since: they have the defaults of
    the class.
    """
    known = {name: value for name, value in there.items() if name in vars(config) and name != "task"}
    now = json.loads(json.dumps(type(config)().replace(known).to_json()))
    return {**now, **there, **{name: now[name] for name in known}}


def grown(there: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """List the settings that have become larger since the run began, of those that may; patience 0 is the largest."""
    known = [name for name in GROWS if type(there.get(name)) is int and type(config.get(name)) is int]
    size = {"steps": lambda x: x, "patience": lambda x: x or MAX_SEED}
    return [name for name in known if size[name](config[name]) > size[name](there[name])]


def same_run(out: Path, task: Learnable, resume: bool) -> list[str]:
    """Check that the folder is empty of runs, or holds this one. Returns the settings that have grown.

    A run that an earlier version began lacks settings that were added since: they count as their first defaults.
    """
    config, assets, there = config_json(task), task.assets(), checkpoints.load_config(out)
    if there is None:
        if checkpoints.steps(out):
            raise RunError(f"{out} has checkpoints but no config.json: restore that file, or choose another folder")
        return []
    if not resume:
        raise RunError(f"{out} holds a run already: let it go on (resume), choose another folder, or delete this one")
    checkpoints.check_seals(out)
    there = kept_settings(there, task.config)
    larger, missing = grown(there, config), object()
    names = [name for name in {**there, **config} if there.get(name, missing) != config.get(name, missing)]
    if names := [name for name in names if name not in larger]:
        shown = "; ".join(f"{name} is {there.get(name)!r} there and {config.get(name)!r} here" for name in names)
        may = f" ({' and '.join(GROWS)} may only grow)" if set(names) & set(GROWS) else ""
        raise RunError(f"{out} holds a run with other settings: {shown}{may}. Choose another folder, or the same settings")
    kept = checkpoints.load_assets(out)
    if names := [name for name in {**kept, **assets} if kept.get(name) != assets.get(name)]:
        raise RunError(f"{out} holds a run on other data: its {names[0]} differs. Choose another folder, or the same data")
    if larger and (out / checkpoints.RESULT).is_file() and checkpoints.latest(out) is None:
        raise RunError(f"the run in {out} is finished, and there is no checkpoint left to go on from: train in another folder")
    return larger


def begin_run(out: Path, task: Learnable, model: nn.Module, kind: str) -> list[str]:
    """Write the files of a new run; of one that has begun, return sentences about what is different now."""
    now, there = _now(task, model, kind), checkpoints.load_config(out)
    if there is None:
        checkpoints.save_run(out, config_json(task), task.assets(), now)
        return []
    advice = "restore it, or delete the folder and train again"
    then = atomic_files.read_json(out / checkpoints.ABOUT, advice)
    if "data" not in then:
        raise RunError(f"{out / checkpoints.ABOUT} does not hold what it was trained on: {advice}")
    if then["data"] != now["data"]:
        raise RunError(f"{out} holds a run on other data: {then['data']} there and {now['data']} here")
    made = ("regard", "python", "torch", "device", *(["threads"] if kind == "cpu" else []))
    return _stretched(out, task, there) + [
        f"{name} was {then.get(name)} and is {now[name]}: the run goes on, but not bit for bit as it would have"
        for name in made
        if then.get(name) != now[name]
    ]


def _stretched(out: Path, task: Learnable, there: Mapping[str, Any]) -> list[str]:
    """Write the settings that have grown into the run, and describe what they change."""
    config = task.config
    larger = grown(there, config_json(task))
    if larger:
        checkpoints.change_run(out, config_json(task))
    notes = [f"{name} was {there[name]} and is {getattr(config, name)} from here on" for name in larger]
    if "steps" in larger:
        done = (checkpoints.steps(out) or [0])[-1]
        rate = f"the rate at update {done + 1} is {lr_factor(config, done + 1):.3g} x lr"
        ending = f"schedule={config.schedule} is that of {config.steps} updates from here on: {rate}, not what it ended with"
        same = f"schedule={config.schedule} does not depend on the number of updates: {rate}, as it would have been"
        notes.append(ending if config.schedule in ENDING else same)
    return notes


def _now(task: Learnable, model: nn.Module, kind: str) -> dict[str, Any]:
    train = task.splits["train"]
    return {
        "task": task.config.task,
        "seed": task.config.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": {"examples": len(train), "tokens": sum(task.size(example) for example in train)},
        "regard": version,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Find the commit of the working directory, if it is under git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return done.stdout.strip() + ("+changes" if dirty.stdout.strip() else "") if done.returncode == 0 else None
