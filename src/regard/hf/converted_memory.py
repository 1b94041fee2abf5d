"""Memories of converted models for `generate`: the state of every layer in the place of a KV cache that grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from regard.hf.attention_layers import attention_layers
from regard.hf.converted_attention import PassTokens
from regard.mixers.attention import no_autocast
from regard.mixers.base import Core, Places, nbytes, select


class MemoryLayer(CacheLayerMixin):
    """Hold the memory of one layer. `update` hands on the new keys and values alone; the attention function finds this there."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = None
        self.count: Tensor | None = None  # (b) real tokens so far
        self.start: int | None = 0  # the same on the host, where all rows agree
        self.seen = 0  # tokens so far, padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002 - the shapes of the base class
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[2]
        keys = key_states.view_as(key_states)
        keys.regard_memory = self  # type: ignore[attr-defined]
        return keys, value_states

    def scan(self, core: Core, q: Tensor, k: Tensor, v: Tensor, tokens: PassTokens) -> Tensor:
        """Write k (b g n d) and v (b g n e) into the memory and read it with q (b h n d), in causal order."""
        if not core.dims.causal:
            raise ValueError("a memory is for models that generate, but this layer is not causal: leave past_key_values out")
        if self.count is None:
            self.count = torch.zeros(len(k), dtype=torch.long, device=k.device)
        valid = tokens.valid
        places = Places.of(k[:, 0], valid, self.count, self.start)
        if valid is not None:
            q, k, v = (x.masked_fill(~valid[:, None, :, None], 0) for x in (q, k, v))
        with no_autocast(q):
            memory = core.empty(k, v) if self.memory is None else self.memory
            out, memory = core.scan(memory, q, k, v, places)
            self.count = self.count + places.count
            self.memory = core.forget(memory, self.count)
        self.start = self.start + k.shape[2] if self.start is not None and valid is None else None
        return out if valid is None else out.masked_fill(~valid[:, None, :, None], 0)

    @property
    def nbytes(self) -> int:
        return nbytes(self.memory)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.seen

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.count is not None:
            rows = beam_idx.to(self.count.device)
            self.memory, self.count = select(self.memory, rows), self.count.index_select(0, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.count is not None:
            rows = torch.arange(len(self.count), device=self.count.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.memory, self.count, self.start, self.seen = None, None, 0, 0


def converted_memory(model: PreTrainedModel) -> Cache:
    """Make the memory of a converted model: `model.generate(ids, past_key_values=converted_memory(model))`.

    A layer with a mechanism has its state, of constant size or bounded by a window; a layer that was kept has all keys. Beams and
    left padding work; one memory is for one call of generate.
    """
    return Cache(layers=[MemoryLayer() for _ in attention_layers(model)])
