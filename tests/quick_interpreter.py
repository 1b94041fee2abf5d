"""Triton's interpreter in less time: what it makes anew for every operation is kept, and a scan takes a row at a time.

The results are the same, see `test_quick_interpreter.py`. Without this the tests of kernels take twice the time.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

ADDRESSES = np.dtype(np.uint64)
plain_np_dtype, plain_patch, plain_scan = interpreter._get_np_dtype, interpreter._patch_lang, interpreter.ScanOps.generic_scan
plain_block, plain_tensor = tl.block_type.__init__, tl.tensor.__init__
scalar_np_dtype = cache(plain_np_dtype)


def np_dtype(dtype: tl.dtype) -> np.dtype:
    """The type of NumPy that holds a type of Triton: a look into a table, which was made for every look."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return ADDRESSES if isinstance(element, tl.pointer_type) else scalar_np_dtype(element)


@lru_cache(maxsize=None, typed=True)
def block_sizes(*sizes: int) -> tuple[tl.tuple, int]:
    """The sizes of a block as a tuple of Triton, and their product; sizes that no block has raise."""
    made = tl.tuple(sizes)
    return made, tl.core.validate_block_shape(made)


@cache
def constant_sizes(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
    """The sizes of a tensor as constants, and their product."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(int(np.prod(sizes)))


def init_block(self: tl.block_type, element_ty: tl.dtype, shape) -> None:
    self.element_ty = element_ty
    assert isinstance(shape, list | tl.tuple)
    self.shape, self.numel = block_sizes(*(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    if not self.shape:
        raise TypeError("0d block_type is forbidden")
    self.name = f"<{self.shape}, {element_ty}>"


def init_tensor(self: tl.tensor, handle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = constant_sizes(*(type.shape if type.is_block() else ()))


def scan_rows(self: interpreter.ScanOps, given: tuple) -> list:
    """Combine rows along the axis one after another: what combines two elements combines tensors of them."""
    data = [np.moveaxis(x.handle.data, self.axis, 0) for x in given]
    after = [x.copy() for x in data]
    for row in range(1, len(data[0])):
        before = [self.to_tensor(x[row - 1], own.dtype) for x, own in zip(after, given, strict=True)]
        here = [self.to_tensor(x[row], own.dtype) for x, own in zip(data, given, strict=True)]
        both = self.combine_fn.fn(*before, *here)
        for x, y in zip(after, both if isinstance(both, tuple) else (both,), strict=True):
            x[row] = y.handle.data.reshape(x[row].shape)
    return [self.to_tensor(np.moveaxis(x, 0, self.axis), own.dtype) for x, own in zip(after, given, strict=True)]


@cache
def patch_once() -> interpreter._LangPatchScope:
    """Make the functions of Triton's language interpreted ones for good; the scope that is returned restores nothing."""
    plain_patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    return interpreter._LangPatchScope()


def quicken() -> None:
    """Replace slow parts of Triton's interpreter in this process."""
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang = lambda _: patch_once()
    interpreter.ScanOps.generic_scan = scan_rows
    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    # Sums of integers are computed once more in 64 bits to find an overflow, and then nothing is said about it without `debug`.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
