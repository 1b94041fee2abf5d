"""Triton kernels of linear attention on a GPU: errors, repetition and times.

PYTHONPATH=src python benchmarks/kernels_linear.py [--check] [--time] [--json FILE]     without a flag: --check --time

--check   results and gradients against the torch backend in float64, |a - b| / |b|; 20 repetitions must be equal bit by bit
--time    CUDA-graph times beside SDPA, the torch backend and flash-linear-attention, and the time of every kernel
A failure of one configuration is a row with its reason. Kernels are compiled by several processes at once.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.backend import choose_backend
from regard.ops.linear.linear_op import LinearCall, ReadCall

WORKERS = 14
TOKENS, HEADS, SIZE = 32768, 8, 64
LENGTHS = (4096, 16384, 65536)
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


class Shape(NamedTuple):
    b: int
    h: int
    g: int
    n: int
    f: int
    e: int
    decay: int = 0  # 0, 1, or f
    feature: str = "elu"
    norm: str = "divided"  # "none", "given" or "divided"
    valid: bool = False
    dtype: torch.dtype = torch.bfloat16
    root: float = 0.0  # above 0: decays are gates
    gain: bool = False


def check_shapes() -> list[Shape]:
    tenth, full = torch.float16, torch.float32
    return [
        Shape(2, 4, 2, 777, 64, 64, valid=True),
        Shape(1, 2, 2, 1000, 64, 64, dtype=tenth),
        Shape(1, 2, 1, 500, 64, 64, dtype=full, valid=True),
        Shape(2, 8, 2, 777, 64, 64, 1, "identity", "none"),
        Shape(1, 2, 1, 600, 64, 64, 1, "identity", "given"),
        Shape(1, 2, 1, 300, 64, 64, 1, "identity", "none", dtype=full),
        Shape(1, 2, 1, 300, 64, 64, 1, "identity", "none", dtype=tenth),
        Shape(2, 4, 2, 333, 64, 64, 64, "identity", "none"),
        Shape(1, 2, 1, 200, 64, 64, 64, "identity", "none", dtype=full),
        Shape(1, 2, 1, 200, 64, 64, 64, "elu", "divided", dtype=tenth),
        Shape(1, 2, 1, 300, 16, 32),
        Shape(1, 2, 1, 300, 32, 16, 1, "identity", "none"),
        Shape(1, 2, 1, 200, 32, 32, 32, "identity", "none"),
        Shape(1, 2, 1, 700, 128, 128),
        Shape(1, 2, 1, 700, 128, 64, 1, "relu", "divided"),
        Shape(1, 2, 1, 200, 128, 128, 128, "identity", "none"),
        Shape(1, 2, 1, 300, 128, 128, dtype=full),
        Shape(1, 2, 1, 500, 256, 64),
        Shape(1, 2, 1, 300, 256, 256, 1, "identity", "given"),
        Shape(1, 2, 1, 300, 64, 256),
        Shape(1, 1, 1, 100, 256, 256, dtype=full),
        Shape(2, 4, 2, 333, 64, 64, 1, "identity", "none", root=16.0, gain=True, valid=True),
        Shape(2, 4, 2, 333, 64, 64, 64, "identity", "none", root=16.0, valid=True),
        Shape(8, 8, 4, 1, 64, 64),
        Shape(8, 8, 4, 1, 64, 64, 1, "identity", "none"),
        Shape(1, 8, 8, 16384, 64, 64),
    ]


def tensors(shape: Shape, device: str = "cuda") -> list[Tensor | None]:
    """q, k, v, state, log_decay, norm_state and valid in float64, from rounded numbers; heads lie as a layer splits them."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32)

    def tokens(heads: int, size: int) -> Tensor:
        return draw(shape.b, shape.n, heads, size).to(shape.dtype).transpose(1, 2)

    q, k, v = tokens(shape.h, shape.f), tokens(shape.g, shape.f), tokens(shape.g, shape.e)
    state = 0.1 * draw(shape.b, shape.g, shape.f, shape.e)
    norm_state = None if shape.norm == "none" else draw(shape.b, shape.g, shape.f).abs()
    decay = -0.2 * draw(shape.b, shape.g, shape.n, shape.decay).abs() if shape.decay else None
    valid = torch.rand(shape.b, shape.n, generator=generator, device=device) > 0.3 if shape.valid else None
    return [
        None if x is None else (x if x.dtype == torch.bool else x.double()) for x in (q, k, v, state, decay, norm_state, valid)
    ]


