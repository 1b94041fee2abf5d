"""From scores to tokens. Decoding knows three things of a model: start, extend, and that a state's rows can be reordered."""

from regard.decoding.at_once import ReadyAtOnce
from regard.decoding.beam import Beams, beam
from regard.decoding.packed import packed
from regard.decoding.ready import Ready, unready
from regard.decoding.rules import Rules
from regard.decoding.speak import Greedy, Sample, Speaker, say, stream

__all__ = ["Beams", "Greedy", "Ready", "ReadyAtOnce", "Rules", "Sample", "Speaker", "beam", "packed", "say", "stream", "unready"]
