"""Low-rank attention: a fixed number of slots in place of all keys and values, each a learned mixture of positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from regard.checks import WIDEST, need
from regard.mixers.base import Core, Dims, Places, PooledTokens, needed_length
from regard.mixers.feature_math import concat_chunks, per_query_head, upcast, where_valid
from regard.mixers.softmax import SOFTMAX_CLAIMS
from regard.ops.dense import sdpa
from regard.ops.head_slots import head_slot_attention, takes_head_slots
from regard.ops.linear.linear_op import linear_attention
from regard.ops.mix_tokens import mix_tokens
from regard.ops.slot_attention import SlotSizes, SlotTensors, slot_attention, takes_slots
from regard.ops.strip import token_runs
from regard.ops.tile.tile_op import MASKED_SCORE, accumulator

SHARES = ("none", "head", "kv", "layer")


class LinformerState(NamedTuple):
    k: Tensor  # (b g r d) sum of E_rj k_j
    v: Tensor  # (b g r e) sum of F_rj v_j
    seen: Tensor  # (b g r), or (b 1 r) where the heads share: something has been written into it


class Linformer(Core):
    """Keys and values are mixed over positions into `rank` slots, and queries attend to the slots.

    K' = E K, V' = F V, out = softmax(q K'^T / sqrt(d)) V', with a column of E and F for every position up to max_len: n tokens
    use the first n. E and F are learned: of each key-value head (share="none"), one E and one F for all heads ("head"), one
    matrix for both and all heads ("kv"), or that one for all layers of a model too ("layer", by `tie`). A slot into which
    nothing has been written yet, with all its weights so far zero, is not seen; so E = F = identity is softmax at any length.
    Causal: the slots are running sums, K'_i = sum_{j <= i} E_j k_j, a memory of bounded size (Peng et al. 2021,
    arXiv:2110.02488). Time n rank (d + e), memory rank (d + e) at any length. Wang et al. 2020, arXiv:2006.04768.

    At the start position j writes into slot j mod rank only, its c-th token with weight 1/c: that is softmax while n <= rank,
    and no sum outgrows 1 + log(n / rank) tokens. More slots than positions are allowed, and spare nothing.
    """

    can = SOFTMAX_CLAIMS
    positional = False
    operations = ("linear",)  # of the causal form

    def __init__(self, dims: Dims, *, rank: int = 64, share: str = "none") -> None:
        super().__init__(dims)
        self.rank = need("rank", rank, 1, WIDEST)
        self.longest = needed_length(self.name, dims)
        if share not in SHARES:
            raise ValueError(f"share must be one of {', '.join(map(repr, SHARES))}, not {share!r}")
        self.share = share
        self.scale = dims.d**-0.5
        heads = dims.g if share == "none" else 1
        # position-major, so that the columns of some tokens lie side by side
        self.project_k = nn.Parameter(_first_weights(heads, self.longest, rank))
        self.project_v = nn.Parameter(_first_weights(heads, self.longest, rank)) if share in ("none", "head") else None

    def extra_repr(self) -> str:
        return f"rank={self.rank}, share={self.share!r}, max_len={self.longest}"

    def empty(self, k: Tensor, v: Tensor) -> LinformerState:
        new_k, new_v = (x.new_zeros(*x.shape[:2], self.rank, x.shape[-1], dtype=accumulator(x.dtype)) for x in (k, v))
        return LinformerState(
            new_k, new_v, torch.zeros(k.shape[0], len(self.project_k), self.rank, dtype=torch.bool, device=k.device)
        )

    def read(self, memory: LinformerState, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - every query sees every slot
        k = memory.k.to(q.dtype)
        v = memory.v.to(q.dtype)
        seen = memory.seen
        empty = ~seen.any(-1)  # no slot at all: zeros are answered, and their gradient is zero
        v = v.masked_fill(empty[..., None, None], 0)
        if seen.shape[1] != 1:
            seen = per_query_head(seen, q)
        return sdpa(q, k, v, scale=self.scale, valid=seen, dropout=self.drop, keep_empty=True)

    def push(self, memory: LinformerState, k: Tensor, v: Tensor, places: Places) -> LinformerState:
        to_k, to_v = self._columns(places, k.dtype)
        seen = memory.seen | _any_writes(to_k, to_v)
        return LinformerState(memory.k + mix_tokens(to_k, k), memory.v + mix_tokens(to_v, v), seen)

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        start = self._start(places, k.shape[2])
        if start is None or len(self.project_k) != k.shape[1] or not takes_head_slots(q, k, v, self.rank):
            return super().read_all(q, k, v, places, query_places)
        return head_slot_attention(q, k, v, self.project_k, self._project_v, start, self.scale)

    def _start(self, places: Places, n: int) -> int | None:
        """Return the position of the first of n tokens, where all are real and have weights and none is dropped; else None."""
        start = places.start
        if self.drop or places.valid is not None or start is None or start + n > self.longest:
            return None
        return start

    @property
    def _project_v(self) -> Tensor:
        return self.project_k if self.project_v is None else self.project_v

    def pool(self, x: Tensor, places: Places) -> PooledTokens | None:
        """As `push`, of tokens in place of keys: heads that share weights are one product, and rank vectors are projected."""
        if not self._pools():
            return None
        to_k, to_v = self._columns(places, x.dtype)
        tokens = x.unsqueeze(1)
        acc = accumulator(x.dtype)
        for_k, mass_k = mix_tokens(to_k, tokens).squeeze(1), to_k.sum(2, dtype=acc).mT
        for_v, mass_v = for_k, mass_k
        if self.project_v is not None:
            for_v, mass_v = mix_tokens(to_v, tokens).squeeze(1), to_v.sum(2, dtype=acc).mT
        return PooledTokens(for_k, for_v, mass_k, mass_v, _any_writes(to_k, to_v))

    def attend_tokens(self, x: Tensor, places: Places, maps: tuple[nn.Linear, nn.Linear, nn.Linear]) -> Tensor | None:
        dims = self.dims
        start = self._start(places, x.shape[1])
        if start is None or not self._pools() or not takes_slots(x, self.rank, dims.d, dims.e):
            return None
        q, k, v = maps
        weights = (q.weight, q.bias, k.weight, k.bias, v.weight, v.bias, self.project_k, self._project_v)
        tensors = SlotTensors(x, *(None if w is None else w.to(x.dtype) for w in weights))
        return slot_attention(tensors, SlotSizes(dims.heads, dims.g, start, self.scale))

    def _pools(self) -> bool:
        """Return whether sums of tokens are cheaper than sums of keys: heads share weights, and slots are few."""
        return self.share != "none" and self.rank <= self.dims.g * min(self.dims.d, self.dims.e)

    def push_pooled(self, memory: LinformerState, k: Tensor, v: Tensor, pooled: PooledTokens) -> LinformerState:
        return LinformerState(memory.k + k, memory.v + v, memory.seen | pooled.seen)

    def scan(self, memory: LinformerState, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, LinformerState]:
        if k.shape[2] <= 1:  # a decoding step writes, then reads
            memory = self.push(memory, k, v, places)
            return self.read(memory, q, places), memory
        columns = self._columns(places, upcast(k).dtype)
        tokens = (upcast(q), upcast(k), upcast(v), *columns)
        out = []
        for run in token_runs(tokens, q.shape[0] * q.shape[1] * self.rank):
            y, memory = self._scan(memory, *run)
            out.append(y.to(v.dtype))
        return concat_chunks(out), memory

    def _scan(
        self, memory: LinformerState, q: Tensor, k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor
    ) -> tuple[Tensor, LinformerState]:
        """Two scans in linear time: q_i . K'_i sums E_j over the past by q_i . k_j, the answer sums v_j by p_i . F_j."""
        shape, backend = (*k.shape[:3], self.rank), self.dims.backend
        scores, new_k = linear_attention(q * self.scale, k, to_k.expand(shape), memory.k.mT, backend=backend)
        written = _so_far(_writes(to_k, to_v))
        seen = memory.seen.unsqueeze(2) | written
        lost = ~seen.any(-1, keepdim=True)
        hidden, lost = (x if x.shape[1] == 1 else per_query_head(x, q) for x in (~seen, lost))
        weights = scores.masked_fill(hidden, MASKED_SCORE).softmax(-1)
        weights = dropout(weights, self.drop)
        out, new_v = linear_attention(weights, to_v.expand(shape), v, memory.v, backend=backend)
        return out.masked_fill(lost, 0), LinformerState(new_k.mT, new_v, seen[:, :, -1])

    def _columns(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The weights (b g n r) of E and of F with which tokens are written, 0 for padding; b or g is 1 where all agree."""
        n, start = places.shape[1], places.start
        if start is None or start + n > self.longest:
            self._check(places)

        def columns(weight: Tensor) -> Tensor:
            if places.valid is None and start is not None:
                return weight[None, :, start : start + n].to(dtype)
            at = places.at.clamp_max(self.longest - 1)  # padding behind the last token has a later position
            found = weight.index_select(1, at.flatten())
            found = found.unflatten(1, at.shape).transpose(0, 1)
            return where_valid(found.to(dtype), places.valid, 0)

        to_k = columns(self.project_k)
        return to_k, to_k if self.project_v is None else columns(self.project_v)

    def _check(self, places: Places) -> None:
        longest = places.longest
        if longest > self.longest:
            raise ValueError(f"{longest} tokens, but linformer was built for max_len={self.longest}: build it longer")


def _first_weights(heads: int, length: int, rank: int) -> Tensor:
    at = torch.arange(length)
    own = at[:, None] % rank == torch.arange(rank)
    own = own.to(torch.get_default_dtype())
    count = 1 + at // rank
    return (own / count[:, None]).repeat(heads, 1, 1)


def _writes(to_k: Tensor, to_v: Tensor) -> Tensor:
    """Which tokens write into which slots at all."""
    return (to_k != 0) | (to_v != 0)


def _any_writes(to_k: Tensor, to_v: Tensor) -> Tensor:
    """Return the slots (b g r) that some of n tokens write into; extremes are found without a mask of all weights."""
    if to_k.shape[2] == 0:
        return _writes(to_k, to_v).any(2)
    extremes = [y for x in (to_k.detach(), to_v.detach()) for y in (x.amin(2), x.amax(2))]
    return torch.stack(extremes).ne(0).any(0)


def _so_far(writes: Tensor) -> Tensor:
    """Has any token up to this one written? (b g n r) in time."""
    first = writes.to(torch.uint8).argmax(2, keepdim=True)  # of equals, the first
    token = torch.arange(writes.shape[2], device=writes.device)
    return writes.any(2, keepdim=True) & (token[:, None] >= first)


def tie_linformer(model: nn.Module) -> nn.Module:
    """The model, with one matrix for all its linformer layers of share="layer": the first one's, from now on.

    Layers built from one spec have matrices of their own until they are tied. The state_dict keeps a name for each layer, all
    of them the same weight, so it loads into tied and untied models alike. Copies stay tied, and so does what `.to()` moves.

    `model` is any module that holds such layers; it is changed in place.

    >>> from regard import tie_linformer
    >>> from regard.blocks import Stack
    >>> stack = Stack.of("linformer(rank=4, share='layer')", width=8, heads=2, depth=2, max_len=16)
    >>> before = sum(p.numel() for p in stack.parameters())
    >>> before - sum(p.numel() for p in tie_linformer(stack).parameters())  # one table of 4 slots and 16 positions less
    64
    """
    every = [part for part in model.modules() if isinstance(part, Linformer)]
    cores = [part for part in every if part.share == "layer"]
    if not cores:
        raise ValueError("there is nothing to tie: no linformer(share='layer') in this model")
    first = cores[0].project_k
    for core in cores:
        if core.project_k.shape != first.shape:
            _, length, rank = core.project_k.shape
            raise ValueError(
                f"layers that share need one rank and max_len: {first.shape[2]}, {first.shape[1]} and {rank}, {length}"
            )
        core.project_k = first
    return model
