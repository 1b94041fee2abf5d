"""Human knowledge decides which pairs to skip: softmax over the pairs of a pattern, and the published patterns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.checks import need, shown
from regard.mixers.base import Can, Core, Dims, Places, need_claims, refer
from regard.mixers.delayed_queries import pattern_ahead
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.pattern_attention import PatternAttention
from regard.mixers.position_interface import Positions
from regard.mixers.softmax import DOTS, default_scale
from regard.ops.backend import AUTO
from regard.ops.budget import budget
from regard.ops.tile.tile_op import HeadPatterns
from regard.ops.tile.two_streams import StreamCall, stream_attention
from regard.ops.triton_support import on_card
from regard.patterns import (
    Blocks,
    Columns,
    Dilated,
    Everything,
    Global,
    Local,
    Pattern,
    PerHead,
    Random,
    Rows,
    Stride,
    Tail,
)
from regard.patterns.density import PairCount, count_pairs
from regard.patterns.drawn import MAX_DRAWN

__all__ = ["BigBird", "Longformer", "PairCount", "Sinks", "Sparse", "SparseTransformer", "count_pairs"]

SELF = DOTS & ~Can.CROSS


class Sparse(CachedCore):
    """Softmax attention over the pairs of a pattern; a query with no visible key gets 0.

    A = softmax(scale q k^T) over {(i, j) in pattern}, out = A v. causal=True takes the future from every pattern; only
    Truncated(back, ahead), which names how much of it is seen, is refused then.
    Cost: (d + e) times the number of pairs, in time; n in memory. Child et al. 2019, arXiv:1904.10509.
    """

    can = DOTS
    operations: tuple[str, ...] = ("tile",)

    def __init__(self, dims: Dims, *, pattern: Pattern | str, scale: float | None = None) -> None:
        super().__init__(dims)
        self.scale = default_scale(scale, dims.d)
        self.place(pattern)

    def place(self, pattern: Pattern | str) -> None:
        """Attend to the pairs of this pattern from now on."""
        pattern = Pattern.of(pattern)
        lost = Can.STREAM if pattern.depends_on_length else Can.NOTHING  # a longer sequence would have had another past
        if (part := pattern.lookahead) is not None:
            lost = lost | Can.CAUSAL
        self.can = type(self).can & ~lost
        instead = f"{part} sees later tokens: write Truncated(back, 0) or & Causal(), or build it with causal=False"
        claims = Can.CAUSAL if part is not None and self.dims.causal else Can.NOTHING
        need_claims(self.name, self.can, claims, instead)
        self.pattern, self.reach = pattern, HeadPatterns.of(pattern, self.dims.heads)
        self.joint = self.reach.bends
        self.ahead = pattern_ahead(self.reach.each)
        self.positional = any(own != Everything() for own in self.reach.each)

    def extra_repr(self) -> str:
        return str(self.pattern)

    def alive(self, j: Tensor, t: Tensor) -> Tensor:
        return self.pattern.alive(j, t)

    def scan_one(self, memory: KVCache, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, KVCache] | None:
        if type(self).answer is not Sparse.answer:  # a subclass may have scores of its own
            return None
        return self._attention(True).step(memory, q, k, v, places)

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        return self._attention(causal)(log, q, places)[0]

    def _attention(self, causal: bool) -> PatternAttention:
        dropout = self.dims.dropout if self.training else 0.0
        return PatternAttention(self.reach, self.scale, causal, dropout, self.positions, self.dims.backend)


class Sinks(Sparse):
    """A sliding window, and the first tokens stay visible for ever: what a window needs to go on without end.

    Pattern: Local(window) | Columns(first); streaming it keeps window + first tokens. Cost: n (window + first).
    Xiao et al. 2023, arXiv:2309.17453, which also counts positions inside what is kept, where the model has positions.
    """

    can = SELF

    def __init__(self, dims: Dims, *, window: int = 256, first: int = 4, scale: float | None = None) -> None:
        pattern = Local(need("window", window)) | Columns(need("first", first))
        super().__init__(dims, pattern=pattern, scale=scale)


class SparseTransformer(Sparse):
    """Half of the heads see what is near, the other half what is far in steps, so that two layers connect everything.

    strided: Local(stride) and Stride(stride); fixed: Blocks(stride) and the last `summary` tokens of every block.
    Cost: n^2 / stride + n stride, so n^1.5 with stride = sqrt(n). Child et al. 2019, arXiv:1904.10509.
    """

    can = SELF

    def __init__(self, dims: Dims, *, stride: int = 64, form: str = "strided", summary: int = 8) -> None:
        need("stride", stride)
        if form not in ("strided", "fixed"):
            raise ValueError(f"form must be 'strided' or 'fixed', not {form!r}")
        if dims.heads % 2:
            raise ValueError(f"sparse_transformer splits its heads in two halves: {dims.heads} heads is an odd number")
        near, far = (Local(stride), Stride(stride)) if form == "strided" else (Blocks(stride), Tail(stride, summary))
        super().__init__(dims, pattern=PerHead([near, far]))

    @property
    def name(self) -> str:
        return "sparse_transformer"


class BigBird(Sparse):
    """Blocks see their neighbours, some global blocks and some random ones: short paths between all tokens.

    Pattern: `window` blocks around | Global | `random` blocks drawn per head. The global tokens are `globals` whole blocks:
    special="first": the first ones, so that it can be causal and stream; random blocks are then drawn from the past.
    special="ends": half of them the first ones, half the last ones, as in the published model and in Hugging Face's, which have
    one of each. The last tokens are those of a whole sequence, so this form is not causal.
    Both are the paper's ITC, where tokens of the sequence are global. For its ETC, with further tokens, put `globals` blocks of
    learned tokens in front of the sequence and use special="first": then they read, are read, and go through all layers.
    Cost: n block (window + globals + random). Zaheer et al. 2020, arXiv:2007.14062.
    """

    can = SELF

    def __init__(
        self,
        dims: Dims,
        *,
        block: int = 64,
        window: int = 3,
        globals: int = 2,
        random: int = 3,
        special: str = "first",
        seed: int = 0,
    ) -> None:
        need("block", block)
        if need("window", window) % 2 == 0:
            raise ValueError(f"window counts blocks, the own one in the middle: {window} is an even number")
        if special not in ("first", "ends"):
            raise ValueError(
                f"special must be 'first' or 'ends', not {shown(special)}: for tokens of their own, put them in front"
            )
        if special == "ends" and dims.causal:
            whole_sequence = SELF & ~(Can.CAUSAL | Can.STREAM)
            need_claims("bigbird", whole_sequence, Can.CAUSAL, "use special='first' with causal=True")
        least = 2 if special == "ends" else 0
        if need("globals", globals, least) % 2 and special == "ends":
            raise ValueError(f"special='ends' has as many global blocks first as last: {globals} is an odd number")
        pattern: Pattern = Blocks(block, window // 2)
        if need("random", random, 0, MAX_DRAWN):
            pattern = pattern | Random(random, block, seed, per_head=True, past=dims.causal)
        last = globals // 2 if special == "ends" else 0
        if globals:
            pattern = pattern | Global((globals - last) * block, last=last * block)
        super().__init__(dims, pattern=pattern)
        self.can = self.can & ~Can.CAUSAL if last else self.can


class Both(NamedTuple):
    local: KVCache
    special: KVCache


class Longformer(Core):
    """A sliding window per head, and special tokens that see and are seen by all, through projections of their own.

    Rows of ordinary tokens: Local(window), in `dilated_heads` heads Dilated(window, dilation), | Columns(special).
    Rows of special tokens: all keys, with their own q, k, v (shared=True: the ordinary ones).
    `window` counts one side: a token sees 2 window - 1 keys, itself in the middle, or `window` if causal. The paper's, which is
    Hugging Face's `attention_window`, counts both sides: attention_window=512 sees 256 keys before and 256 behind the token.
    Cost: n (window + special). Beltagy et al. 2020, arXiv:2004.05150.
    """

    can = SELF
    operations: tuple[str, ...] = ("tile",)

    def __init__(
        self,
        dims: Dims,
        *,
        window: int | None = None,
        attention_window: int | None = None,
        dilation: int = 1,
        dilated_heads: int = 0,
        first: int = 1,
        at: tuple[int, ...] | list[int] = (),
        shared: bool = False,
    ) -> None:
        super().__init__(dims)
        window = _one_side(window, attention_window)
        need("dilation", dilation)
        if need("dilated_heads", dilated_heads, 0) > dims.heads:
            raise ValueError(f"dilated_heads is {dilated_heads}, but there are only {dims.heads} heads")
        if dilated_heads and dilation == 1:
            raise ValueError("dilated_heads needs a dilation of at least 2: with 1 there is nothing dilated about them")
        if dilation > 1 and not dilated_heads:
            raise ValueError("a dilation needs dilated_heads: say how many heads are to use it")
        plain_heads = dims.heads - dilated_heads
        near: Pattern = PerHead([Local(window)] * plain_heads + [Dilated(window, dilation)] * dilated_heads)
        if not dilated_heads:
            near = Local(window)
        self.streams = 1 if shared else 2
        self.rows = Rows(first, at) if first or at else None  # type: ignore[arg-type]
        if self.rows is None and not shared:
            raise ValueError("without special tokens there is nothing to project apart: first=1, or shared=True")
        seen = near | Columns(self.rows.first, self.rows.at) if self.rows else near
        if self.rows and shared:
            seen = seen | self.rows
        self.local = Sparse(dims, pattern=seen)
        self.special = Sparse(dims, pattern=self.rows) if self.rows and not shared else None  # in a pass of their own

    def extra_repr(self) -> str:
        return f"streams={self.streams}"

    def honour(self, positions: Positions) -> None:
        super().honour(positions)
        for part in (self.local, self.special):
            if part is not None:
                part.honour(positions)
        for owner in (self, self.special):
            if owner is not None and owner.positions is not None:
                refer(owner, "positions", positions)  # listed with the window

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x, x) if self.streams == 1 else tuple(x.chunk(2, -1))  # type: ignore[return-value]

    def empty(self, k: Tensor, v: Tensor) -> Both:
        parts = zip(self._apart(k), self._apart(v), strict=True)
        return Both(*(KVCache.empty(a, b) for a, b in parts))

    def push(self, memory: Both, k: Tensor, v: Tensor, places: Places) -> Both:
        (k, gk), (v, gv) = self._apart(k), self._apart(v)
        special = memory.special if self.special is None else self.special.push(memory.special, gk, gv, places)
        return Both(self.local.push(memory.local, k, v, places), special)

    def forget(self, memory: Both, t: Tensor) -> Both:
        special = memory.special if self.special is None else self.special.forget(memory.special, t)
        return Both(self.local.forget(memory.local, t), special)

    def read(self, memory: Both, q: Tensor, places: Places) -> Tensor:
        return self._answer(memory, q, places, causal=False)

    def scan(self, memory: Both, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Both]:
        memory = self.push(memory, k, v, places)
        return self._answer(memory, q, places, causal=True), memory

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        found = self._at_once(q, k, v, places, causal=True)
        return super().scan_all(q, k, v, places) if found is None else found

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        found = self._at_once(q, k, v, places, causal=False) if query_places is places else None
        return super().read_all(q, k, v, places, query_places) if found is None else found

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, places: Places, causal: bool) -> Tensor | None:
        """Compute both streams by one operation, on CUDA devices; None where its kernels do not take the call."""
        special, rows = self.special, self.rows
        if special is None or rows is None or not on_card(q) or self.dims.backend not in (AUTO, "triton"):
            return None
        few = q.shape[2] <= budget(q.device).few_queries
        if few or places.start != 0 or places.valid is not None or self.local.positions is not None or self.positions is not None:
            return None
        call = StreamCall(self.local.reach, special.reach, rows, causal, self.local.scale, self.local.drop)
        return stream_attention(q, k, v, call)

    def _answer(self, memory: Both, q: Tensor, places: Places, causal: bool) -> Tensor:
        q, gq = self._apart(q)
        out = self.local.answer(memory.local, q, places, causal)
        if self.special is None or self.rows is None:
            return out
        apart = self.special.answer(memory.special, gq, places, causal)
        return torch.where(self.rows.special(places.at)[:, None, :, None], apart, out)


def _one_side(window: int | None, attention_window: int | None) -> int:
    """The keys of a window on one side, the query itself among them; 256 if nothing else is given."""
    if attention_window is None:
        if window is None:
            return 256
        return need("window", window)
    if window is not None:
        raise ValueError("window counts the tokens on one side, attention_window those on both: give one of them")
    if need("attention_window", attention_window, 2) % 2:
        raise ValueError(f"attention_window is half before and half behind a token: {attention_window} is an odd number")
    return attention_window // 2 + 1
