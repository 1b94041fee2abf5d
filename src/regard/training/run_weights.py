"""Select the weights of a run for inference: the final ones, or the best checkpoint of an unfinished run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from regard.training import checkpoints
from regard.training.atomic_files import RunError
from regard.training.checkpoints import SavedRun

TRIES = 5  # a run that is being trained removes checkpoints while they are read


class RunWeights(NamedTuple):
    """Hold a run and its selected weights."""

    run: SavedRun
    weights: Path  # the file of the weights
    update: int | None = None  # of the weights, where the run is not finished
    note: str = ""  # a sentence about an unfinished run


def run_weights(out: Path) -> RunWeights:
    """Load a finished run, or the best checkpoint of an unfinished one by validation: the newest if none was validated."""
    config = checkpoints.load_config(out)
    if config is None or (out / checkpoints.RESULT).is_file() or not checkpoints.steps(out):
        return RunWeights(checkpoints.load_run(out), out / checkpoints.WEIGHTS)
    checkpoints.check_seals(out)
    for left in reversed(range(TRIES)):
        path = checkpoints.latest(out)
        if path is None:
            break
        try:
            last = checkpoints.load_checkpoint(path)
            best = (last.state["best"] or {}).get("step")
            chosen = last if best is None else checkpoints.load_checkpoint(checkpoints.at(out, best))
        except RunError:
            if not left or path == checkpoints.latest(out):
                raise
            continue
        which = "the newest, as none was validated yet" if best is None else "the best on validation so far"
        far = f"update {last.step} of {config.get('steps')}"
        note = f"the run in {out} is not finished ({far}): these are the weights of update {chosen.step}, {which}"
        where = checkpoints.at(out, chosen.step) / checkpoints.WEIGHTS
        return RunWeights(SavedRun(config, checkpoints.load_assets(out), chosen.weights), where, chosen.step, note)
    return RunWeights(checkpoints.load_run(out), out / checkpoints.WEIGHTS)
