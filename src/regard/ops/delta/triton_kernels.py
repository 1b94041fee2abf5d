"""The delta rule in Triton: all chunks of tokens in parallel, and one linear recurrence over their states.

Letters as in `regard.ops.delta.torch`: a chunk of C tokens begins with the state S (f e), L are its summed log decays,
A_ij = beta_i exp(L_i - L_j) k_i . k_j for j < i, W = (I + A)^-1, and

    U = W R,   R = beta (V - exp(L) K S),   P_ij = exp(L_i - L_j) q_i . k_j for j <= i,   out = exp(L) Q S + P U
    S' = exp(L_last) S - N S + B,   N = K'^T W beta exp(L) K,   B = K'^T W beta V,   K' = exp(L_last - L) K

Only S' depends on another chunk. The identity in its transition is added and never rounded: a memory that lasts keeps its value.
With D the gradient of S', the gradients of a chunk are

    dU = P^T dO + K' D,   dR = W^T dU,   dS = exp(L_last) D - N^T D + (exp(L) Q)^T dO - (beta exp(L) K)^T W^T P^T dO

which is the same recurrence in the other direction, and, with H = exp(L) dR S^T + ((dR U^T) exp(L_i - L_j)) K,

    dV = beta dR,   dbeta = dR . V - k . H,   dQ = exp(L) dO S^T + ((dO U^T) exp(L_i - L_j)) K,
    dK = -beta H + exp(L_last - L) U D^T + ((U dO^T) exp(L_j - L_i)) Q - ((U dR^T) exp(L_j - L_i) beta) K

Every operand that is needed transposed is loaded or computed transposed: Triton 3.6 gives wrong results on Hopper cards where an
accumulator is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("n", "chunks", "steps", "count", "G")  # no kernel is compiled anew for them


@triton.jit
def _levels(DECAY, base, stride, first, n, C: tl.constexpr, HAS: tl.constexpr):
    """The summed log decay of the tokens of a chunk (C), and that of its last token."""
    i = tl.arange(0, C)
    if HAS:
        x = tl.load(DECAY + base + (first + i) * stride, mask=first + i < n, other=0.0).to(tl.float32)
        level = tl.sum(tl.where(i[None, :] <= i[:, None], x[None, :], 0.0), 1)
        return level, tl.sum(x, 0)
    zero = tl.zeros([C], tl.float32)
    return zero, tl.sum(zero, 0)


@triton.jit
def _rows(X, base, stride, i, col, n, WIDTH: tl.constexpr):
    """Tokens i as rows (C, columns), zero behind the last token and the last column."""
    here = (i[:, None] < n) & (col[None, :] < WIDTH)
    return tl.load(X + base + i[:, None] * stride + col[None, :], mask=here, other=0.0)


@triton.jit
def _columns(X, base, stride, i, col, n, WIDTH: tl.constexpr):
    """Tokens i as columns (columns of the tensor, C): what `_rows` loads, transposed."""
    here = (i[None, :] < n) & (col[:, None] < WIDTH)
    return tl.load(X + base + i[None, :] * stride + col[:, None], mask=here, other=0.0)


@triton.jit
def _matrix(X, base, row, col, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A part of a matrix (ROWS WIDTH) at `base`."""
    here = (row[:, None] < ROWS) & (col[None, :] < WIDTH)
    return tl.load(X + base + row[:, None] * WIDTH + col[None, :], mask=here, other=0.0)


