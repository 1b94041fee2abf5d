"""Positions that are added to the tokens before the first block: sinusoidal, learned, recurrent, FLOATER."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from regard.cache import outlives_tracing
from regard.checks import WIDEST, need
from regard.mixers.base import Dims, Places, needed_length
from regard.mixers.places import position_bound
from regard.mixers.position_interface import Positions
from regard.ops.rnn import rnn_scan
from regard.positions.frequencies import check_base, inverse_frequencies


class Nothing(Positions):
    """No positions: the tokens are a set.

    `dims` are the sizes of the model.

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 5, 16)
    >>> made = positions("none", Dims(width=16, heads=2, max_len=8))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 5, 16)
    """

    @property
    def name(self) -> str:
        return "none"


class AddedPositions(Positions):
    """A vector for every position, added to its token."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self._kept: tuple[object, Tensor] | None = None

    def table(self, n: int, device: torch.device) -> Tensor:
        """The vectors of positions 0 .. n - 1, (n w). A longer table begins with a shorter one."""
        raise NotImplementedError

    def add(self, x: Tensor, places: Places) -> Tensor:
        if x.shape[-1] != self.dims.width:
            raise ValueError(f"{self.name} was built for tokens of width {self.dims.width}, not {x.shape[-1]}")
        if x.numel() == 0:
            return x
        rows = self.rows(places)
        return x + rows.to(x.dtype)

    def rows(self, places: Places) -> Tensor:
        """Return the vectors of these positions, (b n w), or (n w) where all rows have the same."""
        n = places.shape[1]
        if places.start is not None:
            table = self._known(places.start + n, places.device)
            return table[places.start :] if places.valid is None else table[places.at]
        count = position_bound() or int(places.at.max()) + 1
        table = self._known(count, places.device)
        return table[places.at]

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation; the table is made anew.

        Fused optimisers change weights and leave their version as it is, and a captured pass of training runs no Python.
        """
        self._kept = None
        return super().train(mode)

    def _known(self, n: int, device: torch.device) -> Tensor:
        """The table, remembered between decoding steps, which need one more row each. A compiled graph computes it."""
        if torch.compiler.is_dynamo_compiling():
            return self.table(n, device)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            self._kept = None
            return self.table(n, device)
        versions = [None if p.is_inference() else p._version for p in self.parameters()]
        weights = [(p.data_ptr(), p.dtype) for p in self.parameters()]
        now = [device, *versions, *weights]
        if self._kept is None or self._kept[0] != now or len(self._kept[1]) < n:
            most = self.dims.max_len or 2 * n
            length = max(n, min(2 * n, most))
            table = outlives_tracing(self.table)
            self._kept = now, table(length, device)
        return self._kept[1][:n]


class Sinusoidal(AddedPositions):
    """Waves of many lengths, so that a shift is a rotation: PE(p + k) is a linear map of PE(p), the same for all p.

    PE(p, 2f) = sin(p / base^(2f / w)), PE(p, 2f + 1) = cos of the same. Vaswani et al. 2017, arXiv:1706.03762.

    `dims` are the sizes of the model, `base` sets the longest wave.

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 5, 16)
    >>> made = positions("sinusoidal", Dims(width=16, heads=2, max_len=8))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 5, 16)
    """

    def __init__(self, dims: Dims, *, base: float = 10_000.0) -> None:
        super().__init__(dims)
        self.base = check_base(base)

    def table(self, n: int, device: torch.device) -> Tensor:
        w = self.dims.width
        at = torch.arange(n, dtype=torch.float64, device=device)
        frequencies = inverse_frequencies(w, self.base, device)
        angle = at[:, None] * frequencies
        waves = torch.stack([angle.sin(), angle.cos()], -1)
        return waves.flatten(1)[:, :w]


class Learned(AddedPositions):
    """A vector of its own for every position up to max_len, and none beyond. Gehring et al. 2017, arXiv:1705.03122.

    `dims` are the sizes of the model; max_len is needed.

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 5, 16)
    >>> made = positions("learned", Dims(width=16, heads=2, max_len=8))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 5, 16)
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        longest = needed_length("learned", dims)
        drawn = torch.randn(longest, dims.width)
        self.vectors = nn.Parameter(drawn * 0.02)

    def table(self, n: int, device: torch.device) -> Tensor:  # noqa: ARG002
        if n > len(self.vectors):
            raise ValueError(
                f"{n} tokens, but only {len(self.vectors)} positions were learned: build it with a larger max_len, "
                "or use positions that go on, such as sinusoidal or floater"
            )
        return self.vectors[:n]


