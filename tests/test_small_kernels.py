"""Kernels of single steps of a mechanism: small systems, and the balance of a Sinkhorn sort."""

import pytest
import torch

from conftest import DEVICE
from regard.mixers.sinkhorn import balanced, balanced_in_time
from regard.ops.balance import balance_matrices
from regard.ops.spd_solve import _SpdSolve, spd_solve
from regard.patterns.tiles import MASKED_SCORE


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


@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_are_balanced_as_by_plain_operations(in_time, masked):
    logits = torch.randn(2, 3, 19, 19, device=DEVICE)
    seen = torch.ones(19, 19, dtype=torch.bool, device=DEVICE)
    if masked:
        seen[5] = False
        seen[:, 5] = False
    if in_time:
        seen = seen.tril(-1)
    logits = logits.masked_fill(~seen, MASKED_SCORE).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    expected = balanced_in_time(4, exact) if in_time else balanced(4, exact, seen.expand_as(exact))
    found = balance_matrices(logits, 4, in_time)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    up = torch.randn_like(logits)
    (mine,), (theirs,) = torch.autograd.grad(found, logits, up), torch.autograd.grad(expected, exact, up.double())
    torch.testing.assert_close(mine.double(), theirs * seen, rtol=1e-4, atol=1e-5)
