"""Pickles that hold arrays, sparse matrices or lists of numbers and nothing else, read without NumPy's or SciPy's own loaders.

A pickle is a program: it calls whatever globals it names. Here six names are known, each bound to a class below that keeps
numbers and calls nothing; any other name ends the reading before what it names is even looked for. Imports no torch.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, NoReturn

import numpy as np

from regard.data.text_files import DataError

_NUMBERS = {"i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}
_SPARSE = ("data", "indices", "indptr")


class PickleRefusal(pickle.UnpicklingError):
    """Refuse a pickle that asks for more than arrays and lists."""


class _Stub:
    """Stand for a global of a pickle. Its state is refused unless a subclass reads it: the default would set any attribute."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        raise PickleRefusal(f"it gives a state to a {type(self).__name__.strip('_').lower()}")


class _Type(_Stub):
    """Stand for a type that is an argument of another call: ndarray, list."""


class _Dtype(_Stub):
    """Keep the type and the byte order of the numbers of an array."""

    def __init__(self, code: object = "", *_: object) -> None:
        if code not in _NUMBERS:
            raise PickleRefusal(f"it has an array of {code!r}, which is no type of numbers")
        self.code, self.order = str(code), "<"

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise PickleRefusal("it has an array in an unknown order of bytes")
        self.order = order


class _Array(_Stub):
    """Keep an array: its state is (version, shape, type, whether columns come first, bytes)."""

    array: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _Dtype):
            raise PickleRefusal("it has an array without type, shape and bytes")
        _, shape, kind, by_columns, raw = state
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise PickleRefusal("it has an array without a shape")
        if not isinstance(raw, str | bytes):
            raise PickleRefusal("it has an array of objects, not of numbers")
        data = raw.encode("latin1") if isinstance(raw, str) else raw  # a string of Python 2
        numbers = np.dtype(kind.order + kind.code)
        if len(data) != math.prod(shape) * numbers.itemsize:
            raise PickleRefusal(f"it has an array of shape {shape} and {len(data):,} bytes, which do not fit")
        self.array = np.frombuffer(data, numbers).reshape(shape, order="F" if by_columns else "C")


class _Matrix(_Stub):
    """Keep the fields of a sparse matrix by rows: its state is a dict."""

    fields: dict[str, Any] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise PickleRefusal("it has a sparse matrix without fields")
        self.fields = dict(state)


class _Lists(dict[Any, Any], _Stub):
    """Stand for a defaultdict: a dict whose argument, the type of its values, is dropped."""

    def __init__(self, *_: object) -> None:
        super().__init__()


_GLOBALS: dict[tuple[str, str], type] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    ("numpy", "ndarray"): _Type,
    ("numpy", "dtype"): _Dtype,
    **{(f"scipy.sparse.{module}", "csr_matrix"): _Matrix for module in ("csr", "_csr")},
    ("collections", "defaultdict"): _Lists,
    **{(builtins, "list"): _Type for builtins in ("__builtin__", "builtins")},
}


class _NumberReader(pickle.Unpickler):
    """Read a pickle whose globals are all in the table above."""

    def find_class(self, module: str, name: str) -> Any:
        found = _GLOBALS.get((module, name))
        if found is None:
            raise PickleRefusal(f"it names {module}.{name}, and arrays, sparse matrices and lists do not need that")
        return found

    def persistent_load(self, _: Any) -> NoReturn:
        raise PickleRefusal("it names an object outside of it")


def _read_pickle(raw: bytes, where: str) -> Any:
    try:
        return _NumberReader(io.BytesIO(raw), encoding="latin1").load()
    except PickleRefusal as error:
        raise DataError(f"{where} is refused: {error}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise DataError(f"{where} is not a whole pickle of numbers: {error}") from None


def pickled_array(raw: bytes, where: str) -> np.ndarray:
    """Read an array; `where` is the place that errors mention."""
    return _numbers_of(_read_pickle(raw, where), where)


def _numbers_of(found: object, where: str) -> np.ndarray:
    if not isinstance(found, _Array) or found.array is None:
        raise DataError(f"{where} holds no array of numbers")
    return found.array


def pickled_rows(raw: bytes, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Read a sparse matrix by rows: the ends of its rows, its columns, its numbers, and how many columns there are."""
    found = _read_pickle(raw, where)
    fields = found.fields if isinstance(found, _Matrix) else None
    shape = (fields.get("_shape") or fields.get("shape")) if fields is not None else None
    if (
        fields is None
        or not isinstance(shape, tuple)
        or len(shape) != 2
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise DataError(f"{where} holds no sparse matrix by rows (csr_matrix)")
    numbers, columns, ends = (_numbers_of(fields.get(name), f"{where}, {name}") for name in _SPARSE)
    whole = all(x.ndim == 1 for x in (numbers, columns, ends)) and columns.dtype.kind in "iu" and ends.dtype.kind in "iu"
    fits = whole and len(ends) == shape[0] + 1 and ends[0] == 0 and ends[-1] == len(columns) == len(numbers)
    if (
        not fits
        or (np.diff(ends.astype(np.int64)) < 0).any()
        or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1])
    ):
        raise DataError(f"{where}: its rows do not fit its shape of {shape[0]:,} x {shape[1]:,}")
    return ends.astype(np.int64), columns.astype(np.int64), numbers, shape[1]


def pickled_lists(raw: bytes, where: str) -> dict[int, list[int]]:
    """Read a dict of lists of integers by integers."""
    found = _read_pickle(raw, where)
    right = isinstance(found, dict) and all(
        type(key) is int and isinstance(own, list) and all(type(x) is int for x in own) for key, own in found.items()
    )
    if not right:
        raise DataError(f"{where} holds no lists of numbers by number")
    return dict(found)
