"""Record the attention weights of every mixer of a model during a whole pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.mixers.base import Mixer


@dataclass(frozen=True)
class MixerWeights:
    """Hold the weights of one mixer in one pass, or the sentence that tells why it has none."""

    mixer: Mixer
    name: str  # in the model, as in named_modules()
    weights: Tensor | None  # (b h n m)
    missing: str = ""


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[MixerWeights]]:
    """Collect the attention weights of all mixers of a model that pass over whole sequences inside this context, in their order.

        with record_attention(model) as found:
            model(tokens)
        found[0].weights  # (b h n m) of the first mixer, or None, with a sentence in found[0].missing

    Tokens that are added to a state (`extend`) are not recorded. Weights are without dropout and without gradients.
    """
    found: list[MixerWeights] = []
    mixers = {module: name for name, module in model.named_modules() if isinstance(module, Mixer)}

    @torch.no_grad()
    def record(mixer: Any, args: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        try:
            found.append(MixerWeights(mixer, mixers[mixer], mixer.weights(*args, **given)))
        except ValueError as error:
            found.append(MixerWeights(mixer, mixers[mixer], None, str(error)))

    hooks = [mixer.register_forward_pre_hook(record, with_kwargs=True) for mixer in mixers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
