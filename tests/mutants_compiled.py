"""Defects for `mutants.py`: what torch.compile sees, and what a process keeps. Each names the tests that must notice it."""

from __future__ import annotations

R = "src/regard/"

COMPILED: dict[str, tuple[str, str, str, str]] = {
    "a named backend is passed over": (R + "ops/backend.py", "    if name != AUTO:\n", "    if False:\n", "linear_backends"),
    "a backend that refuses computes all the same": (
        R + "ops/backend.py",
        "        if why := every[name].refuses(*call):\n",
        "        if why := None:\n",
        "linear_backends",
    ),
    "auto takes a backend that refuses": (
        R + "ops/backend.py",
        "        if why is None:\n",
        "        if True:\n",
        "linear_backends",
    ),
    "a mechanism with one implementation takes any backend": (
        R + "ops/backend.py",
        '    if not operations and backend != "torch":\n',
        "    if False:\n",
        "linear_backends",
    ),
    "a layer drops the backend it is built with": (
        R + "mixers/gated.py",
        "        scale, backend = self.dims.d**-0.5, self.dims.backend\n",
        '        scale, backend = self.dims.d**-0.5, "auto"\n',
        "linear_backends",
    ),
    "the norm of the reference backend does not decay": (
        R + "ops/linear/reference.py",
        "norm_state = keep * norm_state",
        "norm_state = 1 * norm_state",
        "linear_backends",
    ),
    "a delta step without queries does not compile on a card": (
        R + "ops/delta/delta_step.py",
        "    if SHARE > 0:",
        "    if True:",
        "delta_triton",
    ),
    "a delta kernel takes the triangle of a chunk for its own inverse": (
        R + "ops/delta/triton_kernels.py",
        "            d -= tl.dot(step, d, input_precision=DOT)\n",
        "            d -= step\n",
        "delta_triton",
    ),
    "segments of the delta rule do not add what they write": (
        R + "ops/delta/triton_kernels.py",
        "        new += whole * tl.load(N + at",
        "        new += 0 * tl.load(N + at",
        "delta_triton",
    ),
    "a delta kernel has no gradient for the end of a chunk's decay": (
        R + "ops/delta/delta_grad_kernels.py",
        "slope[None, :], 0.0), 1) + end\n",
        "slope[None, :], 0.0), 1)\n",
        "delta_triton",
    ),
    "a decoding step reads the slot that it writes": (
        R + "ops/decode_step_kernels.py",
        "        inside = (j < room) & (j != slot)\n",
        "        inside = j < room\n",
        "decode_step",
    ),
    "a decoding step sees free slots": (
        R + "ops/decode_step_kernels.py",
        "        seen = seen & (tl.load(VALID",
        "        seen = seen | (tl.load(VALID",
        "decode_step",
    ),
    "kernels count a pair in every round that holds it": (
        R + "ops/bucket/triton_kernels.py",
        "            seen = seen & ~within(at[r][None, :], ranges[r][0][:, None], ranges[r][1][:, None])\n",
        "            pass\n",
        "bucket_backends",
    ),
    "the gradient of a key keeps what is along it": (
        R + "ops/bucket/bucket_backward_kernels.py",
        "            dk = (dk - unit * along[:, None]) * short[:, None]\n",
        "            dk = dk * short[:, None]\n",
        "bucket_backends",
    ),
    "the value of a token that sees no other has no gradient": (
        R + "ops/bucket/bucket_backward_kernels.py",
        "            dv += own_grad\n",
        "            pass\n",
        "bucket_backends",
    ),
    "the gradient of values ignores dropout": (
        R + "ops/bucket/bucket_backward_kernels.py",
        "            dropped = tl.where(kept, w * keep, 0.0)\n",
        "            pass\n",
        "bucket_backends",
    ),
    "padding has a place that is seen": (
        R + "ops/bucket/triton_kernels.py",
        "    last = tl.where(padding, -1, tl.load(LAST + group, mask=inside, other=0))\n",
        "    last = tl.load(LAST + group, mask=inside, other=0)\n",
        "bucket_backends",
    ),
    "the weights of distance classes do not pull at the scores": (
        R + "ops/tile/triton.py",
        "            d_lse = -pulled if d_lse is None else d_lse - pulled\n",
        "            pass\n",
        "triton_tiles",
    ),
    "a hidden pair writes its distance class": (
        R + "ops/tile/triton_classes.py",
        'inside & (seen > float("-inf")) & (c > 0)',
        "inside & (c > 0)",
        "triton_tiles",
    ),
    "tiles of inner distance classes end too early": (
        R + "ops/tile/triton_classes.py",
        "    end = (tl.maximum(last + reach, 0) + B - 1) // B * B\n",
        "    end = tl.maximum(last + reach, 0) // B * B\n",
        "triton_tiles",
    ),
    "a strip ends where it begins": (R + "ops/strip.py", "range(size, n + size, size)", "range(0, n, size)", "strip"),
    "a strip is kept for the backward pass": (
        R + "ops/strip.py",
        "    again = recompute and torch.is_grad_enabled() and _any_grad(tensors) and not transformed()\n",
        "    again = False\n",
        "strip",
    ),
    "a compiler is made to look at padding": (R + "transforms.py", "not torch.compiler.is_compiling() and ", "", "compile"),
    "a graph for every length of a kernel": (
        R + "ops/linear/torch.py",
        "    if torch.compiler.is_compiling():\n        return most\n",
        "",
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
