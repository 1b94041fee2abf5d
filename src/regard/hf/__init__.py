"""Attention of regard inside models of Hugging Face's transformers: `import regard.hf`, and a Spec is a name of an attention.

>>> import regard.hf
>>> model.set_attn_implementation("Local(512) | Global(first=1)")  # doctest: +SKIP

`import regard` registers nothing. Other names are imported when they are first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("transformers") is None:
    raise ModuleNotFoundError("regard.hf needs transformers: pip install 'regard[hf]'", name="transformers")

from regard.hf.spec_names import admit_specs

if TYPE_CHECKING:
    from regard.hf.alignment import align
    from regard.hf.attention_setting import set_attention
    from regard.hf.conversion import convert, load_converted, restore
    from regard.hf.distillation import distil
    from regard.hf.layer_errors import error_by_layer
    from regard.hf.longer_positions import lengthen_positions
    from regard.hf.model_memory import memory

__all__ = [
    "align",
    "convert",
    "distil",
    "error_by_layer",
    "lengthen_positions",
    "load_converted",
    "memory",
    "restore",
    "set_attention",
]

_HOMES = {
    "align": "regard.hf.alignment",
    "convert": "regard.hf.conversion",
    "distil": "regard.hf.distillation",
    "error_by_layer": "regard.hf.layer_errors",
    "lengthen_positions": "regard.hf.longer_positions",
    "load_converted": "regard.hf.conversion",
    "memory": "regard.hf.model_memory",
    "restore": "regard.hf.conversion",
    "set_attention": "regard.hf.attention_setting",
}

admit_specs()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'regard.hf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
