"""Where tokens stand, told in every way: added to the tokens, turned into queries and keys, or as a term of the scores.

    sinusoidal, learned, floater, rnn      tokens = positions.add(tokens, places), once, before the first layer
    rotary, relative, alibi                layer("softmax", ..., positions="rotary"), in every layer
    none                                   nothing at all: the control

All of them take positions from `Places`, so that padding, streaming and ragged prompts need no further thought.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from regard.cache import lasting
from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims, Places, needed_length
from regard.mixers.position_interface import Positions
from regard.ops.once import once
from regard.ops.score_bias import Term
from regard.text import chosen

__all__ = ["POSITIONS", "Alibi", "Floater", "Learned", "Nothing", "Positions", "Recurrent", "Relative", "Rotary", "Sinusoidal"]


class Nothing(Positions):
    """No positions: the tokens are a set."""

    @property
    def name(self) -> str:
        return "none"


class _Added(Positions):
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
        return x if x.numel() == 0 else x + self._rows(places).to(x.dtype)

    def _rows(self, places: Places) -> Tensor:
        n = places.at.shape[1]
        if places.start is not None:
            table = self._known(places.start + n, places.at.device)
            return table[places.start :] if places.valid is None else table[places.at]
        return self._known(int(places.at.max()) + 1, places.at.device)[places.at]

    def _known(self, n: int, device: torch.device) -> Tensor:
        """The table, remembered between decoding steps: they ask for one more row each."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            return self.table(n, device)
        now = [device, *((None if p.is_inference() else p._version, p.data_ptr(), p.dtype) for p in self.parameters())]
        if self._kept is None or self._kept[0] != now or len(self._kept[1]) < n:
            self._kept = now, lasting(self.table)(max(n, min(2 * n, self.dims.max_len or 2 * n)), device)
        return self._kept[1][:n]


class Sinusoidal(_Added):
    """Waves of many lengths, so that a shift is a rotation: PE(p + k) is a linear map of PE(p), the same for all p.

    PE(p, 2f) = sin(p / base^(2f / w)), PE(p, 2f + 1) = cos of the same. Vaswani et al. 2017, arXiv:1706.03762.
    """

    def __init__(self, dims: Dims, *, base: float = 10_000.0) -> None:
        super().__init__(dims)
        self.base = _base(base)

    def table(self, n: int, device: torch.device) -> Tensor:
        w = self.dims.width
        angle = torch.arange(n, dtype=torch.float64, device=device)[:, None] * _frequencies(w, self.base, device)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :w]


class Learned(_Added):
    """A vector of its own for every position up to max_len, and none beyond. Gehring et al. 2017, arXiv:1705.03122."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.vectors = nn.Parameter(torch.randn(needed_length("learned", dims), dims.width) * 0.02)

    def table(self, n: int, device: torch.device) -> Tensor:  # noqa: ARG002
        if n > len(self.vectors):
            raise ValueError(
                f"{n} tokens, but only {len(self.vectors)} positions were learned: build it with a larger max_len, "
                "or use positions that go on, such as sinusoidal or floater"
            )
        return self.vectors[:n]


class Recurrent(_Added):
    """A position follows from the one before it: the states of a GRU that is fed nothing but a constant.

    p_0 learned, p_(t + 1) = GRU(u, p_t). In the spirit of Neishi & Yoshinaga 2019, doi:10.18653/v1/K19-1031.
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.first = nn.Parameter(torch.randn(dims.width) * 0.5)
        self.input = nn.Parameter(torch.randn(dims.width) * 0.5)
        self.cell = nn.GRU(dims.width, dims.width, batch_first=True)

    @property
    def name(self) -> str:
        return "rnn"

    def table(self, n: int, device: torch.device) -> Tensor:  # noqa: ARG002
        states = self.cell(self.input.expand(1, n, -1), self.first[None, None])[0][0]
        return torch.cat([self.first[None], states])[:n]


