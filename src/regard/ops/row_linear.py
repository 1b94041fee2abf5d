"""Linear maps of the few rows of a decoding step, by as few launches as possible.

    y = act(norm(x) W^T + b)        `row_product`: one launch for few rows; else a norm and a product
    x + y W^T + b                   `add_product`: one launch

A product of many rows is the library's. Its bias is then added to x by the norm in front, so that the product adds to x in place.
Inference alone: nothing here has a gradient. Letters: r rows, k features in, o features out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, kernel_config, triton_cannot_run

ROW_ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
WIDEST_PRODUCT = 8192  # features that one program reads at once


class RowNorm(NamedTuple):
    """A norm of every row (k): of its mean and deviation, or of its mean square alone."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool

    @staticmethod
    def of(module: nn.Module | None) -> RowNorm | None:
        """Return the norm that a module computes of rows of one width; None: it computes something else."""
        if type(module) not in (nn.LayerNorm, nn.RMSNorm) or len(module.normalized_shape) != 1:  # type: ignore[union-attr, arg-type]
            return None
        weight: Tensor | None = module.weight  # type: ignore[union-attr, assignment]
        if weight is None:
            return None
        eps = torch.finfo(weight.dtype).eps if module.eps is None else module.eps  # type: ignore[union-attr]
        return RowNorm(weight, getattr(module, "bias", None), eps, type(module) is nn.RMSNorm)  # type: ignore[arg-type]


class RowMap(NamedTuple):
    """A linear map of rows, and the activation behind it."""

    weight: Tensor  # (o k)
    bias: Tensor | None  # (o)
    activation: str = "none"


class RowParts(NamedTuple):
    """Rows on the way through a part of a block."""

    y: Tensor  # (r o) what the first product of the part gives
    base: Tensor  # (r k) what its last product is added to


def rows_refuse(weight: Tensor, *others: Tensor | None) -> str | None:
    """Return a sentence about why no kernel takes rows of maps with these weights, or None."""
    if why := triton_cannot_run(weight, *others):
        return why
    if any(x is not None and x.dtype != weight.dtype for x in others):
        return "its kernels take weights of one type"
    if not weight.is_contiguous():
        return "its kernels take weights whose rows lie side by side"
    return (
        f"its kernels take rows of up to {WIDEST_PRODUCT} features, not {max(weight.shape)}"
        if weight.shape[1] > WIDEST_PRODUCT
        else None
    )


def are_few(x: Tensor, outs: int) -> bool:
    """Return whether rows x (r k) are mapped to `outs` features by a kernel of their own."""
    return len(x) <= _config(x, outs)["rows"]


def _config(x: Tensor, outs: int) -> dict:
    kind = "half" if x.dtype in HALVES else "single"
    return dict(kernel_config("row_linear", f"{kind} wide" if outs > WIDEST_PRODUCT else kind, x.device))


def row_product(x: Tensor, norm: RowNorm | None, first: RowMap, last: RowMap | None = None) -> RowParts:
    """Map rows x (r k) by act(norm(x) W^T + b); `last` is the map whose product will be added to x by `add_product`."""
    ends = few_ends(x, last)
    if are_few(x, len(first.weight)):
        y = _row_linear(x, norm, first, None)
        base = x if ends or last is None else _later(x, last)
        return RowParts(y, base)
    later = None if ends or last is None else last.bias
    z, base = (x, x) if norm is None else _norm_rows(x, norm, later)
    return RowParts(_library_product(z, first), x if ends else base)


def few_ends(x: Tensor, last: RowMap | None) -> bool:
    """Return whether `last` is computed by the kernel for few rows, which adds its bias itself."""
    return last is not None and are_few(x, len(last.weight))


def _later(x: Tensor, last: RowMap) -> Tensor:
    return x.clone() if last.bias is None else x + last.bias


