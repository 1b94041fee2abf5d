"""Interpreted kernels use no memory but that of their tensors, at lengths that fill no tile."""

import pytest
import torch

from conftest import DEVICE
from regard import Dims, attend, core

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
guarded_memory = pytest.importorskip("memory_guard").guarded_memory
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the guard is one of Triton's interpreter")

H, G, D, E = 2, 1, 6, 5


@triton.jit
def _copy(X, Y, count, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(Y + i, tl.load(X + i, mask=i < count), mask=i < count)


@pytest.mark.parametrize(("count", "leaves"), [(20, False), (21, True)])
def test_the_guard_sees_an_address_outside(count: int, leaves: bool) -> None:
    x, y = torch.zeros(40)[:20].clone(), torch.zeros(64)
    with guarded_memory() as guard:
        _copy[(1,)](x, y, count, SIZE=32)
    assert bool(guard.outside) == leaves


CAUSAL = "linear", "retention", "gla", "performer(features=4)", "delta", "sparse(Local(5))"
NOT_CAUSAL = "linear", "efficient", "performer(features=4)"


@pytest.mark.parametrize(("spec", "causal"), [*((spec, True) for spec in CAUSAL), *((spec, False) for spec in NOT_CAUSAL)])
def test_no_kernel_leaves_its_tensors(spec: str, causal: bool) -> None:
    n = 37
    dims = Dims(H * D, H, kv_heads=G, key_dim=D, value_dim=E, max_len=n, causal=causal, backend="triton")
    made = core(spec, dims)
    q, k, v = (torch.randn(2, heads, n, size, requires_grad=True) for heads, size in ((H, D), (G, D + made.gates), (G, E)))
    with guarded_memory() as guard:
        out = attend(q, k, v, made, causal=causal)
        out.sum().backward()
    assert guard.launches
    assert not guard.outside
