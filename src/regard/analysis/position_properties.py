"""Test three properties of positions: extrapolation to longer sequences, learned parameters, and their number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.mixers.base import Can, Dims, Places
from regard.positions import POSITIONS, Positions, positions
from regard.spec import layer

TRAINED, LONGER = 32, 256  # tokens; the last one is farther from those swapped than any bucket of distances reaches


class PositionProperties(NamedTuple):
    """Hold the properties of one kind of positions."""

    inductive: bool  # distinguishes positions beyond max_len
    data_driven: bool  # has parameters
    parameter_efficient: bool  # their number does not grow with max_len


def position_properties(name: str, width: int = 32, heads: int = 4) -> PositionProperties:
    """Measure the properties of a kind of positions."""
    made, longer = (positions(name, Dims(width, heads, max_len=n)) for n in (TRAINED, 4 * TRAINED))
    sizes = [sum(p.numel() for p in one.parameters()) for one in (made, longer)]
    return PositionProperties(_extrapolates(made), sizes[0] > 0, sizes[0] == sizes[1])


@torch.no_grad()
def _extrapolates(made: Positions) -> bool:
    """Swap two tokens at distances beyond max_len from the last one, and return whether the last output changes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        w = made.dims.width
        x = torch.randn(1, LONGER, w, dtype=torch.float64)
        inside = made if made.needs != Can.NOTHING else None
        mixer = layer("softmax", width=w, heads=made.dims.heads, positions=inside).double()
        swapped = x.clone()
        swapped[:, [TRAINED + 8, TRAINED + 28]] = x[:, [TRAINED + 28, TRAINED + 8]]

        def last(tokens: Tensor) -> Tensor:
            return mixer(made.double().add(tokens, Places.of(tokens)))[:, -1]

        try:
            return not torch.allclose(last(x), last(swapped), rtol=0, atol=1e-12)
        except ValueError:  # positions beyond max_len are refused
            return False


def positions_table() -> str:
    """Format the properties of all positions as a Markdown table, for the README."""
    lines = ["| positions | act on | inductive | data-driven | parameter-efficient |", "|---|---|---|---|---|"]
    where = {Can.NOTHING: "tokens", Can.ROTARY: "queries and keys", Can.RELATIVE: "scores"}
    for name in POSITIONS:
        found = ("yes" if x else "no" for x in position_properties(name))
        needs = positions(name, Dims(32, 4, max_len=TRAINED)).needs
        acts = "nothing" if name == "none" else where[needs]
        lines.append(f"| `{name}` | {acts} | {' | '.join(found)} |")
    return "\n".join(lines)
