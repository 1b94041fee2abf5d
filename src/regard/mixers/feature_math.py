"""Parts of kernelized attention: sums in a safe type, gates, random directions."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.checks import shown
from regard.ops.linear.zero_state import zero_state


def upcast(x: Tensor) -> Tensor:
    """Convert to float32, or keep a better type: what sums need."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def concat_chunks(runs: list[Tensor]) -> Tensor:
    if len(runs) == 1:
        return runs[0]
    return torch.cat(runs, 2)


def empty_sums(k: Tensor, v: Tensor, features: int) -> tuple[Tensor, Tensor]:
    z = upcast(k[:, :, :0]).new_zeros(*k.shape[:2], features)
    return z.new_zeros(*z.shape, v.shape[-1]), z


def unwritten_sums(k: Tensor, v: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Return the sums of no tokens, only to be read: on CUDA devices without memory or a kernel."""
    if not k.is_cuda:
        return empty_sums(k, v, features)
    dtype, sizes = torch.promote_types(k.dtype, torch.float32), (*k.shape[:2], features)
    return zero_state(k, *sizes, v.shape[-1], dtype=dtype), zero_state(k, *sizes, dtype=dtype)


def where_valid(x: Tensor, valid: Tensor | None, otherwise: float) -> Tensor:
    """Replace x (b g m ...) at padding."""
    if valid is None:
        return x
    return x.masked_fill(~valid[:, None, :, None], otherwise)


def finite_max(top: Tensor) -> Tensor:
    """Replace the maximum over no token, -inf, by 0: its unit may be any."""
    return top.masked_fill(top == -torch.inf, 0)


def read_state(q: Tensor, state: Tensor) -> Tensor:
    """Return q_i S, with the queries of a key-value head side by side: (b h n f), (b g f e) -> (b h n e)."""
    grouped = q.unflatten(1, (state.shape[1], -1))
    answer = grouped.flatten(2, 3) @ state
    return answer.reshape(*q.shape[:3], state.shape[-1])


def per_query_head(x: Tensor, like: Tensor) -> Tensor:
    """Repeat x (b g ...) to (b h ...): each key-value head serves a run of query heads.

    `like` (b h ...) is the tensor of queries whose number of heads is wanted.

    >>> import torch
    >>> from regard import per_query_head
    >>> x = torch.tensor([[[1.0], [2.0]]])  # two key-value heads
    >>> per_query_head(x, torch.zeros(1, 4, 1)).flatten()
    tensor([1., 1., 2., 2.])
    """
    if x.shape[1] == like.shape[1]:
        return x
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def gaussian(rows: int, d: int, seed: int) -> Tensor:
    integer = isinstance(seed, int) and not isinstance(seed, bool)
    if not integer or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an integer, not {shown(seed)}: 64 bits is the limit")
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, d, generator=generator, dtype=torch.float64, device="cpu")


def orthogonal(rows: int, d: int, seed: int) -> Tensor:
    """Draw rows (rows d), orthogonal in blocks of d, uniform in direction, with the lengths of Gaussian vectors."""
    blocks = -(-rows // d)
    drawn = gaussian(blocks * d + rows, d, seed)
    basis, triangle = torch.linalg.qr(drawn[:-rows].unflatten(0, (blocks, d)))
    signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
    basis = basis * signs.unsqueeze(-2)  # else the factorisation favours one side
    directions = basis.mT.flatten(0, 1)[:rows]
    lengths = drawn[-rows:].norm(dim=-1, keepdim=True)
    return directions * lengths
