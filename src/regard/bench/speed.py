"""Measure mechanisms and their peers at several lengths: one row for each mechanism, form, level, length and pass."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.backend_log import backends_of
from regard.bench.floors import FORWARD, TRAINING, floor_of
from regard.bench.machine import Rates
from regard.bench.peer import OperationPeer, Peer
from regard.bench.peers import FULL, peers_of
from regard.bench.timing import NotCaptured, first_line, graph_time, launches, peak_bytes, plain_time, seconds, wait
from regard.bench.workload import (
    LAYER,
    OPERATION,
    Setting,
    Workload,
    build_mixer,
    claims_of,
    has_core,
    layer_input,
    module_workload,
    operation_inputs,
    own_core,
    own_workload,
    spec_text,
    training_mode,
)
from regard.mixers.base import Can, Mixer
from regard.spec import Spec

Measured = dict[str, Any]
OURS = "regard"
SLOW = 3.0  # seconds of a pass after which longer sequences are left out
FAILURES = (Exception,)  # of a row, which has the reason then: those of compilers have no class in common


@dataclass(frozen=True)
class Request:
    """Hold what is to be measured: mechanisms, lengths, forms, passes, levels and peers, at a constant number of tokens."""

    mixers: tuple[Spec, ...]
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    forms: tuple[bool, ...] = (True,)  # causal and not; a mechanism without the causal form is measured without it
    passes: tuple[str, ...] = (FORWARD, TRAINING)
    level: str = "auto"  # core, layer, or auto: core, and whole layers where a mechanism or its peer is nothing else
    peers: tuple[str, ...] = ()
    tokens: int = 32768
    step_batch: int = 32  # sequences of a decoding step
    heads: int = 8
    dim: int = 64
    device: str = "cpu"
    dtype: str = "fp32"
    backend: str = "auto"
    seed: int = 0
    seconds: float = 0.2  # for each time that is measured
    graphs: bool = True

    def setting(self, n: int, causal: bool) -> Setting:
        batch = max(1, self.tokens // n)
        return Setting(n, batch, self.heads, self.dim, causal, self.device, self.dtype, self.backend, self.seed)

    def to_json(self) -> dict[str, Any]:
        named = {name: value for name, value in vars(self).items() if name != "mixers"}
        return {"mixers": [spec_text(spec) for spec in self.mixers], **named}


@dataclass(frozen=True)
class Job:
    """Hold one mechanism in one form at one length and level; `own` is False where only a peer is measured."""

    spec: Spec
    causal: bool
    level: str
    n: int
    own: bool = True


def jobs_of(request: Request) -> list[Job]:
    """List what a request measures: first SDPA over all pairs in each form that occurs, then every mechanism."""
    found: list[Job] = []
    for spec in request.mixers:
        for causal in _forms(spec, request):
            for level in _levels(spec, causal, request):
                found += [Job(spec, causal, level, n) for n in request.lengths]
    softmax = Spec("softmax")
    full = {(job.causal, job.level) for job in found} if FULL in request.peers else set()
    measured = {(job.causal, job.level) for job in found if job.spec == softmax}
    missing = sorted(full - measured)
    first = [Job(softmax, causal, level, n, own=False) for causal, level in missing for n in request.lengths]
    return first + found


def _forms(spec: Spec, request: Request) -> list[bool]:
    """The forms of a mechanism among those that were chosen; the bidirectional one where it has no causal form."""
    setting = request.setting(min(request.lengths), True)
    causal = Can.CAUSAL in claims_of(spec, setting)
    return list(dict.fromkeys(form and causal for form in request.forms))


def _levels(spec: Spec, causal: bool, request: Request) -> list[str]:
    if request.level != "auto":
        return [request.level]
    if not has_core(spec, request.setting(min(request.lengths), causal)):
        return [LAYER]
    whole = any(peer.level == LAYER for peer in peers_of(spec, causal, list(request.peers)))
    return [OPERATION, LAYER] if whole else [OPERATION]


@dataclass
class Session:
    """Measure the jobs of a request one after another; `too_slow` remembers what took longer than SLOW."""

    request: Request
    rates: Rates
    too_slow: dict[tuple[str, str, bool, str, str], tuple[int, str]] = field(default_factory=dict)  # the length, the reason

    def rows(self, job: Job) -> Iterator[Measured]:
        """Yield the rows of a job: the mechanism of the catalogue and each of its peers."""
        setting = self.request.setting(job.n, job.causal)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from self._rows(job, setting)
        _free(setting.torch_device)

    def _rows(self, job: Job, setting: Setting) -> Iterator[Measured]:
        chosen = [peer for peer in peers_of(job.spec, job.causal, list(self.request.peers)) if _measured_at(peer, job.level)]
        try:
            mixer = build_mixer(job.spec, setting)
            inputs = _inputs(mixer, setting, job.level)
        except FAILURES as error:
            yield from (self._failed(job, setting, OURS, work, first_line(error)) for work in self.request.passes)
            return
        exact = None
        if job.own:
            ours = own_workload(mixer, setting, job.level, inputs)
            yield from self._measured(job, setting, OURS, ours, mixer, mixer)
            exact = _answer(ours, mixer) if any(peer.same(job.spec, job.causal) for peer in chosen) else None
        for peer in chosen:
            yield from self._peer_rows(job, setting, peer, mixer, inputs, exact)
            _free(setting.torch_device)

    def _peer_rows(
        self, job: Job, setting: Setting, peer: Peer, mixer: Mixer, inputs: tuple[Tensor, ...], exact: Tensor | None
    ) -> Iterator[Measured]:
        if why := peer.missing(setting.device):
            yield from (self._failed(job, setting, peer.name, work, why) for work in self.request.passes)
            return
        try:
            module = peer.build(mixer, setting, job.level)
            theirs = _peer_workload(module, inputs)
            same = exact is not None and peer.same(job.spec, job.causal)
            apart = _distance(_finished(module, _answer(theirs, module)), exact) if same else None
        except FAILURES as error:
            yield from (self._failed(job, setting, peer.name, work, first_line(error)) for work in self.request.passes)
            return
        for row in self._measured(job, setting, peer.name, theirs, module, mixer):
            yield row | {"difference": apart, "note": peer.note}

    def _measured(
        self, job: Job, setting: Setting, by: str, work: Workload, module: nn.Module, mixer: Mixer
    ) -> Iterator[Measured]:
        for name in self.request.passes:
            key = (by, str(job.spec), job.causal, job.level, name)
            longest, reason = self.too_slow.get(key, (job.n, ""))
            if job.n > longest:
                yield self._failed(job, setting, by, name, reason)
                continue
            row = self._base(job, setting, by, name)
            try:
                with training_mode(module, name == TRAINING):
                    call = work.both if name == TRAINING else work.forward
                    row |= measure_call(call, setting.torch_device, self.request.seconds, self.request.graphs, _countable(module))
                    row |= {"backends": backends_of(call)} if by == OURS else {}
            except FAILURES as error:
                row |= {"reason": failure_text(error)}
            _free(setting.torch_device)
            if row.get("ms", 0) > 1e3 * SLOW:
                self.too_slow[key] = job.n, f"left out: {row['ms'] / 1e3:.1f} s at n = {job.n:,}"
            yield row | self._floors(job, setting, name, mixer, row)

    def _floors(self, job: Job, setting: Setting, work: str, mixer: Mixer, row: Measured) -> Measured:
        try:
            floor = floor_of(mixer, setting, job.level, work, job.spec.row.examples[0].cost)
        except FAILURES:
            return {}
        least = 1e3 * floor.seconds(self.rates)
        ms = row.get("graph_ms") or row.get("ms")
        found = {"floor_ms": least, "floor_of": floor.bound_by(self.rates)}
        return found | ({"fraction": least / ms} if ms else {})

    def _base(self, job: Job, setting: Setting, by: str, work: str) -> Measured:
        shape = {"n": setting.n, "batch": setting.batch}
        return {"by": by, "spec": spec_text(job.spec), "causal": job.causal, "level": job.level, "pass": work, **shape}

    def _failed(self, job: Job, setting: Setting, by: str, work: str, why: str) -> Measured:
        return self._base(job, setting, by, work) | {"reason": why}


def measure_call(call: Callable[[], Any], device: torch.device, budget: float, graphs: bool, countable: bool = True) -> Measured:
    """Measure a call: first call, plain time, time as a CUDA graph, launches and peak memory."""
    first = seconds(call, device)
    call()
    row: Measured = {"first_seconds": first, "peak_bytes": peak_bytes(call, device)}
    once = plain_time(call, device, budget)
    row["ms"] = 1e3 * once
    if countable or device.type == "cuda":
        row |= count_launches(call, device)
    if device.type == "cuda" and graphs:
        try:
            row["graph_ms"] = 1e3 * graph_time(call, device, budget, once)
        except NotCaptured as error:
            row["graph_reason"] = str(error)
    return row


def count_launches(call: Callable[[], Any], device: torch.device) -> Measured:
    """The launches of a call, or why they could not be counted: a profiler may see nothing of a GPU."""
    try:
        found = launches(call, device)
    except RuntimeError as error:
        return {"launches_reason": first_line(error)}
    return {"launches": found} if found else {"launches_reason": "the profiler saw no kernel"}


def failure_text(error: BaseException) -> str:
    """One line about a failed measurement."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return first_line(error)


