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
from regard.ops.bucket.cluster_attention import cluster_attention, takes_clusters
from regard.ops.bucket.clusters import FINE, MOST_CHOSEN_FROM, choose_members, learn_clusters
from regard.ops.bucket.members import Members, by_kernels, gather_three, mean_of_members
from regard.ops.dense import sdpa
from regard.ops.strip import in_strips


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
        products = x @ self._directions().to(x.dtype).mT
        return products / _lengths(x)

    def read(self, memory: BucketMemory, q: Tensor, places: Places) -> Tensor:
        if self.dims.causal:
            return super().read(memory, q, places)
        log = memory.log
        return self._answer(q, log.keys, log.values, places.valid, log.places.valid)

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        if self.dims.causal:
            return super().read_all(q, k, v, places, query_places)
        return self._answer(q, k, v, query_places.valid, places.valid)  # no memory is made: it has labels and positions

    def _answer(self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None) -> Tensor:
        """What queries get from the tokens of their clusters; real_q (b n), real_k (b m): which tokens are not padding."""
        k, v = expand_heads(k, v, q.shape[1])
        if min(q.shape[0], q.shape[2], k.shape[2]) == 0:
            return q.new_zeros(*q.shape[:3], v.shape[-1])
        queries, keys = self._both_members(q, k, real_q, real_k)
        out = self._gathered(q, k, v, queries, keys)
        if self.training:
            near_q, near_k = (self._nearest(x) if own.nearest is None else own.nearest for x, own in ((q, queries), (k, keys)))
            self._learn((q, real_q, near_q), (k, real_k, near_k))
        return out

    def scan(self, memory: BucketMemory, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, BucketMemory]:
        out, memory = super().scan(memory, q, k, v, places)
        if self.training:
            nearest = memory.marks.keys[:, :, -k.shape[2] :, 0]
            self._learn((expand_heads(k, k, self.dims.heads)[0], places.valid, nearest))
        return out, memory

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members) -> Tensor:
        """Attention inside every cluster at once, and what its queries get brought back to them."""
        backend = self.dims.backend
        if takes_clusters(q, k, v, queries, keys, backend):
            return cluster_attention(q, k, v, queries, keys, self.scale)
        picked = gather_three(q, k, v, queries, keys, backend)
        out = sdpa(*picked, scale=self.scale, valid=keys.real)  # rows are the batch, clusters the heads
        return mean_of_members(out, queries, q.shape[1], backend).to(v.dtype)

    def _both_members(self, q: Tensor, k: Tensor, real_q: Tensor | None, real_k: Tensor | None) -> tuple[Members, Members]:
        """`_members` of queries and of keys, chosen in one launch where shapes agree."""
        n = q.shape[2]
        if q.shape == k.shape and n <= MOST_CHOSEN_FROM and by_kernels(q, self.dims.backend):
            with torch.no_grad():
                queries, keys = choose_members(((q, real_q), (k, real_k)), self.centroids, min(self.window, n))
            return queries, keys
        return self._members(q, real_q), self._members(k, real_k)

    @torch.no_grad()
    def _members(self, x: Tensor, valid: Tensor | None) -> Members:
        """Which tokens of x (b h n d) each cluster takes, w of them, real ones first."""
        b, h, n, _ = x.shape
        w = min(self.window, n)
        if n <= MOST_CHOSEN_FROM and by_kernels(x, self.dims.backend):
            return choose_members([(x, valid)], self.centroids, w)[0]

        def best(similar: Tensor, valid: Tensor | None) -> tuple[Tensor]:
            rank = (similar * FINE).long()
            code = rank * (1 << 32) - torch.arange(n, device=x.device)  # no two tokens are equal
            if valid is not None:
                code = code.masked_fill(~valid, torch.iinfo(torch.long).min)
            return (code.topk(w, dim=-1, sorted=valid is not None).indices,)

        similar = self._similar(upcast(x)).mT
        mask = None if valid is None else valid[:, None, None]
        (index,) = in_strips(best, (similar, mask), 2, b * h * n)
        if valid is None:
            return Members(index.flatten(0, 1), None, n)
        real = torch.arange(w, device=x.device) < valid.sum(1, keepdim=True)
        return Members(index.flatten(0, 1), real.repeat_interleave(h, 0), n)

    @torch.no_grad()
    def _learn(self, *tokens: tuple[Tensor, Tensor | None, Tensor]) -> None:
        """Move every centroid towards the mean direction of the tokens nearest to it; one without tokens stays.

        tokens: x (b h n d), which of them are real, and the centroid nearest to each (b h n).
        """
        if by_kernels(tokens[0][0], self.dims.backend):
            learn_clusters(self.centroids, tokens, self.decay)
            return
        old = upcast(self.centroids)
        total = torch.zeros_like(old)
        count = torch.zeros_like(old[..., :1])
        each = torch.arange(self.labels, device=old.device)
        for x, valid, nearest in tokens:
            near = (nearest.unsqueeze(-1) == each).to(old.dtype)  # (b h n c)
            if valid is not None:
                near = near * valid[:, None, :, None]
            shares = near / _lengths(x).to(old.dtype)
            total += (shares.mT @ x.to(old.dtype)).sum(0)
            count += near.sum((0, 2)).unsqueeze(-1)
        step = (1 - self.decay) * total / count.clamp_min(1)
        moved = normalize(self.decay * old + step, dim=-1)
        self.centroids.copy_(torch.where(count > 0, moved, old))


def _lengths(x: Tensor) -> Tensor:
    """Norms of vectors (b h n d), (b h n 1) in float32 or better; none is below SHORTEST."""
    kind = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=kind).clamp_min(SHORTEST)
