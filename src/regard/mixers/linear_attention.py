"""Kernelized attention: products of features, so that the memory is a sum over tokens, of a size that never grows.

    out_i = phi(q_i) S / phi(q_i) . z,   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)

Sums are kept in float32 or better. f counts the features; the other letters are those of the contract.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers import feature_math as draws
from regard.mixers.base import Can, Core, Dims, Places, needed_length
from regard.mixers.estimation import Estimator
from regard.mixers.feature_math import (
    concat_chunks,
    empty_sums,
    per_query_head,
    read_state,
    unwritten_sums,
    upcast,
    where_valid,
)
from regard.ops.linear.exp_feature_op import ExpMap
from regard.ops.linear.feature_maps import log_gate, safe_ratio
from regard.ops.linear.linear_op import (
    decayed_prefix_sum,
    divided_linear_attention,
    fuses_features,
    linear_read,
    linear_write,
    normalized_linear_attention,
    normalized_linear_write,
)
from regard.ops.linear.noncausal_op import noncausal_attention, takes_noncausal
from regard.ops.linear.position_features import position_features
from regard.ops.linear.prefix import decay_to_end
from regard.ops.linear.wave_features import (
    lifted_ratio,
    lifted_ratio_plain,
    wave_features,
    wave_features_plain,
    wave_kernels_fit,
)
from regard.ops.strip import token_runs


class Sums(NamedTuple):
    s: Tensor  # (b g f e) sum of phi(k_j) v_j^T
    z: Tensor  # (b g f) sum of phi(k_j)


class WeighedSums(NamedTuple):
    s: Tensor
    z: Tensor
    even: Tensor  # (b g 1) or (b g e + 1) sum of all values, if needed, and weight of all tokens: their number without gates


class Kernel(Core):
    """Base of kernelized attention. Long sequences pass in runs, so that the features of all tokens never exist at once.

    The methods with an underscore take one run, in the dtype of the sums, and the places of its tokens. Where the backend
    computes features inside of its kernels and the mechanism is `fusable`, they take all tokens in their own dtype.
    """

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM
    positional = False
    operations = ("linear",)
    fusable = False
    map: str | None = None  # its features, where kernels read all keys without an order: see `noncausal_attention`
    f: int  # features of a token

    def push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        if self._fused(memory, k, places):
            return self._push(memory, k, v, places)
        for keys, values, here in self._runs(places, k, v, memory=memory):
            memory = self._push(memory, keys, values, here)
        return memory

    def read(self, memory: Any, q: Tensor, places: Places) -> Tensor:
        if self._fused(memory, q, places):
            return self._read(memory, q, places).to(q.dtype)
        answers = [self._read(memory, queries, here).to(q.dtype) for queries, here in self._runs(places, q)]
        return concat_chunks(answers)

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        if self.map is not None and takes_noncausal(q, k, v):
            row = unwritten_sums(k, v, 1)[0]  # these kernels take any number of features
            if fuses_features(q, row, self.dims.backend):
                return noncausal_attention(q, k, v, places.valid, self.map, self.directed())
        return self.read(self.push(self.unwritten(k, v), k, v, places), q, query_places)

    def scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        if k.shape[2] > 0 and self._fused(memory, q, places):
            y, memory = self._scan(memory, q, k, v, places)
            return y.to(v.dtype), memory
        if k.shape[2] <= 1:  # a decoding step writes, then reads
            memory = self.push(memory, k, v, places)
            return self.read(memory, q, places).to(v.dtype), memory
        out = []
        for queries, keys, values, here in self._runs(places, q, k, v, memory=memory):
            y, memory = self._scan(memory, queries, keys, values, here)
            out.append(y.to(v.dtype))
        return concat_chunks(out), memory

    def directed(self) -> ExpMap | None:
        """The directions of its features, if they have any."""
        return None

    def _fused(self, memory: Any, x: Tensor, places: Places) -> bool:  # noqa: ARG002 - the same at every position
        """Whether tokens x (b h n ...) pass at once, in their own dtype."""
        return self.fusable and fuses_features(x, memory.s, self.dims.backend)

    def _push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        raise NotImplementedError

    def _scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _queries(self, q: Tensor, places: Places) -> Tensor:
        """phi(q) up to a factor of each query."""
        raise NotImplementedError

    def _read(self, memory: Any, q: Tensor, places: Places) -> Tensor:
        queries = self._queries(q, places)
        out = read_state(queries, memory.s)
        norm = read_state(queries, memory.z.unsqueeze(-1))
        return safe_ratio(out, norm)

    def _runs(self, places: Places, *tensors: Tensor, memory: Any = None) -> list[tuple[Any, ...]]:
        """Tokens (b h n ...) and their places, a run at a time; with a memory to write to, the last tensor are values."""
        b, h, n, _ = tensors[0].shape
        wide = [upcast(x) for x in tensors]
        if memory is not None and "linear" in self.operations and fuses_features(tensors[0], memory.s, self.dims.backend):
            wide[-1] = tensors[-1]  # kernels compute products in the type of the values
        runs = token_runs(wide, b * h * self.f)
        if len(runs) == 1:
            return [(*runs[0], places)]
        size = runs[0][0].shape[2]
        parts = [places.part(low, low + size) for low in range(0, n, size)]
        return [(*run, part) for run, part in zip(runs, parts, strict=True)]


class Linear(Kernel):
    """Linear transformer: attention whose weights are inner products of positive features.

    phi(x) = elu(x) + 1;  out_i = phi(q_i) S / phi(q_i) . z
    Time n d e, memory d (e + 1) at any length. Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    fusable = True
    feature = "elu"
    map: str | None = "elu"

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.f = dims.d

    def empty(self, k: Tensor, v: Tensor) -> Sums:
        return Sums(*empty_sums(k, v, self.f))

    def unwritten(self, k: Tensor, v: Tensor) -> Sums:
        return Sums(*unwritten_sums(k, v, self.f))

    def _push(self, memory: Sums, k: Tensor, v: Tensor, places: Places) -> Sums:
        keys = self._keys(k, places)
        s, z = normalized_linear_write(
            keys, v, memory.s, memory.z, valid=places.valid, feature=self.feature, backend=self.dims.backend
        )
        return Sums(s, z)

    def _read(self, memory: Sums, q: Tensor, places: Places) -> Tensor:
        queries = self._queries(q, places)
        return linear_read(queries, memory.s, memory.z, feature=self.feature, backend=self.dims.backend)

    def _scan(self, memory: Sums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Sums]:
        keys = self._keys(k, places)
        queries = self._queries(q, places)
        out, s, z = divided_linear_attention(
            queries, keys, v, memory.s, memory.z, valid=places.valid, feature=self.feature, backend=self.dims.backend
        )
        return out, Sums(s, z)

    def _queries(self, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - the same at every position
        return q

    def _keys(self, k: Tensor, places: Places) -> Tensor:
        return self._queries(k, places)


class Cosformer(Linear):
    """cosFormer: no exponential, only a preference for what is near.

    The weight of j for i is relu(q_i) . relu(k_j) cos(pi (i - j) / 2M), divided by the sum of its row, with M = max_len. By
    cos(a - b) = cos a cos b + sin a sin b it is phi(q_i) . phi(k_j) with phi(x) = [relu(x) cos a, relu(x) sin a] and
    a = pi i / 2M; positions stay below M, so that no feature and no weight is negative. A query all of whose weights are 0
    gets 0. Time n d e, memory 2 d (e + 1) at any length. Qin et al. 2022, arXiv:2202.08791.
    """

    positional = True
    feature = "identity"
    map = None

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.f = 2 * dims.d
        self.longest = needed_length(self.name, dims)

    def _fused(self, memory: Any, x: Tensor, places: Places) -> bool:
        self._check_positions(places)
        return super()._fused(memory, x, places)

    def _check_positions(self, places: Places) -> None:
        start, n = places.start, places.shape[1]
        if not n or not places.shape[0] or (start is not None and start + n <= self.longest):
            return
        if start is None and torch.compiler.is_compiling():
            return
        last = start + n if start is not None and places.valid is None else places.longest
        if last > self.longest:
            raise ValueError(f"{last} tokens, but cosformer was built for max_len={self.longest}: build it longer")

    def _queries(self, q: Tensor, places: Places) -> Tensor:
        fused = fuses_features(q, q[:, :, :0], self.dims.backend)
        return position_features(q, places.at, math.pi / 2 / self.longest, fused)


class RFA(Estimator, Kernel):
    """Estimate softmax attention over cosines by random waves, in time n f e and memory (f + 1) (e + 1), f = 2 features.

    phi(x) = [sin(W x'), cos(W x')] / sqrt(features), x' = x / |x|, W with `features` rows drawn from N(0, scale I), so that
    the mean of phi(q) . phi(k) is exp(scale (cos(q, k) - 1)). orthogonal=True draws rows that are orthogonal in blocks of d:
    the same mean, and at scale 1 half the error; the paper's independent rows learned retrieval in fewer steps.
    gated: S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, z alike, g_t = sigmoid(gate_t + b): one gate of each token and
    key-value head, a linear map of the layer's input that comes behind the key. It has an order even where it is not causal:
    the tokens are written one after the other, and every query reads what is left at the end.

    A sum of waves may come out near zero or negative, where its mean may not. phi(q) . z is never taken to be below exp(-2)
    of the weight of all tokens, the least that the exact kernel gives at scale 1 (exp(-2 scale) for smaller ones), so that
    no output is more than 9 times as large as the largest value. Above scale 1 that is often, and what is missing is spread
    evenly over all tokens. The relative variance of a weight is about exp(2 scale) / f: a scale above log(f) / 2 is not
    estimated well and tends to equal weights.
    Peng et al. 2021, arXiv:2103.02143.
    """

    directions: Tensor

    def __init__(
        self,
        dims: Dims,
        *,
        features: int = 128,
        scale: float = 1.0,
        gated: bool = False,
        orthogonal: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(dims)
        need("features", features, 1, WIDEST)
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not number or not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, the sharpness of the softmax over cosines, not {scale!r}")
        for name, value in (("gated", gated), ("orthogonal", orthogonal)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")
        self.scale = scale
        self.f = 2 * features
        self.draw = draws.orthogonal if orthogonal else draws.gaussian
        self.least = math.exp(-2 * min(scale, 1))  # share of its weight that a sum of waves must have
        self.register_buffer("directions", torch.empty(features, dims.d))
        self.redraw(seed)
        self.gates = 1 if gated else 0
        # heads begin with memories of about 3 to 400 tokens, so that some of them suit the data from the start
        self.gate_bias = nn.Parameter(torch.linspace(1, 6, dims.g)) if gated else None

    def redraw(self, seed: int) -> None:
        """Draw other random directions: another estimate of the same attention. Never done by a forward pass."""
        drawn = self.draw(len(self.directions), self.dims.d, seed)
        self.directions.copy_(math.sqrt(self.scale) * drawn)

    def empty(self, k: Tensor, v: Tensor) -> WeighedSums:
        s, z = empty_sums(k, v, self.f)
        channels = self._spread(v).shape[-1] + 1
        return WeighedSums(s, z, z.new_zeros(*z.shape[:2], channels))

    def _push(self, memory: WeighedSums, k: Tensor, v: Tensor, places: Places) -> WeighedSums:
        keys, weight, decay = self._keys(k, places)
        if decay is not None:  # one factor for the three sums, which are then plain ones
            later = decay_to_end(decay)
            keys = keys * later
            weight = weight * later
            kept = decay.sum(2).exp()
            s = kept.unsqueeze(-1) * memory.s
            memory = WeighedSums(s, kept * memory.z, kept * memory.even)
        s = linear_write(keys, v, memory.s, backend=self.dims.backend)
        even = weight.mT @ upcast(self._spread(v))
        even = torch.cat([even, weight.sum(2, keepdim=True)], -1).squeeze(2)
        z = memory.z + keys.sum(2)
        return WeighedSums(s, z, memory.even + even)

    def _read(self, memory: WeighedSums, q: Tensor, places: Places) -> Tensor:
        queries = self._queries(q, places)
        out = read_state(queries, memory.s)
        norm = read_state(queries, memory.z.unsqueeze(-1))
        return self._lifted(out, norm, memory.even.unsqueeze(2))

    def scan(self, memory: WeighedSums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, WeighedSums]:
        fused = k.shape[2] > 1 and self._by_kernels(q) and fuses_features(q, memory.s, self.dims.backend)
        if not fused:
            return super().scan(memory, q, k, v, places)
        y, memory = self._scan(memory, q, k, v, places)  # all tokens at once, in their own type
        return y.to(v.dtype), memory

    def _by_kernels(self, x: Tensor) -> bool:
        """Return whether kernels compute the features of tokens x (b h n d)."""
        return wave_kernels_fit(x) and fuses_features(x, x[:, :, :0], self.dims.backend)

    def _scan(self, memory: WeighedSums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, WeighedSums]:
        keys, weight, decay = self._keys(k, places)
        queries, backend = self._queries(q, places), self.dims.backend
        out, norm, s, z = normalized_linear_attention(queries, keys, v, memory.s, memory.z, log_decay=decay, backend=backend)
        each = torch.cat([weight * self._spread(v), weight], -1)
        even = decayed_prefix_sum(each, memory.even, log_decay=decay, backend=backend)
        return self._lifted(out, norm, even), WeighedSums(s, z, even[:, :, -1])

    def _keys(self, k: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features as they are written (b g m f), the weight of each token (b g m 1), and its log gate where there is one."""
        k, gate = k.split([self.dims.d, self.gates], -1)
        keys = self._waves(k, places.valid)
        weight = where_valid(torch.ones_like(upcast(k[..., :1])), places.valid, 0)
        if self.gate_bias is None:
            return keys, weight, None
        gate = upcast(gate) + self.gate_bias.to(weight.dtype)[:, None, None]
        weight = weight * torch.sigmoid(-gate)
        return keys * weight, weight, log_gate(gate, places.valid)

    def _queries(self, q: Tensor, places: Places | None = None) -> Tensor:  # noqa: ARG002 - the same at every position
        return self._waves(q)

    def _waves(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """The features of tokens x (b h n d), 0 at padding."""
        features = wave_features if self._by_kernels(x) else wave_features_plain
        return features(x, self.directions, valid)

    def _spread(self, v: Tensor) -> Tensor:
        """The values that equal weights need: above scale 1, where sums of waves are often too small."""
        return v if self.scale > 1 else v[..., :0]

    def _lifted(self, out: Tensor, norm: Tensor, even: Tensor) -> Tensor:
        """out / norm (b h n e), (b h n 1), with norm lifted to the least; even (b g n 1) or (b g n e + 1) sums over all."""
        even = per_query_head(even, norm)
        values = even[..., :-1]
        mass = even[..., -1:]
        if self.scale <= 1:
            ratio = lifted_ratio if self._by_kernels(out) else lifted_ratio_plain
            return ratio(out, norm, self.least * mass.expand_as(norm))
        lack = (self.least * mass - norm).relu()  # equal weights with this sum are lack / mass
        out = torch.addcmul(upcast(out), safe_ratio(lack, mass), values)
        return safe_ratio(out, norm + lack)

    def exact(self, q: Tensor, k: Tensor) -> Tensor:
        q = F.normalize(q, dim=-1, eps=1e-6)
        k = F.normalize(k, dim=-1, eps=1e-6)
        return self.scale * (q @ k.mT)

    def estimated(self, q: Tensor, k: Tensor) -> Tensor:
        weights = self._queries(q) @ self._queries(k).mT
        total = weights.sum(-1, keepdim=True)
        count = weights.shape[-1]
        lack = (self.least * count - total).relu()
        lifted = weights + lack / count * (self.scale > 1)
        return safe_ratio(lifted, total + lack)
