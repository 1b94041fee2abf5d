"""Training a task: the same run, however often it is killed on the way."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.text import unknown
from regard.training import atomic_files, checkpoints, rng, run_info
from regard.training.averaging import average
from regard.training.interrupts import Interrupted, Interrupts
from regard.training.learnable import Learnable
from regard.training.learner import Learner, optimizer_state, put_optimizer_state
from regard.training.loop import device_of, matmul_precision, run_updates
from regard.training.metrics_log import MetricsLog, finite, read_metrics
from regard.training.prefetch import prefetch_batches
from regard.training.progress import Progress, print_line, progress
from regard.training.result import Result, finished
from regard.training.update_speed import UpdateSpeed, run_cost

if find_spec("safetensors") is None:  # found out now, not at the first checkpoint
    raise ModuleNotFoundError("training needs safetensors: pip install 'regard[train]'", name="safetensors")

MEASURE_EVERY = 50  # updates between two readings of the loss: each waits for the device


def fit(task: Learnable, out: Path, *, resume: bool = True, accelerator: str = "auto", quiet: bool = False) -> Result:
    """Train what `task` describes in the folder `out`, or go on there: exactly as if it had never been interrupted (on a CPU).

    `weights.safetensors` then holds the weights that did best on validation, or the mean of the last `average` checkpoints if
    that did better. With a moving average of the weights (`ema`), that is what is validated and kept.

    Control-C (SIGINT) or SIGTERM stops it behind the update that is being made, with a checkpoint of it. A run whose `steps` or
    `patience` has grown goes on from where it ended; schedules then are those of the larger number.
    """
    out, kind = Path(out), device_of(accelerator)
    run_info.check_task(task)
    if task.config.graphs and kind != "cuda":
        raise ValueError(f"graphs=true is for a CUDA device, but this run is on the {kind}: leave it out")
    with checkpoints.locked(out):
        checkpoints.clean(out)
        grown = run_info.same_run(out, task, resume)
        if not grown and (result := finished(out)) is not None:
            if not quiet:
                print_line(f"the run in {out} is finished: {result.sentence()}; with larger steps it goes on")
            return result
        return _TrainingRun(task, out, kind, quiet).finish()


class _TrainingRun:
    """One process's part of a run."""

    def __init__(self, task: Learnable, out: Path, kind: str, quiet: bool) -> None:
        self.task, self.out, self.config = task, out, task.config
        self.name, self.way = task.best
        rng.seed_all(self.config.seed)
        self.learner = Learner(task.model(), task.loss, self.config, kind)
        self.speed = UpdateSpeed(self.learner.model, self.learner.device)
        self.best: dict[str, Any] | None = None  # {"step": ..., "score": ...}
        self.waited, self.stopped, self.before, self.begun = 0, False, 0.0, time.monotonic()
        self.halted = False  # no further update in this process
        self.interrupts = Interrupts(quiet)
        found = checkpoints.latest(out)
        self.start = checkpoints.load_checkpoint(found) if found else None
        notes = run_info.begin_run(out, task, self.learner.model, kind)
        if self.start and found:
            self._put(self.start, found)
            notes.append(f"going on behind step {self.start.step}")
        self.journal = MetricsLog(out, after=self.learner.step)
        self.progress: Progress = progress(self.config.steps, self.learner.step, quiet=quiet)
        for note in notes:
            self.progress.note(note)

    def _put(self, start: checkpoints.Checkpoint, found: Path) -> None:
        """Restore a checkpoint, all but the optimiser and the RNG state, which `_restore` does."""
        state = start.state
        checkpoints.put_weights(self.learner.model, start.weights, found / checkpoints.WEIGHTS)
        self.learner.step, self.learner.skipped = start.step, state["skipped"]
        self.best, self.waited, self.before = state["best"], state["waited"], state["seconds"]
        self.stopped = state["stopped"] and self._patient_no_more()

    def finish(self) -> Result:
        try:
            due = self.start is not None and self.start.state.get("due", False)
            if due or (self.learner.step < self.config.steps and not self.stopped):
                with self.interrupts, prefetch_batches(self.task, self.learner.step, self.learner.kind) as batches:
                    self._train(batches)
            return self._end()
        finally:
            self.progress.close()
            self.journal.close()

    def _train(self, batches: Iterator[list[Batch]]) -> None:
        with matmul_precision(self.config.precision):
            self.learner.begin()
            self._restore()
            self.speed.restart()
            run_updates(self.learner, self.speed.counted(batches), after=self._after, stopped=lambda: self.halted)
        if self.interrupts.requested:
            self.interrupts.pass_on()

    def _restore(self) -> None:
        """Restore the optimiser, the scaler and the RNG state of the checkpoint, just before the first update."""
        self.interrupts.install()
        if self.start is None:
            return
        learner, where = self.learner, checkpoints.at(self.out, self.start.step) / checkpoints.OPTIMIZER
        put_optimizer_state(learner.model, learner.optimizer, self.start.optimizer, where)
        if learner.ema is not None:
            learner.ema.put_state(self.start.weights, self.start.optimizer)
        if learner.scaler is not None:
            learner.scaler.load_state_dict(self.start.state["scaler"])
        rng.set_rng_state(self.start.state["dice"])
        learner.put_unmeasured(self.start.state.get("unmeasured", []))
        if self.start.state.get("due", False):
            self._after(learner.step)

    def _after(self, step: int) -> None:
        """Behind every update. What is due is a function of the step, so it is the same after a crash.

        Where a signal requests a stop, the step is saved with what is still due behind it.
        """
        self.progress.step(step)
        due = self._state(step, due=True) if self.interrupts.requested or self._validates(step) else {}
        try:
            if self.interrupts.requested:
                raise Interrupted
            self._look(step)
        except Interrupted:
            self._save(due)
            self.halted = True
        if self.stopped:
            self.halted = True

    def _validates(self, step: int) -> bool:
        return step == self.config.steps or step % self.config.validate_every == 0

    def _look(self, step: int) -> None:
        """Measure, validate, save: each if it is time for it."""
        validate, save = self._validates(step), step == self.config.steps or step % self.config.save_every == 0
        if not (validate or save or step % MEASURE_EVERY == 0):
            return
        line: dict[str, Any] = {"step": step, "time": self.seconds, **self.learner.measured(self._saved), **self.speed.measured()}
        self.progress.measured(line["loss"])
        if validate:
            with self.learner.evaluated(), self.interrupts.at_once():  # weights are not swapped inside: they would be mixed
                line["val"] = self.score()
            save |= self._judge(step, line["val"])
        self.journal.write(line)
        if save or self.stopped:
            self.journal.sync()
            self._save(self._state(step))
        self.speed.restart()

    @property
    def seconds(self) -> float:
        """Since the run began, in all processes that had a part in what is left of it."""
        return round(self.before + time.monotonic() - self.begun, 3)

    def score(self) -> dict[str, float]:
        """Score the weights in the model on the validation data, in the precision of training."""
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
        self.stopped = self._patient_no_more()
        self.progress.validated(self.name, score, self._best_score())
        return better

    def _patient_no_more(self) -> bool:
        return bool(self.config.patience) and self.waited >= self.config.patience

    def _better(self, score: float, than: float | None) -> bool:
        if not math.isfinite(score):
            return False
        return than is None or (score > than if self.way == "max" else score < than)

    def _state(self, step: int, *, due: bool = False) -> dict[str, Any]:
        """What a checkpoint of this step keeps beside tensors. `due`: what is done behind the update has yet to be done."""
        learner = self.learner
        return {
            "step": step,
            "seconds": self.seconds,
            "best": self.best,
            "waited": self.waited,
            "stopped": self.stopped,
            "skipped": learner.skipped,
            "scaler": learner.scaler.state_dict() if learner.scaler is not None else None,
            "dice": rng.rng_state(),
            **({"due": True, "unmeasured": learner.unmeasured()} if due else {}),
        }

    def _save(self, state: dict[str, Any]) -> None:
        learner = self.learner
        weights, made = checkpoints.weights_of(learner.model), optimizer_state(learner.model, learner.optimizer)
        if learner.ema is not None:
            weights, made = weights | learner.ema.state(), made | learner.ema.trained_state()
        with self.interrupts.held_back():
            checkpoints.save_checkpoint(self.out, checkpoints.Checkpoint(weights, made, state))
            self._prune(state["step"])

    def _prune(self, step: int) -> None:
        """Keep what is averaged, one more than the last in any case, and the best."""
        checkpoints.prune(self.out, {*self._regular(step)[-max(self.config.average, 2) :], step, *self._best_step()})

    def _regular(self, last: int) -> list[int]:
        """Saved steps that are averaged: one saved only for being the best so far is not among them."""
        return [step for step in checkpoints.steps(self.out) if step % self.config.save_every == 0 or step == last]

    def _best_score(self) -> float | None:
        return self.best["score"] if self.best else None

    def _best_step(self) -> list[int]:
        return [self.best["step"]] if self.best else []

    def _saved(self) -> str:
        found = checkpoints.latest(self.out)
        return f"the last good checkpoint is {found}" if found else "no checkpoint has been saved yet"

    def _end(self) -> Result:
        """Choose the weights: the best single ones, or the mean of the last ones if that does better."""
        last, self.learner.ema = self.learner.step, None  # all weights from here on are those of checkpoints
        self._prune(last)  # it may have been killed before it did
        step = self.best["step"] if self.best else last
        weights, chosen, named = self._weights_at(step), "best" if self.best else "last", str(step)
        scores: dict[str, float] = {}
        steps = self._regular(last)[-self.config.average :]
        if len(steps) > 1:
            mean = average([self._weights_at(saved) for saved in steps])
            scores = self._scores_of(mean)
            if self._better(float(scores[self.name]), self._best_score()):
                chosen, weights, named = "average", mean, "average of " + ", ".join(map(str, steps))
        return self._close(weights, named, scores, chosen)

    def _weights_at(self, step: int) -> dict[str, Tensor]:
        path = checkpoints.at(self.out, step)
        return checkpoints.load_checkpoint(
            path, f"delete {path} and the folders of all later steps to go on from the checkpoint before"
        ).weights

    def _scores_of(self, weights: dict[str, Tensor]) -> dict[str, float]:
        """Score other weights in the model, on the device of training."""
        self.learner.model.to(self.learner.device)  # a run that is resumed at its end has made no update
        checkpoints.put_weights(self.learner.model, weights, "the average")
        rng.set_rng_state(checkpoints.load_checkpoint(checkpoints.at(self.out, self.learner.step)).state["dice"])
        return self.score()

    def _close(self, weights: dict[str, Tensor], named: str, scores: dict[str, float], chosen: str) -> Result:
        """Write the weights and the result; `scores` are those of the average, if there is one."""
        data = atomic_files.tensors_to_bytes(weights, {"step": named})  # one entry: several would be in any order
        best = self.best or {"score": None, "step": None}
        kept: dict[str, float | None] = finite(scores)
        result = Result(
            self.learner.step, self.name, best["score"], best["step"], kept.get(self.name), chosen, self.stopped, self.seconds
        )
        result = dataclasses.replace(result, sha256=atomic_files.digest(data), **run_cost(read_metrics(self.journal.path)))
        result.averaged_scores = kept if chosen == "average" else None
        atomic_files.replace(self.out / checkpoints.WEIGHTS, data)
        atomic_files.replace(
            self.out / checkpoints.RESULT, atomic_files.as_json(dataclasses.asdict(result))
        )  # last: where it is, it is finished
        self.progress.note(result.sentence())
        return result
