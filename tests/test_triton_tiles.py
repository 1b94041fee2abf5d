"""Triton kernels of tile attention: what the reference defines, in the interpreter on a CPU or as compiled code on a GPU."""

import pytest
import torch

import regard
from conftest import DEVICE
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.call import TileCall
from regard.ops.tile.tile_op import HeadPatterns, heads_by_plan, tile_attention
from regard.ops.tile.triton import TritonTiles, _refused
from regard.ops.triton_support import has_triton
from regard.patterns import Pattern, tile_list
from regard.patterns.plan import plan
from regard.patterns.tile_list import TILE, kernel_items, kernel_plan
from regard.patterns.tiles import Span

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
CASES = [  # pattern, query and key heads, span, causal, what else
    ("Local(9)", 2, 2, Span(0, 100, 0, 100), False, ""),
    ("Local(70)", 2, 1, Span(0, 150, 0, 150), True, "valid alibi dropout"),
    ("Local(30)", 2, 1, Span(40, 70, 21, 89), False, "valid"),
    ("Everything()", 1, 1, Span(0, 3, 50, 20), False, "dropout"),
    ("Local(30) | Global(first=2, at=[33])", 2, 1, Span(0, 130, 0, 130), False, "valid alibi dropout"),
    ("Blocks(8, around=1) | Random(2, 8, past=True) | Global(first=8)", 2, 2, Span(5, 90, 0, 95), True, "valid"),
    ("Random(1, 16, per_head=True) | Columns(last=3)", 2, 1, Span(0, 100, 0, 100), False, "alibi"),
    ("Stride(5) | Local(4)", 2, 1, Span(40, 70, 21, 89), False, "valid alibi dropout"),
    ("Dilated(4, 3) & Causal()", 1, 1, Span(0, 100, 0, 100), True, ""),
    ("PerHead([Local(6), Local(40)]) | Columns(first=1)", 2, 1, Span(0, 100, 0, 100), True, "dropout"),
    ("Edges([[0, 1, 60, 3, 9], [2, 3, 5, 60, 9]], nodes=70) | Local(2)", 1, 1, Span(0, 70, 0, 70), False, ""),
    ("Dilated(6, 4) | Global(first=2) | Local(3)", 2, 1, Span(0, 100, 0, 100), False, "valid alibi dropout"),
    ("Stride(5) | Dilated(9, 2) | Tail(8, 2)", 1, 1, Span(0, 90, 0, 90), True, ""),
    ("PerHead([Local(9), Stride(5)])", 4, 2, Span(0, 80, 0, 80), True, "valid dropout"),
    ("PerHead([Local(9), Stride(5)])", 2, 1, Span(7, 50, 0, 57), False, "alibi dropout"),
    ("PerHead([Stride(5) | Local(3), Stride(7), Blocks(8), Tail(8, 2)])", 4, 4, Span(0, 70, 0, 70), True, ""),
]
CLASSED = [  # the same with numbers by query and distance class, up to a distance
    ("Everything()", 1, 1, Span(0, 110, 0, 110), False, "valid dropout", 9),
    ("Local(100)", 1, 1, Span(40, 60, 21, 79), True, "alibi dropout", 40),
    ("Local(20)", 1, 1, Span(0, 60, 0, 60), False, "", 0),
    ("Local(30) | Global(first=2, at=[33])", 1, 1, Span(0, 100, 0, 100), False, "valid dropout", 5),
    ("PerHead([Local(6), Local(40)]) | Columns(first=1)", 2, 1, Span(0, 70, 0, 70), True, "dropout", 3),
    ("Stride(3) | Local(4)", 2, 1, Span(40, 50, 21, 69), False, "valid dropout", 7),
    ("Dilated(4, 3)", 1, 1, Span(0, 50, 0, 50), False, "", 4),
    ("PerHead([Dilated(4, 3), Local(5)])", 2, 2, Span(0, 50, 0, 50), False, "dropout", 4),
]
TAKEN = [  # patterns that kernels take, causal or not
    "Stride(64)",
    "Dilated(9, 4)",
    "Dilated(9, 4) | Local(16)",
    "Dilated(9, 4) | Dilated(9, 8)",
    "Dilated(9, 4) | Columns(2)",
    "Stride(64) | Local(64) | Global(first=2)",
    "Tail(64, 8)",
    "Blocks(64) | Tail(64, 8)",
    "Random(3, 64)",
    "Random(3, 16)",
    "Neighbourhood(32, 3)",
    "Truncated(64, 4)",
    "Local(64) | Columns(4)",
    "PerHead([Local(64), Stride(64)])",
    "PerHead([Blocks(64), Tail(64, 8)])",
    "PerHead([Stride(64), Dilated(9, 2) | Columns(1)])",
]
SCATTERED = ["Random(3, 1)", "Tail(64, 1)"]


