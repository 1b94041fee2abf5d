"""Backends of tile attention: each computes what the reference defines, dropout included; a kernel can read the plans."""

import warnings

import pytest
import torch

from conftest import DEVICE, data, some
from regard import Dims, clear_caches, layer
from regard.ops import backend as registry
from regard.ops import edge
from regard.ops.backend import _BACKENDS, SlowBackend, backends, register_backend
from regard.ops.dropout_hash import head_numbers, kept_pairs, kept_pairs_composite, key_keys, query_keys, row_seed
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.call import TileCall
from regard.ops.tile.head_pieces import split_heads
from regard.ops.tile.reference import pairs_of_plan
from regard.ops.tile.tile_op import HeadPatterns, flatten_call, heads_by_plan, tile_attention, unflatten_call
from regard.ops.tile.torch import TorchTiles
from regard.patterns import Pattern, tiles
from regard.patterns.condition import BAND, BLOCKS, COLUMNS, EDGES, RANDOM, ROWS, TAIL, UNBOUNDED
from regard.patterns.edge_list import edge_list
from regard.patterns.plan import plan
from regard.patterns.tiles import Span

HEADS, N = 4, 70
EXACT = [name for name in backends("tile") if name != "triton"]  # in float64; test_triton_tiles.py has the kernels
OTHERS = [name for name in EXACT if name != "reference"]
PATTERNS = [
    "Local(9)",
    "Local(30) | Global(first=2, at=[33])",
    "Stride(5) | Local(4)",
    "Dilated(4, 3) & Causal()",
    "Blocks(8, around=1) | Random(2, 8, past=True) | Global(first=8)",
    "Random(2, 8, per_head=True) | Columns(last=3)",
    "Tail(8, 2) | Blocks(8)",
    "PerHead([Local(6), Stride(4)])",
    "PerHead([Local(6), Local(7), Local(6), Local(6)]) | Columns(first=1)",
    "Edges([[0, 1, 60, 3, 9], [2, 3, 5, 60, 9]], nodes=70) | Local(2)",
]
specs = pytest.mark.parametrize("spec", ["bigbird(block=8)", "longformer(window=6)", "sparse_transformer(stride=8)", "Stride(3)"])


