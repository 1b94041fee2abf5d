"""The run of a comparison: every learning rate first, then all seeds with the best one, then costs with nothing beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from regard.compare.cell_record import CellRecord
from regard.compare.cell_run import COSTS_CRASHED, CannotStore, CellJob
from regard.compare.cell_store import CellStore
from regard.compare.grid_plan import Cell, PlannedGroup, best_rate
from regard.compare.worker_pool import SameProcess, WorkerPool
from regard.training.atomic_files import RunError

TRIED_AGAIN = ("crashed", "missing data")  # records of earlier runs with these are replaced


class GridView(Protocol):
    """Show the progress of a run."""

    def advance(self, done: float, text: str) -> None:
        """Show how many cells are done, in parts too."""


class GridRun:
    """Run all cells of a plan that have no record yet. `records` holds those that are there, by key."""

    def __init__(self, groups: Sequence[PlannedGroup], store: CellStore, pool: WorkerPool | SameProcess) -> None:
        self.groups, self.store, self.pool = groups, store, pool
        self.view: GridView | None = None
        self.records: dict[str, CellRecord] = {}
        self.shares: dict[str, float] = {}  # of jobs that run
        self.group_of: dict[tuple[str, str], PlannedGroup] = {(g.cell.task, g.cell.mixer): g for g in groups}
        self.without_data: dict[tuple[str, str], list[CellRecord]] = {}  # finished ones of groups whose data set is not here now
        self._read_earlier()

    @property
    def total(self) -> int:
        """Return how many cells are trained and how many are measured, if all goes well."""
        open_groups = [group for group in self.groups if group.refused is None]
        return sum(len(group.rates) + group.cell.grid.seeds - 1 + group.cell.grid.costs for group in open_groups)

    def run(self) -> list[CellRecord]:
        """Run until nothing is left; returns the records of the plan."""
        for group in self.groups:
            if group.refused is not None and group.refused.group not in self.without_data:
                self._keep(group.refused)
        self._work(self._next_jobs)
        for group in self.groups:
            self._work(self._cost_jobs, [group])
        return self.planned_records()

    def planned_records(self) -> list[CellRecord]:
        """Return the records of this plan, in its order."""
        found: list[CellRecord] = []
        for group in self.groups:
            if group.refused is not None and group.refused.group in self.without_data:
                found += self.without_data[group.refused.group]
                continue
            keys = [group.refused.key] if group.refused else [cell.key for cell in self._cells(group)]
            found += [self.records[key] for key in keys if key in self.records]
        return found

    def _cells(self, group: PlannedGroup) -> list[Cell]:
        """Return the cells of a group as far as they are decided, each once."""
        search = group.search()
        lr = best_rate([self.records[cell.key] for cell in search if cell.key in self.records])
        later = [] if lr is None else group.final(lr)
        return list({cell.key: cell for cell in [*search, *later]}.values())

    def _read_earlier(self) -> None:
        """Read the records of earlier runs; those of the same groups with other settings or other code are set aside.

        Finished records of a group whose data set is not here now are left as they are, and are its records.
        """
        for record in self.store.records():
            group = self.group_of.get(record.group)
            if group is not None and group.lacks_data and record.status not in TRIED_AGAIN:
                self.without_data.setdefault(record.group, []).append(record)
            elif group is not None and group.cell.at(record.lr, record.seed).key != record.key:
                self.store.set_aside(record)
        self.store.damaged.clear()  # each is listed when its cell is read
        for group in self.groups:
            for cell in group.search():
                self._recall(cell)
            for cell in self._cells(group):
                self._recall(cell)

    def _recall(self, cell: Cell) -> None:
        """Read the record of an earlier run, if there is one that counts."""
        if cell.key in self.records:
            return
        record = self.store.load(cell.key)
        if record is not None and record.status not in TRIED_AGAIN:
            self.records[cell.key] = record

    def _work(self, jobs_of: Callable[[PlannedGroup], list[CellJob]], groups: Sequence[PlannedGroup] | None = None) -> None:
        """Run jobs until no group has any."""
        queue: list[CellJob] = []
        started: set[tuple[str, str]] = set()

        def add(group: PlannedGroup) -> None:
            new = [job for job in jobs_of(group) if (job.kind, job.cell.key) not in started]
            started.update((job.kind, job.cell.key) for job in new)
            queue.extend(new)

        for group in self.groups if groups is None else groups:
            add(group)
        running = 0
        while queue or running:
            while (place := self.pool.choose(queue)) is not None:
                self.pool.submit(queue.pop(place))
                running += 1
            for event in self.pool.events():
                self.shares[event.job.cell.key] = event.share
                if event.again:
                    running -= 1
                    queue.append(event.job)
                if event.record is not None:
                    running -= 1
                    del self.shares[event.job.cell.key]
                    self._keep(event.record)
                    add(self.group_of[event.record.group])
                self._show(event.job)

    def _keep(self, record: CellRecord) -> None:
        """Write a record; one that cannot be written ends the run."""
        self.records[record.key] = record
        try:
            self.store.save(record)
        except RunError as error:
            raise CannotStore(str(error)) from error

    def _next_jobs(self, group: PlannedGroup) -> list[CellJob]:
        """Return what can be trained or tested now: nothing of all seeds before the learning rate is chosen."""
        if group.refused is not None:
            return []
        search, folder = group.search(), str(self.store.folder)
        alone = len(search) == 1
        missing = [cell for cell in search if cell.key not in self.records]
        if missing:
            return [CellJob("train and test" if alone else "train", cell, folder) for cell in missing]
        lr = best_rate([self.records[cell.key] for cell in search])
        if lr is None:
            return []
        self.store.drop_weights(self.records[cell.key] for cell in search if cell.lr != lr)
        jobs = []
        for cell in group.final(lr):
            record = self.records.get(cell.key)
            if record is None:
                jobs.append(CellJob("train and test", cell, folder))
            elif record.status == "done" and not record.final:
                jobs.append(CellJob("test", cell, folder, record))
        return jobs

    def _cost_jobs(self, group: PlannedGroup) -> list[CellJob]:
        """Return the measurement of a group whose model was tested, unless it was made at these lengths, or is not wanted.

        One that crashed is made again by the next run.
        """
        if group.refused is not None or not group.cell.grid.costs:
            return []
        for cell in self._cells(group):
            record = self.records.get(cell.key)
            if record is None or not record.final or record.seed != 0:
                continue
            lengths = [row["n"] for row in record.cost_by_length]
            crashed = COSTS_CRASHED in record.costs.get("notes", {})
            if not record.costs or crashed or lengths != list(cell.grid.lengths):
                return [CellJob("costs", cell, str(self.store.folder), record)]
        return []

    def _show(self, job: CellJob) -> None:
        if self.view is not None:
            self.view.advance(self.done, f"{job.kind} {job.cell.task.partition('(')[0]} {job.cell.mixer} lr {job.cell.lr:g}")

    @property
    def done(self) -> float:
        """Return the cells that are done, with the parts of those that run."""
        return self.kept + sum(self.shares.values())

    @property
    def kept(self) -> int:
        """Return the cells that have a record, and the measurements that were made."""
        found = 0
        for group in self.groups:
            if group.refused is None:
                records = [self.records[cell.key] for cell in self._cells(group) if cell.key in self.records]
                found += len(records) + (group.cell.grid.costs and any(record.costs for record in records))
        return found
