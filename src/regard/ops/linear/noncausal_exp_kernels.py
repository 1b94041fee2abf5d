"""Triton kernels of attention by exponential random features without an order: see `noncausal_kernels.py` for the formulas.

With x' the shortened tokens of `exp_feature_kernels.py`, z_f the sum of a feature over keys and M_f its mean value,

    A_jf = exp(w_f . k'_j - |k'_j|^2 / 2) / z_f,   P_if = exp(w_f . q'_i) z_f / sum_f exp(w_f . q'_i) z_f

are a softmax over keys and one over features, both with running maxima, so that nothing overflows, and nothing is 0 but what has
no weight. Features are computed in tiles, again in every pass. Tokens of bfloat16 are multiplied with directions in float16,
which has three more digits; no token is larger than its range, because it is shortened or clipped first.
"""

import triton
import triton.language as tl

from regard.ops.linear.exp_feature_kernels import token_lengths
from regard.ops.linear.noncausal_kernels import LOG_OF_NOTHING, segment_of, state_columns, state_tile
from regard.ops.linear.triton_tiles import LOG2_E, column_mask, exp_of, present, row_mask, token_rows

LARGEST_HALF = tl.constexpr(60000.0)  # a number of float16


@triton.jit
def _operand(x, factor, LOGS: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return tokens times their factors in the type of products with directions, for exponents to base 2."""
    y = x * factor * LOG2_E
    if not HAS_NORM and tl.float16 == LOGS:
        y = tl.minimum(tl.maximum(y, -LARGEST_HALF), LARGEST_HALF)
    return y.to(LOGS)


@triton.jit
def shortened_columns(x, LOG_NORM, root, HAS_NORM: tl.constexpr, LOGS: tl.constexpr):
    """Return tokens (d, tokens) as operands of products, and their offsets to base 2."""
    x = x.to(tl.float32)
    factor, offset = token_lengths(tl.sum(x * x, 0), LOG_NORM, root, 0.0, HAS_NORM)
    return _operand(x, factor[None, :], LOGS, HAS_NORM), offset * LOG2_E


@triton.jit
def shortened_rows(x, LOG_NORM, root, HAS_NORM: tl.constexpr, LOGS: tl.constexpr):
    """Return tokens (tokens, d) as operands of products, their factors, offsets to base 2, and |x|^2."""
    x = x.to(tl.float32)
    square = tl.sum(x * x, 1)
    factor, offset = token_lengths(square, LOG_NORM, root, 0.0, HAS_NORM)
    return _operand(x, factor[:, None], LOGS, HAS_NORM), factor, offset * LOG2_E, square


@triton.jit(do_not_specialize=["m", "segs", "SEG"])
def noncausal_exp_sums(
    K, V, W, LOG_NORM, VALID, S, Z, TOP, skb, skh, skn, svb, svh, svn, root, m, segs, SEG, G, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum BF features times values over a segment of keys into S (b g segs f e), features into Z, in units of exp2(TOP)."""
    blocks: tl.constexpr = (f + BF - 1) // BF
    start, count, seg, bg = segment_of(tl.program_id(0) // blocks, segs, SEG, m)
    rows = (tl.program_id(0) % blocks) * BF + tl.arange(0, BF)
    b, g = bg // G, bg % G
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    VALID += b * m + start
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    w = state_tile(W, 0, rows, a, f, d).to(LOGS)
    s = tl.zeros([BF, BE], tl.float32)
    z = tl.zeros([BF], tl.float32)
    top = tl.full([BF], LOG_OF_NOTHING, tl.float32)
    for low in range(0, count, C):
        j = low + tl.arange(0, C)
        there = present(VALID, j, count, HAS_VALID)
        k = tl.load(K + j[None, :] * skn + a[:, None], mask=row_mask(there[None, :], a, d), other=0.0)
        v = tl.load(V + j[:, None] * svn + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
        y, offset = shortened_columns(k, LOG_NORM + g // SHARE, root, HAS_NORM, LOGS)
        logs = tl.dot(w, y, input_precision=PRECISION) + tl.where(there, offset, float("-inf"))[None, :]
        higher = tl.maximum(top, tl.max(logs, 1))
        phi = tl.exp2(logs - higher[:, None])
        keep = tl.exp2(top - higher)
        z = z * keep + tl.sum(phi, 1)
        s = s * keep[:, None]
        s = tl.dot(phi.to(TYPE), v.to(TYPE), s, input_precision=PRECISION)
        top = higher
    at = (bg * segs + seg) * f
    inside = rows < f
    tl.store(S + (at + rows[:, None]) * e + c[None, :], s, mask=inside[:, None] & (c[None, :] < e))
    tl.store(Z + at + rows, z, mask=inside)
    tl.store(TOP + at + rows, top, mask=inside)


@triton.jit(do_not_specialize=["n", "tiles"])
def noncausal_exp_read(
    Q, W, LOG_NORM, MEAN, LEVEL, OUT, LSE, sqb, sqh, sqn, root, n, tiles, H, R, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n h e) of a tile of queries, and LSE (b h n), the logarithm of the sum of its weights."""
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    at = (bh // R) * f
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    i = tile * C + tl.arange(0, C)
    x = token_rows(Q + b * sqb + h * sqh, i, sqn, a, n, d)
    y, _factor, _offset, _square = shortened_rows(x, LOG_NORM + h // SHARE, root, HAS_NORM, LOGS)
    out = tl.zeros([C, BE], tl.float32)
    total = tl.zeros([C], tl.float32)
    top = tl.full([C], -3e38, tl.float32)
    for low in range(0, f, BF):
        rows = low + tl.arange(0, BF)
        level = tl.load(LEVEL + at + rows, mask=rows < f, other=float("-inf"))
        w = state_columns(W, 0, rows, a, f, d).to(LOGS)
        mean = state_tile(MEAN, at, rows, c, f, e).to(TYPE)
        logs = tl.dot(y, w, input_precision=PRECISION) + level[None, :]
        higher = tl.maximum(top, tl.max(logs, 1))
        p = tl.exp2(logs - higher[:, None])
        keep = tl.exp2(top - higher)
        total = total * keep + tl.sum(p, 1)
        out = out * keep[:, None]
        out = tl.dot(p.to(TYPE), mean, out, input_precision=PRECISION)
        top = higher
    out = out * (1.0 / total)[:, None]
    into = OUT + ((b * n + i[:, None]) * H + h) * e + c[None, :]
    tl.store(into, out.to(OUT.dtype.element_ty), mask=column_mask(i[:, None] < n, c, e))
    tl.store(LSE + bh * n + i, top + tl.log2(total), mask=i < n)


@triton.jit
def store_token_grads(
    DX, DNORM, dx, x, factor, square, total, inside, a, LOG_NORM, root, stride, d: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Store gradients of tokens at DX, given those of shortened ones, dx, and of offsets, total; that of the bound at DNORM."""
    x = x.to(tl.float32)
    along = -total * (root * root)
    if HAS_NORM:
        most = exp_of(2.0 * tl.load(LOG_NORM).to(tl.float32))
        shortened = square * (root * root) > most
        moved = tl.sum(dx * x, 1) * factor
        along = tl.where(shortened, -moved / tl.where(shortened, square, 1.0), along)
        tl.store(DNORM, tl.sum(tl.where(shortened & inside, moved - total * most, 0.0), 0))
    dx = dx * factor[:, None] + along[:, None] * x
    row = tl.arange(0, dx.shape[0])
    tl.store(DX + row[:, None] * stride + a[None, :], dx.to(DX.dtype.element_ty), mask=column_mask(inside[:, None], a, d))


@triton.jit(do_not_specialize=["n", "tiles", "all_tiles"])
def noncausal_exp_query_grads(
    Q, W_LOGS, W_GRADS, LOG_NORM, MEAN, LEVEL, LSE, OUT, DO, DELTA, DQ, DNORM,
    sqb, sqh, sqn, sdb, sdh, sdn, root, n, tiles, all_tiles, H, R, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ (b n h d) of a tile of queries, and DELTA (b h n), out . do; DNORM (b g all_tiles) begins with queries."""
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    at = (bh // R) * f
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    i = tile * C + tl.arange(0, C)
    inside = i < n
    x = token_rows(Q + b * sqb + h * sqh, i, sqn, a, n, d)
    y, factor, _offset, square = shortened_rows(x, LOG_NORM + h // SHARE, root, HAS_NORM, LOGS)
    do = token_rows(DO + b * sdb + h * sdh, i, sdn, c, n, e)
    delta = tl.sum(do.to(tl.float32) * token_rows(OUT + (b * n * H + h) * e, i, H * e, c, n, e).to(tl.float32), 1)
    tl.store(DELTA + bh * n + i, delta, mask=inside)
    do = do.to(TYPE)
    lse = tl.load(LSE + bh * n + i, mask=inside, other=0.0)
    dx = tl.zeros([C, BD], tl.float32)
    for low in range(0, f, BF):
        rows = low + tl.arange(0, BF)
        level = tl.load(LEVEL + at + rows, mask=rows < f, other=float("-inf"))
        w = state_columns(W_LOGS, 0, rows, a, f, d).to(LOGS)
        mean = state_columns(MEAN, at, rows, c, f, e).to(TYPE)
        p = tl.exp2(tl.dot(y, w, input_precision=PRECISION) + level[None, :] - lse[:, None])
        grad = p * (tl.dot(do, mean, input_precision=PRECISION) - delta[:, None])
        dx = tl.dot(grad.to(TYPE), state_tile(W_GRADS, 0, rows, a, f, d).to(TYPE), dx, input_precision=PRECISION)
    store_token_grads(
        DQ + ((b * n + tile * C) * H + h) * d, DNORM + (bh // R) * all_tiles + (bh % R) * tiles + tile,
        dx, x, factor, square, tl.zeros_like(square), inside, a, LOG_NORM + h // SHARE, root, H * d, d, HAS_NORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "segs", "SEG"])
def noncausal_exp_adjoint(
    Q, W, LOG_NORM, LEVEL, LSE, DELTA, DO, DMEAN, T, sqb, sqh, sqn, sdb, sdh, sdn, root, n, segs, SEG, H, R, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum P_if do_i over a segment of queries into DMEAN (b h segs f e), and P_if DELTA_i into T (b h segs f), BF features."""
    blocks: tl.constexpr = (f + BF - 1) // BF
    start, count, seg, bh = segment_of(tl.program_id(0) // blocks, segs, SEG, n)
    rows = (tl.program_id(0) % blocks) * BF + tl.arange(0, BF)
    b, h = bh // H, bh % H
    Q += b * sqb + h * sqh + start * sqn
    DO += b * sdb + h * sdh + start * sdn
    LSE += bh * n + start
    DELTA += bh * n + start
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    w = state_tile(W, 0, rows, a, f, d).to(LOGS)
    level = tl.load(LEVEL + (bh // R) * f + rows, mask=rows < f, other=float("-inf"))
    adjoint = tl.zeros([BF, BE], tl.float32)
    t = tl.zeros([BF], tl.float32)
    for low in range(0, count, C):
        i = low + tl.arange(0, C)
        inside = i < count
        x = tl.load(Q + i[None, :] * sqn + a[:, None], mask=row_mask(inside[None, :], a, d), other=0.0)
        y, _offset = shortened_columns(x, LOG_NORM + h // SHARE, root, HAS_NORM, LOGS)
        do = token_rows(DO, i, sdn, c, count, e).to(TYPE)
        lse = tl.load(LSE + i, mask=inside, other=float("inf"))
        delta = tl.load(DELTA + i, mask=inside, other=0.0)
        p = tl.exp2(tl.dot(w, y, input_precision=PRECISION) + level[:, None] - lse[None, :])
        t += tl.sum(p * delta[None, :], 1)
        adjoint = tl.dot(p.to(TYPE), do, adjoint, input_precision=PRECISION)
    at = (bh * segs + seg) * f
    tl.store(DMEAN + (at + rows[:, None]) * e + c[None, :], adjoint, mask=(rows[:, None] < f) & (c[None, :] < e))
    tl.store(T + at + rows, t, mask=rows < f)


@triton.jit(do_not_specialize=["m", "tiles", "all_tiles"])
def noncausal_exp_key_grads(
    K, V, W_LOGS, W_GRADS, LOG_NORM, VALID, LEVEL, DMEAN, T, DK, DV, DNORM,
    skb, skh, skn, svb, svh, svn, root, m, tiles, all_tiles, G, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b m g d) and DV (b m g e) of a tile of keys; DNORM (b g all_tiles) ends with keys."""
    tile, bg = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, g = bg // G, bg % G
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    j = tile * C + tl.arange(0, C)
    there = present(VALID + b * m, j, m, HAS_VALID)
    k = tl.load(K + b * skb + g * skh + j[:, None] * skn + a[None, :], mask=column_mask(there[:, None], a, d), other=0.0)
    v = tl.load(V + b * svb + g * svh + j[:, None] * svn + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
    v = v.to(TYPE)
    y, factor, offset, square = shortened_rows(k, LOG_NORM + g // SHARE, root, HAS_NORM, LOGS)
    offset = tl.where(there, offset, float("-inf"))
    dx = tl.zeros([C, BD], tl.float32)
    dv = tl.zeros([C, BE], tl.float32)
    total = tl.zeros([C], tl.float32)
    for low in range(0, f, BF):
        rows = low + tl.arange(0, BF)
        level = tl.load(LEVEL + bg * f + rows, mask=rows < f, other=float("inf"))
        t = tl.load(T + bg * f + rows, mask=rows < f, other=0.0)
        w = state_columns(W_LOGS, 0, rows, a, f, d).to(LOGS)
        share = tl.exp2(tl.dot(y, w, input_precision=PRECISION) + offset[:, None] - level[None, :])
        dv = tl.dot(share.to(TYPE), state_tile(DMEAN, bg * f, rows, c, f, e).to(TYPE), dv, input_precision=PRECISION)
        grad = tl.dot(v, state_columns(DMEAN, bg * f, rows, c, f, e).to(TYPE), input_precision=PRECISION)
        grad = share * (grad - t[None, :])
        total += tl.sum(grad, 1)
        dx = tl.dot(grad.to(TYPE), state_tile(W_GRADS, 0, rows, a, f, d).to(TYPE), dx, input_precision=PRECISION)
    inside = j < m
    into = DV + ((b * m + j[:, None]) * G + g) * e + c[None, :]
    tl.store(into, dv.to(DV.dtype.element_ty), mask=column_mask(inside[:, None], c, e))
    store_token_grads(
        DK + ((b * m + tile * C) * G + g) * d, DNORM + bg * all_tiles + all_tiles - tiles + tile,
        dx, k, factor, square, total, inside, a, LOG_NORM + g // SHARE, root, G * d, d, HAS_NORM,
    )  # fmt: skip
