"""Kernels around linear attention against plain operations in float64: features of positions, running softmax, gated merges."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conftest import DEVICE
from regard.ops.gated_merge import GatedMerge, gated_merge_plain
from regard.ops.linear.position_features import position_features, position_features_plain
from regard.ops.linear.running_softmax import running_softmax, running_softmax_plain
from regard.ops.linear.wave_features import lifted_ratio, lifted_ratio_plain, wave_features, wave_features_plain

pytest.importorskip("triton")
B, H, G, N, D = 2, 4, 2, 37, 6


def by_token(heads: int, width: int) -> Tensor:
    """(b h n d), with the heads of a token side by side."""
    return torch.randn(B, N, heads, width, device=DEVICE).transpose(1, 2)


def agree(fast: Callable, plain: Callable, given: list[Tensor], error: float = 1e-5) -> None:
    """Compare results, gradients, and the gradients of a gradient, of functions that return one tensor or several."""
    mine = [x.requires_grad_() for x in given]
    exact = [x.detach().double().requires_grad_() for x in given]
    found, expected = (y if isinstance(y, tuple) else (y,) for y in (fast(*mine), plain(*exact)))
    made = [i for i, y in enumerate(expected) if y.requires_grad]
    up = [torch.randn_like(expected[i]) for i in made]
    grads = torch.autograd.grad([found[i] for i in made], mine, [g.to(found[i].dtype) for g, i in zip(up, made, strict=True)])
    exact_grads = torch.autograd.grad([expected[i] for i in made], exact, up)
    for i, (a, b) in enumerate(zip((*found, *grads), (*expected, *exact_grads), strict=True)):
        assert a.isfinite().equal(b.isfinite()), i
        a, b = a.double().nan_to_num(), b.nan_to_num()
        assert (a - b).norm() <= error * b.norm() + 1e-30, i
    (first,) = torch.autograd.grad(fast(*mine)[0].square().sum(), mine[0], create_graph=True)
    assert first.requires_grad


def test_features_turn_with_the_position() -> None:
    at = torch.randint(0, 90, (B, N), device=DEVICE)
    agree(lambda x: position_features(x, at, 0.017, True), lambda x: position_features_plain(x, at, 0.017), [by_token(H, D)])


def test_positions_of_all_rows_may_be_one_and_features_of_float16_are_wide() -> None:
    at, x = torch.arange(N, device=DEVICE).expand(B, N), by_token(H, D).half().contiguous()
    found = position_features(x, at, 0.02, True)
    assert found.dtype == torch.float32
    assert (found.double() - position_features_plain(x.double(), at, 0.02)).norm() <= 1e-6 * found.norm()


def test_outputs_are_merged_by_gates_of_heads() -> None:
    agree(GatedMerge.apply, gated_merge_plain, [by_token(H, D), by_token(H, D).contiguous(), torch.randn(H, device=DEVICE)])


@pytest.mark.parametrize("padded", [False, True])
def test_queries_mix_softmaxes_over_the_tokens_so_far(padded: bool) -> None:
    """Behind earlier tokens and behind none; one key rises far above all before it."""
    valid = None
    if padded:
        valid = torch.rand(B, N, device=DEVICE) > 0.3
        valid[0, :3] = False
    k = by_token(G, D)
    k[0, 0, 20, 1] = 90.0
    first_z, top = torch.rand(B, G, D, device=DEVICE) + 1, torch.randn(B, G, D, device=DEVICE)
    first_z[0], top[0] = 0, -torch.inf
    seen = top > -torch.inf  # sums of no token have no unit, and no gradient
    agree(
        lambda q, k, z: tuple(running_softmax(q, k, z * seen, top, valid)),
        lambda q, k, z: tuple(running_softmax_plain(q, k, z * seen, top.double(), valid)),
        [by_token(H, D), k, first_z],
    )


@pytest.mark.parametrize("padded", [False, True])
def test_waves_are_those_of_unit_vectors(padded: bool) -> None:
    """Of tokens that are long, short and zero; angles of many turns."""
    directions = 5 * torch.randn(21, D, device=DEVICE)
    valid = torch.rand(B, N, device=DEVICE) > 0.3 if padded else None
    x = by_token(H, D)
    x[0, 0, :2] *= 1e-8
    x[0, 1] *= 1e4
    agree(lambda x: wave_features(x, directions, valid), lambda x: wave_features_plain(x, directions, valid), [x], 2e-5)


def test_norms_are_lifted_to_a_floor() -> None:
    out, norm, floor = by_token(H, D), torch.randn(B, H, N, 1, device=DEVICE), torch.rand(B, H, N, 1, device=DEVICE)
    norm[0, :, 3:6], floor[0, :, 3:6] = -1.0, 0.0
    agree(lifted_ratio, lifted_ratio_plain, [out, norm, floor])
