"""Dropout that is fast on a CPU: four elements of a mask are made of one 64-bit draw, where PyTorch makes a draw for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.patterns.tiles import ceil_div
from regard.transforms import needs_plain_ops

DRAW_LEVELS = 2**16  # of an element's draw: a share is rounded to 1 / DRAW_LEVELS


def drop_out(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Set a share `p` of the elements of x (...) to zero at random, and divide the others by the share that is kept.

    >>> import torch
    >>> from regard.ops.dropout import drop_out
    >>> sorted(drop_out(torch.ones(1000), 0.5).unique().tolist())
    [0.0, 2.0]
    """
    dropped = round(p * DRAW_LEVELS)
    plain = x.device.type != "cpu" or torch.compiler.is_compiling() or needs_plain_ops()
    if not training or plain or not 0 < dropped < DRAW_LEVELS:
        return F.dropout(x, p, training)
    draws = torch.randint(-(2**63), 2**63 - 1, (ceil_div(x.numel(), 4),))
    kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - DRAW_LEVELS // 2
    return x * kept.to(x.dtype).mul_(DRAW_LEVELS / (DRAW_LEVELS - dropped))


class Dropout(nn.Dropout):
    """PyTorch's Dropout with the masks of `drop_out`; in place it is PyTorch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace:
            return super().forward(input)
        return drop_out(input, self.p, self.training)
