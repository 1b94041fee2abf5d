"""Compile kernels for a card that is not there: Triton's interpreter runs Python, and finds no error of types.

python tests/absent_card.py              finds the types of kernels in a few calls, and compiles small ones (a test does this)
python tests/absent_card.py --whole      compiles all calls down to the code of the card, which takes minutes, and prints the
                                         registers and the instructions of a kernel, and what does not fit into its registers

Launches are those of a card: tensors are fake ones on a CUDA device, the target and the configurations those of an H200. A kernel
that does not compile, or whose shared memory is larger than that of the card, is an error.
TRITON_INTERPRET must not be 1: Triton reads it once, when it is imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.ops.delta.delta_launch import delta_chunk_grads, delta_chunks
from regard.ops.delta.delta_op import DeltaCall
from regard.ops.delta.unit_features import _launch as launch_unit
from regard.ops.linear.triton_launch import LinearInputs, launch_forward
from regard.ops.linear.triton_launch_backward import launch_backward

CARD = "NVIDIA H200"
SHARED_MEMORY = 227 * 1024  # bytes of a block on that card
TYPES = torch.float32, torch.bfloat16
DELTA_SIZES = [  # b h g n f e
    (2, 4, 2, 1, 6, 5),  # one token
    (1, 2, 1, 5000, 64, 32),  # in segments
    (1, 3, 3, 70, 128, 128),  # values in more than one block of columns
]
LINEAR_CASES = {
    "gla": {"decay": 64, "gate_root": 16.0},
    "linear": {"norm": True, "feature": "elu"},
    "wide": {"norm": True, "feature": "elu", "f": 128, "e": 128},
    "widest": {"norm": True, "feature": "elu", "f": 256, "e": 256},
    "retention": {"decay": 1},
    "wide gla": {"decay": 128, "gate_root": 16.0, "f": 128, "e": 128},
    "widest gla": {"decay": 256, "gate_root": 16.0, "f": 256, "e": 256},
    "performer": {"norm": True, "decay": 1, "f": 256},
    "single": {"norm": True, "feature": "elu", "dtype": torch.float32},
    "single gla": {"decay": 64, "gate_root": 16.0, "dtype": torch.float32},
}
LINEAR_KERNELS = "linear_sums", "linear_scan", "linear_adjoint", "linear_decay_grads", "linear_step", "exp_"  # small ones
Calls = Iterator[tuple[str, Callable[[], object]]]


def _find_types(src, target, options):
    """Translate a kernel to Triton's first representation: no code of a card is made."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    known = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return src.make_ir(target, known, backend.get_codegen_implementation(known), backend.get_module_map(), context)


def resources(code: bytes) -> str:
    """Return what the code of a kernel uses, by the tools that come with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        used, lines = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    registers, spilled = (re.search(rf"{name}:(\d+)", used) for name in ("REG", "STACK"))
    assert registers and spilled
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/ ", lines, re.MULTILINE))
    return f"{registers[1]} registers, {spilled[1]} bytes beside them, {count} instructions"


def replace_launches(whole: bool) -> list[str]:
    """Compile every kernel that is launched from now on instead of launching it; returns a growing list of their names."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from regard.ops.kernel_launch import KernelLaunch

    launched: list[str] = []
    run, compile_whole = jit.JITFunction.run, compiler.compile

    def compile_one(src, target, options, **more):
        if not whole and not src.fn.__name__.startswith(LINEAR_KERNELS):
            return _find_types(src, target, options)
        made = compile_whole(src, target=target, options=options, **more)
        if made.metadata.shared > SHARED_MEMORY:
            raise MemoryError(f"it needs {made.metadata.shared} bytes of shared memory, a block has {SHARED_MEMORY}")
        if whole:
            print(f"{src.fn.__name__}: {resources(made.asm['cubin'])}", flush=True)  # noqa: T201
        return made

    def compile_only(self, *args, grid, warmup, **kwargs):  # noqa: ARG001
        if not whole and self.__name__.startswith("linear_") and not self.__name__.startswith(LINEAR_KERNELS):
            return None
        launched.append(self.__name__)
        mock = [jit.MockTensor(x.dtype, list(x.shape)) if isinstance(x, Tensor) else x for x in args]
        return run(self, *mock, grid=grid, warmup=True, **kwargs)

    def launch(self, *tensors: Tensor) -> None:
        self.kernel[self.grid](*self._spread(tensors), *self.numbers, **self.constants)

    card = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(get_current_target=lambda: card, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    )
    jit.JITFunction.run, KernelLaunch.__call__, compiler.compile = compile_only, launch, compile_one
    torch.cuda.get_device_name = lambda _: CARD
    return launched


