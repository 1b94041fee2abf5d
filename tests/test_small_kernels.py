"""Kernels of single steps of a mechanism: small systems, and the balance of a Sinkhorn sort."""

import pytest
import torch

from conftest import DEVICE
from regard.ops.spd_solve import _SpdSolve, spd_solve


@pytest.mark.parametrize(("n", "e"), [(5, 3), (20, 70)])
def test_small_systems_are_solved_as_by_linalg(n, e):
    s = torch.rand(2, n, n, dtype=torch.float64, device=DEVICE)
    a = s.mT @ s + 1e-3 * torch.eye(n, dtype=torch.float64, device=DEVICE)
    a, b = a.requires_grad_(), torch.randn(2, n, e, dtype=torch.float64, device=DEVICE, requires_grad=True)
    up = torch.randn(2, n, e, dtype=torch.float64, device=DEVICE)
    found, expected = _SpdSolve.apply(a, b), torch.linalg.solve(a, b)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(spd_solve(a, b), expected, rtol=1e-8, atol=1e-8)
    for x, y in zip(torch.autograd.grad(found, (a, b), up), torch.autograd.grad(expected, (a, b), up), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * float(y.abs().max()))
