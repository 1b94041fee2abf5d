"""Laws of growth: FLOPs of a pass and bytes of a state grow with the length as the row claims."""

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.laws.law_case import LAW_HEADS, LAW_WIDTH, Case
from regard.laws.law_table import law
from regard.laws.verdicts import DoesNotApply, LawBroken, demand
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Mixer

_LENGTHS = (4096, 16384)  # that the growth of cost is measured between: four times as long
_LOOP_LENGTHS = (128, 512)  # of a core whose scan is the loop over tokens: longer ones take minutes
_UNCLAIMED = "no growth is claimed for these options; measured: {}. Register it with Example(..., {}) to claim that"


@law("write in `Example(cost=...)` how FLOPs grow, n ** cost, or remove the products of all queries with all keys")
def cost_grows_as_claimed(case: Case) -> None:
    """FLOPs of a pass over n tokens grow as n ** cost.

    `case` has the mechanism and the growth that its example claims.

    >>> from regard.laws import Case, cost_grows_as_claimed
    >>> cost_grows_as_claimed(Case("linear"))
    """
    found = [_cost_growth(case, mode["causal"]) for mode in case.modes()]
    if case.example is None:
        worst = max((growth for growth, _ in found if growth is not None), default=0.0)
        raise DoesNotApply(_UNCLAIMED.format(f"n ** {worst:.2f}", f"cost={_exponent(worst)}"))
    for growth, flops in found:
        if growth is None:
            raise DoesNotApply("it has no product of matrices to count")
        counts = f"n ** {growth:.2f} for n ** {case.example.cost:g}: {flops[0]:,} and {flops[1]:,} FLOPs"
        demand(abs(growth - case.example.cost) < 0.2, "cost grows in another way than claimed", counts)


def _exponent(growth: float) -> str:
    return f"{round(growth)}" if abs(growth - round(growth)) < 0.2 else f"{growth:.1f}"


def _cost_growth(case: Case, causal: bool) -> tuple[float | None, list[int]]:
    """Count FLOPs at two lengths, beside those of projections; returns the exponent (None without any) and the counts."""
    case.latest = {"causal": causal, "max_len": max(_LENGTHS)}
    with torch.device("meta"):
        dims = Dims(LAW_WIDTH, LAW_HEADS, max_len=max(_LENGTHS), causal=causal)
        m = case.spec.build(dims, positions=case.positions).double().eval()
    around = m.named_parameters() if isinstance(m, Attention) else ()
    weights = sum(p.numel() for name, p in around if p.dim() == 2 and not name.startswith("core"))
    flops = []
    for n in _lengths(case, m):
        x = torch.empty(1, n, LAW_WIDTH, dtype=torch.float64, device="meta")
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            m(x)
        flops.append(counter.get_total_flops() - 2 * n * weights)
    return (math.log(flops[1] / flops[0], 4) if all(flops) else None), flops


def _lengths(case: Case, m: Mixer) -> tuple[int, ...]:
    """Return the two lengths: those of a loop or of a fast path, a quarter where cost is linear or all pairs have a score."""
    loop = m.dims.causal and isinstance(m, Attention) and type(m.core).scan is Core.scan
    lengths = _LOOP_LENGTHS if loop else _LENGTHS
    short = case.row.family == "softmax" or (case.example is not None and case.example.cost == 1)
    return tuple(n // 4 for n in lengths) if short else lengths


@law(
    "write in `Example(memory=...)` how the state grows, t ** memory, or drop in `forget` what no later query can see",
    Can.STREAM,
    causal=True,
)
def memory_grows_as_claimed(case: Case) -> None:
    """The state after t tokens has bytes that grow as t ** memory.

    `case` has the mechanism and the growth that its example claims.

    >>> from regard.laws import Case, memory_grows_as_claimed
    >>> memory_grows_as_claimed(Case("linear"))
    """
    claimed = None if case.example is None else case.example.memory
    bounded = claimed == 0
    most = 512 if bounded else 1024  # what does not grow is seen sooner
    sizes = _state_bytes(case, most)
    growth = math.log2(sizes[most] / sizes[256]) / math.log2(most / 256)
    if case.example is None:
        raise DoesNotApply(_UNCLAIMED.format(f"t ** {growth:.2f}", f"memory={max(round(growth), 0)}"))
    if claimed is None:
        raise LawBroken("its row says memory=None, which is for what does not stream", f"measured: t ** {growth:.2f}")
    if not bounded and abs(growth - claimed) >= 0.15:  # buffers that grow in large steps: more of them
        most = 2048
        sizes = _state_bytes(case, most)
        growth = math.log2(sizes[most] / sizes[256]) / math.log2(most / 256)
    counts = f"t ** {growth:.2f} for t ** {claimed}: {sizes[256]:,} bytes at 256 tokens, {sizes[most]:,} at {most}"
    demand(abs(growth - claimed) < 0.15, "the state grows in another way than claimed", counts)


def _state_bytes(case: Case, most: int) -> dict[int, int]:
    """Stream `most` tokens in pieces and single tokens; returns the bytes of the state by the number of tokens."""
    m, x, size = case.build(causal=True, max_len=most), case.data(most, b=1), {}
    with torch.no_grad():
        state = m.start(1)
        for t in range(0, most, 64):
            for cut in [64] if t % 256 else [1] * 16 + [48]:
                _, state = m.extend(state, x[:, t : t + cut])
                t += cut
            size[t] = max(state.nbytes, 1)
    return size
