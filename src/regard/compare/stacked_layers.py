"""Layers of several models of one shape, side by side: weights (models, ...), tokens (models * b, n, w), model after model.

None of them has parameters: their weights are views of one tensor of all models, given to them before each pass (`StackedModel`).
Letters: m models, b sequences of one model, n tokens, w width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.mixers.attention_free import GMLP
from regard.mixers.base import Mixer
from regard.mixers.baselines import Conv, WindowFC
from regard.mixers.places import Places
from regard.positions.added import Learned


class StackedLinear(nn.Module):
    """Linear maps, each of the tokens of its own model: weight (m o w), bias (m o) or None."""

    weight: Tensor
    bias: Tensor | None
    norm: StackedNorm | None

    def __init__(self, out_features: int, biased: bool) -> None:
        super().__init__()
        self.out_features, self.biased = out_features, biased
        self.bias = None
        self.__dict__["norm"] = None  # the norm in front, if its weights are applied here: see `fold`

    def fold(self, norm: StackedNorm) -> None:
        """Apply the weights of the norm in front to those of the map, W (x * g + c) + b = (W g) x + (W c + b): they are small."""
        self.__dict__["norm"], norm.folded = norm, True

    def forward(self, x: Tensor) -> Tensor:
        """Map (m * b ... w) to (m * b ... o) by one batched product."""
        tokens = x.reshape(len(self.weight), -1, x.shape[-1])
        weight, bias = self._affine()
        y = tokens @ weight.mT if bias is None else torch.baddbmm(bias[:, None], tokens, weight.mT)
        return y.view(*x.shape[:-1], self.out_features)

    def _affine(self) -> tuple[Tensor, Tensor | None]:
        weight, bias, norm = self.weight, self.bias, self.norm
        if norm is None or norm.weight is None:
            return weight, bias
        if norm.bias is not None:
            added = (weight @ norm.bias[..., None]).squeeze(-1)
            bias = added if bias is None else bias + added
        return weight * norm.weight[:, None], bias


class JoinedLinears(StackedLinear):
    """Several linear maps of the same tokens as one product: their weights are neighbours in memory."""

    def __init__(self, sizes: list[int], biased: bool) -> None:
        super().__init__(sum(sizes), biased)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Any:
        """Return what each of the maps makes of x."""
        return super().forward(x).split(self.sizes, -1)


class JoinedPart(nn.Module):
    """Stand for one of several linear maps; `fused` makes all of them, and an attention layer asks for all at once."""

    fused: JoinedLinears

    def __init__(self, joined: JoinedLinears, number: int) -> None:
        super().__init__()
        self.__dict__["fused"] = joined  # listed as a module by its owner
        self.number = number

    @property
    def weight(self) -> Tensor:
        return self.fused.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)[self.number]


class StackedNorm(nn.Module):
    """Layer norms, or root mean square norms: weight (m w), bias (m w) or None."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, own: nn.LayerNorm | nn.RMSNorm) -> None:
        super().__init__()
        self.shape, self.eps, self.centred = list(own.normalized_shape), own.eps, isinstance(own, nn.LayerNorm)
        self.weight = self.bias = None
        self.folded = False  # the layer behind applies the weights

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.shape, eps=self.eps or 0.0) if self.centred else F.rms_norm(x, self.shape, eps=self.eps)
        if self.weight is None or self.folded:
            return y
        tokens = y.view(len(self.weight), -1, y.shape[-1])
        if self.bias is None:
            return (tokens * self.weight[:, None]).view_as(y)
        return torch.addcmul(self.bias[:, None], tokens, self.weight[:, None]).view_as(y)


class StackedEmbedding(nn.Module):
    """Tables of vectors, weight (m v w): (m * b n) -> (m * b n w)."""

    weight: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        count, vocab, width = self.weight.shape
        first = torch.arange(0, count * vocab, vocab, device=tokens.device)
        own = tokens.unflatten(0, (count, -1)) + first.view(-1, *[1] * tokens.dim())
        return F.embedding(own.flatten(0, 1), self.weight.reshape(-1, width))


class StackedLearned(Learned):
    """Learned positions of every model, vectors (m longest w)."""

    vectors: Tensor  # type: ignore[assignment]

    def __init__(self, own: Learned) -> None:
        nn.Module.__init__(self)
        self.dims = own.dims

    def add(self, x: Tensor, places: Places) -> Tensor:
        """Add to each token (m * b n w) the vector of its position in its own model."""
        count, longest, width = self.vectors.shape
        at = places.at.clamp_max(longest - 1).unflatten(0, (count, -1))
        first = torch.arange(0, count * longest, longest, device=x.device)[:, None, None]
        rows = F.embedding((at + first).flatten(0, 1), self.vectors.reshape(-1, width))
        return x + rows.to(x.dtype)


