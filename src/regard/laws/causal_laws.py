"""Laws of causal layers: no output and no gradient depends on a later token."""

from __future__ import annotations

import torch

from regard.laws.law_case import LONG, Case
from regard.laws.law_table import each, law
from regard.laws.verdicts import LawBroken, demand
from regard.mixers.base import Can

_SIZES = (*each(t=(0, 23, 58)), {"n": LONG, "t": 97, "b": 1})
_ADVICE = (
    "delete your `scan`, so that the inherited loop runs: if the law holds then, `scan` uses later keys; if not, `push` or "
    "`read` changes what an older memory answers. Without causal order at all, leave Can.CAUSAL out"
)


@law(_ADVICE, Can.CAUSAL, causal=True, given=_SIZES)
def future_is_unseen(case: Case, n: int = 60, t: int = 23, b: int = 3) -> None:
    """No output depends on a later token, however large it is.

    `case` has the mechanism, `n` is the number of tokens, `t` that of the token behind which all is changed, `b` that
    of rows.

    >>> from regard.laws import Case, future_is_unseen
    >>> future_is_unseen(Case("gla"), n=12, t=5)
    """
    m, x = case.build(causal=True), case.data(n, b=b)
    before = m(x)
    most = 4 * torch.finfo(x.dtype).eps * before[:, : t + 1].abs().max()  # rounding, and nothing else
    for factor in (1, 100, 1e4):
        z = x.clone()
        z[:, t + 1 :] = factor * case.data(n, seed=2, b=b)[:, t + 1 :]
        after = m(z)
        far = (before - after)[:, : t + 1].abs().amax((0, 2)).detach()
        if not far.max() <= most:
            where = f"token {int(far.argmax())} changes by {float(far.max()):.3g} when tokens from {t + 1} on do"
            raise LawBroken("an output depends on a later token", where)
    if not case.control and t + 1 < n:
        changed = not torch.allclose(before[:, t + 1 :], after[:, t + 1 :])
        demand(changed, "no output changes with its own tokens")  # and the law can be broken


@law(_ADVICE, Can.CAUSAL, causal=True, given=_SIZES)
def no_gradient_from_the_future(case: Case, n: int = 60, t: int = 23, b: int = 3) -> None:
    """The gradient of an output is exactly zero at later tokens: what is rounded differently is still the same function.

    `case` has the mechanism, `n` is the number of tokens, `t` that of the token behind which all is changed, `b` that
    of rows.

    >>> from regard.laws import Case, no_gradient_from_the_future
    >>> no_gradient_from_the_future(Case("gla"), n=12, t=5)
    """
    m, x = case.build(causal=True), case.data(n, b=b).requires_grad_()
    (grad,) = torch.autograd.grad((m(x)[:, : t + 1] * case.data(n, seed=3, b=b)[:, : t + 1]).sum(), x)
    later = grad[:, t + 1 :]
    demand((later == 0).all(), "a later token has a gradient", lambda: f"{float(later.abs().max()):.3g} behind token {t}")
    demand(grad[:, : t + 1].abs().sum() > 0, "the tokens that are seen have no gradient")
