"""Worker processes that run the jobs of cells: one thread each on a CPU, one share of the card each on a GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from regard.compare.cell_record import CellRecord
from regard.compare.cell_run import BrokenCard, CannotStore, CellJob, JobRun, ReportShare, crashed_record, run_job

QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler prints when it starts and stops
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # of a GPU's work: with the usual 8, more streams than that wait for each other
BROKEN_CARD = 77  # exit code of a process whose GPU has reported an error
REPORT_EVERY = 0.02  # share of a cell between two messages
LEAD = 0.25  # seconds that a cell may have used more than another one of its process before it waits
LONGEST_TURN = 1.0  # of one part, in seconds: the cell that reads a data set does so for all
TRAININGS = ("train", "train and test")  # jobs that build a model and capture its steps

Group = tuple[str, str]  # task and mixer


def group_of(job: CellJob) -> Group:
    return job.cell.task, job.cell.mixer


class JobEvent(NamedTuple):
    """Report a share of a job that is done, or its record, or that it must run again with no other cell beside it."""

    job: CellJob
    share: float
    record: CellRecord | None = None
    again: bool = False


def _start_method() -> Any:
    """Return how processes are started: from one that has imported everything and has no threads, where there is such a way."""
    for name, value in (QUIET | QUEUES).items():
        os.environ.setdefault(name, value)
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regard.compare.grid_run"])
    return context


class Worker:
    """Hold one process and the jobs that it runs, by the keys of their cells."""

    def __init__(self, threads: int) -> None:
        context = _start_method()
        self.link, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve_jobs, args=(other, threads), daemon=True)
        self.process.start()
        other.close()
        self.jobs: dict[str, CellJob] = {}
        self.warm: Counter[Group] = Counter()  # models that it has built and captured, and that no job uses

    def begin(self, job: CellJob) -> None:
        self.jobs[job.cell.key] = job
        if job.kind in TRAININGS:
            self.warm -= Counter([group_of(job)])
        self.link.send(job)

    def end(self, key: str) -> CellJob:
        """Take out a job that is done; its model can train the next cell of its group."""
        job = self.jobs.pop(key)
        if job.kind in TRAININGS:
            self.warm[group_of(job)] += 1
        return job

    def room(self, lanes: int) -> int:
        """Return how many more jobs it may run."""
        alone = any(job.alone for job in self.jobs.values())
        return 0 if alone else lanes - len(self.jobs)


class WorkerPool:
    """Run jobs in so many processes, `lanes` at a time in each. A process that dies ends its own jobs alone, and is replaced."""

    def __init__(self, count: int, threads: int = 1, lanes: int = 1) -> None:
        self.count, self.threads, self.lanes = count, threads, lanes
        self.workers: list[Worker] = []

    def choose(self, queue: Sequence[CellJob]) -> int | None:
        """Return the place of the job to start now, None if there is no room for it.

        That is the first one, unless processes have several jobs at a time. Then a cell of a group whose model is warm in a
        process with room comes first, or else one of a group that has no cell running: few models are built and captured.
        """
        if not queue or not self._takes(queue[0]):
            return None
        if self.lanes == 1 or queue[0].alone:
            return 0
        ready = {group for worker in self.workers if worker.room(self.lanes) for group in worker.warm}
        running = {group_of(job) for worker in self.workers for job in worker.jobs.values()}
        groups = [(place, group_of(job)) for place, job in enumerate(queue) if not job.alone]
        warm = (place for place, group in groups if group in ready)
        new = (place for place, group in groups if group not in running)
        return next(warm, next(new, 0))

    def _takes(self, job: CellJob) -> bool:
        return len(self.workers) < self.count or self._free(job) is not None

    def submit(self, job: CellJob) -> None:
        """Give a job to a process where the model of its group is warm, or to the one with the fewest, or to a new one."""
        worker = self._free(job)
        cold = worker is None or not worker.warm[group_of(job)]
        if len(self.workers) < self.count and (worker is None or (worker.jobs and cold)):
            worker = Worker(self.threads)
            self.workers.append(worker)
        assert worker is not None
        worker.begin(job)

    def _free(self, job: CellJob) -> Worker | None:
        free = [worker for worker in self.workers if worker.room(self.lanes) and not (job.alone and worker.jobs)]
        return min(free, key=lambda worker: (not worker.warm[group_of(job)], len(worker.jobs)), default=None)

    def events(self, timeout: float = 1.0) -> Iterator[JobEvent]:
        """Iterate over what has happened since the last call, or within the timeout."""
        links: dict[Any, Worker] = {worker.link: worker for worker in self.workers if worker.jobs}
        for link in wait(list(links), timeout):
            worker = links[link]
            try:
                yield self._received(worker, worker.link.recv())
            except (EOFError, OSError):
                yield from self._died(worker)

    def _received(self, worker: Worker, message: tuple[str, str, Any]) -> JobEvent:
        kind, key, value = message
        if kind == "cannot store":
            raise CannotStore(value)
        if kind == "share":
            return JobEvent(worker.jobs[key], value)
        return JobEvent(worker.end(key), 1.0, value)

    def _died(self, worker: Worker) -> Iterator[JobEvent]:
        """Take out a process that has died. Its cell is recorded as crashed; if it had several, each is run again alone."""
        worker.process.join()
        code = worker.process.exitcode
        self.workers.remove(worker)
        reason = f"its process ended by signal {-code}" if code and code < 0 else f"its process ended with code {code}"
        if code == BROKEN_CARD:
            reason = "the GPU reported an error"
        several = len(worker.jobs) > 1
        for job in worker.jobs.values():
            if several:
                yield JobEvent(job._replace(alone=True), 0.0, None, True)
            else:
                yield JobEvent(job, 1.0, crashed_record(job, reason))

    def close(self) -> None:
        """End all processes at once: what they were doing is lost, what was recorded is not."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(5)
            worker.link.close()
        self.workers.clear()


