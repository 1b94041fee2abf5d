"""One layer of a model: a mixer over the sequence, a mixer over the channels, and a residual connection around each."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regard.blocks.feedforward import check_fraction
from regard.mixers.attention import Attention
from regard.mixers.base import Mixer, State, mask_padding, pool_tokens
from regard.mixers.state import check_states

NormClass = Callable[[int], nn.Module]


def check_context(reads: bool, context: Tensor | None, context_valid: Tensor | None) -> None:
    if reads != (context is not None) or (context is None and context_valid is not None):
        raise ValueError("build it with cross=... and pass a context, or neither")


class Block(nn.Module):
    """x + mixer(norm(x)), then x + cross(norm(x), context) in a decoder, then x + channel(norm(x)).

    norm="pre" is that; norm="post" is the paper's norm(x + mixer(x)). `norm_class` makes a norm of a width: nn.LayerNorm or
    nn.RMSNorm. `dropout` drops from what each part adds. `channel` is any module that works on every token by itself.
    It streams like a mixer, and its state is a value like a mixer's. `valid` (b n) speaks of x, `context_valid` (b m) of the
    context; outputs at padding are zero. With a mixer of rate > 1 outputs are fewer, and `fewer(valid, rate)` are real.
    """

    def __init__(
        self,
        mixer: Mixer,
        channel: nn.Module,
        *,
        cross: Mixer | None = None,
        norm: str = "pre",
        norm_class: NormClass = nn.LayerNorm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', not {norm!r}")
        if mixer.dims.cross:
            raise ValueError("the mixer of a block mixes its own tokens: give the one that reads a context as cross=")
        self.width, self.rate, self.pre = mixer.dims.width, mixer.rate, norm == "pre"
        if cross is not None and (not cross.dims.cross or cross.rate > 1 or cross.dims.width != self.width):
            raise ValueError(f"cross= needs a mixer of width {self.width}, built with cross=True, with an answer for every token")
        self.mixer_norm, self.mixer = norm_class(self.width), mixer
        self.cross_norm, self.cross = None if cross is None else norm_class(self.width), cross
        self.channel_norm, self.channel = norm_class(self.width), channel
        self.drop = nn.Dropout(check_fraction("dropout", dropout))

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        context: Tensor | None = None,
        context_valid: Tensor | None = None,
        hush: bool = True,
    ) -> Tensor:
        """hush=False: padded tokens are finite, as the caller has seen to, and outputs at padding are anything finite."""
        check_context(self.cross is not None, context, context_valid)
        if hush:
            self._check(x, valid, context, context_valid)
            x, context = mask_padding(x, valid), None if context is None else mask_padding(context, context_valid)
        y = self._before(self.mixer_norm, x)
        y = self.mixer(y, valid=valid, hush=False) if isinstance(self.mixer, Attention) else self.mixer(y, valid=valid)
        x, valid = pool_tokens(x, valid, self.rate)
        x = self._after(self.mixer_norm, x, y)
        if self.cross is not None:
            more = {"hush": False} if isinstance(self.cross, Attention) else {}
            y = self._before(self.cross_norm, x)
            y = self.cross(y, context=context, valid=context_valid, query_valid=valid, **more)
            x = self._after(self.cross_norm, x, y)
        return self._channel(x, valid if hush else None)

    def start(self, batch: int | None = None, *, context: Tensor | None = None, context_valid: Tensor | None = None) -> State:
        """Before the first token: the number of sequences, or the context that they will read."""
        check_context(self.cross is not None, context, context_valid)
        if context is not None and batch not in (None, len(context)):
            raise ValueError(f"the context has {len(context)} sequences, not {batch}: leave out the batch")
        own = self.mixer.start(batch if context is None else len(context))
        cross = None if self.cross is None else self.cross.start(context=context, valid=context_valid)
        return State((own, cross), own.t, own.start)

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None, *, hush: bool = True) -> tuple[Tensor, State]:
        check_states(state, x, 2, "block")
        own, cross = state.memory
        if hush:
            self._check(x, valid)
            x = mask_padding(x, valid)
        y, own = self.mixer.extend(own, self._before(self.mixer_norm, x), valid)
        x = self._after(self.mixer_norm, x, y)
        if self.cross is not None:
            y, cross = self.cross.extend(cross, self._before(self.cross_norm, x), valid)
            x = self._after(self.cross_norm, x, y)
        return self._channel(x, valid if hush else None), State((own, cross), own.t, own.start)

    def _check(self, x: Tensor, valid: Tensor | None, context: Tensor | None = None, context_valid: Tensor | None = None) -> None:
        """Refuse tokens and masks that the mixers would refuse, before anything is computed."""
        self.mixer.check(x)
        self.mixer.check_padding(valid, x)
        if self.cross is not None and context is not None:
            self.cross.check(context, "context", self.cross.dims.context_width)
            self.cross.check_padding(context_valid, context)

    def _channel(self, x: Tensor, valid: Tensor | None) -> Tensor:
        return mask_padding(self._after(self.channel_norm, x, self.channel(self._before(self.channel_norm, x))), valid)

    def _before(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        return norm(x) if self.pre and norm is not None else x

    def _after(self, norm: nn.Module | None, x: Tensor, y: Tensor) -> Tensor:
        x = x + (self.drop(y) if self.training else y)
        return x if self.pre or norm is None else norm(x)
