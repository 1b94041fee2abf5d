"""Hugging Face models with other attention; needs transformers. Importing it registers an attention function there."""

from regard.hf.align import Alignment, align
from regard.hf.convert import convert, load_converted, restore
from regard.hf.converted_memory import converted_memory
from regard.hf.distil import Distillation, distil
from regard.hf.error_by_layer import ErrorByLayer, error_by_layer
from regard.hf.longer_positions import lengthen_positions

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
    "restore",
]
