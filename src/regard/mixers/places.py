"""Positions and padding of the tokens of one pass, and the masks that are derived from them, each made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.ops.dense import SdpaMask, sdpa_mask
from regard.transforms import may_read_data, transformed

DerivedT = TypeVar("DerivedT")


class _DevicePositions(threading.local):
    """A host bound on positions that only the device holds."""

    bound: int | None = None


_device_positions = _DevicePositions()


@contextmanager
def positions_below(bound: int) -> Iterator[None]:
    """Declare that all positions in here are below `bound`, so that none has to be read from the device: for CUDA graphs."""
    outer, _device_positions.bound = _device_positions.bound, bound
    try:
        yield
    finally:
        _device_positions.bound = outer


def position_bound() -> int | None:
    """Return the bound of `positions_below`; None: positions may be read from the device."""
    return _device_positions.bound


class UnpadOrder(NamedTuple):
    """The order that moves the real tokens of every row to its front."""

    there: Tensor  # (b n) index of the token that comes to each place
    back: Tensor  # (b n) new place of each token
    real: Tensor  # (b n) True where a place holds a real token


class PlaceRun(NamedTuple):
    """Positions start, start + 1, ... of every row, not yet a tensor."""

    shape: tuple[int, int]
    start: int
    device: torch.device

    def positions(self) -> Tensor:
        """Return them as a tensor (b n)."""
        b, n = self.shape
        return torch.arange(self.start, self.start + n, device=self.device).expand(b, n)


class Places:
    """Positions of tokens (b n). They count real tokens only, so padding may lie anywhere and rows may differ in length.

    A value: never changed after it is made. A model makes one for every sequence of a pass, and all layers receive it, so that
    what is derived from it (`sdpa_mask`, `unpad_order`, `count` ...) is computed for the first layer and kept for the others.

    `at` (b n) are the positions, `valid` (b n) is True where there is a real token (None: everywhere), `start` the position of
    the first token where all rows agree on it, and `packed` says that all padding lies behind the real tokens. `Places.of` makes
    one.

    >>> import torch
    >>> from regard import Places
    >>> x = torch.randn(1, 5, 8)
    >>> Places.of(x, torch.tensor([[False, True, True, False, True]])).at
    tensor([[0, 0, 1, 2, 2]])
    """

    def __init__(
        self, at: Tensor | PlaceRun, valid: Tensor | None = None, start: int | None = None, packed: bool = False
    ) -> None:
        self._at = at
        self.shape: tuple[int, int] = at.shape  # type: ignore[assignment]  # (b, n)
        self.device = at.device
        self.valid = valid  # (b n), True: a real token; None: every token is real
        self.start = start  # on the host: real tokens of every row are at start, start + 1, ...; None: rows differ
        self.packed = packed  # on the host: all padding is known to lie behind the real tokens, so that nothing has to be moved
        self._derived: dict[Hashable, tuple[bool, Any]] = {}
        self._real: Tensor | None = None
        self._made: Tensor | None = None  # positions of a run

    @staticmethod
    def of(
        x: Tensor, valid: Tensor | None = None, t: Tensor | None = None, start: int | None = 0, packed: bool = False
    ) -> Places:
        """Make the places of tokens x (b n ...) that follow t (b) real ones; `start` is t where all rows agree."""
        b, n = x.shape[:2]
        after = t if start is None else None
        if valid is None and after is None:
            return Places(PlaceRun((b, n), start or 0, x.device), None, start, packed)
        if valid is None and n == 1:
            return Places(t[:, None], None, start, packed)  # type: ignore[index]
        at = PlaceRun((b, n), start or 0, x.device).positions() if valid is None else _tokens_before(valid)
        if valid is not None and start:
            at = at + start
        return Places(at if after is None else at + after[:, None], valid, start, packed)

    @staticmethod
    def of_heads(x: Tensor, valid: Tensor | None = None, start: int = 0) -> Places:
        """Make the places of tokens x (b h n d), all rows of which begin at `start`."""
        if valid is None:
            return Places(PlaceRun((x.shape[0], x.shape[2]), start, x.device), None, start)
        return Places.of(x[:, 0], valid, start=start)

    @property
    def at(self) -> Tensor:
        """The position of each token, (b n); of a padding token, that of the next real one.

        Where every token is real, positions are a tensor only when something reads them.
        """
        if not isinstance(self._at, PlaceRun):
            return self._at
        if _traced():
            return self._at.positions()
        if self._made is None or (self._made.is_inference() and not torch.is_inference_mode_enabled()):
            self._made = self._at.positions()
        return self._made

    def part(self, low: int, high: int) -> Places:
        """Return the places of tokens low .. high - 1; `start` is kept where it is still true."""
        start = self.start
        if start is not None and low:
            start = start + low if self.valid is None else None
        return Places(self.at[:, low:high], None if self.valid is None else self.valid[:, low:high], start, self.packed)

    def select(self, rows: Tensor) -> Places:
        """Return the places of these rows of the batch."""
        valid = None if self.valid is None else self.valid.index_select(0, rows)
        return Places(self.at.index_select(0, rows), valid, self.start, self.packed)

    def pooled(self, rate: int) -> Places:
        """Return the places of the ceil(n / rate) outputs that `rate` neighbouring real tokens share."""
        if rate == 1:
            return self
        return self.derived(("pooled", rate), lambda: self._pooled(rate))

    def front(self, room: int) -> Places:
        """Return the places of the real tokens in `unpad_order`, in rows of `room` tokens, with padding behind them."""
        return self.derived(("front", room), lambda: self._front(room))

    def derived(self, key: Hashable, make: Callable[[], DerivedT]) -> DerivedT:
        """Return make(), a function of these places and of the key alone, computed once.

        Not kept while a compiler or a transform of torch.func traces, and not beyond inference mode if it was made there.
        """
        if _traced():
            return make()
        inference = torch.is_inference_mode_enabled()
        kept = self._derived.get(key)
        if kept is None or (kept[0] and not inference):
            kept = self._derived[key] = inference, make()
        return kept[1]

    @property
    def count(self) -> Tensor | int:
        """The number of real tokens: of each row (b), or n where all are real."""
        valid = self.valid
        if valid is None:
            return self.shape[1]
        return self.derived("count", lambda: valid.sum(1))

    @property
    def longest(self) -> int:
        """The largest position of a real token, plus 1. Reads the device, unless `positions_below` gives a bound."""
        bound = position_bound()
        if bound is None:
            return self.derived("longest", self._longest)
        return bound

    @property
    def unpad_order(self) -> UnpadOrder | None:
        """The order with real tokens in front; None where they are there already."""
        valid = self.valid
        if valid is None or self.packed:
            return None
        return self.derived("order", lambda: unpad_order(valid))

    @property
    def real(self) -> Tensor:
        """Which tokens are real, (b n)."""
        if self.valid is not None:
            return self.valid
        if self._real is None or (self._real.is_inference() and not torch.is_inference_mode_enabled()):
            made = torch.ones(self.shape, dtype=torch.bool, device=self.device)
            if _traced():
                return made
            self._real = made
        return self._real

    def sdpa_mask(self, dtype: torch.dtype) -> SdpaMask | None:
        """Return what scores against these tokens get, in the form of the fused kernel; None where all tokens are real."""
        valid = self.valid
        if valid is None:
            return None
        return self.derived(("sdpa", dtype), lambda: sdpa_mask(valid, dtype))

    def after(self, t: Tensor) -> Tensor:
        """Return the number of real tokens (b) of each row with these, where t (b) came before them."""
        if _traced():
            return t + self.count
        return self.derived(("after", id(t)), lambda: (t, t + self.count))[1]  # with t, so that no other tensor gets its id

    def behind(self, before: Places, make: Callable[[], Places]) -> Places:
        """Return the places of `before` and of these tokens together, for all caches that hold the same tokens."""
        if _traced():
            return make()
        return self.derived(("behind", id(before)), lambda: (before, make()))[1]

    def _pooled(self, rate: int) -> Places:
        groups = -(-self.shape[1] // rate)
        return Places.of(self.at[:, :groups], pooled_valid(self.valid, rate), packed=True)

    def _front(self, room: int) -> Places:
        assert self.valid is not None
        order = self.unpad_order
        real = (self.valid if order is None else order.real)[:, :room]
        return Places(_tokens_before(real) + self.at[:, :1], real, self.start, packed=True)

    def _longest(self) -> int:
        real = self.at + (1 if self.valid is None else self.valid.long())
        if real.numel():
            return int(real.max())
        return 0


PaddingMask = Tensor | Places | None  # (b n), True: a real token; or the places of tokens that were checked already


def _traced() -> bool:
    """Return whether tensors of now must not outlive the trace or the transform that they are made in."""
    return torch.compiler.is_compiling() or transformed()


def _tokens_before(valid: Tensor) -> Tensor:
    """Count the real tokens before each, (b n)."""
    count = valid.long()
    return count.cumsum(1) - count


def unpad_order(valid: Tensor) -> UnpadOrder | None:
    """Return the order with real tokens in front; None where they are there already, which is found out on a CPU alone."""
    if may_read_data(valid) and bool((valid[:, 1:] <= valid[:, :-1]).all()):
        return None
    there = (~valid).long().argsort(dim=1, stable=True)
    order = torch.arange(valid.shape[1], device=valid.device)
    real = order < valid.sum(1, keepdim=True)
    return UnpadOrder(there, there.argsort(dim=1), real)


def mask_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Set padded tokens of x (b n w) to zero, whatever they hold: their gradient is zero too."""
    if valid is None:
        return x
    return x.masked_fill(~valid[..., None], 0)


