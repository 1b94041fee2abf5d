"""Whole models: tokens a second and peak memory of an encoder and a decoder with a chosen mechanism, compiled or not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bench.floors import TRAINING
from regard.bench.speed import FAILURES, OURS, Measured, failure_text
from regard.bench.timing import peak_bytes, plain_time, seconds
from regard.bench.workload import TYPES_BY_NAME, spec_text
from regard.blocks.compile_blocks import compile_blocks
from regard.config import Config
from regard.mixers.base import Can
from regard.models.build import encoder, language_model, tokens
from regard.spec import Spec

ENCODER_MODEL, DECODER_MODEL = "encoder", "decoder"
VOCABULARY = 256  # bytes
JobKey = tuple[str, str, bool, int]  # mechanism, kind, compiled or not, length
SlowModels = dict[tuple[str, str, bool], tuple[int, str]]  # mechanism, kind, compiled or not: length that was slow, reason
LONG_PASS = 0.5  # seconds of a training pass that is timed once: of shorter ones, an allocation or a collection would be a part
SLOW_PASS = 1.5  # seconds of a training pass after which longer sequences are left out


@dataclass(frozen=True)
class ModelRequest:
    """Hold what is measured: training passes of models of one shape, at a constant number of tokens."""

    mixers: tuple[Spec, ...]
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    kinds: tuple[str, ...] = (ENCODER_MODEL, DECODER_MODEL)
    compiled: tuple[bool, ...] = (False,)
    tokens: int = 32768
    depth: int = 6
    width: int = 512
    heads: int = 8
    ffn: int = 2048
    device: str = "cpu"
    dtype: str = "fp32"
    seed: int = 0
    seconds: float = 0.5

    def to_json(self) -> dict[str, Any]:
        named = {name: value for name, value in vars(self).items() if name != "mixers"}
        return {"mixers": [spec_text(spec) for spec in self.mixers], **named, "vocabulary": VOCABULARY, "pass": TRAINING}


@dataclass(frozen=True)
class ModelJob:
    spec: Spec
    kind: str
    compiled: bool
    n: int

    @property
    def key(self) -> JobKey:
        """Return what tells this job, and its row, from the others of a record."""
        return spec_text(self.spec), self.kind, self.compiled, self.n


def model_jobs(request: ModelRequest) -> list[ModelJob]:
    """List the models of a request; a decoder only of mechanisms with a causal form."""
    found = []
    for spec in request.mixers:
        for kind in request.kinds:
            if kind == DECODER_MODEL and Can.CAUSAL not in spec.row.can:
                continue
            for compiled in request.compiled:
                found += [ModelJob(spec, kind, compiled, n) for n in request.lengths]
    return found


def model_rows(
    request: ModelRequest, jobs: list[ModelJob], slow: SlowModels | None = None, known: Sequence[Measured] = ()
) -> Iterator[Measured]:
    """Measure the jobs; a model that runs out of memory, or is refused, is a row with the reason.

    `slow` has the models whose longer sequences are left out, and gets those that are found; requests can share it. `known` has
    rows of an earlier run: their models are not measured again.
    """
    slow = {} if slow is None else slow
    earlier = {job_key(row): row for row in known}
    for job in jobs:
        key = job.key[:3]
        longest, reason = slow.get(key, (job.n, ""))
        if job.key in earlier:
            row = earlier[job.key]
        else:
            row = empty_row(request, job) | {"reason": reason} if job.n > longest else model_row(request, job)
        if row.get("ms", 0) > 1e3 * SLOW_PASS:
            slow[key] = job.n, f"left out: {row['ms'] / 1e3:.1f} s a pass at n = {job.n:,}"
        yield row


def model_row(request: ModelRequest, job: ModelJob, turn: AbstractContextManager[Any] | None = None) -> Measured:
    """Measure one model; `turn` is entered for its clock, where several processes share a device."""
    row = empty_row(request, job)
    try:
        row |= _measured_model(request, job, row["batch"], nullcontext() if turn is None else turn)
    except FAILURES as error:
        row["reason"] = failure_text(error)
    forget(request.device, job.compiled)
    return row


def job_key(row: Measured) -> JobKey:
    """Return the key of the job of a row."""
    return row["spec"], row["model"], row["compiled"], row["n"]


def empty_row(request: ModelRequest, job: ModelJob) -> Measured:
    """Return the row of a job with nothing measured."""
    shape = {"n": job.n, "batch": max(1, request.tokens // job.n)}
    return {"by": OURS, "spec": spec_text(job.spec), "model": job.kind, "compiled": job.compiled, **shape}


def _measured_model(request: ModelRequest, job: ModelJob, batch: int, turn: AbstractContextManager[Any]) -> Measured:
    device = torch.device(request.device)
    step = training_pass(request, job, batch)
    first = seconds(step, device)
    with turn:
        measured = timed_pass(step, device, request.seconds, batch * job.n)
    return {"first_seconds": first, **measured}


def timed_pass(step: Callable[[], None], device: torch.device, budget: float, tokens: int) -> Measured:
    """Measure a training pass that has run before: its time, tokens a second and peak memory."""
    once: list[float] = []
    peak = peak_bytes(lambda: once.append(seconds(step, device)), device)
    time = once[0] if once[0] > LONG_PASS else plain_time(step, device, budget)
    return {"ms": 1e3 * time, "tokens_per_second": tokens / time, "peak_bytes": peak}


def training_pass(request: ModelRequest, job: ModelJob, batch: int) -> Callable[[], None]:
    """Forward and backward pass of a model on random bytes: cross entropy of the next one, or the mean square of an encoding."""
    model, loss = whole_model(request, job, batch)
    return gradient_pass(model, loss)


def whole_model(request: ModelRequest, job: ModelJob, batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build a model on its device, and the forward pass on random bytes that gives its loss."""
    model = built_model(request, job)
    if job.compiled:
        compile_blocks(model)
    return model, loss_pass(request, job.kind, model, (batch, job.n))