@triton.jit
def _transposed(X, base, row, col, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A part of the transpose of a matrix (WIDTH ROWS) at `base`."""
    here = (row[:, None] < ROWS) & (col[None, :] < WIDTH)
    return tl.load(X + base + col[None, :] * ROWS + row[:, None], mask=here, other=0.0)


@triton.jit
def _fade(level, C: tl.constexpr):
    """exp(L_i - L_j) for j <= i, else 0."""
    i = tl.arange(0, C)
    apart = level[:, None] - level[None, :]
    return tl.exp(tl.where(i[:, None] >= i[None, :], apart, float("-inf")))


@triton.jit
def _fade_back(level, C: tl.constexpr):
    """The transpose of `_fade`: exp(L_i - L_j) at (j, i) for j <= i, else 0."""
    i = tl.arange(0, C)
    apart = level[None, :] - level[:, None]
    return tl.exp(tl.where(i[None, :] >= i[:, None], apart, float("-inf")))


@triton.jit
def _inverse(a, C: tl.constexpr, DOT: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangle a (C C), without division and without powers of a, which would lose all digits.

    The inverses D of two neighbouring blocks on the diagonal, with what is between them in a, make that of a block twice as
    large: D - D a D. Blocks begin with one row and end with all.
    """
    i = tl.arange(0, C)
    row, col = i[:, None], i[None, :]
    d = tl.where(row == col, 1.0, 0.0) - tl.where(row // 2 == col // 2, a, 0.0)
    for power in tl.static_range(1, 6):  # blocks of 2 ** power rows
        if 2**power < C:
            between = (row >> (power + 1) == col >> (power + 1)) & (row >> power != col >> power)
            step = tl.dot(d, tl.where(between, a, 0.0), input_precision=DOT)
            d -= tl.dot(step, d, input_precision=DOT)
    return d


@triton.jit(do_not_specialize=SIZES)
def delta_prepare(
    K, V, BETA, DECAY, W, N, B, WHOLE,
    skb, skg, skn, svb, svg, svn, sbb, sbg, sbn, sdb, sdg, sdn,
    n, chunks, G,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Solve a chunk: W (b g chunks C C), N (b g chunks f f), B (b g chunks f e) and exp(L_last) (b g chunks)."""
    chunk, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    c, f, first = tl.arange(0, C), tl.arange(0, BF), chunk * C
    i = first + c
    key = b * skb + g * skg
    k = _rows(K, key, skn, i, f, n, F)
    kt = _columns(K, key, skn, i, f, n, F)
    beta = tl.load(BETA + b * sbb + g * sbg + i * sbn, mask=i < n, other=0.0).to(tl.float32)
    level, last = _levels(DECAY, b * sdb + g * sdg, sdn, first, n, C, DECAYS)
    a = tl.dot(k, kt, input_precision=DOT) * _fade(level, C) * beta[:, None]
    w = _inverse(tl.where(c[:, None] > c[None, :], a, 0.0), C, DOT).to(k.dtype)
    at = bg * chunks + chunk
    tl.store(W + at * C * C + c[:, None] * C + c[None, :], w)
    tl.store(WHOLE + at, tl.exp(last))
    k = _rows(K, key, skn, i, f, n, F)  # once more: the solve needs the registers
    kt = _columns(K, key, skn, i, f, n, F)
    late = kt.to(tl.float32) * tl.exp(last - level)[None, :]
    moved = tl.dot(late.to(k.dtype), w, input_precision=DOT).to(k.dtype)  # K'^T W (f C)
    read = k.to(tl.float32) * (beta * tl.exp(level))[:, None]
    lost = tl.dot(moved, read.to(k.dtype), input_precision=DOT)
    lost = lost.to(N.dtype.element_ty)
    tl.store(N + at * F * F + f[:, None] * F + f[None, :], lost, mask=(f[:, None] < F) & (f[None, :] < F))
    for low in range(0, E, BE):
        e = low + tl.arange(0, BE)
        v = _rows(V, b * svb + g * svg, svn, i, e, n, E).to(tl.float32) * beta[:, None]
        new = tl.dot(moved, v.to(k.dtype), input_precision=DOT)
        tl.store(B + at * F * E + f[:, None] * E + e[None, :], new, mask=(f[:, None] < F) & (e[None, :] < E))


@triton.jit(do_not_specialize=SIZES)
def delta_walk(
    N, WHOLE, X, STATES, FIRST, LAST,
    steps, count,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    BACK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """S' = whole S - N S + B over the `count` matrices of a row, in segments of `steps`; BACK: from the last, with N^T.

    N (rows count f f), X: B (rows count f e); STATES, before each step, has the sizes of X or is X itself; FIRST and LAST
    (rows segments f e).
    """
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    f = tl.arange(0, BF)
    segment, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    low = segment * steps
    size = tl.minimum(steps, count - low)
    seg = row * tl.num_programs(1) + segment
    here = (f[:, None] < F) & (e[None, :] < E)
    spot = f[:, None] * E + e[None, :]
    s = tl.load(FIRST + seg * F * E + spot, mask=here, other=0.0).to(tl.float32)
    for x in range(size):
        at = row * count + low + (size - 1 - x if BACK else x)
        lost = _transposed(N, at * F * F, f, f, F, F) if BACK else _matrix(N, at * F * F, f, f, F, F)
        kept = tl.load(WHOLE + at)
        new = tl.load(X + at * F * E + spot, mask=here, other=0.0)
        tl.store(STATES + at * F * E + spot, s.to(STATES.dtype.element_ty), mask=here)
        s = kept * s + new - tl.dot(lost.to(tl.float32), s, input_precision=DOT)
    tl.store(LAST + seg * F * E + spot, s, mask=here)


@triton.jit(do_not_specialize=SIZES)
def delta_totals(
    N, WHOLE, X, TOTAL_N, TOTAL_WHOLE, TOTAL_X,
    steps, count,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    BACK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What `delta_walk` does in a whole segment, as one step: N (rows segments f f), whole (rows segments), B (.. f e).

    The first programs along dimension 0 compute columns of B, the others columns of N: with a transition d I - M so far,
    M' = whole M - N M + d N, which is the recurrence of a state once more.
    """
    f = tl.arange(0, BF)
    part, segment, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    values: tl.constexpr = (E + BE - 1) // BE
    of_state = part < values
    col = tl.where(of_state, part, part - values) * BE + tl.arange(0, BE)
    low = segment * steps
    size = tl.minimum(steps, count - low)
    in_state = (f[:, None] < F) & (col[None, :] < E) & of_state
    in_turn = (f[:, None] < F) & (col[None, :] < F) & (part >= values)
    turn_spot = col[None, :] * F + f[:, None] if BACK else f[:, None] * F + col[None, :]
    spot = f[:, None] * E + col[None, :]
    s = tl.zeros([BF, BE], tl.float32)
    whole = tl.sum(tl.zeros([BF], tl.float32), 0) + 1.0
    for x in range(size):
        at = row * count + low + (size - 1 - x if BACK else x)
        lost = _transposed(N, at * F * F, f, f, F, F) if BACK else _matrix(N, at * F * F, f, f, F, F)
        kept = tl.load(WHOLE + at)
        new = tl.load(X + at * F * E + spot, mask=in_state, other=0.0)
        new += whole * tl.load(N + at * F * F + turn_spot, mask=in_turn, other=0.0)
        s = kept * s + new - tl.dot(lost.to(tl.float32), s, input_precision=DOT)
        whole *= kept
    seg = row * tl.num_programs(1) + segment
    tl.store(TOTAL_X + seg * F * E + spot, s, mask=in_state)
    tl.store(TOTAL_N + seg * F * F + turn_spot, s.to(TOTAL_N.dtype.element_ty), mask=in_turn)
    tl.store(TOTAL_WHOLE + seg, whole)


@triton.jit(do_not_specialize=SIZES)
def delta_outputs(
    Q, K, V, BETA, DECAY, W, S, OUT,
    sqb, sqh, sqn, skb, skg, skn, svb, svg, svn, sbb, sbg, sbn, sdb, sdg, sdn, sob, soh, son,
    n, chunks, G,
    SHARE: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out (b h n e) of a chunk, for BE columns and all query heads of a state."""
    chunk, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    c, f, first = tl.arange(0, C), tl.arange(0, BF), chunk * C
    i = first + c
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    at = bg * chunks + chunk
    key = b * skb + g * skg
    k = _rows(K, key, skn, i, f, n, F)
    v = _rows(V, b * svb + g * svg, svn, i, e, n, E)
    beta = tl.load(BETA + b * sbb + g * sbg + i * sbn, mask=i < n, other=0.0).to(tl.float32)
    level, _last = _levels(DECAY, b * sdb + g * sdg, sdn, first, n, C, DECAYS)
    grown = tl.exp(level)[:, None]
    s = _matrix(S, at * F * E, f, e, F, E).to(k.dtype)
    rest = beta[:, None] * (v.to(tl.float32) - grown * tl.dot(k, s, input_precision=DOT))
    w = tl.load(W + at * C * C + c[:, None] * C + c[None, :])
    u = tl.dot(w, rest.to(k.dtype), input_precision=DOT).to(k.dtype)
    fade = _fade(level, C)
    kt = _columns(K, key, skn, i, f, n, F)
    for x in range(SHARE):
        h = g * SHARE + x
        q = _rows(Q, b * sqb + h * sqh, sqn, i, f, n, F)
        p = tl.dot(q, kt, input_precision=DOT) * fade
        out = grown * tl.dot(q, s, input_precision=DOT)
        out += tl.dot(p.to(k.dtype), u, input_precision=DOT)
        to = OUT + b * sob + h * soh + i[:, None] * son + e[None, :]
        tl.store(to, out.to(OUT.dtype.element_ty), mask=(i[:, None] < n) & (e[None, :] < E))
