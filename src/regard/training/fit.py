"""Training a task: the same run, however often it is killed on the way."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from regard.data.batch import Batch
from regard.text import unknown
from regard.training import about, dice, files, store
from regard.training.averaging import average
from regard.training.feed import batches_of
from regard.training.files import RunError
from regard.training.journal import Journal
from regard.training.learner import Learner, optimizer_state, put_optimizer_state
from regard.training.progress import Lines, Progress, progress, span
from regard.training.trainer import device_of, rounded, trainer_in

if TYPE_CHECKING:
    from regard.tasks.base import Task

LOOK = 50  # updates between two looks at the loss: each waits for the device


@dataclass
class Result:
    """How a run ended: what is in its weights.safetensors."""

    steps: int  # updates made
    name: str  # of the score that chose
    best: float | None  # the best single checkpoint's
    best_step: int | None
    averaged: float | None  # the score of the mean of the last checkpoints; None where there was none to make
    chosen: str  # best, average, or last where no score was a number
    early: bool  # stopped by its patience
    seconds: float
    sha256: str = ""  # of weights.safetensors

    @property
    def score(self) -> float | None:
        return self.averaged if self.chosen == "average" else self.best


def fit(task: Task, out: Path, *, resume: bool = True, accelerator: str = "auto", quiet: bool = False) -> Result:
    """Train what `task` describes in the folder `out`, or go on there: exactly as if it had never been interrupted (on a CPU).

    `weights.safetensors` then holds the weights that did best on validation, or the mean of the last `average` checkpoints if
    that did better.
    """
    out, kind = Path(out), device_of(accelerator)
    about.check(task)
    if task.config.graphs and kind != "cuda":
        raise ValueError(f"graphs=true is for a CUDA device, but this run is on the {kind}: leave it out")
    with store.locked(out):
        store.clean(out)
        config = about.settings(task)
        about.same_run(out, config, task.assets(), resume)
        if (result := _finished(out)) is not None:
            if not quiet:
                Lines(0, console=Console()).note(f"the run in {out} is finished: {_sentence(result)}")
            return result
        return _Run(task, out, kind, quiet).finish()


def _finished(out: Path) -> Result | None:
    """How the run ended, if it has; where its weights are gone or changed, its checkpoints end it once more."""
    path = out / store.RESULT
    if not path.is_file():
        return None
    advice = "delete it, and the run ends once more"
    try:
        result = Result(**files.read_json(path, advice))
        _sentence(result)
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} is not as it was written: {advice}") from None
    weights = out / store.WEIGHTS
    if weights.is_file() and files.digest(files.read(weights, "restore it")) == result.sha256:
        return result
    if weights.is_dir() or store.latest(out) is None:
        raise RunError(
            f"{weights} is not as it was written, and there is no checkpoint to make it from: restore it, or train anew"
        )
    return None


class _Run:
    """One process's part of a run."""

    def __init__(self, task: Task, out: Path, kind: str, quiet: bool) -> None:
        self.task, self.out, self.config = task, out, task.config
        self.name, self.way = task.best
        dice.throw(self.config.seed)
        self.learner = Learner(task.model(), task.loss, self.config, kind)
        self.best: dict[str, Any] | None = None  # {"step": ..., "score": ...}
        self.waited, self.stopped, self.before, self.begun = 0, False, 0.0, time.monotonic()
        found = store.latest(out)
        self.start = store.load(found) if found else None
        notes = about.begin(out, task, self.learner.model, kind)
        if self.start and found:
            self._put(self.start, found)
            notes.append(f"going on behind step {self.start.step}")
        self.journal = Journal(out, after=self.learner.step)
        self.progress: Progress = progress(self.config.steps, self.learner.step, quiet=quiet)
        for note in notes:
            self.progress.note(note)

    def _put(self, start: store.Checkpoint, found: Path) -> None:
        """All but the optimiser and the dice, whose time has not come."""
        state = start.state
        store.put_weights(self.learner.model, start.weights, found / store.WEIGHTS)
        self.learner.step, self.learner.skipped = start.step, state["skipped"]
        self.best, self.waited, self.stopped, self.before = state["best"], state["waited"], state["stopped"], state["seconds"]

    def finish(self) -> Result:
        try:
            if self.learner.step < self.config.steps and not self.stopped:
                with batches_of(self.task, self.learner.step, self.learner.kind) as batches:
                    self._train(batches)
            return self._end()
        finally:
            self.progress.close()
            self.journal.close()

    def _train(self, batches: Iterator[list[Batch]]) -> None:
        self.learner.begin, self.learner.after = self._go_on, self._after
        with rounded(self.config.precision), trainer_in(self.learner.kind, self.out) as trainer:
            self.trainer = trainer
            trainer.fit(self.learner, batches)

    def _go_on(self) -> None:
        """Just before the first update: what was saved of the optimiser, the scaler and the dice."""
        if self.start is None:
            return
        learner, where = self.learner, store.at(self.out, self.start.step) / store.OPTIMIZER
        put_optimizer_state(learner.model, learner.optimizer, self.start.optimizer, where)
        if learner.scaler is not None:
            learner.scaler.load_state_dict(self.start.state["scaler"])
        dice.put_back(self.start.state["dice"])

    def _after(self, step: int) -> None:
        """Behind every update. What is due is a function of the step, so it is the same after a crash."""
        config, last = self.config, step == self.config.steps
        self.progress.step(step)
        validate, save = last or step % config.validate_every == 0, last or step % config.save_every == 0
        if not (validate or save or step % LOOK == 0):
            return
        line: dict[str, Any] = {"step": step, "time": self.seconds, **self.learner.measured(self._saved)}
        self.progress.measured(line["loss"])
        if validate:
            line["val"] = self.score()
            save |= self._judge(step, line["val"])
        self.journal.write(line)
        if save or self.stopped:
            self.journal.sync()
            self._save(step)
        if self.stopped:
            self.trainer.should_stop = True

    @property
    def seconds(self) -> float:
        """Since the run began, in all processes that had a part in what is left of it."""
        return round(self.before + time.monotonic() - self.begun, 3)

    def score(self) -> dict[str, float]:
        """On the validation data, in the precision of training."""
        model = self.learner.model
        model.eval()
        try:
            with torch.no_grad(), self.learner.autocast():
                scores = self.task.watch(model)
        finally:
            model.train()
        if self.name not in scores:
            raise ValueError(unknown(f"the scores of {self.config.task} lack the one that chooses,", self.name, scores))
        return scores

    def _judge(self, step: int, scores: dict[str, float]) -> bool:
        """Whether this is the best so far; patience is counted here."""
        score = float(scores[self.name])
        better = self._better(score, self._best_score())
        self.best = {"step": step, "score": score} if better else self.best
        self.waited = 0 if better else self.waited + 1
        self.stopped = bool(self.config.patience) and self.waited >= self.config.patience
        self.progress.validated(self.name, score, self._best_score())
        return better

    def _better(self, score: float, than: float | None) -> bool:
        if not math.isfinite(score):
            return False
        return than is None or (score > than if self.way == "max" else score < than)

    def _save(self, step: int) -> None:
        learner = self.learner
        state = {
            "step": step,
            "seconds": self.seconds,
            "best": self.best,
            "waited": self.waited,
            "stopped": self.stopped,
            "skipped": learner.skipped,
            "scaler": learner.scaler.state_dict() if learner.scaler is not None else None,
            "dice": dice.held(),
        }
        made = optimizer_state(learner.model, learner.optimizer)
        store.save(self.out, store.Checkpoint(store.weights_of(learner.model), made, state))
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Keep what is averaged, one more than the last in any case, and the best."""
        store.prune(self.out, {*self._regular(step)[-max(self.config.average, 2) :], step, *self._best_step()})

    def _regular(self, last: int) -> list[int]:
        """Saved steps that are averaged: one saved only for being the best so far is not among them."""
        return [step for step in store.steps(self.out) if step % self.config.save_every == 0 or step == last]

    def _best_score(self) -> float | None:
        return self.best["score"] if self.best else None

    def _best_step(self) -> list[int]:
        return [self.best["step"]] if self.best else []

    def _saved(self) -> str:
        found = store.latest(self.out)
        return f"the last good checkpoint is {found}" if found else "no checkpoint has been saved yet"

    def _end(self) -> Result:
        """Choose the weights: the best single ones, or the mean of the last ones if that does better."""
        last = self.learner.step
        self._prune(last)  # it may have been killed before it did
        step = self.best["step"] if self.best else last
        weights, chosen, named, averaged = self._weights_at(step), "best" if self.best else "last", str(step), None
        steps = self._regular(last)[-self.config.average :]
        if len(steps) > 1:
            mean = average([self._weights_at(saved) for saved in steps])
            averaged = self._score_of(mean)
            if self._better(averaged, self._best_score()):
                chosen, weights, named = "average", mean, "average of " + ", ".join(map(str, steps))
        return self._close(weights, named, averaged, chosen)

    def _weights_at(self, step: int) -> dict[str, Tensor]:
        path = store.at(self.out, step)
        return store.load(path, f"delete {path} and the folders of all later steps to go on from the checkpoint before").weights

    def _score_of(self, weights: dict[str, Tensor]) -> float:
        """Of weights that are not the model's, in the model, on the device of training."""
        self.learner.to(self.learner.kind)  # the Trainer takes it back to the CPU, and a resumed run never left it
        store.put_weights(self.learner.model, weights, "the average")
        dice.put_back(store.load(store.at(self.out, self.learner.step)).state["dice"])
        return float(self.score()[self.name])

    def _close(self, weights: dict[str, Tensor], named: str, averaged: float | None, chosen: str) -> Result:
        data = files.packed(weights, {"step": named})  # one entry: several would be in any order
        best = self.best or {"score": None, "step": None}
        averaged = averaged if averaged is not None and math.isfinite(averaged) else None
        result = Result(self.learner.step, self.name, best["score"], best["step"], averaged, chosen, self.stopped, self.seconds)
        result.sha256 = files.digest(data)
        files.replace(self.out / store.WEIGHTS, data)
        files.replace(self.out / store.RESULT, files.as_json(dataclasses.asdict(result)))  # last: where it is, it is finished
        self.progress.note(_sentence(result))
        return result


def _sentence(result: Result) -> str:
    score = "no score" if result.score is None else f"{result.name} {result.score:.4g}"
    names = {"best": f"step {result.best_step}", "average": "the mean of the last checkpoints", "last": "the last step"}
    early = " (stopped early)" if result.early else ""
    return (
        f"{result.steps} updates{early} in {span(result.seconds)}; {names[result.chosen]} was chosen, with {score} on validation"
    )
