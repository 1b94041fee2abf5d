"""Landmarks: means of consecutive tokens in place of the queries, or of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims, Places
from regard.mixers.feature_math import upcast
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.pattern_attention import compact_queries
from regard.mixers.softmax import Softmax
from regard.ops.dense import sdpa
from regard.ops.landmark_attention import LandmarkRule, landmark_attention, takes_landmarks
from regard.ops.many_keys import many_keys_answers, takes_many_keys
from regard.ops.spd_solve import spd_solve
from regard.ops.tile.tile_op import MASKED_SCORE, accumulator


def real_first(x: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Move the real tokens of x (b h n d) to the front, zeros behind them; also their number (b 1), or (1 1) without padding."""
    n, valid = x.shape[2], places.valid
    if valid is None:
        return x, torch.full((1, 1), n, device=x.device)
    x = compact_queries(x, places)[0]
    count = valid.sum(1, keepdim=True)
    behind = torch.arange(n, device=x.device) >= count
    return x.masked_fill(behind[:, None, :, None], 0), count


def means(x: Tensor, starts: Tensor | None, sizes: Tensor, longest: int) -> Tensor:
    """Return means (b h s d) of tokens x (b h n d), real ones first: `sizes` (b s) of them from `starts` (b s), else 0.

    Without starts the segments are adjacent, `longest` tokens each. By gathering, not by scattering: sums in a fixed order come
    out the same every time, on a GPU too.
    """
    (b, h, n, d), s = x.shape, sizes.shape[1]
    steps = torch.arange(longest, device=x.device)
    if starts is None and torch.compiler.is_compiling():  # always filled up: a graph without that would be another one
        filled = pad(x, (0, 0, 0, (s + 1) * longest - n))
        sums = filled.unflatten(2, (s + 1, longest)).sum(3, dtype=accumulator(x.dtype))[:, :, :s]
        return sums / sizes.clamp_min(1)[:, None, :, None]
    if starts is None:
        if n < s * longest:
            x = pad(x, (0, 0, 0, s * longest - n))
    else:
        index = starts.unsqueeze(-1) + steps
        index = index.clamp_max(n - 1).flatten(1)
        x = x.gather(2, index[:, None, :, None].expand(b, h, -1, d))
        outside = steps >= sizes.unsqueeze(-1)
        x = x.masked_fill(outside.flatten(1)[:, None, :, None], 0)
    sums = x.unflatten(2, (s, longest)).sum(3, dtype=accumulator(x.dtype))
    return sums / sizes.clamp_min(1)[:, None, :, None]


class PooledQueries(Softmax):
    """Queries are averaged, `rate` consecutive real tokens at a time, and every average attends to all keys.

    out_s = softmax(q~_s k^T / sqrt(d)) v with q~_s the mean of queries s rate .. s rate + rate - 1: ceil(n / rate) answers, for
    models that end in one label. Real tokens come to the front first, so with rate > 1 the real outputs are in front too.
    A block adds them to `pool_tokens(x, valid, rate)`, the mean of the same tokens, and goes on with its valid.
    Cost: (d + e) n^2 / rate, memory n. Dai et al. 2020, arXiv:2006.03236 (where the tokens are averaged before they are
    projected, which is the same for a linear projection, and the decoder that brings the length back is a layer of its own).
    """

    can = Can.CROSS | Can.PADDING | Can.DROPOUT
    joint = True

    def __init__(self, dims: Dims, *, rate: int = 2, scale: float | None = None) -> None:
        super().__init__(dims, scale=scale)
        self.rate = need("rate", rate, 1, WIDEST)

    @property
    def name(self) -> str:
        return "pooled_queries"

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        if self.rate > 1:
            x, count = real_first(q, places)
            sizes = (count - torch.arange(0, q.shape[2], self.rate, device=q.device)).clamp(0, self.rate)
            q = means(x, None, sizes, self.rate).to(q.dtype)
        return super().answer(log, q, places, causal)


def newton_schulz(s: Tensor, iterations: int) -> Tensor:
    """About the pseudo-inverse of matrices s (... n m) of weights whose rows sum to 1, by a third-order iteration."""
    largest = s.sum(-2).amax(-1)
    z = s.mT / largest[..., None, None]
    one = torch.eye(s.shape[-2], dtype=s.dtype, device=s.device)
    for _ in range(iterations):
        near = s @ z
        inner = 15 * one - near @ (7 * one - near)
        z = z @ (13 * one - near @ inner) / 4
    return z


