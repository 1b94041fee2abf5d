"""Worker processes that run the jobs of cells: one thread each on a CPU, one share of the card each on a GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from regard.compare.cell_record import CellRecord
from regard.compare.cell_run import CannotStore, CellJob, crashed_record, run_job

QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler prints when it starts and stops
REPORT_EVERY = 0.02  # share of a cell between two messages


class JobEvent(NamedTuple):
    """Report a share of a job that is done, or its record."""

    job: CellJob
    share: float
    record: CellRecord | None = None


def _start_method() -> Any:
    """Return how processes are started: from one that has imported everything and has no threads, where there is such a way."""
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regard.compare.grid_run"])
    return context


class Worker:
    """Hold one process and the job that it runs."""

    def __init__(self, threads: int) -> None:
        context = _start_method()
        self.link, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve_jobs, args=(other, threads), daemon=True)
        self.process.start()
        other.close()
        self.job: CellJob | None = None

    def begin(self, job: CellJob) -> None:
        self.job = job
        self.link.send(job)


class WorkerPool:
    """Run jobs in so many processes. A process that dies ends its own job alone, as crashed, and is replaced."""

    def __init__(self, count: int, threads: int = 1) -> None:
        self.threads = threads
        self.count = count
        self.workers: list[Worker] = []

    def idle(self) -> int:
        return self.count - sum(worker.job is not None for worker in self.workers)

    def submit(self, job: CellJob) -> None:
        """Give a job to a process that is idle, or to a new one."""
        worker = next((worker for worker in self.workers if worker.job is None), None)
        if worker is None:
            worker = Worker(self.threads)
            self.workers.append(worker)
        worker.begin(job)

    def events(self, timeout: float = 1.0) -> Iterator[JobEvent]:
        """Iterate over what has happened since the last call, or within the timeout."""
        links: dict[Any, Worker] = {worker.link: worker for worker in self.workers if worker.job is not None}
        for link in wait(list(links), timeout):
            worker = links[link]
            try:
                yield from self._received(worker, worker.link.recv())
            except (EOFError, OSError):
                yield self._replaced(worker)

    def _received(self, worker: Worker, message: tuple[str, Any]) -> Iterator[JobEvent]:
        kind, value = message
        job = worker.job
        assert job is not None
        if kind == "share":
            yield JobEvent(job, value)
            return
        worker.job = None
        if kind == "cannot store":
            raise CannotStore(value)
        yield JobEvent(job, 1.0, value)

    def _replaced(self, worker: Worker) -> JobEvent:
        """Take out a process that has died, and record its cell as crashed."""
        worker.process.join()
        code, job = worker.process.exitcode, worker.job
        assert job is not None
        self.workers.remove(worker)
        reason = f"its process ended by signal {-code}" if code and code < 0 else f"its process ended with code {code}"
        return JobEvent(job, 1.0, crashed_record(job, reason))

    def close(self) -> None:
        """End all processes at once: what they were doing is lost, what was recorded is not."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(5)
            worker.link.close()


class SameProcess:
    """Run jobs one after the other in this process: the pool of `--jobs 0`."""

    def __init__(self) -> None:
        self.jobs: list[CellJob] = []

    def idle(self) -> int:
        return 1 - len(self.jobs)

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
    while True:
        try:
            job = link.recv()
        except (EOFError, OSError):
            return
        link.send(_outcome(job, link))


def _outcome(job: CellJob, link: Connection) -> tuple[str, Any]:
    sent = [0.0]

    def report(share: float) -> None:
        if share - sent[0] >= REPORT_EVERY:
            sent[0] = share
            link.send(("share", share))

    try:
        return "record", run_job(job, report)
    except CannotStore as error:
        return "cannot store", str(error)


def _end_with_parent() -> None:
    """End this process when its parent has ended: no process would record its work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
