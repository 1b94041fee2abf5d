"""Triton kernels of the gated merge: see `gated_merge.py`. A program has a tile of tokens of a head."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import load_tokens, store_tokens
from regard.ops.linear.position_feature_kernels import tile_of_head


@triton.jit
def _far_weight(GATE, h):
    return 1.0 / (1.0 + tl.exp(-tl.load(GATE + h).to(tl.float32)))


@triton.jit(do_not_specialize=["n", "tiles"])
def gated_merge_forward(
    NEAR, FAR, OUT, GATE, sab, sah, san, sfb, sfh, sfn, sob, soh, son, n, heads, tiles,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write OUT (b h n E), the weighed mean of NEAR and FAR."""
    b, h, i = tile_of_head(heads, tiles, BM)
    weight = _far_weight(GATE, h)
    near = load_tokens(NEAR + b * sab + h * sah, i, san, i < n, E, BE).to(tl.float32)
    far = load_tokens(FAR + b * sfb + h * sfh, i, sfn, i < n, E, BE).to(tl.float32)
    store_tokens(OUT + b * sob + h * soh, i, son, near + weight * (far - near), i < n, E, BE)


@triton.jit(do_not_specialize=["n", "tiles"])
def gated_merge_backward(
    NEAR, FAR, GRAD, DNEAR, DFAR, GATE, SLOPE, sab, sah, san, sfb, sfh, sfn, sgb, sgh, sgn, sdb, sdh, sdn, seb, seh, sen,
    n, heads, tiles, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both, and in SLOPE (b tiles h) what this tile adds to the gradient of the gate."""
    b, h, i = tile_of_head(heads, tiles, BM)
    weight = _far_weight(GATE, h)
    near = load_tokens(NEAR + b * sab + h * sah, i, san, i < n, E, BE).to(tl.float32)
    far = load_tokens(FAR + b * sfb + h * sfh, i, sfn, i < n, E, BE).to(tl.float32)
    grad = load_tokens(GRAD + b * sgb + h * sgh, i, sgn, i < n, E, BE).to(tl.float32)
    store_tokens(DNEAR + b * sdb + h * sdh, i, sdn, grad * (1.0 - weight), i < n, E, BE)
    store_tokens(DFAR + b * seb + h * seh, i, sen, grad * weight, i < n, E, BE)
    slope = tl.sum(tl.sum(grad * (far - near), 1), 0) * weight * (1.0 - weight)
    tl.store(SLOPE + tl.program_id(0), slope)
