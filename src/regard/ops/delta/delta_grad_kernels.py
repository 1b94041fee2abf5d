"""The gradients of the delta rule in Triton: see `regard.ops.delta.triton_kernels` for the formulas."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.delta.triton_kernels import SIZES, _columns, _fade, _fade_back, _levels, _matrix, _rows, _transposed


@triton.jit(do_not_specialize=SIZES)
def delta_state_grads(
    Q, K, BETA, DECAY, W, DO, DR, DS,
    sqb, sqh, sqn, skb, skg, skn, sbb, sbg, sbn, sdb, sdg, sdn, sob, soh, son,
    n, chunks, G,
    SHARE: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What the outputs of a chunk add to dR (b g n e), and to the gradient of its first state: DS (b g chunks f e)."""
    chunk, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    c, f, first = tl.arange(0, C), tl.arange(0, BF), chunk * C
    i = first + c
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    at = bg * chunks + chunk
    key = b * skb + g * skg
    k = _rows(K, key, skn, i, f, n, F)
    beta = tl.load(BETA + b * sbb + g * sbg + i * sbn, mask=i < n, other=0.0).to(tl.float32)
    level, _last = _levels(DECAY, b * sdb + g * sdg, sdn, first, n, C, DECAYS)
    grown = tl.exp(level)[None, :]
    later = _fade_back(level, C)
    ds = tl.zeros([BF, BE], tl.float32)
    du = tl.zeros([C, BE], tl.float32)
    if SHARE > 0:  # without queries Q is None, and Triton finds types in loops of no turns too
        for x in range(SHARE):
            h = g * SHARE + x
            qt = _columns(Q, b * sqb + h * sqh, sqn, i, f, n, F)
            do = _rows(DO, b * sob + h * soh, son, i, e, n, E)
            pt = tl.dot(k, qt, input_precision=DOT) * later
            du = tl.dot(pt.to(k.dtype), do, du, input_precision=DOT)
            ds = tl.dot((qt.to(tl.float32) * grown).to(k.dtype), do, ds, input_precision=DOT)
    wt = _transposed(W, at * C * C, c, c, C, C)
    dr = tl.dot(wt, du.to(k.dtype), input_precision=DOT).to(k.dtype)
    kt = _columns(K, key, skn, i, f, n, F).to(tl.float32) * (grown * beta[None, :])
    ds -= tl.dot(kt.to(k.dtype), dr, input_precision=DOT)
    tl.store(DR + (bg * n + i[:, None]) * E + e[None, :], dr, mask=(i[:, None] < n) & (e[None, :] < E))
    tl.store(DS + at * F * E + f[:, None] * E + e[None, :], ds, mask=(f[:, None] < F) & (e[None, :] < E))


