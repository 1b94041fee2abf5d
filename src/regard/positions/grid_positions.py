"""Positions on a grid whose cells are tokens, row by row: added to tokens, turning queries and keys, or a bias of the scores.

The token at position p is in row (p - first) // columns and column (p - first) % columns. The `first` tokens before the grid,
such as a class token, have no cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims, Places, needed_length
from regard.mixers.position_interface import Positions
from regard.ops.score_bias import ScoreBias
from regard.positions.added import AddedPositions
from regard.positions.frequencies import check_base, inverse_frequencies
from regard.text import parse_choice


def grid_columns(name: str, columns: int | None, dims: Dims) -> int:
    """Return the columns of a grid: unless given, those of a square with at least max_len cells."""
    if columns is not None:
        return need("columns", columns, 1, WIDEST)
    if dims.max_len is None:
        raise ValueError(f"{name} needs the columns of its grid, {name}(columns=8), or max_len, the cells of a square")
    return math.isqrt(max(dims.max_len - 1, 0)) + 1


class _Cells:
    """Rows and columns of positions on a grid."""

    def __init__(self, columns: int, first: int) -> None:
        self.columns, self.first = columns, need("first", first, 0, WIDEST)

    def of(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, column, and which positions are on the grid; the others have row and column 0."""
        inside = at >= self.first
        cell = (at - self.first).clamp_min(0)
        return cell // self.columns, cell % self.columns, inside

    def __repr__(self) -> str:
        return f"columns={self.columns}, first={self.first}"


class Sinusoidal2D(AddedPositions):
    """Waves of many lengths: those of the row in the first half of the channels, those of the column in the second.

    As the positions of a line for each axis, with half of the width. Tokens before the grid get zeros.

    `dims` are the sizes, `base` sets the longest wave, `columns` those of the grid (a square of max_len cells unless given),
    `first` the number of tokens before it.

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 12, 16)
    >>> made = positions("sinusoidal_2d(columns=4)", Dims(width=16, heads=2, max_len=12))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 12, 16)
    """

    name = "sinusoidal_2d"

    def __init__(self, dims: Dims, *, columns: int | None = None, first: int = 0, base: float = 10_000.0) -> None:
        super().__init__(dims)
        self.cells = _Cells(grid_columns(self.name, columns, dims), first)
        self.base = check_base(base)

    def extra_repr(self) -> str:
        return f"{self.cells!r}, base={self.base}"

    def table(self, n: int, device: torch.device) -> Tensor:
        row, column, inside = self.cells.of(torch.arange(n, device=device))
        half = self.dims.width // 2
        waves = [self._waves(row, half), self._waves(column, self.dims.width - half)]
        return torch.cat(waves, 1) * inside[:, None]

    def _waves(self, at: Tensor, width: int) -> Tensor:
        angle = at[:, None].double() * inverse_frequencies(width, self.base, at.device)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]


