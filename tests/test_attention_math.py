"""Facts of the lectures, shown by running them: each one a number that has to come out. The examples draw the same facts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from conftest import DEVICE, close
from regard import Dims, attend, core, layer
from regard.analysis.probe import influence

N, WIDTH = 41, 4


def counted(f: Callable[..., Tensor], *shapes: tuple[int, int]) -> int:
    """Multiplications of a product of matrices: a FLOP is a multiplication or an addition, and PyTorch counts both."""
    with FlopCounterMode(display=False) as counter:
        f(*(torch.empty(shape, device="meta") for shape in shapes))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(("d", "e"), [(64, 64), (16, 48), (1, 8)])
@pytest.mark.parametrize("n", [1, 24, 1000])
def test_the_order_of_multiplication(n: int, d: int, e: int) -> None:
    """(q k^T) v and q (k^T v) are the same for (d + e) n^2 and 2 d e n multiplications, exactly."""
    q, k, v = (torch.randn(n, size, dtype=torch.float64) for size in (d, d, e))
    torch.testing.assert_close((q @ k.mT) @ v, q @ (k.mT @ v), rtol=0, atol=1e-13 * n * d)
    shapes = (n, d), (n, d), (n, e)
    assert counted(lambda q, k, v: (q @ k.mT) @ v, *shapes) == (d + e) * n**2
    assert counted(lambda q, k, v: q @ (k.mT @ v), *shapes) == 2 * d * e * n


@pytest.mark.parametrize(("d", "e"), [(64, 64), (16, 48)])
def test_the_orders_cost_the_same_at_one_length(d: int, e: int) -> None:
    meet = 2 * d * e // (d + e)
    for n in (meet - 1, meet, meet + 1):
        shapes = (n, d), (n, d), (n, e)
        full, cheap = (counted(f, *shapes) for f in (lambda q, k, v: (q @ k.mT) @ v, lambda q, k, v: q @ (k.mT @ v)))
        assert (full > cheap) - (full < cheap) == (n > meet) - (n < meet)


def test_a_kernel_mechanism_multiplies_in_the_cheap_order() -> None:
    """Not only in principle: n more tokens cost the `linear` core the same whatever n is, and softmax (d + e) n^2."""

    def work(name: str, n: int) -> int:
        made, dims = core(name, Dims(width=32, heads=4)), Dims(width=32, heads=4)
        with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            attend(*(torch.empty(1, 4, n, dims.d, device="meta") for _ in range(3)), made.to("meta"))
        return int(counter.get_total_flops()) // 2

    assert work("softmax", 512) == 4 * (8 + 8) * 512**2
    assert work("linear", 4096) - work("linear", 2048) == work("linear", 2048) - work("linear", 0)
    assert 2 * 8 * 8 * 4 * 2048 <= work("linear", 2048) <= 1.2 * (2 * 8 * 8 * 4 * 2048)  # and the sum of keys: d more a token


@pytest.mark.parametrize("d", [4, 64, 1024])
def test_the_variance_of_scores_is_d(d: int) -> None:
    """A sum of d products of independent unit variables: mean 0, variance d, fourth moment 3 d^2 + 6 d."""
    count = 20_000
    q, k = torch.randn(2, count, d, dtype=torch.float64)
    s = (q * k).sum(-1)
    error = math.sqrt((3 * d**2 + 6 * d - d**2) / count)  # standard error of the mean of s^2
    assert abs(s.square().mean().item() - d) < 4 * error
    assert abs((s * d**-0.5).square().mean().item() - 1) < 4 * error / d
    assert abs(s.mean().item()) < 4 * math.sqrt(d / count)


def test_without_scaling_softmax_saturates() -> None:
    """With scale=1, the lecture's first form, the median query gives one key nearly all and passes on no gradient."""
    dims, found = Dims(width=1024, heads=1), {}
    q, k = torch.randn(2, 1, 1, 256, 1024, dtype=torch.float64)
    for spec in ("softmax", "softmax(scale=1.0)"):
        weights = attend(q, k, torch.eye(256, dtype=torch.float64)[None, None], core(spec, dims))[0, 0]
        entropy = -(weights * weights.clamp_min(1e-300).log2()).sum(-1)
        square = weights.square().sum(-1)
        slope = (square - 2 * (weights**3).sum(-1) + square.square()).clamp_min(0).sqrt()  # of diag(a) - a a^T
        found[spec] = [x.median().item() for x in (weights.max(-1).values, entropy, slope)]
    (largest, entropy, slope), (one, none, flat) = found.values()
    assert largest < 0.1 < 0.95 < one
    assert none < 0.1 < 7 < entropy <= 8
    assert flat < slope / 10


def test_the_norm_of_the_softmax_jacobian() -> None:
    """The formula that the facts above lean on."""
    s = torch.randn(9, dtype=torch.float64)
    jacobian, a = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), s), s.softmax(-1)
    assert isinstance(jacobian, Tensor)
    close(jacobian, a.diag() - a[:, None] * a)
    square = a.square().sum()
    close(jacobian.norm(), (square - 2 * (a**3).sum() + square.square()).sqrt())


class Conv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


def reach(layers: list[nn.Module]) -> tuple[int, int]:
    """How far the middle output sees to the left and to the right, and that it sees all in between."""
    x = torch.randn(N, WIDTH, dtype=torch.float64, device=DEVICE)
    seen = (influence(nn.Sequential(*layers).to(DEVICE, torch.float64), x)[N // 2] > 0).nonzero().flatten()  # type: ignore[arg-type]
    low, high = int(seen.min()), int(seen.max())
    assert len(seen) == high - low + 1
    return N // 2 - low, high - N // 2


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("w", [1, 2, 4])
def test_windows_add_up_like_kernels(w: int, depth: int) -> None:
    """Layers of Local(w) see depth (w - 1) to each side: exactly what as many convolutions with kernel 2 w - 1 see."""
    local = [layer(f"Local({w})", width=WIDTH, heads=1) for _ in range(depth)]
    kernels = [Conv(WIDTH, WIDTH, 2 * w - 1, padding=w - 1) for _ in range(depth)]
    assert reach([*local]) == reach([*kernels]) == (depth * (w - 1),) * 2


def test_a_causal_window_looks_back_only() -> None:
    assert reach([layer("Local(4)", width=WIDTH, heads=1, causal=True) for _ in range(3)]) == (9, 0)


def test_dilation_doubles_what_a_layer_adds() -> None:
    """Steps 1, 2, 4 with w = 3: 2 (1 + 2 + 4) to each side, without a hole."""
    stack: list[nn.Module] = [layer(f"Dilated(3, {2**depth})", width=WIDTH, heads=1) for depth in range(3)]
    assert reach(stack) == (14, 14)


def test_full_attention_sees_all_in_one_layer() -> None:
    assert reach([layer("softmax", width=WIDTH, heads=1)]) == (N // 2, N // 2)