class Floater(_Added):
    """A position is a point on a path that flows on for ever: the solution of a learned differential equation.

    p(t) = p(0) + integral of f(s, p(s)) ds, f a small network, p(0) learned; positions are `step` apart on the path.
    Solved by the Runge-Kutta method of order four, `every` positions a step, cubic in between.
    They are added to the tokens once, before the first block. In the paper they enter every block, with a p(0) for each block
    and one f for all: that is every_block=True, in a `Stack` or a model. Liu et al. 2020, arXiv:2003.09229.
    """

    def __init__(
        self, dims: Dims, *, hidden: int | None = None, step: float = 0.1, every: int = 4, every_block: bool = False
    ) -> None:
        super().__init__(dims)
        _solver()
        hidden = dims.width if hidden is None else need("hidden", hidden, 1, WIDEST)
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            raise ValueError(f"step must be a positive number, not {step!r}")
        self.step, self.every = float(step), need("every", every, 1, 1024)
        if not isinstance(every_block, bool):
            raise ValueError(f"every_block must be True or False, not {every_block!r}")
        self.every_block = every_block
        self.first = nn.Parameter(torch.randn(dims.width) * 0.5)  # (w), or (blocks w)
        self.flow = nn.Sequential(nn.Linear(dims.width + 1, hidden), nn.Tanh(), nn.Linear(hidden, dims.width))

    def table(self, n: int, device: torch.device) -> Tensor:
        if self.first.is_meta:  # a solver looks at its times
            return self.first.expand(n, *self.first.shape)
        steps = -(-max(n - 1, 1) // self.every)  # whole steps only, or a longer path would begin otherwise
        times = torch.arange(steps * self.every + 1, device=device, dtype=self.first.dtype) * self.step
        options = {"step_size": self.every * self.step, "interp": "cubic"}
        return _solver()(self._slope, self.first, times, method="rk4", options=options)[:n]

    def _slope(self, t: Tensor, p: Tensor) -> Tensor:
        return self.flow(torch.cat([p, t.to(p.dtype).expand(*p.shape[:-1], 1)], -1))

    def begin(self, depth: int) -> Self:
        """Start a path for each of so many blocks."""
        self.first = nn.Parameter(torch.randn(depth, self.dims.width) * 0.5)
        return self

    def add(self, x: Tensor, places: Places) -> Tensor:
        if self.every_block:
            raise ValueError("floater(every_block=True) enters the blocks of a stack: Stack.of(..., positions=...)")
        return super().add(x, places)

    def enter(self, x: Tensor, places: Places, number: int) -> Tensor:
        """The tokens (b n w) of a block, with the positions of that block added."""
        return x if x.numel() == 0 else x + self._rows(places)[..., number, :].to(x.dtype)

    def _known(self, n: int, device: torch.device) -> Tensor:
        solve = super()._known
        return once(("floater", id(self), n, device), self.first, lambda: solve(n, device))  # for all blocks of a pass


class Rotary(Positions):
    """Queries and keys are turned by angles that grow with their positions, so that q.k feels only how far apart they stand.

    In every plane f of two coordinates by the angle p / base^(2f / d). Su et al. 2021, arXiv:2104.09864.
    """

    needs = Can.ROTARY

    def __init__(self, dims: Dims, *, base: float = 10_000.0) -> None:
        super().__init__(dims)
        if dims.d % 2:
            raise ValueError(f"rotary turns pairs of coordinates: {dims.d} per head is an odd number")
        self.base = _base(base)

    def turn(self, x: Tensor, places: Places) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # angles in double precision: far positions keep their digits
        angle = places.at[:, None, :, None].double() * _frequencies(x.shape[-1], self.base, x.device)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        a, b = x.to(wide).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Alibi(Positions):
    """Far tokens count less: every head takes its own price for distance off the scores.

    s_ij - slope_h |i - j|, slope_h = 2^(-8 h / heads) for h = 1 .. heads, if heads is a power of two. Otherwise, as in the
    published code and in BLOOM, the first p heads, p the power below, have the slopes of p heads, and the rest the first, third
    and so on of 2 p heads. Press et al. 2021, arXiv:2108.12409.
    """

    needs = Can.RELATIVE

    def term(self, q: Tensor, scale: float) -> Term:  # noqa: ARG002 - the same for all queries
        heads = q.shape[1]
        power = 1 << (heads.bit_length() - 1)
        first = torch.arange(1, power + 1, dtype=torch.float64, device=q.device) * (-8 / power)
        if heads == power:
            return Term(slopes=torch.exp2(first))
        rest = torch.arange(1, 2 * (heads - power), 2, dtype=torch.float64, device=q.device) * (-4 / power)
        return Term(slopes=torch.exp2(torch.cat([first, rest])))


class Relative(Positions):
    """A vector for every distance up to `clip`, added to keys and, if `values`, to values; all heads share them.

    s_ij = scale q_i.(k_j + a_c), out_i = sum_j A_ij (v_j + b_c), c = clamp(i - j, -clip, clip). The n x n x d tensor of the
    formula never exists: n (2 clip + 1) numbers do. Shaw et al. 2018, arXiv:1803.02155.
    """

    needs = Can.RELATIVE

    def __init__(self, dims: Dims, *, clip: int = 16, values: bool = True) -> None:
        super().__init__(dims)
        classes = 2 * need("clip", clip, 0, WIDEST) + 1
        self.clip = clip
        self.keys = nn.Parameter(torch.randn(classes, dims.d) * dims.d**-0.5)
        self.values = nn.Parameter(torch.randn(classes, dims.e) * dims.e**-0.5) if values else None

    def term(self, q: Tensor, scale: float) -> Term:
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        return Term(clip=self.clip, by_query=(q * scale) @ self.keys.to(q.dtype).mT, mass=self.values is not None)

    def finish(self, out: Tensor, e: int) -> Tensor:
        if self.values is None:
            return out
        wide = torch.promote_types(out.dtype, torch.float32)
        return (out[..., :e].to(wide) + out[..., e:].to(wide) @ self.values.to(wide)).to(out.dtype)


POSITIONS: dict[str, Callable[..., Positions]] = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "relative": Relative,
    "floater": Floater,
    "rnn": Recurrent,
    "rotary": Rotary,
    "alibi": Alibi,
    "none": Nothing,
}


