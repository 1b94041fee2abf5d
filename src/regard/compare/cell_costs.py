"""What a cell costs, measured apart from its training: speed of training and inference, a decoding step, memory, the state."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from regard.arena.arena_task import ArenaTask
from regard.bench.timing import NotCaptured, captured, first_line, peak_bytes, plain_time
from regard.bench.token_step import held_bytes
from regard.compare.compared_model import ComparedModel, build_model
from regard.compare.device_split import DeviceSplit
from regard.compare.grid_plan import Cell
from regard.compare.training_step import EAGER_STEPS, TrainingStep
from regard.mixers.base import Can
from regard.runtime.graphed_decoder import GraphedDecoder

TIMED = 0.2  # seconds for each time
DECODED = 32  # tokens that are decoded one by one, at most
CELL_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}  # tf32 rounds products: `JobRun`


def cell_costs(cell: Cell, task: ArenaTask, split: DeviceSplit) -> dict[str, Any]:
    """Measure a new model of the cell on its own training data."""
    device, dtype = split.tokens.device, CELL_DTYPES[cell.grid.dtype]
    model = _new_model(cell, task, device)
    step = TrainingStep(model, task, split, cell.usual, dtype)
    sequences = len(step.index) * (2 if task.form == "pair" else 1)
    tokens = sequences * cell.length
    one_step, notes = _train_seconds(step), {}
    forward = _forward(model, split, step.index, dtype)
    costs: dict[str, Any] = {"n": cell.length, "batch": len(step.index), "train_steps_per_s": 1 / one_step}
    costs["train_tokens_per_s"] = tokens / one_step
    costs["infer_tokens_per_s"] = tokens / _forward_seconds(forward, device)
    costs["peak_bytes"] = step_bytes(step)
    costs["decode_ms"] = costs["state_bytes"] = None
    if why := _why_not_decoded(cell, model):
        notes["decode_ms"] = why
    else:
        found, why = _decoding(model, cell.length, device)
        costs |= found
        notes |= {"decode_ms": why} if why else {}
    if step.note:
        notes["train_steps_per_s"] = step.note
    memory = "bytes of tensors that a training step allocates, beyond weights and optimizer"
    notes["peak_bytes"] = f"{memory} ({'CUDA allocator' if device.type == 'cuda' else 'torch.profiler'})"
    return costs | {"notes": notes}


def costs_by_length(cell: Cell, task: ArenaTask, split: DeviceSplit) -> list[dict[str, Any]]:
    """Measure models of the same shape at other lengths, on random tokens; about as many tokens a batch as the task has."""
    return [_at_length(cell, task, split.tokens.device, n) for n in cell.grid.lengths]


def _at_length(cell: Cell, task: ArenaTask, device: torch.device, n: int) -> dict[str, Any]:
    batch = max(1, cell.usual.batch * cell.length // n)
    row: dict[str, Any] = {"n": n, "batch": batch, "forward_ms": None, "step_ms": None, "peak_bytes": None, "reason": ""}
    dtype = CELL_DTYPES[cell.grid.dtype]
    try:
        model = _new_model(cell, task, device, n)
        split = _random_split(task, batch, n, device)
        step = TrainingStep(model, task, split, replace(cell.usual, batch=batch), dtype)
        row["step_ms"] = 1e3 * _train_seconds(step)
        row["forward_ms"] = 1e3 * _forward_seconds(_forward(model, split, step.index, dtype), device)
        row["peak_bytes"] = step_bytes(step)
    except (ValueError, RuntimeError, MemoryError) as error:
        row["reason"] = first_line(error)
    return row


def _new_model(cell: Cell, task: ArenaTask, device: torch.device, length: int | None = None) -> ComparedModel:
    torch.manual_seed(cell.seed)
    return build_model(task, cell.mixer, cell.model, length).to(device)


def _random_split(task: ArenaTask, batch: int, n: int, device: torch.device) -> DeviceSplit:
    """Make examples of full length, with a target at every token where the form has targets there."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 2, n) if task.form == "pair" else (batch, n)
    tokens = torch.randint(1, task.vocab, shape, generator=generator)
    classes = task.vocab if task.form == "next" else task.classes
    targets = torch.randint(classes, (batch,) if task.form in ("label", "pair") else (batch, n), generator=generator)
    return DeviceSplit(tokens.to(device), targets.to(device), None, None)


