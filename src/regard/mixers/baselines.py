"""Baselines of attention: layers over a window of neighbours, and recurrent networks. No heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import WIDEST, check_batch, need
from regard.mixers.attention import no_autocast
from regard.mixers.base import Can, Dims, Places, State
from regard.mixers.feature_math import upcast
from regard.mixers.unpad import UnpaddedMixer
from regard.ops.budget import budget
from regard.ops.depthwise import slide_depthwise, takes_depthwise
from regard.ops.joined_linear import token_linear
from regard.ops.rnn import rnn_scan

WEIGHED = 4096  # tokens of a window, each with weights of its own
RNN_CLAIMS = Can.CAUSAL | Can.PADDING | Can.STREAM


class Recent(NamedTuple):
    tokens: Tensor  # (b reach w) the last ones, the newest at the end; zeros where there were none


class _Window(UnpaddedMixer):
    """A filter that slides over real tokens; beyond the ends of a sequence there are zeros."""

    can = RNN_CLAIMS
    reach: int  # how far it sees: all of it back where it is causal, else half of it to each side
    filter: nn.Parameter

    @property
    def receptive_field(self) -> int:
        """Tokens from the first to the last that an output depends on, if the sequence has that many."""
        return self.reach + 1

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def slide(self, line: Tensor) -> Tensor:
        """The outputs (b n w) of a line (b n + reach w)."""
        raise NotImplementedError

    @property
    def latency(self) -> int:
        """Return how many tokens later `extend` gives an output: half of what it sees, or 0 where it is causal."""
        return 0 if self.dims.causal else self.reach // 2

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        if self.dims.causal or batch is None or context is not None or valid is not None:
            return super().start(batch, context=context, valid=valid)
        check_batch(batch)
        zeros = self.filter.new_zeros(batch, self.latency, self.dims.width)  # in front of a sequence
        return State(Recent(zeros), torch.zeros(batch, dtype=torch.long, device=zeros.device), 0, self.maker())

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the outputs of n more tokens x (b n w), and the state after them.

        Where it is not causal, outputs come `latency` tokens later, `finish(state)` gives the last ones; rows have no padding.
        """
        if self.dims.causal:
            return super().extend(state, x, valid)
        self.check(x)
        self.check_state(state, x)
        if valid is not None:
            raise ValueError("a stream that looks ahead has rows of one length, without padding: leave out valid")
        places = Places.of(x, None, state.t, state.start)
        self.check_length(places)
        line = torch.cat([state.memory.tokens, self.prepare(x)], 1)
        last = line[:, max(line.shape[1] - self.reach, 0) :].clone()  # not a view: it would keep the whole line
        return self._slid(line, x), self.later(state, Recent(last), places)

    def finish(self, state: State) -> Tensor:
        if self.dims.causal:
            return super().finish(state)
        line = state.memory.tokens
        return self._slid(F.pad(line, (0, 0, 0, self.latency)), line)

    def _slid(self, line: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of a line (b m w): m - reach of them, or none."""
        if line.shape[1] <= self.reach:
            return x.new_zeros(len(x), 0, self.dims.width)
        return self.slide(line)

    def empty(self, batch: int) -> Recent:
        return Recent(self.filter.new_zeros(batch, self.reach, self.dims.width))

    def mix(self, x: Tensor, places: Places) -> Tensor:
        side = self.reach // 2
        return self.slide(F.pad(self._real(x, places), (0, 0, side, side)))

    def scan(self, memory: Recent, x: Tensor, places: Places) -> tuple[Tensor, Recent]:
        line = torch.cat([memory.tokens, self._real(x, places)], 1)
        if places.valid is None:
            last = line[:, x.shape[1] :].clone()  # not a view: it would keep the whole line
        else:
            last = places.valid.sum(1)[:, None] + torch.arange(self.reach, device=x.device)
            index = last[..., None].expand(-1, -1, line.shape[2])
            last = line.gather(1, index)
        return self.slide(line), Recent(last)

    def _real(self, x: Tensor, places: Places) -> Tensor:
        tokens = self.prepare(x)
        if places.valid is None:
            return tokens
        return tokens.masked_fill(~places.valid[..., None], 0)


def _centred(name: str, size: int, dims: Dims) -> int:
    """The size of a window, odd where it must have a middle."""
    even = need(name, size, 1, WEIGHED) % 2 == 0
    if even and not dims.causal:
        raise ValueError(f"{name} counts tokens, the own one in the middle: {size} is an even number, which needs causal=True")
    return size


def _cut(line: Tensor, reach: int, convolve: Callable[[Tensor], Tensor]) -> Tensor:
    """What a convolution (x w m + reach) -> (x w m) makes of a line (b n + reach w), (b n w).

    A long line is cut into strips that overlap by the reach: on a CPU one long dense convolution takes more than its share.
    """
    b, n, w = line.shape[0], line.shape[1] - reach, line.shape[2]
    size = budget(line.device).conv_tokens
    if n <= size:
        return convolve(line.mT).mT
    padded = F.pad(line, (0, 0, 0, -n % size))
    strips = padded.unfold(1, size + reach, size)  # (b strips w size + reach)
    found = convolve(strips.flatten(0, 1)).mT
    return found.reshape(b, -1, w)[:, :n]


class Conv(_Window):
    """A convolution: the same few weights at every position, by distance alone.

    out = W2 c + b2,  c_i = sum_t F_t h_(i - step t),  h = W1 x + b1, with h = 0 outside of the sequence; step is the dilation, t
    runs over `kernel` taps around i, or from i back where it is causal. depthwise: F_t has one weight per channel, else it is a
    matrix. An output depends on `receptive_field` = (kernel - 1) dilation + 1 tokens. Time n kernel, memory constant.
    Kaiser et al. 2017, arXiv:1706.03059, where the dilation is 1 and W1 belongs to the layer before.
    """

    maps_first = True

    def __init__(self, dims: Dims, *, kernel: int = 7, dilation: int = 1, depthwise: bool = True) -> None:
        super().__init__(dims)
        if not isinstance(depthwise, bool):
            raise ValueError(f"depthwise must be True or False, not {depthwise!r}")
        self.dilation = need("dilation", dilation)
        self.groups = dims.width if depthwise else 1
        self.reach = (_centred("kernel", kernel, dims) - 1) * dilation
        if self.reach >= WIDEST:
            raise ValueError(f"a token may depend on {WIDEST:,} others, not on {self.reach:,}: take a smaller kernel or dilation")
        fan = dims.width // self.groups * kernel
        self.into = nn.Linear(dims.width, dims.width)
        self.out = nn.Linear(dims.width, dims.width)
        drawn = torch.randn(dims.width, dims.width // self.groups, kernel)
        self.filter = nn.Parameter(drawn * fan**-0.5)  # oldest tap first

    def prepare(self, x: Tensor) -> Tensor:
        return token_linear(self.into, x)

    def mix(self, x: Tensor, places: Places) -> Tensor:
        return self._filtered(self._real(x, places), self.reach // 2) if self._slides(x) else super().mix(x, places)

    def scan(self, memory: Recent, x: Tensor, places: Places) -> tuple[Tensor, Recent]:
        whole = places.start == 0 and places.valid is None and x.shape[1] >= self.reach  # nothing is remembered
        if not whole or not self._slides(x):
            return super().scan(memory, x, places)
        tokens = self.prepare(x)
        last = tokens[:, x.shape[1] - self.reach :].to(memory.tokens.dtype, copy=True)
        return self._filtered(tokens, self.reach), Recent(last)

    def _slides(self, x: Tensor) -> bool:
        """Return whether a filter slides over tokens x (b n w) as they lie."""
        return self.groups != 1 and takes_depthwise(x, self.filter.shape[2])

    def _filtered(self, tokens: Tensor, before: int) -> Tensor:
        """Return outputs (b n w) of all tokens, the first of which sees zeros in front of it."""
        return self.project(slide_depthwise(tokens, self.filter[:, 0], tokens.shape[1], before, self.dilation))

    def project(self, mixed: Tensor) -> Tensor:
        """Return outputs (b n w) of the sums c (b n w)."""
        return token_linear(self.out, mixed)

    def slide(self, line: Tensor) -> Tensor:
        def convolve(x: Tensor) -> Tensor:
            return F.conv1d(x, self.filter, dilation=self.dilation, groups=self.groups)

        if self.groups == 1:
            return self.project(_cut(line, self.reach, convolve))
        if self._slides(line):
            return self.project(slide_depthwise(line, self.filter[:, 0], line.shape[1] - self.reach, 0, self.dilation))
        return self.project(convolve(line.mT).mT)


class WindowFC(_Window):
    """A fully connected layer over a window of neighbours: the first thing one tries, before attention.

    out_i = W [x_(i-r) ... x_(i+r)] + b with window = 2 r + 1 and zeros outside of the sequence; where it is causal, the last
    `window` tokens. Its weights grow with what it sees. Time n window, memory constant. Waibel et al. 1989, doi:10.1109/29.21701.
    """

    def __init__(self, dims: Dims, *, window: int = 7) -> None:
        super().__init__(dims)
        self.reach = _centred("window", window, dims) - 1
        fan = window * dims.width
        self.filter = nn.Parameter(torch.randn(dims.width, window, dims.width) * fan**-0.5)  # oldest first
        self.bias = nn.Parameter(torch.zeros(dims.width))

    @property
    def name(self) -> str:
        return "window_fc"

    def slide(self, line: Tensor) -> Tensor:
        return _cut(line, self.reach, lambda x: F.conv1d(x, self.filter.mT, self.bias))


class Hidden(NamedTuple):
    h: Tensor  # (b hidden)
    c: Tensor | None  # (b hidden) the cell of an LSTM


class RNN(UnpaddedMixer):
    """A network that reads one token after the other and remembers what it has read in a vector.

    h_i = cell(x_i, h_(i-1)), out = W h + b, with torch.nn's GRU or LSTM for a cell. Where it is not causal it reads in both
    directions, out = W [h, h'] + b, unless both=False. Time n, memory constant; steps wait for each other, and torch.compile
    breaks its graph around them. Half precision is computed in float32. Second derivatives on a GPU need
    torch.backends.cudnn.flags(enabled=False), as cuDNN has none. Cho et al. 2014, arXiv:1406.1078, and
    Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735.
    """

    can = RNN_CLAIMS

    def __init__(self, dims: Dims, *, cell: str = "gru", hidden: int | None = None, both: bool | None = None) -> None:
        super().__init__(dims)
        if cell not in ("gru", "lstm"):
            raise ValueError(f"cell must be 'gru' or 'lstm', not {cell!r}")
        if not (both is None or isinstance(both, bool)):
            raise ValueError(f"both must be True or False, or left out, not {both!r}")
        if both and dims.causal:
            raise ValueError("a causal rnn reads in one direction: leave out both")
        self.both = not dims.causal if both is None else both
        self.hidden = dims.width if hidden is None else need("hidden", hidden, 1, WIDEST // 4)
        make: Callable[..., nn.RNNBase] = nn.GRU if cell == "gru" else nn.LSTM
        self.cell = make(dims.width, self.hidden, bidirectional=self.both)
        self.parts = 1 if cell == "gru" else 2
        self.out = nn.Linear(self.hidden * (1 + self.both), dims.width)

    def like(self) -> Tensor:
        return self.out.weight

    def empty(self, batch: int) -> Hidden:
        h = self._exact(self.out.weight).new_zeros(batch, self.hidden)
        c = h.clone() if self.parts == 2 else None
        return Hidden(h, c)

    def mix(self, x: Tensor, places: Places) -> Tensor:
        zero = self._exact(self.out.weight).new_zeros(1 + self.both, x.shape[0], self.hidden)
        return self.out(self._read(x, [zero] * self.parts, places.valid)[0])

    def scan(self, memory: Hidden, x: Tensor, places: Places) -> tuple[Tensor, Hidden]:
        y, state = self._read(x, [part[None] for part in memory if part is not None], places.valid)
        h, *c = (part[0] for part in state)
        return self.out(y), Hidden(h, c[0] if c else None)

    def _read(self, x: Tensor, state: list[Tensor], valid: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        if torch.compiler.is_dynamo_compiling():  # it refuses recurrent networks, and would record every step of one
            from regard.ops.uncompiled import uncompiled

            return uncompiled(self._recur, x, state, valid)
        return self._recur(x, state, valid)

    def _recur(self, x: Tensor, state: list[Tensor], valid: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        weights = [self._exact(w) for direction in self.cell.all_weights for w in direction]
        count = None if valid is None else valid.sum(1)
        with no_autocast(x):
            y, state = rnn_scan(x.to(weights[0].dtype), state, weights, both=self.both, count=count)
        return y.to(x.dtype), state

    @staticmethod
    def _exact(x: Tensor) -> Tensor:
        """In half precision a state would be rounded after every step, and a memory that is rounded so often forgets."""
        return upcast(x)
