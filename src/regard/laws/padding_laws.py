"""Laws of padding: it is as if absent, wherever it lies and whatever it holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from regard.laws.law_case import LAW_HEADS, Case
from regard.laws.law_table import each, law
from regard.laws.verdicts import agree, demand
from regard.mixers.attend import attend
from regard.mixers.base import Can, pool_tokens

_POISON = (math.nan, math.inf, -math.inf, 1e4, -1e10, 1e20, 3e38)
_ADVICE = (
    "in `push` fill keys and values with 0 where `~places.valid`, and leave those tokens out of every sum, count and position "
    "(`places.at` counts real tokens). Without that, leave Can.PADDING out"
)


@law(_ADVICE, Can.PADDING, given=each(where=("right", "left", "holes")))
def padding_is_absent(case: Case, where: str = "right", n: int = 50) -> None:
    """Real tokens get what they get without padding, outputs at padding are zero, and so are gradients.

    `case` has the mechanism, padding lies `where`: "right", "left" or "holes", `n` is the number of tokens.

    >>> from regard.laws import Case, padding_is_absent
    >>> padding_is_absent(Case("Local(4)"), where="left", n=16)
    """
    count = n * 31 // 50
    order = torch.arange(n, device=case.device).expand(2, -1)
    valid = {"right": order < count, "left": order >= n - count, "holes": case.some(2, n)}[where]
    for mode in case.modes():
        m, x = case.build(**mode), case.data(n, b=2)
        z = torch.where(valid[..., None], x, 1e3).requires_grad_()
        y, (_, real) = m(z, valid=valid), pool_tokens(x, valid, m.rate)
        assert real is not None
        agree(y, m(x, valid=valid), "the content of padding changes an output")
        demand((y[~real] == 0).all(), "an output at padding is not zero")
        for row in range(2):
            alone = m(x[row][valid[row]][None])[0]
            agree(y[row][real[row]], alone, "real tokens get another output than without padding", f"padding: {where}")
        y.square().sum().backward()
        assert z.grad is not None
        demand((z.grad[~valid] == 0).all(), "padding has a gradient")
        demand(z.grad[valid].abs().sum() > 0, "real tokens have no gradient")
        if not case.control and not mode["causal"]:
            demand(not torch.allclose(y[real], m(x)[real]), "`valid` changes nothing")  # the same tokens would have counted


@law(_ADVICE + ". Answer 0 where nothing can be seen", Can.PADDING)
def padded_rows_are_zero(case: Case, n: int = 40) -> None:
    """A row of nothing but padding has outputs and gradients of zero, and no other row is worse for it.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, padded_rows_are_zero
    >>> padded_rows_are_zero(Case("linear"), n=8)
    """
    valid = case.some(3, n)
    valid[1] = False
    for mode in case.modes():
        x = case.data(n).requires_grad_()
        y = case.build(**mode)(x, valid=valid)
        y.square().sum().backward()
        assert x.grad is not None
        demand((y[1] == 0).all(), "a row of padding has an output that is not zero")
        demand((x.grad[1] == 0).all(), "a row of padding has a gradient that is not zero")
        demand(y.isfinite().all() and x.grad.isfinite().all(), "a row of padding makes something not finite")


@law(_ADVICE, Can.PADDING)
def padding_holds_anything(case: Case, n: int = 40) -> None:
    """NaN, infinity and huge numbers at padding change no bit of outputs and gradients.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, padding_holds_anything
    >>> padding_holds_anything(Case("conv"), n=8)
    """
    x, valid = case.data(n, dtype=torch.float32), case.some(3, n)
    for mode in case.modes():
        m = case.build(dtype=torch.float32, **mode)
        ignores_padding(m, x, valid, partial(m, valid=valid))


@law(_ADVICE, Can.CROSS | Can.PADDING, cross=True)
def context_padding_holds_anything(case: Case, n: int = 20) -> None:
    """NaN, infinity and huge numbers at the padding of a context or of its queries change no bit of outputs and gradients.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, context_padding_holds_anything
    >>> context_padding_holds_anything(Case("linear"), n=8)
    """
    m, x = case.build(dtype=torch.float32, cross=True), case.data(n, dtype=torch.float32)
    c, real, read = case.data(33, 3, dtype=torch.float32), case.some(3, n, seed=6), case.some(3, 33)
    ignores_padding(m, c, read, lambda z: m(x, context=z, valid=read))
    ignores_padding(m, x, real, lambda z: m(z, context=c, valid=read, query_valid=real))


@law(_ADVICE, Can.STREAM | Can.PADDING, causal=True)
def prompt_padding_holds_anything(case: Case, n: int = 40) -> None:
    """NaN, infinity and huge numbers at the padding of a prompt change no bit of what follows.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, prompt_padding_holds_anything
    >>> prompt_padding_holds_anything(Case("linear"), n=8)
    """
    m, x, step = (
        case.build(dtype=torch.float32, causal=True),
        case.data(n, dtype=torch.float32),
        case.data(3, 9, dtype=torch.float32),
    )
    valid = case.some(3, n)

    def call(z: Tensor) -> Tensor:
        y, state = m.extend(m.start(3), z, valid)
        return torch.cat([y, m.extend(state, step)[0]], 1)

    ignores_padding(m, x, valid, call)


@law(_ADVICE, Can.PADDING, core=True)
def attend_padding_holds_anything(case: Case, n: int = 40) -> None:
    """NaN, infinity and huge numbers at padding change no bit of what `attend` returns, nor of its gradients.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, attend_padding_holds_anything
    >>> attend_padding_holds_anything(Case("softmax"), n=8)
    """
    made = case.core(dtype=torch.float32)
    g = torch.Generator().manual_seed(5)
    shapes = ((LAW_HEADS, made.dims.d * made.streams), *((LAW_HEADS, size) for size in made.sizes))
    q, k, v = (torch.randn(2, h, n, size, generator=g).to(case.device) for h, size in shapes)
    valid = case.some(2, n)

    def call(fill: float) -> list[Tensor]:
        tensors = [torch.where(valid[:, None, :, None], x, fill).requires_grad_() for x in (q, k, v)]
        y = attend(tensors[0], tensors[1], tensors[2], made, valid=valid, query_valid=valid)
        y.square().sum().backward()
        return [y.detach(), *(x.grad for x in tensors if x.grad is not None)]

    clean = call(0.0)
    for fill in (math.nan, math.inf, 3e38):
        _same(call(fill), clean, f"{fill} at padding")


def ignores_padding(module: nn.Module, x: Tensor, valid: Tensor, call: Callable[[Tensor], Tensor]) -> None:
    """Raise LawBroken unless call(x) and all gradients stay the same with poison for the tokens x (b n w) that are not valid."""
    clean = outputs_and_gradients(module, torch.where(valid[..., None], x, 0), call)
    demand(all(part.isfinite().all() for part in clean), "an output or a gradient is not finite with zeros at padding")
    _same(outputs_and_gradients(module, _poisoned(x, valid), call), clean, "NaN, infinity and huge numbers at padding")


def _poisoned(x: Tensor, valid: Tensor) -> Tensor:
    """Fill the padding of x (b n w) with all kinds of poison, one a token."""
    kinds = torch.tensor(_POISON, dtype=x.dtype, device=x.device)
    fill = kinds[torch.arange(x.shape[1], device=x.device) % len(_POISON)]
    return torch.where(valid[..., None], x, fill[:, None])


def outputs_and_gradients(module: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the output of call(x), the gradient of x, and those of all weights."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    grad = torch.zeros_like(x) if x.grad is None else x.grad  # a core that ignores its queries
    return [y.detach(), grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def _same(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
    """Compare bit for bit on a CPU; a GPU may add up in another order."""
    tol = 0 if found[0].device.type == "cpu" else 1e-4
    for a, b in zip(found, wanted, strict=True):
        agree(a, b, f"{what} change an output or a gradient", tol=tol)
