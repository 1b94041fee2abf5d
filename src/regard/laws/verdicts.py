"""Verdicts of laws: what is broken, with numbers, or why a law does not apply."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor


class LawBroken(AssertionError):
    """Report a broken law: `what` happens, the same words at every size, the `numbers` that show it, and an error if one did.

    `raised` is that error.

    >>> from regard.laws import LawBroken
    >>> LawBroken("the output is not finite").what
    'the output is not finite'
    """

    def __init__(self, what: str, numbers: str = "", raised: str = "") -> None:
        super().__init__(f"{what}: {numbers}" if numbers else what)
        self.what, self.numbers, self.raised = what, numbers, raised


class DoesNotApply(Exception):
    """Report why a law has nothing to check.

    The reason is its one argument.

    >>> from regard.laws import DoesNotApply
    >>> str(DoesNotApply("it has no weights"))
    'it has no weights'
    """


def demand(kept: bool | Tensor, what: str, numbers: str | Callable[[], str] = "") -> None:
    """Raise LawBroken with `what` happens unless the condition is kept."""
    if not kept:
        raise LawBroken(what, numbers if isinstance(numbers, str) else numbers())


def agree(found: Tensor, wanted: Tensor, what: str, more: str = "", tol: float = 1e-9) -> None:
    """Raise LawBroken unless two tensors have the same shape, type and numbers, to a tolerance that is absolute and relative."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise LawBroken(what, _joined(f"{_kind(found)} for {_kind(wanted)}", more))
    if bool(torch.isclose(found, wanted, rtol=tol, atol=tol).all()):
        return
    raise LawBroken(what, _joined(_largest_difference(found.detach(), wanted.detach()), more))


def same_bits(found: Tensor, wanted: Tensor, what: str, more: str = "") -> None:
    """Raise LawBroken unless two tensors are equal in every bit."""
    if not torch.equal(found, wanted):
        numbers = _kind(found) if found.shape != wanted.shape else _largest_difference(found.detach(), wanted.detach())
        raise LawBroken(what, _joined(numbers, more))


def refuses(call: Callable[[], object], sentence: str, what: str) -> None:
    """Raise LawBroken unless a call raises a ValueError in which the sentence (a regular expression) is found."""
    try:
        call()
    except ValueError as error:
        demand(re.search(sentence, str(error)) is not None, what, f"the error is {str(error)!r}, without {sentence!r}")
        return
    raise LawBroken(what, f"there is no ValueError with {sentence!r}")


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _largest_difference(found: Tensor, wanted: Tensor) -> str:
    """Write the largest difference of two tensors, and where it is."""
    far = (found.double() - wanted.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    place = torch.unravel_index(far.argmax(), far.shape)
    index = [int(i) for i in place]
    a, b = (float(x[tuple(index)]) for x in (found, wanted))
    return f"off by {far.max():.3g} at {index} of {tuple(found.shape)}, {a:.6g} for {b:.6g}"
