"""Kernels of windows, alone and with leading global tokens, compute the reference, outputs and gradients."""

import pytest
import torch

from conftest import DEVICE
from regard.ops.tile import band_launch
from regard.ops.tile.tile_op import HeadPatterns, tile_attention
from regard.ops.triton_support import has_triton, trial_configs
from regard.patterns import Causal, Pattern
from regard.patterns.plan import plan
from regard.patterns.tile_list import LedBand, kernel_plan
from regard.patterns.tiles import Span
from test_triton_tiles import compare

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
SIZES = [(32, 16), (16, 16), (16, 32)]  # rows that a program owns and takes at a time
WINDOWS = [  # pattern, query and key heads, span, causal
    ("Local(24)", 2, 1, Span(0, 150, 0, 150), False),  # N + 1 is a multiple of a tile
    ("Local(48)", 1, 1, Span(0, 130, 0, 130), True),  # N is
    ("Local(33)", 1, 1, Span(0, 130, 0, 130), False),  # N - 1 is
    ("Local(21)", 1, 1, Span(40, 70, 21, 89), False),  # none is, queries and keys at places of their own
    ("Local(40)", 1, 1, Span(0, 90, 60, 140), False),  # queries without keys
    ("Local(32)", 2, 1, Span(0, 160, 0, 160), False),  # tiles of queries at multiples of their size
    ("Local(64)", 1, 1, Span(0, 160, 0, 160), True),
    ("Local(60)", 1, 1, Span(0, 149, 0, 149), False),  # the window reaches over both ends
]
LED = [
    ("Local(24) | Global(first=2)", 4, 2, Span(0, 150, 0, 150), False),
    ("Local(24) | Global(first=2)", 1, 1, Span(0, 150, 0, 150), True),
    ("Local(32) | Global(first=1)", 2, 1, Span(0, 160, 0, 160), False),  # tiles of queries at multiples of their size
    ("Local(33) | Global(first=1)", 1, 1, Span(0, 160, 0, 160), False),
    ("Local(17) | Global(first=16)", 1, 1, Span(0, 97, 0, 97), False),
    ("Local(20) | Global(first=16)", 1, 1, Span(0, 97, 0, 97), True),
    ("Local(20) | Columns(first=3)", 2, 1, Span(0, 97, 0, 97), False),
    ("Local(20) | Columns(first=13)", 2, 1, Span(0, 97, 0, 97), True),
    ("Local(20) | Rows(first=3)", 2, 1, Span(0, 97, 0, 97), False),
    ("Local(20) | Rows(first=3) | Columns(first=5)", 1, 1, Span(0, 64, 0, 64), False),
    ("Local(20) | Rows(first=9) | Columns(first=2)", 1, 1, Span(0, 64, 0, 64), True),
    ("Truncated(30, 4) | Global(first=7)", 1, 1, Span(0, 97, 0, 97), False),
    ("Local(20) | Columns(first=4)", 1, 1, Span(40, 60, 0, 100), True),  # later queries of a stream
    ("Local(20) | Global(first=2)", 1, 1, Span(1, 80, 0, 100), False),
]
LEFT = [  # what the kernels of windows do not take
    ("Local(24)", False, "valid"),
    ("Local(24) | Global(first=1)", False, "valid"),
    ("Local(24)", False, "alibi dropout"),
    ("Local(5) | Global(first=1)", False, ""),  # narrower than a tile
    ("Local(24) | Global(first=1, at=[7])", False, ""),
    ("Local(24) | Global(last=1)", False, ""),
    ("Local(24) | Global(first=2) | Stride(5)", False, ""),
    ("Local(24) | Global(first=33)", False, ""),  # more than a tile
    ("Local(24) | Columns(first=26)", False, ""),  # query 0 sees a column behind its window
    ("Local(24) | Rows(first=26)", False, ""),  # key 0 has a global query behind its window
    ("Local(5)", False, ""),
]
WHOLE = Span(0, 300, 0, 300)
KERNELS = "band_forward", "band_query_gradients", "band_key_gradients"
OTHERS = "tile_forward", "tile_query_gradients", "tile_key_gradients"


def chosen(own, taken, form=2):
    """Configurations of the three kernels, for all keys."""
    sizes = {"BM": own, "BN": taken}, {"BM": own, "BN": taken}, {"BM": taken, "BN": own}
    keys = [f"{kind} {width}" for kind in ("half", "float") for width in (16, 32, 64)]
    return {(kernel, key): {"form": form, **size} for kernel, size in zip(KERNELS, sizes, strict=True) for key in keys}


@pytest.fixture
def short_pieces(monkeypatch):
    """Global tokens meet the others in several pieces, and not all pieces are merged at once."""
    monkeypatch.setattr(band_launch, "ROOM", 32)
    monkeypatch.setattr(band_launch, "MERGED_PIECES", 2)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("window", [*WINDOWS, *LED], ids=[f"{x[0]} {tuple(x[3])}" for x in (*WINDOWS, *LED)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_of_windows_compute_the_reference(sizes, window):
    with trial_configs(chosen(*sizes)) as trial:
        compare(*window, "")
    used = {kernel for kernel, _ in trial.used}
    assert used >= set(KERNELS)
    assert not used & set(OTHERS)


@pytest.mark.parametrize(("text", "causal", "more"), LEFT)
def test_what_the_kernels_of_windows_do_not_take_is_computed_by_the_others(text, causal, more):
    with trial_configs(chosen(32, 16)) as trial:
        compare(text, 2, 1, Span(0, 80, 0, 80), causal, more)
    assert {kernel for kernel, _ in trial.used} >= set(OTHERS)


def test_leading_global_tokens_are_found_in_a_plan():
    def led(text, span=WHOLE, causal=False):
        pattern = Pattern.parse(text).bound(span.n, span.m)
        return kernel_plan(plan(pattern & Causal() if causal else pattern, span)).led

    assert led("Local(32) | Global(first=2)") == LedBand(31, 31, 2, 2, 600)
    assert led("Local(32) | Global(first=2)", causal=True) == LedBand(31, 0, 2, 0, 0)
    assert led("Local(32) | Columns(at=[0, 1])") == LedBand(31, 31, 2, 0, 600)
    assert led("Local(32) | Columns(first=9)", Span(200, 100, 4, 296), True) == LedBand(31, 0, 5, 0, 0)
    for text in ("Local(32) | Columns(at=[1])", "Local(32) | Random(1, 16)", "Local(32) | (Global(first=2) & Local(64))"):
        assert led(text) is None


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_without_keys_are_zero(sizes):
    x, y = torch.randn(1, 1, 40, 8, device=DEVICE), torch.randn(1, 1, 60, 8, device=DEVICE)
    patterns = HeadPatterns.of(Pattern.parse("Local(20)"), 1)
    with trial_configs(chosen(*sizes)):
        out, lse = tile_attention(x, y, y, patterns, Span(0, 40, 50, 60), scale=1.0, backend="triton")
    assert (out[:, :, :31] == 0).all() and (lse[:, :, :31] == -1e30).all()
    assert (out[:, :, 31:] != 0).any(-1).all()


def test_a_form_that_does_not_exist_is_refused_with_a_sentence():
    x = torch.randn(1, 1, 80, 8, device=DEVICE)
    patterns = HeadPatterns.of(Pattern.parse("Local(40)"), 1)
    sentence = "band_forward has the forms 1, 2, not 9: change its configuration"
    with trial_configs(chosen(32, 16, 9)), pytest.raises(ValueError, match=sentence):
        tile_attention(x, x, x, patterns, Span(0, 80, 0, 80), scale=1.0, backend="triton")
