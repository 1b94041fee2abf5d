"""The interface of positions to a mechanism; the kinds of positions are in `regard/positions`."""

from __future__ import annotations

from torch import Tensor, nn

from regard.mixers.base import Can, Dims, Places
from regard.ops.score_bias import ScoreBias


class Positions(nn.Module):
    """Acts in one of three places: on the tokens, on queries and keys, or on the scores. Elsewhere it leaves all as it is.

    `dims` are the sizes of the layer. A subclass overrides `add` (tokens), `turn` (queries and keys) or `term` (scores), and
    declares in `needs` what a core must be able to do.

    >>> from regard import Dims, Positions
    >>> from regard.positions import positions
    >>> made = positions("rotary(base=500.0)", Dims(width=16, heads=2))
    >>> isinstance(made, Positions), str(made.needs)
    (True, 'rotary')
    """

    every_block: bool = False  # it acts on the tokens of every block, and belongs to a stack
    needs: Can = Can.NOTHING  # what a core must be able to do; nothing: it acts on the tokens, before any layer

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def add(self, x: Tensor, places: Places) -> Tensor:  # noqa: ARG002
        """Tokens (b n w) that carry their positions."""
        return x

    def turn(self, x: Tensor, places: Places) -> Tensor:  # noqa: ARG002
        """Queries or keys (b h n d) that carry theirs."""
        return x

    def term(self, q: Tensor, scale: float, at: Tensor) -> ScoreBias:  # noqa: ARG002
        """What the scores of these queries (b h n d) at positions `at` (b n), or (1 n) for all rows, get, by distance."""
        return ScoreBias()

    def finish(self, out: Tensor, e: int) -> Tensor:  # noqa: ARG002
        """The answers (b h n e), from those that hold the term's columns behind the first e."""
        return out
