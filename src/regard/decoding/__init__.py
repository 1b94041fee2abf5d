"""From scores to tokens. Decoding knows three things of a model: start, extend, and that a state's rows can be reordered."""

from regard.decoding.beam import Beams, beam
from regard.decoding.rules import Rules
from regard.decoding.speak import Greedy, Sample, Speaker, say, stream

__all__ = ["Beams", "Greedy", "Rules", "Sample", "Speaker", "beam", "say", "stream"]
