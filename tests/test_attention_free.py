"""Mixers without attention are their formulas, written as slowly as possible, gradients included."""

import math

import pytest
import torch
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

import regard.ops.fourier as kernel
from conftest import DEVICE, close, data
from regard import Can, Spec, layer


def build(spec, width=32, causal=False, max_len=64, dtype=torch.float64):
    torch.manual_seed(0)
    return layer(spec, width=width, heads=1, causal=causal, max_len=max_len).to(DEVICE, dtype).eval()


def check_same(f, g, x, mixer):
    """Outputs and all gradients agree to rounding."""
    inputs = [x.requires_grad_(), *mixer.parameters()]
    a, b = f(x), g(x)
    close(a, b)
    up = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for p, q in zip(*(torch.autograd.grad((y * up).sum(), inputs, materialize_grads=True) for y in (a, b)), strict=True):
        close(p, q)


def waves(n):
    """The matrix of the discrete Fourier transform."""
    at = torch.arange(n, dtype=torch.float64, device=DEVICE)
    return torch.exp(-2j * math.pi * at[:, None] * at / n)


@pytest.mark.parametrize("norm", ["ortho", "none"])
@pytest.mark.parametrize(("n", "width"), [(1, 32), (2, 1), (7, 5), (40, 32), (33, 2)])
def test_fnet_is_two_matrices_of_waves(norm, n, width):
    made = build(f"fnet(norm={norm!r})", width)
    size = math.sqrt(n * width) if norm == "ortho" else 1.0
    check_same(made, lambda x: (waves(n) @ x.to(torch.complex128) @ waves(width)).real / size, data(n, width=width), made)
    assert list(made.parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width"), [(1, 32), (2, 1), (7, 5), (40, 32), (33, 2)])
def test_a_kernel_writes_the_other_half_of_a_spectrum(n, width, dtype, monkeypatch):
    """The gradient is the same transform."""
    x = torch.randn(2, n, width, device=DEVICE).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    monkeypatch.setattr(kernel, "takes_spectrum", lambda x: x.dtype != torch.float64)
    for norm in ("ortho", "backward"):
        found, expected = kernel.fourier_mix(x, norm), kernel.fourier_mix(exact, norm)
        up = torch.randn_like(found)
        pairs = (found, expected), (*torch.autograd.grad(found, x, up), *torch.autograd.grad(expected, exact, up.double()))
        for a, b in pairs:
            assert a.dtype == dtype
            half = 8e-3 if DEVICE.type == "cpu" else 4e-3  # Triton's interpreter cuts bfloat16 off where a card rounds
            bound = 1e-6 if dtype == torch.float32 else half
            assert float((a - b).detach().norm()) <= bound * float(b.detach().norm())


def test_fnet_keeps_the_size_of_tokens_at_any_length():
    for n in (16, 256, 2048):
        x = data(n)
        assert 0.6 < build("fnet", max_len=None)(x).std() / x.std() < 0.8  # the other half of the waves is imaginary


def test_fnet_transforms_rows_of_equal_length_together(monkeypatch):
    seen, whole = [], kernel.fourier_mix
    monkeypatch.setattr(kernel, "fourier_mix", lambda x, norm: seen.append(tuple(x.shape)) or whole(x, norm))
    valid = torch.arange(12, device=DEVICE) < torch.tensor([5, 9, 5, 0, 9, 5], device=DEVICE)[:, None]
    build("fnet")(data(12, b=6), valid=valid.flip(1))
    assert seen == [(1, 0, 32), (3, 5, 32), (2, 9, 32)]


def test_the_gradient_of_fnet_costs_one_transform_and_keeps_nothing():
    """The transform of a gradient is that of a token: of real numbers, half of the spectrum."""
    x = data(40).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = build("fnet")(x)
    assert kept == []
    passes = []
    for call in (lambda: build("fnet")(x.detach()), lambda: y.backward(torch.ones_like(y))):
        with CountOps() as counted:
            call()
        passes.append([name for name in counted.names if "fft" in name])
    assert passes[0] == passes[1] != []


class CountOps(TorchDispatchMode):
    """Names of the operators that are called, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fnet_rounds_half_precision_once(dtype):
    x = data(300, dtype=dtype)
    truth = build("fnet", max_len=None)(x.double())
    assert (build("fnet", max_len=None)(x).double() - truth).abs().max() <= torch.finfo(dtype).eps * truth.abs().max()


def by_hand(made, x, causal):
    """gMLP and aMLP token by token."""
    n, half = x.shape[1], made.down.in_features
    u, v = gelu(made.up(x)).split(half, -1)
    v = made.norm(v)
    out = []
    for i in range(n):
        seen = range(i + 1 if causal else n)
        gate = made.bias[i] + sum(made.weight[i, j] * v[:, j] for j in seen)
        if made.size:
            q, k, value = made.qkv(x).chunk(3, -1)
            scores = torch.stack([(q[:, i] * k[:, j]).sum(-1) for j in seen], -1) / math.sqrt(made.size)
            weights = scores.softmax(-1)
            gate = gate + made.answer(sum(weights[:, j, None] * value[:, j] for j in seen))
        out.append(made.down(u[:, i] * gate))
    return torch.stack(out, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiny", [0, 8])
def test_gmlp_is_its_formula(causal, tiny, set_limits):
    set_limits(triangle_rows=7)  # several strips, the last one short
    made = build(f"gmlp(expand=3, tiny={tiny})", causal=causal)
    with torch.no_grad():
        made.weight.normal_()
        made.bias.normal_()
    check_same(made, lambda x: by_hand(made, x, causal), data(17), made)


def test_gmlp_begins_with_an_open_gate():
    for longest in (64, 1024):
        made, x = build("gmlp", max_len=longest), data(64)
        ungated = made.down(gelu(made.up(x)).chunk(2, -1)[0])
        assert 0 < (made(x) - ungated).norm() / ungated.norm() < 0.05


def test_causal_gmlp_has_no_weights_for_the_future():
    made = build("gmlp", causal=True)
    made(data(50)).square().sum().backward()
    assert made.weight.grad.triu(1).abs().max() == 0 and made.weight.grad.tril()[:50, :50].abs().min(0).values[0] > 0


def test_mlp_mixer_is_its_formula_with_zeros_behind_a_short_sequence():
    made = build("mlp_mixer(hidden=12)")

    def padded(x):
        longer = torch.cat([x, x.new_zeros(3, 64 - x.shape[1], 32)], 1)
        return torch.stack([made.down(gelu(made.up(longer[..., c]))) for c in range(32)], -1)[:, : x.shape[1]]

    for n in (1, 20, 64):
        check_same(made, padded, data(n), made)


def both_ways(specs):
    """Each of them, and its causal form where there is one."""
    forms = [(spec, causal) for spec in specs for causal in (False, True)]
    return [(spec, causal) for spec, causal in forms if not causal or Can.CAUSAL in Spec.of(spec).row.can]


@pytest.mark.parametrize(
    ("spec", "causal"), both_ways(["fnet", "gmlp(expand=1, tiny=4)", "mlp_mixer(hidden=8)", "conv", "window_fc", "rnn"])
)
def test_padding_may_reach_beyond_the_longest_sequence(spec, causal):
    """Only real tokens count towards max_len, and only they have weights."""
    made, x = build(spec, max_len=10, causal=causal), data(16)
    valid = torch.arange(16, device=DEVICE) % 2 == torch.tensor([0, 1, 0], device=DEVICE)[:, None]
    y = made(x, valid=valid)
    for row in range(3):
        close(y[row][valid[row]], made(x[row][valid[row]][None])[0])
    if causal:  # eight real tokens are in: two more, then padding alone, then one too many
        full = torch.cat([x[valid].reshape(3, 8, 32), data(2, seed=3)], 1)
        _, state = made.extend(made.start(3), x, valid)
        z, state = made.extend(state, data(2, seed=3))
        close(z, made(full)[:, 8:])
        _, plain = made.extend(made.start(3), full)
        for past in (state, plain):
            z, later = made.extend(past, x[:, :5], torch.zeros(3, 5, dtype=torch.bool, device=DEVICE))
            assert (z == 0).all() and later.t.tolist() == [10, 10, 10]
            with pytest.raises(ValueError, match="11 tokens, but this layer was built for max_len=10"):
                made.extend(later, x[:, :1])


def test_heads_change_nothing():
    x = data(20)
    for spec in ("fnet", "gmlp", "mlp_mixer"):
        torch.manual_seed(0)
        made = layer(spec, width=32, heads=8, max_len=64).to(DEVICE, torch.float64)
        assert torch.equal(made(x), build(spec)(x))
