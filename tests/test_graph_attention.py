"""Attention along the edges of a graph: equal to its dense form, as cheap as its edges, and the graph changes with the data."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import leaky_relu
from torch.utils.flop_counter import FlopCounterMode

import regard.mixers.graph_attention as graph_module
import regard.ops.edge as walk
import regard.patterns.edge_list as pairs_module
from conftest import DEVICE, close, data
from regard import Causal, Dims, Edges, Local, Pattern, PerHead, attend, core, layer
from regard.analysis.probe import attention_matrix
from regard.mixers.graph_attention import disjoint, edge_weights, on_graph
from regard.patterns.edge_list import edge_list
from regard.patterns.tiles import Span
from test_limits import Largest, check_same, qkv

CPU = torch.device("cpu")
SPECS = ("sparse(pattern=Local(2))", "gat(pattern=Local(2))", "gat(pattern=Local(2), v2=True)")
specs = pytest.mark.parametrize("spec", SPECS, ids=["sparse", "gat", "gat2"])


def graph(n=60, edges=200, seed=0, **options):
    return Edges(torch.randint(max(n, 1), (2, edges), generator=torch.Generator().manual_seed(seed)), nodes=n, **options)


def made(spec, pattern, **dims):
    torch.manual_seed(0)
    return on_graph(layer(spec, width=32, heads=4, **dims).to(DEVICE, torch.float64).eval(), pattern)


def dense(core, seen):
    """The formula over all pairs, with those that are not there masked out; seen (h n m) or (n m)."""

    def formula(q, k, v, *_):
        if hasattr(core, "a_q"):
            if core.a is None:
                s = leaky_relu((q @ core.a_q[..., None]) + (k @ core.a_k[..., None]).mT, core.slope)
            else:
                s = (leaky_relu(q[:, :, :, None] + k[:, :, None], core.slope) * core.a[:, None, None]).sum(-1)
        else:
            s = q @ k.mT * core.scale
        lone = ~seen.any(-1, keepdim=True)
        return s.masked_fill(~seen & ~lone, -torch.inf).softmax(-1).masked_fill(lone, 0) @ v

    return formula


@specs
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", ["Everything()", "Local(9) | Global(first=2)", "Random(1, 8)", graph(90, 300)], ids=str)
def test_equals_the_dense_form(spec, pattern, causal, set_limits):
    set_limits(edge_strip=1 << 12)  # many strips
    own = made(spec, pattern).core
    bound = Pattern.of(pattern).bound(90, 90)
    bound = bound & Causal() if causal else bound
    seen = bound(0, torch.arange(90)[:, None], torch.arange(90)).expand(90, 90).to(DEVICE)
    weights = tuple(own.parameters())
    inputs = [*qkv(), *weights]
    check_same(lambda q, k, v, *_: attend(q, k, v, own, causal=causal), dense(own, seen), inputs)


@specs
def test_every_head_may_have_a_graph_of_its_own(spec):
    patterns = [graph(90, 200, seed) for seed in range(2)]
    own = made(spec, PerHead([patterns[0], patterns[1], patterns[0], patterns[1]])).core
    i, j = torch.arange(90)[:, None], torch.arange(90)
    seen = torch.stack([patterns[h % 2](0, i, j) for h in range(4)]).to(DEVICE)
    check_same(lambda q, k, v: attend(q, k, v, own), dense(own, seen), qkv())


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
def test_slope_is_that_of_leaky_relu(slope):
    own = core(f"gat(pattern=Local(9), slope={slope})", Dims(32, 4)).to(DEVICE, torch.float64)
    seen = Local(9)(0, torch.arange(90)[:, None], torch.arange(90)).to(DEVICE)
    check_same(lambda q, k, v: attend(q, k, v, own), dense(own, seen), qkv())
    q, k, v = qkv()
    if slope == 1:  # without the bend a query has no say
        close(attend(q, k, v, own), attend(torch.zeros_like(q), k, v, own))


def test_only_v2_ranks_neighbours_by_the_query():
    """The first form orders all neighbours alike for every query (Brody et al. 2021); the second does not."""
    q, k, _ = qkv(30, b=1)
    for v2 in (False, True):
        own = core(f"gat(pattern=Everything(), v2={v2})", Dims(32, 4)).to(DEVICE, torch.float64)
        favourites = attention_matrix(own, q, k, causal=False).argmax(-1)
        assert all(len(set(row.tolist())) == 1 for row in favourites[0]) == (not v2)


@specs
def test_a_node_without_neighbours_is_silent(spec):
    g = Edges([[0, 1], [2, 2]], nodes=5)  # only node 2 has neighbours
    q, k, v = qkv(5)
    out = attend(q, k, v, made(spec, g).core)
    assert (out[:, :, [0, 1, 3, 4]] == 0).all() and (out[:, :, 2] != 0).any()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][:, :, [0, 1, 3, 4]] == 0).all() and (grads[2][:, :, 2:] == 0).all()
    empty = attend(q, k, v, made(spec, Edges([[], []], nodes=5)).core)
    assert (empty == 0).all() and all((x == 0).all() for x in torch.autograd.grad(empty.sum(), (q, k, v)))


@specs
def test_an_edge_says_who_looks_at_whom(spec):
    """j -> i: the target looks at the source. Twice the same edge is one edge; a loop is an edge like any other."""
    x = data(3, b=1)
    out = made(spec, Edges([[0, 0], [1, 1]], nodes=3))
    changed = x.clone()
    changed[:, 0] += 1
    moved = (out(changed) - out(x)).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False, True, False]
    close(out(x), made(spec, Edges([[0], [1]], nodes=3))(x))
    loops = made(spec, Edges([[], []], nodes=3, loops=True))
    close(loops(x), loops.out(loops.v(x)))


def test_edges_in_whatever_people_keep_them():
    rows = [[0, 1, 2, 2], [1, 2, 0, 0]]
    want = Edges(torch.tensor(rows))
    for same in (rows, tuple(map(tuple, rows)), np.array(rows), np.array(rows, dtype=np.int16), torch.tensor(rows).int()):
        assert Edges(same) == want and hash(Edges(same)) == hash(want)
    backwards = np.array(rows)[:, ::-1]
    backwards.flags.writeable = False
    assert Edges(backwards) == want
    assert want.index.tolist() == [[2, 0, 1], [0, 1, 2]] and want.nodes == 3
    assert Edges([[0], [1]], both=True) == Edges([[0, 1], [1, 0]])
    assert Edges(want.index, loops=True).index.tolist() == [[0, 2, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]]


def test_a_large_graph_goes_by_a_name():
    large = graph(3000, 9000)
    text = str(large)
    assert len(text) < 60 and Pattern.parse(text) == large
    assert Pattern.parse(f"{text} & Causal()") == large & Causal()
    again = graph(3000, 9000)
    assert str(again) == text != str(graph(3001, 9000))
    del large
    assert Pattern.parse(text) == again  # an equal graph is alive
    del again
    with pytest.raises(ValueError, match="make it from its edges first"):
        Pattern.parse(text)


@specs
@pytest.mark.parametrize("star", [False, True])
def test_cost_follows_the_edges_however_uneven(spec, star, set_limits):
    """A node with all others for neighbours: nothing is as large as nodes x degree, nor as edges x width."""
    n = 20_000
    set_limits(tile_scores=1 << 14, edge_strip=1 << 14)
    leaves, hub = torch.arange(1, n), torch.zeros(n - 1, dtype=torch.long)
    g = Edges(torch.stack([leaves, hub if star else leaves - 1]), nodes=n, both=True)
    own = on_graph(layer(spec, width=32, heads=4), g).core
    q, k, v = (torch.randn(1, 4, n, 8, requires_grad=True) for _ in range(3))
    with Largest() as watch:
        attend(q, k, v, own).sum().backward()
    assert watch.most <= 32 * max(n, 32_768)  # a node's own numbers; a tile of the star is filled up to a power of two


@specs
def test_edges_cost_flops_as_they_are(spec):
    counted = []
    for edges in (1000, 4000):
        codes = torch.randperm(500 * 500)[:edges].sort().values
        with torch.device("meta"):
            own = on_graph(layer(spec, width=32, heads=4), Edges.coded(codes.to("cpu"), 500)).core
        q, k, v = (torch.empty(1, 4, 500, 8, device="meta") for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            attend(q, k, v, own)
        counted.append(counter.get_total_flops())
    assert 2 * 3000 * 4 * 8 < counted[1] - counted[0] < 2 * 3000 * 4 * (8 + 8) * 1.5  # tiles are filled up to powers of two


@specs
def test_padding_around_a_graph(spec):
    """A row of the batch may also hold no graph at all."""
    g, valid = graph(31), torch.zeros(4, 50, dtype=torch.bool, device=DEVICE)
    for row, start in enumerate((0, 19, 7)):
        valid[row, start : start + 31] = True
    layer_on, x = made(spec, g), data(50, b=4)
    y = layer_on(x, valid=valid)
    for row in range(3):
        close(y[row][valid[row]], layer_on(x[row][valid[row]][None])[0])
    assert (y[~valid] == 0).all()


def test_dropout_is_the_same_in_both_passes(set_limits):
    set_limits(edge_strip=64)
    q, k, v = (torch.randn(6, 2, x, dtype=torch.float64, requires_grad=True) for x in (2, 2, 3))
    a = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    list_of_pairs = edge_list(graph(6, 20), Span(0, 6, 0, 6), False, CPU)

    def same_dice(*inputs):
        torch.manual_seed(3)
        return walk.edge_attention(*inputs, list_of_pairs, dropout=0.4)

    assert torch.autograd.gradcheck(same_dice, (q, k, v, a))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_operator_behind_compile_is_well_made(dropout):
    q, k, v = (torch.randn(12, 2, x, dtype=torch.float64, requires_grad=True) for x in (3, 3, 4))
    a = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(5) if dropout else None
    list_of_pairs = edge_list(Local(3), Span(0, 12, 0, 12), True, CPU)
    for given_as in ((list_of_pairs, seed, "", [], False), (None, seed, "Local(3)", [0, 12, 0, 12], True)):
        torch.library.opcheck(walk._edge_forward, (q, k, v, a, *given_as, 0.2, dropout))


def test_large_graphs_compile():
    for spec in SPECS[:2]:
        torch._dynamo.reset()
        g, x = graph(1500, 9000), data(1500, b=1)
        m = made(spec, g)
        close(torch.compile(m, fullgraph=True, backend="aot_eager", dynamic=False)(x), m(x))


class Stack(nn.Module):
    """Two layers and what people put around them."""

    def __init__(self, spec):
        super().__init__()
        self.into, self.nothing = nn.Linear(32, 32), None
        self.layers = nn.ModuleList([layer(spec, width=32, heads=4), layer("softmax", width=32, heads=4)])
        self.last = layer(spec, width=32, heads=4)

    def forward(self, x):
        x = self.into(x)
        for one in self.layers:
            x = x + one(x)
        return self.last(x)


@specs
def test_weights_belong_to_the_layer_and_the_graph_to_the_data(spec):
    model, x, g = Stack(spec).double(), data(60, b=1).cpu(), graph(60)
    before, keys = model(x), list(model.state_dict())
    moved = on_graph(model, g)
    assert list(model.state_dict()) == keys == list(moved.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), moved.parameters(), strict=True))
    assert moved.into is model.into and moved.layers[1] is model.layers[1]
    assert moved.last.core.pattern == g and model.last.core.pattern == Local(2)
    assert torch.equal(model(x), before) and not torch.allclose(moved(x), before)
    other = Stack(f"{spec.split('(')[0]}(pattern={g}{', v2=True' if 'v2' in spec else ''})").double()
    other.load_state_dict(model.state_dict())
    close(moved(x), other(x))
    moved(x).square().sum().backward()
    other(x).square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        close(a.grad, b.grad)
    with torch.no_grad():
        model.last.q.weight.mul_(2)  # and what is learned is seen by every graph at once
        other.last.q.weight.mul_(2)
    close(moved(x), other(x))


def test_claims_follow_the_pattern():
    window = layer(SPECS[1], width=32, heads=4, causal=True)
    assert window.start(1).nbytes == 0
    with pytest.raises(ValueError, match="cannot do stream"):
        on_graph(window, graph(60)).start(1)
    assert on_graph(on_graph(window, graph(60)), Local(3)).start(1).nbytes == 0
    for alone in ("softmax", "bigbird", "longformer(window=4)"):
        with pytest.raises(ValueError, match="only `sparse` and `gat` do"):
            on_graph(layer(alone, width=32, heads=4), graph(60))


@specs
def test_graphs_together_are_graphs_one_by_one(spec):
    parts = [graph(n, edges, seed) for seed, (n, edges) in enumerate([(7, 20), (1, 0), (23, 60), (0, 0), (4, 16)])]
    model, together = made(spec, Local(1)), disjoint(parts)
    assert together.sizes == (7, 1, 23, 0, 4) and together.edges.nodes == 35
    nodes = [data(p.nodes, seed=s, b=1)[0].requires_grad_() for s, p in enumerate(parts)]
    packed = together.pack(nodes)
    found = together.unpack(on_graph(model, together.edges)(packed))
    alone = [on_graph(model, p)(x[None])[0] for p, x in zip(parts, nodes, strict=True)]
    for a, b in zip(found, alone, strict=True):
        close(a, b)
    ups = [torch.randn_like(x) for x in alone]
    total = [sum((y * u).sum() for y, u in zip(ys, ups, strict=True)) for ys in (found, alone)]
    grads = [torch.autograd.grad(x, nodes, materialize_grads=True) for x in total]
    for a, b in zip(*grads, strict=True):
        close(a, b)
    assert torch.equal(together.edges.codes, Edges(together.edges.index, nodes=35).codes)


@specs
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", [graph(60), PerHead([graph(60), Local(2)]), graph(60) | Local(1)], ids=["one", "heads", "or"])
def test_weights_come_with_their_edges(spec, causal, pattern):
    m, x = made(spec, pattern, causal=causal, kv_heads=2), data(60, b=1).requires_grad_()
    edges, weights = edge_weights(m, x)
    assert weights.shape == (edges.shape[1], 4)
    whole = torch.zeros(4, 60, 60, dtype=torch.float64, device=DEVICE)
    whole[:, edges[1], edges[0]] = weights.T
    q, k, _ = m.heads(x, graph_module.Places.of(x))
    close(whole, attention_matrix(m.core, q, k, causal=causal)[0])
    up = torch.randn_like(weights)
    grads = [
        torch.autograd.grad((y * up).sum(), x)[0]
        for y in (weights, attention_matrix(m.core, q, k, causal=causal)[0][:, edges[1], edges[0]].T)
    ]
    close(*grads)


def test_a_node_may_be_called_anything():
    """Nodes and edges renamed together: the same graph, the same answers."""
    for spec in SPECS:
        g, order = graph(60), torch.randperm(60)
        x = data(60, b=1)
        renamed = Edges(order.argsort()[g.index], nodes=60)
        close(made(spec, renamed)(x[:, order]), made(spec, g)(x)[:, order])


def test_pairs_behind_a_memory_in_strips(monkeypatch, set_limits):
    set_limits(pair_strip=50)
    monkeypatch.setattr(pairs_module, "EDGE_LIST_ELEMENTS", 50)
    m, x = layer("gat(pattern=Local(5) | Global(first=2))", width=32, heads=4, causal=True).double(), data(70, b=2).cpu()
    state, out = m.start(2), []
    for part in x.split([30, 1, 1, 38], 1):
        y, state = m.extend(state, part)
        out.append(y)
    close(torch.cat(out, 1), m(x))
    close(on_graph(m, "Stride(7)")(x), on_graph(m, Pattern.parse("Stride(7)") & Causal())(x))
