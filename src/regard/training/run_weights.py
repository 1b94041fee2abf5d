"""Select the weights of a run for inference: final ones, the best checkpoint of an unfinished run, or a checkpoint by name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from regard.training import atomic_files, checkpoints
from regard.training.atomic_files import RunError
from regard.training.checkpoints import Checkpoint, SavedRun

TRIES = 5  # a run that is being trained removes checkpoints while they are read


class RunWeights(NamedTuple):
    """Hold a run and its selected weights."""

    run: SavedRun
    weights: Path  # the file of the weights
    sha256: str  # of that file
    update: int | None = None  # of the weights, where they are those of a checkpoint
    note: str = ""  # a sentence about an unfinished run


def run_weights(out: Path, checkpoint: str | int | None = None) -> RunWeights:
    """Load a finished run, or the best checkpoint of an unfinished one by validation: the newest if none was validated.

    `checkpoint` selects another one: "best", "last", or the one of an update as 400 or "step-000400".
    """
    config = checkpoints.load_config(out)
    unfinished = not (out / checkpoints.RESULT).is_file() and bool(checkpoints.steps(out))
    if config is None or (checkpoint is None and not unfinished):
        run, result = checkpoints.load_run(out), atomic_files.read_json(out / checkpoints.RESULT, "restore it")
        return RunWeights(run, out / checkpoints.WEIGHTS, result["sha256"])
    checkpoints.check_seals(out)
    chosen, validated = _load_again(out, checkpoint)
    note = ""
    if checkpoint is None:
        which = "the best on validation so far" if validated else "the newest, as none was validated yet"
        far = f"update {checkpoints.steps(out)[-1]} of {config.get('steps')}"
        note = f"the run in {out} is not finished ({far}): these are the weights of update {chosen.step}, {which}"
    where = checkpoints.at(out, chosen.step) / checkpoints.WEIGHTS
    run, sha256 = SavedRun(config, checkpoints.load_assets(out), chosen.weights), chosen.state["sha256"][checkpoints.WEIGHTS]
    return RunWeights(run, where, sha256, chosen.step, note)


def _load_again(out: Path, checkpoint: str | int | None) -> tuple[Checkpoint, bool]:
    """Load a checkpoint, once more where a run that is being trained has written or removed some meanwhile."""
    for _ in range(TRIES - 1):
        before = checkpoints.steps(out)
        try:
            return _load_named(out, checkpoint)
        except RunError:
            if before == checkpoints.steps(out):
                raise
    return _load_named(out, checkpoint)


def _load_named(out: Path, checkpoint: str | int | None) -> tuple[Checkpoint, bool]:
    """Load a checkpoint by its name, with whether there is a best one on validation; for None that one, or else the newest."""
    found = checkpoints.steps(out)
    if checkpoint not in (None, "best", "last"):
        return checkpoints.load_checkpoint(checkpoints.at(out, _step(out, checkpoint, found))), False
    if not found:
        raise _absent(out, checkpoint, found)
    last = checkpoints.load_checkpoint(checkpoints.at(out, found[-1]))
    best = (last.state["best"] or {}).get("step")
    if checkpoint == "best" and best is None:
        raise RunError(f"no checkpoint of {out} was validated yet, so none is the best: use 'last', update {last.step}")
    chosen = last if checkpoint == "last" or best is None else checkpoints.load_checkpoint(checkpoints.at(out, best))
    return chosen, best is not None


def _step(out: Path, checkpoint: str | int | None, found: list[int]) -> int:
    """Find the update that a checkpoint is named after, as 400, "400" or "step-000400"."""
    digits = str(checkpoint).removeprefix("step-")
    if not (digits.isascii() and digits.isdigit() and int(digits) in found):
        raise _absent(out, checkpoint, found)
    return int(digits)


def _absent(out: Path, checkpoint: object, found: list[int]) -> RunError:
    names = f"best, last, {', '.join(checkpoints.at(out, step).name for step in found)}" if found else "none"
    return RunError(f"{out} has no checkpoint {checkpoint!r}; there is {names}")
