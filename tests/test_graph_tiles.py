"""Graph attention by kernels over tiles: what the list of edges defines, in the interpreter on a CPU or compiled on a GPU."""

import pytest
import torch

import regard
from conftest import DEVICE
from regard.mixers import graph_attention
from regard.mixers.graph_attention import GAT
from regard.ops import graph_tiles
from regard.ops.backend import SlowBackend
from regard.ops.graph_tiles import GraphCall, GraphPairs, graph_attention_composite, graph_tile_attention, graph_tiles_refuse
from regard.ops.triton_support import has_triton
from regard.patterns import Pattern
from regard.patterns.tiles import Span

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
CASES = [  # pattern, query and key heads, span, causal, dropout
    ("Local(9)", 2, 2, Span(0, 100, 0, 100), True, 0.0),
    ("Local(70)", 4, 2, Span(0, 130, 0, 130), False, 0.3),
    ("Truncated(30, 5)", 2, 1, Span(40, 70, 21, 89), False, 0.0),
    ("Local(9) | Global(first=2, at=[70])", 2, 2, Span(0, 100, 0, 100), False, 0.3),
    ("Blocks(8, around=1) & Truncated(3, 2)", 2, 1, Span(0, 90, 0, 90), False, 0.0),
    ("Columns(at=[5, 66])", 1, 1, Span(0, 80, 0, 80), True, 0.0),
]


def pairs_of(text, span, causal=False):
    return GraphPairs(Pattern.parse(text), text, span, causal)


def inputs_of(h, g, span, dtype=torch.float32, b=2, d=6, e=5):
    shapes = ((b, h, span.n, d), (b, g, span.m, d), (b, g, span.m, e), (h, d), (h, d))
    return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("text", "h", "g", "span", "causal", "dropout"), CASES, ids=[case[0] for case in CASES])
