"""Kernels of exponential random features against plain operations in float64: features, running maxima, gradients."""

import pytest
import torch
from torch import Tensor

from conftest import DEVICE
from regard.ops.linear.exp_feature_op import (
    ExpMap,
    exp_kernels_fit,
    exp_key_features,
    exp_keys_at_once,
    exp_query_features,
    plain_exponents,
)

pytest.importorskip("triton")
B, H, G, N, D, F = 2, 4, 2, 37, 6, 21


def tokens(heads: int) -> Tensor:
    return torch.randn(B, heads, N, D, dtype=torch.float64, device=DEVICE)


def maps(bounded: bool) -> ExpMap:
    directions = 2 * torch.randn(F, D, dtype=torch.float64, device=DEVICE)
    return ExpMap(directions, torch.linspace(-0.3, 0.3, G, dtype=torch.float64, device=DEVICE) if bounded else None)


def in_float(x: Tensor, by: ExpMap) -> tuple[Tensor, ExpMap]:
    bound = None if by.log_norm is None else by.log_norm.float().requires_grad_()
    return x.float().requires_grad_(), ExpMap(by.directions.float(), bound)


def in_double(x: Tensor, by: ExpMap) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Exponents in plain operations, and what they depend on."""
    x, most, leaves = x.clone().requires_grad_(), None, []
    if by.log_norm is not None:
        bound = by.log_norm.clone().requires_grad_()
        most = (2 * bound).exp().repeat_interleave(x.shape[1] // G)[:, None, None]
        leaves = [bound]
    return x, plain_exponents(x, by.directions, most), [x, *leaves]


def near(found: list[Tensor], exact: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert (a.double() - b).norm() <= 1e-5 * b.norm(), i


def leaves_of(x: Tensor, by: ExpMap) -> list[Tensor]:
    return [x] if by.log_norm is None else [x, by.log_norm]


@pytest.mark.parametrize("bounded", [False, True])
def test_queries_have_a_softmax_over_features(bounded: bool) -> None:
    data, by = tokens(H), maps(bounded)
    x, fast = in_float(data, by)
    assert exp_kernels_fit(x)
    phi = exp_query_features(x, fast)
    _, logs, leaves = in_double(data, by)
    exact = torch.softmax(logs, -1)
    grads = torch.autograd.grad(phi.sin().sum(), leaves_of(x, fast))
    near([phi, *grads], [exact, *torch.autograd.grad(exact.sin().sum(), leaves)])


@pytest.mark.parametrize("bounded", [False, True])
def test_keys_are_in_units_of_the_largest_exponent_so_far(bounded: bool) -> None:
    data, by = tokens(G), maps(bounded)
    valid = torch.rand(B, N, device=DEVICE) > 0.2
    valid[0, :3] = False
    first = torch.tensor([[-torch.inf, 0.5], [9.0, -2.0]], device=DEVICE).unsqueeze(-1)
    x, fast = in_float(data, by)
    phi, decay, top = exp_key_features(x, fast, first, valid)
    _, logs, leaves = in_double(data, by)
    logs = logs.masked_fill(~valid[:, None, :, None], -torch.inf)
    tops = torch.cat([first.double(), logs.detach().amax(-1)], 2).cummax(2)[0]
    unit = tops[:, :, 1:, None].masked_fill(tops[:, :, 1:, None] == -torch.inf, 0)
    exact = (logs - unit).exp()
    rise = (tops[:, :, :-1] - tops[:, :, 1:]).nan_to_num(0.0, neginf=0.0).unsqueeze(-1)
    grads = torch.autograd.grad(phi.sin().sum(), leaves_of(x, fast))
    near([phi, decay, top, *grads], [exact, rise, tops[:, :, -1:], *torch.autograd.grad(exact.sin().sum(), leaves)])


def test_keys_at_once_are_in_units_of_the_largest_exponent() -> None:
    data, by = tokens(G), maps(True)
    first = torch.full((B, G, 1), -torch.inf, device=DEVICE)
    x, fast = in_float(data, by)
    phi, top = exp_keys_at_once(x, fast, first, None)
    _, logs, leaves = in_double(data, by)
    largest = logs.detach().amax((2, 3))
    exact = (logs - largest[:, :, None, None]).exp()
    grads = torch.autograd.grad(phi.sin().sum(), leaves_of(x, fast))
    near([phi, top, *grads], [exact, largest.unsqueeze(-1), *torch.autograd.grad(exact.sin().sum(), leaves)])


def test_gradients_of_gradients_are_those_of_plain_operations() -> None:
    data, by = tokens(H), maps(True)
    each = []
    for x, logs, leaves in (in_double(data, by),):
        exact = torch.softmax(logs, -1)
        grads = torch.autograd.grad(exact.sin().sum(), leaves, create_graph=True)
        each.append(torch.autograd.grad(sum(g.square().sum() for g in grads), x)[0])
    x, fast = in_float(data, by)
    grads = torch.autograd.grad(exp_query_features(x, fast).sin().sum(), leaves_of(x, fast), create_graph=True)
    near(list(torch.autograd.grad(sum(g.square().sum() for g in grads), x)), each)
