"""Balance matrices by Sinkhorn's iterations, or in the order of time, in one launch or one an iteration on CUDA devices.

The definitions in plain operations are `balanced` and `balanced_in_time`. Pairs that do not exist have MASKED_SCORE. In the order
of time, what the rows before took is kept for the backward pass, a matrix for every iteration.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import SMALLEST_DOT, has_triton, kernel_config
from regard.patterns.tiles import MASKED_SCORE, ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

LARGEST_MATRIX = 128  # rows and columns: a matrix lies in the registers of a program
LARGEST_WIDE = 1024  # where it is read in every iteration
STRIP_ELEMENTS = 8192  # of a strip
LARGEST_IN_TIME = 64  # where products are computed too


def balanced(iterations: int, logits: Tensor, seen: Tensor | None = None, mass: Tensor | None = None) -> Tensor:
    """exp(logits) (... r c), its columns and rows scaled in turn until both sum to 1, or rows to exp(mass) (... r).

    Rows come last and sum exactly. A pair that is not seen weighs nothing, nor does a row or a column without any.
    """
    for _ in range(iterations):
        logits = _unseen(logits.log_softmax(-2), seen)
        logits = _unseen(logits.log_softmax(-1), seen)
        if mass is not None:
            logits = logits + mass[..., None]
    return logits.exp()


def _unseen(logits: Tensor, seen: Tensor | None) -> Tensor:
    return logits if seen is None else logits.masked_fill(~seen, MASKED_SCORE)


def balanced_in_time(iterations: int, logits: Tensor) -> Tensor:
    """softmax(logits - log(1 + what earlier rows took of the column)), repeated: row i no longer changes after i sweeps."""
    seen = (logits > MASKED_SCORE / 2).any(-1, keepdim=True)
    taken = torch.zeros_like(logits)
    for _ in range(iterations):
        shares = (logits - taken.log1p()).softmax(-1) * seen
        taken = pad(shares.cumsum(-2), (0, 0, 1, 0))[..., : shares.shape[-2], :]
    return (logits - taken.log1p()).softmax(-1) * seen


def balances_in_one_launch(logits: Tensor) -> bool:
    """Return whether the kernels take these matrices (... r c)."""
    if not logits.is_cuda or logits.dtype != torch.float32 or not has_triton():
        return False
    return max(logits.shape[-2:]) <= LARGEST_WIDE and not needs_plain_ops()


def balance_matrices(logits: Tensor, iterations: int, in_time: bool) -> Tensor:
    """Return the balanced weights (... r c) of logits (... r c), in float32."""
    if torch.compiler.is_compiling():
        from regard.ops.sinkhorn_compiled import balance_operator

        return balance_operator(logits, iterations, in_time)[0]
    return _Balance.apply(logits, iterations, in_time)


def _is_wide(logits: Tensor, in_time: bool) -> bool:
    """Return whether no program holds a matrix."""
    return max(logits.shape[-2:]) > (LARGEST_IN_TIME if in_time else LARGEST_MATRIX)


def _shape(logits: Tensor) -> tuple[int, dict[str, int]]:
    """Return the number of matrices, and what kernels are compiled for."""
    r, c = logits.shape[-2:]
    blocks = [max(SMALLEST_DOT, 1 << (size - 1).bit_length()) for size in (r, c)]
    own = {"BR": blocks[0], "BC": blocks[1], "EVEN": [r, c] == blocks, "num_warps": 16 if max(blocks) > 64 else 8}
    return math.prod(logits.shape[:-2]), own


def _plain(logits: Tensor, iterations: int, in_time: bool) -> Tensor:
    if in_time:
        return balanced_in_time(iterations, logits)
    return balanced(iterations, logits, logits > MASKED_SCORE / 2)


class _Balance(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, in_time: bool) -> Tensor:
        logits = logits.contiguous()
        out, kept = balance_pass(logits, iterations, in_time)
        ctx.save_for_backward(logits, kept)
        ctx.in_time = in_time
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        logits, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return differentiable_grads(lambda x: (_plain(x, kept.shape[1], ctx.in_time),), (logits,), (grad,))[0], None, None
        return balance_pass_grads(logits, kept, grad, ctx.in_time), None, None


def balance_pass(logits: Tensor, iterations: int, in_time: bool = False) -> tuple[Tensor, Tensor]:
    """Return the weights of logits without gaps, and what the gradients need: something for every iteration."""
    from regard.ops import balance_kernels as kernels

    (r, c), (count, own) = logits.shape[-2:], _shape(logits)
    out = torch.empty_like(logits)
    kept = logits.new_empty(count, iterations, r * c if in_time else r + c)
    wide = _is_wide(logits, in_time)
    if wide and not in_time:
        _balance_parts(logits, out, kept)
        return out, kept
    kernel = kernels.balance_in_time if in_time else kernels.balance_rows_and_columns
    if wide:
        kernel, own = kernels.balance_wide_in_time, _strips(r, c)
    launch_kernel(kernel, (count,), (logits, out, kept), (r, c, iterations), own)
    return out, kept


def balance_pass_grads(logits: Tensor, kept: Tensor, grad: Tensor, in_time: bool = False) -> Tensor:
    """Return the gradient of the logits."""
    from regard.ops import balance_kernels as kernels

    if _is_wide(logits, in_time):
        return _wide_in_time_grads(logits, kept, grad) if in_time else _parts_grads(logits, kept, grad.contiguous())
    (r, c), (count, own) = logits.shape[-2:], _shape(logits)
    found = torch.empty_like(logits)
    kernel = kernels.balance_in_time_grads if in_time else kernels.balance_grads
    launch_kernel(kernel, (count,), (logits, kept, grad.contiguous(), found), (r, c, kept.shape[1]), own)
    return found


def _wide_in_time_grads(logits: Tensor, kept: Tensor, grad: Tensor) -> Tensor:
    """The same in the order of time, for matrices that no program holds."""
    from regard.ops import balance_kernels as kernels

    (r, c), (count, iterations, _) = logits.shape[-2:], kept.shape
    found, own = torch.empty_like(logits), _strips(r, c)
    tensors = (logits, kept, grad.clone(memory_format=torch.contiguous_format), found)
    launch_kernel(kernels.balance_wide_in_time_grads, (count,), tensors, (r, c, ceil_div(r, own["BR"]), iterations), own)
    return found


def _strips(r: int, c: int) -> dict[str, int]:
    """Return what the kernels of strips are compiled for."""
    columns = max(SMALLEST_DOT, 1 << (c - 1).bit_length())
    rows = min(max(STRIP_ELEMENTS // columns, 1), 1 << (r - 1).bit_length())
    return {"BR": max(SMALLEST_DOT, rows), "BC": columns, "num_warps": 16, "num_stages": 1}


def _parts(kernel: str, logits: Tensor) -> tuple[Tensor, tuple[int, ...], dict[str, int]]:
    """Return room for the sums of parts, the numbers r, c, parts and matrices, and what kernels of parts are compiled for.

    A configuration has the most parts of a matrix, and the elements of a strip of a part, which has a row for every warp at
    least: rows are summed inside of one.
    """
    r, c = logits.shape[-2:]
    count, columns = math.prod(logits.shape[:-2]), 1 << (c - 1).bit_length()
    config = dict(kernel_config(kernel, f"{columns} columns", logits.device))
    most, rows = config.pop("parts"), max(config.pop("elements") // columns, config.get("num_warps", 1))
    strips = 1 << (ceil_div(r, most * rows) - 1).bit_length()
    even = c == columns and r % (strips * rows) == 0
    own = {"BR": rows, "BC": columns, "STRIPS": strips, "PARTS": most, "EVEN": even, **config}
    return logits.new_empty(2, count, most, columns), (r, c, ceil_div(r, strips * rows), count), own


def _balance_parts(logits: Tensor, out: Tensor, kept: Tensor) -> None:
    """Write weights and potentials of wide matrices: a launch for the sums of columns, then one for every iteration."""
    from regard.ops import balance_parts_kernels as kernels

    sums, numbers, own = _parts("balance_parts", logits)
    grid, iterations = (numbers[2] * numbers[3],), kept.shape[1]
    launch_kernel(kernels.balance_parts_start, grid, (logits, sums), numbers, own)
    for t in range(iterations):
        launch_kernel(kernels.balance_parts_step, grid, (logits, out, kept, sums), (*numbers, iterations, t), own)


def _parts_grads(logits: Tensor, kept: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the logits of wide matrices: a launch for every iteration, then one for all gradients."""
    from regard.ops import balance_parts_kernels as kernels

    sums, numbers, own = _parts("balance_part_grads", logits)
    grid, iterations = (numbers[2] * numbers[3],), kept.shape[1]
    found, given = torch.empty_like(logits), (logits, kept, grad, torch.empty_like(kept), sums)
    for t in reversed(range(iterations)):
        last = {**own, "LAST": t == iterations - 1}
        launch_kernel(kernels.balance_parts_adjoints, grid, given, (*numbers, iterations, t), last)
    strips = ceil_div(numbers[0], own["BR"])
    del own["STRIPS"]
    launch_kernel(kernels.balance_parts_grads, (strips * numbers[3],), (*given, found), (*numbers, iterations, strips), own)
    return found
