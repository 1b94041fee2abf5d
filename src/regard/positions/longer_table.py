"""Tables of learned positions for longer sequences: rows copied again and again, or interpolated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from regard.checks import need, shown

LENGTHENED = ("copied", "interpolated")


def longer_table(table: Tensor, rows: int, how: str = "copied", special: int = 0) -> Tensor:
    """Return a table of positions (rows w) made of a shorter one (n w); the first `special` rows are no positions and stay.

    "copied": position i is i mod n, as Longformer was made of RoBERTa. "interpolated": the old positions are spread evenly over
    the new ones, the first and the last where they were. Beltagy et al. 2020, arXiv:2004.05150.
    """
    if how not in LENGTHENED:
        raise ValueError(f"longer positions are 'copied' or 'interpolated', not {shown(how)}")
    there = table.shape[0] - special
    wanted = need("rows", rows) - special
    if wanted < there:
        raise ValueError(f"{wanted} positions are fewer than the {there} of the table: it can be made longer only")
    first, old = table[:special], table[special:]
    if how == "copied":
        new = old[torch.arange(wanted, device=table.device) % there]
    else:
        wide = old.to(torch.promote_types(old.dtype, torch.float32)).mT.unsqueeze(0)
        new = interpolate(wide, size=wanted, mode="linear", align_corners=True).squeeze(0).mT.to(table.dtype)
    return torch.cat([first, new])
