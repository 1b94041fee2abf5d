"""Patterns: what they mean, and that plans, counts and forgetting say the same as the plain predicate."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from pattern_strategies import atoms, graphs, head_patterns, patterns
from regard import Dims, attend, core, layer
from regard.ops.tile import buffers
from regard.ops.tile.tile_op import HeadPatterns
from regard.ops.tile.tile_op import tile_attention as tiled_by_reach
from regard.patterns import (
    PATTERNS,
    Blocks,
    Causal,
    Columns,
    Dilated,
    Edges,
    Global,
    Local,
    Pattern,
    PerHead,
    Random,
    Stride,
    Tail,
    Truncated,
)
from regard.patterns.density import cells, count_pairs, several_windows
from regard.patterns.plan import plan
from regard.patterns.tiles import Span


def tiled(q, k, v, pattern, span, **options):
    return tiled_by_reach(q, k, v, HeadPatterns.of(pattern, q.shape[1]), span, **options)


def dense(pattern, n, m=None, h=0, t=0):
    i, j = torch.arange(t, t + n)[:, None], torch.arange(n if m is None else m)
    return pattern(h, i, j).expand(n, len(j))


def test_what_each_pattern_means():
    def pairs(p, n=9):
        return {(i, j) for i, j in dense(p.bound(n, n), n).nonzero().tolist()}

    def such(rule, n=9):
        return {(i, j) for i in range(n) for j in range(n) if rule(i, j)}

    assert pairs(Local(3)) == such(lambda i, j: abs(i - j) < 3)
    assert pairs(Truncated(2, 1)) == such(lambda i, j: -1 <= i - j <= 2)
    assert pairs(Dilated(2, 3)) == such(lambda i, j: i - j in (-3, 0, 3))
    assert pairs(Stride(4)) == such(lambda i, j: (i - j) % 4 == 0)
    assert pairs(Blocks(4)) == such(lambda i, j: i // 4 == j // 4)
    assert pairs(Blocks(2, around=1)) == such(lambda i, j: abs(i // 2 - j // 2) <= 1)
    assert pairs(Global(first=1, at=[5])) == such(lambda i, j: i in (0, 5) or j in (0, 5))
    assert pairs(Global(first=1, last=2)) == such(lambda i, j: min(i, j) < 1 or max(i, j) > 6)
    assert pairs(Columns(first=2)) == such(lambda i, j: j < 2)  # noqa: ARG005
    assert pairs(Tail(4, 1)) == such(lambda i, j: j % 4 == 3)  # noqa: ARG005
    assert pairs(Edges([[1, 2], [0, 0]], nodes=9)) == {(0, 1), (0, 2)}
    assert pairs(Edges([[1], [0]], nodes=9, loops=True)) == {(0, 1)} | {(i, i) for i in range(9)}
    assert pairs(Local(2) & Causal()) == such(lambda i, j: 0 <= i - j < 2)
    assert pairs(Local(2) | Stride(5)) == such(lambda i, j: abs(i - j) < 2 or (i - j) % 5 == 0)
    assert (dense(Local(4) & Causal(), 20).sum(1)[3:] == 4).all()  # a causal query sees exactly `size` keys


def test_random_draws_distinct_blocks_once_per_seed_and_length():
    table = Random(3, 4, seed=7).bound(40, 40).table(10)
    assert all(len(set(row)) == 3 and set(row) <= set(range(10)) for row in table.tolist())
    assert torch.equal(table, Random(3, 4, seed=7).bound(40, 40).table(10))
    assert not torch.equal(table, Random(3, 4, seed=8).bound(40, 40).table(10))
    past = Random(3, 4, past=True)
    assert torch.equal(past.table(50)[:20], past.table(20))  # a longer sequence has the same past
    assert all(max(row) <= r and len(set(row) - {-1}) == min(3, r + 1) for r, row in enumerate(past.table(50).tolist()))
    heads = [Random(2, 4, per_head=True).for_head(h, 4) for h in range(4)]
    assert len(set(heads)) == 4
    share = torch.bincount(Random(2, 1).bound(400, 400).table(400).flatten(), minlength=400).float()
    assert abs(share.mean() - 2) < 1e-6 and share.max() < 12  # no favourite block
    with pytest.raises(ValueError, match="for a length"):
        dense(Random(1, 4), 8)


@given(patterns)
@budget(max_examples=150)
def test_text_and_value_are_the_same_thing(p):
    again = Pattern.parse(str(p))
    assert again == p and hash(again) == hash(p) and str(again) == str(p)


@given(graphs())
@budget(max_examples=20)
def test_graphs_print_and_parse(p):
    assert Pattern.parse(str(p)) == p and hash(Pattern.parse(str(p))) == hash(p)


@given(head_patterns, head_patterns)
@budget(max_examples=60)
def test_the_algebra_is_that_of_sets(a, b):
    a, b = (p.for_head(0, 1).bound(30, 30) for p in (a, b))
    x, y = dense(a, 30), dense(b, 30)
    assert torch.equal(dense(a | b, 30), x | y) and torch.equal(dense(a & b, 30), x & y)
    assert a | a == a and a & a == a and (a | b) | b == a | b


@given(patterns, st.integers(1, 2), st.integers(0, 60), st.integers(1, 60))
@budget(max_examples=100)
def test_nothing_that_can_still_be_seen_is_forgotten(p, share, now, further):
    heads = 2 * share
    j = torch.arange(now)
    alive = p.alive(j, torch.tensor(now))
    for h in range(heads):
        own = p.for_head(h, heads).bound(now + further, now + further)
        later = own(h, torch.arange(now, now + further)[:, None], j).expand(further, now)
        assert (alive | ~later.any(0)).all()


@pytest.mark.parametrize(
    "p", [Local(5), Truncated(4, 1), Dilated(3, 2), Blocks(8), Columns(first=2), Tail(8, 2), Blocks(4, around=1)]
)
def test_what_can_no_longer_be_seen_is_forgotten(p):
    for now in (16, 37):
        j = torch.arange(now)
        seen = p(0, torch.arange(now, now + 200)[:, None], j).any(0)
        assert p.alive(j, torch.tensor(now)).sum() <= seen.sum() + (1 if isinstance(p, Dilated) else 0) * 5
        assert torch.equal(p.alive(j, torch.tensor(now)), seen) or isinstance(p, Dilated)


def attention(q, k, v, seen):
    """The definition: softmax over the pairs that are seen, 0 where there are none."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -1e30)
    return (s.softmax(-1) * seen) @ v