def built_model(request: ModelRequest, job: ModelJob) -> nn.Module:
    """Build the model of a job on its device, for sequences of up to `job.n` tokens."""
    torch.manual_seed(request.seed)
    with torch.device(request.device):
        model = _model(request, job)
    return model.train()


def loss_pass(request: ModelRequest, kind: str, model: nn.Module, shape: tuple[int, int]) -> Callable[[], Tensor]:
    """Return the forward pass of a model on random bytes (batch, n) that gives its loss."""
    data = torch.randint(VOCABULARY, shape, device=torch.device(request.device))

    def loss() -> Tensor:
        with mixed_precision(request):
            return _loss(kind, model(data), data)

    return loss


def gradient_pass(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a forward and backward pass; gradients of all weights are computed and stored nowhere."""
    weights = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        torch.autograd.grad(loss(), weights, allow_unused=True)

    return step


def mixed_precision(request: ModelRequest) -> AbstractContextManager[Any]:
    """Autocast to a half-precision type, as `precision=bf16-mixed` of a run does; weights stay float32."""
    dtype = TYPES_BY_NAME[request.dtype]
    if dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(request.device, dtype)
    return nullcontext()


def _model(request: ModelRequest, job: ModelJob) -> nn.Module:
    config = Config(
        mixer=spec_text(job.spec),
        width=request.width,
        heads=request.heads,
        depth=request.depth,
        ffn=request.ffn,
        dropout=0.0,
        max_len=job.n,
    )
    if job.kind == DECODER_MODEL:
        return language_model(config, VOCABULARY)
    return encoder(config, tokens(config, VOCABULARY))


def _loss(kind: str, out: Any, data: Tensor) -> Tensor:
    if kind == ENCODER_MODEL:
        return out.x.float().square().mean()
    return F.cross_entropy(out[:, :-1].flatten(0, 1).float(), data[:, 1:].flatten())


def forget(device: str, compiled: bool) -> None:
    """Free what a model leaves behind that is not used any more."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
