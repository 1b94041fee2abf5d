"""The backend "triton": fused kernels for tile attention, forward and backward, on CUDA devices.

float16, bfloat16 and float32 with float32 sums; any length, grouped heads without copies, padding, ALiBi, relative positions,
dropout by pair. Results are deterministic. What the kernels do not compute (float64, very wide heads) is refused with a sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.cache import bounded_cache
from regard.ops.tile.call import Gradients, HeadPlans, TileCall
from regard.ops.tile.tile_launch import TritonPass
from regard.ops.tile.tile_sizes import PairGroup
from regard.ops.tile.triton_heads import HeadsPass, MixedHeadsPass, kinds_of_heads, mixed_pieces, plans_of_piece
from regard.ops.triton_support import FURTHEST, WIDEST_HEAD, triton_cannot_run
from regard.patterns.tile_list import KernelPlan, kernel_items, kernel_plan

WIDEST_FLOAT_HEAD = 128  # the tiles of wider ones do not fit into the shared memory of a multiprocessor


class TritonTiles:
    """Tile attention in Triton kernels."""

    name = "triton"
    devices = ("cuda",)

    def refuses(self, call: TileCall, plans: HeadPlans) -> str | None:
        if why := triton_cannot_run(call.q, call.k, call.v):
            return why
        widest = WIDEST_FLOAT_HEAD if call.q.dtype == torch.float32 else WIDEST_HEAD
        if max(call.q.shape[-1], call.v.shape[-1]) > widest:
            return f"a head has at most {widest} columns of this type, here {max(call.q.shape[-1], call.v.shape[-1])}"
        if not call.q.dtype == call.k.dtype == call.v.dtype:
            return f"queries, keys and values are of one type, here {call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
        if any(x.shape[2] * x.stride(2) >= FURTHEST for x in (call.q, call.k, call.v)):
            return "a head of one sequence reaches over more than 2^31 elements"
        return _refused_classes(call) or _refused(plans)

    def prepare(self, call: TileCall, plans: HeadPlans) -> TritonPass | MixedHeadsPass:
        heads, share, device = call.q.shape[1], call.q.shape[1] // call.k.shape[1], call.q.device
        if len(kinds_of_heads(plans)) < 2:
            return TritonPass(call, plans, _groups(plans, heads, share, device))
        passes = []
        for piece in mixed_pieces(plans, heads, share):
            own = plans_of_piece(plans, piece, heads)
            count = sum(len(one.heads) for one in own)
            passes.append(HeadsPass(call, piece, own, _groups(own, count, piece.share, device)))
        return MixedHeadsPass(call, plans, tuple(passes))

    def forward(self, call: TileCall, plans: HeadPlans) -> tuple[Tensor, Tensor]:
        return self.prepare(call, plans).forward(call)

    def backward(
        self, call: TileCall, plans: HeadPlans, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        return self.prepare(call, plans).backward(call, out, lse, d_out, d_lse)


def _refused_classes(call: TileCall) -> str | None:
    if call.bias is None or (call.bias.by_query is None and not call.bias.mass):
        return None
    _, h, n, _ = call.q.shape
    if h * n * (call.v.shape[-1] + call.bias.classes) >= FURTHEST:
        return f"the {call.bias.classes} distance classes of one sequence have more than 2^31 elements"
    return None


def _refused(plans: HeadPlans) -> str | None:
    every = (kernel_plan(own.plan) for own in plans)
    return next((plan.refused for plan in every if plan.refused), None)


@bounded_cache(lambda groups: sum(group.size for group in groups))
def _groups(plans: HeadPlans, heads: int, share: int, device: torch.device) -> tuple[PairGroup, ...]:
    """Return what is launched for a call, in order."""
    span = plans[0].plan.span
    every = [kernel_plan(own.plan) for own in plans]
    if len(every) == 1 and every[0].by_query is None:
        plain = [PairGroup(every[0].band)] if every[0].band is not None else []
        return (*plain, *(PairGroup(strided=x) for x in every[0].strided))
    by_head: dict[int, KernelPlan] = {}
    for own, plan in zip(plans, every, strict=True):
        by_head.update(dict.fromkeys(own.heads, plan))
    each = (every[0],) if len(every) == 1 else tuple(by_head[h] for h in range(heads))
    by_query = kernel_items(each, share, span.n, False, device)
    by_key = kernel_items(each, share, span.m, True, device)
    size = sum(x.items.numel() + x.entries.numel() + x.masks.numel() for x in (by_query, by_key))
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)  # other streams read them too
    led = every[0].led if len(every) == 1 else None
    return (PairGroup((0, 0), by_query, by_key, size=size, led=led), *(PairGroup(strided=x) for x in every[0].strided))
