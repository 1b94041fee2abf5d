"""Compile what a benchmark will run, by several processes on one GPU: kernels and graphs stay in the caches on disk.

Every job of a request runs once. Peers that choose among configurations at run time (flash-linear-attention) are run by all
processes, each with its share of the configurations, and without a choice: that is made later, where nothing else runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import TimeoutError, get_context
from typing import Any, NamedTuple

import torch

from gpu_sets import FLA, FLEX, LAST, K
from regard.bench import speed
from regard.bench.machine import Rates
from regard.bench.peers import peers_of
from regard.bench.speed import Job, Request, Session, jobs_of
from regard.bench.timing import first_line, seconds
from regard.bench.token_step import STEP, own_step_row
from regard.bench.whole_models import JobKey, ModelJob, ModelRequest, model_jobs, training_pass
from regard.bench.workload import Setting, claims_of, spec_text
from regard.mixers.base import Can
from regard.spec import Spec

NO_RATES = Rates(1.0, 1.0)
MOST_TOKENS = 64 * K  # of a sequence of a model: several longer ones do not fit one memory
SAME_KERNELS = 4 * K  # tokens of a sequence that is run in place of longer ones


class WarmJob(NamedTuple):
    """One row of a table; of a peer with configurations, one share of them."""

    request: Request | ModelRequest
    job: Job | ModelJob | Spec  # a Spec is a decoding step
    share: tuple[int, int] | None = None

    @property
    def what(self) -> str:
        spec = self.job if isinstance(self.job, Spec) else self.job.spec
        return f"{spec_text(spec)}{'' if self.share is None else f', {FLA}'}"


def warm_jobs(requests: Sequence[Request | ModelRequest], processes: int, known: Collection[JobKey] = ()) -> list[WarmJob]:
    """List what is compiled, operations first; `known` are models that are not measured again."""
    models, shares, own = [], [], []
    for request in requests:
        if isinstance(request, ModelRequest):
            models += [
                WarmJob(request, replace(job, n=job.n if job.n <= MOST_TOKENS else SAME_KERNELS))
                for job in model_jobs(request)
                if job.spec.name != LAST and job.key not in known
            ]
        elif STEP in request.passes:
            own += [WarmJob(request, spec) for spec in request.mixers]
        else:
            for job in jobs_of(request):
                peers = [peer.name for peer in peers_of(job.spec, job.causal, list(request.peers))]
                own += [WarmJob(replace(request, peers=tuple({FLEX} & set(peers))), job)] if job.own else []
                if FLA in peers:
                    only = replace(request, peers=(FLA,)), replace(job, own=False)
                    shares += [WarmJob(*only, (number, processes)) for number in range(processes)]
    once = {(warm.job, warm.request.compiled): warm for warm in models}  # those in place of longer ones may be there already
    return [*own, *shares, *once.values()]


def warm_up(requests: Sequence[Request | ModelRequest], processes: int, limit: float, known: Collection[JobKey] = ()) -> None:
    """Run every job once by several processes, for at most so many seconds."""
    end = time.monotonic() + limit
    jobs = warm_jobs(requests, processes, known)
    done = 0
    os.environ["FLA_CACHE_RESULTS"] = "0"  # of its choices, which are none here
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool, suppress(TimeoutError):
        found = pool.imap_unordered(run_once, jobs)
        while done < len(jobs):
            problem = found.next(max(end - time.monotonic(), 0.0))
            done += 1
            if problem:
                print(f"warm-up, {problem}", flush=True)
    del os.environ["FLA_CACHE_RESULTS"]
    print(f"warm-up: {done} of {len(jobs)} jobs, {max(end - time.monotonic(), 0.0):.0f} s were left", flush=True)


def run_once(warm: WarmJob) -> str:
    """Run a job without a clock, and return its problem, if there is one: the measurement reports it again."""
    start = time.perf_counter()
    try:
        with one_call(), share_of_configurations(warm.share):
            problem = _run(warm)
    except Exception as error:  # noqa: BLE001 - of a compiler, a launch or memory
        problem = f"{type(error).__name__}: {first_line(error)}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    spent = time.perf_counter() - start
    return f"{warm.what}: {problem} ({spent:.0f} s)" if problem or spent > 30 else ""


def _run(warm: WarmJob) -> str:
    request, job = warm.request, warm.job
    if isinstance(request, ModelRequest):
        assert isinstance(job, ModelJob)
        training_pass(request, job, max(1, request.tokens // job.n))()
        return ""
    if isinstance(job, Spec):
        setting = Setting(**{**request.setting(request.lengths[0], True).to_json(), "batch": request.step_batch})
        streams = Can.STREAM in claims_of(job, setting)
        rows = [own_step_row(job, setting, request.lengths[0], NO_RATES, 0.0, False)] if streams else []
    else:
        assert isinstance(job, Job)
        rows = list(Session(request, NO_RATES).rows(job))
    return "; ".join(row["reason"] for row in rows if "reason" in row)


@contextmanager
def one_call() -> Iterator[None]:
    """Call each pass once instead of measuring it."""
    kept = speed.measure_call
    speed.measure_call = lambda call, device, *_: {"first_seconds": seconds(call, device)}
    try:
        yield
    finally:
        speed.measure_call = kept


@contextmanager
def share_of_configurations(share: tuple[int, int] | None) -> Iterator[None]:
    """Let Triton's autotuner compile every k-th configuration, and run each once."""
    if share is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    first, step = share
    prune, run = Autotuner.prune_configs, Autotuner.run

    def some(self: Any, kwargs: Any) -> Any:
        found = prune(self, kwargs)
        return found[first::step] or found[first % len(found) :][:1]

    def tuned_again(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.cache.clear()
        return run(self, *args, **kwargs)

    with short_tuning(0, 0):
        Autotuner.prune_configs, Autotuner.run = some, tuned_again
        try:
            yield
        finally:
            Autotuner.prune_configs, Autotuner.run = prune, run


@contextmanager
def short_tuning(warmup_ms: float, timed_ms: float) -> Iterator[None]:
    """Let Triton's autotuner time each configuration for so long, once where that is 0; its own 125 ms add up to minutes."""
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        yield
        return

    def short(call: Any, quantiles: Any) -> Any:
        if not timed_ms:
            return [seconds(call, torch.device("cuda"))] * len(quantiles)
        return do_bench(call, warmup=warmup_ms, rep=timed_ms, quantiles=quantiles)

    kept = Autotuner.__dict__["do_bench"]
    Autotuner.do_bench = staticmethod(short)
    try:
        yield
    finally:
        Autotuner.do_bench = kept
