"""Attention of regard inside models of Hugging Face's transformers: `import regard.hf`, and a Spec is a name of an attention.

>>> import regard.hf
>>> model.set_attn_implementation("Local(512) | Global(first=1)")  # doctest: +SKIP

`import regard` registers nothing.
"""

from regard.hf.align import Alignment, align
from regard.hf.attention_setting import set_attention
from regard.hf.convert import convert, load_converted, restore
from regard.hf.converted_memory import converted_memory
from regard.hf.distil import Distillation, distil
from regard.hf.error_by_layer import ErrorByLayer, error_by_layer
from regard.hf.longer_positions import lengthen_positions
from regard.hf.model_memory import memory
from regard.hf.spec_names import admit_specs

__all__ = [
    "Alignment",
    "Distillation",
    "ErrorByLayer",
    "align",
    "convert",
    "converted_memory",
    "distil",
    "error_by_layer",
    "lengthen_positions",
    "load_converted",
    "memory",
    "restore",
    "set_attention",
]

admit_specs()