def biases(kind, h, n):
    if kind == "alibi":
        return ScoreBias(slopes=torch.exp2(-torch.arange(1.0, h + 1, dtype=torch.float64, device=DEVICE)))
    if kind == "relative":
        by_query = torch.randn(2, h, n, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
        return ScoreBias(clip=3, by_query=by_query, mass=True)
    return None


def operands(g, n=N, m=N):
    shapes = ((HEADS, n, 6), (g, m, 6), (g, m, 5))
    return [torch.randn(2, *shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for shape in shapes]


def results(backend, text, inputs, span, seed=3, bias=None, **options):
    """Outputs, log-sum-exp and all gradients, for the same seed."""
    torch.manual_seed(seed)
    patterns = HeadPatterns.of(Pattern.parse(text), HEADS)
    out, lse = tile_attention(*inputs, patterns, span, scale=0.5, bias=bias, backend=backend, **options)
    wanted = [*inputs, *([bias.by_query] if bias is not None and bias.by_query is not None else [])]
    up = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    loss = (out * up).sum() + (lse * (lse > -1e29)).sin().sum()
    return [out, lse, *torch.autograd.grad(loss, wanted)]


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("g", [4, 2, 1])
def test_every_backend_computes_the_reference(backend, text, g):
    """With padding, biases, dropout and grouped heads, causal or not."""
    for number, bias in enumerate((None, biases("alibi", HEADS, N), biases("relative", HEADS, N))):
        inputs, valid = operands(g), some(2, N)
        for causal in (False, True):
            options = {
                "causal": causal,
                "valid": None if number == 0 and causal else valid,
                "bias": bias,
                "dropout": 0.3 * causal,
            }
            agree(*(results(name, text, inputs, Span(0, N, 0, N), **options) for name in (backend, "reference")))


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("text", [text for text in PATTERNS if "Edges" not in text])
@pytest.mark.parametrize("span", [Span(13, 40, 0, 70), Span(40, 30, 21, 49), Span(0, 3, 50, 20)])
def test_queries_and_keys_may_begin_anywhere(backend, text, span):
    inputs = operands(2, span.n, span.m)
    agree(*(results(name, text, inputs, span, causal=True, dropout=0.2) for name in (backend, "reference")))


@pytest.mark.parametrize("text", ["Local(40)", "Stride(3) | Local(9)", "PerHead([Local(6), Local(7), Local(6), Local(6)])"])
def test_another_tiling_drops_the_same_weights(text, set_limits):
    inputs, span = operands(2), Span(0, N, 0, N)
    whole = results("torch", text, inputs, span, dropout=0.4)
    set_limits(tile_scores=1, tile_queries=1)
    agree(results("torch", text, inputs, span, dropout=0.4), whole)


@pytest.mark.parametrize("text", ["Local(9)", "Local(9) & Causal()", "Stride(5) | Local(4)"])
def test_tiles_inside_a_sequence_share_a_mask_unless_it_is_short(text, monkeypatch):
    """A short sequence is one batch of tiles, a long one is cut where the masks change; both compute the reference."""
    inputs, span = operands(2), Span(0, N, 0, N)
    expected = results("reference", text, inputs, span)
    counts = []
    for limit in (tiles.UNCUT_MASK, 0):
        monkeypatch.setattr(tiles, "UNCUT_MASK", limit)
        clear_caches()
        agree(results("torch", text, inputs, span), expected)
        (own,) = heads_by_plan(HeadPatterns.of(Pattern.parse(text), HEADS).each, span, False)
        batches = [list(part.batches(1 << 20, torch.device(DEVICE))) for part in own.plan.parts if part.relative]
        counts.append(sum(map(len, batches)))
        shared = any(len(mask) == 1 < len(batch.rows) for found in batches for batch in found for *_, mask in batch.hidden)
        assert shared == (limit == 0)
    assert counts[0] < counts[1]
    clear_caches()


def test_another_seed_drops_other_weights():
    inputs, span = operands(2), Span(0, N, 0, N)
    first, second = (results("torch", "Local(9)", inputs, span, seed=seed, dropout=0.4)[0] for seed in (1, 2))
    assert not torch.allclose(first, second)


@specs
@pytest.mark.parametrize("positions", [None, "alibi", "relative(clip=3)"])
def test_layers_compute_the_same_by_every_backend(spec, positions):
    for causal in (True, False):
        found = []
        for backend in EXACT:
            torch.manual_seed(0)
            options = {"causal": causal, "kv_heads": 2, "dropout": 0.2, "backend": backend, "positions": positions}
            made = layer(spec, width=32, heads=4, **options).to(DEVICE, torch.float64).train()
            assert made.core.dims.backend == backend
            x = data(61).requires_grad_()
            torch.manual_seed(5)
            y = made(x, valid=some(3, 61))
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])])
        for other in found[1:]:
            agree(found[0], other)


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"backend must be .*not 'fancy'"):
        Dims(32, 4, backend="fancy")
    q = torch.randn(1, 2, 20, 4)
    with pytest.raises(ValueError, match="tile attention has no backend 'fancy': there is triton, torch, reference"):
        tile_attention(q, q, q, HeadPatterns.of(Pattern.parse("Local(3)"), 2), Span(0, 20, 0, 20), scale=1.0, backend="fancy")


class _Choosy(TorchTiles):
    name = "choosy"
    devices = (DEVICE.type,)

    def refuses(self, call, plans):  # noqa: ARG002
        return "it takes no more than 4 queries" if call.q.shape[2] > 4 else None