def test_kernels_compute_attention_along_the_edges(text, h, g, span, causal, dropout):
    pairs, inputs = pairs_of(text, span, causal), inputs_of(h, g, span)
    assert graph_tiles_refuse(*inputs[:3], pairs) is None
    torch.manual_seed(3)
    found = graph_tile_attention(*inputs, pairs, slope=0.2, dropout=dropout)
    torch.manual_seed(3)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    seed = regard.ops.dropout_hash.draw_seed(found.device) if dropout else None
    expected = graph_attention_composite(GraphCall(*exact, seed, pairs, 0.2, dropout))
    up = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, up)
    wanted = torch.autograd.grad(expected, exact, up.double())
    for a, b in zip((found, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_the_definition_is_that_of_the_layer():
    span = Span(0, 40, 0, 40)
    q, k, v, *_ = inputs_of(4, 2, span, torch.float64, d=8, e=8)
    core = GAT(regard.Dims(width=32, heads=4, kv_heads=2, causal=True), pattern="Local(5) | Columns(1)").double().to(DEVICE)
    expected = regard.attend(q, k, v, core, causal=True)
    pairs = pairs_of("Local(5) | Columns(1)", span, True)
    found = graph_attention_composite(GraphCall(q, k, v, core.a_q, core.a_k, None, pairs, core.slope, 0.0))
    torch.testing.assert_close(found, expected)


def test_the_layer_takes_the_kernels_on_a_card(monkeypatch):
    x = torch.randn(2, 70, 32, device=DEVICE)
    made = regard.layer("gat(pattern=Local(5))", width=32, heads=4, kv_heads=2, causal=True).to(DEVICE)
    monkeypatch.setattr(graph_attention, "on_card", lambda _: False)
    expected = made(x)
    calls = []
    monkeypatch.setattr(graph_attention, "on_card", lambda _: True)
    monkeypatch.setattr(graph_attention, "graph_tile_attention", lambda *a, **b: calls.append(1) or graph_tile_attention(*a, **b))
    torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == [1]
    strided = regard.layer("gat(pattern=Stride(7))", width=32, heads=4, causal=True).to(DEVICE)
    with pytest.warns(SlowBackend, match="in steps"):
        strided(x)
    graph = regard.layer("gat(pattern=Edges([[0, 1], [1, 2]], nodes=70))", width=32, heads=4).to(DEVICE)
    graph(x)  # no warning: edges have a path of their own
    assert calls == [1]


@pytest.mark.parametrize(
    ("options", "padded", "why"),
    [
        ("pattern=Local(5), v2=True", False, "v2"),
        ("pattern=PerHead([Local(5), Local(3)])", False, "patterns of their own"),
        ("pattern=Local(5)", True, "padding"),
    ],
)
def test_what_has_no_kernels_warns(options, padded, why, monkeypatch):
    monkeypatch.setattr(graph_attention, "on_card", lambda _: True)
    monkeypatch.setattr("regard.ops.backend._warned", set())
    x = torch.randn(1, 70, 32, device=DEVICE)
    made = regard.layer(f"gat({options})", width=32, heads=4, causal=True).to(DEVICE)
    with pytest.warns(SlowBackend, match=why):
        made(x, valid=torch.arange(70, device=DEVICE)[None] < 60 if padded else None)


def test_gradients_are_differentiable():
    span = Span(0, 20, 0, 20)
    pairs, inputs = pairs_of("Local(3)", span), inputs_of(1, 1, span)
    out = graph_tile_attention(*inputs, pairs, slope=0.2)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    found = torch.autograd.grad(dq.sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = graph_attention_composite(GraphCall(*exact, None, pairs, 0.2, 0.0))
    (dq,) = torch.autograd.grad(out.square().sum(), exact[:1], create_graph=True)
    for a, b in zip(found, torch.autograd.grad(dq.sum(), exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "dtype", "reason"),
    [
        ("Stride(4)", torch.float32, "in steps"),
        ("Edges([[0, 1], [1, 2]], nodes=40)", torch.float32, "edges of a graph"),
        ("Local(4)", torch.float64, "float64"),
    ],
)
def test_what_kernels_do_not_compute_is_refused(text, dtype, reason):
    span = Span(0, 40, 0, 40)
    q, k, v, *_ = inputs_of(1, 1, span, dtype)
    assert reason in graph_tiles_refuse(q, k, v, pairs_of(text, span))


@pytest.mark.parametrize(("text", "dropout"), [("Local(9)", 0.0), ("Local(9) | Global(first=2)", 0.3)])
def test_kernels_are_operators(text, dropout):
    from regard.ops.graph_tiles_compiled import _graph_operator

    inputs = inputs_of(4, 2, Span(0, 70, 0, 70))
    seed = regard.ops.dropout_hash.draw_seed(inputs[0].device) if dropout else None
    torch.library.opcheck(_graph_operator, (*inputs, seed, text, [0, 70, 0, 70], True, 0.2, dropout))


def test_a_compiled_layer_takes_the_kernels_at_every_length(monkeypatch):
    """Also its gradients; strides, edges and padding keep the list of edges."""
    torch._dynamo.reset()
    calls = []
    launches = graph_tiles.GraphLaunches.forward
    monkeypatch.setattr(graph_tiles.GraphLaunches, "forward", lambda self: calls.append(1) or launches(self))
    made = regard.layer("gat(pattern=Local(5) | Global(first=1))", width=32, heads=4, kv_heads=2, causal=True).to(DEVICE)
    compiled = torch.compile(made, backend="aot_eager", dynamic=True)
    for n in (70, 91, 133):
        x = torch.randn(2, n, 32, device=DEVICE)
        monkeypatch.setattr(graph_attention, "compiled_on_card", lambda _: False)
        monkeypatch.setattr(graph_attention, "on_card", lambda _: False)
        expected = [y.detach() for y in pass_and_gradients(made, x)]
        assert not calls
        monkeypatch.setattr(graph_attention, "compiled_on_card", lambda _: True)
        found = pass_and_gradients(compiled, x)
        assert calls == [1]
        calls.clear()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    valid = torch.arange(70, device=DEVICE)[None].expand(2, -1) < 60
    compiled(torch.randn(2, 70, 32, device=DEVICE), valid=valid)
    strided = torch.compile(
        regard.layer("gat(pattern=Stride(7))", width=32, heads=4, causal=True).to(DEVICE), backend="aot_eager"
    )
    strided(torch.randn(2, 70, 32, device=DEVICE))
    assert not calls
    torch._dynamo.reset()


def pass_and_gradients(layer, x):
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]
