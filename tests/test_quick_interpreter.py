"""What `quick_interpreter.py` puts in place of parts of Triton's interpreter gives the same as they do."""

import numpy as np
import pytest
import torch

from conftest import DEVICE
from regard.ops.triton_support import has_triton

if not has_triton() or DEVICE.type == "cuda":
    pytest.skip("needs Triton's interpreter, on a CPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter

import quick_interpreter as quick

SCALARS = [x for x in vars(tl).values() if type(x) is tl.dtype and x.name != "void"]


@triton.jit
def _compose(keep, add, keep_next, add_next):
    return keep * keep_next, add * keep_next + add_next


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


def tensor(values: np.ndarray) -> tl.tensor:
    return tl.tensor(interpreter.TensorHandle(values, tl.float32), tl.block_type(tl.float32, list(values.shape)))


@pytest.mark.parametrize("combine, count", [(_compose, 2), (_larger, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan_of_rows_is_one_of_elements(combine, count, axis):
    quick.patch_once()
    given = tuple(tensor(torch.randn(8, 4).numpy()) for _ in range(count))
    scan = interpreter.ScanOps(axis, combine, reverse=False)
    for found, plain in zip(quick.scan_rows(scan, given), quick.plain_scan(scan, given), strict=True):
        assert found.type == plain.type
        np.testing.assert_array_equal(found.handle.data, plain.handle.data)


def test_types_are_those_of_the_interpreter():
    assert len(SCALARS) > 10
    for scalar in SCALARS:
        for one in (scalar, tl.pointer_type(scalar), tl.block_type(scalar, [4, 2]), tl.block_type(tl.pointer_type(scalar), [8])):
            assert quick.np_dtype(one) == quick.plain_np_dtype(one)


@pytest.mark.parametrize("sizes", [[4], [1, 8], [2, 1, 16], [tl.constexpr(2), 4], tl.tuple([2, 2])], ids=str)
def test_blocks_and_tensors_are_those_of_the_interpreter(sizes):
    block, plain = tl.block_type(tl.int32, sizes), tl.block_type.__new__(tl.block_type)
    quick.plain_block(plain, tl.int32, sizes)
    assert block == plain and (block.name, block.numel) == (plain.name, plain.numel)
    found, expected = tl.tensor(None, block), tl.tensor.__new__(tl.tensor)
    quick.plain_tensor(expected, None, plain)
    assert found.shape.values == expected.shape.values and found.shape.type.name == expected.shape.type.name
    assert found.numel == expected.numel and found.dtype == expected.dtype and tl.tensor(None, tl.int32).shape.values == []


@pytest.mark.parametrize("sizes", [[], [3], [4.0], [1 << 30]])
def test_blocks_that_do_not_exist_are_refused(sizes):
    tl.block_type(tl.int32, [4])
    for init in (quick.init_block, quick.plain_block):
        with pytest.raises((TypeError, ValueError)):
            init(tl.block_type.__new__(tl.block_type), tl.int32, sizes)
