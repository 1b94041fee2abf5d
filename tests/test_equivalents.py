"""A convolution is attention: from any Conv2d, a layer with the same outputs and the same gradients, to rounding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import DEVICE, close
from regard.analysis.equivalents import ConvAttention, Offsets, conv_as_attention
from regard.analysis.probe import attention_matrix
from regard.mixers.attend import attend
from regard.mixers.base import Dims

odd, size = st.sampled_from([1, 3, 5]), st.integers(1, 9)


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Conv2d:
    kernel = draw(odd), draw(odd)
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), st.tuples(st.integers(0, 4), st.integers(0, 4))))
    groups, dilation = draw(st.integers(1, 3)), (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    ins, outs, bias = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3)), draw(st.booleans())
    stride = 1 if padding == "same" else (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    options = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups, "bias": bias}
    return nn.Conv2d(ins, outs, kernel, **options).to(DEVICE, torch.float64)


def image(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE, dtype)


def grown(made: ConvAttention, kernel: Tensor, groups: int) -> Tensor:
    """What the gradient of a kernel is in the layer's output projection, where its group's channels are."""
    weight = made.out.weight if made.out.weight.grad is None else made.out.weight.grad
    slices = weight.view(groups, len(kernel) // groups, -1, groups, kernel.shape[1])
    own = torch.stack([slices[g, :, :, g] for g in range(groups)]).flatten(0, 1)
    return own.transpose(1, 2).reshape_as(kernel)


@given(convolutions(), size, size, st.integers(0, 2))
@settings(max_examples=60)
def test_a_convolution_is_attention(conv: nn.Conv2d, height: int, width: int, batch: int) -> None:
    made, x = conv_as_attention(conv), image(batch, conv.in_channels, height, width).requires_grad_()
    try:
        expected = conv(x)
    except RuntimeError:  # the image is smaller than the kernel
        with pytest.raises(ValueError, match="smaller than the kernel"):
            made(x)
        return
    found = made(x)
    close(found, expected)
    cotangent = image(*expected.shape)
    (wanted,) = torch.autograd.grad(expected, x, cotangent, retain_graph=True)
    (got,) = torch.autograd.grad(found, x, cotangent, retain_graph=True)
    close(got, wanted)
    expected.backward(cotangent)
    found.backward(cotangent)
    close(grown(made, conv.weight, conv.groups), conv.weight.grad)
    if conv.bias is not None:
        close(made.out.bias.grad, conv.bias.grad)


def test_each_head_looks_at_its_neighbour_and_all_pixels_compete() -> None:
    made = conv_as_attention(nn.Conv2d(1, 1, (3, 5), padding=(1, 2)).double().to(DEVICE))
    q, k = made.places(4, 6)
    weights = attention_matrix(made.core, q, k, causal=False)[0]
    assert weights.shape == (15, 4 * 6, 6 * 10)
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    best = weights.argmax(-1)
    for head, (down, right) in enumerate((a, b) for a in (-1, 0, 1) for b in (-2, -1, 0, 1, 2)):
        meant = [(1 + i + down) * 10 + 2 + j + right for i in range(4) for j in range(6)]
        assert best[head].tolist() == meant


@pytest.mark.parametrize("sharpness", [4.0, 8.0, 16.0])
def test_the_error_is_four_neighbours(sharpness: float) -> None:
    """All pixels that a head does not mean weigh 4 e^-sharpness and little more: what the default is chosen by."""
    made = conv_as_attention(nn.Conv2d(1, 1, 3).double().to(DEVICE), sharpness=sharpness)
    weights = attention_matrix(made.core, *made.places(9, 9), causal=False)[0, 4, 24]  # in the middle
    rest = weights.sum() - weights.max()
    assert rest.item() == pytest.approx(4 * math.exp(-sharpness), rel=0.1)
    assert 4 * math.exp(-40) < torch.finfo(torch.float64).eps / 2


def test_it_learns_from_there_on() -> None:
    """A convolution with its kernel in the wrong place is found by moving the heads."""
    torch.manual_seed(0)
    teacher, x = nn.Conv2d(1, 1, 3, padding=1).to(DEVICE), image(4, 1, 8, 8, dtype=torch.float32)
    made = conv_as_attention(copy.deepcopy(teacher), sharpness=1.0)
    wanted, losses = teacher(x).detach(), []
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    for _ in range(40):
        loss = (made(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_strips_change_nothing(set_limits) -> None:
    made, x = (
        conv_as_attention(nn.Conv2d(2, 3, 3, padding=1).double().to(DEVICE), sharpness=1.0),
        image(2, 2, 7, 6).requires_grad_(),
    )
    whole = made(x)
    wanted = torch.autograd.grad(whole.square().sum(), [x, *made.parameters()])
    set_limits(softmax_strip=5000)
    strips = made(x)
    close(strips, whole)
    for got, want in zip(torch.autograd.grad(strips.square().sum(), [x, *made.parameters()]), wanted, strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keeps_the_type(dtype: torch.dtype) -> None:
    """Each layer rounds once or twice: no further from the truth than the convolution, to a unit or two of its last place."""
    conv = nn.Conv2d(3, 4, 3, padding=1).to(DEVICE, dtype)
    made, x = conv_as_attention(conv), image(2, 3, 20, 20, dtype=dtype)
    assert {p.dtype for p in made.parameters()} == {dtype}
    truth, found = conv_as_attention(copy.deepcopy(conv).double())(x.double()), made(x)
    assert found.dtype == dtype
    assert (found - truth).abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max()


def test_a_copy_of_its_own() -> None:
    """The convolution is read, not shared; a checkpoint repeats the layer."""
    conv = nn.Conv2d(2, 2, 3, padding=1).double().to(DEVICE)
    made, x = conv_as_attention(conv), image(1, 2, 5, 5)
    before, other = made(x), conv_as_attention(nn.Conv2d(2, 2, 3, padding=1).double().to(DEVICE))
    nn.init.zeros_(conv.weight)
    close(made(x), before)
    other.load_state_dict(made.state_dict())
    close(other(x), before)


def test_compiles_without_a_graph_break() -> None:
    made, x = conv_as_attention(nn.Conv2d(2, 2, 3, padding=1).double().to(DEVICE)), image(1, 2, 5, 5)
    close(torch.compile(made, fullgraph=True, backend="aot_eager")(x), made(x))


def test_offsets_in_one_dimension() -> None:
    """The core knows nothing of images: on a line, two heads shift a sequence by one and by minus two."""
    dims = Dims(width=3, heads=2, kv_heads=1, key_dim=1, value_dim=3)
    core, at = Offsets(dims, torch.tensor([[1.0], [-2.0]])).double(), torch.arange(9.0, dtype=torch.float64)[None, None, :, None]
    v = torch.randn(1, 1, 9, 3, dtype=torch.float64)
    out = attend(at.expand(1, 2, 9, 1), at, v, core)
    close(out[0, 0, :-1], v[0, 0, 1:])
    close(out[0, 1, 2:], v[0, 0, :-2])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Conv2d(1, 1, 2), r"even kernel .* \(2, 2\) must be odd"),
        (lambda: nn.Conv2d(1, 1, (3, 4)), r"even kernel"),
        (lambda: nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), r"'zeros', not 'circular'"),
        (lambda: nn.Conv1d(1, 1, 3), "takes an nn.Conv2d, not Conv1d"),
    ],
)
def test_refuses_in_a_sentence(make, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        conv_as_attention(make())


def test_refuses_bad_numbers_and_shapes() -> None:
    conv = nn.Conv2d(2, 2, 3)
    for sharpness in (0, -1.0, True, float("inf"), "sharp"):
        with pytest.raises(ValueError, match="sharpness must be a positive number"):
            conv_as_attention(conv, sharpness=sharpness)  # type: ignore[arg-type]
    for shape in ((2, 5, 5), (1, 3, 5, 5)):
        with pytest.raises(ValueError, match=r"\(batch, 2, height, width\) is needed"):
            conv_as_attention(conv)(torch.randn(shape))
    with pytest.raises(ValueError, match=r"offsets have shape \(2, 1\), but \(heads, axes\) = \(4, 2\)"):
        Offsets(Dims(width=8, heads=4), torch.zeros(2, 1))