class StackedConv(Conv):
    """Convolutions of every model as one grouped convolution, filter (m w w/groups kernel)."""

    filter: Tensor  # type: ignore[assignment]

    def __init__(self, own: Conv) -> None:
        Mixer.__init__(self, own.dims)
        self.dilation, self.groups, self.reach = own.dilation, own.groups, own.reach
        self.into, self.out = own.into, own.out

    def slide(self, line: Tensor) -> Tensor:
        count = len(self.filter)
        channels = line.unflatten(0, (count, -1)).permute(1, 0, 3, 2).flatten(1, 2)  # (b, m * w, n + reach)
        y = F.conv1d(channels, self.filter.flatten(0, 1), dilation=self.dilation, groups=count * self.groups)
        return self.out(y.unflatten(1, (count, -1)).permute(1, 0, 3, 2).flatten(0, 1))


class StackedWindowFC(WindowFC):
    """Fully connected layers over a window, filter (m w window w), bias (m w)."""

    filter: Tensor  # type: ignore[assignment]
    bias: Tensor  # type: ignore[assignment]

    def __init__(self, own: WindowFC) -> None:
        Mixer.__init__(self, own.dims)
        self.reach = own.reach

    def slide(self, line: Tensor) -> Tensor:
        count = len(self.filter)
        windows = line.unfold(1, self.reach + 1, 1).mT.flatten(2)  # (m * b, n, window * w)
        tokens = windows.reshape(count, -1, windows.shape[-1])
        y = torch.baddbmm(self.bias[:, None], tokens, self.filter.flatten(2).mT)
        return y.view(*windows.shape[:2], -1)


class StackedGMLP(GMLP):
    """Gates over positions of every model, weight (m longest longest), bias (m longest)."""

    weight: Tensor  # type: ignore[assignment]
    bias: Tensor  # type: ignore[assignment]

    def __init__(self, own: GMLP) -> None:
        Mixer.__init__(self, own.dims)
        self.size = own.size
        self.up, self.down, self.norm, self.qkv, self.answer = own.up, own.down, own.norm, own.qkv, own.answer

    def empty(self, batch: int) -> Any:  # noqa: ARG002
        return None  # every pass begins with the first token

    def mix(self, x: Tensor, places: Places) -> Tensor:
        u, q, tokens = self._parts(x, places.valid)
        return self._mixed_parts(u, q, tokens, places)

    def scan(self, memory: Any, x: Tensor, places: Places) -> tuple[Tensor, Any]:
        u, q, tokens = self._parts(x, places.valid)
        return self._mixed_parts(u, q, tokens, places), memory

    def _mixed_parts(self, u: Tensor, q: Tensor, tokens: Tensor, places: Places) -> Tensor:
        count, n = len(self.weight), tokens.shape[1]
        gate, k, v = tokens.split([u.shape[-1], self.size, self.size], -1)
        rows = self.weight[:, :n, :n]
        rows = rows.tril() if self.dims.causal else rows
        mixture = torch.einsum("mij,mbjc->mbic", rows, gate.unflatten(0, (count, -1))) + self.bias[:, None, :n, None]
        y = mixture.flatten(0, 1)
        if self.answer is not None:
            y = y + self.answer(self._tiny(q, k, v, places))
        return self.down(u * y)

    def _tiny(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        seen = None if places.valid is None or self.dims.causal else places.valid[:, None, None]
        q, k, v = (x[:, None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=self.dims.causal, scale=self.size**-0.5)[:, 0]


class HeadStack(nn.Module):
    """A core with weights of its own: the heads of all models are the heads of one core, (m * b h n d) -> (b, m * h, n, d).

    Sequences of the models at the same place of their batches then share a row: padding is not possible.
    """

    def __init__(self, count: int, wide: Any) -> None:
        super().__init__()
        self.count, self.core = count, wide

    @property
    def name(self) -> str:
        return self.core.name

    @property
    def streams(self) -> int:
        return self.core.streams

    def _wide(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2)

    def _apart(self, y: Tensor) -> Tensor:
        return y.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1)

    def _places(self, x: Tensor, places: Places) -> Places:
        if places.valid is not None or places.start != 0:
            raise ValueError(f"{self.name} has weights of its own: stacked models of it take no padding")
        return Places.of(x[: len(x) // self.count, 0], None)

    def watch(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        """Watch the queries and keys of all models."""
        self.core.watch(self._wide(q), self._wide(k), valid)

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """Scan whole sequences of all models."""
        here = self._places(q, places)
        return self._apart(self.core.scan_all(self._wide(q), self._wide(k), self._wide(v), here))

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:  # noqa: ARG002
        """Read whole sequences of all models."""
        here = self._places(q, places)
        return self._apart(self.core.read_all(self._wide(q), self._wide(k), self._wide(v), here, here))
