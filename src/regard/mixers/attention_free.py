"""Mixers without attention: weights between positions are a Fourier transform, or learned for each position. No heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers.attention import has_hooks, no_autocast
from regard.mixers.base import Can, Dims, Places
from regard.mixers.unpad import UnpaddedMixer
from regard.ops.add_norm import add_norm
from regard.ops.budget import budget
from regard.ops.dense import sdpa
from regard.ops.fourier import fourier_mix, fourier_mix_by_row
from regard.ops.joined_linear import linear_tokens, token_linear
from regard.ops.position_product import position_product
from regard.ops.ragged import opaque_fourier
from regard.transforms import needs_lengths, needs_plain_ops

TURNED_TOKENS = 256  # of a sequence; with fewer, the launches are all that counts


class FNet(UnpaddedMixer):
    """Tokens meet as waves: a Fourier transform over the sequence and one over the channels. Nothing is learned.

    out = Re(F_n x F_w), F the matrices of the discrete Fourier transform. norm="ortho" divides by sqrt(n w), so that what comes
    out is about as large as what went in, at any length; norm="none" is the paper's, whose layers normalise every sum. Time
    n log n. Every output depends on every token and on their number, so it is not causal; rows with equally many real tokens are
    transformed together. Half precision is computed in float32. Lee-Thorp et al. 2021, arXiv:2105.03824.
    """

    can = Can.PADDING

    def __init__(self, dims: Dims, *, norm: str = "ortho") -> None:
        super().__init__(dims)
        if norm not in ("ortho", "none"):
            raise ValueError(f"norm must be 'ortho' or 'none', not {norm!r}")
        self.norm = "ortho" if norm == "ortho" else "backward"  # the names of torch.fft

    def mix(self, x: Tensor, places: Places) -> Tensor:
        if places.valid is None:
            return fourier_mix(x, self.norm)
        if torch.compiler.is_dynamo_compiling():
            return opaque_fourier(x, places.valid.sum(1), self.norm)
        needs_lengths(self.name, places.valid)
        return fourier_mix_by_row(x, places.valid.sum(1), self.norm)


class MlpMixer(UnpaddedMixer):
    """A small network across positions, the same one for every channel: weights depend on positions alone.

    out = W2 gelu(W1 x + b1) + b2, W1 (hidden max_len), W2 (max_len hidden); a shorter sequence is one with zeros behind it. Time
    n hidden, and no position is like another, so it is not causal. The paper's layer has a norm before it, a residual connection
    around it, and a second network across the channels: those are a block's. Tolstikhin et al. 2021, arXiv:2105.01601.
    """

    can = Can.PADDING

    def __init__(self, dims: Dims, *, hidden: int = 256) -> None:
        super().__init__(dims)
        self.up = nn.Linear(self.need_length(), need("hidden", hidden, 1, WIDEST))
        self.down = nn.Linear(hidden, self.need_length())

    @property
    def name(self) -> str:
        return "mlp_mixer"

    def mix(self, x: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - what is no real token is zero, and adds nothing
        n = x.shape[1]
        hidden = F.gelu(F.linear(x.mT, self.up.weight[:, :n], self.up.bias))
        return F.linear(hidden, self.down.weight[:n], self.down.bias[:n]).mT


class Gates(NamedTuple):
    tokens: Tensor  # (b m f) what later tokens need of each: its half of the gate, and for tiny attention its key and value


class GMLP(UnpaddedMixer):
    """A token is scaled, channel by channel, by a learned mixture of all tokens: a gate instead of attention.

    u, v = halves of gelu(W1 x), expand * width channels together;  out = W2 (u * (S norm(v) + b)), S (max_len max_len) and b
    (max_len) learned over positions, the lower triangle of S alone where it is causal. At first S is near 0 and b is 1, so the
    gate is open. `tiny` adds one head of softmax attention of that size to the gate: the paper's aMLP, which has 64.
    Time n^2, memory n (what streams is v). In the paper it is a whole block, with no other network over the channels.
    Liu et al. 2021, arXiv:2105.08050.
    """

    maps_first = True
    can = Can.CAUSAL | Can.PADDING | Can.STREAM

    def __init__(self, dims: Dims, *, expand: int = 4, tiny: int = 0) -> None:
        super().__init__(dims)
        longest = self.need_length()
        channels = need("expand", expand, 1, 256) * dims.width
        if channels % 2:
            raise ValueError(f"gmlp splits its channels in two halves: expand * width = {channels} is an odd number")
        half = channels // 2
        self.size = need("tiny", tiny, 0, WIDEST)
        self.up = nn.Linear(dims.width, channels)
        self.down = nn.Linear(half, dims.width)
        self.norm = nn.LayerNorm(half)
        std = 0.01 * longest**-0.5  # a gate of 1 +- 0.01
        self.weight = nn.Parameter(torch.empty(longest, longest).normal_(std=std))
        self.bias = nn.Parameter(torch.ones(longest))
        self.qkv = nn.Linear(dims.width, 3 * tiny) if tiny else None
        self.answer = nn.Linear(tiny, half) if tiny else None

    def empty(self, batch: int) -> Gates:
        channels = self.down.in_features + 2 * self.size
        return Gates(self.weight.new_zeros(batch, 0, channels))

    def mix(self, x: Tensor, places: Places) -> Tensor:
        if self._turns(x):
            return self._turned(x, places)[0]
        n = x.shape[1]
        u, q, tokens = self._parts(x, places.valid)
        gate, k, v = self._split(tokens)
        mixture = self.weight[:n, :n] @ gate + self.bias[:n, None]
        if self.answer is not None:
            attended = sdpa(q[:, None], k, v, scale=self.size**-0.5, valid=places.valid)
            mixture = mixture + self.answer(attended[:, 0])
        return self.down(u * mixture)

    def scan(self, memory: Gates, x: Tensor, places: Places) -> tuple[Tensor, Gates]:
        if places.start == 0 and self._turns(x):
            y, gate = self._turned(x, places)
            return y, Gates(gate)
        u, q, new = self._parts(x, places.valid)
        memory = self._remember(memory, new, places)
        gate, k, v = self._split(memory.tokens)
        mixture = self._past(gate, places)
        if self.answer is not None:
            mixture = mixture + self.answer(self._attend(q[:, None], k, v, places)[:, 0])
        return self.down(u * mixture), memory

    def _turns(self, x: Tensor) -> bool:
        """Return whether tokens x (b n w) are turned to (n b w), so that the mixture of positions is one product."""
        if not x.is_cuda or x.shape[1] < TURNED_TOKENS or torch.compiler.is_compiling() or needs_plain_ops():
            return False
        return self.answer is None and type(self.up) is nn.Linear and not has_hooks(self.up)

    def _turned(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return outputs (b n w) of tokens from position 0 on, and the gate of each (b n half)."""
        b, n, _ = x.shape
        half = self.down.in_features
        tokens = x.transpose(0, 1).contiguous()
        halves = zip(self.up.weight.split(half), self.up.bias.split(half), strict=True)
        u, v = (F.gelu(linear_tokens(tokens, *one)) for one in halves)  # two products: halves of one would be copied
        gate = add_norm(v, None, self.norm, True)[1]
        if places.valid is not None:
            gate = gate.masked_fill(~places.valid.mT[..., None], 0)
        with no_autocast(x):
            mixture = position_product(self.weight[:n, :n], gate.to(v.dtype).view(n, b * half), self.dims.causal)
        mixture = (mixture + self.bias[:n, None]).view(n, b, half)
        y = token_linear(self.down, u * mixture)
        return y.transpose(0, 1), gate.transpose(0, 1)

    def _parts(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project to what is gated (b n half), the query (b n tiny), and what later tokens need (b n f), 0 at padding."""
        channels = F.gelu(self.up(x))
        u, v = channels.chunk(2, -1)
        q, shown = x[..., :0], self.norm(v)
        if self.qkv is not None:
            qkv = self.qkv(x)
            q, both = qkv.split([self.size, 2 * self.size], -1)
            shown = torch.cat([shown, both], -1)
        if valid is not None:
            shown = shown.masked_fill(~valid[..., None], 0)
        return u, q, shown

    def _split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate (b m half), and with one head, the keys and values of tiny attention."""
        gate, k, v = tokens.split([self.down.in_features, self.size, self.size], -1)
        return gate, k[:, None], v[:, None]

    def _remember(self, memory: Gates, new: Tensor, places: Places) -> Gates:
        """Every token at its position. Rows that differ in length have zeros behind them, to which a sum adds the new ones."""
        if places.start is not None:
            return Gates(torch.cat([memory.tokens, new], 1) if places.start else new)
        old = memory.tokens
        room = min(old.shape[1] + new.shape[1], self.need_length())
        at = places.at.clamp_max(room - 1)[..., None].expand_as(new)
        padded = F.pad(old, (0, 0, 0, room - old.shape[1]))
        return Gates(padded.scatter_add(1, at, new.to(old.dtype)))

    def _past(self, gate: Tensor, places: Places) -> Tensor:
        """S gate + b for tokens at these places, each with the row of its position, up to itself. gate (b m half)."""
        n, m = places.shape[1], gate.shape[1]
        if places.start is None:
            at = places.at.clamp_max(self.need_length() - 1)
            seen = torch.arange(m, device=gate.device) <= at[..., None]
            return (self.weight[:, :m][at] * seen) @ gate + self.bias[at][..., None]
        if torch.compiler.is_compiling():  # the whole triangle: one graph for any number of strips
            rows = self.weight[places.start : places.start + n, :m].tril(places.start)
            return rows @ gate + self.bias[places.start : places.start + n, None]
        strips, low = [], places.start
        for rows in self.weight[low : low + n].split(budget(gate.device).triangle_rows):
            high = low + len(rows)
            strips.append(rows[:, :high].tril(low) @ gate[:, :high])
            low = high
        return torch.cat(strips, 1) + self.bias[places.start : low, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        scale = self.size**-0.5
        if places.start == 0:
            return sdpa(q, k, v, scale=scale, causal=True)
        seen = torch.arange(k.shape[2], device=k.device) <= places.at[..., None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
