"""Guided cross attention: weights from a target to a source that depend on the weights of the step before.

Each aligner replaces the cross attention of a block, streams like it, and exposes its weights.
Letters: b batch, h heads, n source tokens, m target tokens, d key dim, e value dim, w width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Config
from regard.mixers.attention import no_autocast
from regard.mixers.base import Mixer
from regard.mixers.dims import Can, Dims
from regard.mixers.feature_math import upcast
from regard.mixers.places import Places, mask_padding
from regard.mixers.state import State
from regard.models.build import translator
from regard.models.translator import Translator
from regard.ops.dropout import drop_out
from regard.text import unknown


class AlignerState(NamedTuple):
    """The encoded source and the weights of the step before. Keys and weights have real tokens in front, values do not."""

    k: Tensor  # (b h n d)
    v: Tensor  # (b h n e)
    real: Tensor  # (b n) of the keys
    back: Tensor | None  # (b n) the column of each source token among the keys; None: their own columns
    before: Tensor  # (b h n) weights of the step before


class Aligner(Mixer):
    """Cross attention with recorded weights: out_i = sum_j a_ij v_j, a = `align`(queries, keys, the step before).

    `forward` is `start` and one long `extend`. `record_alignments(model)` collects the weights that pass through `seen`.
    """

    can = Can.CROSS | Can.PADDING | Can.STREAM | Can.DROPOUT

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        if not dims.cross or dims.g != dims.heads:
            raise ValueError(f"{self.name} reads a context with keys for each head: build it with cross=True, without kv_heads")
        context_width = dims.context_width or dims.width
        key_width = dims.heads * dims.d
        value_width = dims.heads * dims.e
        self.q, self.k = nn.Linear(dims.width, key_width), nn.Linear(context_width, key_width)
        self.v, self.out = nn.Linear(context_width, value_width), nn.Linear(value_width, dims.width)
        for part in (self.q, self.k, self.v, self.out):
            nn.init.xavier_uniform_(part.weight)
        self.seen = nn.Identity()

    def align(self, source: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights (b h m n) of queries (b h m d), and those of the last real one (b h n). Padded ones have no effect."""
        raise NotImplementedError

    def first(self, k: Tensor) -> Tensor:
        """Return the weights before the first step (b h n): zeros."""
        return upcast(k).new_zeros(k.shape[:3])

    def forward(
        self, x: Tensor, *, context: Tensor | None = None, valid: Tensor | None = None, query_valid: Tensor | None = None
    ) -> Tensor:
        state = self.start(context=context, valid=valid)
        return self.extend(state, x, query_valid)[0]

    def forward_at(
        self, x: Tensor, places: Places, *, context: Tensor | None = None, context_places: Places | None = None
    ) -> Tensor:
        t = torch.zeros(len(x), dtype=torch.long, device=x.device)
        state = self.start_at(t, context=context, context_places=context_places)
        return self.extend_at(state, x, places)[0]

    def weights(
        self, x: Tensor, context: Tensor | None = None, *, valid: Tensor | None = None, query_valid: Tensor | None = None
    ) -> Tensor:
        """Return (b h m n): how much step i takes of token j; 0 at padding of either side."""
        state = self.start(context=context, valid=valid)
        x, places = self._checked(state, x, query_valid)
        return self._weights(state, x, places)[0]

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        if context is None or batch is not None:
            raise ValueError("cross attention starts from what it reads: start(context=..., valid=...)")
        self.check(context, "context", self.dims.context_width)
        self.check_padding(valid, context)
        context = mask_padding(context, valid)
        t = torch.zeros(len(context), dtype=torch.long, device=context.device)
        places = Places.of(context, valid)
        return self.start_at(t, context=context, context_places=places)

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:
        assert context is not None and context_places is not None
        self.check_length(context_places)
        real, order = context_places.valid, context_places.unpad_order
        v = self._split(self.v(context))
        if real is None:
            real = torch.ones(context.shape[:2], dtype=torch.bool, device=context.device)
        back = None
        if order is not None:
            index = order.there[..., None].expand_as(context)
            context, real, back = context.gather(1, index), order.real, order.back
        k = self._split(self.k(context))
        source = AlignerState(k, v, real, back, self.first(k))
        return State(source, t, 0, self.maker())

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        x, places = self._checked(state, x, valid)
        y, after = self.extend_at(state, x, places)
        return mask_padding(y, valid), after

    def extend_at(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        weights, after = self._weights(state, x, places)
        weights = self.seen(weights)
        weights = drop_out(weights, self.dims.dropout, self.training)
        with no_autocast(weights):
            y = weights @ upcast(state.memory.v)
        y = y.to(x.dtype).transpose(1, 2)
        return self.out(y.flatten(2)), after

    def _split(self, x: Tensor) -> Tensor:
        """Split heads: (b n w) -> (b h n d)."""
        heads = x.unflatten(-1, (self.dims.heads, -1))
        return heads.transpose(1, 2)

    def _checked(self, state: State, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Places]:
        """Return checked tokens (b m w) with zeros at padding, and their places."""
        self.check(x)
        self.check_state(state, x)
        self.check_padding(valid, x)
        return mask_padding(x, valid), Places.of(x, valid, state.t, state.start)

    def _weights(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        """Return the weights (b h m n) of tokens x (b m w), and the state after them."""
        source, valid = state.memory, places.valid
        q = self._split(self.q(x))
        with no_autocast(q):
            weights, before = self.align(source, upcast(q), valid)
        if source.back is not None:
            index = source.back[:, None, None].expand_as(weights)
            weights = weights.gather(-1, index)
        if valid is not None:
            weights = weights.masked_fill(~valid[:, None, :, None], 0)
        return weights, self.later(state, source._replace(before=before), places)


def aligner_softmax(scores: Tensor, real: Tensor) -> Tensor:
    """Normalize scores (b h ... n) over real tokens (b n); zeros where there are none."""
    inner = [1] * (scores.dim() - 2)
    padding = ~real.view(len(real), *inner, -1)
    lowest = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(padding, lowest).softmax(-1)
    return weights.masked_fill(padding, 0)


def scan_aligner(step: Callable[[int, Tensor], Tensor], m: int, before: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute a_i = step(i, a_{i-1}) for i < m, as (b h m n), and the last of them; a step at padding keeps a_{i-1}."""
    rows = [before[:, :, None][:, :, :0]]
    for i in range(m):
        now = step(i, before)
        if real is not None:
            now = torch.where(real[:, i, None, None], now, before)
        rows.append(now[:, :, None])
        before = now
    return torch.cat(rows, 2), before


class SoftmaxAligner(Aligner):
    """Softmax attention with recorded weights, independent of the step before."""

    def align(self, source: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        scores = q @ upcast(source.k).mT
        scale = math.sqrt(q.shape[-1])
        return aligner_softmax(scores / scale, source.real), source.before


ENERGIES = ("dot", "additive")


class MonotonicAligner(Aligner):
    """Read forwards only. Raffel et al. 2017, arXiv:1704.00784.

    From where it stopped last it goes on, and stops at token j with probability p_ij = sigmoid(energy_ij). In training its
    weights are those of the expected path, a_ij = p_ij s_ij with s_ij = (1 - p_i,j-1) s_i,j-1 + a_i-1,j, with noise before the
    sigmoid, so that it learns to decide. In evaluation it has decided (`hard`): p is 0 or 1, and it reads one token.
    energy="dot": q_i.k_j / sqrt(d) + r, which is not the paper's but costs less. energy="additive", the paper's:
    g v.tanh(q_i + k_j) / |v| + r with q = W s + b, k = V h, and v (d), g, r of each head; g begins as 1 / sqrt(d).
    `keep`, which the paper does not have: at the last token it always stops; else a path may run off the end and see nothing.

    `dims` are the sizes, with cross=True; `noise` is the size of the noise, `lean` the first value of r, below 0 so that it goes
    on rather than stops.

    >>> import torch
    >>> from regard import Dims
    >>> from regard.models import MonotonicAligner
    >>> aligner = MonotonicAligner(Dims(width=16, heads=2, cross=True)).eval()
    >>> x, context = torch.randn(1, 4, 16), torch.randn(1, 6, 16)
    >>> tuple(aligner.weights(x, context).shape)
    (1, 2, 4, 6)
    """

    def __init__(
        self, dims: Dims, *, hard: bool = True, noise: float = 1.0, keep: bool = True, lean: float = -1.0, energy: str = "dot"
    ) -> None:
        super().__init__(dims)
        if noise < 0:
            raise ValueError(f"noise is a standard deviation, at least 0, not {noise!r}")
        if energy not in ENERGIES:
            raise ValueError(unknown("energy cannot be", energy, ENERGIES))
        self.hard, self.noise, self.keep, self.energy = hard, noise, keep, energy
        self.lean = nn.Parameter(torch.full((dims.heads,), float(lean)))  # r: rather on than stop
        if energy == "additive":
            self.u = nn.Parameter(torch.randn(dims.heads, dims.d))
            self.gain = nn.Parameter(torch.full((dims.heads,), dims.d**-0.5))

    def first(self, k: Tensor) -> Tensor:
        """Return weights before the first step (b h n): all on the first token."""
        zeros = super().first(k)
        if not k.shape[2]:
            return zeros
        return F.pad(zeros[..., 1:], (1, 0), value=1.0)

    def align(self, source: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = self._scores(source, q)
        stop = scores.sigmoid()
        jumps = _jumps((-scores).sigmoid())

        def step(i: int, before: Tensor) -> Tensor:
            for s, jump in jumps:
                shifted = F.pad(before[..., :-s], (s, 0))
                before = before + jump[:, :, i] * shifted
            return stop[:, :, i] * before

        return scan_aligner(step, q.shape[2], source.before, real)

    def _scores(self, source: AlignerState, q: Tensor) -> Tensor:
        """Return the logits (b h m n) of the probabilities to stop."""
        energy = self._energy(q, upcast(source.k))
        scores = energy + upcast(self.lean)[:, None, None]
        if self.training and self.noise:
            scores = scores + self.noise * torch.randn_like(scores)
        elif self.hard and not self.training:
            scores = torch.where(scores > 0, torch.inf, -torch.inf)
        if self.keep:
            columns = torch.arange(scores.shape[-1], device=q.device)
            last = columns == source.real.sum(1, keepdim=True) - 1
            scores = scores.masked_fill(last[:, None, None], torch.inf)
        return scores.masked_fill(~source.real[:, None, None], -torch.inf)

    def _energy(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the energies (b h m n) of queries (b h m d) and keys (b h n d), without r."""
        if self.energy == "dot":
            return q @ k.mT / math.sqrt(q.shape[-1])
        direction = F.normalize(upcast(self.u), dim=-1)
        v = direction * upcast(self.gain)[:, None]
        hidden = (q[:, :, :, None] + k[:, :, None]).tanh()
        return (hidden @ v[:, None, :, None]).squeeze(-1)


def _jumps(on: Tensor) -> list[tuple[int, Tensor]]:
    """Return the factors of y_j = x_j + on_{j-1} y_{j-1} computed in log2(n) rounds x_j += jump_j x_{j-s}, s = 1, 2, 4, ...

    Products of numbers from 0 to 1, never a quotient: a factor that underflows to 0 belongs to a path of probability 0.
    """
    found: list[tuple[int, Tensor]] = []
    jump, s = F.pad(on[..., :-1], (1, 0)), 1
    while s < on.shape[-1]:
        found.append((s, jump))
        shifted = F.pad(jump[..., :-s], (s, 0))
        jump, s = jump * shifted, 2 * s
    return found


class LocationAligner(Aligner):
    """Location-aware attention: scores depend on the weights of the step before. Chorowski et al. 2015, arXiv:1506.07503.

    a_i = softmax_j(u.tanh(q_i + k_j + (W * a_{i-1})_j)), where W * is a convolution over `window` tokens. Before the first step
    all weights are 0. The paper's filters and the matrix behind them are one W here.

    `dims` are the sizes, with cross=True.

    >>> import torch
    >>> from regard import Dims
    >>> from regard.models import LocationAligner
    >>> aligner = LocationAligner(Dims(width=16, heads=2, cross=True)).eval()
    >>> x, context = torch.randn(1, 4, 16), torch.randn(1, 6, 16)
    >>> tuple(aligner.weights(x, context).shape)
    (1, 2, 4, 6)
    """

    def __init__(self, dims: Dims, *, window: int = 15) -> None:
        super().__init__(dims)
        if window < 1 or window % 2 == 0:
            raise ValueError(f"window must be odd, as many tokens on the left as on the right, not {window!r}")
        h, d = dims.heads, dims.d
        self.near = nn.Conv1d(h, h * d, window, padding=window // 2, groups=h, bias=False)
        self.u = nn.Parameter(torch.randn(h, d) * 2 / math.sqrt(d))

    def align(self, source: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        k, u, w = upcast(source.k), upcast(self.u)[:, None], upcast(self.near.weight)
        h = k.shape[1]

        def step(i: int, before: Tensor) -> Tensor:
            near = F.conv1d(before, w, padding=self.near.padding, groups=h)
            near = near.unflatten(1, (h, -1)).mT
            hidden = (q[:, :, i, None] + k + near).tanh()
            scores = (hidden * u).sum(-1)
            return aligner_softmax(scores, source.real)

        return scan_aligner(step, q.shape[2], source.before, real)


ALIGNERS: dict[str, Callable[[Dims], Aligner]] = {
    "plain": SoftmaxAligner,
    "monotonic": MonotonicAligner,
    "monotonic-additive": partial(MonotonicAligner, energy="additive"),
    "location": LocationAligner,
}
GUIDED_BLOCKS = ("all", "last")


def guided(model: Translator, make: Callable[[Dims], Aligner], *, blocks: str = "all") -> Translator:
    """Replace the cross attention of a model's decoder by aligners, in all of its blocks or in the last one."""
    if blocks not in GUIDED_BLOCKS:
        raise ValueError(unknown("blocks cannot be", blocks, GUIDED_BLOCKS))
    reading = [block for block in model.decoder if block.cross is not None]
    for block in reading if blocks == "all" else reading[-1:]:
        assert block.cross is not None
        aligner = make(block.cross.dims).to(next(model.parameters()))
        block.cross = aligner.train(block.training)
    return model


def guided_translator(
    config: Config, vocab: int, kind: str = "monotonic", *, target_vocab: int | None = None, blocks: str = "all"
) -> Translator:
    """Build the translator of a configuration whose decoder has aligners of one kind: plain, monotonic (its energy a dot
    product), monotonic-additive (the published energy), location.

    `config`, `vocab` and `target_vocab` are those of `translator`; `kind` is that of the aligners, in all `blocks` of the
    decoder or in the "last" one.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import guided_translator
    >>> model = guided_translator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20, kind="location")
    >>> source, target = torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 7))
    >>> tuple(model(source, None, target).shape)
    (2, 7, 20)
    """
    if kind not in ALIGNERS:
        raise ValueError(unknown("no reader is called", kind, ALIGNERS))
    if blocks == "all" and config.cross != Config.cross:
        raise ValueError(
            f"cross={config.cross!r} is in no block where {kind} readers are in all: leave it out, or use blocks='last'"
        )
    return guided(translator(config, vocab, target_vocab), ALIGNERS[kind], blocks=blocks)


@contextmanager
def record_alignments(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the weights (b h m n) of every aligner in a model, block by block, in every pass inside the `with`.

    They are those of that very pass, noise included, and gradients flow through them, as a guidance loss needs.
    """
    found: list[Tensor] = []
    readers = [part for part in model.modules() if isinstance(part, Aligner)]
    if not readers:
        raise ValueError("this model has no reader whose weights can be watched: build it with guided_translator")
    hooks = [part.seen.register_forward_hook(lambda _module, _inputs, weights: found.append(weights)) for part in readers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
