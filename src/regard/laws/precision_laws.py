"""Laws of number types: float32, bfloat16 and float16 are as close to float64 as plain attention in the same type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.laws.law_case import LAW_HEADS, Case
from regard.laws.law_table import each, law
from regard.laws.verdicts import demand
from regard.mixers.attend import attend
from regard.mixers.base import Can

CHOOSING = 0.5  # the share of tokens that may differ in a row that chooses: rounding turns near ties over
_ADVICE = (
    "add up in float32 or better (`x.float()` before sums over tokens) and return the type of the inputs. A mechanism that "
    "decides by comparing (hashes, clusters) is registered with chooses=True"
)


@law(_ADVICE, core=True, given=each(dtype=(torch.float32, torch.bfloat16, torch.float16)))
def low_precision_is_close(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Outputs and gradients in a type are no further from float64 than twice those of plain attention in the same type.

    `case` has the mechanism, `dtype` is the type.

    >>> from regard.laws import Case, low_precision_is_close
    >>> low_precision_is_close(Case("softmax"))
    """
    for mode in case.modes():
        g = torch.Generator().manual_seed(3)
        low, true = (case.core(dtype=t, **mode) for t in (dtype, torch.float64))
        true.load_state_dict({name: x.double() for name, x in low.state_dict().items()})
        sizes = low.dims.d * low.streams, *low.sizes
        inputs = [torch.randn(1, LAW_HEADS, 80, x, generator=g).to(case.device, dtype).double() for x in sizes]
        up = torch.randn(1, LAW_HEADS, 80, low.dims.e, generator=g).to(case.device, dtype).double()
        asked = up[:, :, : -(-80 // low.rate)]
        causal = mode["causal"]
        ours = _worst(
            _passed_in(partial(attend, core=low, causal=causal), inputs, dtype, asked),
            _passed_in(partial(attend, core=true, causal=causal), inputs, torch.float64, asked),
        )
        half = [x[..., : low.dims.d] for x in inputs[:2]] + [inputs[2][..., : low.dims.e]]
        theirs = _worst(*(_passed_in(partial(_plain, causal=causal), half, t, up) for t in (dtype, torch.float64)))
        if case.device.type == "cuda":  # the kernels that scores with a bias go through: worse than plain products in float32
            theirs += _worst(*(_passed_in(partial(_fused, causal=causal), half, t, up) for t in (dtype, torch.float64)))
        # writing the true result costs two roundings; adding up 80 terms in float32, in whatever order, about sqrt(80)
        band = 2 * torch.finfo(dtype).eps + 80**0.5 * torch.finfo(torch.float32).eps
        far, most = float(torch.stack(ours).max()), float(2 * torch.stack(theirs).max() + band)  # NaN where one is
        demand(
            far <= most,
            "low precision is further from float64 than plain attention",
            f"{far:.3g} of the largest, {most:.3g} at most",
        )


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute softmax attention as in a textbook, all of it in the type of its inputs."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return s.softmax(-1) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute the same by PyTorch's fused kernels, with a bias."""
    mask = q.new_zeros(q.shape[2], k.shape[2])
    if causal:
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -torch.inf)
    return scaled_dot_product_attention(q, k, v, mask)


def _passed_in(f: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype, up: Tensor) -> list[Tensor]:
    """Return output and gradients, in double precision, of f in the given one."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = f(*inputs)
    demand(y.dtype == dtype, "the output has another type than the inputs", f"{y.dtype} for {dtype}")
    grads = torch.autograd.grad((y * up.to(dtype)).sum(), inputs, allow_unused=True)
    return [x.detach().double() for x in (y, *grads) if x is not None]


def _worst(found: list[Tensor], truth: list[Tensor]) -> list[Tensor]:
    return [(a - b).abs().max() / b.abs().max().clamp_min(1e-9) for a, b in zip(found, truth, strict=True)]


@law(_ADVICE)
def autocast_is_close(case: Case, n: int = 40) -> None:
    """Under autocast to bfloat16 outputs are near those of float32, and gradients are finite.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, autocast_is_close
    >>> autocast_is_close(Case("linear"), n=8)
    """
    for mode in case.modes():
        m, x = case.build(dtype=torch.float32, **mode), case.data(n, dtype=torch.float32).requires_grad_()
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            y = m(x)
        y.float().square().sum().backward()
        demand(x.grad is not None and x.grad.isfinite().all(), "a gradient under autocast is not finite")
        exact = m(x)
        far = (y.float() - exact).abs() >= 0.05 * exact.abs().max()
        _few(case, far, "outputs under autocast are 5 % off or more")


@law(_ADVICE, Can.STREAM, causal=True, given=each(dtype=(torch.bfloat16, torch.float16)))
def half_precision_streams(case: Case, dtype: torch.dtype = torch.bfloat16, n: int = 40) -> None:
    """In half precision a stream is near the whole pass.

    `case` has the mechanism, `dtype` is the type, `n` the number of tokens.

    >>> from regard.laws import Case, half_precision_streams
    >>> half_precision_streams(Case("softmax"), n=8)
    """
    m, x = case.build(dtype=dtype, causal=True), case.data(n, dtype=dtype)
    with torch.no_grad():
        state, out = m.start(3), []
        for part in x.split([n - 23, 1, 1, 21] if n > 23 else [1] * n, 1):
            y, state = m.extend(state, part)
            out.append(y)
        far = ~torch.isclose(torch.cat(out, 1), m(x), rtol=0.05, atol=0.02)
    _few(case, far, "a stream in half precision is 5 % off or more")


def _few(case: Case, far: Tensor, what: str) -> None:
    """Demand that no token (b n w) is far, or less than half of them in a row that chooses."""
    share = float(far.any(-1).float().mean())
    demand(share <= (CHOOSING if case.row.chooses else 0), what, f"{share:.0%} of the tokens")
