"""Ordinary and special tokens by one operation: what two passes and a choice of rows define."""

import pytest
import torch

import regard
from conftest import DEVICE
from regard.mixers import sparse
from regard.mixers.base import Places
from regard.ops.tile.two_streams import stream_attention
from regard.ops.triton_support import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
CASES = [
    ("longformer(window=9)", False, 2),
    ("longformer(window=9, first=3)", True, 4),
    ("longformer(window=20, first=1, at=[5, 66])", False, 4),
]


def passes(spec, causal, kv_heads, monkeypatch, at_once, dtype):
    """Return outputs, gradients of tokens and of weights."""
    torch.manual_seed(0)
    made = regard.layer(spec, width=32, heads=4, kv_heads=kv_heads, causal=causal).to(DEVICE, dtype)
    x = torch.randn(2, 90, 32, device=DEVICE).to(dtype).requires_grad_()
    found = []
    monkeypatch.setattr(sparse, "on_card", lambda _: at_once)
    monkeypatch.setattr(sparse, "stream_attention", lambda *a: found.append(stream_attention(*a)) or found[-1])
    y = made(x)
    assert [one is None for one in found] == ([False] if at_once else [])
    return [y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]


@pytest.mark.parametrize(("spec", "causal", "kv_heads"), CASES)
def test_one_operation_computes_both_streams(spec, causal, kv_heads, monkeypatch):
    found = passes(spec, causal, kv_heads, monkeypatch, True, torch.float32)
    expected = passes(spec, causal, kv_heads, monkeypatch, False, torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def test_gradients_of_both_streams_lie_side_by_side(monkeypatch):
    """One matrix for the backward pass of the joined projection: (b n heads_q + heads_k + heads_v, 2d)."""
    core = regard.core("longformer(window=5)", regard.Dims(width=32, heads=2))
    q, k, v = (torch.randn(1, 2, 40, 32, device=DEVICE, requires_grad=True) for _ in range(3))
    monkeypatch.setattr(sparse, "on_card", lambda _: True)
    places = Places.of(q[:, 0])
    out = core.read_all(q, k, v, places, places)
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert len({x.untyped_storage().data_ptr() for x in grads}) == 1
    assert [x.storage_offset() for x in grads] == [0, 64, 128]
    assert all(x.stride() == (40 * 192, 32, 192, 1) for x in grads)


def test_gradients_are_differentiable(monkeypatch):
    core = regard.core("longformer(window=5)", regard.Dims(width=8, heads=1))
    x = [torch.randn(1, 1, 30, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    found, places = [], Places.of(x[0][:, 0])
    for at_once in (True, False):
        monkeypatch.setattr(sparse, "on_card", lambda _, at_once=at_once: at_once)
        out = core.read_all(*x, places, places)
        (dq,) = torch.autograd.grad(out.square().sum(), x[:1], create_graph=True)
        found.append(torch.autograd.grad(dq.square().sum(), x))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