def tokens(b: int, heads: int, n: int, width: int, dtype: torch.dtype) -> Tensor:
    """(b h n d), with the heads of a token side by side."""
    return torch.empty(b, n, heads, width, dtype=dtype, device="cuda").transpose(1, 2)


def delta_calls(whole: bool) -> Calls:
    """The delta rule with and without queries and decays, forward, backward and as one step, and its unit features."""
    from regard.ops.delta.delta_step import delta_step
    from regard.ops.delta.unit_kernels import unit_backward, unit_forward

    few = (DELTA_SIZES[0], TYPES[0], True, True), (DELTA_SIZES[0], TYPES[0], False, False), (DELTA_SIZES[1], TYPES[1], True, True)
    for size, dtype, queries, decays in product(DELTA_SIZES, TYPES, (True, False), (True, False)) if whole else few:
        b, h, g, n, f, e = size
        beta, state = torch.empty(b, g, n, 1, device="cuda"), torch.empty(b, g, f, e, device="cuda")
        q, decay = tokens(b, h, n, f, dtype) if queries else None, torch.empty_like(beta) if decays else None
        call = DeltaCall(q, tokens(b, g, n, f, dtype), tokens(b, g, n, e, dtype), beta, state, decay)

        def both_ways(call=call) -> None:
            out, after, saved = delta_chunks(call)
            delta_chunk_grads(call, saved, out, after)

        text = f"{size} {dtype}, queries: {queries}, decays: {decays}"
        yield f"chunks of {text}", both_ways
        if n == 1:
            yield f"a step of {text}", lambda call=call: delta_step(call)
    x = torch.empty(2, 3, 70, 6, device="cuda")
    for silu in (False, True):
        yield f"unit features, silu: {silu}", lambda silu=silu: launch_unit(unit_forward, x, (x, x), silu)
        yield f"their gradients, silu: {silu}", lambda silu=silu: launch_unit(unit_backward, x, (x, x, x), silu)


