"""What a backend of tile attention is given and what it returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.ops.score_bias import ScoreBias
from regard.patterns.plan import Plan


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums are kept: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class TileCall(NamedTuple):
    """One call of tile attention. Query heads x * h / g .. (x + 1) * h / g - 1 share key and value head x: none is repeated."""

    q: Tensor  # (b h n d)
    k: Tensor  # (b g m d)
    v: Tensor  # (b g m e)
    valid: Tensor | None  # (b m) keys that exist; None: all
    bias: ScoreBias | None  # what positions add to scores and outputs
    seed: Tensor | None  # () int64, of dropout: see `regard.ops.dropout_hash`
    scale: float
    dropout: float

    @property
    def width(self) -> int:
        """Return the number of output columns: e, and those of the bias behind them."""
        return self.v.shape[-1] + (0 if self.bias is None else self.bias.more)


class PlanHeads(NamedTuple):
    """Query heads that compute the same plan."""

    plan: Plan
    heads: tuple[int, ...]


HeadPlans = tuple[PlanHeads, ...]  # every query head in exactly one of them
Gradients = tuple[Tensor | None, ...]  # of q, k, v and bias.by_query


class PreparedPass(Protocol):
    """What a backend prepared for all calls with one signature, see `pass_key`, and one plan."""

    plans: HeadPlans
    size: int  # numbers that it holds

    def forward(self, call: TileCall) -> tuple[Tensor, Tensor]:
        """Compute `TileBackend.forward`."""
        ...

    def backward(self, call: TileCall, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Gradients:
        """Compute `TileBackend.backward`."""
        ...


class TileBackend(Protocol):
    """An implementation of tile attention. With prepare(call, plans) -> PreparedPass it prepares a signature."""

    name: str

    def refuses(self, call: TileCall, plans: HeadPlans) -> str | None:
        """Return a sentence about what this backend cannot compute in a call, or None."""
        ...

    def forward(self, call: TileCall, plans: HeadPlans) -> tuple[Tensor, Tensor]:
        """Return out (b h n width) in the type of v or better, and log-sum-exp (b h n) in float32 or better.

        Rows without pairs are 0 and MASKED_SCORE. The results are new tensors.
        """
        ...

    def backward(
        self, call: TileCall, plans: HeadPlans, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Return the gradients of q, k, v and bias.by_query, from the results of `forward` and their gradients.

        d_lse is None where nothing depends on the log-sum-exp.
        """
        ...