def add_product(base: Tensor, y: Tensor, last: RowMap) -> Tensor:
    """Return x + y W^T + b of y (r k), for the base that `row_product` made of x; it may be overwritten."""
    if are_few(base, len(last.weight)):
        return _row_linear(y, None, last, base)
    return base.addmm_(y, last.weight.t())


def _library_product(x: Tensor, first: RowMap) -> Tensor:
    weight, bias, activation = first
    if bias is None:
        y = x @ weight.t()
    elif activation == "relu":  # gelu is not the same one on all devices
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=False)
    else:
        y = torch.addmm(bias, x, weight.t())
    return y if activation == "none" else _plain_activation(y, activation)


def _plain_activation(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return x.relu_()
    if activation == "silu":
        return nn.functional.silu(x)
    return nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _inner(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _norm_constants(norm: RowNorm | None) -> dict[str, int | bool]:
    if norm is None:
        return {"NORM": 0, "HAS_NW": False, "HAS_NB": False}
    return {"NORM": 2 if norm.rms else 1, "HAS_NW": norm.weight is not None, "HAS_NB": norm.bias is not None}


def _row_linear(x: Tensor, norm: RowNorm | None, one: RowMap, plus: Tensor | None) -> Tensor:
    """Compute act(norm(x) W^T + b), plus (r o) if given, by one launch."""
    from regard.ops.row_linear_kernels import row_linear_kernel

    x = _inner(x)
    (rows, k), outs = x.shape, len(one.weight)
    config = _config(x, outs)
    del config["rows"]
    out = x.new_empty(rows, outs)
    wide = min(config.pop("BO"), max(1, _power(outs // config.pop("programs") + 1) // 2))  # many programs, if possible
    high = min(config.pop("BR"), _power(rows))
    deep = min(config.pop("BK"), _power(k))
    constants = {
        "K": k,
        "BW": _power(k),
        "BK": deep,
        "BO": wide,
        "BR": high,
        "KIND": ROW_ACTIVATIONS.index(one.activation),
        "HAS_B": one.bias is not None,
        "ADDS": plus is not None,
        **_norm_constants(norm),
        **config,
    }
    scale, shift, eps = (None, None, 0.0) if norm is None else norm[:3]
    plus = None if plus is None else _inner(plus)
    strides = (x.stride(0), one.weight.stride(0), 0 if plus is None else plus.stride(0), outs)
    tensors = (x, one.weight, one.bias, scale, shift, plus, out)
    grid = (-(-outs // wide), -(-rows // high))
    launch_kernel(row_linear_kernel, grid, tensors, (*strides, rows, outs, float(eps)), constants)
    return out


def _norm_rows(x: Tensor, norm: RowNorm, later: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return norm(x) and x + later, both (r k), by one launch."""
    from regard.ops.row_linear_kernels import norm_rows_kernel

    x = _inner(x)
    rows, k = x.shape
    out, base = x.new_empty(rows, k), x.new_empty(rows, k)
    constants = {"K": k, "BW": _power(k), **_norm_constants(norm), "ADDS": later is not None, "num_warps": 4}
    tensors = (x, norm.weight, norm.bias, later, out, base)
    launch_kernel(norm_rows_kernel, (rows,), tensors, (x.stride(0), float(norm.eps)), constants)
    return out, base


def embed_rows(tokens: Tensor, table: Tensor, scale: float, at: Tensor, rows: Tensor | None) -> Tensor:
    """Return table[tokens] scale + rows[at] of tokens (b 1) at positions (b 1), as (b w), by one launch."""
    from regard.ops.row_linear_kernels import embed_rows_kernel

    k = table.shape[1]
    out = table.new_empty(len(tokens), k)
    strides = (tokens.stride(0), at.stride(0), table.stride(0), 0 if rows is None else rows.stride(0))
    constants = {"K": k, "BW": _power(k), "PLACED": rows is not None, "num_warps": 4}
    launch_kernel(embed_rows_kernel, (len(tokens),), (tokens, table, at, rows, out), (*strides, float(scale)), constants)
    return out
