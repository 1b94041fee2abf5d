"""The result of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from regard.training import atomic_files, checkpoints
from regard.training.atomic_files import RunError
from regard.training.progress import span


@dataclass
class Result:
    """Describe the weights.safetensors of a finished run."""

    steps: int  # updates made
    name: str  # of the score of model selection
    best: float | None  # score of the best single checkpoint
    best_step: int | None
    averaged: float | None  # score of the average of the last checkpoints; None without an average
    chosen: str  # best, average, or last where no score was a number
    early: bool  # stopped by its patience
    seconds: float
    sha256: str = ""  # of weights.safetensors
    tokens_per_second: float | None = None  # of updates, the median of its measurements
    peak_memory: int | None = None  # bytes: on a GPU those of tensors, on a CPU those of the process
    averaged_scores: dict[str, float | None] | None = None  # all scores of the average, where it was chosen

    @property
    def score(self) -> float | None:
        return self.averaged if self.chosen == "average" else self.best

    def sentence(self) -> str:
        score = "no score" if self.score is None else f"{self.name} {self.score:.4g}"
        names = {"best": f"step {self.best_step}", "average": "the mean of the last checkpoints", "last": "the last step"}
        early = " (stopped early)" if self.early else ""
        return f"{self.steps} updates{early} in {span(self.seconds)}; {names[self.chosen]} was chosen, with {score} on validation"


def finished(out: Path) -> Result | None:
    """Return the result of a finished run, or None; None too where its weights can be made again from its checkpoints."""
    path = out / checkpoints.RESULT
    if not path.is_file():
        return None
    advice = "delete it, and the run ends once more"
    try:
        result = Result(**atomic_files.read_json(path, advice))
        result.sentence()
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} is not as it was written: {advice}") from None
    weights = out / checkpoints.WEIGHTS
    if weights.is_file() and atomic_files.digest(atomic_files.read_bytes(weights, "restore it")) == result.sha256:
        return result
    if weights.is_dir() or checkpoints.latest(out) is None:
        raise RunError(
            f"{weights} is not as it was written, and there is no checkpoint to make it from: restore it, or train anew"
        )
    return None