def gain_of(shape: Shape) -> Tensor | None:
    """Factors of the outputs."""
    if not shape.gain:
        return None
    return torch.linspace(0.5, 1.5, shape.n, device="cuda").expand(shape.b, shape.g, shape.n).unsqueeze(-1)


def passes(shape: Shape, given: list[Tensor | None], backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of one pass; inputs in `dtype`, states and decays in float32 or better."""
    wide = torch.promote_types(dtype, torch.float32)
    cast = [dtype] * 3 + [wide] * 3
    *numbers, valid = given
    inputs = [None if x is None else x.to(to).requires_grad_() for x, to in zip(numbers, cast, strict=True)]
    call = LinearCall(*inputs, valid, shape.feature, 0.5, shape.norm == "divided", gain_of(shape), shape.root)  # type: ignore[arg-type]
    results = [y for y in choose_backend("linear", backend, call).forward(call) if y is not None]
    generator = torch.Generator("cuda").manual_seed(1)
    up = [torch.randn(y.shape, generator=generator, device="cuda").to(y.dtype) for y in results]
    variables = [x for x in inputs if x is not None]
    return [y.detach() for y in results] + list(torch.autograd.grad(results, variables, up))


def names(shape: Shape) -> list[str]:
    with_norm = shape.norm != "none"
    results = ["out", "state", *(["norm"] if shape.norm == "given" else []), *(["norm_state"] if with_norm else [])]
    grads = ["dq", "dk", "dv", "dstate", *(["ddecay"] if shape.decay else []), *(["dnorm_state"] if with_norm else [])]
    return [*results, *grads]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def checked(shape: Shape, repeats: int = 20) -> dict[str, Any]:
    """The errors of one shape, and whether repetitions are equal."""
    row: dict[str, Any] = {"shape": str(tuple(shape))}
    try:
        given = tensors(shape)
        found = passes(shape, given, "triton", shape.dtype)
        exact = passes(shape, given, "torch", torch.float64)
        row["errors"] = {name: distance(a, b) for name, a, b in zip(names(shape), found, exact, strict=True)}
        row["largest"] = max(row["errors"].values())
        row["fine"] = row["largest"] < BOUNDS[shape.dtype]
        again = [passes(shape, given, "triton", shape.dtype) for _ in range(repeats)]
        row["repeats"] = all(torch.equal(a, b) for other in again for a, b in zip(found, other, strict=True))
    except Exception as error:  # noqa: BLE001 - one configuration that fails is a row
        row["failed"] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        row["where"] = traceback.format_exc().strip().splitlines()[-3:]
    return row


def show_check(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(row["shape"], "FAILED", row["failed"], row["where"], flush=True)
        return
    each = " ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
    marks = ("ok" if row["fine"] else "TOO FAR") + ("" if row["repeats"] else " NOT EQUAL IN REPETITION")
    print(row["shape"], marks, each, flush=True)


# Times


def graph_time(f: Callable[[], Any]) -> float:
    import triton.testing

    f()
    torch.cuda.synchronize()
    return triton.testing.do_bench_cudagraph(f, rep=40)


def kernel_times(f: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Microseconds of every kernel of f."""
    f()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            f()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        found[event.key[:40]] = event.device_time_total / repeats
    return found


def training(shape: Shape, backend: str = "triton") -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward pass, and a forward and backward pass, as a layer calls them: gradients of q, k, v and gates."""
    q, k, v, state, decay, norm_state, _ = tensors(shape)
    half = [x.to(shape.dtype).requires_grad_() for x in (q, k, v)]  # type: ignore[union-attr]
    decay = None if decay is None else decay.float()
    first = [torch.zeros_like(x, dtype=torch.float32) if x is not None else None for x in (state, norm_state)]
    options = (shape.feature, 0.5, shape.norm == "divided", gain_of(shape), shape.root)
    if decay is not None and shape.root:  # gates are learned, the decays of retention are constants
        decay = decay.to(shape.dtype).requires_grad_()
    call = LinearCall(*half, first[0], decay, first[1], None, *options)  # type: ignore[arg-type]
    chosen = choose_backend("linear", backend, call)
    up = torch.randn_like(half[2].detach().new_empty(shape.b, shape.n, shape.h, shape.e)).transpose(1, 2)
    variables = [*half, *([decay] if decay is not None and shape.root else [])]

    def forward() -> Any:
        with torch.no_grad():
            return chosen.forward(call)

    return forward, lambda: torch.autograd.grad(chosen.forward(call).out, variables, up)


def batch_of(n: int) -> int:
    return max(1, TOKENS // n)


def timed_shapes() -> dict[str, Shape]:
    made = {}
    for n in LENGTHS:
        b = batch_of(n)
        made[f"linear {n}"] = Shape(b, HEADS, HEADS, n, SIZE, SIZE)
        made[f"retention {n}"] = Shape(b, HEADS, HEADS, n, SIZE, SIZE, 1, "identity", "none", gain=True)
        made[f"gla {n}"] = Shape(b, HEADS, HEADS, n, SIZE, SIZE, SIZE, "identity", "none", root=16.0)
    n = LENGTHS[0]
    made[f"performer {n}"] = Shape(batch_of(n), HEADS, HEADS, n, 256, SIZE, 1, "identity", "divided")
    made[f"head 128 {n}"] = Shape(batch_of(n), HEADS // 2, HEADS // 2, n, 128, 128)
    made[f"grouped {n}"] = Shape(batch_of(n), HEADS, 2, n, SIZE, SIZE)
    made["decoding 32"] = Shape(32, HEADS, HEADS, 1, SIZE, SIZE)
    return made


def row_of(name: str, forward: Callable[[], Any], both: Callable[[], Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name}
    try:
        row["forward"] = graph_time(forward)
        if both is not None:
            row["both"] = graph_time(both)
    except Exception as error:  # noqa: BLE001
        row["failed"] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
    text = row.get("failed") or " / ".join(f"{row[key]:.3f}" for key in ("forward", "both") if key in row)
    print(f"{name:44s} {text}", flush=True)
    return row


def times(*, profile: bool) -> list[dict[str, Any]]:
    rows = []
    for name, shape in timed_shapes().items():
        try:
            forward, both = training(shape)
            row = row_of(f"triton {name}", forward, both if shape.n > 1 else None)
            if profile and shape.n in (1, LENGTHS[0]):
                row["kernels"] = kernel_times(both if shape.n > 1 else forward)
                print("    ", {key: round(value, 1) for key, value in row["kernels"].items() if value > 1}, flush=True)
        except Exception as error:  # noqa: BLE001
            row = {"name": name, "failed": str(error)[-300:]}
            print(name, "FAILED", row["failed"], flush=True)
        rows.append(row)
    rows += bidirectional() + peers()
    return rows


def bidirectional() -> list[dict[str, Any]]:
    """phi(q) (phi(k)^T v) with its norm, beside a copy of as many bytes: 4 tensors."""
    rows = []
    for n in LENGTHS[:2]:
        shape = Shape(batch_of(n), HEADS, HEADS, n, SIZE, SIZE)
        q, k, v, state, _, norm_state, _ = tensors(shape)
        half = [x.to(shape.dtype).requires_grad_() for x in (q, k, v)]  # type: ignore[union-attr]
        first = [torch.zeros_like(x, dtype=torch.float32) for x in (state, norm_state)]  # type: ignore[arg-type]
        up = torch.randn_like(half[0])

        def both_ways(half=half, first=first) -> Tensor:
            written = LinearCall(None, half[1], half[2], first[0], None, first[1], None, "elu")
            chosen = choose_backend("linear", "triton", written)
            s, z = chosen.write(written)
            return chosen.read(ReadCall(half[0], s, z, "elu", 1.0, True))

        def without_grad(f=both_ways) -> Tensor:
            with torch.no_grad():
                return f()

        def trained(f=both_ways, half=half, up=up) -> Any:
            return torch.autograd.grad(f(), half, up)

        rows.append(row_of(f"triton bidirectional {n}", without_grad, trained))
        source = torch.cat([x.detach() for x in half[:2]])
        rows.append(row_of(f"copy of the same bytes {n}", lambda source=source: source.clone(), None))
    return rows


def peers() -> list[dict[str, Any]]:
    rows = []
    shapes = timed_shapes()
    for n in LENGTHS:
        rows.append(_peer(f"SDPA causal {n}", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), n))
    for name in (f"linear {LENGTHS[0]}", f"retention {LENGTHS[0]}", f"gla {LENGTHS[0]}"):
        rows.append(row_of(f"torch backend {name}", *training(shapes[name], "torch")))
    try:
        from fla.ops.gla import chunk_gla
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print("flash-linear-attention is not there:", error)
        return rows
    for n in (LENGTHS[0], LENGTHS[-1]):
        ones = torch.nn.functional.logsigmoid(torch.randn(batch_of(n), n, HEADS, device="cuda"))
        gates = torch.nn.functional.logsigmoid(torch.randn(batch_of(n), n, HEADS, SIZE, device="cuda")) / 16
        gates = gates.to(torch.bfloat16)

        def normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _heads_last(chunk_linear_attn, F.elu(q) + 1, F.elu(k) + 1, v, normalize=True)

        rows.append(_peer(f"fla linear, normalised {n}", normalized, n))
        rows.append(_peer(f"fla simple_gla {n}", lambda q, k, v, g=ones: _heads_last(chunk_simple_gla, q, k, v, g=g), n))
        rows.append(_peer(f"fla gla {n}", lambda q, k, v, g=gates: _heads_last(chunk_gla, q, k, v, g), n))
    return rows


def _heads_last(f: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
    """Call f with (b n h d) and return (b h n d)."""
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    return f(*turned, *more, **options)[0].transpose(1, 2)


def _peer(name: str, f: Callable[..., Tensor], n: int) -> dict[str, Any]:
    x = [torch.randn(batch_of(n), HEADS, n, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    up = torch.randn_like(x[0])

    def forward() -> Any:
        with torch.no_grad():
            return f(*x)

    return row_of(name, forward, lambda: torch.autograd.grad(f(*x), x, up))


def compiled(shape: Shape) -> None:
    """Run one shape in a process of its own, so that its kernels are in the cache on disk. The times show a failure."""
    with suppress(Exception):
        training(shape._replace(b=1, n=256))[1]()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("check", "time", "profile"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.check or options.time):
        options.check = options.time = True
    written: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    started = time.time()
    with get_context("spawn").Pool(WORKERS) as pool:
        if options.check:
            written["check"] = []
            for row in pool.imap(checked, check_shapes()):
                written["check"].append(row)
                show_check(row)
            print(f"checked after {time.time() - started:.0f} s", flush=True)
        if options.time:
            pool.map(compiled, timed_shapes().values(), chunksize=1)
            written["time"] = times(profile=True)
            print(f"timed after {time.time() - started:.0f} s", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
