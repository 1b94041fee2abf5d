"""The Triton kernels of the delta rule on a GPU: errors against float64, repeated calls, times beside peers.

    PYTHONPATH=src python benchmarks/kernels_delta.py

Times are CUDA-graph times in ms, bf16, 8 heads x 64, 32,768 tokens in all (65,536 at n = 65,536).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.delta.delta_op import delta_rule

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES: list[tuple[Any, ...]] = [  # b h g n f e gated, and the share of all keys that is the same
    (2, 4, 4, 300, 64, 64, False),
    (1, 4, 2, 1000, 64, 64, True),
    (1, 2, 2, 4160, 64, 64, False),
    (2, 2, 1, 130, 16, 24, True),
    (1, 2, 2, 257, 32, 96, False),
    (1, 2, 2, 500, 128, 128, True),
    (1, 2, 2, 600, 64, 64, False, 0.9),
]
START = time.time()


def note(*words: Any) -> None:
    print(f"{time.time() - START:6.1f}", *words, flush=True)


def attempt(name: str, f: Callable[[], Any]) -> Any:
    """Print a failure as a row with its reason."""
    try:
        return f()
    except Exception as error:  # noqa: BLE001 - any failure is a result
        note(name, "FAILED", type(error).__name__, str(error).strip().splitlines()[-1][:160] if str(error).strip() else "")
        return None


def graph_ms(f: Callable[[], Any], rep: int = 30) -> float:
    import triton.testing

    f()
    torch.cuda.synchronize()
    return triton.testing.do_bench_cudagraph(f, rep=rep)


def random_call(dtype: torch.dtype, b: int, h: int, g: int, n: int, f: int, e: int, gated: bool, alike: float = 0.0) -> list[Any]:
    """Tensors of a call and upstream gradients; alike: the share of all keys that is the same."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    k = F.normalize((1 - alike) * normal(b, g, n, f) + alike * normal(1, 1, 1, f), dim=-1)
    decay = -0.1 * torch.rand(b, g, n, 1, device="cuda") if gated else None
    x = [normal(b, h, n, f), k, normal(b, g, n, e), torch.rand(b, g, n, 1, device="cuda"), normal(b, g, f, e), decay]
    x = [None if y is None else y.to(dtype) for y in x]
    x[4] = x[4].float()
    return [*x, normal(b, h, n, e).to(dtype), normal(b, g, f, e)]


def results(call: list[Any], backend: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, the state and all gradients."""
    *x, d_out, d_state = [y if y is None or dtype is None else y.to(dtype) for y in call]
    x = [None if y is None else y.detach().clone().requires_grad_() for y in x]
    out, state = delta_rule(*x[:5], log_decay=x[5], backend=backend)
    grads = torch.autograd.grad((out, state), [y for y in x if y is not None], (d_out, d_state))
    return [out.detach(), state.detach(), *grads]


def errors(call: list[Any], backend: str, exact: list[Tensor], dtype: torch.dtype | None = None) -> tuple[str, float]:
    """Relative errors, each as text, and the largest."""
    found = results(call, backend, dtype)
    each = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]
    return " ".join(f"{x:.1e}" for x in each), max(each)


def repeated(call: list[Any], times: int = 20) -> bool:
    first = results(call, "triton")
    return all(torch.equal(x, y) for _ in range(times) for x, y in zip(first, results(call, "triton"), strict=True))


def check(kind: str, number: int) -> None:
    """Print the errors of one shape, and whether twenty calls are equal."""
    own = SHAPES[number]

    def row() -> None:
        call = random_call(TYPES[kind], *own)
        exact = results(call, "torch", torch.float64)
        text, worst = errors(call, "triton", exact)
        plain = errors(call, "torch", exact, torch.float32)[0] if kind == "fp32" else ""
        wrong = "" if worst < {"fp32": 2e-5}.get(kind, 3e-2) else "WRONG"
        equal = "" if repeated(call) else "two calls DIFFER"
        note(kind, own, "errors", text, wrong, equal, plain and f"| torch {plain}")

    attempt(f"{kind} {own}", row)


def kernel_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(1, device="cuda").expand(*k.shape[:2], k.shape[-1], v.shape[-1])
    return delta_rule(q, k, v, beta, state, backend="triton")[0]


def full_attention(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def peer(n: int) -> None:
    """Print the times of flash-linear-attention, which gets its own order of dimensions, (b n h ...)."""
    from fla.ops.delta_rule import chunk_delta_rule

    one, both = times("fla", lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta, scale=1.0)[0], n)
    note(n, "fla", f"{one:.3f} / {both:.3f}")


def times(name: str, f: Callable[..., Tensor], n: int) -> tuple[float, float]:
    b = max(1, 32768 // n)
    q, k, v, beta, _, _, d_out, _ = random_call(torch.bfloat16, b, 8, 8, n, 64, 64, False)
    x = [q, k, v, beta, d_out]
    if name == "fla":
        x = [y.transpose(1, 2).contiguous() for y in x]
        x[3] = x[3].squeeze(-1)
    *x, d_out = x
    with torch.no_grad():
        forward = graph_ms(lambda: f(*x))
    own = [y.requires_grad_() for y in x]
    return forward, graph_ms(lambda: torch.autograd.grad(f(*own), own, d_out, allow_unused=True))


def kernels(n: int) -> None:
    """Print the time of every kernel of one forward and backward pass."""
    from torch.profiler import ProfilerActivity, profile

    b = max(1, 32768 // n)
    call = random_call(torch.bfloat16, b, 8, 8, n, 64, 64, False)
    results(call, "triton")
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(5):
            results(call, "triton")
        torch.cuda.synchronize()
    rows = [(x.key, x.self_device_time_total / x.count, x.count / 5) for x in prof.key_averages() if x.key.startswith("delta_")]
    note(n, "kernels (us x calls):", ", ".join(f"{name} {us:.0f} x {count:.0f}" for name, us, count in rows))


def peak_memory(n: int) -> str:
    b = max(1, 32768 // n)
    call = random_call(torch.bfloat16, b, 8, 8, n, 64, 64, False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(call, "triton")
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB above its inputs"


def speed() -> None:
    for n in (4096, 16384, 65536):
        for name, f in (("triton", kernel_rule), ("SDPA", full_attention)):
            both = attempt(f"{name} {n}", lambda name=name, f=f, n=n: times(name, f, n))
            if both is not None:
                note(n, name, f"{both[0]:.3f} / {both[1]:.3f}")
        attempt(f"kernels {n}", lambda n=n: kernels(n))
        note(n, "peak", attempt("memory", lambda n=n: peak_memory(n)))


def parallel(*commands: list[str]) -> None:
    """Run this script with these arguments, all at the same time, for a minute at most."""
    jobs = [subprocess.Popen([sys.executable, __file__, *command]) for command in commands]
    end = time.time() + 60
    for job, command in zip(jobs, commands, strict=True):
        try:
            job.wait(timeout=max(end - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            job.kill()
            note(*command, "STOPPED after a minute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs=2, metavar=("TYPE", "SHAPE"), help="one check, in this process")
    if asked := parser.parse_args().check:
        check(asked[0], int(asked[1]))
    else:
        note(torch.cuda.get_device_name(), torch.__version__)
        speed()
        parallel(*(["--check", kind, str(i)] for kind in ("fp32", "bf16", "fp16") for i in range(len(SHAPES))))


if __name__ == "__main__":
    main()
