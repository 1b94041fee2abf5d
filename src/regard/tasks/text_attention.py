"""Attention of a trained model on a text: the weights of every layer and head, with the tokens they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.base import Mixer
from regard.models.attention_record import MixerWeights, record_attention


class StackTokens(NamedTuple):
    """Labels of the tokens of one stack of a model."""

    read: list[str]  # that enter it
    answered: list[str] | None = None  # that leave a decoder, one for each that enters


@dataclass(frozen=True)
class LayerAttention:
    """Hold the attention of one layer on one text."""

    name: str  # "encoder 1"
    kind: str  # "self" or "cross"; "pointer": the weights by which a model copies
    mechanism: str
    weights: Tensor  # (h n m), on the CPU
    queries: list[str]  # labels of the n rows: in cross-attention what the decoder answers there
    keys: list[str]  # labels of the m columns

    def to_json(self) -> dict[str, Any]:
        told = {"name": self.name, "kind": self.kind, "mechanism": self.mechanism, "queries": self.queries, "keys": self.keys}
        return {**told, "weights": self.weights.tolist()}


@dataclass(frozen=True)
class TextAttention:
    """Hold the attention of all layers on one text, and the answer of the model."""

    text: str
    answer: str
    layers: list[LayerAttention]
    missing: list[str] = field(default_factory=list)  # a sentence for each layer without weights

    def __repr__(self) -> str:
        each = ", ".join(f"{x.name} {x.kind} {tuple(x.weights.shape)}" for x in self.layers)
        text, answer = (shorten(x, 60, placeholder=" …") for x in (self.text, self.answer))
        return f"TextAttention({text!r} -> {answer!r}: {each or 'no layer has weights'})"

    def to_json(self) -> dict[str, Any]:
        layers = [layer.to_json() for layer in self.layers]
        return {"text": self.text, "answer": self.answer, "layers": layers, "missing": self.missing}


@torch.no_grad()
def text_attention(
    model: nn.Module, forward: Callable[[], object], tokens: Sequence[StackTokens], text: str, answer: str
) -> TextAttention:
    """Run a pass of a model over one text, and collect the weights of its stacks, whose tokens are given, the encoder first."""
    with record_attention(model) as found:
        forward()
    by_mixer = {one.mixer: one for one in found}
    layers: list[LayerAttention] = []
    missing: list[str] = []
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    for place, (stack, own) in enumerate(zip(stacks, tokens, strict=True)):
        title = ("encoder", "decoder")[place] if len(stacks) > 1 else "layer"
        labels, source = own.read, _pooled(tokens[0].read, stacks[0].rate)
        for number, block in enumerate(stack, 1):
            name = f"{title} {number}"
            after = _pooled(labels, block.rate)
            _collect(by_mixer[block.mixer], name, "self", (after, labels), layers, missing)
            if block.cross is not None:
                _collect(by_mixer[block.cross], name, "cross", (own.answered or after, source), layers, missing)
            labels = after
    return TextAttention(text, answer, layers, missing)


def _collect(
    found: MixerWeights,
    name: str,
    kind: str,
    labels: tuple[list[str], list[str]],
    layers: list[LayerAttention],
    missing: list[str],
) -> None:
    if found.weights is None:
        missing.append(f"{name}: {found.missing}")
        return
    rows, columns = (len(names) for names in labels)
    weights = found.weights[0, :, :rows, :columns].float().cpu()  # what is padded lies behind
    layers.append(LayerAttention(name, kind, mechanism_of(found.mixer), weights, *labels))


def mechanism_of(mixer: Mixer) -> str:
    """Return the text that a mixer was built from, or else its name."""
    return mixer.spec or mixer.name


def _pooled(labels: list[str], rate: int) -> list[str]:
    """Name groups of `rate` tokens by their first and last one."""
    groups = [labels[i : i + rate] for i in range(0, len(labels), rate)]
    return ["…".join(dict.fromkeys((group[0], group[-1]))) for group in groups]
