"""One decoding step over a KV cache in Triton: the new key and value are written, and the query reads what a window shows it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["room", "scale", "back", "step", "first", "rows"])
def window_step_kernel(
    Q, K, V, AT, VALID, WHERE, NEW_K, NEW_V, SLOT, OUT,
    sqb, sqh, skb, skg, skm, svb, svg, svm, sab, seb, sxb, syb, syg, szb, szg,
    room, scale, back, step, first, rows,
    H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, WRITES: tl.constexpr, STEPS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """One query head: softmax over the slots whose positions the query at WHERE (b) may see.

    A gap of 0 to `back`, a multiple of `step` (STEPS: step > 1), a key below `first` or a query below `rows` makes a pair; no
    later key does. WRITES: the new key goes into SLOT and counts at gap 0, whatever the cache holds there. EAGER: keys and
    values are loaded without waiting for their positions, also those that are not seen.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    g = h // SHARE
    d, e, m = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BM)
    i = tl.load(WHERE + b * sxb)
    q = tl.load(Q + b * sqb + h * sqh + d, mask=d < D, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)
    keys, values = K + b * skb + g * skg, V + b * svb + g * svg
    slot = room
    top = tl.sum(tl.zeros([BD], tl.float32), 0) + float("-inf")
    total = tl.sum(tl.zeros([BD], tl.float32), 0)
    out = tl.zeros([BE], tl.float32)
    if WRITES:
        slot = tl.load(SLOT).to(tl.int32)
        k = tl.load(NEW_K + b * syb + g * syg + d, mask=d < D, other=0.0)
        v = tl.load(NEW_V + b * szb + g * szg + e, mask=e < E, other=0.0)
        owner = h % SHARE == 0
        tl.store(keys + slot * skm + d, k.to(K.dtype.element_ty), mask=(d < D) & owner)
        tl.store(values + slot * svm + e, v.to(V.dtype.element_ty), mask=(e < E) & owner)
        itself = (back >= 0) | (i < first) | (i < rows)
        top = tl.where(itself, tl.sum(q * k.to(tl.float32), 0), float("-inf"))
        total = tl.where(itself, 1.0, 0.0)
        out = tl.where(itself, v.to(tl.float32), 0.0)
    for low in range(0, room, BM):
        j = low + m
        inside = (j < room) & (j != slot)
        gap = i - tl.load(AT + b * sab + j, mask=inside, other=0)
        near = gap <= back
        if STEPS:
            near = near & (gap % step == 0)
        seen = inside & (gap >= 0) & (near | (i - gap < first) | (i < rows))
        seen = seen & (tl.load(VALID + b * seb + j, mask=inside, other=0) != 0)
        wanted = inside if EAGER else seen
        key = tl.load(keys + j[:, None] * skm + d[None, :], mask=wanted[:, None] & (d[None, :] < D), other=0.0)
        value = tl.load(values + j[:, None] * svm + e[None, :], mask=wanted[:, None] & (e[None, :] < E), other=0.0)
        if EAGER:
            value = tl.where(seen[:, None], value, 0.0)  # free slots may hold anything
        score = tl.where(seen, tl.sum(key.to(tl.float32) * q[None, :], 1), float("-inf"))
        highest = tl.maximum(top, tl.max(score, 0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - safe)
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weight, 0)
        out = out * fade + tl.sum(weight[:, None] * value.to(tl.float32), 0)
        top = highest
    out = tl.where(total > 0, out / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(OUT + (b * H + h) * E + e, out.to(OUT.dtype.element_ty), mask=e < E)
