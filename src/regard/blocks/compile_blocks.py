"""Compile a model block by block: the time that torch.compile takes does not grow with the depth."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.blocks.block import Block
from regard.blocks.reversible import ReversibleStack


def compile_blocks(model: nn.Module, **options: Any) -> list[str]:
    """Compile every block of a model in place by torch.compile, and return the names of the blocks.

    Blocks of one kind share what is compiled, so that a deep model is compiled as fast as one block; what lies between blocks
    (embedding, head) runs as it is. Weights and their names stay. A shape that was not seen before is compiled when it comes:
    `dynamic=True` makes one graph for all lengths from the beginning.

    `model` holds stacks of blocks, `options` are those of torch.compile.

    >>> import torch
    >>> from regard.blocks import Stack, compile_blocks
    >>> stack = Stack.of("Local(4)", width=16, heads=2, depth=3)
    >>> compile_blocks(stack, backend="eager", dynamic=True)
    ['blocks.0', 'blocks.1', 'blocks.2']
    >>> tuple(stack(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """
    for name, module in model.named_modules():
        if isinstance(module, ReversibleStack):
            where = f" in {name}" if name else ""
            raise ValueError(
                f"the reversible stack{where} computes its blocks part by part: compile the model as a whole, or use Stack"
            )
    found = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no blocks of regard.blocks: use torch.compile(model)")
    for block in found.values():
        block.compile(**options)
    return list(found)
