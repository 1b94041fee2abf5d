"""Sinkhorn attention: blocks of keys are sorted by a learned module, and a query sees its own block and the one sorted to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims, Places
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.pattern_attention import compact_keys, expand_heads
from regard.ops.balance import balance_matrices, balanced, balanced_in_time, balances_in_one_launch
from regard.ops.budget import budget
from regard.ops.delta.unit_features import plain_unit_features, unit_features
from regard.ops.dense import sdpa, widened
from regard.ops.mixed_blocks import mixed_blocks_in_buffers, takes_mixed_blocks
from regard.ops.sorted_blocks import SortedCall, sinkhorn_attention, takes_sinkhorn_attention
from regard.ops.strip import in_strips
from regard.ops.tile.tile_op import MASKED_SCORE, accumulator
from regard.ops.two_blocks import block_sums, sorted_blocks_attention, takes_sorted_blocks, takes_two_blocks, two_blocks_attention


class Sinkhorn(CachedCore):
    """Sparse Sinkhorn attention: a block of queries sees its own block of keys, and the one that a learned sort puts beside it.

    R_ij = u_i W u_j with u_j the direction of the sum of the keys of block j and W of each head, P = Sinkhorn(R / temperature),
    k'_i = sum_(j != i) P_ij k_j / m_i and v'_i alike, with m_i = sum_(j != i) P_ij; then one softmax over the scores of k_i and
    those of k'_i plus log m_i. Training adds Gumbel noise to R. Slots go with slots, and one that the last block does not fill
    has no mass. A block counts itself once: with P the identity this is Blocks(block), with another permutation two whole blocks.

    form="sortcut": every query sees the first `top` sorted blocks and nothing else, R_tj = w_t . u_j. Whatever is sorted behind
    them has no scores of its own, so that one row of mass (blocks - top) and R = 0 replaces it. What comes first depends on
    the end of the sequence, so it cannot be causal; it does not depend on the queries, so it can be cross.

    Causal: a block is sorted only to blocks that begin after it ends, and the one doubly stochastic matrix of that kind is the
    shift by a block. So rows are balanced in the order of time instead: P_i = softmax_(j < i)(R_ij - log(1 + sum_(l < i) P_lj)),
    where what was taken before is worth less, found in `iterations` sweeps. u_i of a row is the direction of the keys up to the
    first of its block, as in the paper. The first block sees itself alone.

    Unlike the paper's, this sort network scores pairs of blocks and not a block against numbered places: no length is too long.
    Cost: 2 block n scores, but mixing whole blocks n^2 / block (sortcut: top n); memory n. A decoding step sorts anew all that is
    remembered, t + iterations (t / block)^2. Tay et al. 2020, arXiv:2002.11296.
    """

    can = Can.CAUSAL | Can.PADDING | Can.STREAM

    def __init__(
        self,
        dims: Dims,
        *,
        block: int = 64,
        iterations: int = 16,
        temperature: float = 0.75,
        form: str = "full",
        top: int | None = None,
    ) -> None:
        super().__init__(dims)
        self.block = need("block", block, 1, WIDEST)
        self.iterations = need("iterations", iterations, 1, 1024)
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not number or not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be a positive number, not {temperature!r}")
        if form not in ("full", "sortcut"):
            raise ValueError(f"form must be 'full' or 'sortcut', not {form!r}")
        if form == "full" and top is not None:
            raise ValueError("top is how many sorted blocks every query sees: it belongs to form='sortcut'")
        self.temperature = float(temperature)
        self.form = form
        self.top = need("top", 2 if top is None else top, 1, WIDEST)
        if form == "sortcut":
            self.can, self.positional = Can.CROSS | Can.PADDING, False
        rows = dims.d if form == "full" else self.top
        self.sort = nn.Parameter(torch.randn(dims.heads, rows, dims.d))

    def forget(self, memory: KVCache, t: Tensor) -> KVCache:  # noqa: ARG002 - every finished block may be sorted to a later one
        return memory

    def read(self, memory: KVCache, q: Tensor, places: Places) -> Tensor:
        return self.answer(memory, q, places, causal=self.dims.causal)

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        if q.numel() == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        cut = _Cut.of(log, q, self.block)
        if self.form == "sortcut":
            mixed = cut.sorted_by(self.shares(cut, causal))
            k, v, bias = (x.flatten(2, 3) for x in mixed)
            out = _biased_sdpa(q, k, v, bias)
        else:
            out = self._own_and_sorted(cut, q, places, causal)
        return out.to(log.v.dtype)

    def shares(self, cut: _Cut, causal: bool) -> Tensor:
        """P: how much of each block of keys goes to each block of queries (b h c c), or to each first place (b h top c)."""
        sums = block_sums(cut.k, accumulator(cut.k.dtype))
        some = cut.there[:, :, 0]
        rows = cols = unit_features(sums, silu=False, fused=sums.is_cuda)
        if self.form == "sortcut":
            logits, seen, mass = _with_the_rest(self.sort.to(sums.dtype) @ cols.mT, some)
            return self._balance(balanced, self._noisy(logits, seen), seen, mass)[:, :, :-1]
        seen = some[:, None, :, None] & some[:, None, None]
        if causal:
            before = pad(sums.cumsum(2), (0, 0, 1, 0))[
                :, :, : sums.shape[2]
            ]  # not a sum less its last block: the future would round it
            rows = unit_features(before + cut.k[:, :, :, 0], silu=False, fused=sums.is_cuda)
            seen = seen & torch.ones_like(seen).tril(-1)
        scores = rows @ self.sort.to(sums.dtype) @ cols.mT
        if causal:
            return self._balance(balanced_in_time, self._noisy(scores, seen))
        pairs = None if cut.every_block else seen
        return self._balance(balanced, self._noisy(scores, pairs), pairs)

    def _noisy(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        if self.training:
            noise = torch.empty_like(logits).exponential_().log()
            logits = logits - noise
        logits = logits / self.temperature
        return logits if seen is None else logits.masked_fill(~seen, MASKED_SCORE)

    def _balance(self, way: Callable[..., Tensor], logits: Tensor, *more: Tensor | None) -> Tensor:
        """A few heads at a time: every iteration keeps something for the backward pass."""
        in_time = way is balanced_in_time
        if more[1:] == () and balances_in_one_launch(logits):
            return balance_matrices(logits, self.iterations, in_time)
        size = 2 * self.iterations * math.prod(logits.shape[2:])
        shape = logits.shape[:2]
        flat = [None if x is None else x.expand(*shape, *x.shape[2:]).flatten(0, 1) for x in (logits, *more)]
        found = in_strips(lambda *x: (way(self.iterations, *x),), flat, 0, size)
        return found[0].unflatten(0, shape)

    def _own_and_sorted(self, cut: _Cut, q: Tensor, places: Places, causal: bool) -> Tensor:
        grid, p = _Grid.of(places, self.block), self.block
        if cut.every_slot and grid.plain and not causal:
            asked = grid.laid(q, places, p)
            if takes_two_blocks((asked, cut.k, cut.v, cut.k, cut.v, self.sort)) and takes_sinkhorn_attention(
                asked, cut.k, cut.k.shape[2]
            ):
                return self._sorted(asked, cut).flatten(2, 3)
        shares = self.shares(cut, causal)
        if cut.every_slot and grid.plain:
            asked = grid.laid(q, places, p)
            blocks = (asked, cut.k, cut.v, cut.k, cut.v, shares)
            if takes_two_blocks(blocks) and takes_sorted_blocks(asked, cut.k, shares):
                return self._mixed(asked, cut, shares, causal).flatten(2, 3)
        own = torch.eye(shares.shape[-1], dtype=torch.bool, device=q.device)
        shares = grid.rows(shares.masked_fill(own, 0))
        e = cut.v.shape[-1]
        laid = grid.laid(q, places, p)
        weights, lack, bias = cut.mixture(shares)
        own_bias = torch.where(cut.there, 0.0, MASKED_SCORE)[:, None]
        own_bias = own_bias.expand(*q.shape[:2], -1, -1).to(bias.dtype)
        bias = torch.cat([grid.rows(own_bias), bias], -1)
        if grid.first is None and takes_mixed_blocks(laid, cut.k, cut.v, weights, bias):
            out = mixed_blocks_in_buffers(laid, cut.k, cut.v, weights, lack, bias, causal)
            return grid.back(out.flatten(2, 3), q.shape[2])
        fused = takes_two_blocks((laid, cut.k, cut.v, cut.k, cut.v, shares))
        if not fused:
            wide = q.shape[-1] + _bias_columns(q.shape[-1])
            cut = cut._replace(v=widened(cut.v, wide))  # before they are mixed: the copy that a product of blocks needs anyway
        k2, v2 = cut.mixed(weights, lack)
        tensors = (laid, grid.rows(cut.k), grid.rows(cut.v), k2, v2, bias)
        if fused:
            out = two_blocks_attention(tensors, causal, lambda *x: _two_blocks(causal, *x)[0])
            return grid.back(out.flatten(2, 3), q.shape[2])
        each = 2 * math.prod(q.shape[:2]) * p * q.shape[-1]
        each = max(each, q.shape[1] * budget(q.device).strip >> 15)  # a fused kernel takes no more than 65,535 heads
        out = in_strips(partial(_two_blocks, causal), tensors, 2, each, recompute=False)[0]
        return grid.back(out[..., :e].flatten(2, 3), q.shape[2])

    def _sorted(self, q: Tensor, cut: _Cut) -> Tensor:
        """Blocks of queries (b h c p d) beside as many blocks of keys, all full, from the scores of blocks on by kernels."""
        b, h, c = q.shape[:3]
        noise = torch.empty(b, h, c, c, dtype=torch.float32, device=q.device).exponential_() if self.training else None

        def plain(q: Tensor, k: Tensor, v: Tensor, sort: Tensor) -> Tensor:
            sums = k.sum(3, dtype=accumulator(k.dtype))
            units = plain_unit_features(sums, False)
            logits = units @ sort.to(sums.dtype) @ units.mT
            logits = logits if noise is None else logits - noise.log()
            shares = balanced(self.iterations, logits / self.temperature)
            own = torch.eye(c, dtype=torch.bool, device=q.device)
            k2, v2, bias = cut._replace(k=k, v=v).sorted_by(shares.masked_fill(own, 0))
            return _two_blocks(False, q, k, v, k2, v2, torch.cat([torch.zeros_like(bias), bias], -1))[0]

        call = SortedCall(q, cut.k, cut.v, self.sort, noise, self.temperature, self.iterations)
        return sinkhorn_attention(call, plain)

    def _mixed(self, q: Tensor, cut: _Cut, shares: Tensor, causal: bool) -> Tensor:
        """Blocks of queries (b h c p d) beside as many blocks of keys, all full, by kernels."""

        def plain(q: Tensor, k: Tensor, v: Tensor, shares: Tensor) -> Tensor:
            own = torch.eye(shares.shape[-1], dtype=torch.bool, device=q.device)
            k2, v2, bias = cut._replace(k=k, v=v).sorted_by(shares.masked_fill(own, 0))
            return _two_blocks(causal, q, k, v, k2, v2, torch.cat([torch.zeros_like(bias), bias], -1))[0]

        return sorted_blocks_attention(q, cut.k, cut.v, shares, causal, MASKED_SCORE, plain)


def _block_count(n: int, p: int) -> int:
    """Blocks of p for n tokens. Under torch.compile two or more, the last never full: graphs differ for sizes of 0 and 1."""
    if torch.compiler.is_compiling():
        return max(n // p + 1, 2)
    return -(-n // p)


class _Cut(NamedTuple):
    """The tokens of a memory in c blocks of p: with the real ones in front, a token's position is its index."""

    k: Tensor  # (b h c p d), zero where there is none
    v: Tensor  # (b h c p e)
    there: Tensor  # (b c p), or (1 c p) where all rows agree
    every_block: bool  # each holds a token, in all rows
    every_slot: bool  # there are no others

    @staticmethod
    def of(log: KVCache, q: Tensor, p: int) -> _Cut:
        c = _block_count(log.size, p)
        k, v, real = compact_keys(log.keys, log.values, log.places)
        every = real is None and not torch.compiler.is_compiling()
        if real is None:
            real = torch.ones(1, log.size, dtype=torch.bool, device=q.device)
        else:
            k, v = (x.masked_fill(~real[:, None, :, None], 0) for x in (k, v))
        more = c * p - log.size
        k, v = expand_heads(k, v, q.shape[1])
        if more or not every:
            k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
        k, v = (x.unflatten(2, (c, p)) for x in (k, v))
        return _Cut(k, v, pad(real, (0, more)).unflatten(1, (c, p)), every, every and not more)

    def sorted_by(self, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks mixed by shares (b h u c): keys (b h u p d), values, and the log of their mass (b h u p), UNSEEN for none."""
        weights, lack, bias = self.mixture(shares)
        return *self.mixed(weights, lack), bias

    def mixture(self, shares: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weights (b h u c) of sum 1, factors (b h u p) of slots that the last block does not have, and the log of the mass."""
        total = shares.sum(-1, keepdim=True)
        mass = total if self.every_slot else shares @ self.there[:, None].to(shares.dtype)
        row, _ = _positive(total)
        mass, some = _positive(mass)
        bias = torch.where(some, mass.log(), MASKED_SCORE)
        bias = bias.expand(*shares.shape[:3], self.there.shape[2])
        weights = (shares / row).to(self.k.dtype)
        return weights, None if self.every_slot else (row / mass).to(self.k.dtype), bias

    def mixed(self, weights: Tensor, lack: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys (b h u p d) and values, mixed by the weights of `mixture`."""
        k, v = ((weights @ x.flatten(3)).unflatten(3, x.shape[3:]) for x in (self.k, self.v))
        return (k, v) if lack is None else (k * lack[..., None], v * lack[..., None])


def _positive(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums with 1 for those that have no digits left, and which of them have some."""
    limits = torch.finfo(mass.dtype)
    some = mass > limits.tiny / limits.eps
    return torch.where(some, mass, 1), some


class _Grid(NamedTuple):
    """Where queries lie when they are laid out in blocks, u of them, beside the blocks of keys."""

    u: int
    first: Tensor | None  # (b 1) the block of the first query of each row; None: block 0
    slot: Tensor | None  # (b n) where each query lies; None: one after another

    @property
    def plain(self) -> bool:
        """Return whether queries lie as the keys do from the first block on."""
        return self.first is None and self.slot is None

    @staticmethod
    def of(places: Places, p: int) -> _Grid:
        n = places.shape[1]
        if places.start == 0:
            slot = None if places.valid is None else places.at
            return _Grid(_block_count(n, p), None, slot)
        skipped = p - 1 if places.start is None else places.start % p
        u = -(-(n + skipped) // p)
        first = places.at[:, :1] // p
        return _Grid(u, first, places.at - first * p)

    def rows(self, x: Tensor) -> Tensor:
        """Select the blocks of the queries (b h u ...) from x (b h c ...)."""
        if self.first is None:
            return x[:, :, : self.u]
        block = self.first + torch.arange(self.u, device=x.device)
        block = block.clamp_max(x.shape[2] - 1)
        ones = [1] * (x.dim() - 3)
        index = block.view(len(block), 1, self.u, *ones)
        return x.gather(2, index.expand(*x.shape[:2], self.u, *x.shape[3:]))

    def laid(self, q: Tensor, places: Places, p: int) -> Tensor:
        """Queries (b h n d) in their blocks (b h u p d)."""
        if self.slot is None:
            missing = self.u * p - q.shape[2]
            if missing or torch.compiler.is_compiling():
                q = pad(q, (0, 0, 0, missing))
            return q.unflatten(2, (self.u, p))
        if places.valid is not None:  # padding lies where the next real token does
            q = q.masked_fill(~places.valid[:, None, :, None], 0)
        empty = q.new_zeros(*q.shape[:2], self.u * p, q.shape[3])
        return empty.scatter_add(2, self.slot[:, None, :, None].expand_as(q), q).unflatten(2, (self.u, p))

    def back(self, out: Tensor, n: int) -> Tensor:
        """Answers (b h u * p e) in the order of the queries (b h n e)."""
        if self.slot is None:
            return out[:, :, :n]
        return out.gather(2, self.slot[:, None, :, None].expand(*out.shape[:2], n, out.shape[3]))


def _with_the_rest(logits: Tensor, some: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (b h top c) with a row of 0 for all places behind the first ones; which pairs exist; the log mass of each row."""
    top, count = logits.shape[2], some.sum(1, keepdim=True)
    place = torch.arange(top + 1, device=some.device)
    rest = place == top
    real = torch.where(rest, count > top, place < count)
    seen = real[:, None, :, None] & some[:, None, None]
    mass = torch.where(rest, (count - top).clamp_min(1), 1)
    mass = mass.to(logits.dtype).log()
    return pad(logits, (0, 0, 0, 1)), seen, mass[:, None].expand(*logits.shape[:2], -1)


def _two_blocks(causal: bool, q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Blocks of queries (b h u p d) see their own keys and the sorted ones (b h u p d), with a bias (b h u 2p) of both."""
    p, seen = q.shape[3], None
    if causal:
        square = torch.ones(p, p, dtype=torch.bool, device=q.device)
        seen = pad(square.tril(), (0, p), value=True)
    return (_biased_sdpa(q, torch.cat([k, k2], 3), torch.cat([v, v2], 3), bias, seen),)


def _bias_columns(d: int) -> int:
    """Return the number of columns that join the d of a key: two for its bias, and zeros up to a width of the fused kernels."""
    return 2 + -(d + 2) % 8


def _biased_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor | None = None) -> Tensor:
    """Compute attention (... x e) of q (... x d) to k (... y d), v (... y e), with a number for each key added to its scores.

    bias (... y) is two more columns of the keys, because the fused kernel has no gradient for a bias: the second one is what
    rounding to the type of the keys takes from the first. seen (x y): pairs that exist. A block is a head of its own.
    """
    scale = q.shape[-1] ** -0.5
    limit = torch.finfo(k.dtype).min / 2
    bias = (bias / scale).clamp_min(limit)
    coarse = bias.to(k.dtype)
    fine = (bias - coarse).detach().to(k.dtype)
    more = _bias_columns(q.shape[-1])
    keys = torch.cat([k, pad(torch.stack([coarse, fine], -1), (0, more - 2))], -1)
    queries = torch.cat([q, q.new_ones(*q.shape[:-1], more)], -1)
    heads = q.shape[1:-2]
    queries, keys, v = (x.flatten(1, -3) for x in (queries, keys, v))
    return sdpa(queries, keys, v, scale=scale, pairs=seen).unflatten(1, heads)
