"""The channel mixer: every token by itself, through a wider layer and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from regard.checks import need
from regard.mixers.attention import has_hooks
from regard.ops.dropout import Dropout
from regard.ops.feed_forward import fused_feed_forward, takes_feed_forward

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's
    "silu": F.silu,
}


def activate(activation: str) -> Callable[[Tensor], Tensor]:
    """The function of that name."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return ACTIVATIONS[activation]


def check_fraction(name: str, value: float) -> float:
    """The value, if it is a share that may be dropped."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), not {value!r}")
    return float(value)


class FeedForward(nn.Module):
    """Wider, bent, and back: out = W2 act(W1 x), or gated, out = W2 (act(W1 x) * W3 x).

    activation="relu" is the Transformer's own (Vaswani et al. 2017, arXiv:1706.03762); gated=True with "gelu" or "silu" is GEGLU
    or SwiGLU (Shazeer 2020, arXiv:2002.05202), which has the weights of a plain one at two thirds of its `hidden`.

    `width` goes in and out, `hidden` is between them; `dropout` is that of the hidden layer, `bias` that of all maps.

    >>> import torch
    >>> from regard.blocks import FeedForward
    >>> channel = FeedForward(16, 32, activation="silu", gated=True, bias=False)
    >>> tuple(channel(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    maps_first = True

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "relu",
        gated: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        need("width", width)
        need("hidden", hidden)
        self.activation, self.act, self.gated = activation, activate(activation), gated
        inner = 2 * hidden if gated else hidden  # gate and value in one product
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.drop = Dropout(check_fraction("dropout", dropout))

    def forward(self, x: Tensor) -> Tensor:
        if self._fuses(x):
            return fused_feed_forward(x, self.up, self.down, self.activation)
        x = self.up(x)
        if self.gated:
            gate, value = x.chunk(2, -1)
            x = self.act(gate) * value
        else:
            x = self.act(x)
        return self.down(self.drop(x))

    def _fuses(self, x: Tensor) -> bool:
        """Return whether the layer is two unmodified linear maps and an activation, without dropout in this pass."""
        maps = self.up, self.down
        if self.gated or (self.training and self.drop.p > 0) or has_hooks(self.drop):
            return False
        plain = all(type(one) is nn.Linear and not has_hooks(one) for one in maps)
        return plain and takes_feed_forward(x, self.up, self.down, self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gated={self.gated}"
