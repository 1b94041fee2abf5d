"""The entry point to fast decoding."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.runtime.graphed_decoder import GraphedDecoder
from regard.runtime.static_decoder import StaticDecoder, why_not_static


def fast_decoder(model: nn.Module, *, room: int = 256, graphs: bool = True) -> StaticDecoder | GraphedDecoder:
    """Return a decoder of a model, as it is now, for `generate`, `generate_stream` and `beam`.

        fast = fast_decoder(model)
        generate(fast, fast.start(batch), prompt, constraints=constraints)

    Tokens and scores are the model's own. Plain softmax models get a `StaticDecoder`, all others that have `start` and `extend` a
    `GraphedDecoder`. `room` is the number of tokens that KV caches have room for at first, prompt and answer; it grows.
    `graphs`: a step on a GPU is one CUDA graph.
    """
    special: Any = model
    if why_not_static(model) is None:
        return StaticDecoder(special, room=room, graphs=graphs)
    return GraphedDecoder(model, room=room, graphs=graphs)
