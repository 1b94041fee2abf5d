"""Tiles that all Triton kernels of linear attention load: queries, keys and values, feature maps, decays inside a chunk.

Pointers are advanced to the first token of a segment of `count` tokens; a chunk begins at token `low` and has C tokens.
Rows are tokens and columns are features; `..._columns` are the transpose, loaded as such: no product is ever transposed.
"""

import triton
import triton.language as tl

SMALLEST_NORM = tl.constexpr(9.860761315262648e-32)  # tiny / eps of float32: below, weights have no digits left


@triton.jit
def load_rows(P, i, stride, d, count, size: tl.constexpr):
    """Load a tile (tokens, features), 0 outside."""
    return tl.load(P + i[:, None] * stride + d[None, :], mask=(i[:, None] < count) & (d[None, :] < size), other=0.0)


@triton.jit
def load_columns(P, i, stride, d, count, size: tl.constexpr):
    """Load a tile (features, tokens), 0 outside."""
    return tl.load(P + i[None, :] * stride + d[:, None], mask=(i[None, :] < count) & (d[:, None] < size), other=0.0)


@triton.jit
def apply_feature(x, FEATURE: tl.constexpr):
    """Return the feature map of x in float32."""
    x = x.to(tl.float32)
    if FEATURE == 1:
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    if FEATURE == 2:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def feature_slope(x, FEATURE: tl.constexpr):
    """Return the derivative of the feature map at x."""
    x = x.to(tl.float32)
    if FEATURE == 1:
        x = tl.exp(tl.minimum(x, 0.0))
    if FEATURE == 2:
        x = (x > 0).to(tl.float32)
    return x


@triton.jit
def query_features(x, scale, FEATURE: tl.constexpr):
    """Return the features of a loaded tile of queries in float32."""
    return apply_feature(x, FEATURE) * scale


@triton.jit
def present(VALID, i, count, HAS_VALID: tl.constexpr):
    """Return which tokens exist: inside of the segment, and valid."""
    there = i < count
    if HAS_VALID:
        there = there & (tl.load(VALID + i, mask=there, other=0) != 0)
    return there


