"""Triton kernels of causal linear attention, forward: sums of segments, a scan over segments, outputs.

A sequence is cut into segments, which run in parallel; a segment is walked in chunks of C tokens. Sums and states are float32.

    sums      what each segment adds to the state and its norm, and by how much it lets them decay
    scan      the state before every segment, or the adjoint state behind every segment
    forward   outputs of a segment from the state before it

Letters as in `linear_op`. State buffers are (b g slots f e), one slot for each segment and one behind the last; BF and BE are the
padded tile sizes. DECAY is 0 for none, 1 for one number a token, 2 for one a feature. FEATURE is 0 for none, 1 for elu + 1 and 2
for relu. Decays come as their sums from the start of every chunk (LEVEL of the first kernel). All products take operands of
the type `TYPE`; no exponent is ever positive.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import halved_scores
from regard.ops.linear.triton_tiles import (
    apply_feature,
    chunk_decay,
    chunk_levels,
    end_decay_columns,
    end_decay_rows,
    gate_decay,
    inverse_norm,
    key_columns,
    key_rows,
    output_factor,
    present,
    row_mask,
    start_decay_rows,
    token_columns,
    token_rows,
)


@triton.jit(do_not_specialize=["n", "segs", "SEG"])
def linear_sums(
    K, V, LD, VALID, S, Z, A, LEVEL,
    skb, skh, skn, svb, svh, svn, slb, slh, sln,
    gate_root, n, segs, SEG, G,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, FEATURE: tl.constexpr,
    HAS_VALID: tl.constexpr, GATES: tl.constexpr, CUMSUM: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum k_j v_j^T and k_j over a segment, each with the decay of the tokens behind it; A: the log decay of all its tokens.

    CUMSUM: `tl.cumsum` of vectors may be used, which fails beside other sums for some numbers of warps.
    LEVEL (b g n), or (b g n f) for a decay per feature, gets the log decay from the start of the chunk up to every token.
    """
    pid = tl.program_id(0)
    part, seg, bg = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    b, g = bg // G, bg % G
    start = (seg * SEG).to(tl.int64)
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LD += b * slb + g * slh + start * sln
    VALID += b * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    d = tl.arange(0, BF)
    c = part * BE + tl.arange(0, BE)
    s = tl.zeros([BF, BE], tl.float32)
    z = tl.zeros([BF], tl.float32)
    total = tl.zeros([BF], tl.float32)
    for low in range(0, count, C):
        j = low + tl.arange(0, C)
        kt = key_columns(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
        v = token_rows(V, j, svn, c, count, e)
        if DECAY == 2:
            logs = token_columns(LD, j, sln, d, count, f).to(tl.float32)
            if GATES:
                there = row_mask(present(VALID, j, count, HAS_VALID)[None, :], d, f)
                logs = tl.where(there, gate_decay(logs, gate_root), 0.0)
            level = tl.cumsum(logs, 1)
            chunk = tl.sum(logs, 1)
            kt = kt.to(tl.float32) * tl.exp(tl.minimum(chunk[:, None] - level, 0.0))
            if part == 0:
                mask = (d[:, None] < f) & (j[None, :] < count)
                tl.store(LEVEL + ((b * G + g) * n + start + j[None, :]) * f + d[:, None], level, mask=mask)
        if DECAY == 1:
            r = tl.arange(0, C)
            log = tl.load(LD + j * sln, mask=j < count, other=0.0).to(tl.float32)
            if GATES:
                log = tl.where(present(VALID, j, count, HAS_VALID), gate_decay(log, gate_root), 0.0)
            if CUMSUM:
                level = tl.cumsum(log, 0)
            else:
                level = tl.sum(tl.where(r[:, None] >= r[None, :], log[None, :], 0.0), 1)
            total_log = tl.sum(log, 0)
            kt = kt.to(tl.float32) * tl.exp(tl.minimum(total_log - level, 0.0))[None, :]
            chunk = total_log + tl.zeros([BF], tl.float32)
            if part == 0:
                tl.store(LEVEL + (b * G + g) * n + start + j, level, mask=j < count)
        if DECAY > 0:
            s = s * tl.exp(chunk)[:, None]
            z = z * tl.exp(chunk)
            total += chunk
        s = tl.dot(kt.to(TYPE), v.to(TYPE), s, input_precision=PRECISION)
        if NORM:
            z += tl.sum(kt.to(tl.float32), 1)
    at = (bg * (segs + 1) + seg) * f
    inside = d < f
    tl.store(S + at * e + d[:, None] * e + c[None, :], s, mask=inside[:, None] & (c[None, :] < e))
    if part == 0:
        if NORM:
            tl.store(Z + at + d, z, mask=inside)
        if DECAY > 0:
            tl.store(A + at + d, total, mask=inside)


@triton.jit(do_not_specialize=["segs", "heads"])
def linear_scan(
    OWN, OWN_Z, S, Z, A, FIRST, FIRST_Z, LAST, LAST_Z, OTHER, OTHER_Z, DOT,
    segs, heads,
    f: tl.constexpr, e: tl.constexpr, BE: tl.constexpr, SB: tl.constexpr,
    DECAY: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr, HAS_OWN: tl.constexpr, WITH_DOT: tl.constexpr,
):  # fmt: skip
    """Scan one feature of one key-value head over the segments, SB of them at a time.

    OWN (b g heads slots f e): what each segment adds, summed over `heads`. S (b g slots f e) gets the state before every segment
    and LAST the one behind all; with REVERSE from the last segment to the first. WITH_DOT: DOT (b g slots f) gets the products
    of the adjoint behind every segment with OTHER (b g slots f e), the state there.
    """
    pid = tl.program_id(0).to(tl.int64)
    bg, row = pid // f, pid % f
    r = tl.arange(0, SB)
    c = tl.arange(0, BE)
    inside = c < e
    slots = segs + 1
    carry = tl.load(FIRST + pid * e + c, mask=inside, other=0.0).to(tl.float32)
    norm = 0.0
    if NORM:
        norm = tl.load(FIRST_Z + pid).to(tl.float32)
    for low in range(0, segs, SB):
        seg = low + r
        there = seg < segs
        if REVERSE:
            seg = segs - 1 - seg
        spot = (bg * slots + seg) * f + row
        own = tl.zeros([SB, BE], tl.float32)
        own_z = tl.zeros([SB], tl.float32)
        if HAS_OWN:
            for head in range(heads):
                at = ((bg * heads + head) * slots + seg) * f + row
                own += tl.load(OWN + at[:, None] * e + c[None, :], mask=there[:, None] & inside[None, :], other=0.0)
                if NORM:
                    own_z += tl.load(OWN_Z + at, mask=there, other=0.0)
        if DECAY > 0:
            log = tl.load(A + spot, mask=there, other=0.0)
            until = tl.sum(tl.where(r[:, None] > r[None, :], log[None, :], 0.0), 1)  # up to the segment, without it
            between = until[:, None] - until[None, :] - log[None, :]
            weight = tl.exp(tl.where(r[:, None] > r[None, :], between, float("-inf")))
            kept = tl.exp(until)
            whole = tl.sum(log, 0)
            rest = tl.exp(tl.sum(tl.where(r[:, None] < r[None, :], log[None, :], 0.0), 1))
        else:
            weight = (r[:, None] > r[None, :]).to(tl.float32)
            kept = tl.full([SB], 1.0, tl.float32)
            whole = 0.0
            rest = kept
        before = tl.dot(weight, own, input_precision="ieee") + kept[:, None] * carry[None, :]
        tl.store(S + spot[:, None] * e + c[None, :], before, mask=there[:, None] & inside[None, :])
        if NORM:
            before_z = tl.sum(weight * own_z[None, :], 1) + kept * norm
            tl.store(Z + spot, before_z, mask=there)
        if WITH_DOT:
            other = spot + f  # the slot behind this segment
            state = tl.load(OTHER + other[:, None] * e + c[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            product = tl.sum(before * state, 1)
            if NORM:
                product += before_z * tl.load(OTHER_Z + other, mask=there, other=0.0)
            tl.store(DOT + spot, product, mask=there)
        carry = carry * tl.exp(whole) + tl.sum(own * rest[:, None], 0)
        norm = norm * tl.exp(whole) + tl.sum(own_z * rest, 0)
    tl.store(LAST + pid * e + c, carry, mask=inside)
    if NORM:
        tl.store(LAST_Z + pid, norm)
    if not REVERSE:
        spot = (bg * slots + segs) * f + row
        tl.store(S + spot * e + c, carry, mask=inside)
        if NORM:
            tl.store(Z + spot, norm)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "slots"])
def linear_forward(
    Q, K, V, LEVEL, VALID, S, Z, OUT, DEN, LAST, LAST_Z,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln,
    scale, n, segs, SEG, slots, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_KEYS: tl.constexpr, WITH_LAST: tl.constexpr, HALVINGS: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n h e) and its norm DEN (b h n) of one segment and query head.

    NORMALIZE is 0 for sums, 1 for sums divided by their norm, and 2 for sums with factors that DEN holds: then there is no norm.
    Without HAS_KEYS all queries read the same state. With WITH_LAST there is one segment, whose last state is stored.
    """
    pid = tl.program_id(0)
    part, seg, bh = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // R
    bg = b * (H // R) + g
    start = (seg * SEG).to(tl.int64)
    Q += b * sqb + h * sqh + start * sqn
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LEVEL += b * slb + g * slh + start * sln
    VALID += b * n + start
    OUT += ((b * n + start) * H + h) * e
    DEN += bh * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    d = tl.arange(0, BF)
    c = part * BE + tl.arange(0, BE)
    r = tl.arange(0, C)
    at = bg * slots * f
    if HAS_KEYS:
        at += seg * f
    inside = d < f
    state_at = d[:, None] * e + c[None, :]
    state_mask = inside[:, None] & (c[None, :] < e)
    s = tl.load(S + at * e + state_at, mask=state_mask, other=0.0).to(tl.float32)
    z = tl.zeros([BF], tl.float32)
    if NORM:
        z = tl.load(Z + at + d, mask=inside, other=0.0).to(tl.float32)
    for low in range(0, count, C):
        i = low + r
        q = apply_feature(token_rows(Q, i, sqn, d, count, f), FEATURE)
        if DECAY == 2:
            entry = q.to(tl.float32) * start_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
        else:
            entry = q
        o = tl.dot(entry.to(TYPE), s.to(TYPE), input_precision=PRECISION)
        den = tl.zeros([C], tl.float32)
        if NORM:
            den = tl.sum(entry.to(tl.float32) * z[None, :], 1)
        if DECAY == 1:
            level = chunk_levels(LEVEL, low, sln, count, C)
            share = tl.exp(level)
            o = o * share[:, None]
            den = den * share
        if HAS_KEYS:
            v = token_rows(V, i, svn, c, count, e).to(TYPE)
            if DECAY == 2:
                k = key_rows(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID).to(tl.float32)
                a = halved_scores(q.to(tl.float32), k, LEVEL, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
            else:
                kt = key_columns(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
                a = tl.dot(q.to(TYPE), kt.to(TYPE), input_precision=PRECISION)
                if DECAY == 1:
                    a = a * tl.exp(tl.where(r[:, None] >= r[None, :], level[:, None] - level[None, :], float("-inf")))
                else:
                    a = tl.where(r[:, None] >= r[None, :], a, 0.0)
            if NORM:
                den += tl.sum(a, 1)
            o = tl.dot(a.to(TYPE), v, o, input_precision=PRECISION)
            if DECAY == 2:
                k = k * end_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
                kt = tl.trans(k.to(TYPE))
            if DECAY == 1:
                kt = kt.to(tl.float32) * end_decay_columns(LEVEL, low, sln, d, count, f, C, DECAY)
            if DECAY > 0:
                chunk = chunk_decay(LEVEL, low, sln, d, count, f, C, DECAY)
                s = s * tl.exp(chunk)[:, None]
                z = z * tl.exp(chunk)
            s = tl.dot(kt.to(TYPE), v, s, input_precision=PRECISION)
            if NORM:
                z += tl.sum(kt.to(tl.float32), 1)
        den = den * scale
        if NORMALIZE == 1:
            o = o * (scale * inverse_norm(den))[:, None]
        elif NORMALIZE == 2:
            o = o * output_factor(DEN, i, count, scale, NORMALIZE)[:, None]
        else:
            o = o * scale
        mask = (i[:, None] < count) & (c[None, :] < e)
        tl.store(OUT + i[:, None] * (H * e) + c[None, :], o.to(OUT.dtype.element_ty), mask=mask)
        if NORM:
            if part == 0:
                tl.store(DEN + i, den, mask=i < count)
    if WITH_LAST:
        if h % R == 0:
            tl.store(LAST + at * e + state_at, s, mask=state_mask)
            if NORM:
                if part == 0:
                    tl.store(LAST_Z + at + d, z, mask=inside)