def results(backend, dtype, text, inputs, span, **options):
    """Outputs, log-sum-exp and all gradients, for the same seed."""
    x = [y.detach().to(dtype).requires_grad_() for y in inputs]
    bias = options["bias"]
    if bias is not None and bias.by_query is not None:
        by_query = bias.by_query.detach().to(dtype).requires_grad_()
        options["bias"] = bias._replace(by_query=by_query)
        wanted = [*x, by_query]
    else:
        wanted = x
    torch.manual_seed(3)
    patterns = HeadPatterns.of(Pattern.parse(text), x[0].shape[1])
    out, lse = tile_attention(*x, patterns, span, scale=0.5, backend=backend, **options)
    up = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    loss = (out * up).sum() + (lse * (lse > -1e29)).sin().sum()
    return [out, lse, *torch.autograd.grad(loss, wanted)]


def bias_of(more, h, n, clip):
    """ALiBi, numbers by query and class with the weights of classes, both, or nothing."""
    slopes = torch.tensor([0.5, 0.1], device=DEVICE)[:h] if "alibi" in more else None
    if clip is not None:
        return ScoreBias(slopes, clip, torch.randn(1, h, n, 2 * clip + 1, device=DEVICE).double(), mass=True)
    return None if slopes is None else ScoreBias(slopes)


def compare(text, h, g, span, causal, more, d=6, e=5, clip=None):
    shapes = ((h, span.n, d), (g, span.m, d), (g, span.m, e))
    inputs = [torch.randn(1, *shape, dtype=torch.float64, device=DEVICE).float().double() for shape in shapes]
    options = {
        "causal": causal,
        "valid": torch.rand(1, span.m, device=DEVICE) > 0.2 if "valid" in more else None,
        "bias": bias_of(more, h, span.n, clip),
        "dropout": 0.3 if "dropout" in more else 0.0,
    }
    found = results("triton", torch.float32, text, inputs, span, **options)
    expected = results("reference", torch.float64, text, inputs, span, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("text", "h", "g", "span", "causal", "more"), CASES, ids=[case[0] for case in CASES])
def test_kernels_compute_the_reference(text, h, g, span, causal, more):
    compare(text, h, g, span, causal, more)


@pytest.mark.parametrize(("text", "h", "g", "span", "causal", "more", "clip"), CLASSED, ids=[case[0] for case in CLASSED])
def test_kernels_add_numbers_by_distance_and_return_the_weights_of_classes(text, h, g, span, causal, more, clip):
    compare(text, h, g, span, causal, more, clip=clip)


@pytest.mark.parametrize("keys", [True, False])
def test_numbers_by_distance_and_weights_of_classes_need_not_come_together(keys):
    """As with positions="relative(values=False)"."""
    x = [torch.randn(1, 1, 70, 8, device=DEVICE, dtype=torch.float64) for _ in range(3)]
    by_query = torch.randn(1, 1, 70, 7, device=DEVICE, dtype=torch.float64) if keys else None
    found = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        bias = ScoreBias(clip=3, by_query=None if by_query is None else by_query.to(dtype), mass=not keys)
        found.append(results(backend, dtype, "Local(9)", x, Span(0, 70, 0, 70), bias=bias))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_long_rows_of_tiles_are_cut_and_merged(monkeypatch):
    """As those of global tokens are in long sequences, also where heads that share keys have patterns of their own."""
    monkeypatch.setattr(tile_list, "PIECE", 1)
    regard.clear_caches()
    try:
        span = Span(0, 140, 0, 140)
        compare("Local(8) | Global(first=2)", 2, 1, span, False, "dropout")
        compare("PerHead([Local(6), Local(90)]) | Columns(first=1)", 2, 1, span, False, "")
        compare("Local(8) | Global(first=2)", 1, 1, span, False, "dropout", clip=9)
    finally:
        regard.clear_caches()


@pytest.mark.parametrize(("d", "e"), [(16, 16), (20, 33), (64, 24)])
def test_heads_of_any_size(d, e):
    compare("Local(20)", 1, 1, Span(0, 80, 0, 80), True, "valid", d, e)


def test_rows_without_any_pair_are_zero():
    x = torch.randn(1, 1, 70, 8, device=DEVICE)
    patterns = HeadPatterns.of(Pattern.parse("Local(5)"), 1)
    valid = torch.arange(70, device=DEVICE)[None] < 20
    out, lse = tile_attention(x, x, x, patterns, Span(0, 70, 0, 70), scale=1.0, valid=valid, backend="triton")
    assert (out[:, :, 30:] == 0).all() and (lse[:, :, 30:] == -1e30).all()
    assert (out[:, :, :20] != 0).any(-1).all()