def positions(spec: str | Positions, dims: Dims) -> Positions:
    """`positions("relative(clip=8)", dims)`; what is made already is given back."""
    if isinstance(spec, Positions):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"positions are a text such as 'rotary' or 'relative(clip=8)', or made already, not {spec!r}")
    return chosen(spec, POSITIONS)(dims)


def entering(spec: str | Positions | None, dims: Dims, depth: int) -> Floater | None:
    """Make the positions that enter each of so many blocks, if they are of that kind."""
    given = chosen(spec, POSITIONS).keywords.get("every_block") if isinstance(spec, str) else getattr(spec, "every_block", False)
    made = positions(spec, dims) if given and spec is not None else None
    return made.begin(depth) if isinstance(made, Floater) else None


def _base(base: float) -> float:
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base < math.inf:
        raise ValueError(f"base must be a number above 1, not {base!r}")
    return float(base)


def _frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """Made where they are needed and never kept: a buffer would lose its digits in a model of half precision."""
    return torch.exp(torch.arange(0, d, 2, dtype=torch.float64, device=device) * (-math.log(base) / d))


def _solver() -> Callable[..., Tensor]:
    try:
        from torchdiffeq import odeint
    except ModuleNotFoundError:
        raise ModuleNotFoundError("floater needs a solver: pip install 'regard[floater]', or torchdiffeq itself") from None
    return odeint
