"""Readers that keep their place: attention from a target to a source whose weights depend on where it looked a step before.

Each stands where a block's cross attention stands, streams like it, and shows its weights to whoever asks.
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
from regard.text import unknown


class AlignerState(NamedTuple):
    """The source as a reader sees it, and where it looked last. Keys and weights have real tokens in front, values do not."""

    k: Tensor  # (b h n d)
    v: Tensor  # (b h n e)
    real: Tensor  # (b n) of the keys
    back: Tensor | None  # (b n) where each token of the source went; None: they stand as they came
    before: Tensor  # (b h n) weights of the step before


class Aligner(Mixer):
    """Cross attention with weights that can be seen: out_i = sum_j a_ij v_j, a = `align`(queries, keys, the step before).

    `forward` is `start` and one long `extend`. `watched(model)` collects the weights that pass through `seen`.
    """

    can = Can.CROSS | Can.PADDING | Can.STREAM | Can.DROPOUT

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        if not dims.cross or dims.g != dims.heads:
            raise ValueError(f"{self.name} reads a context with keys for each head: build it with cross=True, without kv_heads")
        reads, asks = dims.context_width or dims.width, dims.heads * dims.d
        self.q, self.k = nn.Linear(dims.width, asks), nn.Linear(reads, asks)
        self.v, self.out = nn.Linear(reads, dims.heads * dims.e), nn.Linear(dims.heads * dims.e, dims.width)
        for part in (self.q, self.k, self.v, self.out):
            nn.init.xavier_uniform_(part.weight)
        self.seen = nn.Identity()

    def align(self, sight: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights (b h m n) of the queries (b h m d), and those of the last real one (b h n). Padded ones move nothing."""
        raise NotImplementedError

    def first(self, k: Tensor) -> Tensor:
        """Where it looks before the first step (b h n): nowhere."""
        return upcast(k).new_zeros(k.shape[:3])

    def forward(
        self, x: Tensor, *, context: Tensor | None = None, valid: Tensor | None = None, query_valid: Tensor | None = None
    ) -> Tensor:
        return self.extend(self.start(context=context, valid=valid), x, query_valid)[0]

    def forward_at(
        self, x: Tensor, places: Places, *, context: Tensor | None = None, context_places: Places | None = None
    ) -> Tensor:
        t = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return self.extend_at(self.start_at(t, context=context, context_places=context_places), x, places)[0]

    def weights(self, x: Tensor, context: Tensor, *, valid: Tensor | None = None, query_valid: Tensor | None = None) -> Tensor:
        """Return (b h m n): how much step i takes of token j; 0 at padding of either side."""
        state = self.start(context=context, valid=valid)
        return self._weights(state, *self._checked(state, x, query_valid))[0]

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        if context is None or batch is not None:
            raise ValueError("cross attention starts from what it reads: start(context=..., valid=...)")
        self.check(context, "context", self.dims.context_width)
        self.check_padding(valid, context)
        context = mask_padding(context, valid)
        t = torch.zeros(len(context), dtype=torch.long, device=context.device)
        return self.start_at(t, context=context, context_places=Places.of(context, valid))

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:
        assert context is not None and context_places is not None
        self.check_length(context_places)
        valid, order = context_places.valid, context_places.unpad_order
        v = self.v(context).unflatten(-1, (self.dims.heads, -1)).transpose(1, 2)
        real = torch.ones(context.shape[:2], dtype=torch.bool, device=context.device) if valid is None else valid
        if order is not None:
            context, real = context.gather(1, order.there[..., None].expand_as(context)), order.real
        k = self.k(context).unflatten(-1, (self.dims.heads, -1)).transpose(1, 2)
        sight = AlignerState(k, v, real, None if order is None else order.back, self.first(k))
        return State(sight, t, 0, self.maker())

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        y, after = self.extend_at(state, *self._checked(state, x, valid))
        return mask_padding(y, valid), after

    def extend_at(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        weights, after = self._weights(state, x, places)
        weights = F.dropout(self.seen(weights), self.dims.dropout, self.training)
        with no_autocast(weights):
            y = weights @ upcast(state.memory.v)
        return self.out(y.to(x.dtype).transpose(1, 2).flatten(2)), after

    def _checked(self, state: State, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Places]:
        """Return checked tokens (b m w) with zeros at padding, and their places."""
        self.check(x)
        self.check_state(state, x)
        self.check_padding(valid, x)
        return mask_padding(x, valid), Places.of(x, valid, state.t, state.start)

    def _weights(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        """Return the weights (b h m n) of tokens x (b m w), and the state after them."""
        sight, valid = state.memory, places.valid
        q = self.q(x).unflatten(-1, (self.dims.heads, -1)).transpose(1, 2)
        with no_autocast(q):
            weights, before = self.align(sight, upcast(q), valid)
        if sight.back is not None:
            weights = weights.gather(-1, sight.back[:, None, None].expand_as(weights))
        if valid is not None:
            weights = weights.masked_fill(~valid[:, None, :, None], 0)
        return weights, self.later(state, sight._replace(before=before), places)


def aligner_softmax(scores: Tensor, real: Tensor) -> Tensor:
    """Over real tokens (b n), scores (b h ... n); zeros where there are none."""
    real = real.view(len(real), *[1] * (scores.dim() - 2), -1)
    return scores.masked_fill(~real, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~real, 0)


def scan_aligner(step: Callable[[int, Tensor], Tensor], m: int, before: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """a_i = step(i, a_{i-1}) for i < m, as (b h m n), and the last of them; where a step is padding, nothing moves."""
    rows = [before[:, :, None][:, :, :0]]
    for i in range(m):
        now = step(i, before)
        before = now if real is None else torch.where(real[:, i, None, None], now, before)
        rows.append(before[:, :, None])
    return torch.cat(rows, 2), before


class SoftmaxAligner(Aligner):
    """Softmax attention as everywhere, with weights to look at: it has no memory of where it looked."""

    def align(self, sight: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return aligner_softmax(q @ upcast(sight.k).mT / math.sqrt(q.shape[-1]), sight.real), sight.before


ENERGIES = ("dot", "additive")


class MonotonicAligner(Aligner):
    """Read forwards only. Raffel et al. 2017, arXiv:1704.00784.

    From where it stopped last it goes on, and stops at token j with probability p_ij = sigmoid(energy_ij). In training its
    weights are those of the expected path, a_ij = p_ij s_ij with s_ij = (1 - p_i,j-1) s_i,j-1 + a_i-1,j, with noise before the
    sigmoid, so that it learns to decide. In evaluation it has decided (`hard`): p is 0 or 1, and it reads one token.
    energy="dot": q_i.k_j / sqrt(d) + r, which is not the paper's but costs less. energy="additive", the paper's:
    g v.tanh(q_i + k_j) / |v| + r with q = W s + b, k = V h, and v (d), g, r of each head; g begins as 1 / sqrt(d).
    `keep`, which the paper does not have: at the last token it always stops; else a path may run off the end and see nothing.
    """

    def __init__(
        self,
        dims: Dims,
        *,
        hard: bool = True,
        noise: float = 1.0,
        keep: bool = True,
        lean: float = -1.0,
        energy: str = "dot",
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
        """At the first token: whoever has not begun begins there."""
        return F.pad(super().first(k)[..., 1:], (1, 0), value=1.0) if k.shape[2] else super().first(k)

    def align(self, sight: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = self._energy(q, upcast(sight.k)) + upcast(self.lean)[:, None, None]
        if self.training and self.noise:
            scores = scores + self.noise * torch.randn_like(scores)
        elif self.hard and not self.training:
            scores = torch.where(scores > 0, torch.inf, -torch.inf)
        n = scores.shape[-1]
        if self.keep:
            last = torch.arange(n, device=q.device) == sight.real.sum(1, keepdim=True) - 1
            scores = scores.masked_fill(last[:, None, None], torch.inf)
        scores = scores.masked_fill(~sight.real[:, None, None], -torch.inf)
        stop, jumps = scores.sigmoid(), _jumps((-scores).sigmoid())

        def step(i: int, before: Tensor) -> Tensor:
            for s, jump in jumps:
                before = before + jump[:, :, i] * F.pad(before[..., :-s], (s, 0))
            return stop[:, :, i] * before

        return scan_aligner(step, q.shape[2], sight.before, real)

    def _energy(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the energies (b h m n) of queries (b h m d) and keys (b h n d), without r."""
        if self.energy == "dot":
            return q @ k.mT / math.sqrt(q.shape[-1])
        v = F.normalize(upcast(self.u), dim=-1) * upcast(self.gain)[:, None]
        return ((q[:, :, :, None] + k[:, :, None]).tanh() @ v[:, None, :, None]).squeeze(-1)


def _jumps(on: Tensor) -> list[tuple[int, Tensor]]:
    """What turns x into y_j = x_j + on_{j-1} y_{j-1} in log2(n) rounds x_j += jump_j x_{j-s}, s = 1, 2, 4, ...

    Products of numbers from 0 to 1, never a quotient: where they vanish, so does what they stand for.
    """
    jump, s, found = F.pad(on[..., :-1], (1, 0)), 1, []
    while s < on.shape[-1]:
        found.append((s, jump))
        jump, s = jump * F.pad(jump[..., :-s], (s, 0)), 2 * s
    return found


class LocationAligner(Aligner):
    """Attention that sees where it looked last. Chorowski et al. 2015, arXiv:1506.07503.

    a_i = softmax_j(u.tanh(q_i + k_j + (W * a_{i-1})_j)), where W * is a convolution over `window` tokens. Before the first step
    it has looked nowhere. The paper's filters and the matrix behind them are one W here.
    """

    def __init__(self, dims: Dims, *, window: int = 15) -> None:
        super().__init__(dims)
        if window < 1 or window % 2 == 0:
            raise ValueError(f"window must be odd, as many tokens on the left as on the right, not {window!r}")
        h, d = dims.heads, dims.d
        self.near = nn.Conv1d(h, h * d, window, padding=window // 2, groups=h, bias=False)
        self.u = nn.Parameter(torch.randn(h, d) * 2 / math.sqrt(d))

    def align(self, sight: AlignerState, q: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        k, u, w = upcast(sight.k), upcast(self.u)[:, None], upcast(self.near.weight)
        h = k.shape[1]

        def step(i: int, before: Tensor) -> Tensor:
            near = F.conv1d(before, w, padding=self.near.padding, groups=h).unflatten(1, (h, -1)).mT
            return aligner_softmax(((q[:, :, i, None] + k + near).tanh() * u).sum(-1), sight.real)

        return scan_aligner(step, q.shape[2], sight.before, real)


ALIGNERS: dict[str, Callable[[Dims], Aligner]] = {
    "plain": SoftmaxAligner,
    "monotonic": MonotonicAligner,
    "monotonic-additive": partial(MonotonicAligner, energy="additive"),
    "location": LocationAligner,
}
GUIDED_BLOCKS = ("all", "last")


def guided(model: Translator, make: Callable[[Dims], Aligner], *, blocks: str = "all") -> Translator:
    """The same model, whose decoder reads the source by such readers: in all of its blocks, or in the last one."""
    if blocks not in GUIDED_BLOCKS:
        raise ValueError(unknown("blocks cannot be", blocks, GUIDED_BLOCKS))
    reading = [block for block in model.decoder if block.cross is not None]
    for block in reading if blocks == "all" else reading[-1:]:
        assert block.cross is not None
        block.cross = make(block.cross.dims).to(next(model.parameters())).train(block.training)
    return model


def guided_translator(
    config: Config, vocab: int, kind: str = "monotonic", *, target_vocab: int | None = None, blocks: str = "all"
) -> Translator:
    """Build the translator of a configuration whose decoder reads in one of these ways: plain, monotonic (its energy a dot
    product), monotonic-additive (the published energy), location.
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
    """A list that collects the weights (b h m n) of every aligner in a model, block by block, in every pass inside the `with`.

    They are those of that very pass, noise and all, and gradients go through them: what a guidance loss is computed from.
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