@triton.jit
def key_rows(K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load features of keys (tokens, features), 0 for tokens that do not exist."""
    x = load_rows(K, i, stride, d, count, f)
    if FEATURE != 0 or HAS_VALID:
        there = present(VALID, i, count, HAS_VALID)
        x = tl.where(there[:, None] & (d[None, :] < f), apply_feature(x, FEATURE), 0.0)
    return x


@triton.jit
def key_columns(K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load features of keys (features, tokens), 0 for tokens that do not exist."""
    x = load_columns(K, i, stride, d, count, f)
    if FEATURE != 0 or HAS_VALID:
        there = present(VALID, i, count, HAS_VALID)
        x = tl.where(there[None, :] & (d[:, None] < f), apply_feature(x, FEATURE), 0.0)
    return x


@triton.jit
def inverse_norm(den):
    """Return 1 / norm, and 0 where the weights of a row have no digits left."""
    enough = den > SMALLEST_NORM
    return tl.where(enough, 1.0 / tl.where(enough, den, 1.0), 0.0)


# Decays inside of a chunk. A token behind the segment decays nothing.


@triton.jit
def load_decay(LD, i, stride, count):
    """Load log decays of tokens, one number each."""
    return tl.load(LD + i * stride, mask=i < count, other=0.0).to(tl.float32)


@triton.jit
def chunk_levels(LD, low, stride, count, C: tl.constexpr):
    """Return the log decay from the start of a chunk up to each token, (C)."""
    r = tl.arange(0, C)
    log = load_decay(LD, low + r, stride, count)
    return tl.sum(tl.where(r[:, None] >= r[None, :], log[None, :], 0.0), 1)


@triton.jit
def start_decay_rows(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of the state before a chunk that is left at each token: (C, 1), or (C, features)."""
    r = tl.arange(0, C)
    if DECAY == 1:
        share = tl.exp(chunk_levels(LD, low, stride, count, C))[:, None]
    else:
        log = load_rows(LD, low + r, stride, d, count, f).to(tl.float32)
        share = tl.exp(tl.cumsum(log, 0))
    return share


@triton.jit
def start_decay_columns(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of the state before a chunk that is left at each token: (1, C), or (features, C)."""
    r = tl.arange(0, C)
    if DECAY == 1:
        share = tl.exp(chunk_levels(LD, low, stride, count, C))[None, :]
    else:
        log = load_columns(LD, low + r, stride, d, count, f).to(tl.float32)
        share = tl.exp(tl.cumsum(log, 1))
    return share


@triton.jit
def chunk_decay(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the log decay of all tokens of a chunk, (f)."""
    i = low + tl.arange(0, C)
    if DECAY == 1:
        total = tl.sum(load_decay(LD, i, stride, count), 0) + tl.zeros_like(d).to(tl.float32)
    else:
        total = tl.sum(load_rows(LD, i, stride, d, count, f).to(tl.float32), 0)
    return total


@triton.jit
def end_decay_columns(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of each token that is left at the end of a chunk: (1, C), or (features, C)."""
    r = tl.arange(0, C)
    end = tl.minimum(low + C, count)
    if DECAY == 1:
        log = load_decay(LD, low + r, stride, count)
        late = tl.exp(tl.sum(tl.where(r[:, None] < r[None, :], log[None, :], 0.0), 1))[None, :]
    else:
        later = load_columns(LD, low + r + 1, stride, d, end, f).to(tl.float32)
        late = tl.exp(tl.cumsum(later, 1, reverse=True))
    return late


@triton.jit
def end_decay_rows(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of each token that is left at the end of a chunk: (C, 1), or (C, features)."""
    r = tl.arange(0, C)
    end = tl.minimum(low + C, count)
    if DECAY == 1:
        log = load_decay(LD, low + r, stride, count)
        late = tl.exp(tl.sum(tl.where(r[:, None] < r[None, :], log[None, :], 0.0), 1))[:, None]
    else:
        later = load_rows(LD, low + r + 1, stride, d, end, f).to(tl.float32)
        late = tl.exp(tl.cumsum(later, 0, reverse=True))
    return late


@triton.jit
def key_vector(K, VALID, j, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load the features of one key, (f)."""
    there = j < count
    if HAS_VALID:
        there = there & (tl.load(VALID + j, mask=there, other=0) != 0)
    mask = (d < f) & there
    x = tl.load(K + j * stride + d, mask=mask, other=0.0)
    return tl.where(mask, apply_feature(x, FEATURE), 0.0)


@triton.jit
def keep_vector(LD, j, stride, d, count, f: tl.constexpr):
    """Load the share of every feature of the state that token j keeps, (f)."""
    log = tl.load(LD + j * stride + d, mask=(d < f) & (j < count), other=0.0)
    return tl.exp(log.to(tl.float32))


@triton.jit
def feature_scores(
    q, K, VALID, LD, low, skn, sln, d, count,
    f: tl.constexpr, C: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Return sum_f q_i k_j exp(L_i - L_j) for j <= i of a chunk, else 0, under a decay per feature: one key after the other."""
    r = tl.arange(0, C)
    a = tl.zeros([C, C], tl.float32)
    weight = tl.full(q.shape, 1.0, tl.float32)  # what is left of key j at token i, for i >= j
    for x in range(C):
        j = C - 1 - x
        key = key_vector(K, VALID, low + j, skn, d, count, f, FEATURE, HAS_VALID)
        score = tl.sum(q * weight * key[None, :], 1)
        a = tl.where((r[:, None] >= j) & (r[None, :] == j), score[:, None], a)
        keep = keep_vector(LD, low + j, sln, d, count, f)
        weight = tl.where(r[:, None] >= j, weight * keep[None, :], 1.0)
    return a


@triton.jit
def query_vector(Q, i, stride, d, count, scale, f: tl.constexpr, FEATURE: tl.constexpr):
    """Load the features of one query, (f)."""
    x = tl.load(Q + i * stride + d, mask=(d < f) & (i < count), other=0.0)
    return apply_feature(x, FEATURE) * scale


@triton.jit
def feature_query_grads(
    dq, da, K, VALID, LD, low, skn, sln, d, count,
    f: tl.constexpr, C: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Add sum_{j <= i} da_ij k_j exp(L_i - L_j) to dq_i, under a decay per feature."""
    r = tl.arange(0, C)
    weight = tl.full(dq.shape, 1.0, tl.float32)
    for x in range(C):
        j = C - 1 - x
        key = key_vector(K, VALID, low + j, skn, d, count, f, FEATURE, HAS_VALID)
        column = tl.sum(tl.where(r[None, :] == j, da, 0.0), 1)
        column = tl.where(r >= j, column, 0.0)
        dq += column[:, None] * key[None, :] * weight
        keep = keep_vector(LD, low + j, sln, d, count, f)
        weight = tl.where(r[:, None] >= j, weight * keep[None, :], 1.0)
    return dq


@triton.jit
def feature_key_grads(dk, dat, Q, LD, low, sqn, sln, d, count, scale, f: tl.constexpr, C: tl.constexpr, FEATURE: tl.constexpr):
    """Add sum_{i >= j} da_ij q_i exp(L_i - L_j) to dk_j, under a decay per feature; dat is (j, i)."""
    r = tl.arange(0, C)
    weight = tl.full(dk.shape, 1.0, tl.float32)  # what is left of key j at token i, for i >= j
    for i in range(C):
        keep = keep_vector(LD, low + i, sln, d, count, f)
        weight = tl.where(r[:, None] < i, weight * keep[None, :], 1.0)
        query = query_vector(Q, low + i, sqn, d, count, scale, f, FEATURE)
        column = tl.sum(tl.where(r[None, :] == i, dat, 0.0), 1)
        column = tl.where(r <= i, column, 0.0)
        dk += column[:, None] * query[None, :] * weight
    return dk


@triton.jit
def feature_scores_of_keys(k, Q, LD, low, sqn, sln, d, count, scale, f: tl.constexpr, C: tl.constexpr, FEATURE: tl.constexpr):
    """Return sum_f k_j q_i exp(L_i - L_j) for i >= j of a chunk, else 0, (j, i): one query after the other."""
    r = tl.arange(0, C)
    a = tl.zeros([C, C], tl.float32)
    weight = tl.full(k.shape, 1.0, tl.float32)
    for i in range(C):
        keep = keep_vector(LD, low + i, sln, d, count, f)
        weight = tl.where(r[:, None] < i, weight * keep[None, :], 1.0)
        query = query_vector(Q, low + i, sqn, d, count, scale, f, FEATURE)
        score = tl.sum(k * weight * query[None, :], 1)
        a = tl.where((r[:, None] <= i) & (r[None, :] == i), score[:, None], a)
    return a
