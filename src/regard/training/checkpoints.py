"""Checkpoints and the folder of a run, written atomically.

OUT/config.json  run.json  assets/...      written at the start
OUT/metrics.jsonl  checkpoints/step-000400/{weights,optimizer}.safetensors + state.json      during training
OUT/weights.safetensors  result.json       at the end
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.training import atomic_files
from regard.training.atomic_files import RunError

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
CONFIG, ABOUT, RESULT = "config.json", "run.json", "result.json"
WRITING, REMOVING = ".writing-", ".removing-"  # prefixes of incomplete folders
NEEDED = ("step", "seconds", "best", "waited", "stopped", "skipped", "scaler", "dice", "sha256")


class Checkpoint(NamedTuple):
    """Hold the complete state of a run: a resumed run continues exactly."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # by parameter: "stack.0.weight/exp_avg"
    state: dict[str, Any]  # JSON values: the step, the RNG state, the best score so far

    @property
    def step(self) -> int:
        return self.state["step"]


def save_checkpoint(out: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint folder atomically: under a temporary name, then renamed."""
    folder = out / "checkpoints"
    final = folder / f"step-{checkpoint.step:06d}"
    writing = folder / (WRITING + final.name)
    data = {
        WEIGHTS: atomic_files.tensors_to_bytes(checkpoint.weights),
        OPTIMIZER: atomic_files.tensors_to_bytes(checkpoint.optimizer),
    }
    state = {**checkpoint.state, "sha256": {name: atomic_files.digest(x) for name, x in data.items()}}
    data[STATE] = atomic_files.as_json({**state, "seal": _seal(state)}).encode()
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        for name, content in data.items():
            atomic_files.write_synced(writing / name, content)
        atomic_files.sync(writing)
        if final.exists():
            _remove(final)
        os.rename(writing, final)
        atomic_files.sync(folder)
    except BaseException as error:
        shutil.rmtree(writing, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(atomic_files.cannot_write(final, error)) from error
        raise
    return final


def load_checkpoint(path: Path, advice: str = "") -> Checkpoint:
    """Load a checkpoint, and refuse one that is incomplete or changed; `advice` is appended to error messages."""
    advice = advice or f"delete the folder {path} to go on from the checkpoint before it"
    state = atomic_files.read_json(path / STATE, advice)
    if missing := [key for key in NEEDED if key not in state]:
        raise RunError(f"{path / STATE} lacks {missing[0]!r}: {advice}")
    if state.pop("seal", None) != _seal(state):
        raise RunError(f"{path / STATE} is not as it was written (its SHA-256 differs): {advice}")
    tensors = {}
    for name in (WEIGHTS, OPTIMIZER):
        data = atomic_files.read_bytes(path / name, advice)
        if atomic_files.digest(data) != state["sha256"].get(name):
            raise RunError(f"{path / name} is not as it was written (its SHA-256 differs): {advice}")
        tensors[name] = atomic_files.bytes_to_tensors(data, path / name, advice)
    return Checkpoint(tensors[WEIGHTS], tensors[OPTIMIZER], state)


def _seal(state: Mapping[str, Any]) -> str:
    return atomic_files.digest(json.dumps(state, sort_keys=True).encode())


def steps(out: Path) -> list[int]:
    """List the steps of all complete checkpoints, ascending."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    matches = [re.fullmatch(r"step-(\d{6,})", name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def at(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:06d}"


def latest(out: Path) -> Path | None:
    found = steps(out)
    return at(out, found[-1]) if found else None


def prune(out: Path, keep: Collection[int]) -> None:
    """Remove all checkpoints but those to keep. Each is renamed first: a crash leaves no incomplete one under a valid name."""
    try:
        for step in steps(out):
            if step not in keep:
                _remove(at(out, step))
    except OSError as error:
        raise RunError(f"cannot remove an old checkpoint of {out}: {error.strerror or error}") from error


def clean(out: Path) -> None:
    """Remove folders that were being written or removed when a process died."""
    for folder in (out, out / "checkpoints", out / "assets"):
        for path in [*folder.glob(WRITING + "*"), *folder.glob(REMOVING + "*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove(path: Path) -> None:
    removing = path.with_name(REMOVING + path.name)
    shutil.rmtree(removing, ignore_errors=True)
    os.rename(path, removing)
    shutil.rmtree(removing)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock a folder for one process. The operating system releases the lock when the process ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(atomic_files.cannot_write(out, error)) from error
    try:
        _run_lock(handle, out)
        yield
    finally:
        os.close(handle)


def _run_lock(handle: int, out: Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # not on Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(f"another process is training in {out}: wait for it, or choose another folder") from None


# The run around the checkpoints


class SavedRun(NamedTuple):
    """Hold the parts of a finished run that evaluation and prediction need."""

    config: dict[str, Any]
    assets: dict[str, str]
    weights: dict[str, Tensor]


def save_run(out: Path, config: Mapping[str, Any], assets: Mapping[str, str], about: Mapping[str, Any]) -> None:
    """Write settings and assets at the start of a run, with their SHA-256 in run.json. The configuration is written last."""
    texts = {CONFIG: atomic_files.as_json(config)}
    for name, text in assets.items():
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"an asset is named like a file, without folders, not {name!r}")
        texts[f"assets/{name}"] = text
    seals = {name: atomic_files.digest(text.encode()) for name, text in texts.items()}
    try:
        for name, text in assets.items():
            atomic_files.replace(out / "assets" / name, text)
        atomic_files.replace(out / ABOUT, atomic_files.as_json({**about, "sha256": seals}))
        atomic_files.replace(out / CONFIG, texts[CONFIG])
    except BaseException:
        if not (out / CONFIG).exists():  # interrupted, or the disk is full: the run has not started
            for path in (out / ABOUT, *(out / "assets" / name for name in assets)):
                path.unlink(missing_ok=True)
            with suppress(OSError):
                (out / "assets").rmdir()
        raise


def change_run(out: Path, config: Mapping[str, Any]) -> None:
    """Change the settings of a run and mark it as unfinished. Interrupted at any point, old or new settings match their hash."""
    about = atomic_files.read_json(out / ABOUT, "restore it, or train again in another folder")
    text = atomic_files.as_json(config)
    seals = about.get("sha256", {})
    after = atomic_files.digest(text.encode())
    before = seals.get(CONFIG, [])
    both = [*([before] if isinstance(before, str) else before), after]
    atomic_files.replace(out / ABOUT, atomic_files.as_json({**about, "sha256": {**seals, CONFIG: both}}))
    (out / RESULT).unlink(missing_ok=True)
    atomic_files.replace(out / CONFIG, text)
    atomic_files.replace(out / ABOUT, atomic_files.as_json({**about, "sha256": {**seals, CONFIG: after}}))


def check_seals(out: Path) -> None:
    """Refuse settings and assets that have changed since the start: the weights may fit others of the same shape."""
    if not (out / ABOUT).is_file():  # a finished run can be used without it
        return
    advice = "restore it, or train again in another folder"
    seals = atomic_files.read_json(out / ABOUT, advice).get("sha256", {})
    if not isinstance(seals, dict):
        raise RunError(f"{out / ABOUT} is not as it was written: {advice}")
    for name, seal in seals.items():
        allowed = seal if isinstance(seal, list) else [seal]
        if atomic_files.digest(atomic_files.read_bytes(out / name, advice)) not in allowed:
            raise RunError(f"{out / name} is not as it was written (its SHA-256 differs): {advice}")


def load_run(out: Path) -> SavedRun:
    """Load a finished run: its configuration as JSON, its assets by name, its chosen weights. See `run_weights` for others."""
    config = load_config(out)
    if config is None:
        raise RunError(f"{out} holds no run: it has no config.json")
    if (out / RESULT).is_file():
        result = atomic_files.read_json(out / RESULT, "delete it and train in the same folder again, and the run ends once more")
    else:
        found = steps(out)
        progress = f"is at step {found[-1]}" if found else "has saved nothing yet"
        raise RunError(f"the run in {out} is not finished, it {progress}: train it in the same folder again, and it continues")
    check_seals(out)
    again = "train in the same folder again, and its checkpoints give it back" if steps(out) else "train again in another folder"
    advice = f"{again}, or copy the file from where it is whole"
    data = atomic_files.read_bytes(out / WEIGHTS, advice)
    if atomic_files.digest(data) != result.get("sha256"):
        raise RunError(f"{out / WEIGHTS} is not as it was written (its SHA-256 differs): {advice}")
    return SavedRun(config, load_assets(out), atomic_files.bytes_to_tensors(data, out / WEIGHTS, advice))


def load_config(out: Path) -> dict[str, Any] | None:
    """Load the configuration of a run; None where no run has started."""
    path = out / CONFIG
    return atomic_files.read_json(path, "restore it, or delete the folder and train again") if path.is_file() else None


def load_assets(out: Path) -> dict[str, str]:
    folder = out / "assets"
    paths = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    try:
        return {path.name: atomic_files.read_bytes(path, "restore it").decode() for path in paths}
    except UnicodeDecodeError:
        raise RunError(f"an asset in {folder} is not text: restore it, or train again in another folder") from None


# Weights of a model as a flat dictionary


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a shared tensor is listed under the first of its names."""
    seen: set[int] = set()
    found = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and id(x) not in seen:
            seen.add(id(x))
            found[name] = x.detach()
    return found


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str | Path) -> None:
    """Copy weights into a model; names and shapes must agree."""
    own = weights_of(model)
    if missing := [name for name in own if name not in weights]:
        raise RunError(f"{where} lacks {missing[0]!r}, which the model has: it is of another model or another version")
    if extra := [name for name in weights if name not in own]:
        raise RunError(f"{where} has {extra[0]!r}, which the model lacks: it is of another model or another version")
    for name, x in own.items():
        given = weights[name]
        if given.shape != x.shape:
            raise RunError(f"{where} has {name!r} as {tuple(given.shape)}, but the model has it as {tuple(x.shape)}")
    for name, x in own.items():
        x.copy_(weights[name])
