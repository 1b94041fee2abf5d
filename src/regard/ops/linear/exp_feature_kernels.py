"""Triton kernels of exponential random features: exponents, their running maxima and the features, a tile of features at a time.

    log_f(x) = w_f . x' - |x'|^2 / 2 - log(features) / 2,   x' = x / d^(1/4), shortened to a norm of at most exp(log_norm)

Queries have softmax_f(log_f), keys exp(log_f - top) with top the largest exponent so far. Half-precision x are exact operands;
the directions w are split into two parts of that type, so that exponents have the digits of float32.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_tiles import column_mask, exp_of, present, row_mask


@triton.jit
def token_lengths(square, LOG_NORM, root, log_features, HAS_NORM: tl.constexpr):
    """Return the factor of w . x and the offset of exponents, of tokens with |x|^2 = square."""
    factor = root + tl.zeros_like(square)
    length = square * (root * root)
    if HAS_NORM:
        most = exp_of(2.0 * tl.load(LOG_NORM).to(tl.float32))
        factor = tl.where(length > most, tl.sqrt(most / tl.where(length > most, square, 1.0)), factor)
        length = tl.minimum(length, most)
    return factor, -0.5 * length - log_features


@triton.jit
def _lengths(x, LOG_NORM, root, log_features, HAS_NORM: tl.constexpr):
    """Return the factor of w . x, the offset of exponents, and |x|^2, of every token."""
    square = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    factor, offset = token_lengths(square, LOG_NORM, root, log_features, HAS_NORM)
    return factor, offset, square


@triton.jit
def _exponents(
    x, W, low, factor, offset, there,
    d: tl.constexpr, f: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return exponents (tokens, BF features from `low` on), -inf where there is none."""
    a, c = tl.arange(0, BD), low + tl.arange(0, BF)
    wt = tl.load(W + c[None, :] * d + a[:, None], mask=row_mask(c[None, :] < f, a, d), other=0.0).to(tl.float32)
    if x.dtype == tl.float32:
        products = tl.dot(x, wt, input_precision=PRECISION)
    else:
        high = wt.to(x.dtype)
        products = tl.dot(x, high)
        products = tl.dot(x, (wt - high.to(tl.float32)).to(x.dtype), products)
    return tl.where(there[:, None] & (c[None, :] < f), products * factor[:, None] + offset[:, None], float("-inf"))


