"""Bucketed attention on a GPU: errors, repeated results, CUDA-graph times and peak memory, beside PyTorch and peers.

    PYTHONPATH=src python benchmarks/kernels_bucket.py            everything, about a minute
    PYTHONPATH=src python benchmarks/kernels_bucket.py --tune     configurations of every kernel instead
    PYTHONPATH=src python benchmarks/kernels_bucket.py --json F   rows into a file as well

Kernels are compiled beforehand by processes of this script, one for each case (--warm), side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard import Dims, attend, core
from regard.ops.bucket import triton as fused
from regard.ops.bucket.bucket_launch import sorted_places
from regard.ops.bucket.bucket_op import BucketCall, bucket_attention, product_labels

TOKENS, HEADS, HEAD = 32768, 8, 64
LENGTHS = (4096, 16384, 65536)
HALF = torch.bfloat16
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("bucket_forward", "bucket_query_grads", "bucket_key_grads")
REFORMER = {"rounds": 4, "buckets": 32, "reach": 128, "causal": True, "own": False, "unit_keys": True, "scale": 1.0}
ROUTING = {"rounds": 1, "buckets": 16, "reach": 128, "causal": True, "own": True, "unit_keys": False, "scale": 0.125}
CASES: dict[str, dict[str, Any]] = {
    "reformer bf16": {**REFORMER},
    "reformer fp16": {**REFORMER, "kind": "fp16"},
    "reformer fp32": {**REFORMER, "kind": "fp32"},
    "routing bf16": {**ROUTING},
    "chunks bf16": {**REFORMER, "causal": False, "reach": 64},
    "dropout bf16": {**REFORMER, "rounds": 2, "dropout": 0.2},
    "grouped, 32 and 128 bf16": {**REFORMER, "rounds": 2, "groups": 4, "d": 32, "e": 128},
    "wide 256 bf16": {**ROUTING, "d": 256, "e": 256},
    "padding bf16": {**REFORMER, "rounds": 2, "padded": True},
}
CANDIDATES = {  # queries and keys of a tile, warps, stages
    "bucket_forward": "64,64,4,2 64,64,4,3 64,32,4,3 128,64,8,2 128,64,4,2 64,128,4,2 128,32,4,3",
    "bucket_query_grads": "64,64,4,2 64,64,4,1 64,32,4,2 64,32,4,3 128,64,8,2 64,64,8,2 128,32,8,2",
    "bucket_key_grads": "64,64,4,2 64,64,4,1 32,64,4,2 32,64,4,3 64,128,8,2 64,64,8,2 32,128,8,2",
}
ROWS: list[dict[str, Any]] = []


def report(**row: Any) -> None:
    ROWS.append(row)
    print(
        "  ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()),
        flush=True,
    )


def attempt(label: str, f: Callable[[], Any]) -> Any:
    """Return f(), or None and a row with the reason."""
    try:
        return f()
    except Exception as error:  # noqa: BLE001 - a failing case is a row
        torch.cuda.synchronize()
        report(what=label, failed=f"{type(error).__name__}: {str(error)[:300]}")
        return None


def make_call(
    n: int,
    b: int,
    *,
    rounds: int,
    kind: str = "bf16",
    groups: int = HEADS,
    d: int = HEAD,
    e: int = HEAD,
    padded: bool = False,
    dropout: float = 0.0,
    **options: Any,
) -> BucketCall:
    """Draw a call with h = HEADS heads on the GPU; labels are of uneven size, as those of a hash are."""
    g = torch.Generator("cuda").manual_seed(n + b)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(b, n, *shape, generator=g, device="cuda")
        return x.to(KINDS[kind]).transpose(1, 2).requires_grad_()

    q, k, v = draw(HEADS, d), draw(groups, d), draw(groups, e)
    chance = torch.rand(options["buckets"], generator=g, device="cuda") + 0.1
    drawn = torch.multinomial(chance, b * HEADS * n * rounds, replacement=True, generator=g)
    labels = drawn.int().view(b, HEADS, n, rounds).transpose(2, 3)
    if padded:
        valid = torch.rand(b, 1, 1, n, generator=g, device="cuda") < 0.9
        labels = labels.masked_fill(~valid, options["buckets"])
    seed = torch.tensor(7, device="cuda") if dropout else None
    return BucketCall(q, k, v, labels, seed, dropout=dropout, **options)


def passes(call: BucketCall, backend: str) -> list[Tensor]:
    out = bucket_attention(call, backend)
    g = torch.Generator("cuda").manual_seed(5)
    up = torch.randn(out.shape, generator=g, device="cuda").to(out.dtype)
    return [out, *torch.autograd.grad(out, call[:3], up)]


def in_double(call: BucketCall) -> BucketCall:
    q, k, v = (x.detach().double().requires_grad_() for x in call[:3])
    return BucketCall(q, k, v, *call[3:])


def errors(found: Sequence[Tensor], true: Sequence[Tensor]) -> str:
    """Relative errors of out, dq, dk, dv by norm, and the largest deviation relative to the largest element."""
    each = []
    for a, b in zip(found, true, strict=True):
        gap = a.double() - b
        each.append(f"{gap.norm() / b.norm():.1e}/{gap.abs().max() / b.abs().max():.1e}")
    return " ".join(each)


def check(name: str) -> None:
    call = make_call(1000, 2, **CASES[name])
    true = passes(in_double(call), "torch")
    ours = passes(call, "triton")
    report(what=f"error {name}", triton=errors(ours, true), torch=errors(passes(call, "torch"), true))


def check_labels() -> None:
    """Report the share of labels that differ from those of float64, by type, and the time of a pass."""
    for kind in KINDS:
        k = torch.randn(8, 4096, HEADS, HEAD, device="cuda").to(KINDS[kind]).transpose(1, 2)
        for other in {kind, "fp32"}:
            x = torch.randn(HEADS, HEAD, 64, device="cuda").to(KINDS[other])
            true = product_labels(k.double(), x.double(), 4, opposite=True, backend="torch")
            row = {}
            for backend in ("triton", "torch"):
                run = lambda backend=backend, x=x, k=k: product_labels(k, x, 4, opposite=True, backend=backend)  # noqa: E731
                row[backend] = float((run() != true).double().mean())
                row[backend + "_ms"] = graph_time(run)
            report(what=f"labels {kind}, directions {other}", **row)


def check_routing(times: int = 20) -> None:
    """Compare bidirectional routing by kernels with PyTorch's, both in half precision and with the same members."""
    found = []
    for backend in ("triton", "torch"):
        made = core("routing", Dims(HEADS * HEAD, HEADS, backend=backend)).cuda().eval()
        g = torch.Generator("cuda").manual_seed(3)
        shapes = [(2, HEADS, 4096, HEAD)] * 3
        q, k, v = (torch.randn(shape, generator=g, device="cuda").to(HALF).requires_grad_() for shape in shapes)

        def run(made: Any = made, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> list[Tensor]:
            out = attend(q, k, v, made)
            return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

        found.append(run())
        equal = all(torch.equal(a, b) for _ in range(times) for a, b in zip(found[-1], run(), strict=True))
        report(what=f"{times} x torch.equal routing bidirectional {backend}", equal=equal)
    report(what="routing bidirectional, triton from torch", apart=errors(found[0], [x.double() for x in found[1]]))


def repeat(name: str, times: int = 20) -> None:
    call = make_call(4096, 8, **CASES[name])
    first = passes(call, "triton")
    equal = all(torch.equal(a, b) for _ in range(times) for a, b in zip(first, passes(call, "triton"), strict=True))
    finite = all(bool(x.isfinite().all()) for x in first)
    report(what=f"{times} x torch.equal {name}", equal=equal, finite=finite)


def graph_time(f: Callable[[], Any], replays: int = 20) -> float:
    """Milliseconds of one replay of a CUDA graph of f."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    graph.replay()
    return event_time(graph.replay, replays)


def event_time(f: Callable[[], Any], times: int = 5) -> float:
    """Milliseconds of one call, launches included."""
    f()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def peak(f: Callable[[], Any]) -> float:
    """Largest memory of one call beyond what was there, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(label: str, forward: Callable[[], Tensor], inputs: Sequence[Tensor], graphs: bool = True) -> None:
    """Report graph (or plain) times and memory of forward, and of forward + backward."""

    def both() -> Any:
        out = forward()
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    def alone() -> Tensor:
        with torch.no_grad():
            return forward()

    clock = graph_time if graphs else event_time
    ms = attempt(label, lambda: (clock(alone), clock(both)))
    if ms is None:
        return
    size = sum(x.numel() * x.element_size() for x in inputs) / 2**20
    mib = peak(both)
    kind = "graph" if graphs else "plain"
    report(what=label, time=kind, forward=ms[0], both=ms[1], plain=event_time(both), peak_mib=mib, times_inputs=mib / size)


def profile(label: str, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    """Report the microseconds of every kernel of forward + backward, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    both()
    torch.cuda.synchronize()
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        both()
        torch.cuda.synchronize()
    spent = sorted(((x.device_time_total, x.count, x.key[:40]) for x in seen.key_averages()), reverse=True)
    kernels = {f"{name} x{count}": round(us, 1) for us, count, name in spent[:16] if us > 0}
    report(what=f"profile {label}", us=kernels)


def tokens(n: int) -> int:
    return max(1, TOKENS // n)


def compare(n: int) -> None:
    """Times at one length: the operation, whole cores, SDPA and peers."""
    b = tokens(n)
    for name in ("reformer bf16", "routing bf16"):
        call = make_call(n, b, **CASES[name])
        measure(f"n={n} operation {name} triton", lambda call=call: bucket_attention(call, "triton"), call[:3])
        if n == LENGTHS[0]:
            measure(f"n={n} operation {name} torch", lambda call=call: bucket_attention(call, "torch"), call[:3], graphs=False)
            report(what=f"n={n} sort {name}", forward=graph_time(lambda call=call: sorted_places(call)))
    q, _, v = (x.detach().requires_grad_() for x in call[:3])
    for spec in ("reformer", "routing"):
        for causal in (True, False):
            for backend in ("triton", "torch"):
                if (backend == "torch" or not causal) and n != LENGTHS[0]:
                    continue
                made = core(spec, Dims(HEADS * HEAD, HEADS, causal=causal, backend=backend)).cuda().to(HALF).eval()
                label = f"n={n} core {spec} {'causal' if causal else 'bidirectional'} {backend}"
                run = lambda made=made, causal=causal: attend(q, q, v, made, causal=causal)  # noqa: E731
                measure(label, run, (q, v), graphs=backend == "triton")
                if n == LENGTHS[0] and backend == "triton":
                    attempt(label, lambda label=label, run=run: profile(label, run, (q, v)))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    measure(f"n={n} SDPA causal", lambda: sdpa(q, q, v, is_causal=True), (q, v))
    peers(n, q, v)


def peers(n: int, q: Tensor, v: Tensor) -> None:
    b = len(q)

    def reformer() -> None:
        from reformer_pytorch import LSHAttention

        peer = LSHAttention(bucket_size=64, n_hashes=4, causal=True, dropout=0.0).cuda().eval()
        rows = [x.detach().reshape(b * HEADS, n, HEAD).requires_grad_() for x in (q, v)]
        measure(f"n={n} reformer-pytorch", lambda: peer(*rows)[0], rows, graphs=False)

    def routing() -> None:
        from routing_transformer.routing_transformer import KmeansAttention

        peer = KmeansAttention(n // 128, 128, HEADS, HEAD, causal=True, shared_qk=True).cuda().to(HALF).eval()
        rows = [x.detach().contiguous().requires_grad_() for x in (q, v)]
        measure(f"n={n} routing-transformer", lambda: peer(rows[0], rows[0], rows[1])[0], rows, graphs=False)

    attempt(f"n={n} reformer-pytorch", reformer)
    attempt(f"n={n} routing-transformer", routing)


def config_of(text: str) -> tuple[str, dict[str, int]]:
    kernel, numbers = text.split(":")
    names = ("BM", "BN", "num_warps", "num_stages")
    return kernel, dict(zip(names, map(int, numbers.split(",")), strict=True))


def with_config(kernel: str, config: dict[str, int]) -> None:
    """Let one kernel use a configuration from now on; the others keep theirs."""
    shipped = fused.kernel_config
    fused.kernel_config = lambda name, key, device: config if name == kernel else shipped(name, key, device)


def warm(case: str, config: str | None) -> None:
    """Compile the kernels of a case."""
    if config:
        with_config(*config_of(config))
    passes(make_call(256, 1, **CASES[case]), "triton")
    torch.cuda.synchronize()


def warm_all(jobs: Sequence[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Compile the kernels of all jobs in processes, 14 at a time; return the reason of each that failed."""
    waiting, running, failed = list(jobs), {}, {}
    while waiting or running:
        while waiting and len(running) < 14:
            job = waiting.pop(0)
            more = ["--config", job[1]] if job[1] else []
            command = [sys.executable, __file__, "--warm", job[0], *more]
            running[job] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for job, process in list(running.items()):
            if process.poll() is not None:
                del running[job]
                if process.returncode:
                    failed[job] = (process.stderr.read() if process.stderr else "").strip()[-200:]
        time.sleep(0.05)
    return failed


def tune(case: str, n: int = 4096) -> None:
    """Report the time of the whole operation with every candidate of every kernel, beside the shipped ones."""
    jobs = [(case, f"{kernel}:{numbers}") for kernel in KERNELS for numbers in CANDIDATES[kernel].split()]
    failed = warm_all(jobs)
    call = make_call(n, tokens(n), **CASES[case])
    shipped, true = fused.kernel_config, passes(call, "triton")

    def both() -> Any:
        out = bucket_attention(call, "triton")
        return torch.autograd.grad(out, call[:3], torch.ones_like(out))

    def alone() -> Tensor:
        with torch.no_grad():
            return bucket_attention(call, "triton")

    report(what=f"tune {case} shipped", forward=graph_time(alone), both=graph_time(both))
    for _, text in jobs:
        if (case, text) in failed:
            report(what=f"tune {case} {text}", failed=failed[case, text].replace("\n", " "))
            continue
        fused.kernel_config = shipped
        with_config(*config_of(text))
        ms = attempt(text, lambda: (graph_time(alone), graph_time(both)))
        found = attempt(text, lambda: passes(call, "triton"))
        if ms is None or found is None:
            continue
        equal = all(torch.equal(a, b) for _ in range(5) for a, b in zip(found, passes(call, "triton"), strict=True))
        report(
            what=f"tune {case} {text}", forward=ms[0], both=ms[1], apart=errors(found, [x.double() for x in true]), equal=equal
        )
    fused.kernel_config = shipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", nargs="?", const="reformer bf16", choices=list(CASES))
    parser.add_argument("--warm", choices=list(CASES))
    parser.add_argument("--config")
    parser.add_argument("--json")
    given = parser.parse_args()
    start = time.time()
    if given.warm:
        warm(given.warm, given.config)
        return
    if given.tune:
        tune(given.tune)
    else:
        for (case, _), why in warm_all([(case, None) for case in CASES]).items():
            report(what=f"compile {case}", failed=why.replace("\n", " "))
        report(what="compiled", seconds=time.time() - start)
        for case in CASES:
            attempt(f"error {case}", lambda case=case: check(case))
        attempt("labels", check_labels)
        attempt("routing", check_routing)
        for case in ("reformer bf16", "routing bf16", "chunks bf16", "dropout bf16"):
            attempt(f"repeat {case}", lambda case=case: repeat(case))
        report(what="checked", seconds=time.time() - start)
        for n in LENGTHS:
            attempt(f"n={n}", lambda n=n: compare(n))
    report(what="done", seconds=time.time() - start, card=torch.cuda.get_device_name())
    if given.json:
        with open(given.json, "w") as file:
            json.dump(ROWS, file, indent=1)


if __name__ == "__main__":
    main()
