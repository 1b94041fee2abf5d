"""Whole models: what comes in is embedded, mixed by blocks of any mechanism, and answered by a head."""

from regard.models.build import encoder, glorot, language_model, stack, tokens, translator
from regard.models.embed import Embedding, Patches, Spelled, Tokens, Vectors
from regard.models.encoder import Encoded, Encoder
from regard.models.heads import MaskedToken, Matching, NextToken, PerSequence, PerVector, pooled
from regard.models.language import LanguageModel
from regard.models.reader import Matcher, Reader
from regard.models.translator import Heard, Translator

__all__ = [
    "Embedding",
    "Encoded",
    "Encoder",
    "Heard",
    "LanguageModel",
    "MaskedToken",
    "Matcher",
    "Matching",
    "NextToken",
    "Patches",
    "PerSequence",
    "PerVector",
    "Reader",
    "Spelled",
    "Tokens",
    "Translator",
    "Vectors",
    "encoder",
    "glorot",
    "language_model",
    "pooled",
    "stack",
    "tokens",
    "translator",
]
