"""Kernels whose features are exponentials: softmax over features or over random directions, kept finite by running maxima."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers.base import Dims, Places
from regard.mixers.estimation import Estimator
from regard.mixers.feature_math import (
    empty_sums,
    finite_max,
    orthogonal,
    read_state,
    unwritten_sums,
    where_valid,
)
from regard.mixers.linear_attention import Kernel
from regard.ops.linear.causal_exp_op import causal_exp_attention
from regard.ops.linear.exp_feature_op import (
    ExpMap,
    exp_kernels_fit,
    exp_key_features,
    exp_keys_at_once,
    exp_query_features,
    exponents,
)
from regard.ops.linear.feature_maps import min_log_decay, safe_ratio
from regard.ops.linear.linear_op import (
    divided_linear_attention,
    fuses_features,
    linear_attention,
    linear_read,
    normalized_linear_write,
)
from regard.ops.linear.noncausal_op import takes_noncausal
from regard.ops.linear.prefix import cumulative_max
from regard.ops.linear.running_softmax import RunningSoftmax, running_kernels_fit, running_softmax, running_softmax_plain


class ExpSums(NamedTuple):
    s: Tensor  # in units of exp(top), as is z
    z: Tensor
    top: Tensor  # (b g 1) or (b g f) largest log feature so far, -inf before the first token


class _ExpFeatures(Kernel):
    """Kernels whose features are exponentials, kept finite by the largest exponent so far.

    The memory is in units of exp(top), and a top that rises makes all before it smaller: a decay like any other.
    Units cancel in the output, so top carries no gradient; top depends on no later token, so rounding does not either.
    """

    one_top: bool  # for all features, or one for each

    def logs(self, x: Tensor) -> Tensor:
        """The exponents (b h n f) of the features of queries or keys."""
        raise NotImplementedError

    def empty(self, k: Tensor, v: Tensor) -> ExpSums:
        return self._without_tokens(*empty_sums(k, v, self.f))

    def unwritten(self, k: Tensor, v: Tensor) -> ExpSums:
        return self._without_tokens(*unwritten_sums(k, v, self.f))

    def _without_tokens(self, s: Tensor, z: Tensor) -> ExpSums:
        return ExpSums(s, z, z.new_full((*z.shape[:2], 1 if self.one_top else self.f), -torch.inf))

    def _push(self, memory: ExpSums, k: Tensor, v: Tensor, places: Places) -> ExpSums:
        if k.shape[2] == 0:
            return memory
        keys, top = self._pushed(memory, k, places)
        kept = (memory.top - finite_max(top)).exp()
        old = kept.unsqueeze(-1) * memory.s
        s, z = normalized_linear_write(keys, v, old, kept * memory.z, backend=self.dims.backend)
        return ExpSums(s, z, top)

    def _pushed(self, memory: ExpSums, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Keys in units of the top of all of them and of the memory, and that top."""
        logs, tops = self._keys(k, places)
        top = torch.maximum(memory.top, tops.amax(2))
        return (logs - finite_max(top).unsqueeze(2)).exp(), top

    def _keys(self, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Exponents of the keys (b g m f), and the top of each token alone (b g m 1) or (b g m f)."""
        logs = where_valid(self.logs(k), places.valid, -torch.inf)
        tops = logs.detach()
        if self.one_top:
            tops = tops.amax(-1, keepdim=True)
        return logs, tops

    def _rising(self, memory: ExpSums, k: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Keys in units of the top at their own time, the log decay by which those units grow, and the last top."""
        logs, tops = self._keys(k, places)
        top = cumulative_max(tops, memory.top)
        before = torch.cat([memory.top.unsqueeze(2), top[:, :, :-1]], 2)
        decay = (before - top).clamp(min=min_log_decay(k.dtype))
        keys = (logs - finite_max(top)).exp()
        decay = decay.masked_fill(before == -torch.inf, 0)
        return keys, decay, top[:, :, -1]

    def _queries(self, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - the same at every position
        return torch.softmax(self.logs(q), -1)


class Efficient(_ExpFeatures):
    """Efficient attention: each feature is a map over the positions, and a query mixes the maps.

    out_i = sum_f softmax_f(q_i)_f sum_j softmax_j(k_jf) v_j, the second softmax over the tokens seen; q and k are not scaled,
    as in the paper. Time n d e, memory d (e + 2) at any length. Shen et al. 2018, arXiv:1812.01243.
    """

    one_top = False
    map = "softmax"

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.f = dims.d

    def logs(self, x: Tensor) -> Tensor:
        return x

    def _read(self, memory: ExpSums, q: Tensor, places: Places) -> Tensor:
        maps = memory.s / memory.z.clamp(min=1).unsqueeze(-1)  # one division of the sums, not one for each query
        return read_state(self._queries(q, places), maps)

    def scan(self, memory: ExpSums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, ExpSums]:
        fused = k.shape[2] > 1 and running_kernels_fit(q, k) and fuses_features(q, memory.s, self.dims.backend)
        if not fused:
            return super().scan(memory, q, k, v, places)
        y, memory = self._mixed(memory, v, running_softmax(q, k, memory.z, memory.top, places.valid))
        return y.to(v.dtype), memory

    def _scan(self, memory: ExpSums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, ExpSums]:
        features = running_softmax_plain(q, k, memory.z, memory.top, places.valid, self.dims.backend)
        return self._mixed(memory, v, features)

    def _mixed(self, memory: ExpSums, v: Tensor, by: RunningSoftmax) -> tuple[Tensor, ExpSums]:
        out, s = linear_attention(by.mix, by.keys, v, memory.s, log_decay=by.log_decay, backend=self.dims.backend)
        return out, ExpSums(s, by.z, by.top)


PERFORMER_FEATURES = ("regularized", "positive", "hyperbolic")


class Performer(Estimator, _ExpFeatures):
    """Estimate softmax attention by positive orthogonal random features (FAVOR+), in time n f e and memory f (e + 1).

    phi(x) = exp(w_f . x' - |x'|^2 / 2) / sqrt(features), x' = x / d^(1/4), the directions w_f orthogonal in blocks of d; one
    set serves all heads. Weights are positive and sum to 1, so every output lies in the hull of the values.

    The relative variance of a weight is about exp(2 |x'|^2) / features: at unit variance and d = 64 no number of features
    that fits a machine is enough, and the estimate is worse than equal weights. `max_norm` bounds it: x' longer than that is
    shortened to it, as torch.nn.Embedding does, which makes the weights of that query or key less sharp.
    "learned": one number for each key-value head, at first such that the variance is about 1/2. A number: the same, fixed.
    None: no bound.

    kind: how directions are drawn.
    "regularized": with the length sqrt(d). The mean is the paper's regularized softmax kernel, a little below the
    exponential, with less variance.
    "positive": with the lengths of Gaussian vectors. For x' within max_norm the mean of phi(q) . phi(k) is
    exp(q . k / sqrt(d)), without bias. performer(kind="positive", max_norm=None) is the paper's estimator.
    "hyperbolic": the same in pairs w and -w: without bias, and nearer where scores are small, but half as many directions.
    Choromanski et al. 2020, arXiv:2009.14794.
    """

    one_top = True
    fusable = True
    map = "random"
    directions: Tensor

    def __init__(
        self,
        dims: Dims,
        *,
        features: int = 256,
        kind: str = "regularized",
        max_norm: float | str | None = "learned",
        seed: int = 0,
    ) -> None:
        super().__init__(dims)
        need("features", features, 1, WIDEST)
        if kind not in PERFORMER_FEATURES:
            raise ValueError(f"kind must be one of {', '.join(map(repr, PERFORMER_FEATURES))}, not {kind!r}")
        self.f, self.kind, self.pairs = features, kind, kind == "hyperbolic"
        drawn = -(-features // 2) if self.pairs else features
        self.register_buffer("directions", torch.empty(drawn, dims.d))
        self.redraw(seed)
        self.max_norm, self.log_norm = _limit(max_norm), None
        if max_norm == "learned":
            square = math.log1p(features / 2) / 2  # exp(2 max_norm^2) = 1 + features / 2
            begin = math.log(square) / 2
            self.log_norm = nn.Parameter(torch.full((dims.g,), begin))

    def redraw(self, seed: int) -> None:
        """Draw other random directions: another estimate of the same attention. Never done by a forward pass."""
        drawn = orthogonal(len(self.directions), self.dims.d, seed)
        if self.kind == "regularized":
            drawn = F.normalize(drawn, dim=-1)
            drawn = drawn * math.sqrt(self.dims.d)
        self.directions.copy_(drawn)

    def logs(self, x: Tensor) -> Tensor:
        return exponents(x, self._rows(), self._most(x))

    def _rows(self) -> Tensor:
        """The directions of all features (f d)."""
        return torch.cat([self.directions, -self.directions])[: self.f] if self.pairs else self.directions

    def directed(self) -> ExpMap:
        """The features as kernels compute them."""
        if self.max_norm is None:
            return ExpMap(self._rows(), self.log_norm)
        return ExpMap(self._rows(), self.directions.new_full((1,), math.log(self.max_norm)))

    def _fused(self, memory: ExpSums, x: Tensor, places: Places) -> bool:
        return exp_kernels_fit(x) and super()._fused(memory, x, places)

    def _pushed(self, memory: ExpSums, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        if self._fused(memory, k, places):
            return exp_keys_at_once(k, self.directed(), memory.top, places.valid)
        return super()._pushed(memory, k, places)

    def _most(self, x: Tensor) -> Tensor | None:
        """The largest squared norm of tokens x (b h n d): one number, or (h 1 1)."""
        if self.log_norm is None:
            if self.max_norm is None:
                return None
            return x.new_tensor(self.max_norm**2)
        most = (2 * self.log_norm.to(x.dtype)).exp()
        if x.shape[1] != len(most):
            most = most.repeat_interleave(x.shape[1] // len(most))
        return most[:, None, None]

    def exact(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores * self.dims.d**-0.5

    def estimated(self, q: Tensor, k: Tensor) -> Tensor:
        logs = self.logs(k)
        top = logs.amax((-1, -2), keepdim=True)
        queries = torch.softmax(self.logs(q), -1)
        products = queries @ (logs - top).exp().mT
        return safe_ratio(products, products.sum(-1, keepdim=True))

    def _read(self, memory: ExpSums, q: Tensor, places: Places) -> Tensor:
        fused = self._fused(memory, q, places)
        queries = exp_query_features(q, self.directed()) if fused else self._queries(q, places)
        return linear_read(queries, memory.s, memory.z, backend=self.dims.backend)

    def scan(self, memory: ExpSums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, ExpSums]:
        if k.shape[2] > 1 and takes_noncausal(q, k, v) and self._one_operation(memory, k, places):
            out, *after = causal_exp_attention(q, k, v, places.valid, self.directed(), *memory)
            return out.to(v.dtype), ExpSums(*after)
        return super().scan(memory, q, k, v, places)

    def _one_operation(self, memory: ExpSums, k: Tensor, places: Places) -> bool:
        """Whether kernels compute features, sums and answers at once; other kernels of features are never compiled."""
        return super()._fused(memory, k, places) if torch.compiler.is_compiling() else self._fused(memory, k, places)

    def _scan(self, memory: ExpSums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, ExpSums]:
        if self._fused(memory, k, places):
            keys, decay, top = exp_key_features(k, self.directed(), memory.top, places.valid)
            queries = exp_query_features(q, self.directed())
        else:
            keys, decay, top = self._rising(memory, k, places)
            queries = self._queries(q, places)
        out, s, z = divided_linear_attention(queries, keys, v, memory.s, memory.z, log_decay=decay, backend=self.dims.backend)
        return out, ExpSums(s, z, top)


def _limit(max_norm: float | str | None) -> float | None:
    """The bound, where it is a fixed number."""
    if max_norm is None or max_norm == "learned":
        return None
    if isinstance(max_norm, bool | str) or not isinstance(max_norm, int | float) or not 0 < max_norm < math.inf:
        raise ValueError(f"max_norm must be 'learned', None or a positive number, not {max_norm!r}")
    return float(max_norm)
