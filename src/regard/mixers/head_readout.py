"""What the layers of retention, gated linear attention and the delta rule have between their heads and the last map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.mixers.base import Core
from regard.ops.tile.tile_op import accumulator

EPSILON = 1e-5  # of the mean square of a head


class HeadReadout(nn.Module):
    """Divide the answer of every head by its root mean square, and multiply it by a swish gate of the token.

    y_h = weight * y_h / rms(y_h), then y = y * silu(W x), each if the core asks for it. The weight (e) is that of all heads.
    """

    def __init__(self, core: Core, bias: bool) -> None:
        super().__init__()
        dims = core.dims
        self.weight = nn.Parameter(torch.ones(dims.e)) if core.output_norm else None
        self.gate = nn.Linear(dims.width, dims.heads * dims.e, bias=bias) if core.output_gate else None

    @staticmethod
    def of(core: Core, bias: bool) -> HeadReadout | None:
        """Return the readout of a core; None where it asks for neither part."""
        return HeadReadout(core, bias) if core.output_norm or core.output_gate else None

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """Map answers (b n h e) of tokens x (b n w) to (b n h * e), in the type of x."""
        if self.weight is not None:
            y = y.to(accumulator(y.dtype))
            y = F.rms_norm(y, y.shape[-1:], self.weight.to(y.dtype), EPSILON)
        y = y.to(x.dtype).flatten(2)
        return y if self.gate is None else y * F.silu(self.gate(x)).to(x.dtype)


def refuse_readout(core: Core, why: str) -> None:
    """Refuse a core that asks for a norm or a gate behind its heads, where there is no layer that has them."""
    asked = [name for name in ("output_norm", "output_gate") if getattr(core, name)]
    if asked:
        raise ValueError(f"{' and '.join(asked)} of {core.name} belong to a whole layer, and {why}")
