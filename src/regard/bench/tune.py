"""Tune kernels: try candidates of configurations on workloads, drop those that compute something else, take the fastest.

A candidate is taken only if its results are those of the default configuration within rounding, equal in every repeat, and its
time as a CUDA graph is better than that of the configuration in use by more than 2 %, in two measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.bench.timing import first_line, graph_time, plain_time
from regard.bench.tune_candidates import FieldChanges
from regard.bench.tune_workloads import TUNE_CASES, TuneCase, TunePass, TuneShape
from regard.ops.triton_support import read_tables_again, trial_configs
from regard.ops.tuned_table import (
    DEFAULT_CARD,
    KernelConfig,
    TunedTable,
    find_config,
    merge_tables,
    read_table,
    shipped_table,
    table_text,
)
from regard.training.atomic_files import replace as write_atomically

LEAST_GAIN = 1.02  # times as fast as the configuration in use, or it stays
REPEATS = 5  # calls with equal results
TIMED_SECONDS = 0.05  # of every timed pass
SEED = 0
BOUNDS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}  # ||a - b|| / ||b|| between two right configurations
LEAST_EXACT_NORM = 1e-30

TableEntry = tuple[str, str]  # a kernel and a key
Settings = dict[TableEntry, KernelConfig]
TuneReport = Callable[[int, int, str], None]  # done, total, what


@dataclass(frozen=True)
class Trial:
    """Hold what one configuration reached: seconds of every pass, or why it is never taken."""

    settings: Settings
    seconds: tuple[float, ...] = ()
    problem: str = ""

    def slower_than(self, other: Trial) -> float:
        """Return the geometric mean of the ratios of times."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return exp(fmean(log(a / b) for a, b in pairs))


def choose_trial(current: Trial, others: Iterable[Trial]) -> Trial:
    """Return the fastest trial without a problem; the current one, unless it has a problem or is 2 % slower."""
    best = _fastest(others)
    if best is None:
        return current
    if current.problem:
        return best
    return best if current.slower_than(best) > LEAST_GAIN else current


def _fastest(others: Iterable[Trial]) -> Trial | None:
    """Return the fastest trial without a problem."""
    right = [trial for trial in others if not trial.problem]
    return min(right, key=lambda trial: trial.slower_than(right[0])) if right else None


class Lab(Protocol):
    """Try configurations of one case."""

    def settings(self, kernel: str) -> Settings:
        """Return the configurations in use, for every key that the case requests of a kernel."""
        ...

    def default(self, kernel: str) -> Settings:
        """Return the configurations of cards that the shipped table does not list."""
        ...

    def attempt(self, settings: Settings) -> Trial:
        """Check configurations, and time the passes that use them."""
        ...

    def keep(self, settings: Settings) -> None:
        """Use configurations from now on."""
        ...


class TunedKernel(NamedTuple):
    """What was found for one kernel."""

    kernel: str
    before: Trial
    after: Trial
    trials: tuple[Trial, ...]  # of the default and the candidates, without the configuration in use
    best: Trial | None  # the fastest of them, measured once more if it is faster by more than 2 %; None if all have a problem

    @property
    def refused(self) -> tuple[Trial, ...]:
        """Candidates with a problem."""
        return tuple(trial for trial in self.trials if trial.problem)

    @property
    def changed(self) -> bool:
        return self.after.settings != self.before.settings


def tune_kernel(lab: Lab, kernel: str, candidates: Sequence[FieldChanges], go_on: Callable[[], bool]) -> TunedKernel:
    """Choose among candidates and the default of one kernel, the others as they are.

    `go_on` is called before every candidate: False ends the search.
    """
    before, default = lab.settings(kernel), lab.default(kernel)
    current = lab.attempt(before)
    trials = [] if default == before else [lab.attempt(default)]
    for changes in candidates:
        if not go_on():
            break
        settings = {entry: {**config, **changes} for entry, config in before.items()}
        if settings not in (before, default):
            trials.append(lab.attempt(settings))
    best = choose_trial(current, trials)
    fastest = _fastest(trials)
    if best is not current:
        again = lab.attempt(current.settings), lab.attempt(best.settings)
        best = choose_trial(again[0], again[1:])
        current, fastest = again
    lab.keep(best.settings)
    return TunedKernel(kernel, current, best, tuple(trials), fastest)


