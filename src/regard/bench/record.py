"""Run a measurement from start to end: a record with settings, versions, rates of the machine, peers, rows and crossovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regard.bench.machine import Rates, made_with, measured_rates
from regard.bench.peers import FULL, installed
from regard.bench.speed import Job, Measured, Request, Session, jobs_of
from regard.bench.summary import crossovers
from regard.bench.timing import light_collections
from regard.bench.token_step import STEP, full_step_row, own_step_row
from regard.bench.whole_models import ModelRequest, SlowModels, model_jobs, model_rows
from regard.bench.workload import TYPES_BY_NAME, Setting, claims_of, spec_text
from regard.mixers.base import Can
from regard.spec import Spec

Report = Callable[[int, int, str], None]  # jobs done, jobs in all, the last of them
Save = Callable[[dict[str, Any]], None]


def speed_record(request: Request, report: Report, save: Save) -> dict[str, Any]:
    """Measure a request. `report` is called before every job, `save` with the record after every job, so that a run that is
    stopped keeps its rows."""
    device = torch.device(request.device)
    rates = measured_rates(device, TYPES_BY_NAME[request.dtype])
    record = _begun("bench", request.to_json(), rates, installed(list(request.peers), request.device))
    jobs = jobs_of(request) if set(request.passes) - {STEP} else []
    steps = _step_jobs(request) if STEP in request.passes else []
    session = Session(_without_steps(request), rates)
    total = len(jobs) + len(steps)
    with light_collections():
        for done, job in enumerate(jobs):
            report(done, total, _job_text(job))
            record["rows"] += session.rows(job)
            save(_finished_record(record))
        for done, (spec, setting, t) in enumerate(steps, len(jobs)):
            report(done, total, f"{FULL if spec is None else spec_text(spec)}, step after {t:,} tokens")
            record["rows"].append(_step_row(request, spec, setting, t, rates))
            save(_finished_record(record))
    report(total, total, "done")
    return _finished_record(record)


def model_record(
    request: ModelRequest, report: Report, save: Save, slow: SlowModels | None = None, known: Sequence[Measured] = ()
) -> dict[str, Any]:
    """Measure whole models; `slow` and `known` are what other requests left out and measured (see `model_rows`)."""
    rates = measured_rates(torch.device(request.device), TYPES_BY_NAME[request.dtype])
    record = _begun("bench_models", request.to_json(), rates, {})
    jobs = model_jobs(request)
    rows = model_rows(request, jobs, slow, known)
    with light_collections():
        for done, job in enumerate(jobs):
            form = "compiled" if job.compiled else "eager"
            report(done, len(jobs), f"{spec_text(job.spec)}, {job.kind}, {form}, n = {job.n:,}")
            record["rows"].append(next(rows))
            save(record)
    report(len(jobs), len(jobs), "done")
    return record


def _begun(name: str, settings: dict[str, Any], rates: Rates, peers: dict[str, str]) -> dict[str, Any]:
    return {
        "benchmark": name,
        "settings": settings,
        "made_with": made_with(),
        "rates": rates.to_json(),
        "peers": peers,
        "rows": [],
    }


def _finished_record(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"crossovers": crossovers(record["rows"])}


def _without_steps(request: Request) -> Request:
    passes = tuple(name for name in request.passes if name != STEP)
    return Request(**{**vars(request), "passes": passes})


def _step_jobs(request: Request) -> list[tuple[Spec | None, Setting, int]]:
    """SDPA with a cache (None), then every mechanism that streams, after each number of tokens."""
    found: list[tuple[Spec | None, Setting, int]] = []
    for t in request.lengths:
        base = request.setting(t, True)
        setting = Setting(**{**base.to_json(), "batch": request.step_batch})
        if FULL in request.peers:
            found.append((None, setting, t))
        found += [(spec, setting, t) for spec in request.mixers if Can.STREAM in claims_of(spec, setting)]
    return found


def _step_row(request: Request, spec: Spec | None, setting: Setting, t: int, rates: Rates) -> Measured:
    if spec is None:
        return full_step_row(setting, t, rates, request.seconds, request.graphs)
    return own_step_row(spec, setting, t, rates, request.seconds, request.graphs)


def _job_text(job: Job) -> str:
    name = spec_text(job.spec) if job.own else FULL
    form = ", causal" if job.causal else ""
    return f"{name}{form}, {job.level}, n = {job.n:,}"
