"""Triton kernels of causal linear attention, forward: sums of segments, a scan over segments, outputs.

A sequence is cut into segments of SEG tokens, and a segment into tiles of C tokens. No program waits for another one.

    sums      what each segment adds to the state and its norm, and by how much it lets them decay
    scan      the state before every segment, or the adjoint state behind every segment
    forward   outputs of one tile: the state before its segment, the tiles before it in the segment, and its own

Letters as in `linear_op`. State buffers are (b g slots f e), one slot for each segment and one behind the last; BF and BE are the
padded tile sizes. DECAY is 0 for none, 1 for one number a token, 2 for one a feature. FEATURE is 0 for none, 1 for elu + 1 and 2
for relu. Decays come as their sums from the start of every segment (LEVEL of the first kernel). All products take operands of
the type `TYPE`, sums are float32; no exponent is ever positive, but for those of `triton_feature_decay.py`, which are bounded.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import tile_scores
from regard.ops.linear.triton_tiles import (
    apply_feature,
    column_mask,
    exp_of,
    gate_decay,
    inverse_norm,
    key_columns,
    key_rows,
    level_at,
    level_columns,
    level_rows,
    one_level,
    output_factor,
    prefix_rows,
    present,
    token_levels,
    token_rows,
)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "tiles"])
def linear_sums(
    K, V, LD, VALID, S, Z, A, LEVEL, FIRST, FIRST_Z, TZ,
    skb, skh, skn, svb, svh, svn, slb, slh, sln,
    gate_root, n, segs, slots, SEG, tiles, G,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    GATES: tl.constexpr, CUMSUM: tl.constexpr, WITH_FIRST: tl.constexpr, TILE_NORMS: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum k_j v_j^T and k_j over a segment, each with the decay of the tokens behind it; A: the log decay of all its tokens.

    WITH_FIRST: there is one segment, and the state before it is added. CUMSUM: `tl.cumsum` of vectors may be used, which fails
    beside other sums for some numbers of warps. LEVEL (b g n), or (b g n f) for a decay per feature, gets the log decay from the
    start of the segment up to every token. TILE_NORMS: TZ (b g tiles f) gets the sums of the keys of every tile.
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
    s = tl.zeros([BE, BF], tl.float32)
    z = tl.zeros([BF], tl.float32)
    total = tl.zeros([BF], tl.float32)
    passed = 0.0
    for low in range(0, count, C):
        j = low + tl.arange(0, C)
        k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
        v = token_rows(V, j, svn, c, count, e)
        if DECAY == 2:
            logs = token_rows(LD, j, sln, d, count, f).to(tl.float32)
            if GATES:
                there = column_mask(present(VALID, j, count, HAS_VALID)[:, None], d, f)
                logs = tl.where(there, gate_decay(logs, gate_root), 0.0)
            level = prefix_rows(logs, False, TYPE)
            chunk = tl.sum(logs, 0)
            k = k.to(tl.float32) * exp_of(tl.minimum(chunk[None, :] - level, 0.0))
            if part == 0:
                mask = (d[None, :] < f) & (j[:, None] < count)
                tl.store(LEVEL + ((b * G + g) * n + start + j[:, None]) * f + d[None, :], total[None, :] + level, mask=mask)
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
            k = k.to(tl.float32) * exp_of(tl.minimum(total_log - level, 0.0))[:, None]
            chunk = total_log + tl.zeros([BF], tl.float32)
            if part == 0:
                tl.store(LEVEL + (b * G + g) * n + start + j, passed + level, mask=j < count)
            passed += total_log
        if DECAY > 0:
            s = s * exp_of(chunk)[None, :]
            z = z * exp_of(chunk)
            total += chunk
        s = tl.dot(tl.trans(v.to(TYPE)), k.to(TYPE), s, input_precision=PRECISION)
        if NORM:
            added = tl.sum(k.to(tl.float32), 0)
            z += added
            if TILE_NORMS and part == 0:
                tl.store(TZ + (bg * tiles + (seg * SEG + low) // C) * f + d, added, mask=d < f)
    at = (bg * slots + seg) * f
    inside = d < f
    state_at = d[None, :] * e + c[:, None]
    mask = inside[None, :] & (c[:, None] < e)
    if WITH_FIRST:
        s += tl.load(FIRST + at * e + state_at, mask=mask, other=0.0) * exp_of(total)[None, :]
        if NORM:
            z += tl.load(FIRST_Z + at + d, mask=inside, other=0.0) * exp_of(total)
    tl.store(S + at * e + state_at, s, mask=mask)
    if part == 0:
        if NORM:
            tl.store(Z + at + d, z, mask=inside)
        if DECAY > 0:
            tl.store(A + at + d, total, mask=inside)


@triton.jit
def _after(keep_a, a, keep_b, b):
    """Compose two maps y -> keep y + x."""
    return keep_a * keep_b, b + keep_b * a


@triton.jit(do_not_specialize=["segs", "heads"])
def linear_scan(
    OWN, OWN_Z, S, Z, A, FIRST, FIRST_Z, LAST, LAST_Z, OTHER, OTHER_Z, DOT,
    segs, heads,
    f: tl.constexpr, e: tl.constexpr, BE: tl.constexpr, SB: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr,
    REVERSE: tl.constexpr, HAS_OWN: tl.constexpr, HAS_FIRST: tl.constexpr, WITH_STATES: tl.constexpr, WITH_DOT: tl.constexpr,
):  # fmt: skip
    """Scan one feature of one key-value head over the segments, SB of them at a time.

    OWN (b g heads slots f e): what each segment adds, summed over `heads`. S (b g slots f e) gets the state before every segment
    and LAST the one behind all; with REVERSE from the last segment to the first: S gets the adjoint behind every segment and
    LAST that before the first. HAS_FIRST: the scan begins with FIRST, else with 0. WITH_DOT: DOT (b g slots f) gets the products
    of the adjoint behind every segment with OTHER (b g slots f e), the state there.
    """
    pid = tl.program_id(0).to(tl.int64)
    bg, row = pid // f, pid % f
    r = tl.arange(0, SB)
    c = tl.arange(0, BE)
    inside = c < e
    slots = segs + 1
    carry = tl.zeros([BE], tl.float32)
    norm = 0.0
    if HAS_FIRST:
        carry += tl.load(FIRST + pid * e + c, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            norm += tl.load(FIRST_Z + pid).to(tl.float32)
    if WITH_STATES:
        begin = (bg * slots + (segs - 1 if REVERSE else 0)) * f + row
        tl.store(S + begin * e + c, carry.to(S.dtype.element_ty), mask=inside)
        if NORM:
            tl.store(Z + begin, norm)
        if WITH_DOT:
            behind = begin + f  # the slot behind the segment
            outset = tl.sum(carry * tl.load(OTHER + behind * e + c, mask=inside, other=0.0).to(tl.float32), 0)
            if NORM:
                outset += norm * tl.load(OTHER_Z + behind)
            tl.store(DOT + begin, outset)
    for low in range(0, segs, SB):
        step = low + r
        there = step < segs
        seg = step
        if REVERSE:
            seg = segs - 1 - step
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
            keep = exp_of(tl.load(A + spot, mask=there, other=0.0))
            kept, after = tl.associative_scan((keep[:, None] + tl.zeros([SB, BE], tl.float32), own), 0, _after)
            after += kept * carry[None, :]
        else:
            after = tl.cumsum(own, 0) + carry[None, :]
        if NORM:
            if DECAY > 0:
                kept_z, after_z = tl.associative_scan((keep, own_z), 0, _after)
                after_z += kept_z * norm
            else:
                after_z = tl.cumsum(own_z, 0) + norm
        if WITH_STATES:
            into = spot - f if REVERSE else spot + f
            stored = there & (seg > 0) if REVERSE else there
            mask = stored[:, None] & inside[None, :]
            tl.store(S + into[:, None] * e + c[None, :], after.to(S.dtype.element_ty), mask=mask)
            if NORM:
                tl.store(Z + into, after_z, mask=stored)
            if WITH_DOT:
                state = tl.load(OTHER + spot[:, None] * e + c[None, :], mask=mask, other=0.0).to(tl.float32)
                product = tl.sum(after * state, 1)
                if NORM:
                    product += after_z * tl.load(OTHER_Z + spot, mask=stored, other=0.0)
                tl.store(DOT + into, product, mask=stored)
        carry = tl.sum(tl.where(r[:, None] == SB - 1, after, 0.0), 0)
        if NORM:
            norm = tl.sum(tl.where(r == SB - 1, after_z, 0.0), 0)
    tl.store(LAST + pid * e + c, carry, mask=inside)
    if NORM:
        tl.store(LAST_Z + pid, norm)


@triton.jit(do_not_specialize=["n", "tiles", "SEG", "slots"])
def linear_forward(
    Q, K, V, LEVEL, VALID, S, Z, OUT, DEN,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln,
    scale, n, tiles, SEG, slots, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_STATE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n h e) and its norm DEN (b h n) of one tile of C tokens, one query head and BE numbers of the values.

    NORMALIZE is 0 for sums, 1 for sums divided by their norm, and 2 for sums with factors that DEN holds: then there is no norm.
    Without HAS_KEYS all queries read the same state; without HAS_STATE it is 0.
    """
    pid = tl.program_id(0)
    part, tile, bh = pid % PARTS, (pid // PARTS) % tiles, (pid // PARTS // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // R
    seg = tile * C // SEG
    low = tile * C - seg * SEG
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
    i = low + r
    q = apply_feature(token_rows(Q, i, sqn, d, count, f), FEATURE)
    entry = q
    if DECAY == 2:  # from the token before the tile on
        before = level_at(LEVEL, low - 1, sln, d, f, DECAY)
        entry = q.to(tl.float32) * exp_of(level_rows(LEVEL, i, sln, d, count, f) - before[None, :])
    if DECAY == 1:
        level = token_levels(LEVEL, i, sln, count)
        before = one_level(LEVEL, low - 1, sln)
    late = entry.to(TYPE)
    o = tl.zeros([C, BE], tl.float32)
    den = tl.zeros([C], tl.float32)
    if HAS_STATE:
        at = (b * (H // R) + g) * slots * f
        if HAS_KEYS:
            at += seg * f
        mask = (d[:, None] < f) & (c[None, :] < e)
        s = tl.load(S + at * e + d[:, None] * e + c[None, :], mask=mask, other=0.0)
        if DECAY == 2:
            s = s.to(tl.float32) * exp_of(before)[:, None]
        o = tl.dot(late, s.to(TYPE), o, input_precision=PRECISION)
        if NORM:
            z = tl.load(Z + at + d, mask=d < f, other=0.0).to(tl.float32)
            if DECAY == 2:
                z = z * exp_of(before)
            den = tl.sum(entry.to(tl.float32) * z[None, :], 1)
        if DECAY == 1:
            o = o * exp_of(before)
            den = den * exp_of(before)
    if HAS_KEYS:
        for other in range(0, low, C):
            j = other + r
            kt = key_columns(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID, True)
            if DECAY == 2:
                kt = kt.to(tl.float32) * exp_of(before[:, None] - level_columns(LEVEL, j, sln, d, count, f))
            a = tl.dot(late, kt.to(TYPE), input_precision=PRECISION)
            if DECAY == 1:
                a = a * exp_of(before - token_levels(LEVEL, j, sln, count))[None, :]
            if NORM:
                den += tl.sum(a, 1)
            v = token_rows(V, j, svn, c, count, e, True)
            o = tl.dot(a.to(TYPE), v.to(TYPE), o, input_precision=PRECISION)
        if DECAY == 1:
            share = exp_of(level - before)
            o = o * share[:, None]
            den = den * share
        if DECAY == 2:
            k = key_rows(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID).to(tl.float32)
            a = tile_scores(q.to(tl.float32), k, LEVEL, low, sln, d, count, f, C, False, TYPE, PRECISION)
        else:
            kt = key_columns(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
            a = tl.dot(late, kt.to(TYPE), input_precision=PRECISION)
            if DECAY == 1:
                a = a * exp_of(tl.where(r[:, None] >= r[None, :], level[:, None] - level[None, :], float("-inf")))
            else:
                a = tl.where(r[:, None] >= r[None, :], a, 0.0)
        if NORM:
            den += tl.sum(a, 1)
        v = token_rows(V, i, svn, c, count, e)
        o = tl.dot(a.to(TYPE), v.to(TYPE), o, input_precision=PRECISION)
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
