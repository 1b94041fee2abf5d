"""Change the order of multiplication: kernels whose memory is a sum over tokens, of a size that never grows.

    out_i = phi(q_i) S / phi(q_i) . z,   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)

Sums are kept in float32 or better. f counts the features; the other letters are those of the contract.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels import chunks
from regard.mixers.base import Can, Core, Dims, Places
from regard.mixers.features import (
    ask,
    check_count,
    finite,
    gaussian,
    joined,
    nothing,
    orthogonal,
    per_query_head,
    positive,
    ratio,
    where_valid,
    wide,
)

CPU_RUN, GPU_RUN = 1 << 20, 1 << 26  # numbers in the features of one run: they fit a CPU's caches, or keep a GPU busy


class Sums(NamedTuple):
    s: Tensor  # (b g f e) sum of phi(k_j) v_j^T
    z: Tensor  # (b g f) sum of phi(k_j)


class WeighedSums(NamedTuple):
    s: Tensor
    z: Tensor
    mass: Tensor  # (b g 1) weight of all tokens: their number, where no gate weighs them


class PeakedSums(NamedTuple):
    s: Tensor  # in units of exp(top), as is z
    z: Tensor
    top: Tensor  # (b g 1) or (b g f) largest log feature so far, -inf before the first token


class Kernel(Core):
    """What the kernels share. Long sequences pass in runs, so that the features of all tokens never exist at once.

    The methods with an underscore see one run, in the dtype of the sums; valid (b m) is None where all tokens are real.
    """

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM
    f: int  # features of a token

    def push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        for keys, values, valid in self._runs(places.valid, k, v):
            memory = self._push(memory, keys, values, valid)
        return memory

    def read(self, memory: Any, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - every query sees every token
        return joined([self._read(memory, queries).to(q.dtype) for queries, _ in self._runs(None, q)])

    def scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        if k.shape[2] <= 1:  # a decoding step writes, then reads
            memory = self.push(memory, k, v, places)
            return self.read(memory, q, places).to(v.dtype), memory
        out = []
        for queries, keys, values, valid in self._runs(places.valid, q, k, v):
            y, memory = self._scan(memory, queries, keys, values, valid)
            out.append(y.to(v.dtype))
        return joined(out), memory

    def _push(self, memory: Any, k: Tensor, v: Tensor, valid: Tensor | None) -> Any:
        raise NotImplementedError

    def _scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _queries(self, q: Tensor) -> Tensor:
        """phi(q) up to a factor of each query."""
        raise NotImplementedError

    def _read(self, memory: Any, q: Tensor) -> Tensor:
        asked = self._queries(q)
        return ratio(ask(asked, memory.s), ask(asked, memory.z.unsqueeze(-1)))

    def _runs(self, valid: Tensor | None, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Tokens (b h n ...) and their valid, a run at a time."""
        b, h, n, _ = tensors[0].shape
        room = CPU_RUN if tensors[0].device.type == "cpu" else GPU_RUN
        size = max(room // max(b * h * self.f, 1) // chunks.SIZE, 1) * chunks.SIZE
        if n <= size:
            return [(*map(wide, tensors), valid)]
        masks = [None] * -(-n // size) if valid is None else valid.split(size, 1)
        return list(zip(*(wide(x).split(size, 2) for x in tensors), masks, strict=True))


class Linear(Kernel):
    """Linear transformer: attention whose weights are inner products of positive features.

    phi(x) = elu(x) + 1;  out_i = phi(q_i) S / phi(q_i) . z
    Time n d e, memory d (e + 1) at any length. Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.f = dims.d

    def empty(self, k: Tensor, v: Tensor) -> Sums:
        return Sums(*nothing(k, v, self.f))

    def _push(self, memory: Sums, k: Tensor, v: Tensor, valid: Tensor | None) -> Sums:
        keys = where_valid(positive(k), valid, 0)
        return Sums(memory.s + keys.mT @ v, memory.z + keys.sum(2))

    def _scan(self, memory: Sums, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Sums]:
        keys = where_valid(positive(k), valid, 0)
        out, norm, s, z = chunks.scan_normed(self._queries(q), keys, v, memory.s, memory.z)
        return ratio(out, norm), Sums(s, z)

    def _queries(self, q: Tensor) -> Tensor:
        return positive(q)


class RFA(Kernel):
    """Random feature attention: softmax over cosines, its exponential estimated by random waves.

    phi(x) = [sin(W x'), cos(W x')] / sqrt(features), x' = x / |x|, W with `features` rows drawn from N(0, scale I), so that
    phi(q) . phi(k) estimates exp(scale (cos(q, k) - 1)). Time n f e with f = 2 features, memory f (e + 1) at any length.
    gated: S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, z alike, g_t = sigmoid(w . k_t + b) with w and b of each key-value
    head (the paper gates on the layer's input, which a core never sees). It has an order even where it is not causal: the
    tokens are written one after the other, and every query reads what is left at the end.
    A sum of waves may come out near zero or negative, its expectation may not: phi(q) . z is never taken to be below
    exp(-2 scale) times the weight of all tokens, the least that the exact kernel gives. Peng et al. 2021, arXiv:2103.02143.
    """

    directions: Tensor

    def __init__(self, dims: Dims, *, features: int = 128, scale: float = 1.0, gated: bool = False, seed: int = 0) -> None:
        super().__init__(dims)
        check_count("features", features)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, the sharpness of the softmax over cosines, not {scale!r}")
        if not isinstance(gated, bool):
            raise ValueError(f"gated must be True or False, not {gated!r}")
        self.scale, self.f = scale, 2 * features
        self.register_buffer("directions", torch.empty(features, dims.d))
        self.redraw(seed)
        self.gate_weight = nn.Parameter(torch.zeros(dims.g, dims.d)) if gated else None
        # heads begin with memories of about 3 to 400 tokens, so that some of them suit the data from the start
        self.gate_bias = nn.Parameter(torch.linspace(1, 6, dims.g)) if gated else None

    def redraw(self, seed: int) -> None:
        """Other random directions: another estimate of the same attention. Never done by a forward pass."""
        self.directions.copy_(math.sqrt(self.scale) * gaussian(len(self.directions), self.dims.d, seed))

    def empty(self, k: Tensor, v: Tensor) -> WeighedSums:
        s, z = nothing(k, v, self.f)
        return WeighedSums(s, z, z[..., :1].clone())

    def _push(self, memory: WeighedSums, k: Tensor, v: Tensor, valid: Tensor | None) -> WeighedSums:
        keys, weight, decay = self._keys(k, valid)
        if decay is not None:
            later = (decay.flip(2).cumsum(2).flip(2) - decay).exp()  # what the tokens after j leave of it
            keys, weight, kept = keys * later, weight * later, decay.sum(2).exp()
            memory = WeighedSums(kept.unsqueeze(-1) * memory.s, kept * memory.z, kept * memory.mass)
        return WeighedSums(memory.s + keys.mT @ v, memory.z + keys.sum(2), memory.mass + weight.sum(2))

    def _read(self, memory: WeighedSums, q: Tensor) -> Tensor:
        asked = self._queries(q)
        norm = ask(asked, memory.z.unsqueeze(-1))
        return ratio(ask(asked, memory.s), self._lift(norm, memory.mass.unsqueeze(2)))

    def _scan(self, memory: WeighedSums, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, WeighedSums]:
        keys, weight, decay = self._keys(k, valid)
        out, norm, s, z = chunks.scan_normed(self._queries(q), keys, v, memory.s, memory.z, decay)
        mass = chunks.running(weight, memory.mass, None if decay is None else decay.exp())
        return ratio(out, self._lift(norm, mass)), WeighedSums(s, z, mass[:, :, -1])

    def _keys(self, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features as they are written (b g m f), the weight of each token (b g m 1), and its log gate where there is one."""
        keys, weight = self._queries(k), where_valid(torch.ones_like(k[..., :1]), valid, 0)
        if self.gate_weight is None or self.gate_bias is None:
            return where_valid(keys, valid, 0), weight, None
        gate = k @ self.gate_weight.to(k.dtype).unsqueeze(-1) + self.gate_bias.to(k.dtype)[:, None, None]
        weight = weight * torch.sigmoid(-gate)
        return keys * weight, weight, where_valid(F.logsigmoid(gate), valid, 0)

    def _queries(self, q: Tensor) -> Tensor:
        angle = F.linear(F.normalize(q, dim=-1, eps=1e-6), self.directions.to(q.dtype))
        return torch.cat([angle.sin(), angle.cos()], -1) / math.sqrt(angle.shape[-1])

    def _lift(self, norm: Tensor, mass: Tensor) -> Tensor:
        """norm (b h n 1) no lower than any exact one of that mass (b g n 1)."""
        return torch.maximum(norm, math.exp(-2 * self.scale) * per_query_head(mass, norm))


class Peaked(Kernel):
    """Kernels whose features are exponentials, kept finite by the largest exponent so far.

    The memory is in units of exp(top), and a top that rises makes all before it smaller: a decay like any other.
    Units cancel in the output, so top carries no gradient; top never looks ahead, so rounding does not either.
    """

    one_top: bool  # for all features, or one for each

    def logs(self, x: Tensor) -> Tensor:
        """The exponents (b h n f) of the features of queries or keys."""
        raise NotImplementedError

    def empty(self, k: Tensor, v: Tensor) -> PeakedSums:
        s, z = nothing(k, v, self.f)
        return PeakedSums(s, z, torch.full_like(z[..., :1] if self.one_top else z, -torch.inf))

    def _push(self, memory: PeakedSums, k: Tensor, v: Tensor, valid: Tensor | None) -> PeakedSums:
        if k.shape[2] == 0:
            return memory
        logs, tops = self._keys(k, valid)
        top = torch.maximum(memory.top, tops.amax(2))
        keys, kept = (logs - finite(top).unsqueeze(2)).exp(), (memory.top - finite(top)).exp()
        return PeakedSums(kept.unsqueeze(-1) * memory.s + keys.mT @ v, kept * memory.z + keys.sum(2), top)

    def _keys(self, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Exponents of the keys (b g m f), and the top of each token alone (b g m 1) or (b g m f)."""
        logs = where_valid(self.logs(k), valid, -torch.inf)
        return logs, logs.detach().amax(-1, keepdim=True) if self.one_top else logs.detach()

    def _rising(self, memory: PeakedSums, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys in units of the top at their own time, the log decay by which those units grow, and the last top."""
        logs, tops = self._keys(k, valid)
        top = chunks.highest(tops, memory.top)
        before = torch.cat([memory.top.unsqueeze(2), top[:, :, :-1]], 2)
        # a decay below the smallest number is total; bounded, it does not swallow the digits of those after it
        decay = (before - top).clamp(min=1.3 * math.log(torch.finfo(k.dtype).tiny))
        return (logs - finite(top)).exp(), decay.masked_fill(before == -torch.inf, 0), top[:, :, -1]

    def _queries(self, q: Tensor) -> Tensor:
        return torch.softmax(self.logs(q), -1)


class Efficient(Peaked):
    """Efficient attention: each feature is a map over the positions, and a query mixes the maps.

    out_i = sum_f softmax_f(q_i)_f sum_j softmax_j(k_jf) v_j, the second softmax over the tokens seen; q and k are not scaled,
    as in the paper. Time n d e, memory d (e + 2) at any length. Shen et al. 2018, arXiv:1812.01243.
    """

    one_top = False

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.f = dims.d

    def logs(self, x: Tensor) -> Tensor:
        return x

    def _read(self, memory: PeakedSums, q: Tensor) -> Tensor:
        return ask(self._mix(q, memory.z.unsqueeze(2)), memory.s)

    def _scan(self, memory: PeakedSums, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, PeakedSums]:
        keys, decay, top = self._rising(memory, k, valid)
        z = chunks.running(keys, memory.z, decay.exp())
        out, s = chunks.scan(self._mix(q, z), keys, v, memory.s, decay)
        return out, PeakedSums(s, z[:, :, -1], top)

    def _mix(self, q: Tensor, z: Tensor) -> Tensor:
        """How much of each sum a query takes. z (b g n f) counts its own top as 1, so it is less only where nothing was seen."""
        return self._queries(q) / per_query_head(z.clamp(min=1), q)


class Performer(Peaked):
    """Performer: softmax attention, its exponential estimated by positive orthogonal random features (FAVOR+).

    phi(x) = exp(w_f . x' - |x'|^2 / 2) / sqrt(features), x' = x / d^(1/4), the directions w_f orthogonal in blocks of d with
    the lengths of Gaussian vectors, so that the mean of phi(q) . phi(k) is exp(q . k / sqrt(d)); one set serves all heads.
    Time n f e, memory f (e + 1) at any length. Choromanski et al. 2020, arXiv:2009.14794.
    The error grows with the size of q and k: unit variance in 64 dimensions is already much for a few hundred features.
    """

    one_top = True
    directions: Tensor

    def __init__(self, dims: Dims, *, features: int = 256, seed: int = 0) -> None:
        super().__init__(dims)
        check_count("features", features)
        self.f = features
        self.register_buffer("directions", torch.empty(features, dims.d))
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """Other random directions: another estimate of the same attention. Never done by a forward pass."""
        self.directions.copy_(orthogonal(self.f, self.dims.d, seed))

    def logs(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        offset = -x.square().sum(-1, keepdim=True) / 2 - math.log(self.f) / 2
        # the offset rides along as one more coordinate, which saves a pass over n f numbers
        return F.linear(torch.cat([x, offset], -1), F.pad(self.directions.to(x.dtype), (0, 1), value=1.0))

    def _scan(self, memory: PeakedSums, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, PeakedSums]:
        keys, decay, top = self._rising(memory, k, valid)
        out, norm, s, z = chunks.scan_normed(self._queries(q), keys, v, memory.s, memory.z, decay)
        return ratio(out, norm), PeakedSums(s, z, top)
