"""Lists of tiles for kernels: slow definitions, tile by tile, of what whole tensors compute, and what planning may cost."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st

import regard
from pattern_strategies import graphs, head_patterns
from regard.ops.tile.tile_op import HeadPatterns, heads_by_plan
from regard.patterns import Band, Blocks, Causal, Global, Pattern, Random, tile_list, tile_masks
from regard.patterns.plan import plan
from regard.patterns.tile_list import NO_BAND, TILE, kernel_items, kernel_plan
from regard.patterns.tiles import Span

BIGBIRD = "Blocks({0}, around=1) | Random(3, {0}, per_head=True{1}) | Global(first=2)"
bands = st.builds(Band, st.none() | st.integers(0, 200), st.none() | st.integers(0, 200), st.integers(1, 4))
drawn = st.builds(Random, st.integers(1, 3), st.sampled_from([5, 16, 60, 64, 100, 128]), st.integers(0, 5), past=st.booleans())


def bigbird(block, causal):
    """The pattern of the mechanism, with two global tokens: tiles of all kinds."""
    return Pattern.parse(BIGBIRD.format(block, ", past=True" if causal else ""))


def pairs_of_tile(listed, taken, row, col, span):
    """Which pairs of a tile are in a list, (64 64): the definition."""
    x, y = row * TILE + torch.arange(TILE)[:, None], col * TILE + torch.arange(TILE)
    i, j = x + span.t, y + span.u
    seen = torch.zeros(TILE, TILE, dtype=torch.bool)
    for atoms in listed:
        seen |= torch.stack([atom(0, i, j) for atom in atoms]).all(0)
    for band in taken:
        seen &= ~band(0, i, j)
    return seen & (x < span.n) & (y < span.m)


def unpacked(words):
    """Bits of words as truth values: (... 64) int64 -> (... 64 64)."""
    return (words[..., None] >> torch.arange(TILE)) & 1 == 1


SPANS = [Span(0, 320, 0, 320), Span(0, 300, 0, 300), Span(70, 250, 0, 320), Span(5, 200, 64, 333), Span(0, 9, 0, 500)]
GRID = "Neighbourhood(16, 4, first=70) | Columns(first=2, at=[100, 101, 230])"


@given(
    head_patterns | st.tuples(drawn, head_patterns).map(lambda p: p[0] | p[1]),
    st.lists(bands, max_size=2),
    st.sampled_from(SPANS),
)
@example(Blocks(64, 1) | Random(2, 64) | Global(first=70), [], SPANS[1])
@example((Blocks(48, 1) | Random(2, 100)) & Causal(), [Band(9, 0, 1)], SPANS[2])
@example(Pattern.parse(GRID), [], SPANS[0])
@example(Pattern.parse("Neighbourhood(16, 4, first=70)"), [], SPANS[0])
@example(Pattern.parse("Truncated(79, 70)"), [], SPANS[0])
@example(Pattern.parse("Everything()"), [], SPANS[1])
@example(Pattern.parse("Neighbourhood(40, 0, 3) | Rows(first=1)"), [], SPANS[3])
@example(Pattern.parse("Neighbourhood(50, 1, 30)"), [Band(None, 5, 3)], SPANS[1])
@example(Pattern.parse("Stride(5) | Dilated(20, 7) | Tail(48, 3)"), [], SPANS[1])
@budget(max_examples=60)
def test_tiles_of_one_kind_hold_the_same_pairs(p, taken, span):
    """In any tiles, also those that no plan lists, at any positions."""
    listed = list(p.for_head(0, 1).bound(span.t + span.n, span.u + span.m).alternatives())
    numbers = [torch.arange(-(-length // TILE)) for length in (span.n, span.m)]
    rows, cols = torch.cartesian_prod(*numbers).unbind(1)
    found = tile_masks.tile_masks(listed, taken, rows, cols, span)
    tiles = zip(rows.tolist(), cols.tolist(), strict=True)
    expected = torch.stack([pairs_of_tile(listed, taken, row, col, span) for row, col in tiles])
    assert torch.equal(unpacked(found.bits)[found.kinds], expected)
    assert torch.equal(found.full[found.kinds], expected.flatten(1).all(1))
    assert torch.equal(found.some[found.kinds], expected.flatten(1).any(1))


def test_kinds_are_the_same_where_their_numbers_do_not_fit_into_64_bits(monkeypatch):
    listed = list((Random(2, 60) | Global(first=70, at=[200])).bound(300, 300).alternatives())
    rows, cols = torch.cartesian_prod(torch.arange(5), torch.arange(5)).unbind(1)
    expected = tile_masks.tile_masks(listed, [], rows, cols, SPANS[1])
    for limit in (1, 30):
        monkeypatch.setattr(tile_masks, "LARGEST_CODE", limit)
        found = tile_masks.tile_masks(listed, [], rows, cols, SPANS[1])
        assert torch.equal(found.kinds, expected.kinds) and torch.equal(found.bits, expected.bits)


@given(graphs(nodes=150))
@budget(max_examples=10)
def test_tiles_of_a_graph_are_tested_one_by_one(p):
    rows, cols = torch.cartesian_prod(torch.arange(3), torch.arange(3)).unbind(1)
    found = tile_masks.tile_masks([(p,)], [], rows, cols, Span(0, 150, 0, 150))
    i = torch.arange(3 * TILE)
    expected = p(0, i[:, None], i).unflatten(0, (3, TILE)).unflatten(2, (3, TILE)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(unpacked(found.bits)[found.kinds], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("block", "span"),
    [
        (64, Span(0, 64, 0, 64)),
        (64, Span(0, 1000, 0, 1000)),
        (64, Span(0, 2304, 0, 2304)),
        (64, Span(500, 300, 0, 800)),
        (16, Span(0, 700, 0, 700)),
        (7, Span(0, 400, 0, 400)),
        (100, Span(0, 1500, 0, 1500)),
        (128, Span(0, 1024, 0, 1024)),
    ],
)
def test_lists_of_random_blocks_are_the_definition(block, span, causal):
    """Every tile that holds a pair, full ones first; masks in order, each once; the same by key."""
    p = bigbird(block, causal).for_head(1, 2).bound(span.n, span.m)
    p = p & Causal() if causal else p
    made = kernel_plan(plan(p, span))
    assert made.band is None and not made.strided and not made.refused
    by_query, by_key, masks = {}, {}, set()
    for row in range(-(-span.n // TILE)):
        for col in range(-(-span.m // TILE)):
            seen = pairs_of_tile(p.alternatives(), [], row, col, span)
            bits = tuple(torch.where(seen, torch.ones(TILE, dtype=torch.long) << torch.arange(TILE), 0).sum(1).tolist())
            if any(bits):
                masks.add(bits)
                by_query.setdefault(row, []).append((not seen.all(), col, bits))
                by_key.setdefault(col, []).append((not seen.all(), row, bits))
    numbers = {bits: number for number, bits in enumerate(sorted(masks))}
    low, high = made.masks.long().unbind(1)
    assert torch.equal((low & 0xFFFFFFFF) | high << 32, torch.tensor(sorted(masks)))
    for tiles, expected in ((made.by_query, by_query), (made.by_key, by_key)):
        rows = [sorted(expected.get(row, [])) for row in range(len(tiles.offsets) - 1)]
        assert tiles.offsets.tolist() == [0, *np.cumsum([len(row) for row in rows])]
        assert tiles.middles.tolist() == [
            start + sum(not partial for partial, *_ in row) for start, row in zip(tiles.offsets.tolist(), rows, strict=False)
        ]
        entries = [[tile, numbers[bits] if partial else 0] for row in rows for partial, tile, bits in row]
        assert tiles.entries.tolist() == entries


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(("count", "rows", "seed"), [(1, 5, 0), (3, 40, 7), (9, 6, 2), (3, 1000, 1_000_003)])
def test_blocks_are_drawn_one_after_another_from_those_left(count, rows, seed, past):
    p = Random(count, 4, seed, past=past).bound(rows * 4, rows * 4)
    picks = np.random.Generator(np.random.PCG64(seed)).random((rows, count))
    expected = []
    for row in range(rows):
        left = list(range(row + 1 if past else rows))
        expected.append([left.pop(math.floor(pick * len(left))) if left else -1 for pick in picks[row].tolist()])
    assert p.table(rows).tolist() == expected


def test_draws_do_not_change():
    """A model that was trained with these blocks is loaded with the same ones."""
    first = Pattern.parse("Random(3, 64, per_head=True, past=True)").for_head(2, 8)
    assert first.table(200)[-3:].tolist() == [[82, 12, 5], [66, 197, 144], [85, 39, 24]]
    whole = Random(3, 64, seed=5).bound(12_800, 12_800)
    assert whole.table(200)[:3].tolist() == [[161, 160, 102], [57, 10, 77], [81, 9, 10]]


def cut_row(first, middle, last, piece):
    """Pieces of a long row of tiles, full tiles first."""
    if last - first <= 2 * piece:
        return [(first, middle, last)]
    ends = [(low, min(low + piece, last)) for low in range(first, last, piece)]
    return [(low, min(max(middle, low), high), high) for low, high in ends]


def items_one_by_one(plans, share, length, by_key):
    """Items and merges, as lists: the definition of `kernel_items`."""
    listed = [p.by_key if by_key else p.by_query for p in plans]
    starts = np.cumsum([0, *(0 if x is None else len(x.entries) for x in listed)]).tolist()
    together = share if by_key and len(plans) > 1 else 1
    items, merges, slots = [], [], 0
    for owner in range(len(plans) // together):
        for tile in range(-(-length // TILE)):
            pieces = []
            for head in range(owner * together, (owner + 1) * together):
                tiles, reach = listed[head], plans[head].band or NO_BAND
                ends = (0, 0, 0) if tiles is None else (tiles.offsets[tile], tiles.middles[tile], tiles.offsets[tile + 1])
                for piece in cut_row(*(int(x) + starts[head] for x in ends), tile_list.PIECE):
                    pieces.append([head, tile, *piece, -1, *reach])
                    reach = NO_BAND
            if len(pieces) > 1:
                merges.append([owner, tile, slots, slots + len(pieces)])
                pieces = [[*piece[:5], slots + number, *piece[6:]] for number, piece in enumerate(pieces)]
                slots += len(pieces)
            items += pieces
    return items, merges, slots


@pytest.mark.parametrize("piece", [1, 3, 16])
@pytest.mark.parametrize(
    "text",
    [
        "Local(20) | Global(first=2)",
        BIGBIRD.format(64, ""),
        BIGBIRD.format(16, ", past=True"),
        "PerHead([Local(9), Local(40) | Global(first=1), Blocks(64), Everything()])",
    ],
)
def test_items_are_the_definition(text, piece, monkeypatch):
    monkeypatch.setattr(tile_list, "PIECE", piece)
    span = Span(0, 1000, 0, 1000)
    of_head = {
        h: kernel_plan(own.plan)
        for own in heads_by_plan(HeadPatterns.of(Pattern.parse(text), 4).each, span, False)
        for h in own.heads
    }
    for plans in ((of_head[1],), tuple(of_head[h] for h in range(4))):
        for share, by_key in ((1, False), (1, True), (2, False), (2, True), (4, True)):
            found = kernel_items(plans, share, 1000, by_key, torch.device("cpu"))
            assert (found.items.tolist(), found.merges.tolist(), found.slots) == items_one_by_one(plans, share, 1000, by_key)
            assert found.items.dtype == found.merges.dtype == torch.int32


@pytest.mark.parametrize("causal", [False, True])
def test_planning_tests_few_tiles_and_takes_no_call_for_each_row(causal, monkeypatch):
    """Counted, not timed: a step for every block of queries, or a test of every pair, would show in these numbers."""
    tested, calls = [], []
    plain = tile_masks._tested
    monkeypatch.setattr(tile_masks, "_tested", lambda a, b, rows, *rest: tested.append(len(rows)) or plain(a, b, rows, *rest))
    pattern = regard.core("bigbird", regard.Dims(width=16, heads=2, causal=causal)).pattern
    for n in (1 << 12, 1 << 14, 1 << 18):
        regard.clear_caches()
        calls.append(0)

        def count(_frame, event, _arg):
            calls[-1] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            plans = [kernel_plan(own.plan) for own in heads_by_plan(HeadPatterns.of(pattern, 2).each, Span(0, n, 0, n), causal)]
            for by_key in (False, True):
                kernel_items(tuple(plans), 1, n, by_key, torch.device("cpu"))
        finally:
            sys.setprofile(before)
    assert max(tested) < 64
    assert calls[2] < 2.5 * calls[1]  # 16 times as many tokens; global rows take some calls for every 8,192
