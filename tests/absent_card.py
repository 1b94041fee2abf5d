"""Compile kernels for a card that is not there: Triton's interpreter runs Python, and finds no error of types.

python tests/absent_card.py              finds the types of every kernel, in a few calls (`test_delta_triton.py` does this)
python tests/absent_card.py --whole      compiles all calls down to the code of the card, which takes minutes

Launches are those of a card: tensors are fake ones on a CUDA device, the target and the configurations those of an H200.
TRITON_INTERPRET must not be 1: Triton reads it once, when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.ops.delta.delta_launch import delta_chunk_grads, delta_chunks
from regard.ops.delta.delta_op import DeltaCall
from regard.ops.delta.unit_features import _launch as launch_unit
from regard.ops.kernel_launch import KernelLaunch

CARD = "NVIDIA H200"
TYPES = torch.float32, torch.bfloat16
DELTA_SIZES = [  # b h g n f e
    (2, 4, 2, 1, 6, 5),  # one token
    (1, 2, 1, 5000, 64, 32),  # in segments
    (1, 3, 3, 70, 128, 128),  # values in more than one block of columns
]


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


def replace_launches(whole: bool) -> list[str]:
    """Compile every kernel that is launched from now on instead of launching it; returns a growing list of their names."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    launched: list[str] = []
    run = jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):  # noqa: ARG001
        launched.append(self.__name__)
        mock = [jit.MockTensor(x.dtype, list(x.shape)) if isinstance(x, Tensor) else x for x in args]
        return run(self, *mock, grid=grid, warmup=True, **kwargs)

    card = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(get_current_target=lambda: card, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    )

    def launch(self, *tensors: Tensor) -> None:  # fake tensors have no addresses
        self.kernel[self.grid](*self._spread(tensors), *self.numbers, **self.constants)

    jit.JITFunction.run, KernelLaunch.__call__ = compile_only, launch
    torch.cuda.get_device_name = lambda _: CARD
    if not whole:
        compiler.compile = _find_types
    return launched


def delta_calls(whole: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """The delta rule with and without queries and decays, forward, backward and as one step, and its unit features."""
    from regard.ops.delta.delta_step import delta_step
    from regard.ops.delta.unit_kernels import unit_backward, unit_forward

    few = (DELTA_SIZES[0], TYPES[0], True, True), (DELTA_SIZES[0], TYPES[0], False, False), (DELTA_SIZES[1], TYPES[1], True, True)
    for size, dtype, queries, decays in product(DELTA_SIZES, TYPES, (True, False), (True, False)) if whole else few:
        b, h, g, n, f, e = size

        def tokens(heads: int, width: int, b=b, n=n, dtype=dtype) -> Tensor:
            return torch.empty(b, n, heads, width, dtype=dtype, device="cuda").transpose(1, 2)

        beta, state = torch.empty(b, g, n, 1, device="cuda"), torch.empty(b, g, f, e, device="cuda")
        q, decay = tokens(h, f) if queries else None, torch.empty_like(beta) if decays else None
        call = DeltaCall(q, tokens(g, f), tokens(g, e), beta, state, decay)

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


def main() -> None:
    whole = "--whole" in sys.argv
    launched = replace_launches(whole)
    failed = 0
    with FakeTensorMode():
        for text, compute in delta_calls(whole):
            try:
                compute()
                if whole:
                    print(f"compiled: {text}", flush=True)  # noqa: T201
            except Exception as error:  # noqa: BLE001 - Triton's errors have no common class
                failed += 1
                print(f"{launched[-1]} does not compile: {text}\n{error}", flush=True)  # noqa: T201
    print(f"kernels: {', '.join(sorted(set(launched)))}")  # noqa: T201
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
