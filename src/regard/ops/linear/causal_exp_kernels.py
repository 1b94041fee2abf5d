"""Triton kernels of causal attention by exponential random features, forward: no features are stored.

With L_jf = w_f . k'_j - |k'_j|^2 / 2 and M_if = w_f . q'_i, x' the shortened tokens of `exp_feature_kernels.py`,

    out_i = sum_j a_ij v_j / sum_j a_ij,   a_ij = sum_f exp(M_if + L_jf) over j <= i

A sequence is cut into tiles of C tokens, and those into runs of RUN tiles.

    sums   the state before every tile since the start of its run, and what each run adds, BF features a program
    scan   the state before every run, and that behind the last token
    read   outputs of a tile: both states before it, and its own pairs

Units. A state has one of every feature, the largest exponent that was summed: it is brought to the largest one of all features
when it is read. A pair has the largest exponent of its key, OWN, and of its query; an output has that of all keys so far. So no
exponent is positive, and nothing reads ahead. Logarithms are to base 2. Letters as in `noncausal_kernels.py`.
"""

import triton
import triton.language as tl

from regard.ops.linear.noncausal_exp_kernels import shortened_columns, shortened_rows
from regard.ops.linear.noncausal_kernels import LOG_OF_NOTHING, state_columns, state_tile
from regard.ops.linear.triton_tiles import LOG2_E, NORM_FLOOR, column_mask, inverse_norm, present, row_mask, token_rows


