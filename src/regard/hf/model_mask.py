"""The mask of a model of transformers as a value: which tokens are real, where they are, and the model's own rule.

Transformers passes whatever a mask function returns to every attention layer, so that no n x m mask is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from regard.mixers.base import Places
from regard.patterns import Blocks, Local

# Mask functions of transformers are closures. Two of the same function have the same code.
_ALL_OF = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNKS = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__


class MaskRule(NamedTuple):
    """The pairs that a model shows to its attention: all, those of the past, and of these the ones in a pattern."""

    causal: bool
    within: str | None = None  # the pattern's text, which torch.compile can handle
    size: int = 0  # keys of which the pattern hides none


class MaskSizes(NamedTuple):
    """How many queries and keys there are, and how many tokens come before the first of each: names of transformers."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int  # a tensor, where a static cache counts on the device
    kv_offset: int
    device: torch.device | None


class ModelMask:
    """Hold the mask of one pass for all layers of a kind, with the places of its keys: n queries, the last of m keys."""

    def __init__(
        self, name: str, full: bool, function: Callable[..., Tensor], sizes: MaskSizes, valid: Tensor | None, own: bool
    ) -> None:
        self.name, self.full = name, full  # of the Specs; all of them are softmax
        self.function, self.sizes, self.valid = function, sizes, valid
        self.own = own  # the function is of the user's making
        self._places: Places | None = None

    def places(self, k: Tensor) -> Places:
        """Return the places of keys k (b g m d), made once for all layers."""
        if self._places is None or self._places.device != k.device:
            first = self.sizes.kv_offset
            if self.valid is None:
                self._places = Places.of(k[:, 0], start=first)
            else:
                end = first + k.shape[2]
                valid = _reaching(self.valid, end).to(k.device)
                self._places = Places.of(valid, valid).part(first, end)
        return self._places

    def rule(self, window: int | None, causal: bool) -> MaskRule | None:
        """Return what the mask function shows, or None where it is no function of transformers alone.

        window and causal are those that the attention module names: torch.compile cannot read them from a function.
        """
        if self.function is masking_utils.causal_mask_function:
            return MaskRule(True)
        if self.function is masking_utils.bidirectional_mask_function:
            return MaskRule(False)
        if self.own:
            return None
        if not torch.compiler.is_compiling():
            return _read_rule(self.function)
        packed = self.valid is None  # tokens without a padding mask may be several sequences, whatever their positions
        if window is None or packed or self.function.__code__ is not _ALL_OF:
            return None
        return MaskRule(causal, f"Local({window})", window)

    def shown(self) -> Tensor:
        """Return the pairs that the model shows, (b 1 n m), in full."""
        made = masking_utils.sdpa_mask(
            **self.sizes._asdict(),
            mask_function=self.function,
            attention_mask=self.valid,
            allow_is_causal_skip=False,
            use_vmap=self.own,
        )
        assert made is not None
        return made

    def contiguous(self) -> Tensor:
        """Return the mask in full. `generate` calls this with a static cache alone, whose keys are not in order."""
        if not self.full:
            raise ValueError(
                f"{self.name} has no static cache: leave out cache_implementation, or generate in bounded memory with "
                "past_key_values=regard.hf.memory(model)"
            )
        return self.shown()


def model_mask(
    name: str,
    full: bool,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | None = None,
    **_: Any,
) -> ModelMask | Tensor:
    """Return the mask of a pass for attention by the Specs of `name`; transformers calls it.

    A static cache has room for more keys than there are: softmax gets the mask of SDPA there, other Specs refuse it.
    """
    sizes = MaskSizes(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    made = ModelMask(name, full, mask_function, sizes, attention_mask, use_vmap)
    if _is_static(made):
        return made.contiguous()
    if not torch.compiler.is_compiling():
        keep_name(config, name)
        if attention_mask is not None and not _is_capturing(attention_mask) and bool(attention_mask.all()):
            made.valid = None
    return made


def _is_static(mask: ModelMask) -> bool:
    """Return whether keys are those of a static cache. In cross attention they are no tokens of the queries."""
    if isinstance(mask.sizes.q_offset, Tensor):
        return True
    if mask.function is masking_utils.bidirectional_mask_function:
        return False
    return mask.sizes.q_offset + mask.sizes.q_length != mask.sizes.kv_offset + mask.sizes.kv_length


def keep_name(config: Any, name: str) -> None:
    """Write the name into a configuration, where `save_pretrained` and `from_pretrained` find it: transformers leaves it out."""
    if config is not None and config.__dict__.get("attn_implementation") != name:
        config.attn_implementation = name


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _reaching(valid: Tensor, length: int) -> Tensor:
    """Return a padding mask (b length): the tokens behind a shorter one are none."""
    missing = length - valid.shape[1]
    if missing > 0:
        valid = torch.nn.functional.pad(valid, (0, missing))
    return valid[:, :length]


def _read_rule(function: Any) -> MaskRule | None:
    """Read the rule of a mask function from the functions it consists of; None: some are not known."""
    rule = MaskRule(False)
    for part in _parts(function):
        if part is masking_utils.causal_mask_function:
            rule = rule._replace(causal=True)
        elif part is not masking_utils.bidirectional_mask_function:
            pattern = _read_pattern(part)
            if pattern is None or rule.within is not None:
                return None
            rule = rule._replace(within=str(pattern), size=pattern.size)
    return rule


def _parts(function: Any) -> list[Any]:
    if getattr(function, "__code__", None) is not _ALL_OF:
        return [function]
    functions = function.__closure__[0].cell_contents
    return [part for one in functions for part in _parts(one)]


def _read_pattern(function: Any) -> Local | Blocks | None:
    code = getattr(function, "__code__", None)
    if code not in (_WINDOW, _BOTH_WAYS, _CHUNKS):
        return None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if code is _CHUNKS:
        return Blocks(cells["chunk_size"].cell_contents)
    size: int = cells["sliding_window"].cell_contents
    return Local(size) if code is _WINDOW else Local(size + 1)
