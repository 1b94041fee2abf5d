"""The attention function of converted models: a layer computes by its own mechanism, layers that were kept by softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.model_mask import ModelMask, keep_name, model_mask
from regard.hf.spec_attention import MEMORY, QueryKeyValue, attend_by_core, spec_attention
from regard.hf.spec_names import IMPLEMENTATION, SAVED, LayerSpecs, register_named
from regard.mixers.attention import in_autocast, no_autocast
from regard.mixers.base import Core

RECORD = "regard"  # of what was converted, in the configuration
MECHANISM = "mechanism"  # the submodule of an attention layer that computes in place of its softmax
KEPT_LAYERS = LayerSpecs(("softmax",), True)


def converted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with query (b h n d) to key (b g m d) and value (b g m e): returns (b n h e), and no weights."""
    heads = _alike(QueryKeyValue(query, key, value))
    mechanism = getattr(module, MECHANISM, None)

    def softmax() -> Tensor:
        options_of_softmax = {"scaling": scaling, "dropout": dropout, **options}
        return spec_attention(KEPT_LAYERS, module, *heads, attention_mask, **options_of_softmax)[0]

    if mechanism is None:
        _check_kept(module)
        return softmax(), None
    _check_mask(module, mechanism, heads, attention_mask, options)
    call = MechanismCall(module, _unscaled(module, heads, scaling), attention_mask, softmax)
    return (call.attend() if _observer.observe is None else _observer.observe(call)), None


class MechanismCall:
    """Hold one call of a converted layer: `softmax()` and `attend()` give the outputs (b n h e) of the layer before and now."""

    def __init__(self, module: nn.Module, heads: QueryKeyValue, mask: ModelMask | None, softmax: Callable[[], Tensor]) -> None:
        self.module, self.heads, self.mask, self.softmax = module, heads, mask, softmax

    @property
    def valid(self) -> Tensor | None:
        """Which keys are real, (b m); None: all of them."""
        return None if self.mask is None else self.mask.places(self.heads.k).valid

    def attend(self) -> Tensor:
        """Attend by the mechanism of the layer."""
        core: Core = self.module.get_submodule(MECHANISM)  # type: ignore[assignment]
        q, k, _ = self.heads
        memory = getattr(k, MEMORY, None)
        with no_autocast(q):
            if memory is None and q.shape[2] == k.shape[2]:
                core.watch(q, k, self.valid)
            out = attend_by_core(core, self.heads, self.mask, core.dims.causal, memory)
        return out.to(q.dtype).transpose(1, 2).contiguous()


def _alike(heads: QueryKeyValue) -> QueryKeyValue:
    """Return queries, keys and values in one type under autocast, as SDPA does: rotary positions make float32 of two of them."""
    if not in_autocast(heads.q):
        return heads
    dtype = torch.get_autocast_dtype(heads.q.device.type)
    q, k, v = (x.to(dtype) for x in heads)
    memory = getattr(heads.k, MEMORY, None)
    if memory is not None and k is not heads.k:
        setattr(k, MEMORY, memory)
    return QueryKeyValue(q, k, v)


def _unscaled(module: Any, heads: QueryKeyValue, scaling: float | None) -> QueryKeyValue:
    """Return queries as mechanisms take them, without the scale of the layer: OPT multiplies them by it before the call."""
    if scaling is None or module.scaling is None or scaling == module.scaling:
        return heads
    return heads._replace(q=heads.q * (scaling / module.scaling))


def _converted_layers(config: Any) -> dict[str, str]:
    """Return the mechanisms that a configuration records, by the number of their layer."""
    record = getattr(config, RECORD, None)
    return record.get("layers", {}) if isinstance(record, dict) else {}


def _check_kept(module: nn.Module) -> None:
    """Refuse softmax in a layer that the configuration records as converted: its mechanism was not loaded."""
    layers = _converted_layers(getattr(module, "config", None))
    layer = str(getattr(module, "layer_idx", None))
    if layer in layers:
        raise ValueError(
            f"layer {layer} was converted to {layers[layer]}, and its mechanism is not there: "
            "load the model with regard.hf.load_converted(folder)"
        )


def _converted_mask(*sizes: Any, config: Any = None, **options: Any) -> ModelMask | Tensor:
    """Return the mask of a pass. The configuration gets a name that `from_pretrained` refuses, while a layer is converted."""
    if not torch.compiler.is_compiling() and _converted_layers(config):
        keep_name(config, SAVED)
    return model_mask(IMPLEMENTATION, False, *sizes, **options)


def _check_mask(module: nn.Module, mechanism: Core, heads: QueryKeyValue, mask: Any, options: dict[str, Any]) -> None:
    """Refuse what a mechanism cannot compute: other masks, a bias of scores, keys that a cache has dropped."""
    kind = type(module).__name__
    for name in ("position_bias", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"{kind} changes its scores by {name}, which {mechanism.name} has no place for")
    if mask is None:
        return
    if not isinstance(mask, ModelMask):
        raise TypeError(f"{mechanism.name} in {kind} takes an attention_mask (b n), 1 at real tokens: no masks of n x m numbers")
    if mask.rule(options.get("sliding_window"), mechanism.dims.causal) is None:
        raise ValueError(f"{kind} has packed sequences or a mask of its own, which {mechanism.name} has no place for")
    dropped = mask.sizes.kv_offset
    if dropped and getattr(heads.k, MEMORY, None) is None:
        raise ValueError(
            f"the cache has dropped the first {dropped} tokens, which {mechanism.name} would have in its memory: "
            "use past_key_values=regard.hf.memory(model)"
        )


Observe = Callable[[MechanismCall], Tensor]


class _Observer:
    """What converted layers do in the place of their mechanism."""

    observe: Observe | None = None


_observer = _Observer()


@contextmanager
def observed(observe: Observe) -> Iterator[None]:
    """Let every converted layer return observe(call) in here."""
    outer, _observer.observe = _observer.observe, observe
    try:
        yield
    finally:
        _observer.observe = outer


register_named(IMPLEMENTATION, converted_attention, _converted_mask, KEPT_LAYERS)
