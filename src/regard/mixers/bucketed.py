"""Base of bucketed attention: softmax among tokens with the same label, and its KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.mixers.base import Can, Core, Places
from regard.mixers.kv_cache import KVCache, with_spare_room
from regard.ops.bucket.bucket_op import BucketCall, bucket_attention
from regard.ops.bucket.bucket_sort import sort_by_bucket
from regard.ops.bucket.few_queries import few_bucket_queries
from regard.ops.dropout_hash import draw_seed


class BucketMemory(NamedTuple):
    """Keys and values, and beside them the labels that they were given when they came."""

    log: KVCache
    marks: KVCache  # its keys are labels (b h m rounds)

    @property
    def newest_last(self) -> bool:
        """Declare to static forms that queries belong to the last tokens of the caches."""
        return True

    def labels(self, padding: int) -> Tensor:
        """(b h rounds m), with a label of its own for padding."""
        marks, valid = self.marks.keys.transpose(2, 3), self.log.places.valid
        if valid is None:
            return marks
        return marks.masked_fill(~valid[:, None, None], padding)


class BucketedCore(Core):
    """A core whose queries belong to its newest tokens, and tokens to those that carry the same label.

    A label is made of the token's own key. A causal token sees the newest of its label at its time: that does not
    depend on later tokens, and what is older than the newest of every label can be forgotten.
    """

    can = Can.CAUSAL | Can.PADDING | Can.STREAM
    operations = ("bucket",)
    positional, joint = False, True
    rounds: int  # labels of a token
    labels: int  # how many there are
    window: int  # a causal token sees so many of a label, itself among them
    chunk: int  # otherwise: places of a chunk of the sorted order
    own: bool = True  # it sees itself; otherwise only where it sees nothing else
    unit_keys: bool = False  # scores are scale * q . k / |k|
    scale: float = 1.0

    def label(self, k: Tensor) -> Tensor:
        """Labels (b h m rounds), int32, of keys (b g m d)."""
        raise NotImplementedError

    def empty(self, k: Tensor, v: Tensor) -> BucketMemory:
        marks = torch.zeros(k.shape[0], self.dims.heads, 0, self.rounds, dtype=torch.int32, device=k.device)
        return BucketMemory(KVCache.empty(k, v), KVCache.empty(marks, marks[..., :0]))

    def push(self, memory: BucketMemory, k: Tensor, v: Tensor, places: Places) -> BucketMemory:
        with torch.no_grad():
            marks = self.label(k)
        return BucketMemory(memory.log.append(k, v, places), memory.marks.append(marks, marks[..., :0], places))

    def read(self, memory: BucketMemory, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - its queries are the newest tokens
        log, n, m = memory.log, q.shape[2], memory.log.size
        if n > m or (n < m and not self.dims.causal):
            most = "no fewer" if self.dims.causal else "as many"
            raise ValueError(f"{self.name} answers tokens that are in its memory: {n} queries need {most} keys, not {m}")
        if q.shape[0] * n == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        few = self.dims.causal and (n == 1 or 4 * n < m)  # to sort and answer the whole memory would cost more
        if n < m and not few:
            q = pad(q, (0, 0, m - n, 0))
        call = self._call(q, log.keys, log.values, memory.labels(self.labels))
        if few:
            return few_bucket_queries(call)
        out = bucket_attention(call, self.dims.backend)
        return out[:, :, m - n :]

    def _call(self, q: Tensor, k: Tensor, v: Tensor, labels: Tensor) -> BucketCall:
        drop, causal = self.drop, self.dims.causal
        seed = draw_seed(q.device) if drop else None
        reach = self.window if causal else self.chunk
        return BucketCall(q, k, v, labels, seed, self.labels, reach, causal, self.own, self.unit_keys, self.scale, drop)

    def scan(self, memory: BucketMemory, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, BucketMemory]:
        if not self.dims.causal:
            raise ValueError(f"this {self.name} looks at all tokens at once: build it with causal=True")
        if q.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[-1]), memory
        memory = self.push(memory, k, v, places)
        return self.read(memory, q, places), memory

    def forget(self, memory: BucketMemory, t: Tensor) -> BucketMemory:  # noqa: ARG002 - labels decide what can be seen, not positions
        log, marks = memory
        if log.size - log.looked < with_spare_room(log.looked):
            return memory  # a search costs as much as reading: only now and then
        _, place, _, last = sort_by_bucket(memory.labels(self.labels), self.labels)
        newer = last - place  # tokens of the same label behind each
        alive = (newer < self.window - 1).any(2).any(1)  # the next token of the label will be one of its window
        return BucketMemory(log.keep(alive), marks.keep(alive))
