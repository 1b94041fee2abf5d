"""Caches of transformers that hold the memory of a Spec: a window and its sinks, a linear state, in place of all keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from regard.hf.spec_attention import MEMORY
from regard.hf.spec_names import registered_specs
from regard.mixers.base import Can, Core, Places, nbytes, need_claims, select


def memory(model: PreTrainedModel) -> Cache:
    """Return an empty cache for `model.generate(..., past_key_values=regard.hf.memory(model))`.

    It holds what the mechanism of every layer needs: the window and the first tokens of `Local(512) | Global(first=4)`, sums of
    `linear`, and all keys of `softmax`. Outputs are those of the usual cache. Beams, padding on the left, several calls with the
    same cache and encoder-decoder models (whose cross attention has the usual cache) are supported; a bias on the scores, as in
    T5, cropping (assisted generation) and torch.compile are not.

    `model` is one of transformers, whose attention was set.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> model = regard.hf.set_attention(model, "Local(4) | Global(first=1)")
    >>> prompt = torch.randint(3, 50, (1, 10))
    >>> ids = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, past_key_values=regard.hf.memory(model), pad_token_id=0)
    >>> tuple(ids.shape)
    (1, 13)
    """
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if registered_specs(name) is None:
        raise ValueError(f"the model attends by {name!r}: regard.hf.set_attention(model, ...) gives it a mechanism with a memory")
    own = SpecMemory()
    return EncoderDecoderCache(own, DynamicCache()) if model.config.is_encoder_decoder else own


class SpecMemory(Cache):
    """Hold one `MemoryLayer` for every layer of a model, made when it is first used."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=MemoryLayer)

    @property
    def nbytes(self) -> int:
        """The bytes of all layers, spare room included."""
        states = [layer.state for layer in self.layers if isinstance(layer, MemoryLayer)]
        return sum(map(nbytes, states))


class MemoryLayer(CacheLayerMixin):
    """Hold the memory of one layer. `update` hands the new keys on, and the attention function extends the memory by them."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.seen = 0  # tokens, padding included
        self.waiting = False  # keys were handed on and have not been read

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys (b g n d), which carry this layer as an attribute, and the new values."""
        if torch.compiler.is_compiling():
            raise ValueError("the memory of a Spec is not for torch.compile: compile the model and use its usual cache")
        if self.waiting:
            raise ValueError(
                "the last keys were not read by a Spec of regard: set the attention of the model before its memory is made, and "
                "use the usual cache for models that change keys behind it"
            )
        self.lazy_initialization(key_states, value_states)
        self.waiting = True
        self.seen += key_states.shape[2]
        keys = key_states.view_as(key_states)
        setattr(keys, MEMORY, self)
        return keys, value_states

    def extend(self, core: Core, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """Write tokens into the memory and return what they read from it, (b h n e)."""
        need_claims(core.name, core.can, Can.STREAM, "so it has no memory to generate with")
        self.waiting = False
        state = core.empty(k, v) if self.state is None else self.state
        out, state = core.scan(state, q, k, v, places)
        t = places.at[:, -1] + places.real[:, -1]
        self.state = core.forget(state, t)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.seen

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.seen, self.waiting, self.is_initialized = None, 0, False, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row side by side."""
        if self.state is not None:
            rows = torch.arange(len(_first(self.state)), device=_first(self.state).device)
            self._select(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        raise NotImplementedError("the memory of a Spec stays on its device: use a cache without offloading")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("what a memory has forgotten cannot come back: generate without assistance")

    def _select(self, rows: Tensor) -> None:
        if self.state is not None:
            self.state = select(self.state, rows.to(_first(self.state).device))


def _first(state: Any) -> Tensor:
    """Return the first tensor of a state."""
    while not isinstance(state, Tensor):
        state = next(part for part in state if isinstance(part, Tensor | tuple))
    return state
