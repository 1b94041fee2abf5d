"""Whole models: what comes in is embedded, mixed by blocks of any mechanism, and answered by a head."""

from regard.models.build import language_model, translator
from regard.models.copying import Copier, copier
from regard.models.embed import Embedding, Patches, Spelled, Tokens, Vectors
from regard.models.encoder import Encoded, Encoder
from regard.models.guided import Location, Monotonic, guided_translator
from regard.models.heads import MaskedToken, Matching, NextToken, PerSequence, PerVector, pooled
from regard.models.language import LanguageModel
from regard.models.parallel import Parallel
from regard.models.pointer import Pointer
from regard.models.reader import Matcher, Reader
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
