"""Triton kernels of causal attention by exponential random features, backward: see `causal_exp_kernels.py` for letters and units.

With D_i = exp(LSE_i) the sum of the weights of a query, do the gradient of out, and delta_i = out_i . do_i,

    dM_if = exp(M_if) / D_i (S_f . do_i - z_f delta_i),   S, z the state behind token i
    dL_jf = exp(L_jf) (U_f . v_j - t_f),                  dv_j = sum_f exp(L_jf) U_f
    U_f = sum_i exp(M_if) / D_i do_i,                     t_f = sum_i exp(M_if) / D_i delta_i over i >= j

    query grads   dq of a tile, and delta
    adjoint       U and t behind every tile up to the end of its run, and what each run adds, BF features a program
    key grads     dk and dv of a tile

U and t behind a tile have units of exp2(-END), END the largest exponent of keys up to its end: factors of keys are at most 1.
"""

import triton
import triton.language as tl

from regard.ops.linear.causal_exp_kernels import own_tops, state_shares, tops_so_far
from regard.ops.linear.noncausal_exp_kernels import shortened_columns, shortened_rows, store_token_grads
from regard.ops.linear.noncausal_kernels import state_columns, state_tile
from regard.ops.linear.triton_tiles import LOG2_E, column_mask, present, row_mask, token_columns, token_rows


