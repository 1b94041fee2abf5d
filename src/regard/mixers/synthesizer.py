"""Synthetic attention weights: made from one token each, or learned, without comparing queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims, Places, needed_length
from regard.mixers.kv_cache import KVCache
from regard.mixers.pattern_attention import PatternAttention, compact_keys, compact_queries, expand_heads
from regard.mixers.softmax import Softmax
from regard.ops.budget import budget
from regard.ops.dropout_hash import draw_seed
from regard.ops.pair.pair_op import PairCall, pair_attention
from regard.ops.tile.tile_op import accumulator

SYNTHESIZER_FORMS = ("dense", "random", "dense_factorised", "random_factorised")
NO_PRODUCTS = ("random", "dense_factorised")  # forms whose logits are no products of vectors


class Synthesizer(Softmax):
    """Synthesizer: the weight of each position for a token is computed without the other tokens.

    A = softmax(S) over the positions j of real tokens, out = A v. Per head, S is one of the forms
    dense: S_i = W2 relu(W1 q_i + b1) + b2, a logit for every position; q_i is a linear image of the token (in the paper, itself)
    random: S = R, a learned table; frozen=True leaves it as the seed drew it
    dense_factorised: S_ij = x_i[j // Y] y_i[j % Y], X and Y logits with X Y >= max_len, both from the hidden layer of dense
    random_factorised: S = R1 R2^T of that rank; it can be frozen as well
    and with mix it is w q k^T / sqrt(d) + (1 - w) S, where w is a number or mix="learned", one for each head; w = 1: softmax.
    Cost: n^2, memory n. A layer projects no keys that are not used, nor queries. Tay et al. 2020, arXiv:2005.00743.
    """

    can = Can.CAUSAL | Can.PADDING | Can.STREAM | Can.DROPOUT
    table: Tensor  # random
    rows: Tensor  # random_factorised
    columns: Tensor
    inner: Tensor  # dense
    inner_bias: Tensor
    outer: Tensor
    outer_bias: Tensor
    factors: Tensor  # dense_factorised
    factors_bias: Tensor

    def __init__(
        self,
        dims: Dims,
        *,
        form: str = "dense",
        mix: float | str | None = None,
        rank: int | None = None,
        frozen: bool = False,
        seed: int | None = None,
    ) -> None:
        _check_options(form, mix, rank, frozen, seed)
        self.operations = ("pair",) if form in NO_PRODUCTS else ()
        super().__init__(dims, scale=1.0)
        self.form, self.longest = form, needed_length(self.name, dims)
        self.mix = None if mix == 0 else mix
        self.positional = form.startswith("random")
        if self.mix is None:
            self.ignores = ("k",) if form.startswith("dense") else ("q", "k")
        if mix == "learned":
            self.balance = nn.Parameter(torch.zeros(dims.heads, 2))
        random = torch.Generator("cpu").manual_seed(seed or 0) if frozen else None
        for name, shape, std in self._tables(8 if rank is None else rank):
            table = _random_weights((dims.heads, *shape), std, random)
            if frozen:
                self.register_buffer(name, table)
            else:
                self.register_parameter(name, nn.Parameter(table))

    def _tables(self, rank: int) -> list[tuple[str, tuple[int, ...], float]]:
        """Name, shape and size of all that a form has learned or drawn, for one head; logits begin with unit variance."""
        d, n = self.dims.d, self.longest
        if self.form == "random":
            return [("table", (n, n), 1.0)]
        if self.form == "random_factorised":
            return [("rows", (n, rank), rank**-0.25), ("columns", (n, rank), rank**-0.25)]
        hidden = [("inner", (d, d), d**-0.5), ("inner_bias", (1, d), 0.0)]
        if self.form == "dense":
            return [*hidden, ("outer", (n, d), (d / 2) ** -0.5), ("outer_bias", (n, 1), 0.0)]
        made = sum(self._factors())
        return [*hidden, ("factors", (d, made), (d / 2) ** -0.5), ("factors_bias", (1, made), 0.0)]

    def _factors(self) -> tuple[int, int]:
        """X and Y, as equal as can be."""
        y = math.isqrt(self.longest - 1) + 1
        return -(-self.longest // y), y

    def _weights(self) -> tuple[float | Tensor, float | Tensor]:
        """Of the dot product and of S, numbers or (h 1 1)."""
        if isinstance(self.mix, str):
            balance = self.balance.to(accumulator(self.balance.dtype))
            dot, own = balance.softmax(-1)[..., None, None].unbind(1)
            return dot, own
        if self.mix is None:
            return 0.0, 1.0
        return self.mix, 1.0 - self.mix

    def empty(self, k: Tensor, v: Tensor) -> KVCache:
        return super().empty(self._kept(k), v)

    def push(self, memory: KVCache, k: Tensor, v: Tensor, places: Places) -> KVCache:
        return super().push(memory, self._kept(k), v, places)

    def scan(self, memory: KVCache, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, KVCache]:
        return super().scan(memory, q, self._kept(k), v, places)

    def _kept(self, k: Tensor) -> Tensor:
        return k if self.mix is not None else k[..., :0]

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        if q.shape[2] == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        self._check_length(log)
        if self.form in NO_PRODUCTS:
            return self._pairs(log, q, places, causal)
        log, made = self._as_dots(log, q, places)
        if q.shape[2] <= budget(q.device).few_queries:  # the fused kernel would first make values as wide as these keys
            return PatternAttention(self.reach, 1.0, causal, self.drop, None, self.dims.backend)(log, made, places)[0]
        return super().answer(log, made, places, causal)

    def _check_length(self, log: KVCache) -> None:
        if log.size <= self.longest:
            return
        real = log.size
        if not log.plain:
            real = int(log.valid[:, : log.size].sum(1).max())
        if real > self.longest:
            raise ValueError(f"{real} tokens, but synthesizer was built for max_len={self.longest}: build it longer")

    def _as_dots(self, log: KVCache, q: Tensor, places: Places) -> tuple[KVCache, Tensor]:
        """Logits that are products: of a hidden layer, or of a row, with a column for each position. So these are the keys."""
        acc, dtype, m = accumulator(q.dtype), log.v.dtype, log.size  # no real token has a position of m or later
        if self.form == "dense":
            made = pad(self._hidden(q.to(acc)), (0, 1), value=1.0)
            columns = torch.cat([self.outer[:, :m], self.outer_bias[:, :m]], -1)
        else:
            made = _at(self.rows, places).to(acc)
            columns = self.columns
        (dot, own), keys = self._weights(), _at(columns, log.places).to(acc)
        made, (k, values) = made * own, expand_heads(log.keys, log.values, q.shape[1])
        if self.mix is not None:
            scaled = q.to(acc) * (q.shape[-1] ** -0.5 * dot)
            made = torch.cat([scaled, made], -1)
            keys = torch.cat([k.to(acc), keys], -1)
        return log._replace(k=keys.to(dtype), v=values), made.to(dtype)

    def _hidden(self, q: Tensor) -> Tensor:
        hidden = q @ self.inner.to(q.dtype)
        return relu(hidden + self.inner_bias.to(q.dtype))

    def _pairs(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        """Logits that are no products of vectors: scores of tiles, by the operation "pair"."""
        m = min(log.size, self.longest)
        back = at = None
        k, v, real = compact_keys(log.keys, log.values, log.places)  # a token's position is its index now
        if places.start is None:
            at = places.at
        else:
            q, back = compact_queries(q, places)
        made, (dot, _) = self._made(q), self._weights()
        scaled = q.to(accumulator(q.dtype)) * (q.shape[-1] ** -0.5 * dot) if self.mix is not None else q[..., :0]
        rate = self.drop
        call = PairCall(
            *(scaled.to(v.dtype), k[:, :, :m], v[:, :, :m], None, *made, at),
            valid=None if real is None else real[:, :m],
            seed=draw_seed(q.device) if rate else None,
            start=places.start or 0,
            causal=causal,
            dropout=rate,
        )
        out = pair_attention(call, self.dims.backend)
        if back is None:
            return out
        return out.gather(2, back[:, None, :, None].expand_as(out))

    def _made(self, q: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The table (h max_len max_len) and its share (h), and the factors (b h n ...) of every query."""
        _, own = self._weights()
        if self.form == "random":
            share = own.flatten() if isinstance(own, Tensor) else self.table.new_full((q.shape[1],), own)
            return self.table, None if self.mix is None else share, None, None
        hidden = self._hidden(q.to(accumulator(q.dtype)))
        made = hidden @ self.factors.to(hidden.dtype)
        made = made + self.factors_bias.to(hidden.dtype)
        x, y = made.split(self._factors(), -1)
        return None, None, x * own, y


def _check_options(form: str, mix: float | str | None, rank: int | None, frozen: bool, seed: int | None) -> None:
    if form not in SYNTHESIZER_FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, SYNTHESIZER_FORMS))}, not {form!r}")
    number = isinstance(mix, int | float) and not isinstance(mix, bool) and 0 <= mix <= 1
    if mix is not None and mix != "learned" and not number:
        raise ValueError(f"mix must be None, 'learned', or the weight of the dot product in [0, 1], not {mix!r}")
    if not isinstance(frozen, bool):
        raise ValueError(f"frozen must be True or False, not {frozen!r}")
    if frozen and form.startswith("dense"):
        raise ValueError(f"frozen is for a table that is drawn, and {form} makes its weights from tokens: use form='random'")
    if seed is not None and need("seed", seed, 0, 2**63 - 1) >= 0 and not frozen:
        raise ValueError("seed is for a table that stays as it was drawn: set frozen=True, or leave it out")
    if rank is not None and need("rank", rank, 1, WIDEST) and form != "random_factorised":
        raise ValueError("rank is that of the two factors of a table: it belongs to form='random_factorised'")


def _random_weights(shape: tuple[int, ...], std: float, random: torch.Generator | None) -> Tensor:
    table = torch.empty(shape)
    if random is None:
        return table.normal_(0, std)
    # a table without content may be larger than any memory
    if table.is_meta:
        return table
    return table.copy_(torch.randn(shape, generator=random, device="cpu") * std)


def _at(table: Tensor, places: Places) -> Tensor:
    """The entries (b h n ...) of a table (h max_len ...) for tokens at these places."""
    (b, n), start = places.shape, places.start
    if start is not None and places.valid is None and start + n <= table.shape[1]:
        return table[:, start : start + n].expand(b, *[-1] * table.dim())
    return table[:, places.at.clamp_max(table.shape[1] - 1)].transpose(0, 1)  # only padding has a later position