@triton.jit(do_not_specialize=["n", "tiles", "runs", "RUN"])
def causal_exp_sums(
    K, V, W, LOG_NORM, VALID, S, Z, TOP, OWN, RUN_S, RUN_Z, RUN_TOP, RUN_MOST,
    skb, skh, skn, svb, svh, svn, root, n, tiles, runs, RUN, G, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the sums of a run of keys before every tile, S (b g tiles f e), Z and TOP (b g tiles f), and of all of it, RUN_...

    OWN (b g blocks n): the largest exponent of every key in a block of BF features; RUN_MOST (b g runs blocks): of all keys.
    """
    blocks: tl.constexpr = (f + BF - 1) // BF
    block, run, bg = (
        tl.program_id(0) % blocks,
        tl.program_id(0) // blocks % runs,
        (tl.program_id(0) // blocks // runs).to(tl.int64),
    )
    rows = block * BF + tl.arange(0, BF)
    inside = rows < f
    b, g = bg // G, bg % G
    K += b * skb + g * skh
    V += b * svb + g * svh
    VALID += b * n
    OWN += (bg * blocks + block) * n
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    w = state_tile(W, 0, rows, a, f, d).to(LOGS)
    s = tl.zeros([BF, BE], tl.float32)
    z = tl.zeros([BF], tl.float32)
    top = tl.full([BF], LOG_OF_NOTHING, tl.float32)
    state_mask = column_mask(inside[:, None], c, e)
    for tile in range(run * RUN, tl.minimum(run * RUN + RUN, tiles)):
        at = (bg * tiles + tile) * f
        tl.store(S + (at + rows[:, None]) * e + c[None, :], s.to(S.dtype.element_ty), mask=state_mask)
        tl.store(Z + at + rows, z, mask=inside)
        tl.store(TOP + at + rows, top, mask=inside)
        j = tile * C + tl.arange(0, C)
        there = present(VALID, j, n, HAS_VALID)
        spot = j.to(tl.int64)
        k = tl.load(K + spot[None, :] * skn + a[:, None], mask=row_mask(there[None, :], a, d), other=0.0)
        v = tl.load(V + spot[:, None] * svn + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
        y, offset = shortened_columns(k, LOG_NORM + g // SHARE, root, HAS_NORM, LOGS)
        logs = tl.dot(w, y, input_precision=PRECISION) + tl.where(there, offset, float("-inf"))[None, :]
        if f % BF != 0:
            logs = tl.where(inside[:, None], logs, float("-inf"))
        tl.store(OWN + j, tl.maximum(tl.max(logs, 0), LOG_OF_NOTHING), mask=j < n)
        higher = tl.maximum(top, tl.max(logs, 1))
        phi = tl.exp2(logs - higher[:, None])
        keep = tl.exp2(top - higher)
        z = z * keep + tl.sum(phi, 1)
        s = s * keep[:, None]
        s = tl.dot(phi.to(TYPE), v.to(TYPE), s, input_precision=PRECISION)
        top = higher
    at = (bg * runs + run) * f
    tl.store(RUN_S + (at + rows[:, None]) * e + c[None, :], s, mask=state_mask)
    tl.store(RUN_Z + at + rows, z, mask=inside)
    tl.store(RUN_TOP + at + rows, top, mask=inside)
    tl.store(RUN_MOST + (bg * runs + run) * blocks + block, tl.max(top, 0))


@triton.jit
def _joined(top_a, a, top_b, b):
    """Add two sums, each in units of its own."""
    top = tl.maximum(top_a, top_b)
    return top, a * tl.exp2(top_a - top) + b * tl.exp2(top_b - top)


@triton.jit(do_not_specialize=["runs", "parts"])
def causal_exp_scan(
    RUN_S, RUN_Z, RUN_TOP, RUN_MOST, FIRST, FIRST_Z, FIRST_TOP, W, S, Z, TOP, LAST, LAST_Z, LAST_TOP, W_LOGS, W_GRADS,
    log_features, runs, parts,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, SB: tl.constexpr,
    HAS_FIRST: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Store the state of one feature before every run, S (b g runs f e), Z and TOP (b g runs f), and behind all, LAST...

    FIRST (b g f e), FIRST_Z (b g f): the state before the first token, in units of exp(FIRST_TOP), (b g), and so LAST. RUN_MOST
    has `parts` numbers for a head. COPY: the directions W (f d) are stored in the types of W_LOGS and W_GRADS too.
    """
    pid = tl.program_id(0).to(tl.int64)
    bg, row = pid // f, pid % f
    r, c = tl.arange(0, SB), tl.arange(0, BE)
    carry = tl.zeros([BE], tl.float32)
    norm = 0.0
    top = LOG_OF_NOTHING + 0.0
    if HAS_FIRST:
        carry += tl.load(FIRST + pid * e + c, mask=c < e, other=0.0).to(tl.float32)
        norm += tl.load(FIRST_Z + pid).to(tl.float32)
        top = tl.maximum((tl.load(FIRST_TOP + bg).to(tl.float32) + log_features) * LOG2_E, LOG_OF_NOTHING)
    most = top
    for low in range(0, parts, SB):
        most = tl.maximum(most, tl.max(tl.load(RUN_MOST + bg * parts + low + r, mask=low + r < parts, other=LOG_OF_NOTHING), 0))
    at = bg * runs * f + row
    tl.store(S + at * e + c, carry, mask=c < e)
    tl.store(Z + at, norm)
    tl.store(TOP + at, top)
    for low in range(0, runs, SB):
        run = low + r
        there = run < runs
        spot = (bg * runs + run) * f + row
        own = tl.load(RUN_S + spot[:, None] * e + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
        own_z = tl.load(RUN_Z + spot, mask=there, other=0.0)
        tops = tl.load(RUN_TOP + spot, mask=there, other=LOG_OF_NOTHING)
        tops_s, after = tl.associative_scan((tops[:, None] + tl.zeros([SB, BE], tl.float32), own), 0, _joined)
        tops_z, after_z = tl.associative_scan((tops, own_z), 0, _joined)
        before_s = top + tl.zeros_like(tops_s)
        _, after = _joined(before_s, carry[None, :] + tl.zeros_like(after), tops_s, after)
        tops, after_z = _joined(top + tl.zeros_like(tops_z), norm + tl.zeros_like(after_z), tops_z, after_z)
        stored = run + 1 < runs
        into = spot + f
        tl.store(S + into[:, None] * e + c[None, :], after, mask=column_mask(stored[:, None], c, e))
        tl.store(Z + into, after_z, mask=stored)
        tl.store(TOP + into, tops, mask=stored)
        carry = tl.sum(tl.where(r[:, None] == SB - 1, after, 0.0), 0)
        norm = tl.sum(tl.where(r == SB - 1, after_z, 0.0), 0)
        top = tl.max(tops, 0)
    share = tl.exp2(top - most)
    tl.store(LAST + pid * e + c, carry * share, mask=c < e)
    tl.store(LAST_Z + pid, norm * share)
    tl.store(LAST_TOP + bg, tl.where(most > LOG_OF_NOTHING, most / LOG2_E - log_features, float("-inf")), mask=row == 0)
    if COPY:
        a = tl.arange(0, BD)
        own_w = (a < d) & (bg == 0)
        w = tl.load(W + row * d + a, mask=own_w, other=0.0)
        tl.store(W_LOGS + row * d + a, w.to(W_LOGS.dtype.element_ty), mask=own_w)
        tl.store(W_GRADS + row * d + a, w.to(W_GRADS.dtype.element_ty), mask=own_w)


@triton.jit
def own_tops(OWN, bg, j, n, BLOCKS: tl.constexpr):
    """Load the largest exponents of keys j, those of a tile, from those in BLOCKS blocks of features."""
    own = tl.full([j.shape[0]], LOG_OF_NOTHING, tl.float32)
    for block in tl.static_range(BLOCKS):
        own = tl.maximum(own, tl.load(OWN + (bg * BLOCKS + block) * n + j, mask=j < n, other=LOG_OF_NOTHING))
    return own


@triton.jit
def tops_so_far(own, begin):
    """Return the largest exponent of all keys up to every one of a tile, `begin` before it."""
    r = tl.arange(0, own.shape[0])
    return tl.maximum(tl.max(tl.where(r[:, None] >= r[None, :], own[None, :], LOG_OF_NOTHING), 1), begin)


@triton.jit
def state_shares(TOP, RUN_TOP, at, run_at, rows, begin, f: tl.constexpr):
    """Return what brings rows of the state since the start of a run, and of that before it, to units of `begin`."""
    near = tl.load(TOP + at + rows, mask=rows < f, other=LOG_OF_NOTHING)
    far = tl.load(RUN_TOP + run_at + rows, mask=rows < f, other=LOG_OF_NOTHING)
    return tl.exp2(near - begin), tl.exp2(far - begin)


@triton.jit(do_not_specialize=["n", "tiles", "runs", "RUN"])
def causal_exp_read(
    Q, K, V, W, LOG_NORM, VALID, S, Z, TOP, RUN_S, RUN_Z, RUN_TOP, OWN, OUT, LSE, BEGIN, END,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, root, n, tiles, runs, RUN, H, R, SHARE, SHARE_G,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    ALL: tl.constexpr, OWN_BLOCKS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n h e) of a tile, and LSE (b h n), the logarithm of the sum of its weights, inf where that has no digits.

    BEGIN, END (b g tiles): the largest exponent of all keys before a tile, and up to its end. ALL: f, padded.
    """
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h, bg = bh // H, bh % H, bh // R
    g = h // R
    at, run_at = (bg * tiles + tile) * f, (bg * runs + tile // RUN) * f
    every = tl.arange(0, ALL)
    near = tl.load(TOP + at + every, mask=every < f, other=LOG_OF_NOTHING)
    far = tl.load(RUN_TOP + run_at + every, mask=every < f, other=LOG_OF_NOTHING)
    begin = tl.max(tl.maximum(near, far), 0)
    a, c, r = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, C)
    i = tile * C + r
    spot = i.to(tl.int64)
    there = present(VALID + b * n, i, n, HAS_VALID)
    own = own_tops(OWN, bg, i, n, OWN_BLOCKS)
    tops = tops_so_far(own, begin)
    x = token_rows(Q + b * sqb + h * sqh, spot, sqn, a, n, d)
    y, _factor, _offset, _square = shortened_rows(x, LOG_NORM + h // SHARE, root, HAS_NORM, LOGS)
    k = tl.load(K + b * skb + g * skh + spot[None, :] * skn + a[:, None], mask=row_mask(there[None, :], a, d), other=0.0)
    yk, offset = shortened_columns(k, LOG_NORM + g // SHARE_G, root, HAS_NORM, LOGS)
    offset = tl.where(there, offset, float("-inf")) - own
    out = tl.zeros([C, BE], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    den = tl.zeros([C], tl.float32)
    total = tl.zeros([C], tl.float32)
    unit = tl.full([C], -3e38, tl.float32)
    for low in range(0, f, BF):
        rows = low + tl.arange(0, BF)
        share, run_share = state_shares(TOP, RUN_TOP, at, run_at, rows, begin, f)
        s = state_tile(S, at, rows, c, f, e).to(tl.float32) * share[:, None]
        s += state_tile(RUN_S, run_at, rows, c, f, e) * run_share[:, None]
        z = tl.load(Z + at + rows, mask=rows < f, other=0.0) * share
        z += tl.load(RUN_Z + run_at + rows, mask=rows < f, other=0.0) * run_share
        logs = tl.dot(y, state_columns(W, 0, rows, a, f, d).to(LOGS), input_precision=PRECISION)
        if f % BF != 0:
            logs = tl.where(rows[None, :] < f, logs, float("-inf"))
        higher = tl.maximum(unit, tl.max(logs, 1))
        phi = tl.exp2(logs - higher[:, None])
        keep = tl.exp2(unit - higher)
        unit = higher
        total = total * keep + tl.sum(phi, 1)
        den = den * keep + tl.sum(phi * z[None, :], 1)
        half = phi.to(TYPE)
        out = tl.dot(half, s.to(TYPE), out * keep[:, None], input_precision=PRECISION)
        keys = tl.dot(state_tile(W, 0, rows, a, f, d).to(LOGS), yk, input_precision=PRECISION) + offset[None, :]
        if f % BF != 0:
            keys = tl.where(rows[:, None] < f, keys, float("-inf"))
        scores = tl.dot(half, tl.exp2(keys).to(TYPE), scores * keep[:, None], input_precision=PRECISION)
    shift = tl.exp2(begin - tops)
    scores = scores * tl.exp2(tl.where(r[:, None] >= r[None, :], own[None, :] - tops[:, None], float("-inf")))
    den = den * shift + tl.sum(scores, 1)
    v = tl.load(V + b * svb + g * svh + spot[:, None] * svn + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
    out = tl.dot(scores.to(TYPE), v.to(TYPE), out * shift[:, None], input_precision=PRECISION)
    share_of_norm = den / total
    out = out * (inverse_norm(share_of_norm) / total)[:, None]
    into = OUT + ((b * n + spot[:, None]) * H + h) * e + c[None, :]
    tl.store(into, out.to(OUT.dtype.element_ty), mask=column_mask(i[:, None] < n, c, e))
    enough = share_of_norm > NORM_FLOOR
    lse = tl.where(enough, unit + tops + tl.log2(tl.where(enough, den, 1.0)), float("inf"))
    tl.store(LSE + bh * n + i, lse, mask=i < n)
    if h % R == 0:
        tl.store(BEGIN + bg * tiles + tile, begin)
        tl.store(END + bg * tiles + tile, tl.max(tops, 0))