def linear_both_ways(
    f: int = 64, e: int = 64, decay: int = 0, norm: bool = False, feature: str = "identity",
    gate_root: float = 0.0, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Launch all kernels of a forward and a backward pass."""
    log_decay = tokens(2, 2, 600, decay, dtype if gate_root else torch.float32) if decay else None
    state = torch.empty(2, 2, f, e, device="cuda")
    norms = torch.empty(2, 2, f, device="cuda") if norm else None
    q, k, v = (tokens(2, heads, 600, width, dtype) for heads, width in ((4, f), (2, f), (2, e)))
    inputs = LinearInputs(q, k, v, state, log_decay, norms, None, feature, 0.5, norm, None, gate_root)
    out, _, _, _, kept = launch_forward(inputs, keep=True)
    launch_backward(inputs, kept, torch.empty_like(out), None, None, None, decay_grad=gate_root > 0)


def one_step(
    f: int = 64, e: int = 64, decay: int = 0, norm: bool = False, feature: str = "identity",
    gate_root: float = 0.0, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Launch the kernel of a decoding step, with padding."""
    from regard.ops.linear.linear_op import LinearCall
    from regard.ops.linear.triton_step import linear_step

    decays = tokens(2, 2, 1, decay, dtype if gate_root else torch.float32) if decay else None
    norms, valid = torch.empty(2, 2, f, device="cuda") if norm else None, torch.empty(2, 1, dtype=torch.bool, device="cuda")
    q, k, v = (tokens(2, heads, 1, width, dtype) for heads, width in ((4, f), (2, f), (2, e)))
    state = torch.empty(2, 2, f, e, device="cuda")
    linear_step(LinearCall(q, k, v, state, decays, norms, valid, feature, 0.5, norm, gate_root=gate_root))


def exp_features() -> None:
    """Launch the kernels of random features."""
    from regard.ops.linear.exp_feature_op import ExpMap, exp_key_features, exp_query_features

    by = ExpMap(torch.empty(256, 64, device="cuda"), torch.empty(2, device="cuda"))
    exp_key_features(tokens(2, 2, 600, 64, torch.bfloat16), by, torch.empty(2, 2, 1, device="cuda"), None)
    exp_query_features(tokens(2, 4, 600, 64, torch.bfloat16), by)


def linear_calls(whole: bool) -> Calls:
    """Linear attention with and without a norm and decays, forward and backward, and random features."""
    for name in LINEAR_CASES if whole else ("gla",):
        yield f"linear attention: {name}", lambda name=name: linear_both_ways(**LINEAR_CASES[name])
        yield f"a step of linear attention: {name}", lambda name=name: one_step(**LINEAR_CASES[name])
    yield "random features", exp_features


def noncausal_both_ways(feature: str, d: int = 64, dtype: torch.dtype = torch.bfloat16, bounded: bool = True) -> None:
    """Launch all kernels of attention in which every query sees all keys, with padding."""
    from regard.ops.linear.noncausal_launch import NoncausalInputs, launch_noncausal, launch_noncausal_grads

    q, k, v = tokens(2, 4, 600, d, dtype), tokens(2, 2, 500, d, dtype), tokens(2, 2, 500, d, dtype)
    directions = torch.empty(4 * d, d, device="cuda") if feature == "random" else None
    log_norm = torch.empty(2, device="cuda") if feature == "random" and bounded else None
    valid = torch.empty(2, 500, dtype=torch.bool, device="cuda")
    inputs = NoncausalInputs(q, k, v, valid, directions, log_norm, feature)
    out, kept = launch_noncausal(inputs)
    launch_noncausal_grads(inputs, kept, out, torch.empty_like(out))


def noncausal_calls(whole: bool) -> Calls:
    """Attention without an order by all kinds of features, in all types and two widths."""
    widths = (64, TYPES[0]), (64, TYPES[1]), (128, TYPES[1])
    every = [(name, *width) for width in widths for name in ("elu", "softmax", "random")]
    for name, d, dtype in every if whole else [("softmax", 64, TYPES[1]), ("random", 64, TYPES[1])]:
        yield f"no order: {name} {d} {dtype}", lambda name=name, d=d, dtype=dtype: noncausal_both_ways(name, d, dtype)
    if whole:
        yield "no order: float16", lambda: noncausal_both_ways("random", 64, torch.float16, bounded=False)


def causal_exp_both_ways(d: int = 64, dtype: torch.dtype = torch.bfloat16, h: int = 4) -> None:
    """Launch all kernels of causal attention by random features, with padding and a state."""
    from regard.ops.linear.causal_exp_launch import ExpState, causal_inputs, launch_causal_exp, launch_causal_exp_grads

    q, k, v = tokens(2, h, 600, d, dtype), tokens(2, 2, 600, d, dtype), tokens(2, 2, 600, d, dtype)
    directions, log_norm = torch.empty(4 * d, d, device="cuda"), torch.empty(2, device="cuda")
    valid = torch.empty(2, 600, dtype=torch.bool, device="cuda")
    inputs = causal_inputs(q, k, v, valid, directions, log_norm)
    state = ExpState(*(torch.empty(2, 2, *size, device="cuda") for size in ((4 * d, d), (4 * d,), (1,))))
    out, last, kept = launch_causal_exp(inputs, state)
    launch_causal_exp_grads(inputs, kept, out, torch.empty_like(out), last[:2])


def causal_exp_calls(whole: bool) -> Calls:
    """Causal attention by random features, in all types and two widths."""
    every = (64, TYPES[1], 2), (64, TYPES[1], 4), (128, TYPES[1], 4), (64, TYPES[0], 4), (64, torch.float16, 4)
    for d, dtype, h in every if whole else [(64, TYPES[1], 4)]:
        yield f"causal random features: {d} {dtype} {h}", lambda d=d, dtype=dtype, h=h: causal_exp_both_ways(d, dtype, h)


def mixed_both_ways(c: int, d: int, e: int, dtype: torch.dtype) -> None:
    """Launch the kernels that mix blocks where they lie, and those of their gradients."""
    from regard.ops.mix_blocks import add_mixed, key_and_value_products, mix_keys_and_values
    from regard.ops.two_blocks import _mixing_key

    k, v = (tokens(2, 4, c * 48, width, dtype).unflatten(2, (c, 48)) for width in (d, e))
    k2, v2, dk, dv = k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(k), torch.empty_like(v)
    key, weights = _mixing_key(k, v), k.new_empty(8, c, c)
    mix_keys_and_values(key, weights, k, v, k2, v2)
    key_and_value_products(key, k, v, k2, v2)
    add_mixed(key, weights, (k, v), dk, dv, k2, v2)


def mixed_calls(whole: bool) -> Calls:
    """Blocks that are mixed, few and many, keys and values in one launch and in two, in all types."""
    sizes = (64, 64, 64), (37, 64, 48), (1000, 64, 64), (100, 40, 5)
    for size, dtype in product(sizes, TYPES) if whole else [((64, 64, 64), TYPES[1])]:
        yield f"mixed blocks {size} {dtype}", lambda size=size, dtype=dtype: mixed_both_ways(*size, dtype)


class Context(SimpleNamespace):
    """What the two passes of a torch.autograd.Function share, without autograd."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None: ...
    def set_materialize_grads(self, _: bool) -> None: ...


@torch.no_grad()
def both_passes(function: type[torch.autograd.Function], *given: object) -> None:
    """Launch the kernels of a function, and those of its gradients."""
    context = Context()
    found = function.forward(context, *given)
    grads = [torch.empty_like(y) for y in (found if isinstance(found, tuple) else (found,))]
    function.backward(context, *grads)


def feature_calls(whole: bool) -> Calls:
    """What prepares queries and keys of linear attention and merges its outputs, in all types and two widths."""
    from regard.ops.gated_merge import GatedMerge
    from regard.ops.linear.position_features import PositionFeatures
    from regard.ops.linear.running_softmax_launch import RunningSoftmaxFunction
    from regard.ops.linear.wave_features import LiftedRatio, WaveFeatures

    at, valid = torch.empty(2, 600, dtype=torch.int64, device="cuda"), torch.empty(2, 600, dtype=torch.bool, device="cuda")
    for d, dtype in product((64, 256), TYPES) if whole else ((64, TYPES[1]),):
        q, k = tokens(2, 4, 600, d, dtype), tokens(2, 2, 600, d, dtype)
        z, gate = torch.empty(2, 2, d, device="cuda"), torch.empty(4, device="cuda")
        yield f"positions {d} {dtype}", lambda q=q: both_passes(PositionFeatures, q, at, 0.1)
        yield f"merge {d} {dtype}", lambda q=q, gate=gate: both_passes(GatedMerge, q, q, gate)
        w, norm = torch.empty(128, d, device="cuda"), torch.empty(2, 4, 600, 1, device="cuda")
        yield f"waves {d} {dtype}", lambda q=q, w=w: both_passes(WaveFeatures, q, w, valid)
        yield f"lifted ratio {d} {dtype}", lambda q=q, norm=norm: both_passes(LiftedRatio, q, norm, norm)
        yield f"running softmax {d} {dtype}", lambda q=q, k=k, z=z: both_passes(RunningSoftmaxFunction, q, k, z, z, valid)


def main() -> None:
    whole = "--whole" in sys.argv
    launched = replace_launches(whole)
    failed = 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = delta_calls, linear_calls, noncausal_calls, causal_exp_calls, mixed_calls, feature_calls
        calls = [call for kind in made for call in kind(whole)]
        for text, compute in calls:
            try:
                compute()
                if whole:
                    print(f"compiled: {text}", flush=True)  # noqa: T201
            except Exception as error:  # noqa: BLE001 - Triton's errors have no common class
                failed += 1
                print(f"{launched[-1:]} does not compile: {text}\n{error}", flush=True)  # noqa: T201
    print(f"kernels: {', '.join(sorted(set(launched)))}")  # noqa: T201
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
