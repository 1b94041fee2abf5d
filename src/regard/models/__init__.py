"""Whole models: what comes in is embedded, mixed by blocks of any mechanism, and answered by a head."""

from regard.models.build import language_model, translator
from regard.models.causal_lm import LanguageModel
from regard.models.embedding import Embedding, Spelled, Tokens, Vectors
from regard.models.encoder import Encoded, Encoder
from regard.models.encoder_head import Matcher, Reader
from regard.models.guided import LocationAligner, MonotonicAligner, guided_translator
from regard.models.heads import MaskedToken, Matching, NextToken, PerSequence, PerVector, pooled
from regard.models.image_embedding import ConvTokens, ImageReader, Patches
from regard.models.nat import NatTranslator
from regard.models.pointer import Pointer
from regard.models.pointer_generator import PointerGenerator, pointer_generator
from regard.models.translator import SourceMemory, Translator

__all__ = [
    "ConvTokens",
    "Embedding",
    "Encoded",
    "Encoder",
    "ImageReader",
    "LanguageModel",
    "LocationAligner",
    "MaskedToken",
    "Matcher",
    "Matching",
    "MonotonicAligner",
    "NatTranslator",
    "NextToken",
    "Patches",
    "PerSequence",
    "PerVector",
    "Pointer",
    "PointerGenerator",
    "Reader",
    "SourceMemory",
    "Spelled",
    "Tokens",
    "Translator",
    "Vectors",
    "guided_translator",
    "language_model",
    "pointer_generator",
    "pooled",
    "translator",
]