def test_kernels_that_refuse_are_replaced_with_one_warning(monkeypatch):
    monkeypatch.setitem(_BACKENDS, "tile", {"choosy": _Choosy(), **_BACKENDS["tile"]})
    monkeypatch.setattr(registry, "_warned", set())
    patterns = HeadPatterns.of(Pattern.parse("Local(3)"), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (4, 20):
            for dtype in (torch.float64, torch.float32) if n == 4 else (torch.float64,):
                q = torch.randn(1, 2, n, 4, dtype=dtype, device=DEVICE)
                tile_attention(q, q, q, patterns, Span(0, n, 0, n), scale=1.0)
    q = q.float()
    with pytest.warns(SlowBackend, match="by backend 'choosy', but by a slower one: it takes no more than 4 queries"):
        tile_attention(q, q, q, patterns, Span(0, 20, 0, 20), scale=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tile_attention(q, q, q, patterns, Span(0, 20, 0, 20), scale=1.0)


class _Counting(TorchTiles):
    name = "counting"

    def __init__(self):
        self.calls = []

    def refuses(self, call, plans):  # noqa: ARG002
        return "it knows no biases" if call.bias is not None else None

    def forward(self, call, plans):
        self.calls.append(("forward", call.k.shape[1]))
        return super().forward(call, plans)

    def backward(self, call, plans, *results):
        self.calls.append(("backward", call.k.shape[1]))
        return super().backward(call, plans, *results)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setitem(_BACKENDS, "tile", dict(_BACKENDS["tile"]))
    made = _Counting()
    register_backend("tile", made)
    return made


def test_a_backend_is_used_when_it_is_named_and_gets_grouped_heads(counting):
    made = layer("Local(5)", width=32, heads=4, kv_heads=2, causal=True, backend="counting").to(DEVICE)
    made(torch.randn(2, 40, 32, device=DEVICE)).sum().backward()
    assert counting.calls == [("forward", 2), ("backward", 2)]
    layer("Local(5)", width=32, heads=4, causal=True).to(DEVICE)(torch.randn(2, 40, 32, device=DEVICE))
    assert len(counting.calls) == 2  # auto takes the first
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(2, 40, 32, device=DEVICE)).sum().backward()
    assert counting.calls[2:] == [("forward", 2), ("backward", 2)]


def test_a_request_that_cannot_be_met_raises_its_sentence(counting):  # noqa: ARG001
    made = layer("Local(5)", width=32, heads=4, causal=True, backend="counting", positions="alibi").to(DEVICE)
    with pytest.raises(ValueError, match="backend 'counting' cannot compute this tile attention: it knows no biases"):
        made(torch.randn(2, 40, 32, device=DEVICE))


def test_a_decoding_step_with_grouped_heads_is_that_of_repeated_keys():
    for text in ("Local(9)", "PerHead([Local(4), Stride(3)])"):
        few = layer(text, width=32, heads=4, kv_heads=2, causal=True).to(DEVICE, torch.float64)
        many = layer(text, width=32, heads=4, causal=True).to(DEVICE, torch.float64)
        weights = few.state_dict()
        for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
            weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
        many.load_state_dict(weights)
        x = data(40)
        for made, other in ((few, many),):
            state, same = made.start(3), other.start(3)
            for low, high in ((0, 30), (30, 31), (31, 36), (36, 40)):
                y, state = made.extend(state, x[:, low:high])
                z, same = other.extend(same, x[:, low:high])
                torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [range(8), (0, 2, 3, 6)])
