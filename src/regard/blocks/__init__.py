"""The parts around a mixer in a model: feed-forward layers, residual blocks, stacks of them, and stacks that run backwards."""

from regard.blocks.block import Block
from regard.blocks.feedforward import FeedForward
from regard.blocks.parts_block import BlockPart, PartsBlock
from regard.blocks.reversible import ReversibleStack
from regard.blocks.stack import Stack

__all__ = ["Block", "BlockPart", "FeedForward", "PartsBlock", "ReversibleStack", "Stack"]
