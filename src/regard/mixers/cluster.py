"""Attention among similar tokens, by hashing (LSH) or by learned clusters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Dims, Places
from regard.mixers.bucketed import BucketedCore, BucketMemory
from regard.mixers.feature_math import gaussian, upcast
from regard.mixers.pattern_attention import expand_heads
from regard.mixers.softmax import default_scale
from regard.ops.bucket.bucket_op import SHORTEST, product_labels
from regard.ops.dense import sdpa
from regard.ops.strip import in_strips

FINE = 1 << 30  # similarities closer than one part in so many are equal: the earlier token wins


class Reformer(BucketedCore):
    """Tokens whose keys point the same way fall into the same bucket, and see each other.

    In each of `rounds` rounds the bucket of a token is argmax [k R, -k R], with R (d, buckets / 2) drawn per head and round.
    Tokens sorted by (bucket, position) are cut into chunks, and a token sees those of its bucket in its own chunk and the one
    before. Causal: it sees the 2 chunk - 1 tokens of its bucket that came last before it, because chunks of a sorted order
    move when a later token enters it. A = softmax(q_i . k_j / |k_j|) over the pairs of all rounds, each counted once; a token
    sees itself only when it sees nothing else. Queries and keys are one projection; where they are not, the key gives the
    bucket. Cost: rounds n chunk, memory heads rounds buckets 2 chunk at most. Kitaev et al. 2020, arXiv:2001.04451.
    (Reversible layers, the other half of the paper, are a matter of the model around it.)
    """

    can = BucketedCore.can | Can.DROPOUT
    shared_qk = True
    own, unit_keys = False, True
    rotations: Tensor

    def __init__(self, dims: Dims, *, rounds: int = 4, buckets: int = 32, chunk: int = 64, seed: int = 0) -> None:
        super().__init__(dims)
        need("rounds", rounds, 1, 64)
        odd = need("buckets", buckets, 1, WIDEST) % 2
        if odd and buckets > 1:
            raise ValueError(f"buckets come in pairs, a direction and its opposite: use an even number or 1, not {buckets}")
        self.labels = buckets
        self.chunk = need("chunk", chunk)
        self.window = 2 * chunk
        self.rounds = rounds if buckets > 1 else 1  # without hashing all rounds are the same
        directions = self.rounds * (buckets // 2)
        self.register_buffer("rotations", torch.empty(dims.heads, dims.d, directions))
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """Other random rotations, hence other buckets. Never done by a forward pass."""
        drawn = gaussian(self.dims.heads * self.rotations.shape[2], self.dims.d, seed)
        self.rotations.copy_(drawn.unflatten(0, (self.dims.heads, -1)).mT)

    def extra_repr(self) -> str:
        return f"rounds={self.rounds}, buckets={self.labels}, chunk={self.chunk}"

    def label(self, k: Tensor) -> Tensor:
        if self.labels == 1:
            return torch.zeros(len(k), self.dims.heads, k.shape[2], 1, dtype=torch.int32, device=k.device)
        return product_labels(k, self.rotations, self.rounds, opposite=True, backend=self.dims.backend)


class Routing(BucketedCore):
    """Clusters of directions are learned beside the weights, and attention stays inside a cluster.

    Each cluster takes the `window` queries and the `window` keys that are most similar to its centroid (cosine; all of them in
    shorter sequences), A = softmax(scale q k^T) among them; a query that several clusters took gets the mean of their answers,
    one that none took gets 0: clusters * window should not be below n. Causal: a token belongs to the centroid nearest to its
    key alone, and sees the `window` newest tokens of its cluster, itself among them; queries and keys are one projection.
    Training moves each centroid towards the mean of the queries and keys nearest to it, by 1 - decay after every pass;
    evaluation never does. Cost: n clusters + clusters window^2, causal n (clusters + window); memory heads clusters window at
    most. Not for cross attention: whether a query is taken depends on the other queries, in a decoder on later ones.
    Roy et al. 2020, arXiv:2003.05997. (The paper gives some heads to local attention: here that is a layer of its own.)
    """

    centroids: Tensor

    learns = True

    def __init__(
        self,
        dims: Dims,
        *,
        clusters: int = 16,
        window: int = 128,
        decay: float = 0.999,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(dims)
        self.labels = need("clusters", clusters, 1, WIDEST)
        self.window = need("window", window)
        self.scale = default_scale(scale, dims.d)
        number = isinstance(decay, int | float) and not isinstance(decay, bool)
        if not number or not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number from 0 to 1, the share of a centroid that a pass leaves, not {decay!r}")
        self.decay, self.shared_qk = decay, dims.causal
        self.rounds = 1 if dims.causal else 0  # clusters that choose their members give no labels
        self.register_buffer("centroids", torch.empty(dims.heads, clusters, dims.d))
        drawn = gaussian(dims.heads * clusters, dims.d, seed).unflatten(0, (dims.heads, clusters))
        self.centroids.copy_(normalize(drawn, dim=-1))

    def extra_repr(self) -> str:
        return f"clusters={self.labels}, window={self.window}"

    def label(self, k: Tensor) -> Tensor:
        if not self.rounds:
            return torch.empty(len(k), self.dims.heads, k.shape[2], 0, dtype=torch.int32, device=k.device)
        return self._nearest(k).unsqueeze(-1)

    def _nearest(self, x: Tensor) -> Tensor:
        """The centroid nearest to each token of x (b g n d), (b h n)."""
        return product_labels(x, self._directions().mT, backend=self.dims.backend).squeeze(-1)

    def _directions(self) -> Tensor:
        """Centroids of length one, (h c d) in float32 or better."""
        return normalize(upcast(self.centroids), dim=-1)

    def _similar(self, x: Tensor) -> Tensor:
        """Cosine of x (b h n d) and every centroid, (b h n c)."""
        directions = normalize(x, dim=-1, eps=SHORTEST)
        return directions @ self._directions().to(x.dtype).mT

    def read(self, memory: BucketMemory, q: Tensor, places: Places) -> Tensor:
        if self.dims.causal:
            return super().read(memory, q, places)
        log = memory.log
        k, v = expand_heads(log.keys, log.values, q.shape[1])
        out = self._gathered(q, k, v, places.valid, log.places.valid)
        if self.training:
            self._learn((q, places.valid, self._nearest(q)), (k, log.places.valid, self._nearest(k)))
        return out

    def scan(self, memory: BucketMemory, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, BucketMemory]:
        out, memory = super().scan(memory, q, k, v, places)
        if self.training:
            nearest = memory.marks.keys[:, :, -k.shape[2] :, 0]
            self._learn((expand_heads(k, k, self.dims.heads)[0], places.valid, nearest))
        return out, memory

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, asking: Tensor | None, there: Tensor | None) -> Tensor:
        """Attention inside every cluster at once, and what its queries get brought back to them."""
        (b, h, n, _), m, e = q.shape, k.shape[2], v.shape[-1]
        if b * n * m == 0:
            return q.new_zeros(b, h, n, e)
        (queries, real), (keys, valid) = self._members(q, asking), self._members(k, there)
        picked = (_gather_rows(x, index) for x, index in ((q, queries), (k, keys), (v, keys)))
        out = upcast(sdpa(*picked, scale=self.scale, valid=valid))  # rows are the batch, clusters the heads
        times = torch.ones_like(out[..., :1])
        if real is not None:
            out, times = (x.masked_fill(~real[:, None, :, None], 0) for x in (out, times))
        index = _flat_index(queries, n)
        rows = b * h * n
        total, count = (_sum_by_row(x.flatten(0, 2), index, rows) for x in (out, times))
        mean = total / count.clamp_min(1)
        return mean.view(b, h, n, e).to(v.dtype)

    @torch.no_grad()
    def _members(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Which tokens of x (b h n d) each cluster takes, (b*h c w), real ones first; and which of them are real, (b*h w)."""
        b, h, n, _ = x.shape
        w = min(self.window, n)

        def best(similar: Tensor, valid: Tensor | None) -> tuple[Tensor]:
            rank = (similar * FINE).long()
            code = rank * (1 << 32) - torch.arange(n, device=x.device)  # no two tokens are equal
            if valid is not None:
                code = code.masked_fill(~valid, torch.iinfo(torch.long).min)
            return (code.topk(w, dim=-1).indices,)

        similar = self._similar(upcast(x)).mT
        mask = None if valid is None else valid[:, None, None]
        (index,) = in_strips(best, (similar, mask), 2, b * h * n)
        if valid is None:
            return index.flatten(0, 1), None
        real = torch.arange(w, device=x.device) < valid.sum(1, keepdim=True)
        return index.flatten(0, 1), real.repeat_interleave(h, 0)

    @torch.no_grad()
    def _learn(self, *tokens: tuple[Tensor, Tensor | None, Tensor]) -> None:
        """Move every centroid towards the mean direction of the tokens nearest to it; one without tokens stays.

        tokens: x (b h n d), which of them are real, and the centroid nearest to each (b h n).
        """
        old = upcast(self.centroids)
        total = torch.zeros_like(old)
        count = torch.zeros_like(old[..., :1])
        each = torch.arange(self.labels, device=old.device)
        for x, valid, nearest in tokens:
            near = (nearest.unsqueeze(-1) == each).to(old.dtype)
            if valid is not None:
                near = near * valid[:, None, :, None]
            directions = normalize(upcast(x), dim=-1, eps=SHORTEST)
            total += (near.mT @ directions.to(old.dtype)).sum(0)
            count += near.sum((0, 2)).unsqueeze(-1)
        step = (1 - self.decay) * total / count.clamp_min(1)
        moved = normalize(self.decay * old + step, dim=-1)
        self.centroids.copy_(torch.where(count > 0, moved, old))


def _flat_index(index: Tensor, n: int) -> Tensor:
    """Tokens (x c w) of rows of n as tokens of all rows, one behind the other."""
    rows = torch.arange(index.shape[0], device=index.device)
    return (index + n * rows[:, None, None]).flatten()


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The tokens (x c w) of x (b h n d): (x c w d)."""
    flat = _flat_index(index, x.shape[2])
    rows = x.flatten(0, 2).index_select(0, flat)
    return rows.unflatten(0, index.shape)


def _sum_by_row(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """The sum of what goes to each row."""
    total = x.new_zeros(rows, x.shape[1])
    if x.is_cuda:  # where index_add takes the terms as they come: another order, another last digit
        return total.index_put((index,), x, accumulate=True)
    return total.index_add(0, index, x)
