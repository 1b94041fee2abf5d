"""Compile the kernels of linear attention for a Hopper card that is not there: python tests/ahead.py [case ...].

Without a case all are compiled. Launches are recorded on tensors without data, so that grids, constants and configurations are
those of a card. A kernel that does not compile, or whose shared memory is larger than that of the card, is an error. Triton's
interpreter sees neither.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CARD = ("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes of a block on that card
OPTIONS = ("num_warps", "num_stages")
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}
FEATURES = "features"
SMALL = ", small kernels"
SMALL_KERNELS = ("linear_sums", "linear_scan", "linear_adjoint", "linear_decay_grads")
QUICK = ("gla, small kernels", "features")
CASES = {
    "linear": {"norm": True, "feature": "elu"},
    "wide": {"norm": True, "feature": "elu", "f": 128, "e": 128},
    "widest": {"norm": True, "feature": "elu", "f": 256, "e": 256},
    "retention": {"decay": 1},
    "gla": {"decay": 64, "gate_root": 16.0},
    "wide gla": {"decay": 128, "gate_root": 16.0, "f": 128, "e": 128},
    "widest gla": {"decay": 256, "gate_root": 16.0, "f": 256, "e": 256},
    "performer": {"norm": True, "decay": 1, "f": 256},
    "single": {"norm": True, "feature": "elu", "dtype": torch.float32},
    "single gla": {"decay": 64, "gate_root": 16.0, "dtype": torch.float32},
}
Launches = list[tuple]


def recorded() -> Launches:
    """Record launches from now on in place of running them."""
    from triton.runtime.jit import JITFunction

    import regard.ops.triton_support as support

    launches: Launches = []

    def run(self, *args, grid, warmup, **options):  # noqa: ARG001 - names of Triton
        launches.append((self, args, options))

    JITFunction.run = run
    support.card_name = lambda device: "a card that is not there" if device.type == "cuda" else "interpreter"
    return launches


def tokens(heads: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(2, 600, heads, size, dtype=dtype, device="cuda").transpose(1, 2)


def launch_case(
    f: int = 64, e: int = 64, decay: int = 0, norm: bool = False, feature: str = "identity",
    gate_root: float = 0.0, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Launch all kernels of a forward and a backward pass."""
    from regard.ops.linear.triton_launch import LinearInputs, launch_forward
    from regard.ops.linear.triton_launch_backward import launch_backward

    log_decay = tokens(2, decay, dtype if gate_root else torch.float32) if decay else None
    state = torch.empty(2, 2, f, e, device="cuda")
    norms = torch.empty(2, 2, f, device="cuda") if norm else None
    q, k, v = tokens(4, f, dtype), tokens(2, f, dtype), tokens(2, e, dtype)
    inputs = LinearInputs(q, k, v, state, log_decay, norms, None, feature, 0.5, norm, None, gate_root)
    out, _, _, _, kept = launch_forward(inputs, keep=True)
    launch_backward(inputs, kept, torch.empty_like(out), None, None, None, decay_grad=gate_root > 0)


def launch_features() -> None:
    """Launch the kernels of random features."""
    from regard.ops.linear.exp_feature_op import ExpMap, exp_key_features, exp_query_features

    by = ExpMap(torch.empty(256, 64, device="cuda"), torch.empty(2, device="cuda"))
    exp_key_features(tokens(2, 64, torch.bfloat16), by, torch.empty(2, 2, 1, device="cuda"), None)
    exp_query_features(tokens(4, 64, torch.bfloat16), by)


def compile_launch(kernel, args: tuple, options: dict) -> None:
    """Compile a kernel as Triton would for these arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, args, strict=False)) | {name: x for name, x in options.items() if name not in OPTIONS}
    types, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, x = parameter.name, given[parameter.name]
        free = name not in (kernel.do_not_specialize or ())
        if parameter.is_constexpr or (free and x is not True and not isinstance(x, Tensor | float) and x == 1):
            types[name], constants[name] = "constexpr", x
            continue
        types[name] = POINTERS[x.dtype] if isinstance(x, Tensor) else "fp32" if isinstance(x, float) else "i32"
        if isinstance(x, Tensor) or (free and isinstance(x, int) and x % 16 == 0):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constants, aligned)
    launch = {name: x for name, x in options.items() if name in OPTIONS}
    made = triton.compile(source, target=GPUTarget(*CARD), options=launch)
    sys.stdout.write(f"{kernel.__name__} {made.metadata.shared}\n")
    if made.metadata.shared > SHARED_MEMORY:
        raise MemoryError(f"{kernel.__name__} needs {made.metadata.shared} bytes of shared memory, a block has {SHARED_MEMORY}")


def main(names: list[str]) -> None:
    launches = recorded()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name in names or [*CASES, FEATURES]:
            if name == FEATURES:
                launch_features()
            else:
                launch_case(**CASES[name.removesuffix(SMALL)])
            if name.endswith(SMALL):
                launches[:] = [one for one in launches if one[0].__name__ in SMALL_KERNELS]
    for one in launches:
        compile_launch(*one)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1:])