class CudaLab:
    """Try configurations of one case on a CUDA device."""

    def __init__(self, case: TuneCase, shape: TuneShape) -> None:
        torch.manual_seed(SEED)
        self.shape, self.kept = shape, Settings()
        self.device = torch.device(shape.device)
        self.passes = case.make(shape)
        self.used = [self._used(each) for each in self.passes]
        entries = {entry for forward, both in self.used for entry in forward | both}
        shipped = shipped_table()
        self.defaults = {entry: find_config(shipped, DEFAULT_CARD, *entry) for entry in entries}
        with trial_configs(self.defaults):
            self.expected = self._results()

    def _used(self, each: TunePass) -> tuple[Settings, Settings]:
        """Return the configurations that a forward pass uses, and those of forward and backward."""
        with trial_configs({}) as forward:
            each.forward()
        with trial_configs({}) as both:
            if each.both is not None:
                each.both()
        return forward.used, both.used

    def _results(self) -> list[Tensor]:
        found: list[Tensor] = []
        for each in self.passes:
            found += each.forward()
            found += [] if each.both is None else each.both()
        return found

    def settings(self, kernel: str) -> Settings:
        found = Settings()
        for forward, both in self.used:
            found |= {entry: config for entry, config in (forward | both).items() if entry[0] == kernel}
        return {entry: self.kept.get(entry, config) for entry, config in found.items()}

    def default(self, kernel: str) -> Settings:
        return {entry: config for entry, config in self.defaults.items() if entry[0] == kernel}

    def attempt(self, settings: Settings) -> Trial:
        with trial_configs({**self.kept, **settings}):
            try:
                problem = self._problem()
                times = () if problem else self._seconds(settings)
            except Exception as error:  # noqa: BLE001 - a failure of a compiler or a launch is a result
                return Trial(settings, problem=f"{type(error).__name__}: {first_line(error)}")
        return Trial(settings, times, problem)

    def keep(self, settings: Settings) -> None:
        self.kept |= settings

    def _problem(self) -> str:
        """Compare results with those of the default configuration, and with themselves."""
        found = self._results()
        for own, expected in zip(found, self.expected, strict=True):
            error = relative_error(own, expected)
            if not error <= BOUNDS[self.shape.dtype]:  # NaN is no right result
                return f"results differ from those of the default by {error:.1e}"
        for _ in range(REPEATS):
            again = self._results()
            if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
                return "results differ from call to call"
        return ""

    def _seconds(self, settings: Settings) -> tuple[float, ...]:
        """Time the passes that use any of these configurations."""
        found = []
        for each, (forward, both) in zip(self.passes, self.used, strict=True):
            if forward.keys() & settings.keys():
                found.append(self._time(each.forward))
            if each.both is not None and both.keys() & settings.keys():
                found.append(self._time(each.both))
        return tuple(found)

    def _time(self, f: Callable[[], Any]) -> float:
        once = plain_time(f, self.device, TIMED_SECONDS / 5)
        return graph_time(f, self.device, TIMED_SECONDS, once)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ||a - b|| / ||b||; NaN where a result is not finite and the other one is."""
    wide, exact = found.double(), expected.double()
    return float((wide - exact).norm() / exact.norm().clamp_min(LEAST_EXACT_NORM))


class PlannedKernel(NamedTuple):
    """One kernel of one case at one head size, and its candidates."""

    case: TuneCase
    shape: TuneShape
    kernel: str

    @property
    def what(self) -> str:
        return f"{self.case.family}, {self.case.name}, {self.shape.width}"

    @property
    def candidates(self) -> tuple[FieldChanges, ...]:
        return self.case.candidates[self.kernel]


@dataclass(frozen=True)
class TuneRequest:
    """Hold what is tuned: families of kernels, head sizes, the type, the minutes that it may take, and cases if not all."""

    families: tuple[str, ...]
    widths: tuple[int, ...] = (64,)
    dtype: str = "bf16"
    minutes: float = 30.0
    device: str = "cuda"
    cases: tuple[str, ...] = ()  # names or parts of names; all cases of the families without them

    def chosen(self) -> list[TuneCase]:
        """Return the cases that are tuned. A word that is a name is that case alone, else all whose names contain it."""
        known = [case for case in TUNE_CASES if case.family in self.families]
        names = list(dict.fromkeys(case.name for case in known))
        wanted: set[str] = set()
        for word in self.cases or names:
            found = [word] if word in names else [name for name in names if word in name]
            if not found:
                raise ValueError(f"no case of {', '.join(self.families)} has {word!r} in its name; cases are {'; '.join(names)}")
            wanted.update(found)
        return [case for case in known if case.name in wanted]

    def plan(self) -> list[PlannedKernel]:
        """List the kernels in the order in which they are tuned: those of a case follow each other."""
        shapes = [TuneShape(width, self.dtype, self.device) for width in self.widths]
        cases = self.chosen()
        return [PlannedKernel(case, shape, kernel) for shape in shapes for case in cases for kernel in case.candidates]


class TuneRow(NamedTuple):
    """One line of the table at the end; without a result, the reason."""

    planned: PlannedKernel
    tuned: TunedKernel | None
    note: str = ""


class TuneRun:
    """Tune the kernels of a request one after the other, save what is better at once, and record what was tried until then."""

    def __init__(
        self,
        request: TuneRequest,
        save: Callable[[Settings], None],
        report: TuneReport,
        make_lab: Callable[[TuneCase, TuneShape], Lab] = CudaLab,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[Sequence[TuneRow]], None] = lambda _rows: None,
    ) -> None:
        self.plan, self.save, self.report, self.make_lab, self.clock = request.plan(), save, report, make_lab, clock
        self.end, self.record = clock() + 60 * request.minutes, record
        self.total = sum(len(planned.candidates) for planned in self.plan)
        self.done = 0
        self.tuned: set[TableEntry] = set()

    def rows(self) -> list[TuneRow]:
        """Tune everything. Without time, the rest stays as it is."""
        found: list[TuneRow] = []
        lab: Lab | None = None
        before: PlannedKernel | None = None
        for planned in self.plan:
            if self.clock() >= self.end:
                found.append(TuneRow(planned, None, "no time left"))
                continue
            if before is None or (before.case, before.shape) != (planned.case, planned.shape):
                lab = None  # its memory is free before the next one is made
                lab, reason = self._lab(planned)
            before = planned
            found.append(TuneRow(planned, None, reason) if lab is None else self._row(lab, planned))
            self.record(found)
        if self.done < self.total:
            self.report(self.total, self.total, "")
        self.record(found)
        return found

    def _lab(self, planned: PlannedKernel) -> tuple[Lab | None, str]:
        try:
            return self.make_lab(planned.case, planned.shape), ""
        except Exception as error:  # noqa: BLE001 - of a compiler, a launch or memory
            return None, f"the default configuration fails: {first_line(error)}"

    def _row(self, lab: Lab, planned: PlannedKernel) -> TuneRow:
        first = self.done
        row = self._tuned_row(lab, planned)
        self.done = first + len(planned.candidates)
        self.report(self.done, self.total, planned.what)
        return row

    def _tuned_row(self, lab: Lab, planned: PlannedKernel) -> TuneRow:
        entries = lab.settings(planned.kernel).keys()
        if not entries:
            return TuneRow(planned, None, "not used at this size and type")
        if entries <= self.tuned:
            return TuneRow(planned, None, "tuned before: this head size has the same entry")
        self.tuned |= entries
        text = f"{planned.what}: {planned.kernel}"

        def go_on() -> bool:
            self.report(self.done, self.total, text)
            self.done += 1
            return self.clock() < self.end

        found = tune_kernel(lab, planned.kernel, planned.candidates, go_on)
        if found.changed:
            self.save(found.after.settings)
        return TuneRow(planned, found, found.before.problem)


def table_writer(path: Path, card: str) -> Callable[[Settings], None]:
    """Return a function that adds configurations of a card to the table in a file, under a temporary name that is renamed."""

    def save(settings: Settings) -> None:
        shipped = shipped_table()
        table = read_table(path, shipped) if path.exists() else TunedTable()
        for (kernel, key), config in settings.items():
            table = merge_tables(table, {card: {kernel: {key: config}}})
        write_atomically(path, table_text(table))
        read_tables_again()

    return save