@given(head_patterns, st.integers(1, 200), st.integers(0, 90), st.booleans(), st.integers(0, 3))
@example(Stride(7), 97, 13, True, 0)
@example(Local(70) | Dilated(9, 9) | Global(at=(3, 40)), 200, 0, False, 1)
@example(Blocks(150) & Local(20), 200, 7, False, 0)
@budget(max_examples=300)
def test_tiles_are_the_definition(p, n, past, causal, seed):
    """n queries behind `past` keys: outputs, log-sum-exp and every gradient."""
    m = n + past
    p = p.for_head(1, 2).bound(m, m)
    p = p & Causal() if causal else p
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, x, y, dtype=torch.float64, generator=g, requires_grad=True) for x, y in ((n, 4), (m, 4), (m, 3)))
    valid = torch.arange(m) < torch.tensor([m, max(1, m // 2)])[:, None] if seed % 2 else None
    seen = dense(p, n, m, t=past)
    seen = seen if valid is None else seen & valid[:, None, None]
    out, lse = tiled(q, k, v, p, Span(past, n, 0, m), scale=0.5, valid=valid)
    expected = attention(q, k, v, seen)
    up = torch.randn(out.shape, dtype=torch.float64, generator=g)
    grads = [torch.autograd.grad((y * up).sum(), (q, k, v)) for y in (out, expected)]
    for a, b in zip((out, *grads[0]), (expected, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    s = (q @ k.mT * 0.5).masked_fill(~seen, -1e30).logsumexp(-1).clamp_min(-1e30)
    torch.testing.assert_close(lse, s, rtol=1e-9, atol=1e-9)


@given(graphs(), st.booleans())
@budget(max_examples=30)
def test_edges_are_the_definition(p, causal):
    own = p & Causal() if causal else p
    q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, _ = tiled(q, k, v, own.bound(20, 20), Span(0, 20, 0, 20), scale=0.5)
    expected = attention(q, k, v, dense(own, 20))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(patterns, st.integers(1, 150), st.booleans(), st.sampled_from([1, 16, 64]))
@budget(max_examples=120)
def test_census_counts_what_is_there(p, n, causal, block):
    found = count_pairs(p, n, causal=causal, heads=2, block=block)
    pairs = blocks = 0
    for h in range(2):
        own = p.for_head(h, 2).bound(n, n)
        seen = dense(own & Causal() if causal else own, n, h=h)
        pairs += int(seen.sum())
        i, j = seen.nonzero().T
        blocks += len({(a, b) for a, b in zip((i // block).tolist(), (j // block).tolist(), strict=True)})
    whole = n * (n + 1) // 2 if causal else n * n
    wide = -(-n // block)
    assert (found.pairs, found.blocks, found.possible) == (pairs, blocks, 2 * whole)
    assert found.possible_blocks == 2 * (wide * (wide + 1) // 2 if causal else wide * wide)


@given(patterns, st.integers(1, 120), st.booleans(), st.integers(1, 40))
@example(Stride(3), 50, False, 7)
@example(Dilated(4, 3) | Global(first=1), 50, True, 8)
@budget(max_examples=60)
def test_cells_hold_the_share_of_pairs_that_is_there(p, n, causal, block):
    own = p.for_head(1, 2).bound(n, n)
    own = own & Causal() if causal else own
    seen = dense(own, n).double()
    wide = -(-n // block)
    padded = torch.zeros(2, wide * block, wide * block, dtype=torch.float64)
    padded[0, :n, :n], padded[1, :n, :n] = seen, 1
    held, all_ = padded.view(2, wide, block, wide, block).sum((2, 4))
    torch.testing.assert_close(cells(own, n, block).double(), held / all_, rtol=1e-6, atol=1e-6)


def test_a_picture_shows_several_windows():
    lengths = {"Local(8)": 1024, "Local(256)": 2048, "Dilated(64, 8) | Global(1)": 4096, "PerHead([Local(2), Stride(512)])": 4096,
               "Blocks(10000)": 32768, "Edges([[0, 1], [1, 2]], nodes=77)": 77, "Everything() & Causal()": 1024}  # fmt: skip
    assert {text: several_windows(Pattern.parse(text)) for text in lengths} == lengths
    assert several_windows(None) == 1024


def test_census_of_a_million_tokens_is_quick():
    found = count_pairs(Local(128) | Global(first=4), 1_000_000, causal=True, block=1024)
    assert found.pairs == 128 * 1_000_000 - 127 * 64 + 4 * (1_000_000 - 128) - 6


@given(atoms, atoms)
@budget(max_examples=40)
def test_no_pair_is_computed_twice(a, b):
    p = (a | b).for_head(0, 1).bound(70, 70)
    count = torch.zeros(70, 70, dtype=torch.long)
    for part in plan(p, Span(0, 70, 0, 70)).parts:
        i, j = part.queries.positions(0, 70), part.keys.positions(0, 70)
        for group in part.groups:
            mask = part.mask(group.rows, group.cols)
            rows = i[group.rows][:, :, None].expand(mask.shape)[mask]
            cols = j[group.cols.clamp_min(0)].flatten(1)[:, None].expand(mask.shape)[mask]
            count.index_put_((rows, cols), torch.ones_like(rows), accumulate=True)
    assert torch.equal(count, dense(p, 70).long())


def test_plans_do_not_cost_what_they_avoid():
    """The tiles of a plan hold about as many pairs as the pattern, whatever the length."""
    for p in (
        Local(128),
        Local(128) | Global(first=2),
        Dilated(32, 8),
        Blocks(64, around=1) | Random(3, 64),
        Stride(64),
        Causal(),
    ):
        n = 16_384 if p != Causal() else 4096
        work = plan(p.bound(n, n), Span(0, n, 0, n))
        held = sum(part.queries.size * part.keys.size * group.cols.numel() for part in work.parts for group in part.groups)
        assert held < 2.1 * count_pairs(p, n).pairs, p


@pytest.mark.filterwarnings("ignore::UserWarning")  # uncompiled, FlexAttention says that it is slow
def test_a_pattern_is_a_flexattention_mask():
    p = (Local(9) | Stride(16) | Global(first=2)) & Causal()
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    mask = create_block_mask(lambda _b, h, i, j: p(h, i, j), None, None, 256, 256, device="cpu")
    ours, _ = tiled(q, k, v, p, Span(0, 256, 0, 256), scale=0.25)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), ours, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=dense(p, 256)), ours, rtol=1e-4, atol=1e-5)


MASKS = [
    "Local(5)",
    "Truncated(5, 2)",
    "Dilated(4, 3)",
    "Stride(7)",
    "Blocks(8, around=1)",
    "Neighbourhood(9, 1, across=2, first=3)",
    "Global(first=2, at=[9, 40], last=3)",
    "Rows(first=2, at=[30])",
    "Columns(last=2)",
    "Tail(8, 2)",
    "Random(2, 8)",
    "Random(2, 8, past=True)",
    "Random(2, 8, per_head=True)",
    "Edges([[0, 1, 60], [2, 3, 5]], nodes=64)",
    "Causal()",
    "Everything()",
    "PerHead([Local(4), Random(1, 4, per_head=True), Dilated(4, 2), Random(2, 8, past=True)]) | Global(first=1)",
    "(PerHead([Local(9), Stride(3), Blocks(8), Everything()]) | Random(3, 8)) & Causal()",
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # uncompiled, FlexAttention says that it is slow
@pytest.mark.parametrize("text", MASKS)
def test_every_pattern_is_a_flexattention_mask(text):
    """Indices are vmapped there, and traced a second time: the predicate must not look at their numbers."""
    assert {name for t in MASKS for name in re.findall(r"[A-Z]\w+(?=\()", t)} == set(PATTERNS)
    n, heads = 64, 4
    p = Pattern.parse(text).bound(n, n)
    mask = create_block_mask(lambda _b, h, i, j: p(h, i, j), None, heads, n, n, device="cpu")
    q, k, v = (torch.randn(1, heads, n, 8) for _ in range(3))
    seen = torch.stack([dense(p, n, h=h) for h in range(heads)])
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), attention(q, k, v, seen), rtol=1e-4, atol=1e-5)
    i = torch.arange(n)
    assert torch.equal(p(torch.arange(heads)[:, None, None], i[:, None], i).expand(heads, n, n), seen)


def test_a_mask_for_more_heads_than_patterns_is_refused():
    p = PerHead([Local(2), Local(3)])
    for heads in (3, 4):
        with pytest.raises(ValueError, match=f"there is none for head {heads - 1}"):
            create_block_mask(lambda _b, h, i, j: p(h, i, j), None, heads, 16, 16, device="cpu")


HUGE = 2**31


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("text", "same"),
    [
        (f"Local({HUGE})", "Everything()"),
        (f"Dilated({HUGE}, {HUGE})", "Local(1)"),
        (f"Stride({HUGE - 1}) & Stride({HUGE - 3}) & Stride({HUGE - 5})", "Local(1)"),
        (f"Blocks({HUGE}, around={HUGE})", "Everything()"),
        (f"Rows({HUGE})", "Everything()"),
        (f"Global(last={HUGE})", "Everything()"),
        (f"Tail({HUGE}, {HUGE})", "Everything()"),
        (f"Random(2, {HUGE})", "Everything()"),
        (f"Columns(at=[{HUGE}]) | Local(2)", "Local(2)"),
    ],
)
def test_the_largest_numbers_take_no_room(text, same, causal):
    """The plan for fifty tokens holds a few times fifty by fifty pairs, however large the blocks and steps."""
    p = Pattern.parse(text).bound(50, 50)
    p = p & Causal() if causal else p
    work = plan(p, Span(0, 50, 0, 50))
    assert sum(part.queries.size * part.keys.size * group.cols.numel() for part in work.parts for group in part.groups) <= 10_000
    assert torch.equal(dense(p, 50), dense(Pattern.parse(same) & Causal() if causal else Pattern.parse(same), 50))
    q, k, v = (torch.randn(1, 2, 50, 4, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(tiled(q, k, v, p, Span(0, 50, 0, 50), scale=0.5)[0], attention(q, k, v, dense(p, 50)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern.parse("Rows(9223372036854775807)"), "first must be at most 2,147,483,648, not 9223372036854775807"),
        (lambda: Local(10**5000), "at most 2,147,483,648, not a number of 16,610 bits"),
        (lambda: Local(-(10**5000)), "at least 1, not a number of 16,610 bits"),
        (lambda: Local([10**5000]), "at least 1, not this list"),
        (lambda: Random(2000, 1), "at most 1,024"),
        (lambda: Edges([[0], [1]], nodes=2**20, loops=True), "give a tensor"),
        (lambda: Global(first=1) & Global(first=2) & Global(first=3) & Global(first=4) & Global(first=5)
            & Global(first=6) & Global(first=7) & Global(first=8) & Global(first=9), "256 alternatives, not 512"),
        (lambda: reduce(lambda p, _: PerHead([p, p]), range(40), Local(2)), "1,024 parts"),
        (lambda: reduce(or_, (Local(x) for x in range(1, 400))), "256 alternatives"),
        (lambda: PerHead(3), "list of patterns"),
        (lambda: Global(at=2.5), "at must be a position or a list of positions, not 2.5"),
        (lambda: dense(Columns(last=2), 9), "call .bound"),
    ],
)  # fmt: skip
def test_sizes_are_bounded_before_they_are_used(make, message):
    began = time.process_time()
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
    assert time.process_time() - began < 1


@pytest.mark.parametrize("mechanism", ["sparse", "gat", "hybrid"])
def test_a_promised_future_is_refused_when_causal(mechanism):
    """Truncated names a number of later tokens, which causal=True would drop; an explicit & Causal() takes them knowingly."""
    refused = [
        "Truncated(5, 2)",
        "Local(3) | Truncated(5, 2)",
        "Truncated(5, 2) & Blocks(8)",
        "(Causal() | Truncated(5, 2)) & Blocks(8)",
        "PerHead([Local(2), Truncated(5, 2)])",
    ]
    taken = ["Truncated(5, 0)", "Truncated(5, 2) & Causal()", "PerHead([Local(2), Truncated(5, 2)]) & Causal()", "Local(3)",
             "Truncated(5, 2) & Truncated(3, 0)", "Local(3) | Truncated(5, 2) & Causal()"]  # fmt: skip
    for pattern in refused:
        with pytest.raises(ValueError, match=r"Truncated\(5, 2\) sees later tokens.*Truncated\(back, 0\).*causal=False"):
            layer(f"{mechanism}(pattern={pattern})", width=16, heads=2, causal=True)
        with pytest.raises(ValueError, match="cannot do causal"):
            attend(*(torch.randn(1, 2, 9, 8) for _ in range(3)), core(pattern, Dims(16, 2)), causal=True)
    for pattern in taken:
        layer(f"{mechanism}(pattern={pattern})", width=16, heads=2, causal=True)


def test_per_head_as_a_predicate():
    p = PerHead([Local(2), Stride(3)]) | Global(first=1)
    h, i, j = torch.arange(2)[:, None, None], torch.arange(8)[:, None], torch.arange(8)
    seen = p(h, i, j)
    assert torch.equal(seen[0], dense(Local(2) | Global(first=1), 8)) and torch.equal(
        seen[1], dense(Stride(3) | Global(first=1), 8)
    )
    assert p.for_head(2, 4) == Stride(3) | Global(first=1)  # neighbouring heads share
    with pytest.raises(ValueError, match="shared evenly by 3 heads"):
        p.for_head(0, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local(0), "size of Local must be an integer of at least 1, not 0"),
        (lambda: Local(2.5), "not 2.5"),
        (lambda: Truncated(-1, 0), "back must be"),
        (lambda: Dilated(3, 0), "step of Dilated"),
        (lambda: Global(), "needs special tokens"),
        (lambda: Global(at=[-1]), "position in `at`"),
        (lambda: Tail(4, 5), "count must be at most size"),
        (lambda: Random(0, 4), "count of Random"),
        (lambda: Random(1, 4, per_head=3), "per_head must be True or False"),
        (lambda: Edges([[0, 1]]), "shape"),
        (lambda: Edges([[0.5], [1.0]]), "integers"),
        (lambda: Edges([[5], [0]], nodes=3), "only 3, from 0"),
        (lambda: Edges([[0], [1]]).bound(5, 5), "a graph with 2 nodes"),
        (lambda: PerHead([]), "list of patterns"),
        (lambda: PerHead([3]), "list of patterns"),
        (lambda: Local(3) | 4, "not with int"),
        (lambda: Pattern.of(7), "pattern or its text is needed, not int"),
    ],
)
def test_bad_patterns_get_a_sentence(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("text", ["Local(8) | Globl(first=1)", "Local(8) |", "Local(size=8, sze=3)", "Local(0)", "3", ""])
def test_text_that_is_no_pattern_shows_where(text):
    with pytest.raises(ValueError) as caught:
        Pattern.parse(text)
    assert "^" in str(caught.value) or "is not a pattern" in str(caught.value)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("term", [False, True])
def test_the_operator_behind_compile_is_well_made(dropout, term):
    q, k, v = (torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3))
    valid = torch.arange(40) < torch.tensor([[40], [25]])
    seed = torch.tensor(5) if dropout else None
    more = (torch.randn(2, 2, 40, 7, requires_grad=True), torch.rand(2)) if term else (None, None)
    rest = (3, term, 0.3, dropout, "PerHead([Local(9), Stride(4)]) | Global(first=2)", [0, 40, 0, 40], True, "auto")
    torch.library.opcheck(torch.ops.regard.tile_attention.default, (q, k, v, *more, valid, seed, *rest))
    out, lse = torch.ops.regard.tile_attention(q, k, v, *more, valid, seed, *rest)
    backward = torch.ops.regard.tile_attention_backward.default
    saved = [x if x is None else x.detach() for x in (q, k, v, *more, valid, seed, out, lse)]
    torch.library.opcheck(backward, (torch.ones_like(out), torch.ones_like(lse), *saved, *rest))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("text", ["Local(7)", "Local(3) | Global(first=2)", "Stride(5) | Blocks(6)", "Dilated(3, 4) & Causal()"])
def test_gradients_by_finite_differences(text, dropout):
    """Of outputs and log-sum-exps, with the dice of dropout thrown alike every time."""
    pattern = Pattern.parse(text)
    inputs = [torch.randn(1, 2, 15, x, dtype=torch.float64, requires_grad=True) for x in (3, 3, 2)]

    def f(q, k, v):
        torch.default_generator.manual_seed(1)  # `torch.manual_seed` takes longer than this pattern
        return tiled(q, k, v, pattern, Span(0, 15, 0, 15), scale=0.7, dropout=dropout)

    assert torch.autograd.gradcheck(f, inputs, fast_mode=dropout > 0)  # every number without dropout, a random sum with it


@pytest.mark.parametrize("text", ["Local(40)", "Stride(3) | Local(9)", "Blocks(50) | Global(first=2)"])
def test_dropout_throws_the_same_dice_backward(text, set_limits):
    """With the dice fixed, out is linear in v, so <up, out> = <dv, v>, however the tiles are batched."""
    set_limits(tile_scores=1 << 14)
    q, k, v, up = (torch.randn(1, 2, 300, 4, dtype=torch.float64) for _ in range(4))
    v.requires_grad_()
    out, _ = tiled(q, k, v, Pattern.parse(text), Span(0, 300, 0, 300), scale=0.7, dropout=0.4)
    (dv,) = torch.autograd.grad((out * up).sum(), v)
    torch.testing.assert_close((out * up).sum(), (dv * v).sum(), rtol=1e-9, atol=1e-9)


def test_buffers_outlive_inference_mode_and_threads_have_their_own():
    """Buffers are kept between calls: made in inference mode, they must serve training; no thread writes into another's."""
    q, k, v = (torch.randn(1, 2, 200, 8, dtype=torch.float64) for _ in range(3))
    span, p = Span(0, 200, 0, 200), Local(9) | Global(first=1)
    buffers.clear_scratch()
    with torch.inference_mode():
        first, _ = tiled(q, k, v, p, span, scale=0.3)
    x = q.clone().requires_grad_()
    out, _ = tiled(x, k, v, p, span, scale=0.3)
    out.sum().backward()
    assert torch.equal(out.detach(), first.clone()) and x.grad.isfinite().all()
    with ThreadPoolExecutor(4) as pool:
        many = list(pool.map(lambda _: tiled(q, k, v, p, span, scale=0.3)[0], range(32)))
    assert all(torch.equal(out.detach(), y) for y in many)


@pytest.mark.parametrize("text", ["Local(40)", "PerHead([Local(40), Local(41)])"])
def test_heads_do_not_drop_the_same_pairs(text, set_limits):
    set_limits(tile_queries=1)  # every head by itself
    q, k, v = (torch.randn(1, 1, 40, 4).expand(1, 4, 40, 4) for _ in range(3))  # all heads alike, but for their dice
    out, _ = tiled(q, k, v, Pattern.parse(text), Span(0, 40, 0, 40), scale=0.7, dropout=0.4)
    assert all(not torch.allclose(out[:, a], out[:, b]) for a in range(4) for b in range(a))


@pytest.mark.parametrize("mixer", ["bigbird", "sparse(pattern=PerHead([Local(3), Random(1, 4, past=True, per_head=True)]))"])
def test_a_drawn_pattern_needs_no_numbers_to_be_counted(mixer):
    """FLOPs are counted on the meta device, whose positions have no numbers."""
    with torch.device("meta"):
        made = layer(mixer, width=32, heads=4, causal=True)
    assert made(torch.empty(1, 16, 32, device="meta")).shape == (1, 16, 32)