def _countable(module: nn.Module) -> bool:
    return not any(getattr(part, "compiled", False) for part in module.modules())


def _measured_at(peer: Peer, level: str) -> bool:
    return peer.level == level or level == LAYER


def _inputs(mixer: Mixer, setting: Setting, level: str) -> tuple[Tensor, ...]:
    return (layer_input(setting),) if level == LAYER else operation_inputs(own_core(mixer), setting)


def _peer_workload(module: nn.Module, inputs: tuple[Tensor, ...]) -> Workload:
    """The workload of an adapter; an operation gets its inputs in the layout of its package."""
    if not isinstance(module, OperationPeer):
        return module_workload(module, inputs)
    native = [x.detach().contiguous() for x in module.prepare(*inputs)]
    work = module_workload(module, tuple(x.requires_grad_() for x in native))
    work.run = module.run
    return work


def _answer(work: Workload, module: nn.Module) -> Tensor:
    with training_mode(module, False):
        return work.forward()


def _finished(module: nn.Module, out: Tensor) -> Tensor:
    return module.finish(out) if isinstance(module, OperationPeer) else out


def _distance(found: Tensor, exact: Tensor | None) -> float | None:
    """|| found - exact || / || exact ||."""
    if exact is None:
        return None
    exact = exact.float()
    return float((found.float() - exact).norm() / exact.norm())


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.empty_cache()
