"""A filter that slides over tokens as they lie: the same numbers as by PyTorch's convolution."""

import pytest
import torch

import regard.mixers.baselines as baselines
from conftest import DEVICE, compiled_passes
from regard import layer
from regard.blocks.conformer import ConvModule
from regard.mixers.base import Dims
from regard.ops import depthwise
from regard.ops.depthwise import slide_depthwise, slide_depthwise_plain


@pytest.mark.parametrize(
    ("m", "n", "before", "step", "taps"),
    [(50, 50, 6, 1, 7), (50, 50, 3, 1, 7), (56, 50, 0, 1, 7), (40, 40, 8, 4, 3), (3, 3, 6, 1, 7)],
)
def test_a_sliding_filter_is_the_convolution_of_float64(m, n, before, step, taps, monkeypatch):
    monkeypatch.setattr(depthwise, "TOKENS_SUMMED", 20)
    x = torch.randn(2, m, 20, device=DEVICE, requires_grad=True)
    weights = torch.randn(20, taps, device=DEVICE, requires_grad=True)
    exact = [y.detach().double().requires_grad_() for y in (x, weights)]
    found, expected = slide_depthwise(x, weights, n, before, step), slide_depthwise_plain(*exact, n, before, step)
    up = torch.randn_like(found)
    mine = torch.autograd.grad(found, (x, weights), up, retain_graph=True)
    theirs = torch.autograd.grad(expected, exact, up.double())
    for a, b in zip((found, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    (first,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("made", ["conv", "conv(kernel=3, dilation=2)", "conformer"])
def test_a_layer_by_the_kernels_is_as_by_the_convolution(made, causal, monkeypatch):
    """Of whole sequences, with padding, and streamed after other tokens."""
    dims = Dims(width=8, heads=1, causal=causal)
    mixer = (ConvModule(dims, kernel=5) if made == "conformer" else layer(made, width=8, heads=1, causal=causal)).to(DEVICE)
    x = torch.randn(2, 20, 8, device=DEVICE, requires_grad=True)
    valid = torch.rand(2, 20, device=DEVICE) < 0.7

    def passes():
        found = [mixer(x), mixer(x, valid=valid)]
        if causal:
            y, state = mixer.extend(mixer.start(2), x[:, :11])
            found += [y, mixer.extend(state, x[:, 11:])[0]]
        total = sum(y.square().sum() for y in found)
        return [*found, *torch.autograd.grad(total, [x, *mixer.parameters()])]

    expected = passes()
    calls = []
    monkeypatch.setattr(baselines, "takes_depthwise", lambda *_: calls.append(1) or True)
    for a, b in zip(passes(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert calls


@pytest.mark.parametrize("m", [9, 0])
def test_the_filter_is_an_operator(m):
    from regard.ops.depthwise_compiled import slide_operator, slide_operator_backward

    x, weights = torch.randn(2, m, 6, device=DEVICE, requires_grad=True), torch.randn(6, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(slide_operator, (x, weights, m, 2, 1))
    given = (torch.randn_like(x), x.detach(), weights.detach(), 2, 1)
    torch.library.opcheck(slide_operator_backward, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("made", ["conv", "conv(kernel=3, dilation=2)", "conformer"])
def test_a_compiled_layer_by_the_kernels_is_one_graph(made, monkeypatch):
    monkeypatch.setattr(baselines, "takes_depthwise", lambda *_: True)
    torch.compiler.reset()
    dims = Dims(width=8, heads=1)
    mixer = (ConvModule(dims, kernel=5) if made == "conformer" else layer(made, width=8, heads=1)).to(DEVICE)
    for found, expected in compiled_passes(mixer, (12, 33)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