@pytest.mark.parametrize("positions", [None, "relative(clip=4)"])
def test_a_layer_with_kernels_computes_the_same(positions):
    found = []
    options = {"width": 32, "heads": 2, "causal": True, "kv_heads": 1, "positions": positions}
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        layer = regard.layer("longformer(window=12)", **options, backend=backend).to(DEVICE)
        x = torch.randn(2, 90, 32, device=DEVICE, requires_grad=True)
        y = layer(x, valid=torch.arange(90, device=DEVICE) < torch.tensor([[90], [70]], device=DEVICE))
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float16, bfloat16 and float32, not float64"),
        ({"d": 300}, "at most 128 columns of this type, here 300"),
        (
            {"bias": ScoreBias(clip=1 << 28, mass=True)},
            "the 536870913 distance classes of one sequence have more than 2.31 elements",
        ),
    ],
)
def test_what_kernels_do_not_compute_is_refused_with_a_sentence(change, reason):
    options = {"dtype": torch.float32, "d": 8, "bias": None, "text": "Local(3)", **change}
    x = torch.zeros(1, 1, 8, options["d"], dtype=options["dtype"], device=DEVICE)
    patterns = HeadPatterns.of(Pattern.parse(options["text"]), 1)
    with pytest.raises(ValueError, match=reason):
        tile_attention(x, x, x, patterns, Span(0, 8, 0, 8), scale=1.0, bias=options["bias"], backend="triton")


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_take_every_pattern_but_scattered_ones(causal):
    refused = {}
    for text in (*TAKEN, *SCATTERED):
        each = HeadPatterns.of(Pattern.parse(text), 4).each
        refused[text] = _refused(heads_by_plan(each, Span(0, 1024, 0, 1024), causal))
    assert {text for text, why in refused.items() if why} == set(SCATTERED)
    assert all("too scattered" in refused[text] for text in SCATTERED)


def test_heads_of_several_kinds_write_one_result():
    """Slices of one tensor, and no copy of any input: kinds of heads that lie side by side."""
    x = torch.randn(2, 40, 4, 16, device=DEVICE).transpose(1, 2)
    plans = heads_by_plan(HeadPatterns.of(Pattern.parse("PerHead([Local(9), Stride(5)])"), 4).each, Span(0, 40, 0, 40), True)
    run = TritonTiles().prepare(TileCall(x, x, x, None, None, None, 1.0, 0.0), plans)
    assert [own.piece.heads for own in run.passes] == [slice(0, 2), slice(2, 4)]
    assert all(own.direct and own.out_strides == x.stride() for own in run.passes)
    assert all(strides == x.stride() for own in run.passes for _, strides in own.grads)


def test_scattered_pairs_are_refused():
    edges = torch.arange(4096)
    text = f"Edges([{edges.tolist()}, {(edges * 997 % 4096).tolist()}], nodes=4096)"
    made = kernel_plan(plan(Pattern.parse(text), Span(0, 4096, 0, 4096)))
    assert made.refused is not None and "too scattered" in made.refused


def test_a_window_needs_no_list_and_a_list_no_more_than_its_tiles():
    span = Span(0, 4096, 0, 4096)
    window = kernel_plan(plan(Pattern.parse("Local(128)"), span))
    assert window.band == (127, 127) and window.by_query is None and window.size == 0
    both = kernel_plan(plan(Pattern.parse("Local(128) | Global(first=2)"), span))
    assert both.by_query is not None and both.masks is not None
    assert len(both.by_query.entries) == len(both.by_key.entries) <= 2 * 4096 // TILE
    assert len(both.masks) <= 8  # equal masks are stored once
    blocks = kernel_plan(plan(Pattern.parse("Blocks(64, around=1)"), span))
    assert (blocks.by_query.middles == blocks.by_query.offsets[1:]).all()  # all tiles are full


def test_items_cover_every_tile_once():
    span = Span(0, 4096, 0, 4096)
    made = kernel_plan(plan(Pattern.parse("Local(128) | Global(first=2)"), span))
    for by_key in (False, True):
        items = kernel_items((made,), 1, 4096, by_key, torch.device("cpu"))
        tiles = made.by_key if by_key else made.by_query
        covered = torch.cat([torch.arange(first, last) for _, _, first, _, last, *_ in items.items.tolist()])
        assert torch.equal(covered, torch.arange(len(tiles.entries)))
        assert sorted({tile for _, tile, *_ in items.items.tolist()}) == list(range(64))
        assert items.slots == sum(last - first for *_, first, last in items.merges.tolist())


def test_outputs_lie_as_the_queries_do():
    """So that the heads of a token are joined without a copy."""
    x = torch.randn(1, 40, 2, 16, device=DEVICE).transpose(1, 2)
    patterns = HeadPatterns.of(Pattern.parse("Local(4)"), 2)
    out, _ = tile_attention(x, x, x, patterns, Span(0, 40, 0, 40), scale=1.0, backend="triton")
    assert out.transpose(1, 2).is_contiguous()
