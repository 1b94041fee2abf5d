"""Mix whole blocks of keys and values by weights, and the products that are the gradient of these weights.

Blocks whose numbers lie in one piece are rows of a matrix for PyTorch's products. Others, such as those of heads that lie side by
side in a token, would be copied first: on CUDA devices kernels read and write them where they lie, keys and values in one launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.kernel_launch import KernelLaunch
from regard.ops.triton_support import HALVES, block_of, dot_precision
from regard.patterns.tiles import ceil_div

MOST_MIXED = 1024  # blocks of a sequence that kernels mix; 0: none, copies are multiplied instead
MOST_ROWS = {True: 128, False: 64}  # blocks of a tile: whether registers hold it, see `_is_light`
MOST_COLUMNS = {True: 128, False: 64}  # numbers of every block in a tile of mixed ones
INNER = 64  # blocks, or numbers of blocks, of a step of a sum
PROGRAMS = 512  # of the products for weights: fewer divide the numbers of blocks into slices
MOST_SLICES = 8  # of keys, and as many of values: the sum has all of them in registers


def mixes_in_place(k: Tensor, v: Tensor) -> bool:
    """Return whether kernels mix these blocks (b h c p .); those of `takes_two_blocks` are on a CUDA device."""
    return k.shape[2] <= MOST_MIXED and not (k.is_contiguous() and v.is_contiguous())


def block_strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:4] for x in tensors)


def block_rows(x: Tensor) -> Tensor:
    """Return blocks (b h c p d) as rows of matrices (b*h c p*d)."""
    return x.flatten(3).flatten(0, 1)


def product_slices(k: Tensor, v: Tensor) -> int:
    """Return into how many parts the products of `key_and_value_products` are divided."""
    if not mixes_in_place(k, v):
        return 1
    b, h, c, p, _ = k.shape
    tiles, columns = ceil_div(c, _rows_of(k)), p * min(k.shape[-1], v.shape[-1])
    slices = 1
    while 2 * b * h * tiles**2 * slices < PROGRAMS and slices < MOST_SLICES and slices * INNER < columns:
        slices *= 2
    return slices


def _is_light(x: Tensor) -> bool:
    """Return whether blocks need few registers: of half precision, in vectors of a token."""
    return x.dtype in HALVES and x.shape[-1] % 16 == 0


def _rows_of(x: Tensor) -> int:
    return min(MOST_ROWS[_is_light(x)], block_of(x.shape[2], x.device))


def _alike(blocks: tuple[Tensor, ...]) -> bool:
    """Return whether one launch serves keys and values."""
    k, v, k2, v2 = blocks
    return k.shape == v.shape and k.stride() == v.stride() and k2.stride() == v2.stride()


@signature_cache
def _mix_launches(key: Any, blocks: tuple[Tensor, ...], add: bool) -> list[KernelLaunch]:  # noqa: ARG001
    """Return the launches for blocks (b h c p d), (b h c p e) and those that are written; add: to them, by transposed weights."""
    from regard.ops import mix_blocks_kernels as kernels

    def launch(x: Tensor, y: Tensor, slots: tuple[int, ...], pair: int) -> KernelLaunch:
        (b, h, c, p, d), block = x.shape, _rows_of(x)
        width = min(MOST_COLUMNS[_is_light(x)], block_of(p * d, x.device))
        size = {"BU": block, "BC": INNER, "BN": width, "num_stages": min(3, ceil_div(c, INNER)), **_constants(x)}
        grid = (b * h * ceil_div(c, block) * ceil_div(p * d, width), pair)
        same = {"ADD": add, "TURNED": add, **size}
        return KernelLaunch(kernels.mix_blocks, grid, slots, (*block_strides(x, y), h, c, p), same, x.get_device())

    k, v, k2, v2 = blocks
    if _alike(blocks):
        return [launch(k, k2, (0, 1, 2, 3, 4), 2)]
    return [launch(k, k2, (0, 1, 1, 3, 3), 1), launch(v, v2, (0, 2, 2, 4, 4), 1)]


@signature_cache
def _product_launches(key: Any, blocks: tuple[Tensor, ...], slices: int) -> list[KernelLaunch]:  # noqa: ARG001
    """Return the launches for blocks k (b h c p d), v (b h c p e), dk2 and dv2."""
    from regard.ops import mix_blocks_kernels as kernels

    def launch(x: Tensor, y: Tensor, slots: tuple[int, ...], pair: int) -> KernelLaunch:
        (b, h, c, p, _), block = x.shape, _rows_of(x)
        numbers = (*block_strides(x, y), b * h, h, c, p, slices)
        size = {"BT": block, "BJ": INNER, "num_stages": 3 if x.dtype in HALVES else 2, **_constants(x)}
        grid = (b * h * slices * ceil_div(c, block) ** 2, pair)
        return KernelLaunch(kernels.block_products, grid, slots, numbers, size, x.get_device())

    k, v, dk2, dv2 = blocks
    if _alike(blocks):
        return [launch(k, dk2, (0, 1, 2, 3, 4, 5), 2)]
    return [launch(k, dk2, (0, 0, 2, 2, 4, 4), 1), launch(v, dv2, (1, 1, 3, 3, 5, 5), 1)]


def _constants(x: Tensor) -> dict[str, Any]:
    few = _is_light(x) and _rows_of(x) <= 64 and x.shape[2] % 16 == 0  # weights are loaded in vectors too
    return {"D": x.shape[-1], "PRECISION": dot_precision(x.dtype), "num_warps": 4 if few else 8}


def mix_keys_and_values(key: Hashable, weights: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor) -> None:
    """Write blocks k2, v2 (b h c p .) that lie in one piece, sums of blocks k, v by weights (b*h c c).

    key: shapes, strides, types and the device of k and v, and the precision of products.
    """
    if mixes_in_place(k, v):
        for launch in _mix_launches((key, False), (k, v, k2, v2), False):
            launch(weights, k, v, k2, v2)
        return
    for x, y in ((k, k2), (v, v2)):
        torch.bmm(weights, block_rows(x), out=y.view(*weights.shape[:2], -1))


def key_and_value_products(key: Hashable, k: Tensor, v: Tensor, dk2: Tensor, dv2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of all pairs of blocks, of dk2 with k and of dv2 with v, in float32: parts whose sum is the gradient of
    the weights of `mix_keys_and_values`, (slices b*h c c) each.
    """
    if mixes_in_place(k, v):
        (b, h, c), slices = k.shape[:3], product_slices(k, v)
        by_keys, by_values = torch.empty(2, slices, b * h, c, c, dtype=torch.float32, device=k.device).unbind()
        for launch in _product_launches(key, (k, v, dk2, dv2), slices):
            launch(k, v, dk2, dv2, by_keys, by_values)
        return by_keys, by_values
    by_keys, by_values = (_product_in_float32(block_rows(y), block_rows(x).mT) for x, y in ((k, dk2), (v, dv2)))
    return by_keys[None], by_values[None]


def add_mixed(
    key: Hashable, weights: Tensor, blocks: tuple[Tensor, Tensor], dk: Tensor, dv: Tensor, dk2: Tensor, dv2: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dk and dv, whose memory follows that of the keys and values `blocks`, plus sums of dk2 and dv2 by the weights
    transposed: into them where that needs no copy.
    """
    if mixes_in_place(*blocks):
        for launch in _mix_launches((key, True), (dk2, dv2, dk, dv), True):
            launch(weights, dk2, dv2, dk, dv)
        return dk, dv
    return _plus_product(dk, weights.mT, block_rows(dk2)), _plus_product(dv, weights.mT, block_rows(dv2))


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _plus_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return blocks x (b h c p d) plus the rows a b, into x where its rows lie in one piece."""
    if x.is_contiguous():
        rows = x.view(*a.shape[:2], -1)
        rows.baddbmm_(a, b)
        return x
    return x + (a @ b).view(x.shape)
