"""What kernels of several operations share: constants of base 2 and the hash of dropout."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GOLDEN_MULTIPLIER = tl.constexpr(0x9E3779B9 - 2**32)  # as in `regard.ops.dropout_hash`
SQRT2_MULTIPLIER = tl.constexpr(0x6A09E667)


@triton.jit
def hash_keeps(query_keys, key_keys, threshold):
    """Return which pairs dropout keeps, from the keys of queries and keys, which broadcast: as `dropout_hash.kept_pairs`."""
    x = (query_keys ^ key_keys) * GOLDEN_MULTIPLIER
    x = (x ^ ((x >> 15) & 0x1FFFF)) * SQRT2_MULTIPLIER
    return x >= threshold
