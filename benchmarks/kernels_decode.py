"""One decoding step by one kernel on a GPU: errors against float64, repeated calls, times beside SDPA over a whole KV cache.

    PYTHONPATH=src python benchmarks/kernels_decode.py

Times are CUDA-graph times in microseconds at position 16,384, bf16, 8 heads x 64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import only_words
from decode_step import built, clocked, stepping
from kernels_delta import TYPES, attempt, graph_ms, note
from regard.decoding import GraphedDecoder
from regard.mixers.base import Dims, Places
from regard.mixers.kv_cache import KVCache, StaticCursor, StaticKVCache
from regard.mixers.pattern_attention import PatternAttention
from regard.ops.backend import AUTO
from regard.ops.decode_step import StepCall, StepWindow, decoding_step
from regard.ops.linear.linear_op import LinearCall
from regard.ops.linear.reference import ReferenceLinear
from regard.ops.linear.triton_step import linear_step
from regard.ops.tile.tile_op import HeadPatterns
from regard.patterns import Pattern

T, HEADS, D = 16384, 8, 64
PATTERN = "Local(256) | Global(first=4)"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def window_call(dtype: torch.dtype, b: int, h: int, g: int, room: int, d: int, e: int, window: StepWindow, t: int) -> StepCall:
    """A cache that holds the positions up to t in its first slots but one, and free slots behind them."""
    free = room // 4
    at = torch.arange(room, device="cuda").expand(b, -1) + (t - room + free + 1)
    at = torch.where(torch.arange(room, device="cuda") < 4, torch.arange(room, device="cuda"), at).contiguous()
    valid = torch.arange(room, device="cuda") < room - free - 1
    slot = torch.full((1,), room - free - 1, device="cuda")
    where = torch.full((b, 1), t, device="cuda")
    k, v = normal(b, g, room, d, dtype=dtype), normal(b, g, room, e, dtype=dtype)
    new = normal(b, g, 1, d, dtype=dtype), normal(b, g, 1, e, dtype=dtype)
    q = normal(b, h, 1, d, dtype=dtype)
    return StepCall(q, k, v, at, valid.expand(b, -1).contiguous(), where, window, d**-0.5, *new, slot)


def exact_window(call: StepCall) -> Tensor:
    """The same in float64."""
    q, k, v, at, valid, where, window, scale, new_k, new_v, slot = call
    k = k.double().index_copy(2, slot, new_k.double())
    v = v.double().index_copy(2, slot, new_v.double())
    at, valid = at.index_copy(1, slot, where), valid.index_fill(1, slot, True)
    gap = where - at
    seen = valid & (gap >= 0) & (((gap <= window.back) & (gap % window.step == 0)) | (at < window.first) | (where < window.rows))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~seen[:, None, None], -torch.inf)
    return scores.softmax(-1) @ v


def check_window(kind: str) -> None:
    for b, h, g, room, d, e, window in (
        (2, 4, 2, 320, 64, 64, StepWindow(255, 1, 4, 4)),
        (1, 8, 8, 500, 32, 96, StepWindow(199, 1, 0, 0)),
        (3, 4, 1, 64, 128, 128, StepWindow(40, 2, 1, 0)),
        (2, 2, 2, 2000, 16, 16, StepWindow(2**62, 1, 0, 0)),
    ):
        call = window_call(TYPES[kind], b, h, g, room, d, e, window, 3000)
        exact = exact_window(call)
        out = decoding_step(call)
        error = ((out.double() - exact).norm() / exact.norm()).item()
        written = torch.equal(call.k.index_select(2, call.slot), call.new_k)
        same = all(torch.equal(out, decoding_step(call)) for _ in range(20))
        wrong = "" if error < (1e-5 if kind == "fp32" else 1e-2) and written and same else "WRONG"
        note(kind, "window", (b, h, g, room, d, e), f"error {error:.1e}", wrong)


def check_linear(kind: str) -> None:
    dtype = TYPES[kind]
    for b, h, g, f, e, decay, norms in ((2, 4, 2, 64, 64, 0, True), (1, 8, 8, 64, 96, 1, False), (2, 2, 1, 128, 128, 128, True)):
        q, k, v = normal(b, h, 1, f, dtype=dtype), normal(b, g, 1, f, dtype=dtype).exp(), normal(b, g, 1, e, dtype=dtype)
        state, sums = normal(b, g, f, e), normal(b, g, f).exp() if norms else None
        decays = -torch.rand(b, g, 1, decay, device="cuda") if decay else None
        call = LinearCall(q, k, v, state, decays, sums)
        r = ReferenceLinear().forward(LinearCall(*(None if x is None else x.double() for x in call[:6])))
        found = linear_step(call)
        pairs = [(x, y) for x, y in zip(found, (r.out, r.state, r.norm, r.norm_state), strict=True) if x is not None]
        errors = [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]
        again = [linear_step(call) for _ in range(20)]
        same = all(x is None or torch.equal(x, y) for other in again for x, y in zip(found, other, strict=True))
        wrong = "" if max(errors) < (1e-5 if kind == "fp32" else 1e-2) and same else "WRONG"
        note(kind, "linear", (b, h, g, f, e, decay), " ".join(f"{x:.1e}" for x in errors), wrong)


def linear_inputs(b: int) -> LinearCall:
    q, k, v = (normal(b, HEADS, 1, D, dtype=torch.bfloat16) for _ in range(3))
    return LinearCall(q, k, v, normal(b, HEADS, D, D), None, normal(b, HEADS, D).exp(), None, "elu", 1.0, True)


def plain_window(b: int) -> Any:
    """The same step without the kernel: what the library computes by PyTorch's operations."""
    call = window_call(torch.bfloat16, b, HEADS, HEADS, 512, D, D, StepWindow(255, 1, 4, 4), T)
    cursor = StaticCursor(call.at, call.valid)
    cursor.slot.copy_(call.slot)
    memory = StaticKVCache.of(call.k, call.v, cursor)
    attention = PatternAttention(HeadPatterns.of(Pattern.parse(PATTERN), HEADS), D**-0.5, True, backend="torch")
    places = Places(call.where, None, None)

    def step() -> Tensor:
        cursor.written = False
        log: KVCache = memory.append(call.new_k, call.new_v, places)
        return attention(log, call.q, places)[0]

    return step


