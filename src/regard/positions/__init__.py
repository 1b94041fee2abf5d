"""Every kind of positions: added to the tokens, turning queries and keys, or a bias of the scores.

    sinusoidal, learned, floater, rnn      tokens = positions.add(tokens, places), once, before the first layer
    rotary, relative, alibi, buckets       layer("softmax", ..., positions="rotary"), in every layer
    sinusoidal_2d, learned_2d              as those of a line, on a grid whose cells are tokens: patches of an image
    rotary_2d, relative_2d                 inside every layer, on a grid
    none                                   no positions: the control

All of them take positions from `Places`, so that padding, streaming and prompts of different length work with each of them.
"""

from __future__ import annotations

from collections.abc import Callable

from regard.mixers.base import Dims
from regard.mixers.position_interface import Positions
from regard.positions.added import Floater, Learned, Nothing, Recurrent, Sinusoidal
from regard.positions.bias import Alibi, Buckets, RelativePositions
from regard.positions.grid_positions import GRID_POSITIONS, Learned2D, Relative2D, Rotary2D, Sinusoidal2D
from regard.positions.rotary import Rotary
from regard.text import parse_choice

__all__ = [
    "POSITIONS",
    "Alibi",
    "Buckets",
    "Floater",
    "Learned",
    "Learned2D",
    "Nothing",
    "Positions",
    "Recurrent",
    "Relative2D",
    "RelativePositions",
    "Rotary",
    "Rotary2D",
    "Sinusoidal",
    "Sinusoidal2D",
]

#: Every kind of positions by its name in texts.
#:
#: >>> from regard.positions import POSITIONS
#: >>> POSITIONS["rotary"].__name__
#: 'Rotary'
POSITIONS: dict[str, Callable[..., Positions]] = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "relative": RelativePositions,
    "floater": Floater,
    "rnn": Recurrent,
    "rotary": Rotary,
    "alibi": Alibi,
    "buckets": Buckets,
    **GRID_POSITIONS,
    "none": Nothing,
}


def positions(spec: str | Positions, dims: Dims) -> Positions:
    """`positions("relative(clip=8)", dims)`; what is made already is given back."""
    if isinstance(spec, Positions):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"positions are a text such as 'rotary' or 'relative(clip=8)', or made already, not {spec!r}")
    return parse_choice(spec, POSITIONS)(dims)


def entering(spec: str | Positions | None, dims: Dims, depth: int) -> Floater | None:
    """Make the positions that enter each of so many blocks, if they are of that kind."""
    given = getattr(spec, "every_block", False)
    if isinstance(spec, str):
        choice = parse_choice(spec, POSITIONS)
        given = choice.keywords.get("every_block")
    made = None
    if given and spec is not None:
        made = positions(spec, dims)
    if isinstance(made, Floater):
        return made.begin(depth)
    return None
