"""Laws of a layer as a function of tokens: shapes, gradients, rows, strides, types, refusals, learning."""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any

import torch

from regard.blocks import Stack
from regard.catalogue import CATALOGUE
from regard.laws.law_case import LAW_HEADS, LAW_MAX_LEN, LAW_WIDTH, Case, seed_torch
from regard.laws.law_table import each, law
from regard.laws.verdicts import DoesNotApply, LawBroken, agree, demand, refuses, same_bits
from regard.mixers.base import Can, Dims

UNREAD = ("q.", "k.")  # the weights that the control row has and never reads


@law(
    "return (b h n e) from read and scan, use every parameter that has more than one dimension, and name in `ignores` "
    '("q", "k") what is never read',
    given=each(n=(1, 7, 40, 97)),
)
def shape_and_gradients(case: Case, n: int = 7) -> None:
    """Outputs have the shape of the tokens and are finite, and every weight matrix has a gradient.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, shape_and_gradients
    >>> shape_and_gradients(Case("Local(4)"))
    """
    for mode in case.modes():
        m, x = case.build(**mode), case.data(n).requires_grad_()
        y = m(x)
        wanted = (3, -(-n // m.rate), LAW_WIDTH)
        demand(y.shape == wanted, "the output has another shape", f"{tuple(y.shape)} for {wanted}")
        y.square().sum().backward()
        demand(y.isfinite().all(), "the output is not finite")
        demand(x.grad is not None and x.grad.isfinite().all(), "the gradient of the tokens is missing or not finite")
        quiet = UNREAD if case.control else ()
        weights = {name: p for name, p in m.named_parameters() if p.dim() > 1 and not name.startswith(quiet or "-")}
        wrong = [name for name, p in weights.items() if p.grad is None or not p.grad.isfinite().all()]
        demand(not wrong, "the gradient of a weight is missing or not finite", ", ".join(wrong))
        if n > 7:
            zero = [name for name, p in weights.items() if p.grad is not None and p.grad.abs().max() < 1e-12]
            if zero and case.example is None and case.spec.name in CATALOGUE:  # its examples are for such lengths, and have one
                raise DoesNotApply(f"{', '.join(zero)} has no gradient in {n} tokens: these options are for longer sequences")
            demand(not zero, "the gradient of a weight is zero", ", ".join(zero))


@law("compute every row of the batch by itself (no mean, sort or norm over the batch), and draw random numbers in training alone")
def rows_are_independent(case: Case, n: int = 40) -> None:
    """A row of a batch gets what it gets alone, and the same call gives the same bits.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, rows_are_independent
    >>> rows_are_independent(Case("Local(4)"), n=8)
    """
    for mode in case.modes():
        m, x = case.build(**mode), case.data(n)
        agree(m(x)[1:2], m(x[1:2]), "a row in a batch gets another output than alone")
        same_bits(m(x), m(x), "the same call gives another output")


@law("use reshape where you use view, and no storage offsets")
def any_strides(case: Case, n: int = 40) -> None:
    """Tokens need not be contiguous.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, any_strides
    >>> any_strides(Case("softmax"), n=8)
    """
    for mode in case.modes():
        m, x = case.build(**mode), case.data(n)
        agree(m(x.transpose(0, 1).contiguous().transpose(0, 1)), m(x), "transposed tokens get another output")
        twice = case.data(2 * n)[:, ::2]
        agree(m(twice), m(twice.contiguous()), "every other token of a longer sequence gets another output")


@law("let sums, maxima and loops have nothing to do: shapes with 0 tokens and 0 rows are legal", given=each(n=(0, 1)))
def empty_inputs(case: Case, n: int = 0) -> None:
    """No token, one token and a batch without rows are fine.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, empty_inputs
    >>> empty_inputs(Case("linear"))
    """
    for mode in case.modes():
        m, x = case.build(**mode), case.data(n).requires_grad_()
        y = m(x)
        y.sum().backward()
        demand(y.shape == (3, n, LAW_WIDTH), "the output of so few tokens has another shape", f"{tuple(y.shape)}")
        demand(y.isfinite().all(), "the output of so few tokens is not finite")
        empty = m(case.data(5)[:0])
        demand(empty.shape == (0, -(-5 // m.rate), LAW_WIDTH), "a batch without rows gets another shape", f"{tuple(empty.shape)}")


@law("subtract the maximum before exp, divide by what cannot be zero, and add up in float32 or better")
def large_inputs_stay_finite(case: Case, n: int = 40) -> None:
    """Tokens that are 100 times as large as usual get finite outputs and gradients in float32.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, large_inputs_stay_finite
    >>> large_inputs_stay_finite(Case("linear"), n=8)
    """
    for mode in case.modes():
        m, x = case.build(dtype=torch.float32, **mode), (100 * case.data(n, dtype=torch.float32)).requires_grad_()
        y = m(x)
        y.sum().backward()
        demand(y.isfinite().all(), "large tokens get an output that is not finite")
        demand(x.grad is not None and x.grad.isfinite().all(), "large tokens get a gradient that is not finite")


@law("say in `can` what it can do, and nothing more: Core and Free refuse the rest")
def unclaimed_is_refused(case: Case) -> None:
    """What is claimed can be built, and a use that is not claimed raises a sentence.

    `case` has the mechanism.

    >>> from regard.laws import Case, unclaimed_is_refused
    >>> unclaimed_is_refused(Case("fnet"))
    """
    can = case.build().can
    for claim, wanted in ((Can.CROSS, {"cross": True}), (Can.DROPOUT, {"dropout": 0.1}), (Can.CAUSAL, {"causal": True})):
        if claim not in can:
            refuses(partial(case.build, **wanted), f"cannot do {claim}", f"it does not claim {claim}, and is built for it")
        else:
            demand(case.can(claim, **wanted), f"it claims {claim}, and cannot be built for it")
    if Can.PADDING not in can:
        valid = torch.ones(3, 8, dtype=torch.bool, device=case.device)
        what = "it does not claim padding, and takes valid"
        refuses(lambda: case.build()(case.data(8), valid=valid), "cannot do padding", what)
    if case.can(Can.CAUSAL, causal=True) and not case.can(Can.STREAM, causal=True):
        refuses(lambda: case.build(causal=True).start(2), "cannot do stream", "it does not claim stream, and starts one")
    if Can.STREAM in can and case.build().latency is None:
        what = "it starts a stream without causal=True"
        refuses(lambda: case.build().start(2), "build it with causal=True", what)


@law("drop weights by `self.drop`, which is 0 in evaluation, and divide by 1 - drop", Can.DROPOUT, dropout=0.5)
def dropout_keeps_the_mean(case: Case, n: int = 24) -> None:
    """Dropout changes training alone, is drawn anew for every row and call, and keeps the mean.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, dropout_keeps_the_mean
    >>> dropout_keeps_the_mean(Case("softmax"), n=8)
    """
    for mode in case.modes():
        m, x = case.build(dropout=0.25, **mode), case.data(n, b=1)
        agree(m(x), case.build(**mode)(x), "dropout changes evaluation")
        m.train()
        drawn = torch.cat([m(x.expand(100, -1, -1)).detach() for _ in range(2)])
        demand(not torch.equal(drawn[0], drawn[1]), "all rows drop the same")
        demand(not torch.equal(drawn[0], drawn[100]), "all calls drop the same")
        error = (drawn.mean(0) - m.eval()(x).detach()).abs() / (drawn.std(0) / math.sqrt(200) + 1e-12)
        far = float(error.square().mean().sqrt())
        demand(far < 1.3, "dropout moves the mean", f"200 draws are {far:.2g} standard errors off")
        demand(drawn.std(0).mean() > 1e-3, "dropout drops nothing")


@law("register as parameters or buffers what outputs depend on, and let it be drawn in the constructor alone")
def weights_are_loaded(case: Case, n: int = 40) -> None:
    """A layer that loads the weights of another gives the same outputs, bit for bit.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, weights_are_loaded
    >>> weights_are_loaded(Case("performer(features=8)"), n=8)
    """
    for mode in case.modes():
        m, x, file = case.build(**mode), case.data(n), io.BytesIO()
        torch.save(m.state_dict(), file)
        seed_torch(case.device, 99)
        dims = Dims(LAW_WIDTH, LAW_HEADS, max_len=LAW_MAX_LEN, **mode)
        other = case.spec.build(dims, positions=case.positions).to(case.device, torch.float64).eval()
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        same_bits(other(x), m(x), "a layer with the same weights gives another output")


@law("check that outputs depend on the other tokens of a row, and that gradients reach every weight")
def one_batch_is_fitted(case: Case) -> None:
    """One block overfits a batch whose rows end in the same token with another target each: only mixing can fit it.

    `case` has the mechanism.

    >>> from regard.laws import Case, one_batch_is_fitted
    >>> one_batch_is_fitted(Case("softmax"))
    """
    x, target = case.data(8, b=4, dtype=torch.float32), case.data(8, seed=8, b=4, dtype=torch.float32)
    x[:, -1] = x[0, -1]
    sizes: dict[str, Any] = {"width": LAW_WIDTH, "heads": LAW_HEADS, "depth": 1, "ffn": 2 * LAW_WIDTH, "max_len": LAW_MAX_LEN}
    for mode in case.modes():
        seed_torch(case.device)
        case.latest = {"dtype": torch.float32, **mode}
        made = Stack.of(case.spec, **sizes, positions=case.positions, **mode).to(case.device).train()
        optimiser = torch.optim.Adam(made.parameters(), lr=3e-2, betas=(0.8, 0.95), fused=True)
        for _ in range(50 if case.control else 100):
            error = (made(x) - target[:, : -(-8 // made.rate)]).square().mean(-1)
            optimiser.zero_grad()
            error.mean().backward()
            optimiser.step()
            if max(error.mean(), error[:, -1].mean()) < 0.1:  # of a variance of 1
                break
        else:
            if not case.control or error[:, -1].mean() <= 0.5:
                mean, last = error.detach().mean(), error.detach()[:, -1].mean()
                errors = f"{float(mean):.2g} after 100 updates, {float(last):.2g} for the last token"
                raise LawBroken("one batch is not fitted to a squared error below 0.1", errors)
