"""Kernels of plain windows: every form that a configuration may choose computes the reference, outputs and gradients."""

import pytest
import torch

from conftest import DEVICE
from regard.ops.tile.tile_op import HeadPatterns, tile_attention
from regard.ops.triton_support import has_triton, trial_configs
from regard.patterns import Pattern
from regard.patterns.tiles import Span
from test_triton_tiles import compare

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
FORMS = [  # of the forward kernel, of both gradients, rows that a program owns and takes at a time
    (2, 2, 2, 32, 16),
    (3, 3, 3, 32, 16),
    (4, 2, 4, 16, 16),
    (4, 3, 4, 16, 32),
    (4, 3, 4, 32, 16),
]
WINDOWS = [  # pattern, query and key heads, span, causal
    ("Local(24)", 2, 1, Span(0, 150, 0, 150), False),  # W = N + 1
    ("Local(48)", 1, 1, Span(0, 130, 0, 130), True),  # W = N
    ("Local(21)", 1, 1, Span(40, 70, 21, 89), False),  # W > N + 1, queries and keys at places of their own
    ("Local(40)", 1, 1, Span(0, 90, 60, 140), False),  # queries without keys
    ("Local(32)", 2, 1, Span(0, 160, 0, 160), False),  # tiles of queries at multiples of their size
    ("Local(64)", 1, 1, Span(0, 160, 0, 160), True),
    ("Local(60)", 1, 1, Span(0, 149, 0, 149), False),  # the window reaches over both ends
]
KERNELS = "band_forward", "band_query_gradients", "band_key_gradients"


def chosen(*settings):
    """Configurations of the three kernels, for all keys."""
    *forms, own, taken = settings
    sizes = {"BM": own, "BN": taken}, {"BM": own, "BN": taken}, {"BM": taken, "BN": own}
    made = [{"form": x, **y} for x, y in zip(forms, sizes, strict=True)]
    keys = [f"{kind} {width}" for kind in ("half", "float") for width in (16, 32, 64)]
    return {(kernel, key): config for kernel, config in zip(KERNELS, made, strict=True) for key in keys}


@pytest.mark.parametrize("window", WINDOWS, ids=[f"{x[0]} {tuple(x[3])}" for x in WINDOWS])
@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_every_form_computes_the_reference(forms, window):
    with trial_configs(chosen(*forms)) as trial:
        compare(*window, "")
    assert {kernel for kernel, _ in trial.used} >= set(KERNELS)
    assert not {kernel for kernel, _ in trial.used} & {"tile_forward", "tile_query_gradients", "tile_key_gradients"}


@pytest.mark.parametrize(
    ("text", "more"),
    [("Local(24)", "valid"), ("Local(24)", "alibi dropout"), ("Local(9) | Global(first=1)", ""), ("Local(5)", "")],
)
def test_what_the_kernels_of_windows_do_not_take_is_computed_by_the_others(text, more):
    with trial_configs(chosen(4, 3, 4, 32, 16)) as trial:
        compare(text, 2, 1, Span(0, 80, 0, 80), False, more)
    assert {kernel for kernel, _ in trial.used} >= {"tile_forward", "tile_query_gradients", "tile_key_gradients"}


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_rows_without_keys_are_zero(forms):
    x, y = torch.randn(1, 1, 40, 8, device=DEVICE), torch.randn(1, 1, 60, 8, device=DEVICE)
    patterns = HeadPatterns.of(Pattern.parse("Local(20)"), 1)
    with trial_configs(chosen(*forms)):
        out, lse = tile_attention(x, y, y, patterns, Span(0, 40, 50, 60), scale=1.0, backend="triton")
    assert (out[:, :, :31] == 0).all() and (lse[:, :, :31] == -1e30).all()
    assert (out[:, :, 31:] != 0).any(-1).all()


def test_a_form_that_does_not_exist_is_refused_with_a_sentence():
    x = torch.randn(1, 1, 80, 8, device=DEVICE)
    patterns = HeadPatterns.of(Pattern.parse("Local(40)"), 1)
    sentence = "band_forward has the forms 1, 2, 3, 4, not 9: change its configuration"
    with trial_configs(chosen(9, 2, 2, 32, 16)), pytest.raises(ValueError, match=sentence):
        tile_attention(x, x, x, patterns, Span(0, 80, 0, 80), scale=1.0, backend="triton")
