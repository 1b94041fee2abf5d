"""Triton kernel of the real part of a spectrum of which one half is there: see `regard.ops.fourier`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "scale"])
def real_spectrum(HALF, OUT, n, width, scale, stride_b, stride_k, stride_l, BK: tl.constexpr, BL: tl.constexpr):
    """Write OUT (b n width), the real part of all waves (k, l), from HALF (b n width // 2 + 1): (k, l) and (-k, -l) share it."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)[:, None]
    c = tl.program_id(1) * BL + tl.arange(0, BL)[None, :]
    row = tl.program_id(2).to(tl.int64)
    inside = (k < n) & (c < width)
    there = c <= width // 2
    from_k = tl.where(there | (k == 0), k, n - k)
    from_c = tl.where(there, c, width - c)
    at = HALF + row * stride_b + from_k.to(tl.int64) * stride_k + from_c * stride_l
    wave = tl.load(at, mask=inside, other=0.0) * scale
    tl.store(OUT + (row * n + k) * width + c, wave.to(OUT.dtype.element_ty), mask=inside)
