"""The lecture's question to every kind of position, answered by trying: does it go on, is it learned, is it small?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.mixers.base import Can, Dims, Places
from regard.positions import POSITIONS, Positions, positions
from regard.spec import layer

TRAINED, LONGER = 32, 96  # tokens


class PositionProperties(NamedTuple):
    inductive: bool  # tells apart places that are further away than any it was built for
    data_driven: bool  # learns something
    parameter_efficient: bool  # does not grow with the longest sequence


def position_properties(name: str, width: int = 32, heads: int = 4) -> PositionProperties:
    made, longer = (positions(name, Dims(width, heads, max_len=n)) for n in (TRAINED, 4 * TRAINED))
    sizes = [sum(p.numel() for p in one.parameters()) for one in (made, longer)]
    return PositionProperties(_goes_on(made), sizes[0] > 0, sizes[0] == sizes[1])


@torch.no_grad()
def _goes_on(made: Positions) -> bool:
    """Swap two tokens, both further from the last one than training could show: does the last one's answer change?"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, w = torch.randn(1, LONGER, made.dims.width, dtype=torch.float64), made.dims.width
        inside = made if made.needs != Can.NOTHING else None
        mixer = layer("softmax", width=w, heads=made.dims.heads, positions=inside).double()
        swapped = x.clone()
        swapped[:, [TRAINED + 8, TRAINED + 28]] = x[:, [TRAINED + 28, TRAINED + 8]]

        def last(tokens: Tensor) -> Tensor:
            return mixer(made.double().add(tokens, Places.of(tokens)))[:, -1]

        try:
            return not torch.allclose(last(x), last(swapped), rtol=0, atol=1e-12)
        except ValueError:  # it has nothing to say about a place so far away
            return False


def positions_table() -> str:
    """In Markdown, for the README."""
    lines = ["| positions | act on | inductive | data-driven | parameter-efficient |", "|---|---|---|---|---|"]
    where = {Can.NOTHING: "tokens", Can.ROTARY: "queries and keys", Can.RELATIVE: "scores"}
    for name in POSITIONS:
        found = ("yes" if x else "no" for x in position_properties(name))
        acts = "nothing" if name == "none" else where[positions(name, Dims(32, 4, max_len=TRAINED)).needs]
        lines.append(f"| `{name}` | {acts} | {' | '.join(found)} |")
    return "\n".join(lines)
