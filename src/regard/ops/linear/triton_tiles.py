"""Tiles that all Triton kernels of linear attention load: queries, keys and values, feature maps, decays inside a chunk.

Pointers are advanced to the first token of a segment of `count` tokens; a chunk begins at token `low` and has C tokens.
Rows are tokens and columns are features; `..._columns` are the transpose, loaded as such: no product is ever transposed.
"""

import triton
import triton.language as tl

SMALLEST_NORM = tl.constexpr(9.860761315262648e-32)  # tiny / eps of float32: below, weights have no digits left


@triton.jit
def token_rows(P, i, stride, d, count, size: tl.constexpr):
    """Load a tile (tokens, features), 0 outside."""
    return tl.load(P + i[:, None] * stride + d[None, :], mask=(i[:, None] < count) & (d[None, :] < size), other=0.0)


@triton.jit
def token_columns(P, i, stride, d, count, size: tl.constexpr):
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
    x = token_rows(K, i, stride, d, count, f)
    if FEATURE != 0 or HAS_VALID:
        there = present(VALID, i, count, HAS_VALID)
        x = tl.where(there[:, None] & (d[None, :] < f), apply_feature(x, FEATURE), 0.0)
    return x


@triton.jit
def key_columns(K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load features of keys (features, tokens), 0 for tokens that do not exist."""
    x = token_columns(K, i, stride, d, count, f)
    if FEATURE != 0 or HAS_VALID:
        there = present(VALID, i, count, HAS_VALID)
        x = tl.where(there[None, :] & (d[:, None] < f), apply_feature(x, FEATURE), 0.0)
    return x


@triton.jit
def inverse_norm(den):
    """Return 1 / norm, and 0 where the weights of a row have no digits left."""
    enough = den > SMALLEST_NORM
    return tl.where(enough, 1.0 / tl.where(enough, den, 1.0), 0.0)


# Decays inside of a chunk. LD holds one log decay a token (DECAY 1), which is summed here, or for every feature the log decay
# from the start of the chunk up to a token (DECAY 2, its level). A token behind the segment decays nothing.


@triton.jit
def token_decay(LD, i, stride, count):
    """Load log decays of tokens, one number each."""
    return tl.load(LD + i * stride, mask=i < count, other=0.0).to(tl.float32)


@triton.jit
def chunk_levels(LD, low, stride, count, C: tl.constexpr):
    """Return the log decay from the start of a chunk up to each token, (C)."""
    r = tl.arange(0, C)
    log = token_decay(LD, low + r, stride, count)
    return tl.sum(tl.where(r[:, None] >= r[None, :], log[None, :], 0.0), 1)


@triton.jit
def chunk_decay(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the log decay of all tokens of a chunk, (f)."""
    if DECAY == 1:
        total = tl.sum(token_decay(LD, low + tl.arange(0, C), stride, count), 0) + tl.zeros_like(d).to(tl.float32)
    else:
        last = tl.minimum(low + C, count) - 1
        total = tl.load(LD + last * stride + d, mask=d < f, other=0.0).to(tl.float32)
    return total


@triton.jit
def start_decay_rows(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of the state before a chunk that is left at each token: (C, 1), or (C, features)."""
    if DECAY == 1:
        share = tl.exp(chunk_levels(LD, low, stride, count, C))[:, None]
    else:
        share = tl.exp(token_rows(LD, low + tl.arange(0, C), stride, d, count, f).to(tl.float32))
    return share


@triton.jit
def start_decay_columns(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of the state before a chunk that is left at each token: (1, C), or (features, C)."""
    if DECAY == 1:
        share = tl.exp(chunk_levels(LD, low, stride, count, C))[None, :]
    else:
        share = tl.exp(token_columns(LD, low + tl.arange(0, C), stride, d, count, f).to(tl.float32))
    return share


@triton.jit
def end_decay_columns(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of each token that is left at the end of a chunk: (1, C), or (features, C)."""
    r = tl.arange(0, C)
    if DECAY == 1:
        log = token_decay(LD, low + r, stride, count)
        late = tl.exp(tl.sum(tl.where(r[:, None] < r[None, :], log[None, :], 0.0), 1))[None, :]
    else:
        level = token_columns(LD, low + r, stride, d, count, f).to(tl.float32)
        total = chunk_decay(LD, low, stride, d, count, f, C, DECAY)
        late = tl.exp(tl.minimum(total[:, None] - level, 0.0))
    return late


@triton.jit
def end_decay_rows(LD, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the share of each token that is left at the end of a chunk: (C, 1), or (C, features)."""
    r = tl.arange(0, C)
    if DECAY == 1:
        log = token_decay(LD, low + r, stride, count)
        late = tl.exp(tl.sum(tl.where(r[:, None] < r[None, :], log[None, :], 0.0), 1))[:, None]
    else:
        level = token_rows(LD, low + r, stride, d, count, f).to(tl.float32)
        total = chunk_decay(LD, low, stride, d, count, f, C, DECAY)
        late = tl.exp(tl.minimum(total[None, :] - level, 0.0))
    return late