class Recurrent(AddedPositions):
    """A position follows from the one before it: the states of a GRU that is fed nothing but a constant.

    p_0 learned, p_(t + 1) = GRU(u, p_t). In the spirit of Neishi & Yoshinaga 2019, doi:10.18653/v1/K19-1031.

    `dims` are the sizes of the model.

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 5, 16)
    >>> made = positions("rnn", Dims(width=16, heads=2, max_len=8))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 5, 16)
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        first = torch.randn(dims.width) * 0.5
        self.first = nn.Parameter(first)
        constant = torch.randn(dims.width) * 0.5
        self.input = nn.Parameter(constant)
        self.cell = nn.GRU(dims.width, dims.width, batch_first=True)

    @property
    def name(self) -> str:
        return "rnn"

    def table(self, n: int, device: torch.device) -> Tensor:  # noqa: ARG002
        weights = [getattr(self.cell, name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
        states, _ = rnn_scan(self.input.expand(1, n, -1), [self.first[None, None]], weights)
        return torch.cat([self.first[None], states[0]])[:n]


class Floater(AddedPositions):
    """A position is a point on a path that flows on for ever: the solution of a learned differential equation.

    p(t) = p(0) + integral of f(s, p(s)) ds, f a small network, p(0) learned; positions are `step` apart on the path.
    Solved by the Runge-Kutta method of order four, `every` positions a step, cubic in between.
    They are added to the tokens once, before the first block. In the paper they enter every block, with a p(0) for each block
    and one f for all: that is every_block=True, in a `Stack` or a model. Liu et al. 2020, arXiv:2003.09229.

    `dims` are the sizes of the model, `hidden` is that of f (as wide as a token unless given).

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 5, 16)
    >>> made = positions("floater(hidden=8)", Dims(width=16, heads=2, max_len=8))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 5, 16)
    """

    def __init__(
        self, dims: Dims, *, hidden: int | None = None, step: float = 0.1, every: int = 4, every_block: bool = False
    ) -> None:
        super().__init__(dims)
        _solver()
        hidden = dims.width if hidden is None else need("hidden", hidden, 1, WIDEST)
        number = isinstance(step, int | float) and not isinstance(step, bool)
        if not number or not 0 < step < math.inf:
            raise ValueError(f"step must be a positive number, not {step!r}")
        self.step = float(step)
        self.every = need("every", every, 1, 1024)
        if not isinstance(every_block, bool):
            raise ValueError(f"every_block must be True or False, not {every_block!r}")
        self.every_block = every_block
        first = torch.randn(dims.width) * 0.5
        self.first = nn.Parameter(first)  # (w), or (blocks w)
        inward = nn.Linear(dims.width + 1, hidden)
        outward = nn.Linear(hidden, dims.width)
        self.flow = nn.Sequential(inward, nn.Tanh(), outward)

    def table(self, n: int, device: torch.device) -> Tensor:
        if self.first.is_meta:  # a solver reads its times
            return self.first.expand(n, *self.first.shape)
        distance = max(n - 1, 1)
        steps = -(-distance // self.every)  # whole steps only, or a longer path would begin otherwise
        count = steps * self.every + 1
        times = torch.arange(count, device=device, dtype=self.first.dtype) * self.step
        options = {"step_size": self.every * self.step, "interp": "cubic"}
        solve = _solver()
        path = solve(self._slope, self.first, times, method="rk4", options=options)
        return path[:n]

    def _slope(self, t: Tensor, p: Tensor) -> Tensor:
        time = t.to(p.dtype).expand(*p.shape[:-1], 1)
        return self.flow(torch.cat([p, time], -1))

    def begin(self, depth: int) -> Self:
        """Start a path for each of so many blocks."""
        first = torch.randn(depth, self.dims.width) * 0.5
        self.first = nn.Parameter(first)
        return self

    def add(self, x: Tensor, places: Places) -> Tensor:
        if self.every_block:
            raise ValueError("floater(every_block=True) enters the blocks of a stack: Stack.of(..., positions=...)")
        return super().add(x, places)


def _solver() -> Callable[..., Tensor]:
    try:
        from torchdiffeq import odeint
    except ModuleNotFoundError:
        raise ModuleNotFoundError("floater needs a solver: pip install 'regard[floater]', or torchdiffeq itself") from None
    return odeint