@pytest.mark.parametrize(("share", "limit"), [(1, 8), (1, 3), (2, 8), (2, 1), (4, 8), (4, 5), (8, 8), (8, 3)])
def test_pieces_hold_every_head_once_beside_its_own_key_head(heads, share, limit):
    found = []
    for piece in split_heads(tuple(heads), share, limit):
        own, keys = (list(range(8))[x] if isinstance(x, slice) else x for x in (piece.heads, piece.key_heads))
        assert len(own) <= limit and len(own) == len(keys) * piece.share
        assert [head // share for head in own] == [key for key in keys for _ in range(piece.share)]
        found += own
    assert sorted(found) == sorted(heads)


def test_a_call_survives_being_flattened():
    q = torch.randn(1, 2, 3, 4)
    for bias in (None, ScoreBias(torch.rand(2)), ScoreBias(None, 3, torch.rand(1, 2, 3, 7), True)):
        call = TileCall(q, q, q, None, bias, torch.tensor(3), 0.5, 0.1)
        assert unflatten_call(*flatten_call(call)) == call


# dropout by hash


def kept(seed, heads, n, m, rate):
    i, j = torch.arange(n, device=DEVICE)[:, None], torch.arange(m, device=DEVICE)
    head = torch.arange(heads, device=DEVICE)[:, None, None]
    return kept_pairs_composite(query_keys(torch.tensor(seed, device=DEVICE), head, i), key_keys(torch.tensor(seed), j), rate)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**61 + 12345])
