"""Whole models: what comes in is embedded, mixed by blocks of any mechanism, and answered by a head."""

from regard.models.build import language_model, translator
from regard.models.causal_lm import LanguageModel
from regard.models.embedding import Embedding, Patches, Spelled, Tokens, Vectors
from regard.models.encoder import Encoded, Encoder
from regard.models.encoder_head import Matcher, Reader
from regard.models.guided import Location, Monotonic, guided_translator
from regard.models.heads import MaskedToken, Matching, NextToken, PerSequence, PerVector, pooled
from regard.models.nat import Parallel
from regard.models.pointer import Pointer
from regard.models.pointer_generator import Copier, copier
from regard.models.translator import Heard, Translator

__all__ = [
    "Copier",
    "Embedding",
    "Encoded",
    "Encoder",
    "Heard",
    "LanguageModel",
    "Location",
    "MaskedToken",
    "Matcher",
    "Matching",
    "Monotonic",
    "NextToken",
    "Parallel",
    "Patches",
    "PerSequence",
    "PerVector",
    "Pointer",
    "Reader",
    "Spelled",
    "Tokens",
    "Translator",
    "Vectors",
    "copier",
    "guided_translator",
    "language_model",
    "pooled",
    "translator",
]
