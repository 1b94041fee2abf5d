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

    `model` is a language model, a translator, or any module with `start` and `extend`.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> from regard.decoding import Constraints, fast_decoder, generate
    >>> fast, prompt, limits = fast_decoder(model, room=16), torch.randint(1, 20, (2, 3)), Constraints(eos=0, max_new_tokens=4)
    >>> slow = generate(model, model.start(2), prompt, constraints=limits)
    >>> generate(fast, fast.start(2), prompt, constraints=limits) == slow
    True
    """
    special: Any = model
    if why_not_static(model) is None:
        return StaticDecoder(special, room=room, graphs=graphs)
    return GraphedDecoder(model, room=room, graphs=graphs)