class Nystrom(CachedCore):
    """Nystromformer: attention between all tokens, estimated from that of `landmarks` means of consecutive tokens.

    A = softmax(q k~^T) S^+ softmax(q~ k^T), S = softmax(q~ k~^T), all scaled by 1/sqrt(d); q~ and k~ are means of segments of
    the real tokens of a row, as equal in length as can be. With no more keys than landmarks the keys are their own landmarks,
    and it is exact attention. Time n landmarks (d + e) + landmarks^3, memory n. Xiong et al. 2021, arXiv:2102.03902.

    S^+ = (S^T S + ridge)^-1 S^T, solved in float64: a ridge solve, not the paper's iteration. Segments that are alike make S
    nearly singular, and a true pseudo-inverse then answers with noise a hundred times larger than its values. A smaller ridge
    (1e-3 unless given) is closer to softmax where there are landmarks enough for the data, and further away where there are not.
    iterations=6 is the published form, which cuts off about where the default ridge does: so many times, in float64,
    Z <- Z (13 - S Z (15 - S Z (7 - S Z))) / 4, from Z = S^T / (largest sum of a column of S).
    `conv`: the paper's skip connection, a convolution of that (odd) width over the values, one kernel a head, zero at the
    start; 0: without. A landmark of queries depends on all queries, those to come included: not causal, no stream.
    """

    can = Can.CROSS | Can.PADDING
    positional, joint = False, True

    def __init__(
        self, dims: Dims, *, landmarks: int = 64, ridge: float | None = None, conv: int = 0, iterations: int = 0
    ) -> None:
        if need("iterations", iterations, 0, 64) and ridge is not None:
            raise ValueError("iterations take the place of a ridge: leave one of them out")
        if ridge is None:
            ridge = 1e-3
        number = isinstance(ridge, int | float) and not isinstance(ridge, bool)
        if not number or not 0 < ridge < math.inf:
            raise ValueError(f"ridge must be a positive number, not {ridge!r}")
        even = need("conv", conv, 0, WIDEST - 1) % 2 == 0
        if even and conv:
            raise ValueError(f"conv is as wide to the left as to the right: {conv} is an even number")
        super().__init__(dims)
        self.landmarks = need("landmarks", landmarks, 1, 4096)
        self.ridge = float(ridge)
        self.scale = dims.d**-0.5
        self.iterations = iterations
        self.conv = nn.Parameter(torch.zeros(dims.heads, conv)) if conv else None
        if conv:
            self.can = self.can & ~Can.CROSS  # it slides over the values of the queries themselves

    def extra_repr(self) -> str:
        return f"landmarks={self.landmarks}"

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:  # noqa: ARG002 - it is never causal
        if q.shape[2] == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        if log.size <= self.landmarks:
            out = sdpa(q, log.keys, log.values, scale=self.scale, valid=log.places.valid)
        else:
            out = self._estimate(log, q, places)
        if self.conv is not None:
            out = out + self._skip(log, places)
        return out.to(log.v.dtype)

    def _estimate(self, log: KVCache, q: Tensor, places: Places) -> Tensor:
        k, v, plain = log.keys, log.values, log.places.valid is None and places.valid is None
        if plain and takes_landmarks(q, k, v, self.landmarks):
            rule = LandmarkRule(self.landmarks, self.iterations, self.ridge, self.scale)
            return landmark_attention(q, k, v, rule, lambda q, k, v: self._from_landmarks(q, k, v, places, log.places))
        return self._from_landmarks(q, k, v, places, log.places)

    def _from_landmarks(self, q: Tensor, k: Tensor, v: Tensor, places: Places, key_places: Places) -> Tensor:
        valid = key_places.valid
        few_q, there_q, _ = self._landmarks(q, places)
        few_k, there_k, count = self._landmarks(k, key_places)
        few_k = few_k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = few_q.double() * self.scale @ few_k.double().mT
        s = scores.masked_fill(~there_k[:, None, None], MASKED_SCORE).softmax(-1)
        s = s.masked_fill(~(there_q[:, None, :, None] & there_k[:, None, None]), 0)
        # what rounding adds to the answers of the landmarks, the solve multiplies
        answers = self._answers(few_q, k, v, valid)
        found = self._solve(s, answers)  # (b h landmarks e)
        if valid is not None:  # the landmarks of a short row are its tokens
            own = self._landmarks(v, key_places)[0].repeat_interleave(q.shape[1] // k.shape[1], 1)
            found = torch.where((count <= self.landmarks)[..., None, None], own, found)
        few_k, found = few_k.to(q.dtype), found.to(q.dtype)
        return sdpa(q, few_k, found, scale=self.scale, valid=None if valid is None else there_k)

    def _answers(self, few_q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return what landmarks (b h s d) in float32 or better get from all tokens, in their type."""

        def plain(few_q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(few_q, upcast(k), upcast(v), scale=self.scale, valid=valid)

        if takes_many_keys(few_q, k, v):
            return many_keys_answers(few_q, k, v, valid, self.scale, plain)
        return plain(few_q, k, v)

    def _landmarks(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Means of segments (b h s d), which of them there are (b s), and the number of real tokens (b 1)."""
        most = min(self.landmarks, x.shape[2])
        x, count = real_first(x, places)
        few = count.clamp(1, most)
        order = torch.arange(most + 1, device=x.device)
        edges = (order * count + few - 1) // few
        edges = torch.minimum(edges, count)  # token p belongs to segment p * few // count
        eager = places.valid is None and not torch.compiler.is_compiling()
        even = eager and x.shape[2] % most == 0
        sizes = edges.diff(dim=1)
        starts = None if even else edges[:, :-1]
        found = means(x, starts, sizes, -(-x.shape[2] // most))
        return found, sizes > 0, count

    def _solve(self, s: Tensor, answers: Tensor) -> Tensor:
        """S^+ of what the landmarks among the queries get."""
        if self.iterations:
            inverse = newton_schulz(s, self.iterations)
            return (inverse @ answers.double()).to(answers.dtype)
        square = s.mT @ s
        one = torch.eye(square.shape[-1], dtype=s.dtype, device=s.device)
        square = square + self.ridge * one
        return spd_solve(square, s.mT @ answers.double()).to(answers.dtype)

    def _skip(self, log: KVCache, places: Places) -> Tensor:
        """The convolution (b h n e) over the values, which belong to the queries themselves."""
        assert self.conv is not None
        v, _ = real_first(upcast(log.values), log.places)
        v = v.permute(0, 3, 1, 2)  # (b e g m)
        kernel = self.conv.to(v.dtype).unsqueeze(1)
        out = conv1d(v.flatten(0, 1), kernel, padding=kernel.shape[-1] // 2, groups=v.shape[2])
        out = out.unflatten(0, v.shape[:2]).permute(0, 2, 3, 1)  # (b h m e)
        if places.valid is None and log.plain:
            return out
        at = places.at.clamp_max(log.size - 1)
        index = at[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[3])
        return out.gather(2, index)
