"""One decoding step of a layer after t tokens, beside SDPA with a KV cache: eager calls, and a CUDA graph of a static state."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bench.backend_log import backends_of
from regard.bench.machine import Rates
from regard.bench.peers import FULL
from regard.bench.speed import FAILURES, OURS, Measured, count_launches, failure_text
from regard.bench.timing import ROUNDS, NotCaptured, captured, first_line, peak_bytes, plain_time, seconds
from regard.bench.workload import LAYER, Setting, build_mixer, spec_text
from regard.mixers.base import Mixer
from regard.mixers.kv_cache import KVCache
from regard.mixers.places import positions_below
from regard.runtime.state_buffers import StateBuffers, all_caches
from regard.spec import Spec

STEP = "decoding step"
STEP_ROOM = 1024  # slots of a cache beyond the prompt: at most so many steps are timed
PREFILLED = 1024  # tokens of a prompt at a time
UNROLLED_STEPS = 8  # in one CUDA graph
REPLAYS = 12  # of such a graph in a timed round: its steps fit into STEP_ROOM


def step_setting(setting: Setting, t: int) -> Setting:
    """The same setting for a layer that holds t tokens and those of the timed steps."""
    longer = t + 2 * STEP_ROOM
    return Setting(
        longer, setting.batch, setting.heads, setting.dim, True, setting.device, setting.dtype, setting.backend, setting.seed
    )


@torch.no_grad()
def own_step_row(spec: Spec, setting: Setting, t: int, rates: Rates, budget: float, graphs: bool) -> Measured:
    """Measure one step of a layer of the catalogue after t tokens."""
    row = _step_row(OURS, spec_text(spec), setting, t)
    try:
        longer = step_setting(setting, t)
        mixer = build_mixer(spec, longer).eval()
        state, token = _prefilled(mixer, longer, t)
        row["state_bytes"] = held_bytes(state)
        row["backends"] = backends_of(lambda: mixer.extend(state, token))
        row |= _eager_steps(mixer, state, token, budget)
        if setting.device == "cuda" and graphs:
            row |= _graphed_steps(mixer, state, token, t)
        weights = sum(p.numel() * p.element_size() for p in mixer.parameters())
        row |= _step_floor(row, weights + moved_bytes(state), rates)
    except FAILURES as error:
        row["reason"] = failure_text(error)
    return row


@torch.no_grad()
def full_step_row(setting: Setting, t: int, rates: Rates, budget: float, graphs: bool) -> Measured:
    """Measure one step of a layer of SDPA over t keys and values that lie in a cache of fixed room."""
    row = _step_row(FULL, "softmax", setting, t)
    try:
        layer = CachedSDPA(setting, t).to(setting.torch_device, setting.torch_dtype)
        token = _token(setting)
        row["state_bytes"] = 2 * layer.k.numel() * layer.k.element_size()
        row |= _timed_step(lambda: layer(token), setting.torch_device, budget)
        if setting.device == "cuda" and graphs:
            row |= _graphed_call(lambda: layer(token), setting.torch_device, budget)
        weights = sum(p.numel() * p.element_size() for p in layer.parameters())
        row |= _step_floor(row, weights + row["state_bytes"], rates)
    except FAILURES as error:
        row["reason"] = failure_text(error)
    return row


def held_bytes(state: Any) -> int:
    """Count the bytes of a state, without the spare room of its caches."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, KVCache):
        return held_bytes(state.keys) + held_bytes(state.values)
    return sum(held_bytes(part) for part in state) if isinstance(state, tuple) else 0


def moved_bytes(state: Any) -> int:
    """Count the bytes that a step reads and writes: a cache is read, anything else is read and written."""
    caches = sum(held_bytes(cache) for cache, _ in all_caches(state))
    return 2 * held_bytes(state) - caches


