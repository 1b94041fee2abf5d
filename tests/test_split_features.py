"""Keys and gates as parts of one tensor: their gradients are one tensor too."""

import pytest
import torch

from regard import Dims
from regard.mixers.base import Places
from regard.mixers.gated import GLA
from regard.ops.delta.unit_features import unit_keys
from regard.ops.split_features import joined_features, split_features

BASE = torch.randn(2, 3, 5, 16, dtype=torch.float64)


def test_neighbours_are_joined_without_a_copy() -> None:
    whole = BASE.clone()
    joined = joined_features(whole[..., :10], whole[..., 10:])
    assert joined.data_ptr() == whole.data_ptr() and torch.equal(joined, whole)


@pytest.mark.parametrize("parts", [(BASE[..., :10].clone(), BASE[..., 10:]), (BASE[..., :9], BASE[..., 10:]), (BASE, BASE)])
def test_others_are_copied(parts) -> None:
    assert torch.equal(joined_features(*parts), torch.cat(parts, -1))


def test_a_split_has_the_gradients_of_slices() -> None:
    x = BASE.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: split_features(x, 10), x)
    assert torch.autograd.gradgradcheck(lambda x: [y**3 for y in split_features(x, 10)], x)


def test_gradients_of_keys_and_gates_are_not_copied(monkeypatch) -> None:
    pytest.importorskip("triton")
    dims = Dims(width=32, heads=2, causal=True, backend="triton")
    core = GLA(dims)
    q, k, v = (torch.randn(1, 2, 40, width) for width in (16, 32, 16))
    places = Places(torch.arange(40).expand(1, 40), None)
    wanted = [x.clone().double().requires_grad_() for x in (q, k, v)]
    GLA(Dims(width=32, heads=2, causal=True, backend="torch")).scan_all(*wanted, places).sum().backward()
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    out = core.scan_all(*own, places).sum()
    monkeypatch.setattr(torch, "cat", None)  # a copy would call it
    out.backward()
    for x, y in zip(own, wanted, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("silu", [True, False])
def test_unit_keys_are_unit_features_and_gates(silu: bool) -> None:
    pytest.importorskip("triton")
    found = []
    for fused in (True, False):
        x = BASE.transpose(1, 2).float().requires_grad_()
        keys, gates = unit_keys(x, 14, silu=silu, fused=fused)
        total = keys.sin().sum() + (gates * gates).sum()
        once = torch.autograd.grad(total, x, retain_graph=True)[0]
        grad = torch.autograd.grad(total, x, create_graph=True)[0]
        found.append([keys, gates, once, torch.autograd.grad(grad.square().sum(), x)[0]])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)
