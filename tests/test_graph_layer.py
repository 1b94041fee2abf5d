"""The published graph attention layer, against a plain definition of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from conftest import DEVICE, close, some
from regard import Edges, GraphAttention, on_graph

N, WIDTH, OUT, HEADS = 30, 12, 5, 3


def graph(seed: int = 0, n: int = N) -> Edges:
    return Edges(torch.randint(n, (2, 4 * n), generator=torch.Generator().manual_seed(seed)), nodes=n, loops=True)


def made(**options: object) -> GraphAttention:
    torch.manual_seed(0)
    layer = GraphAttention(WIDTH, OUT, HEADS, pattern=graph(), **options).to(DEVICE, torch.float64).eval()  # type: ignore[arg-type]
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer


def plainly(layer: GraphAttention, edges: Edges, x: Tensor) -> Tensor:
    """Node by node and head by head, as the paper writes it: x (n width)."""
    i, j = edges.codes // edges.nodes, edges.codes % edges.nodes
    w, a_i, a_j = layer.w.weight.view(HEADS, OUT, WIDTH), layer.core.a_q, layer.core.a_k
    assert a_i is not None
    assert a_j is not None
    found = []
    for head in range(HEADS):
        h, rows = x @ w[head].T, []
        for node in range(len(x)):
            near = j[i == node].to(x.device)
            e = leaky_relu(torch.cat([h[node].expand(len(near), -1), h[near]], 1) @ torch.cat([a_i[head], a_j[head]]), 0.2)
            rows.append(e.softmax(0) @ h[near])
        found.append(torch.stack(rows))
    y = torch.cat(found, 1) if layer.concat else torch.stack(found).mean(0)
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_published_layer(concat: bool, bias: bool) -> None:
    layer, other = made(concat=concat, bias=bias), graph(seed=1)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True)
    names = dict(layer.named_parameters())
    assert set(names) == {"w.weight", "core.a_q", "core.a_k"} | ({"bias"} if bias else set())
    for pattern, own in ((graph(), layer), (other, on_graph(layer, other))):
        fast, slow = own(x), torch.stack([plainly(layer, pattern, row) for row in x])
        close(fast, slow)
        up = torch.randn_like(fast)
        both = [torch.autograd.grad((y * up).sum(), (x, *names.values())) for y in (fast, slow)]
        for a, b in zip(*both, strict=True):
            close(a, b)


def test_padding_is_as_if_absent_and_zero() -> None:
    layer, x, valid = on_graph(made(), "Local(3)"), torch.randn(2, N, WIDTH, dtype=torch.float64, device=DEVICE), some(2, N)
    y = layer(x, valid=valid)
    assert not y[~valid].any()
    for row in range(2):
        close(y[row, valid[row]], layer(x[row : row + 1, valid[row]])[0])


def test_padding_may_hold_anything_and_a_wrong_type_has_a_sentence() -> None:
    layer, valid = on_graph(made(), "Local(3)"), some(2, N)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64, device=DEVICE)
    spoiled = x.masked_fill(~valid[..., None], torch.nan).requires_grad_()
    layer(spoiled, valid=valid).sum().backward()
    assert spoiled.grad is not None and spoiled.grad.isfinite().all()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in layer.parameters())
    with pytest.raises(TypeError, match=r"x is torch\.float32 but the layer is torch\.float64"):
        layer(x.float())


def test_a_graph_with_padded_nodes_is_refused_with_the_way_out() -> None:
    ring = on_graph(made(), Edges([[0, 1, 2], [1, 2, 0]], nodes=3))
    x, valid = torch.randn(1, 3, WIDTH, dtype=torch.float64, device=DEVICE), torch.tensor([[True, True, False]], device=DEVICE)
    with pytest.raises(ValueError, match=r"3 nodes: they cannot be used with 2 queries and 2 keys.* use disjoint and on_graph"):
        ring(x, valid=valid)


def test_dropout_is_of_the_weights_alone() -> None:
    """A dropped weight takes its neighbour away and scales the others, and the mean stays: no feature is dropped."""
    layer, x = made(dropout=0.5, bias=False).train(), torch.randn(1, N, WIDTH, dtype=torch.float64, device=DEVICE)
    lonely = on_graph(layer, Edges([[], []], nodes=N, loops=True))  # every node sees itself: twice its features, or nothing
    h = lonely.w(x)
    y = lonely(x)[0].view(N, HEADS, OUT)
    kept = (y != 0).all(-1, keepdim=True)
    close(y, 2 * kept * h[0].view(N, HEADS, OUT))
    assert 0.2 < kept.double().mean() < 0.8
    close(lonely.eval()(x), h)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"concat": 1}, "concat must be True or False"), ({"slope": 2}, "slope must be"), ({"dropout": 1.0}, "dropout must be")],
)
def test_a_sentence_for_a_wrong_layer(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made(**options)
    with pytest.raises(ValueError, match=r"\(batch, length, 12\) is needed"):
        made()(torch.randn(1, 5, 11, dtype=torch.float64, device=DEVICE))