class Learned2D(AddedPositions):
    """A vector for every row and one for every column, added together; max_len decides how many rows there are.

    `dims` are the sizes, `columns` those of the grid (a square of max_len cells unless given), `first` the number of tokens
    before it.

    >>> import torch
    >>> from regard import Dims, Places
    >>> from regard.positions import positions
    >>> x = torch.zeros(1, 12, 16)
    >>> made = positions("learned_2d(columns=4)", Dims(width=16, heads=2, max_len=12))
    >>> tuple(made.add(x, Places.of(x)).shape)
    (1, 12, 16)
    """

    name = "learned_2d"

    def __init__(self, dims: Dims, *, columns: int | None = None, first: int = 0) -> None:
        super().__init__(dims)
        self.cells = _Cells(grid_columns(self.name, columns, dims), first)
        rows = -(-max(needed_length(self.name, dims) - first, 1) // self.cells.columns)
        self.rows_table = nn.Parameter(torch.randn(rows, dims.width) * 0.02)
        self.columns_table = nn.Parameter(torch.randn(self.cells.columns, dims.width) * 0.02)

    def extra_repr(self) -> str:
        return repr(self.cells)

    def table(self, n: int, device: torch.device) -> Tensor:
        row, column, inside = self.cells.of(torch.arange(n, device=device))
        most = self.cells.first + len(self.rows_table) * self.cells.columns
        if n > most:
            raise ValueError(
                f"{n} tokens, but only {len(self.rows_table)} rows of {self.cells.columns} were learned: build it with a larger "
                "max_len, or use positions that go on, such as sinusoidal_2d"
            )
        return (self.rows_table[row] + self.columns_table[column]) * inside[:, None]


class Rotary2D(Positions):
    """Queries and keys are turned by their row in one half of the planes and by their column in the other half.

    q.k then depends on how many rows and columns lie between them, and on nothing else. In plane f of d / 4 by the angle
    row / base^(4f / d), the same for columns. Tokens before the grid are not turned. Heo et al. 2024, arXiv:2403.13298.

    `dims` are the sizes, `columns` those of the grid (a square of max_len cells unless given), `first` the number of tokens
    before it.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("softmax", width=16, heads=2, max_len=12, positions="rotary_2d(columns=4)")
    >>> tuple(mixer(torch.randn(1, 12, 16)).shape)
    (1, 12, 16)
    """

    needs = Can.ROTARY
    name = "rotary_2d"

    def __init__(self, dims: Dims, *, columns: int | None = None, first: int = 0, base: float = 100.0) -> None:
        super().__init__(dims)
        if dims.d % 4:
            raise ValueError(
                f"rotary_2d turns pairs of coordinates for rows and for columns: {dims.d} per head is no multiple of 4"
            )
        self.cells = _Cells(grid_columns(self.name, columns, dims), first)
        self.base = check_base(base)

    def extra_repr(self) -> str:
        return f"{self.cells!r}, base={self.base}"

    def turn(self, x: Tensor, places: Places) -> Tensor:
        wide, d = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        if d % 4:
            raise ValueError(f"rotary_2d turns pairs of coordinates for rows and for columns: {d} per head is no multiple of 4")
        cos, sin = places.derived(("rotary_2d", d, wide, self.extra_repr()), lambda: self._turns(places, d, wide))
        a, b = x.to(wide).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def _turns(self, places: Places, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosine and the sine of every angle, (b or 1, 1, n, d / 2): of one row where all rows agree."""
        alike = places.valid is None and places.start is not None
        row, column, _ = self.cells.of((places.at[:1] if alike else places.at)[:, None, :, None])
        frequencies = inverse_frequencies(d // 2, self.base, places.device)
        angle = torch.cat([row.double() * frequencies, column.double() * frequencies], -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


class Relative2D(Positions):
    """A number for every head and every offset in rows and columns, up to `clip` of each, added to the scores.

    s_ij + table[h, clamp(row_i - row_j), clamp(column_i - column_j)]. Pairs with a token before the grid get 0. The bias of a
    query is stored by distance i - j, n (2 max_len - 1) numbers a head. Liu et al. 2021, arXiv:2103.14030.

    `dims` are the sizes, `columns` those of the grid (a square of max_len cells unless given), `first` the number of tokens
    before it.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("softmax", width=16, heads=2, max_len=12, positions="relative_2d(columns=4)")
    >>> tuple(mixer(torch.randn(1, 12, 16)).shape)
    (1, 12, 16)
    """

    needs = Can.RELATIVE
    name = "relative_2d"

    def __init__(self, dims: Dims, *, columns: int | None = None, first: int = 0, clip: int = 16) -> None:
        super().__init__(dims)
        self.cells = _Cells(grid_columns(self.name, columns, dims), first)
        self.clip = need("clip", clip, 0, WIDEST)
        self.longest = needed_length(self.name, dims)
        self.numbers = nn.Parameter(torch.randn(dims.heads, (2 * clip + 1) ** 2) * 0.02)

    def extra_repr(self) -> str:
        return f"{self.cells!r}, clip={self.clip}"

    def term(self, q: Tensor, scale: float, at: Tensor) -> ScoreBias:  # noqa: ARG002 - the same whatever a query holds
        far = self.longest - 1
        if q.shape[2] > self.longest:
            raise ValueError(f"{q.shape[2]} tokens, but relative_2d was built for {self.longest}: build it with a larger max_len")
        at = at.expand(at.shape[0], q.shape[2])  # (b or 1, n)
        distance = torch.arange(-far, far + 1, device=q.device)
        row, column, inside = (x[..., None] for x in self.cells.of(at))
        key_row, key_column, key_inside = self.cells.of(at[..., None] - distance)
        wide = 2 * self.clip + 1
        down, right = ((a - b).clamp(-self.clip, self.clip) + self.clip for a, b in ((row, key_row), (column, key_column)))
        dtype = torch.promote_types(q.dtype, torch.float32)
        found = self.numbers.to(dtype)[:, down * wide + right]  # (h, b or 1, n, classes)
        found = found.masked_fill(~(inside & key_inside), 0)
        by_query = found.transpose(0, 1).expand(len(q), -1, -1, -1)
        return ScoreBias(clip=far, by_query=by_query)


GRID_POSITIONS: dict[str, Callable[..., Positions]] = {
    "sinusoidal_2d": Sinusoidal2D,
    "learned_2d": Learned2D,
    "rotary_2d": Rotary2D,
    "relative_2d": Relative2D,
}


def on_grid(text: str, columns: int, first: int = 0) -> str:
    """Complete positions that are on a grid with its columns, and with the tokens before it; return all others as they are.

    `on_grid("rotary_2d(base=50)", 8)` is "rotary_2d(columns=8, first=0, base=50)".
    """
    name = text.partition("(")[0].strip()
    if name not in GRID_POSITIONS:
        return text
    options = {"columns": columns, "first": first} | parse_choice(text, GRID_POSITIONS).keywords
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
