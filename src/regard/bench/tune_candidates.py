"""Candidates of `regard tune`: the configurations that are tried for every kernel, as changes of the one in use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

FieldChanges = dict[str, int]
Candidates = dict[str, tuple[FieldChanges, ...]]  # by kernel


def grid(**values: Sequence[int]) -> tuple[FieldChanges, ...]:
    """Return every combination of values of some fields."""
    return tuple(dict(zip(values, each, strict=True)) for each in product(*values.values()))


def tiles(own: str, taken: str, rows: Iterable[tuple[int, int, int, int]]) -> tuple[FieldChanges, ...]:
    """Return tiles: rows that a program owns, rows that it takes at a time, warps, stages. Names of the first two are given."""
    names = (own, taken, "num_warps", "num_stages")
    return tuple(dict(zip(names, row, strict=True)) for row in rows)


_FORWARD = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2),
            (128, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 1))  # fmt: skip
_BACKWARD = ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 8, 2),
             (64, 64, 8, 2), (64, 32, 8, 1), (64, 32, 8, 2))  # fmt: skip
_LISTS = (
    (64, 32, 4, 1),
    (64, 32, 4, 2),
    (64, 32, 4, 3),
    (64, 32, 8, 1),
    (64, 32, 8, 2),
    (64, 64, 4, 2),
)  # of tiles of 64 x 64, half a tile of a list at a time
_SMALL = ((32, 32, 4, 1), (32, 32, 4, 2), (16, 16, 4, 1))

# Windows without padding, bias or dropout: form 1 leaves them to the kernels of all patterns. With 128 registers for a thread,
# four programs of 4 warps fit into a multiprocessor.
_BAND_FORWARD = ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (256, 64, 16, 2))
_BAND_QUERIES = ((64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3))
_BAND_KEYS = ((64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (64, 64, 4, 2))


def _forms(sizes: Iterable[FieldChanges], registers: int) -> tuple[FieldChanges, ...]:
    """Return all sizes of a kernel of windows, and a change that leaves windows to other kernels."""
    return ({"form": 1}, *({"form": 2, **each, "maxnreg": registers} for each in sizes))


TILE_BANDS: Candidates = {
    "band_forward": _forms(tiles("BM", "BN", _BAND_FORWARD), 128),
    "band_query_gradients": _forms(tiles("BM", "BN", _BAND_QUERIES), 128),
    "band_key_gradients": _forms(tiles("BN", "BM", _BAND_KEYS), 168),
    "tile_forward": tiles("BM", "BN", _FORWARD),
    "tile_query_gradients": tiles("BM", "BN", _BACKWARD),
    "tile_key_gradients": tiles("BN", "BM", _BACKWARD),
}
TILE_LISTS: Candidates = {
    "tile_forward": tiles("BM", "BN", _LISTS),
    "tile_query_gradients": tiles("BM", "BN", _LISTS),
    "tile_key_gradients": tiles("BN", "BM", _LISTS),
}

_SEGMENTS = grid(tokens=(128, 256, 512, 1024), smallest=(64,), programs=(128, 256, 512))
_CHUNKS = grid(chunk=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3))
_FEATURE_CHUNKS = grid(chunk=(32, 64), num_warps=(4, 8), num_stages=(1, 2))
_WALKS = grid(num_stages=(1, 2, 3), maxnreg=(128, 168, 255))
_WALKS_OF_GRADS = grid(key_programs=(1, 2), num_stages=(1, 2, 3), maxnreg=(128, 168, 255))
_SCANS = grid(segments=(16, 32, 64), num_warps=(1, 2, 4))
_DECAYS = grid(chunk=(32, 64, 128), num_warps=(2, 4))
LINEAR_CHUNKS: Candidates = {
    "linear_sums": _CHUNKS,
    "linear_scan": _SCANS,
    "linear_walk": _WALKS,
    "linear_walk_grads": _WALKS_OF_GRADS,
    "linear_forward": _CHUNKS,
    "linear_adjoint": _CHUNKS,
    "linear_gradients": _CHUNKS,
    "linear_decay_grads": _DECAYS,
    "linear_segment": _SEGMENTS,
}
LINEAR_FEATURES: Candidates = {
    "linear_sums": _FEATURE_CHUNKS,
    "linear_scan": _SCANS,
    "linear_walk": _WALKS,
    "linear_walk_grads": _WALKS_OF_GRADS,
    "linear_forward": _FEATURE_CHUNKS,
    "linear_adjoint": _FEATURE_CHUNKS,
    "linear_gradients": _FEATURE_CHUNKS,
    "linear_decay_grads": _DECAYS,
    "linear_segment": _SEGMENTS,
}
_FEATURE_TILES = grid(chunk=(64, 128), features=(64, 128), num_warps=(4, 8), num_stages=(1, 2))
EXP_FEATURES: Candidates = {"exp_features": _FEATURE_TILES, "exp_feature_grads": _FEATURE_TILES}
LINEAR_PREFIX: Candidates = {"linear_prefix": grid(tokens=(128, 256, 512), chunk=(16, 32, 64), num_warps=(2, 4, 8))}
_WALKED_CHUNKS = grid(chunk=(64, 128), programs=(264, 528, 1056), num_warps=(4, 8), num_stages=(1, 2, 3))
_SEGMENTS_OF_FEATURES = grid(chunk=(64, 128), features=(64, 128, 256), programs=(132, 264), num_warps=(4, 8), num_stages=(2, 3))
_TILES_OF_FEATURES = grid(chunk=(64, 128), features=(64, 128), num_warps=(4, 8), num_stages=(1, 2, 3))
NONCAUSAL: Candidates = {
    "noncausal_sums": _WALKED_CHUNKS,
    "noncausal_merge": _SCANS,
    "noncausal_read": _WALKED_CHUNKS,
    "noncausal_query_grads": _WALKED_CHUNKS,
    "noncausal_key_grads": _WALKED_CHUNKS,
}
NONCAUSAL_FEATURES: Candidates = {
    "noncausal_exp_sums": _SEGMENTS_OF_FEATURES,
    "noncausal_exp_read": _TILES_OF_FEATURES,
    "noncausal_exp_query_grads": _TILES_OF_FEATURES,
    "noncausal_exp_adjoint": _SEGMENTS_OF_FEATURES,
    "noncausal_exp_key_grads": _TILES_OF_FEATURES,
}
_TILES_OF_EXPONENTS = grid(features=(64, 128), num_warps=(4, 8), num_stages=(1, 2, 3))
CAUSAL_FEATURES: Candidates = {
    "causal_exp": grid(chunk=(64, 128), tiles=(8, 16, 32)),
    "causal_exp_sums": _TILES_OF_EXPONENTS,
    "causal_exp_scan": _SCANS,
    "causal_exp_read": _TILES_OF_EXPONENTS,
    "causal_exp_query_grads": _TILES_OF_EXPONENTS,
    "causal_exp_adjoint": _TILES_OF_EXPONENTS,
    "causal_exp_key_grads": _TILES_OF_EXPONENTS,
}

_VALUE_COLUMNS = grid(BE=(32, 64), num_warps=(2, 4, 8))
DELTA_RULE: Candidates = {
    "delta": grid(chunk=(32, 64)),
    "delta_prepare": grid(num_warps=(2, 4, 8)),
    "delta_walk": (
        *grid(BE=(16, 32, 64), num_warps=(2, 4, 8), num_stages=(1, 2, 3)),
        *grid(direct=(16, 32, 64, 128), programs=(128, 512)),
    ),
    "delta_outputs": _VALUE_COLUMNS,
    "delta_state_grads": _VALUE_COLUMNS,
    "delta_value_grads": _VALUE_COLUMNS,
    "delta_query_grads": _VALUE_COLUMNS,
    "delta_key_grads": _VALUE_COLUMNS,
}
UNIT_FEATURES: Candidates = {"unit_features": grid(BN=(16, 32, 64, 128), num_warps=(2, 4, 8))}

_REGISTERS = grid(maxnreg=(96, 128, 168, 255))
BUCKETS: Candidates = {
    "bucket_forward": (*tiles("BM", "BN", (*_FORWARD, *_SMALL)), *_REGISTERS),
    "bucket_query_grads": (*tiles("BM", "BN", (*_BACKWARD, *_SMALL)), *_REGISTERS),
    "bucket_key_grads": (*tiles("BN", "BM", (*_BACKWARD, *_SMALL)), *_REGISTERS),
}

_LONG = ((128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3))  # of sequences without a window
PAIRS: Candidates = {
    "pair_forward": tiles("BM", "BN", (*_FORWARD, *_LONG)),
    "pair_query_grads": tiles("BM", "BN", (*_BACKWARD, *_LONG)),
    "pair_key_grads": tiles("BN", "BM", (*_BACKWARD, *_LONG)),
    "pair_table_grads": tiles("BM", "BN", (*_BACKWARD, *_LONG)),
}
_LANES = ((128, 16, 4, 1), (128, 32, 4, 1), (128, 64, 4, 1), (256, 16, 8, 1), (256, 32, 8, 1), (64, 32, 2, 1), (64, 64, 2, 1))
ADDITIVE: Candidates = {  # own tokens along the lanes: 32 for every warp
    "additive_forward": tiles("BM", "BN", _LANES),
    "additive_query_grads": tiles("BM", "BN", _LANES),
    "additive_key_grads": tiles("BN", "BM", _LANES),
}

WINDOW_STEP: Candidates = {"window_step": grid(BM=(32, 64, 128, 256, 512), num_warps=(4, 8, 16))}
LINEAR_STEP: Candidates = {"linear_step": grid(BE=(16, 32, 64), num_warps=(1, 2, 4, 8))}
DELTA_STEP: Candidates = {"delta_step": grid(BE=(16, 32, 64), num_warps=(1, 2, 4, 8))}
ROW_LINEAR: Candidates = {"row_linear": grid(BR=(1, 2, 4), BO=(4, 8, 16), BK=(128, 256, 512), num_warps=(2, 4, 8))}

_QUERIES = grid(BM=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3))
_KEYS = grid(BN=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3))
_TOKENS = grid(BT=(16, 32, 64, 128), num_warps=(1, 2, 4, 8))
_MATRICES = grid(num_warps=(4, 8, 16))
FEW_KEYS: Candidates = {"few_keys_forward": grid(BM=(32, 64, 128), num_warps=(2, 4, 8)), "few_keys_backward": _QUERIES}
LANDMARKS: Candidates = {
    "segment_means": _TOKENS,
    "many_keys_forward": _KEYS,
    "many_keys_merge": grid(BM=(16, 32, 64), num_warps=(1, 2, 4, 8)),
    "landmark_inverse": _MATRICES,
    "landmark_gradients": _MATRICES,
    "many_keys_backward": _KEYS,
    "add_mean_gradients": _TOKENS,
}
RIDGE: Candidates = {"landmark_inverse": _MATRICES, "landmark_gradients": _MATRICES}

_BLOCKS = (
    *grid(num_warps=(2, 4, 8)),
    *grid(num_warps=(4,), maxnreg=(96, 128, 168)),
    *grid(num_warps=(8,), maxnreg=(64, 96, 128)),
)
_SCORES = grid(BC=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2))
_PARTS = grid(elements=(2048, 4096, 8192), parts=(8, 16, 32), num_warps=(4, 8, 16))
TWO_BLOCKS: Candidates = {"two_blocks_forward": _BLOCKS, "two_blocks_backward": _BLOCKS}
BLOCK_SCORES: Candidates = {"block_scores": _SCORES, "block_score_grads": _SCORES}
BALANCE: Candidates = {"balance_parts": _PARTS, "balance_part_grads": _PARTS}