def speed(b: int) -> None:
    found: dict[str, float] = {}

    def timed(name: str, f: Any) -> None:
        ms = attempt(f"{name} b={b}", lambda: graph_ms(f))
        if ms is not None:
            found[name] = 1000 * ms
            note(f"batch {b}", name, f"{1000 * ms:.2f} us")

    with torch.no_grad():
        q = normal(b, HEADS, 1, D, dtype=torch.bfloat16)
        k, v = (normal(b, HEADS, T, D, dtype=torch.bfloat16) for _ in range(2))
        timed("SDPA", lambda: F.scaled_dot_product_attention(q, k, v))
        for room in (320, 512):
            call = window_call(torch.bfloat16, b, HEADS, HEADS, room, D, D, StepWindow(255, 1, 4, 4), T)
            timed(f"window, room {room}", lambda call=call: decoding_step(call))
        attempt("plain", lambda: timed("window by torch, room 512", plain_window(b)))
        own = linear_inputs(b)
        timed("linear", lambda: linear_step(own))
    for name in ("window, room 512", "linear"):
        if name in found and "SDPA" in found:
            note(f"batch {b}", "SDPA :", name, f"{found['SDPA'] / found[name]:.1f}")


def models() -> None:
    """Decode by CUDA graphs with whole models, with and without the kernels."""
    for mixer in ("softmax", PATTERN, "linear", "gla", "delta"):
        for backend in (AUTO, "torch"):

            def row(mixer: str = mixer, backend: str = backend) -> None:
                model = built(mixer, "cuda", "bfloat16")
                for module in model.modules():
                    if isinstance(getattr(module, "dims", None), Dims):
                        module.dims = replace(module.dims, backend=backend)
                decoder = GraphedDecoder(model, room=512)
                ready = stepping(decoder, 32, 64, "cuda")
                clocked(*ready, "cuda")
                seconds, _ = clocked(*ready, "cuda")
                note("6 layers, batch 32", mixer, backend, f"{1e6 * seconds / 64:.0f} us a step", *decoder.refused.values())

            attempt(f"model {mixer} {backend}", row)


def main() -> None:
    only_words(__doc__)
    note(torch.cuda.get_device_name(), torch.__version__)
    for kind in TYPES:
        attempt(f"{kind} window", lambda kind=kind: check_window(kind))
        attempt(f"{kind} linear", lambda kind=kind: check_linear(kind))
    for b in (1, 32):
        speed(b)
    models()


if __name__ == "__main__":
    main()
