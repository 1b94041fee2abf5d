"""The parts around a mixer in a model: feed-forward layers, residual blocks, stacks of them, and convolutions of images."""

from regard.blocks.block import Block
from regard.blocks.compile_blocks import compile_blocks
from regard.blocks.conv_block import ConvBlock, ConvNet, conv_stages, conv_stem
from regard.blocks.feedforward import FeedForward
from regard.blocks.parts_block import BlockPart, PartsBlock
from regard.blocks.reversible import ReversibleStack
from regard.blocks.stack import Stack

__all__ = [
    "Block",
    "BlockPart",
    "ConvBlock",
    "ConvNet",
    "FeedForward",
    "PartsBlock",
    "ReversibleStack",
    "Stack",
    "compile_blocks",
    "conv_stages",
    "conv_stem",
]
