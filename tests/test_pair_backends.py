"""Backends of attention over all pairs: each computes what the reference defines, gradients and dropout included."""

import pytest
import torch

from conftest import DEVICE, data, some
from regard import layer
from regard.ops.backend import backends, choose_backend
from regard.ops.pair.pair_op import PAIR_VARIABLES, PairCall, pair_attention

OTHERS = [name for name in backends("pair") if name != "reference"]
HALVES = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]  # the interpreter has no bfloat16 products
CASES = {
    "additive, cross": {"kind": "additive", "m": 20, "rows": 1},
    "additive, causal behind a memory": {"kind": "additive", "causal": True, "m": 35, "hidden": 3, "rows": 1},
    "additive, causal, positions, padding, dropout": {
        **{"kind": "additive", "causal": True, "positions": True, "padded": True, "dropout": 0.3, "hidden": 2},
    },
    "additive, nothing to see": {"kind": "additive", "padded": "all", "hidden": 2, "rows": 1},
    "relu by count": {"kind": "relu", "norm": "count", "n": 34, "rows": 1},
    "relu by count, causal": {"kind": "relu", "norm": "count", "causal": True, "n": 34, "dropout": 0.3, "rows": 1},
    "relu by sum, causal, padding": {"kind": "relu", "norm": "sum", "causal": True, "padded": True},
    "relu by sum, cross": {
        **{"kind": "relu", "norm": "sum", "n": 35, "m": 50, "g": 2, "d": 5, "e": 19, "dropout": 0.2, "rows": 1},
    },
    "relu by count, positions, nothing to see": {
        **{"kind": "relu", "norm": "count", "positions": True, "causal": True, "padded": "all"},
    },
    "table, causal behind a memory, dropout": {"kind": "table", "causal": True, "m": 35, "dropout": 0.2},
    "table and products, padding": {"kind": "table", "mix": True, "padded": True},
    "factors and products, padding": {"kind": "factors", "mix": True, "padded": True, "dropout": 0.2, "rows": 1},
    "factors as wide as a tile, causal": {"kind": "factors", "causal": True, "columns": 16, "n": 34, "rows": 1},
}