class SameProcess:
    """Run jobs one after the other in this process: the pool of `--jobs 0`."""

    def __init__(self) -> None:
        self.jobs: list[CellJob] = []

    def choose(self, queue: Sequence[CellJob]) -> int | None:
        """Return the place of the job to start now: the first one, if none is there."""
        return None if self.jobs or not queue else 0

    def submit(self, job: CellJob) -> None:
        self.jobs.append(job)

    def events(self, timeout: float = 1.0) -> Iterator[JobEvent]:  # noqa: ARG002 - pools are called alike
        while self.jobs:
            job = self.jobs.pop()
            yield JobEvent(job, 1.0, run_job(job))

    def close(self) -> None:
        self.jobs.clear()


def serve_jobs(link: Connection, threads: int) -> None:
    """Run jobs of the parent until it closes the connection. Control-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    try:
        _serve(link)
    except (EOFError, OSError):  # the parent has closed the connection
        return
    except BrokenCard:
        os._exit(BROKEN_CARD)


class Turns:
    """Choose which jobs of a process run their next part: all that have not used more time than the others.

    A step that is not captured may take a thousand times as long as one that is; in plain turns all cells would wait for it.
    """

    def __init__(self) -> None:
        self.spent: dict[JobRun, float] = {}  # seconds of each job, in the order in which they began

    def add(self, run: JobRun) -> None:
        self.spent[run] = self._least()

    def remove(self, run: JobRun) -> None:
        del self.spent[run]

    def _least(self) -> float:
        return min(self.spent.values(), default=0.0)

    def next_round(self) -> list[JobRun]:
        """Return the jobs whose turn it is, in the order in which they began."""
        most = self._least() + LEAD
        return [run for run, seconds in self.spent.items() if seconds <= most]

    def advance(self, run: JobRun) -> CellRecord | None:
        """Run the next part of a job, and count its time."""
        begun = time.perf_counter()
        try:
            return run.advance()
        finally:
            self.spent[run] += min(time.perf_counter() - begun, LONGEST_TURN)


def _serve(link: Connection) -> None:
    """Run all jobs that were received, a part of each in turn; wait where there is none."""
    turns = Turns()
    while True:
        while not turns.spent or link.poll():
            job = link.recv()
            turns.add(JobRun(job, _reporter(link, job.cell.key)))
        for run in turns.next_round():
            try:
                record = turns.advance(run)
            except CannotStore as error:
                link.send(("cannot store", run.job.cell.key, str(error)))
                turns.remove(run)
                continue
            if record is not None:
                turns.remove(run)
                link.send(("record", run.job.cell.key, record))


def _reporter(link: Connection, key: str) -> ReportShare:
    sent = [0.0]

    def report(share: float) -> None:
        if share - sent[0] >= REPORT_EVERY:
            sent[0] = share
            link.send(("share", key, share))

    return report


def _end_with_parent() -> None:
    """End this process when its parent has ended: no process would record its work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
