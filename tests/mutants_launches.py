"""Defects for `mutants.py`: direct launches of kernels, and what passes keep for a signature. Each names the tests."""

from __future__ import annotations

R = "src/regard/"
LAUNCH = R + "ops/kernel_launch.py"

LAUNCHES: dict[str, tuple[str, str, str, str]] = {
    "a direct launch takes addresses of any alignment": (
        LAUNCH,
        "        if reduce(or_, addresses) % ALIGNMENT or self",
        "        if self",
        "kernel_launch",
    ),
    "a kernel compiled for unaligned addresses is kept": (
        LAUNCH,
        "        if self.device >= 0 and aligned:\n",
        "        if self.device >= 0:\n",
        "kernel_launch",
    ),
    "a direct launch goes to the current device": (
        LAUNCH,
        " or self.device != _current_device() or _hooked",
        " or _hooked",
        "kernel_launch",
    ),
    "a direct launch goes to the first stream": (LAUNCH, "_current_stream(self.device), *middle", "0, *middle", "kernel_launch"),
    "a direct launch passes over the hooks of Triton": (
        LAUNCH,
        " or _hooked(runtime, self.kernel):\n",
        ":\n",
        "kernel_launch",
    ),
    "a direct launch has no scratch memory": (
        LAUNCH,
        "        if run.global_scratch_size or run.profile_scratch_size:\n",
        "        if False:\n",
        "kernel_launch",
    ),
    "a launcher of another form is called": (
        LAUNCH,
        ' or getattr(driver, "_BASE_ARGS_FORMAT", None) != LAUNCHER_ARGUMENTS:\n',
        ":\n",
        "kernel_launch",
    ),
    "a launch takes tensors of other types": (
        LAUNCH,
        "        elif kinds != self._kinds:\n",
        "        elif False:\n",
        "kernel_launch",
    ),
    "a direct launch has no defaults of constants": (
        LAUNCH,
        "self.constants.get(one.name, one.default)",
        "None",
        "kernel_launch",
    ),
    "launches outlive the configurations they were made of": (
        R + "ops/triton_support.py",
        "    _config.cache_clear()\n    forget_signatures()\n",
        "    _config.cache_clear()\n",
        "kernel_launch",
    ),
    "a trial of configurations runs launches made before it": (
        R + "ops/triton_support.py",
        "    _trials.append(trial)\n    forget_signatures()\n",
        "    _trials.append(trial)\n",
        "kernel_launch",
    ),
    "signatures are kept without end": (R + "cache.py", "if len(kept) > MAX_SIGNATURES:", "if False:", "kernel_launch"),
    "a pass is kept for tensors that lie otherwise": (
        R + "ops/tile/tile_op.py",
        "v.shape, q.stride(), k.stride(), v.stride(), q.dtype",
        "v.shape, q.dtype",
        "signatures",
    ),
    "a pass is kept for another scale": (
        R + "ops/tile/tile_op.py",
        "valid is None, biased, scale, dropout, precision\n",
        "valid is None, biased, dropout, precision\n",
        "signatures",
    ),
    "a pass is kept for other options": (
        R + "ops/tile/tile_op.py",
        "devices, valid is None, biased, scale",
        "devices, scale",
        "signatures",
    ),
    "gradients that lie otherwise take the launch of others": (
        R + "ops/tile/tile_launch.py",
        "d_out.stride(), d_lse is None)\n        found",
        "d_lse is None)\n        found",
        "signatures",
    ),
    "a linear launch is kept for tensors that lie otherwise": (
        R + "ops/linear/triton_launch.py",
        "(x.shape, x.stride(), x.dtype, x.get_device())",
        "(x.shape, x.dtype, x.get_device())",
        "signatures",
    ),
    "linear gradients that lie otherwise take the launch of others": (
        R + "ops/linear/triton_launch_backward.py",
        '("adjoint", d_out.stride(), d_out.dtype)',
        '("adjoint", d_out.dtype)',
        "signatures",
    ),
    "retention keeps the constants of powers it had before": (
        R + "mixers/gated.py",
        " or read[1] != powers._version:\n",
        ":\n",
        "signatures",
    ),
    "constants are read before they are written": (LAUNCH, "            stream.wait_event(self.made)\n", "", "signatures"),
    "constants of a CUDA graph are freed": (
        LAUNCH,
        "            hold_for_graphs(first, self)\n",
        "            pass\n",
        "signatures",
    ),
}