class CachedSDPA(nn.Module):
    """A layer of softmax attention that writes its token behind t others and reads all of them: the least work there is."""

    def __init__(self, setting: Setting, t: int) -> None:
        super().__init__()
        width = setting.width
        self.heads, self.t = setting.heads, t
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        shape = (setting.batch, setting.heads, t + 1, setting.dim)
        self.k: Tensor
        self.v: Tensor
        self.register_buffer("k", torch.randn(shape, device=setting.torch_device, dtype=setting.torch_dtype))
        self.register_buffer("v", torch.randn(shape, device=setting.torch_device, dtype=setting.torch_dtype))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        self.k[:, :, self.t :].copy_(k)
        self.v[:, :, self.t :].copy_(v)
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.out(y.transpose(1, 2).flatten(2))


def _step_row(by: str, spec: str, setting: Setting, t: int) -> Measured:
    return {"by": by, "spec": spec, "causal": True, "level": LAYER, "pass": STEP, "n": t, "batch": setting.batch}


def _token(setting: Setting) -> Tensor:
    torch.manual_seed(setting.seed + 1)
    return torch.randn(setting.batch, 1, setting.width, device=setting.torch_device).to(setting.torch_dtype)


def _prefilled(mixer: Mixer, setting: Setting, t: int) -> tuple[Any, Tensor]:
    """The state of a layer after t random tokens, PREFILLED at a time, and one more token (b 1 w)."""
    state = mixer.start(setting.batch)
    torch.manual_seed(setting.seed)
    for low in range(0, t, PREFILLED):
        size = min(PREFILLED, t - low)
        x = torch.randn(setting.batch, size, setting.width, device=setting.torch_device)
        _, state = mixer.extend(state, x.to(setting.torch_dtype))
    return state, _token(setting)


def _eager_steps(mixer: Mixer, state: Any, token: Tensor, budget: float) -> Measured:
    """Steps that follow each other, each from the state that the step before has left."""
    kept = [state]

    def step() -> None:
        kept[0] = mixer.extend(kept[0], token)[1]

    return _timed_step(step, token.device, budget)


def _timed_step(step: Callable[[], Any], device: torch.device, budget: float) -> Measured:
    first = seconds(step, device)
    step()
    peak = peak_bytes(step, device)
    once = plain_time(step, device, budget)
    row = {"first_seconds": first, "peak_bytes": peak, "ms": 1e3 * once}
    return row | count_launches(step, device)


def _graphed_call(step: Callable[[], Any], device: torch.device, budget: float) -> Measured:
    try:
        graph = captured(step, device, UNROLLED_STEPS)
    except NotCaptured as error:
        return {"graph_reason": str(error)}
    return {"graph_ms": 1e3 * plain_time(graph.replay, device, budget) / UNROLLED_STEPS}


def _graphed_steps(mixer: Mixer, state: Any, token: Tensor, t: int) -> Measured:
    """The time of a step in a CUDA graph of several, whose state lies in buffers; or why there is none."""
    buffers = StateBuffers(state, lambda size: size + STEP_ROOM)
    bound = t + STEP_ROOM

    def extended() -> Any:
        buffers.begin()
        with positions_below(bound):
            return mixer.extend(buffers.state, token)[1]

    try:
        if why := buffers.why_not_static(extended()):
            return {"graph_reason": why}
        buffers.load(state)
        graph = captured(lambda: buffers.store(extended()), token.device, UNROLLED_STEPS)
    except FAILURES as error:
        return {"graph_reason": first_line(error)}

    def replays() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    found = []
    for _ in range(ROUNDS):
        buffers.load(state)
        found.append(seconds(replays, token.device))
    return {"graph_ms": 1e3 * statistics.median(found) / (REPLAYS * UNROLLED_STEPS)}


def _step_floor(row: Measured, moved: float, rates: Rates) -> Measured:
    """The time to move so many bytes: weights and caches are read, other states read and written."""
    least = 1e3 * moved / rates.bytes
    ms = row.get("graph_ms") or row["ms"]
    return {"floor_ms": least, "floor_of": "bytes", "fraction": least / ms}
