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
    from regard.hf.attention_setting import set_attention
    from regard.hf.model_memory import memory

__all__ = ["memory", "set_attention"]

_HOMES = {
    "memory": "regard.hf.model_memory",
    "set_attention": "regard.hf.attention_setting",
}

admit_specs()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'regard.hf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
