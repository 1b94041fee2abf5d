"""Tiles that all Triton kernels of linear attention load: queries, keys and values, feature maps, decays inside a chunk.

Pointers are advanced to the first token of a segment of `count` tokens; a tile begins at token `low` and has C tokens.
Rows are tokens and columns are features; `..._columns` are the transpose, loaded as such: no product is ever transposed.
"""

import triton
import triton.language as tl

SMALLEST_LOG = tl.constexpr(-113.53750817571904)  # 1.3 log(tiny) of float32: a log decay that leaves nothing
FIRST_DIGITS = tl.constexpr(-65536)  # the bits of a float32 that bfloat16 has
LOG2_E = tl.constexpr(1.4426950408889634)
NORM_FLOOR = tl.constexpr(9.860761315262648e-32)  # tiny / eps of float32: below, weights have no digits left


@triton.jit
def exp_of(x):
    """Return exp(x), and 0 where that is no normal number: one instruction of the card and not four, as `tl.exp` is."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def column_mask(mask, d, size: tl.constexpr):
    """Add to a mask that columns d exist; a power of two is never padded."""
    if size & (size - 1) != 0 or d.shape[0] > size:
        mask = mask & (d[None, :] < size)
    return mask


@triton.jit
def row_mask(mask, d, size: tl.constexpr):
    """Add to a mask that rows d exist."""
    if size & (size - 1) != 0 or d.shape[0] > size:
        mask = mask & (d[:, None] < size)
    return mask


@triton.jit
def token_rows(P, i, stride, d, count, size: tl.constexpr, FULL: tl.constexpr = False):
    """Load a tile (tokens, features), 0 outside; FULL: all tokens exist."""
    mask = column_mask(i[:, None] >= 0 if FULL else i[:, None] < count, d, size)
    return tl.load(P + i[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def token_columns(P, i, stride, d, count, size: tl.constexpr, FULL: tl.constexpr = False):
    """Load a tile (features, tokens), 0 outside; FULL: all tokens exist."""
    mask = row_mask(i[None, :] >= 0 if FULL else i[None, :] < count, d, size)
    return tl.load(P + i[None, :] * stride + d[:, None], mask=mask, other=0.0)


@triton.jit
def apply_feature(x, FEATURE: tl.constexpr):
    """Return the feature map of x, in float32 unless it is x itself."""
    if FEATURE == 1:
        x = x.to(tl.float32)
        x = tl.maximum(x, 0.0) + exp_of(tl.minimum(x, 0.0))
    if FEATURE == 2:
        x = tl.maximum(x.to(tl.float32), 0.0)
    return x


@triton.jit
def feature_slope(x, FEATURE: tl.constexpr):
    """Return the derivative of the feature map at x."""
    x = x.to(tl.float32)
    if FEATURE == 1:
        x = exp_of(tl.minimum(x, 0.0))
    if FEATURE == 2:
        x = (x > 0).to(tl.float32)
    return x


@triton.jit
def present(VALID, i, count, HAS_VALID: tl.constexpr, FULL: tl.constexpr = False):
    """Return which tokens exist: inside of the segment, and valid."""
    there = i >= 0 if FULL else i < count
    if HAS_VALID:
        there = there & (tl.load(VALID + i, mask=there, other=0) != 0)
    return there


@triton.jit
def key_rows(
    K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, FULL: tl.constexpr = False
):
    """Load features of keys (tokens, features), 0 for tokens that do not exist: no feature map is above 0 at -1e30."""
    mask = column_mask(present(VALID, i, count, HAS_VALID, FULL)[:, None], d, f)
    x = tl.load(K + i[:, None] * stride + d[None, :], mask=mask, other=0.0 if FEATURE == 0 else -1e30)
    return apply_feature(x, FEATURE)


@triton.jit
def key_columns(
    K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, FULL: tl.constexpr = False
):
    """Load features of keys (features, tokens), 0 for tokens that do not exist."""
    mask = row_mask(present(VALID, i, count, HAS_VALID, FULL)[None, :], d, f)
    x = tl.load(K + i[None, :] * stride + d[:, None], mask=mask, other=0.0 if FEATURE == 0 else -1e30)
    return apply_feature(x, FEATURE)


@triton.jit
def inverse_norm(den):
    """Return 1 / norm, and 0 where the weights of a row have no digits left."""
    enough = den > NORM_FLOOR
    return tl.where(enough, 1.0 / tl.where(enough, den, 1.0), 0.0)


@triton.jit
def output_factor(DEN, i, count, scale, NORMALIZE: tl.constexpr):
    """Return the factor of every output: 1 / norm with NORMALIZE 1, a given one with NORMALIZE 2."""
    den = tl.load(DEN + i, mask=i < count, other=0.0)
    if NORMALIZE == 1:
        den = inverse_norm(den)
    return den * scale


@triton.jit
def norm_grad(DD, DEN, i, count, NORMALIZE: tl.constexpr):
    """Return the gradients of the norms of tokens i: DD holds them, times the norm if outputs are divided by it."""
    dd = tl.load(DD + i, mask=i < count, other=0.0)
    if NORMALIZE == 1:
        dd = dd * output_factor(DEN, i, count, 1.0, NORMALIZE)
    return dd


@triton.jit
def prefix_rows(x, REVERSE: tl.constexpr, TYPE: tl.constexpr):
    """Return the sums of rows of x (tokens, features), float32, up to each token, or from each on with REVERSE.

    Where other products take bfloat16, they are products with a triangle of ones of two parts of x, which have 16 of its digits:
    its first digits, cut off and not rounded, which takes no conversion, and the rest.
    Products of fewer than 64 columns are none: Triton 3.6 lets some of them read behind their shared memory on Hopper cards.
    """
    if tl.float32 == TYPE or x.shape[1] < 64:
        y = tl.cumsum(x, 0, reverse=REVERSE)
    else:
        r = tl.arange(0, x.shape[0])
        ones = tl.where(r[:, None] <= r[None, :] if REVERSE else r[:, None] >= r[None, :], 1.0, 0.0).to(TYPE)
        first = (x.to(tl.int32, bitcast=True) & FIRST_DIGITS).to(tl.float32, bitcast=True)
        y = tl.dot(ones, (x - first).to(TYPE))
        y = tl.dot(ones, first.to(TYPE), y)
    return y


@triton.jit
def log_sigmoid(x):
    """Return the log of sigmoid(x): log(1 + t) is 2 artanh(t / (2 + t)), whose series has all digits of small t."""
    t = exp_of(-tl.abs(x))
    ratio = t / (2.0 + t)
    square = ratio * ratio
    series = square * (1 / 13) + 1 / 11
    series = square * series + 1 / 9
    series = square * series + 1 / 7
    series = square * series + 1 / 5
    series = square * series + 1 / 3
    series = square * series + 1.0
    return tl.minimum(x, 0.0) - 2.0 * ratio * series


@triton.jit
def gate_decay(x, root):
    """Return the log decay of gates x: that of the root of their sigmoid."""
    return tl.maximum(log_sigmoid(x) * (1.0 / root), SMALLEST_LOG)


@triton.jit
def gate_slope(x, root):
    """Return the derivative of the log decay of gates x, 0 where that leaves nothing: there log sigmoid(x) is x."""
    slope = 1.0 / (root + root * exp_of(tl.minimum(x, 80.0)))
    return tl.where(x * (1.0 / root) >= SMALLEST_LOG, slope, 0.0)


# Decays. LEVEL holds the log decay from the start of the segment up to every token: one number (DECAY 1), or one for each feature
# (DECAY 2). A token behind the segment decays nothing: it has the level of the last one.


@triton.jit
def token_levels(LEVEL, i, stride, count):
    """Load the levels of tokens i, one number each."""
    return tl.load(LEVEL + tl.minimum(i, count - 1) * stride)


@triton.jit
def level_rows(LEVEL, i, stride, d, count, f: tl.constexpr):
    """Load the levels of tokens i, (tokens, features)."""
    return token_rows(LEVEL, tl.minimum(i, count - 1), stride, d, count, f, True)


@triton.jit
def level_columns(LEVEL, i, stride, d, count, f: tl.constexpr):
    """Load the levels of tokens i, (features, tokens)."""
    return token_columns(LEVEL, tl.minimum(i, count - 1), stride, d, count, f, True)


@triton.jit
def level_at(LEVEL, at, stride, d, f: tl.constexpr, DECAY: tl.constexpr):
    """Load the level of one token, (f): 0 before the segment, and without a decay."""
    level = tl.zeros_like(d).to(tl.float32)
    if DECAY == 1:
        level += tl.load(LEVEL + at * stride, mask=at >= 0, other=0.0)
    if DECAY == 2:
        level += tl.load(LEVEL + at * stride + d, mask=(d < f) & (at >= 0), other=0.0)
    return level


@triton.jit
def one_level(LEVEL, at, stride):
    """Load the level of one token under a decay of one number, 0 before the segment."""
    return tl.load(LEVEL + at * stride, mask=at >= 0, other=0.0)