@triton.jit(do_not_specialize=["n", "blocks"])
def exp_feature_maxima(
    X, W, LOG_NORM, VALID, OWN, MAXIMA, sxb, sxh, sxn, root, log_features, n, blocks, H, R,
    d: tl.constexpr, f: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the largest exponent of every key in OWN (b h n), and that of a block of C keys in MAXIMA (b h blocks)."""
    pid = tl.program_id(0)
    block, bh = pid % blocks, (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    a = tl.arange(0, BD)
    i = block * C + tl.arange(0, C)
    x = tl.load(X + b * sxb + h * sxh + i[:, None] * sxn + a[None, :], mask=column_mask(i[:, None] < n, a, d), other=0.0)
    factor, offset, _square = _lengths(x, LOG_NORM + h // R, root, log_features, HAS_NORM)
    there = present(VALID + b * n, i, n, HAS_VALID)
    top = tl.full([C], float("-inf"), tl.float32)
    for low in range(0, f, BF):
        top = tl.maximum(top, tl.max(_exponents(x, W, low, factor, offset, there, d, f, BD, BF, PRECISION), 1))
    tl.store(OWN + bh * n + i, top, mask=i < n)
    tl.store(MAXIMA + bh * blocks + block, tl.max(top, 0))


@triton.jit(do_not_specialize=["n", "blocks"])
def exp_feature_forward(
    X, W, LOG_NORM, VALID, OWN, MAXIMA, FIRST, PHI, TOP, DECAY, LAST,
    sxb, sxh, sxn, root, log_features, least, n, blocks, H, R,
    d: tl.constexpr, f: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, RUNNING: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store features PHI (b h n f) of a block of C tokens and TOP (b h n), what was subtracted from their exponents.

    RUNNING 0: TOP is log sum exp, and features sum to 1. RUNNING 1: TOP is the largest exponent up to each token, from FIRST
    (b h), the MAXIMA of the blocks before and OWN (b h n); DECAY (b h n) is its rise, as a log decay from `least` on, and LAST
    (b h) the last one. RUNNING 2: TOP is FIRST for all tokens. A largest exponent of no token is -inf, and 0 is subtracted.
    """
    pid = tl.program_id(0)
    block, bh = pid % blocks, (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    a, r = tl.arange(0, BD), tl.arange(0, C)
    i = block * C + r
    inside = i < n
    x = tl.load(X + b * sxb + h * sxh + i[:, None] * sxn + a[None, :], mask=column_mask(inside[:, None], a, d), other=0.0)
    factor, offset, _square = _lengths(x, LOG_NORM + h // R, root, log_features, HAS_NORM)
    there = present(VALID + b * n, i, n, HAS_VALID)
    if RUNNING == 0:
        top = tl.full([C], -1e30, tl.float32)
        total = tl.zeros([C], tl.float32)
        for low in range(0, f, BF):
            logs = _exponents(x, W, low, factor, offset, there, d, f, BD, BF, PRECISION)
            higher = tl.maximum(top, tl.max(logs, 1))
            total = total * exp_of(top - higher) + tl.sum(exp_of(logs - higher[:, None]), 1)
            top = higher
        unit = tl.where(there, top + tl.log(tl.where(there, total, 1.0)), 0.0)
    elif RUNNING == 1:
        base = tl.load(FIRST + bh)
        for low in range(0, block, 128):
            at = low + tl.arange(0, 128)
            base = tl.maximum(base, tl.max(tl.load(MAXIMA + bh * blocks + at, mask=at < block, other=float("-inf")), 0))
        until = base + tl.zeros([C], tl.float32)
        before = until
        for low in range(0, C, 16):
            j = low + tl.arange(0, 16)
            own = tl.load(OWN + bh * n + block * C + j, mask=block * C + j < n, other=float("-inf"))
            until = tl.maximum(until, tl.max(tl.where(r[:, None] >= j[None, :], own[None, :], float("-inf")), 1))
            before = tl.maximum(before, tl.max(tl.where(r[:, None] > j[None, :], own[None, :], float("-inf")), 1))
        known = before > float("-inf")
        rise = tl.where(known, before, 0.0) - tl.where(known, until, 0.0)
        tl.store(DECAY + bh * n + i, tl.maximum(rise, least), mask=inside)
        unit = tl.where(until > float("-inf"), until, 0.0)
        if block == blocks - 1:
            tl.store(LAST + bh, tl.max(until, 0))
    else:
        given = tl.load(FIRST + bh)
        unit = tl.zeros([C], tl.float32) + tl.where(given > float("-inf"), given, 0.0)
    for low in range(0, f, BF):
        c = low + tl.arange(0, BF)
        phi = exp_of(_exponents(x, W, low, factor, offset, there, d, f, BD, BF, PRECISION) - unit[:, None])
        into = PHI + (bh * n + i[:, None]) * f + c[None, :]
        tl.store(into, phi.to(PHI.dtype.element_ty), mask=inside[:, None] & (c[None, :] < f))
    tl.store(TOP + bh * n + i, unit, mask=inside)


@triton.jit(do_not_specialize=["n", "blocks"])
def exp_feature_backward(
    X, W, LOG_NORM, VALID, TOP, DPHI, DX, DNORM,
    sxb, sxh, sxn, sdb, sdh, sdn, root, log_features, n, blocks, H, R,
    d: tl.constexpr, f: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, SOFTMAX: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store DX (b n h d), and in DNORM (b h blocks) the gradient of the log of the largest norm; what TOP holds is a constant.

    With SOFTMAX the gradient of exponent f is phi_f (dphi_f - sum dphi phi): both parts are summed, and joined behind the loop.
    """
    pid = tl.program_id(0)
    block, bh = pid % blocks, (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    a = tl.arange(0, BD)
    i = block * C + tl.arange(0, C)
    inside = i < n
    x = tl.load(X + b * sxb + h * sxh + i[:, None] * sxn + a[None, :], mask=column_mask(inside[:, None], a, d), other=0.0)
    factor, offset, square = _lengths(x, LOG_NORM + h // R, root, log_features, HAS_NORM)
    there = present(VALID + b * n, i, n, HAS_VALID)
    unit = tl.load(TOP + bh * n + i, mask=inside, other=0.0)
    dx = tl.zeros([C, BD], tl.float32)
    mean = tl.zeros([C, BD], tl.float32)  # sum of phi_f w_f
    total = tl.zeros([C], tl.float32)
    moved = tl.zeros([C], tl.float32)
    moved_mean = tl.zeros([C], tl.float32)
    for low in range(0, f, BF):
        c = low + tl.arange(0, BF)
        logs = _exponents(x, W, low, factor, offset, there, d, f, BD, BF, PRECISION)
        phi = exp_of(logs - unit[:, None])
        from_phi = DPHI + b * sdb + h * sdh + i[:, None] * sdn + c[None, :]
        dlogs = tl.load(from_phi, mask=inside[:, None] & (c[None, :] < f), other=0.0).to(tl.float32) * phi
        w = tl.load(W + c[:, None] * d + a[None, :], mask=column_mask(c[:, None] < f, a, d), other=0.0).to(x.dtype)
        dx = tl.dot(dlogs.to(x.dtype), w, dx, input_precision=PRECISION)
        total += tl.sum(dlogs, 1)
        along_w = tl.where(logs > float("-inf"), logs - offset[:, None], 0.0)
        moved += tl.sum(dlogs * along_w, 1)
        if SOFTMAX:
            mean = tl.dot(phi.to(x.dtype), w, mean, input_precision=PRECISION)
            moved_mean += tl.sum(phi * along_w, 1)
    if SOFTMAX:
        dx -= total[:, None] * mean
        moved -= total * moved_mean
        total = tl.zeros([C], tl.float32)
    dx = dx * factor[:, None]
    along = -total * (root * root)
    if HAS_NORM:
        most = exp_of(2.0 * tl.load(LOG_NORM + h // R).to(tl.float32))
        shortened = square * (root * root) > most
        along = tl.where(shortened, -moved / tl.where(shortened, square, 1.0), along)
        tl.store(DNORM + bh * blocks + block, tl.sum(tl.where(shortened & inside, moved - total * most, 0.0), 0))
    dx += along[:, None] * x.to(tl.float32)
    into = DX + ((b * n + i[:, None]) * H + h) * d + a[None, :]
    tl.store(into, dx.to(DX.dtype.element_ty), mask=column_mask(inside[:, None], a, d))
