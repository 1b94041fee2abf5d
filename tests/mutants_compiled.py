"""Defects for `mutants.py`: what torch.compile sees, and what a process keeps. Each names the tests that must notice it."""

from __future__ import annotations

R = "src/regard/"

COMPILED: dict[str, tuple[str, str, str, str]] = {
    "a compiler is made to look at padding": (R + "transforms.py", "not torch.compiler.is_compiling() and ", "", "compile"),
    "a graph for every length of a kernel": (
        R + "ops/linear/torch.py",
        "most if torch.compiler.is_compiling() else min",
        "min",
        "compile",
    ),
    "one chunk is a graph of its own": (
        R + "ops/linear/prefix.py",
        "max(x.shape[2] // size + 1, 2)",
        "-(-x.shape[2] // size)",
        "compile",
    ),
    "a compiled delta rule gives the state of an empty chunk": (
        R + "ops/delta/torch.py",
        "states[:, :, :count], states",
        "states[:, :, 1 : count + 1], states",
        "compile",
    ),
    "whole blocks are a graph of their own": (R + "mixers/sinkhorn.py", "max(n // p + 1, 2)", "-(-n // p)", "compile"),
    "a compiled pattern is drawn for the padded length": (
        R + "mixers/pattern_attention.py",
        "if valid is None else valid.sum(1)\n",
        "if valid is None else valid.sum(1) * 0 + x.shape[2]\n",
        "compile",
    ),
    "rows drop the same pairs": (R + "ops/ragged.py", "row_seed(call.seed, row)", "row_seed(call.seed, 0)", "compile"),
    "padding is transformed too": (
        R + "ops/ragged.py",
        "return fourier_mix_by_row(x, count, norm)",
        "return fourier_mix_by_row(x, count * 0 + 12, norm)",
        "compile",
    ),
    "what is kept is made in inference mode": (
        R + "cache.py",
        "        make = outlives_tracing(f)\n",
        "        make = f\n",
        "caches",
    ),
    "a state of inference mode is written to later": (
        R + "mixers/kv_cache.py",
        "if full or (self.k.is_inference() and not torch.is_inference_mode_enabled()):",
        "if full:",
        "caches",
    ),
    "a fork leaves a lock behind": (R + "cache.py", "os.register_at_fork(", "dict(", "caches"),
}