def pooled_valid(valid: Tensor | None, rate: int) -> Tensor | None:
    """Return which of ceil(n / rate) outputs are real (b ceil(n / rate)): real tokens come to the front, so the first ones."""
    if valid is None or rate == 1:
        return valid
    size = -(-valid.shape[1] // rate)
    groups = torch.arange(size, device=valid.device)
    return groups * rate < valid.sum(1, keepdim=True)


def pool_tokens(x: Tensor, valid: Tensor | None, rate: int) -> tuple[Tensor, Tensor | None]:
    """Replace every `rate` real tokens of x (b n w) by their mean, (b ceil(n / rate) w); also return which of those are real.

    A residual connection adds this around a mixer with fewer outputs than tokens. Real tokens come to the front first.
    """
    if rate == 1:
        return x, valid
    return _means(x, Places.of(x, valid), rate), pooled_valid(valid, rate)


def pool_at(x: Tensor, places: Places, rate: int) -> tuple[Tensor, Places]:
    """Pool tokens x (b n w) as `pool_tokens` does; also return the places of the means."""
    if rate == 1:
        return x, places
    return _means(x, places, rate), places.pooled(rate)


def _means(x: Tensor, places: Places, rate: int) -> Tensor:
    b, n, w = x.shape
    groups = -(-n // rate)
    valid = places.valid
    at = places.at // rate
    real = x.new_ones(b, n) if valid is None else valid.to(x.dtype)
    group = at.clamp_max(max(groups - 1, 0))
    count = x.new_zeros(b, groups).scatter_add(1, group, real)
    index = group[..., None].expand(b, n, w)
    sums = x.new_zeros(b, groups, w).scatter_add(1, index, mask_padding(x, valid))
    return sums / count.clamp_min(1)[..., None]