def test_dropout_is_uniform_and_pairs_are_independent(seed, rate):
    """In standard deviations: of the mean, of products with neighbours and over four corners; and of rows and columns."""
    x = (kept(seed, 8, 512, 512, rate).double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    other = (kept(seed + 1, 8, 512, 512, rate).double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    corners = x[:, 1:, 1:] * x[:, 1:, :-1] * x[:, :-1, 1:] * x[:, :-1, :-1]
    products = [
        *(x, x[..., 1:] * x[..., :-1], x[:, 1:] * x[:, :-1], x[1:] * x[:-1], x[:, 1:, 1:] * x[:, :-1, :-1], corners, x * other),
        *(x[..., 64:] * x[..., :-64], x[:, 64:] * x[:, :-64]),
    ]
    for product in products:
        assert abs(product.sum() / product.numel() ** 0.5) < 4.5
    for dim in (0, 1, 2):
        spread = (x.sum(dim) / x.shape[dim] ** 0.5).var()
        assert abs(spread - 1) < 0.08
    for one in (x[0], x[0].mT):
        together = (one @ one.mT / one.shape[1] ** 0.5).fill_diagonal_(0)
        assert together.abs().max() < 12 and abs(together.square().mean() - 1) < 0.05  # no two rows are alike


def test_dropout_in_place_is_that_of_plain_operations():
    seed, i, j = torch.tensor(9), torch.arange(33)[:, None], torch.arange(40)
    query, key = query_keys(seed, torch.arange(3)[:, None, None], i), key_keys(seed, j)
    for dtype in (torch.float32, torch.float64):
        found = kept_pairs(query, key, 0.3, torch.empty(3, 33, 40, dtype=dtype))
        assert torch.equal(found.bool(), kept_pairs_composite(query, key, 0.3))
    assert kept_pairs_composite(query, key, 0.0).all()
    assert torch.equal(head_numbers(2, 4, [1, 3], torch.device("cpu")), torch.tensor([[1, 3], [5, 7]]))
    assert len({int(row_seed(seed, row)) for row in range(100)} | {9}) == 101


def test_edges_drop_the_same_weights_however_the_list_is_cut(set_limits):
    q, k, v = (torch.randn(30, 2, 3, dtype=torch.float64) for _ in range(3))
    pairs = edge_list(Pattern.parse("Local(6)"), Span(0, 30, 0, 30), False, torch.device("cpu"))
    found = []
    for size in (1 << 18, 16):
        set_limits(edge_strip=size)
        torch.manual_seed(3)
        found.append(edge.edge_attention(q, k, v, torch.ones(2, 3, dtype=torch.float64), pairs, dropout=0.4))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


# plans that a kernel can read


def by_codes(condition, i, j, end):
    """A second reading of the integer codes, by their documentation."""
    terms, tables = condition.codes(end)
    clauses = [torch.ones_like(i + j, dtype=torch.bool) for _ in range(1 + len(condition.outside))]
    for clause, kind, a, b, c, table in terms.tolist():
        held = {
            BAND: lambda a=a, b=b, c=c: (i - j <= a) & (j - i <= b) & ((i - j) % c == 0),
            BLOCKS: lambda a=a, b=b: (i // a - j // a).abs() <= b,
            ROWS: lambda a=a, b=b, t=table: (i < a) | (i >= b) | torch.isin(i, tables[t]),
            COLUMNS: lambda a=a, b=b, t=table: (j < a) | (j >= b) | torch.isin(j, tables[t]),
            TAIL: lambda a=a, b=b: j % a >= a - b,
            RANDOM: lambda a=a, t=table: (tables[t][i // a] == (j // a)[..., None]).any(-1),
            EDGES: lambda a=a, t=table: torch.isin(i * a + j, tables[t]),
        }[kind]()
        clauses[clause] = clauses[clause] & held
    found = clauses[0]
    for other in clauses[1:]:
        found = found & ~other
    return found


CODED = [
    *(text for text in PATTERNS if "PerHead" not in text and "per_head" not in text),
    "Edges([[0, 1, 60], [2, 3, 5]], nodes=70) & Local(20) | Truncated(5, 2) | Tail(9, 2) & Rows(3, at=[20], last=4)",
    "Random(3, 8) & Local(11) | Stride(7) & Columns(at=[3, 44])",
]


@pytest.mark.parametrize("text", CODED)
def test_conditions_in_integers_are_their_masks(text):
    i, j = torch.arange(N)[:, None], torch.arange(N)
    made = plan(Pattern.parse(text).bound(N, N), Span(0, N, 0, N))
    for part in made.parts:
        assert torch.equal(by_codes(part.condition, i, j, N), part.condition.mask(i, j))
        assert all(isinstance(atom, Pattern) for atoms in (part.condition.inside, *part.condition.outside) for atom in atoms)
    assert UNBOUNDED > N


@pytest.mark.parametrize("text", CODED)
@pytest.mark.parametrize("span", [Span(0, N, 0, N), Span(0, 200, 0, 200)])
def test_key_blocks_list_every_tile_and_full_ones_need_no_mask(text, span):
    if "Edges" in text and span.n != N:
        return
    made = plan(Pattern.parse(text).bound(span.n, span.m), span)
    seen = torch.zeros(span.n, span.m, dtype=torch.bool)
    for part in made.parts:
        listed = part.key_blocks
        i, j = part.queries.positions(0, span.n), part.keys.positions(0, span.m)
        for row in range(part.queries.blocks):
            low, high = listed.offsets[row : row + 2].tolist()
            assert (listed.blocks[low:high].diff() > 0).all()
            for col, full in zip(listed.blocks[low:high].tolist(), listed.full[low:high].tolist(), strict=True):
                rows, cols = i[row][:, None], j[col]
                real = (rows >= 0) & (cols >= 0)
                mask = real & part.condition.mask(rows.clamp_min(0), cols.clamp_min(0))
                assert bool(mask.all()) == full
                seen[rows.expand(mask.shape)[mask], cols.expand(mask.shape)[mask]] = True
    assert torch.equal(seen, pairs_of_plan(made))


def test_parts_say_how_their_tiles_are_enumerated():
    kinds = {"Local(9)": "band", "Rows(2)": "rows", "Columns(2)": "columns", "Tail(8, 2)": "columns", "Blocks(8)": "list",
             "Random(1, 8, past=True)": "list", "Edges([[0], [1]], nodes=70)": "list"}  # fmt: skip
    for text, kind in kinds.items():
        (part,) = plan(Pattern.parse(text), Span(0, N, 0, N)).parts
        assert part.kind == kind
    (part,) = heads_by_plan((Pattern.parse("Local(9)"),), Span(0, N, 0, N), True)[0].plan.parts
    assert (part.driver.back, part.driver.ahead, part.driver.step) == (8, 0, 1) and part.band == part.driver
    full = plan(Pattern.parse("Local(200)"), Span(0, 1024, 0, 1024)).parts[0].key_blocks.full
    assert 0.3 < full.float().mean() < 1  # the inside of a band needs no mask