def call_of(kind, n=18, m=None, g=1, d=6, e=4, hidden=4, norm="softmax", causal=False, padded=False, dropout=0.0,
            positions=False, mix=False, columns=7, rows=2):  # fmt: skip
    m = n if m is None else m

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE).requires_grad_()

    d = {"additive": hidden, "relu": d}.get(kind, d if mix else 0)
    q, k, v = normal(rows, 2, n, d), normal(rows, 2 if kind == "additive" else g, m, d), normal(rows, g, m, e)
    more = {"w": normal(2, d)} if kind == "additive" else {}
    if kind == "table":
        more = {"table": normal(2, m + 3, m + 3)} | ({"share": normal(2)} if mix else {})
    if kind == "factors":
        more = {"x": normal(rows, 2, n, -(-m // columns)), "y": normal(rows, 2, n, columns)}
    if positions:
        more |= {"at": torch.arange(n, device=DEVICE) + torch.tensor([[0], [3]], device=DEVICE)}
        more |= {"key_at": torch.arange(m, device=DEVICE) + torch.tensor([[2], [0]], device=DEVICE)}
    valid = None
    if padded:
        valid = torch.zeros(rows, m, dtype=torch.bool, device=DEVICE) if padded == "all" else some(rows, m)
    seed = torch.tensor(31, device=DEVICE) if dropout else None
    start = m - n if causal and not positions else 0
    return PairCall(q, k, v, **more, valid=valid, seed=seed, start=start, norm=norm, causal=causal, scale=0.7, dropout=dropout)


def results(call, backend):
    """Outputs and all gradients."""
    out = choose_backend("pair", backend, call).forward(call)
    up = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    variables = [x for x in call[:PAIR_VARIABLES] if x is not None and x.numel()]
    return [out, *torch.autograd.grad(out, variables, up)]


def typed(call, dtype):
    """The same call in another type."""
    variables = [x if x is None else x.detach().to(dtype).requires_grad_() for x in call[:PAIR_VARIABLES]]
    return PairCall(*variables, *call[PAIR_VARIABLES:])


def agree(found, expected, tol=2e-5):
    for a, b in zip(found, expected, strict=True):
        a = a.to(b.dtype)
        scale = b.abs().max().clamp_min(1)
        torch.testing.assert_close(a / scale, b / scale, rtol=tol, atol=tol)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_every_backend_computes_the_reference(backend, case):
    call = call_of(**CASES[case])
    agree(results(call, backend), results(typed(call, torch.float64), "reference"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["additive", "relu", "table", "factors"])
def test_half_precision_is_near_the_float64_reference(dtype, kind):
    call = typed(call_of(kind, n=17, rows=1, causal=True, mix=True, norm="sum" if kind == "relu" else "softmax"), dtype)
    found = results(call, "triton")
    assert {x.dtype for x in found} == {dtype}
    agree(found, results(typed(call, torch.float64), "reference"), 6 * torch.finfo(dtype).eps)


@pytest.mark.filterwarnings("ignore:overflow")
def test_sums_of_large_features_are_as_exact_as_tanh():
    """Exponentials of single tokens overflow, products of them do not have to."""
    call = call_of("additive", n=20, rows=1)
    features = torch.tensor([-40.0, -30.0, 12.0, 25.0, 40.0], device=DEVICE)
    q = features[torch.arange(20, device=DEVICE) % 5].view(1, 1, 20, 1).expand(1, 2, 20, 4).clone()
    k = 0.5 - features[torch.arange(20, device=DEVICE) // 4].view(1, 1, 20, 1).expand(1, 2, 20, 4)
    call = call._replace(q=q.requires_grad_(), k=k.clone().requires_grad_())
    agree(results(call, "triton"), results(typed(call, torch.float64), "reference"))


@pytest.mark.parametrize(("spec", "causal"), [("additive(hidden=2)", True), ("relu", False), ("relu(norm='sum')", True),
                                              ("synthesizer(form='random')", False),
                                              ("synthesizer(form='dense_factorised', mix='learned')", True)])  # fmt: skip
def test_layers_compute_the_same_by_every_backend(spec, causal):
    found = []
    for backend in backends("pair"):
        torch.manual_seed(0)
        options = {"causal": causal, "dropout": 0.2, "kv_heads": 1, "max_len": 30, "backend": backend}
        made = layer(spec, width=12, heads=2, **options).to(DEVICE).train()
        x = data(18, b=1, dtype=torch.float32)[..., :12].requires_grad_()
        torch.manual_seed(5)
        y = made(x, valid=some(1, 18))
        up = torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape)
        found.append([y, *torch.autograd.grad(y, [x, *made.parameters()], up)])
    for other in found[1:]:
        agree(other, found[0])


def test_what_kernels_cannot_compute_is_refused_with_a_sentence():
    call = call_of("table", n=20, rows=1)
    ragged = call._replace(at=torch.arange(20, device=DEVICE).expand(1, 20))
    with pytest.raises(ValueError, match="no gradient of a table for rows at positions of their own"):
        pair_attention(ragged, "triton")
    with torch.no_grad():
        torch.testing.assert_close(pair_attention(ragged, "triton"), pair_attention(call, "reference"))
    wide = call_of("relu", n=20, e=300)
    with pytest.raises(ValueError, match="heads of up to 256"):
        pair_attention(wide, "triton")


def test_second_derivatives_go_through_plain_operations():
    call = call_of("relu", n=18, rows=1, norm="sum")
    found = []
    for backend in ("triton", "reference"):
        out = choose_backend("pair", backend, call).forward(call)
        (first,) = torch.autograd.grad(out.square().sum(), call.q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), call.v)[0])
    agree(found[:1], found[1:], 1e-4)
