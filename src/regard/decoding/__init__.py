"""From scores to tokens. Decoding knows three things of a model: start, extend, and that a state's rows can be reordered."""

from regard.decoding.beam import Beams, beam
from regard.decoding.constraints import Rules
from regard.decoding.generate import Greedy, Sample, Speaker, say, stream
from regard.decoding.nat_decoder import ReadyAtOnce
from regard.runtime.packed_linear import packed
from regard.runtime.static_decoder import Ready, unready

__all__ = ["Beams", "Greedy", "Ready", "ReadyAtOnce", "Rules", "Sample", "Speaker", "beam", "packed", "say", "stream", "unready"]