@triton.jit(do_not_specialize=SIZES)
def delta_value_grads(
    K, V, BETA, DECAY, W, S, D, U, DR, DV,
    skb, skg, skn, svb, svg, svn, sbb, sbg, sbn, sdb, sdg, sdn, sob, sog, son,
    n, chunks, G,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """U and dR (b g n e) of a chunk, from its first state S and the gradient D of its last, and dV."""
    chunk, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    c, f, first = tl.arange(0, C), tl.arange(0, BF), chunk * C
    i = first + c
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    at = bg * chunks + chunk
    k = _rows(K, b * skb + g * skg, skn, i, f, n, F)
    v = _rows(V, b * svb + g * svg, svn, i, e, n, E)
    beta = tl.load(BETA + b * sbb + g * sbg + i * sbn, mask=i < n, other=0.0).to(tl.float32)
    level, last = _levels(DECAY, b * sdb + g * sdg, sdn, first, n, C, DECAYS)
    spot = (bg * n + i[:, None]) * E + e[None, :]
    real = (i[:, None] < n) & (e[None, :] < E)
    s = _matrix(S, at * F * E, f, e, F, E).to(k.dtype)
    rest = beta[:, None] * (v.to(tl.float32) - tl.exp(level)[:, None] * tl.dot(k, s, input_precision=DOT))
    w = tl.load(W + at * C * C + c[:, None] * C + c[None, :])
    u = tl.dot(w, rest.to(k.dtype), input_precision=DOT)
    tl.store(U + spot, u.to(k.dtype), mask=real)
    d = _matrix(D, at * F * E, f, e, F, E).to(k.dtype)
    du = tl.exp(last - level)[:, None] * tl.dot(k, d, input_precision=DOT)
    wt = _transposed(W, at * C * C, c, c, C, C)
    dr = tl.load(DR + spot, mask=real, other=0.0).to(tl.float32)
    dr += tl.dot(wt, du.to(k.dtype), input_precision=DOT)
    tl.store(DR + spot, dr.to(k.dtype), mask=real)
    to = DV + b * sob + g * sog + i[:, None] * son + e[None, :]
    tl.store(to, (beta[:, None] * dr).to(DV.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=SIZES)
def delta_query_grads(
    Q, K, DECAY, S, U, DO, DQ, SLOPE,
    sqb, sqh, sqn, skb, skg, skn, sdb, sdg, sdn, sob, soh, son, xqb, xqh, xqn,
    n, chunks, G,
    SHARE: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dQ of a chunk, for one query head; SLOPE (b h n) in float32: q . dQ, which the gradient of the decays needs."""
    chunk, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // (G * SHARE), bh % (G * SHARE)
    g = h // SHARE
    c, f, first = tl.arange(0, C), tl.arange(0, BF), chunk * C
    i = first + c
    at = (b * G + g) * chunks + chunk
    own = (b * G + g) * n * E
    level, _last = _levels(DECAY, b * sdb + g * sdg, sdn, first, n, C, DECAYS)
    dq = tl.zeros([C, BF], tl.float32)
    apart = tl.zeros([C, C], tl.float32)
    for low in range(0, E, BE):
        e = low + tl.arange(0, BE)
        do = _rows(DO, b * sob + h * soh, son, i, e, n, E)
        st = _transposed(S, at * F * E, e, f, E, F)
        ut = _columns(U, own, E, i, e, n, E)
        dq = tl.dot(do, st, dq, input_precision=DOT)
        apart = tl.dot(do, ut, apart, input_precision=DOT)
    k = _rows(K, b * skb + g * skg, skn, i, f, n, F)
    dq *= tl.exp(level)[:, None]
    dq = tl.dot((apart * _fade(level, C)).to(k.dtype), k, dq, input_precision=DOT)
    to = DQ + b * xqb + h * xqh + i[:, None] * xqn + f[None, :]
    tl.store(to, dq.to(DQ.dtype.element_ty), mask=(i[:, None] < n) & (f[None, :] < F))
    if DECAYS:
        q = _rows(Q, b * sqb + h * sqh, sqn, i, f, n, F)
        tl.store(SLOPE + bh * n + i, tl.sum(dq * q.to(tl.float32), 1), mask=i < n)


@triton.jit(do_not_specialize=SIZES)
def delta_key_grads(
    Q, K, V, BETA, DECAY, S, D, U, DR, DO, SLOPE, DK, DBETA, DDECAY,
    sqb, sqh, sqn, skb, skg, skn, svb, svg, svn, sbb, sbg, sbn, sdb, sdg, sdn, sob, soh, son, xkb, xkg, xkn,
    n, chunks, G,
    SHARE: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dK, dbeta and the gradient of the log decay of a chunk; DBETA and DDECAY (b g n) in float32."""
    chunk, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    c, f, first = tl.arange(0, C), tl.arange(0, BF), chunk * C
    i = first + c
    at = bg * chunks + chunk
    own = bg * n * E
    k = _rows(K, b * skb + g * skg, skn, i, f, n, F)
    beta = tl.load(BETA + b * sbb + g * sbg + i * sbn, mask=i < n, other=0.0).to(tl.float32)
    level, last = _levels(DECAY, b * sdb + g * sdg, sdn, first, n, C, DECAYS)

    read = tl.zeros([C, BF], tl.float32)  # H: a key reads
    apart = tl.zeros([C, C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    for low in range(0, E, BE):
        e = low + tl.arange(0, BE)
        dr = _rows(DR, own, E, i, e, n, E)
        st = _transposed(S, at * F * E, e, f, E, F)
        ut = _columns(U, own, E, i, e, n, E)
        read = tl.dot(dr, st, read, input_precision=DOT)
        apart = tl.dot(dr, ut, apart, input_precision=DOT)
        v = _rows(V, b * svb + g * svg, svn, i, e, n, E)
        dbeta += tl.sum(dr.to(tl.float32) * v.to(tl.float32), 1)
    read *= tl.exp(level)[:, None]
    apart = tl.where(c[:, None] > c[None, :], apart * _fade(level, C), 0.0)
    read = tl.dot(apart.to(k.dtype), k, read, input_precision=DOT)
    reading = tl.sum(read * k.to(tl.float32), 1)
    tl.store(DBETA + bg * n + i, dbeta - reading, mask=i < n)

    write = tl.zeros([C, BF], tl.float32)  # a key is written
    apart = tl.zeros([C, C], tl.float32)
    kept = tl.zeros([BF], tl.float32)
    for low in range(0, E, BE):
        e = low + tl.arange(0, BE)
        u = _rows(U, own, E, i, e, n, E)
        dt = _transposed(D, at * F * E, e, f, E, F)
        drt = _columns(DR, own, E, i, e, n, E)
        if DECAYS:
            kept += tl.sum(dt.to(tl.float32) * _transposed(S, at * F * E, e, f, E, F).to(tl.float32), 0)
        write = tl.dot(u, dt, write, input_precision=DOT)
        apart = tl.dot(u, drt, apart, input_precision=DOT)
    write *= tl.exp(last - level)[:, None]
    if DECAYS:
        end = tl.sum(tl.sum(write * k.to(tl.float32), 1), 0) + tl.exp(last) * tl.sum(kept, 0)
    later = _fade_back(level, C)
    apart = tl.where(c[None, :] > c[:, None], apart * later * beta[None, :], 0.0)
    write -= tl.dot(apart.to(k.dtype), k, input_precision=DOT)
    if SHARE > 0:
        for x in range(SHARE):
            h = g * SHARE + x
            apart = tl.zeros([C, C], tl.float32)
            for low in range(0, E, BE):
                e = low + tl.arange(0, BE)
                u = _rows(U, own, E, i, e, n, E)
                dout = _columns(DO, b * sob + h * soh, son, i, e, n, E)
                apart = tl.dot(u, dout, apart, input_precision=DOT)
            q = _rows(Q, b * sqb + h * sqh, sqn, i, f, n, F)
            write = tl.dot((apart * later).to(k.dtype), q, write, input_precision=DOT)

    dk = write - beta[:, None] * read
    to = DK + b * xkb + g * xkg + i[:, None] * xkn + f[None, :]
    tl.store(to, dk.to(DK.dtype.element_ty), mask=(i[:, None] < n) & (f[None, :] < F))
    if DECAYS:
        slope = -beta * reading - tl.sum(write * k.to(tl.float32), 1)
        for x in range(SHARE):
            slope += tl.load(SLOPE + (bg * SHARE + x) * n + i, mask=i < n, other=0.0)
        sums = tl.sum(tl.where(c[None, :] >= c[:, None], slope[None, :], 0.0), 1) + end
        tl.store(DDECAY + bg * n + i, sums, mask=i < n)
