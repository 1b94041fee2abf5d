"""Names of attention in transformers: any Spec, or one Spec for each layer, is registered when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from regard.catalogue import CATALOGUE
from regard.hf.model_mask import model_mask
from regard.hf.spec_attention import spec_attention
from regard.hf.spec_core import check_plain
from regard.patterns import PATTERNS
from regard.spec import Spec
from regard.synonyms import elsewhere, right_word
from regard.text import TextError

IMPLEMENTATION = "converted"  # the attention function of converted models, as in model.set_attn_implementation
SAVED = "converted by regard, for regard.hf.load_converted(folder)"  # what config.json of a converted model has in its place


class LayerSpecs(NamedTuple):
    """Hold the mechanisms of a model: one for all layers, or one for each."""

    each: tuple[str, ...]  # texts of Specs
    shared: bool  # the one Spec is that of all layers

    @staticmethod
    def made(specs: Iterable[Spec], shared: bool) -> LayerSpecs:
        return LayerSpecs(tuple(map(_shortest_text, specs)), shared)

    @staticmethod
    def parse(text: str) -> LayerSpecs:
        """Read `Local(8) | Global(first=1)`, or `[softmax, Local(8)]`: a Spec for each layer."""
        line = text.strip()
        if not line.startswith("["):
            return LayerSpecs.made([Spec.parse(line)], True)
        if not line.endswith("]"):
            raise TextError("a list of mechanisms, one for each layer, ends with ]", line, len(line) - 1)
        return LayerSpecs.made(map(Spec.parse, _items(line[1:-1])), False)

    def __str__(self) -> str:
        return self.each[0] if self.shared else f"[{', '.join(self.each)}]"

    def of(self, module: nn.Module) -> str:
        """Return the text of the mechanism of an attention module."""
        if self.shared:
            return self.each[0]
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(
                f"{type(module).__name__} has no layer_idx, so its mechanism among {len(self.each)} is unknown: "
                "regard.hf.set_attention(model, [...]) numbers the layers of such models"
            )
        if layer >= len(self.each):
            raise ValueError(f"layer {layer} has no mechanism: {self} names {len(self.each)}, one for each layer from 0 on")
        return self.each[layer]


def _shortest_text(spec: Spec) -> str:
    """Write a Spec; a pattern alone stands for sparse(pattern)."""
    if spec.name == "sparse" and list(spec.options) == ["pattern"]:
        return str(spec.options["pattern"])
    return str(spec)


def _items(text: str) -> list[str]:
    """Split a text at the commas outside of all brackets."""
    depth, items = 0, [""]
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    return items


class SpecName(str):
    """A registered name that equals the text of every Spec, so that transformers finds any of them among its names.

    Transformers compares a name with all that are registered before it uses one. This comparison registers the function and
    the mask of a Spec under its text; from then on its name is one like others.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (str.__eq__(self, other) or register_specs(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # in Python, because torch.compile cannot trace that of str
        return 20

    def __reduce__(self) -> tuple[type[SpecName], tuple[str]]:
        return SpecName, (str(self),)


ANY_SPEC = SpecName("a Spec of regard")
_KNOWN: dict[str, LayerSpecs] = {}


def admit_specs() -> None:
    """Let transformers take the text of any Spec for the name of an attention."""
    AttentionInterface.register(ANY_SPEC, _no_spec)
    AttentionMaskInterface.register(ANY_SPEC, _no_spec)


def register_specs(text: str) -> bool:
    """Register the attention and the mask that a text names; False: it is no Spec. Mistakes in what is one raise."""
    if text in _KNOWN:
        return True
    if text in (IMPLEMENTATION, SAVED):
        raise ValueError(
            "this model was converted by regard.hf.convert, and from_pretrained would leave out its mechanisms: "
            "load it with regard.hf.load_converted(folder)"
        )
    try:
        specs = LayerSpecs.parse(text)
    except ValueError:
        if not _means_spec(text):
            return False
        raise
    each = [Spec.parse(one) for one in specs.each]
    for spec in each:
        check_plain(spec)
    AttentionInterface.register(text, partial(spec_attention, specs))
    full = all(spec.name == "softmax" for spec in each)
    AttentionMaskInterface.register(text, partial(model_mask, text, full))
    _KNOWN[text] = specs
    return True


def _means_spec(text: str) -> bool:
    """Return whether a text that cannot be read is meant for a Spec: it has brackets, or is another name of a mechanism."""
    if "(" in text or "[" in text:
        return True
    if is_registered(text):
        return False
    names = [*CATALOGUE, *PATTERNS]
    return right_word(text, names) is not None or elsewhere(text, names) is not None


def is_registered(name: str) -> bool:
    """Return whether transformers, or its user, has an attention or a mask of this name."""
    return name in AttentionInterface() or name in AttentionMaskInterface()


def register_named(name: str, attention: Callable[..., Any], mask: Callable[..., Any], specs: LayerSpecs) -> None:
    """Register an attention of ours, and its mask, under a name that is no Spec."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _KNOWN[name] = specs


def registered_specs(text: str | None) -> LayerSpecs | None:
    """Return what a registered name stands for; None: it is none of ours."""
    return _KNOWN.get(text) if text is not None else None


def _no_spec(*_: object, **__: object) -> None:
    raise ValueError(f"{str(ANY_SPEC)!r} stands for all of them: write one, such as 'Local(512) | Global(first=1)'")
