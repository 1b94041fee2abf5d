"""From scores to tokens. Decoding uses three things of a model: start, extend, and states whose rows can be reordered."""

from regard.decoding.beam import Beams, beam
from regard.decoding.constraints import Constraints
from regard.decoding.generate import GenerativeModel, Greedy, Sample, generate, generate_stream
from regard.decoding.nat_decoder import NatDecoder
from regard.runtime.fast_decoder import fast_decoder
from regard.runtime.graphed_decoder import GraphedDecoder
from regard.runtime.packed_linear import pack_linears
from regard.runtime.static_decoder import StaticDecoder, why_not_static

__all__ = [
    "Beams",
    "Constraints",
    "GenerativeModel",
    "GraphedDecoder",
    "Greedy",
    "NatDecoder",
    "Sample",
    "StaticDecoder",
    "beam",
    "fast_decoder",
    "generate",
    "generate_stream",
    "pack_linears",
    "why_not_static",
]