@triton.jit(do_not_specialize=["n", "tiles", "runs", "RUN", "all_tiles"])
def causal_exp_query_grads(
    Q, K, V, W_LOGS, W_GRADS, LOG_NORM, VALID, S, Z, TOP, RUN_S, RUN_Z, RUN_TOP, OWN, BEGIN, LSE, OUT, DO, DELTA, DQ, DNORM,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, root, n, tiles, runs, RUN, all_tiles, H, R, SHARE, SHARE_G,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    OWN_BLOCKS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ (b n h d) of a tile, and DELTA (b h n), out . do; DNORM (b g all_tiles) begins with queries."""
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h, bg = bh // H, bh % H, bh // R
    g = h // R
    at, run_at = (bg * tiles + tile) * f, (bg * runs + tile // RUN) * f
    begin = tl.load(BEGIN + bg * tiles + tile)
    a, c, r = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, C)
    i = tile * C + r
    spot = i.to(tl.int64)
    inside = i < n
    there = present(VALID + b * n, i, n, HAS_VALID)
    own = own_tops(OWN, bg, i, n, OWN_BLOCKS)
    tops = tops_so_far(own, begin)
    do = token_rows(DO + b * sdb + h * sdh, spot, sdn, c, n, e)
    delta = tl.sum(do.to(tl.float32) * token_rows(OUT + (b * n * H + h) * e, spot, H * e, c, n, e).to(tl.float32), 1)
    tl.store(DELTA + bh * n + i, delta, mask=inside)
    vt = tl.load(V + b * svb + g * svh + spot[None, :] * svn + c[:, None], mask=row_mask(there[None, :], c, e), other=0.0)
    pairs = tl.dot(do.to(TYPE), vt.to(TYPE), input_precision=PRECISION) - delta[:, None]
    pairs = pairs * tl.exp2(tl.where(r[:, None] >= r[None, :], own[None, :] - tops[:, None], float("-inf")))
    pairs = pairs.to(TYPE)
    shift = tl.exp2(begin - tops)
    early = (do.to(tl.float32) * shift[:, None]).to(TYPE)
    delta = delta * shift
    x = token_rows(Q + b * sqb + h * sqh, spot, sqn, a, n, d)
    y, factor, _offset, square = shortened_rows(x, LOG_NORM + h // SHARE, root, HAS_NORM, LOGS)
    k = tl.load(K + b * skb + g * skh + spot[:, None] * skn + a[None, :], mask=column_mask(there[:, None], a, d), other=0.0)
    yk, _factor, offset, _square = shortened_rows(k, LOG_NORM + g // SHARE_G, root, HAS_NORM, LOGS)
    offset = tl.where(there, offset, float("-inf")) - own
    unit = tops - tl.load(LSE + bh * n + i, mask=inside, other=float("inf"))
    dx = tl.zeros([C, BD], tl.float32)
    for low in range(0, f, BF):
        rows = low + tl.arange(0, BF)
        share, run_share = state_shares(TOP, RUN_TOP, at, run_at, rows, begin, f)
        s = state_columns(S, at, rows, c, f, e).to(tl.float32) * share[None, :]
        s += state_columns(RUN_S, run_at, rows, c, f, e) * run_share[None, :]
        z = tl.load(Z + at + rows, mask=rows < f, other=0.0) * share
        z += tl.load(RUN_Z + run_at + rows, mask=rows < f, other=0.0) * run_share
        w = state_columns(W_LOGS, 0, rows, a, f, d).to(LOGS)
        keys = tl.dot(yk, w, input_precision=PRECISION) + offset[:, None]
        logs = tl.dot(y, w, input_precision=PRECISION) + unit[:, None]
        if f % BF != 0:
            keys = tl.where(rows[None, :] < f, keys, float("-inf"))
            logs = tl.where(rows[None, :] < f, logs, float("-inf"))
        grad = tl.dot(early, s.to(TYPE), input_precision=PRECISION) - delta[:, None] * z[None, :]
        grad = tl.dot(pairs, tl.exp2(keys).to(TYPE), grad, input_precision=PRECISION) * tl.exp2(logs)
        dx = tl.dot(grad.to(TYPE), state_tile(W_GRADS, 0, rows, a, f, d).to(TYPE), dx, input_precision=PRECISION)
    store_token_grads(
        DQ + ((b * n + tile * C) * H + h) * d, DNORM + bg * all_tiles + (bh % R) * tiles + tile,
        dx, x, factor, square, tl.zeros_like(square), inside, a, LOG_NORM + h // SHARE, root, H * d, d, HAS_NORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "tiles", "runs", "RUN"])
def causal_exp_adjoint(
    Q, W, LOG_NORM, BEGIN, END, LSE, DELTA, DO, U, T, RUN_U, RUN_T, RUN_DECAY,
    sqb, sqh, sqn, sdb, sdh, sdn, root, n, tiles, runs, RUN, H, R, SHARE,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store U (b g tiles f e) and T (b g tiles f) of the tokens of a run behind every tile, and of all, RUN_... (b g runs + 1 f).

    RUN_DECAY (b g runs + 1 f): the logarithm, to base e, of the factor that U gets from the end of a run to its start.
    """
    blocks: tl.constexpr = (f + BF - 1) // BF
    block, run, bg = (
        tl.program_id(0) % blocks,
        tl.program_id(0) // blocks % runs,
        (tl.program_id(0) // blocks // runs).to(tl.int64),
    )
    rows = block * BF + tl.arange(0, BF)
    inside_rows = rows < f
    b, g = bg // (H // R), bg % (H // R)
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    w = state_tile(W, 0, rows, a, f, d).to(LOGS)
    u = tl.zeros([BF, BE], tl.float32)
    t = tl.zeros([BF], tl.float32)
    state_mask = column_mask(inside_rows[:, None], c, e)
    last = tl.minimum(run * RUN + RUN, tiles) - 1
    for back in range(0, last + 1 - run * RUN):
        tile = last - back
        at = (bg * tiles + tile) * f
        tl.store(U + (at + rows[:, None]) * e + c[None, :], u.to(U.dtype.element_ty), mask=state_mask)
        tl.store(T + at + rows, t, mask=inside_rows)
        begin = tl.load(BEGIN + bg * tiles + tile)
        keep = tl.exp2(begin - tl.load(END + bg * tiles + tile))
        u = u * keep
        t = t * keep
        i = tile * C + tl.arange(0, C)
        spot = i.to(tl.int64)
        inside = i < n
        for head in range(g * R, g * R + R):
            bh = b * H + head
            x = token_columns(Q + b * sqb + head * sqh, spot, sqn, a, n, d)
            y, _offset = shortened_columns(x, LOG_NORM + head // SHARE, root, HAS_NORM, LOGS)
            do = token_rows(DO + b * sdb + head * sdh, spot, sdn, c, n, e).to(TYPE)
            unit = begin - tl.load(LSE + bh * n + i, mask=inside, other=float("inf"))
            delta = tl.load(DELTA + bh * n + i, mask=inside, other=0.0)
            p = tl.exp2(tl.dot(w, y, input_precision=PRECISION) + unit[None, :])
            t += tl.sum(p * delta[None, :], 1)
            u = tl.dot(p.to(TYPE), do, u, input_precision=PRECISION)
    at = (bg * (runs + 1) + run) * f
    tl.store(RUN_U + (at + rows[:, None]) * e + c[None, :], u, mask=state_mask)
    tl.store(RUN_T + at + rows, t, mask=inside_rows)
    fall = tl.load(BEGIN + bg * tiles + run * RUN) - tl.load(END + bg * tiles + last)
    tl.store(RUN_DECAY + at + rows, fall / LOG2_E + tl.zeros_like(t), mask=inside_rows)


@triton.jit
def _key_pass(
    Q, W_LOGS, W_GRADS, U, T, RUN_U, RUN_T, LSE, DELTA, DO, dx, dv, total,
    spot, sqn, sdn, n, at, run_at, far, LOG_NORM, root, yk, v, offset, own, tops, end,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    HAS_NORM: tl.constexpr, STATE: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of keys by one query head; STATE: and by all tokens behind the tile."""
    a, c, r = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, C)
    inside = spot < n
    x = token_rows(Q, spot, sqn, a, n, d)
    y, _factor, _offset, _square = shortened_rows(x, LOG_NORM, root, HAS_NORM, LOGS)
    unit = tops - tl.load(LSE + spot, mask=inside, other=float("inf"))
    delta = tl.load(DELTA + spot, mask=inside, other=0.0)
    pair = tl.exp2(tl.where(r[None, :] >= r[:, None], own[:, None] - tops[None, :], float("-inf")))
    grads = tl.dot(v, token_columns(DO, spot, sdn, c, n, e).to(TYPE), input_precision=PRECISION) - delta[None, :]
    grads = (grads * pair).to(TYPE)
    scores = tl.zeros([C, C], tl.float32)
    shift = tl.exp2(own - end)
    late = (v.to(tl.float32) * shift[:, None]).to(TYPE)
    behind = tl.zeros([C, BE], tl.float32)
    for low in range(0, f, BF):
        rows = low + tl.arange(0, BF)
        w = state_columns(W_LOGS, 0, rows, a, f, d).to(LOGS)
        logs = tl.dot(yk, w, input_precision=PRECISION) + offset[:, None]
        queries = tl.dot(y, w, input_precision=PRECISION) + unit[:, None]
        if f % BF != 0:
            logs = tl.where(rows[None, :] < f, logs, float("-inf"))
            queries = tl.where(rows[None, :] < f, queries, float("-inf"))
        phi = tl.exp2(logs)
        half = tl.exp2(queries).to(TYPE)
        scores = tl.dot(phi.to(TYPE), tl.trans(half), scores, input_precision=PRECISION)
        if STATE:
            u = state_tile(U, at, rows, c, f, e).to(tl.float32)
            u = (u + state_tile(RUN_U, run_at, rows, c, f, e) * far).to(TYPE)
            t = tl.load(T + at + rows, mask=rows < f, other=0.0) + tl.load(RUN_T + run_at + rows, mask=rows < f, other=0.0) * far
            behind = tl.dot(phi.to(TYPE), u, behind, input_precision=PRECISION)
            grad = tl.dot(late, tl.trans(u), input_precision=PRECISION) - shift[:, None] * t[None, :]
            grad = tl.dot(grads, half, grad, input_precision=PRECISION) * phi
        else:
            grad = tl.dot(grads, half, input_precision=PRECISION) * phi
        total += tl.sum(grad, 1)
        dx = tl.dot(grad.to(TYPE), state_tile(W_GRADS, 0, rows, a, f, d).to(TYPE), dx, input_precision=PRECISION)
    if STATE:
        dv += behind * shift[:, None]
    do = token_rows(DO, spot, sdn, c, n, e).to(TYPE)
    dv = tl.dot((scores * pair).to(TYPE), do, dv, input_precision=PRECISION)
    return dx, dv, total


@triton.jit(do_not_specialize=["n", "tiles", "runs", "RUN", "all_tiles"])
def causal_exp_key_grads(
    Q, K, V, W_LOGS, W_GRADS, LOG_NORM, VALID, OWN, BEGIN, END, U, T, RUN_U, RUN_T, LSE, DELTA, DO, DK, DV, DNORM,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, root, n, tiles, runs, RUN, all_tiles, H, R, SHARE, SHARE_G,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    OWN_BLOCKS: tl.constexpr, GROUPED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALID: tl.constexpr, LOGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b n g d) and DV (b n g e) of a tile; DNORM (b g all_tiles) ends with keys. GROUPED: R is more than 1.

    RUN_U (b g runs + 1 f e) and RUN_T: what lies behind every run.
    """
    tile, bg = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    G = H // R
    b, g = bg // G, bg % G
    at, run = (bg * tiles + tile) * f, tile // RUN
    run_at = (bg * (runs + 1) + run) * f
    a, c = tl.arange(0, BD), tl.arange(0, BE)
    j = tile * C + tl.arange(0, C)
    spot = j.to(tl.int64)
    there = present(VALID + b * n, j, n, HAS_VALID)
    own = own_tops(OWN, bg, j, n, OWN_BLOCKS)
    tops = tops_so_far(own, tl.load(BEGIN + bg * tiles + tile))
    end = tl.load(END + bg * tiles + tile)
    far = tl.exp2(end - tl.load(END + bg * tiles + tl.minimum(run * RUN + RUN, tiles) - 1))
    k = tl.load(K + b * skb + g * skh + spot[:, None] * skn + a[None, :], mask=column_mask(there[:, None], a, d), other=0.0)
    v = tl.load(V + b * svb + g * svh + spot[:, None] * svn + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
    v = v.to(TYPE)
    yk, factor, offset, square = shortened_rows(k, LOG_NORM + g // SHARE_G, root, HAS_NORM, LOGS)
    offset = tl.where(there, offset, float("-inf")) - own
    dx = tl.zeros([C, BD], tl.float32)
    dv = tl.zeros([C, BE], tl.float32)
    total = tl.zeros([C], tl.float32)
    h = g * R
    dx, dv, total = _key_pass(
        Q + b * sqb + h * sqh, W_LOGS, W_GRADS, U, T, RUN_U, RUN_T, LSE + (b * H + h) * n, DELTA + (b * H + h) * n,
        DO + b * sdb + h * sdh, dx, dv, total, spot, sqn, sdn, n, at, run_at, far, LOG_NORM + h // SHARE, root, yk, v, offset,
        own, tops, end, f, d, e, BF, BD, BE, C, HAS_NORM, True, LOGS, TYPE, PRECISION,
    )  # fmt: skip
    if GROUPED:
        for other in range(h + 1, h + R):
            dx, dv, total = _key_pass(
                Q + b * sqb + other * sqh, W_LOGS, W_GRADS, U, T, RUN_U, RUN_T, LSE + (b * H + other) * n,
                DELTA + (b * H + other) * n, DO + b * sdb + other * sdh, dx, dv, total, spot, sqn, sdn, n, at, run_at, far,
                LOG_NORM + other // SHARE, root, yk, v, offset, own, tops, end,
                f, d, e, BF, BD, BE, C, HAS_NORM, False, LOGS, TYPE, PRECISION,
            )  # fmt: skip
    inside = j < n
    into = DV + ((b * n + spot[:, None]) * G + g) * e + c[None, :]
    tl.store(into, dv.to(DV.dtype.element_ty), mask=column_mask(inside[:, None], c, e))
    store_token_grads(
        DK + ((b * n + tile * C) * G + g) * d, DNORM + bg * all_tiles + all_tiles - tiles + tile,
        dx, k, factor, square, total, inside, a, LOG_NORM + g // SHARE_G, root, G * d, d, HAS_NORM,
    )  # fmt: skip