def _train_seconds(step: TrainingStep) -> float:
    """Return the seconds of a training step, behind those that warm up and are captured."""
    index = torch.arange(len(step.index), device=step.device)
    with step.on_stream():
        for _ in range(EAGER_STEPS + 2):
            step(index, 1e-5)
        return plain_time(lambda: step(index, 1e-5), step.device, TIMED)


def step_bytes(step: TrainingStep) -> int | None:
    """Return the most bytes that tensors of one eager training step hold beyond those that were there before it."""
    plain = TrainingStep(step.model, step.task, step.split, _usual_of(step), step.dtype, graphs=False)
    index = torch.arange(len(plain.index), device=plain.device)
    with plain.on_stream():
        for _ in range(2):
            plain(index, 0.0)
        if plain.device.type == "cuda":
            return peak_bytes(lambda: plain(index, 0.0), plain.device)
        return allocated_peak(lambda: plain(index, 0.0))


def _usual_of(step: TrainingStep) -> Any:
    from regard.arena.arena_task import ArenaBudget

    return ArenaBudget(batch=len(step.index), clip=step.clip, weight_decay=0.0)


def allocated_peak(call: Callable[[], Any]) -> int:
    """Return the most bytes that tensors on the host hold during a call, by the events of the allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    results: Any = profiled.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    held = peak = 0
    for _, change in events:
        held += change
        peak = max(peak, held)
    return peak


def _forward(model: ComparedModel, split: DeviceSplit, index: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    model.eval()
    batch = split.rows(index)

    @torch.no_grad()
    def run() -> Tensor:
        with torch.autocast(index.device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return model(batch.tokens, batch.valid, batch.at)

    return run


def _forward_seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds of a forward pass; as a CUDA graph on a GPU where it can be captured."""
    run()
    if device.type == "cuda":
        try:
            return plain_time(captured(run, device, 1).replay, device, TIMED)
        except NotCaptured:
            pass
    return plain_time(run, device, TIMED)


def _why_not_decoded(cell: Cell, model: ComparedModel) -> str:
    if not cell.causal:
        return "the task is not causal: nothing is decoded"
    reason = model.why_not_decoded()
    if reason:
        return reason
    streams = all(Can.STREAM in block.mixer.can for block in model.stack)
    return "" if streams else f"{cell.mixer} does not stream"


@torch.no_grad()
def _decoding(model: ComparedModel, length: int, device: torch.device) -> tuple[dict[str, Any], str]:
    """Return the milliseconds of one token of one sequence behind a prompt, the bytes of its state after all, and a note."""
    model.eval()
    decoder: Any = GraphedDecoder(model, room=length) if device.type == "cuda" else model
    count = min(DECODED, length // 2)
    prompt = torch.ones(1, length - count, dtype=torch.long, device=device)
    token = torch.ones(1, 1, dtype=torch.long, device=device)

    def decode() -> Any:
        state = filled
        for _ in range(count):
            _, state = decoder.extend(state, token)
        return state

    _, filled = decoder.extend(decoder.start(1), prompt)
    decode()
    times = [plain_time(decode, device, TIMED / 2) for _ in range(2)]
    _, state = model.extend(model.start(1), torch.cat([prompt, token.expand(1, count)], 1))
    return {"decode_ms": 1e3 * min(times) / count, "state_bytes": held_bytes(state)}, _refusal(decoder)


def _refusal(decoder: Any) -> str:
    """Return why decoding steps were not captured on a GPU, if they were not."""
    refused = list(getattr(decoder, "refused", {}).values())
    return f"not captured: {refused[0]}" if refused else ""
