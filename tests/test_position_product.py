"""Products over positions, and gmlp by them: the same numbers as by plain operations."""

import pytest
import torch

from conftest import DEVICE
from regard import layer
from regard.mixers.attention_free import GMLP
from regard.ops import position_product as product


@pytest.mark.parametrize("triangle", [False, True])
def test_products_over_positions_are_those_of_float64(triangle, monkeypatch):
    """A triangle is multiplied in strips, the last of which is shorter."""
    monkeypatch.setattr(product, "_strips", lambda n, *_: [(0, 8), (8, 16), (16, n)] if triangle else [(0, n)])
    weight = torch.randn(20, 20, device=DEVICE, requires_grad=True)
    x = torch.randn(20, 12, device=DEVICE, requires_grad=True)
    exact = [y.detach().double().requires_grad_() for y in (weight, x)]
    found, expected = product.position_product(weight, x, triangle), product._plain(*exact, triangle)
    up = torch.randn_like(found)
    mine = torch.autograd.grad(found, (weight, x), up, retain_graph=True)
    theirs = torch.autograd.grad(expected, exact, up.double())
    for a, b in zip((found, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    (first,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gmlp_of_turned_tokens_is_gmlp(causal, autocast, monkeypatch):
    """Of whole sequences, with padding, and streamed on from there."""
    mixer = layer("gmlp", width=8, heads=1, causal=causal, max_len=30).to(DEVICE)
    torch.nn.init.normal_(mixer.weight)
    x = torch.randn(2, 20, 8, device=DEVICE, requires_grad=True)
    valid = torch.rand(2, 20, device=DEVICE) < 0.7

    def passes():
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            found = [mixer(x), mixer(x, valid=valid)]
            if causal:
                y, state = mixer.extend(mixer.start(2), x[:, :11])
                found += [y, mixer.extend(state, x[:, 11:])[0]]
        total = sum(y.float().square().sum() for y in found)
        return [*found, *torch.autograd.grad(total, [x, *mixer.parameters()])]

    expected = passes()
    calls = []
    monkeypatch.setattr(GMLP, "_turns", lambda *_: calls.append(1) or True)
    bound = 3e-2 if autocast else 1e-4
    for a, b in zip(passes(), expected, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).detach().norm()) <= bound * float(b.detach().norm())
    assert calls
