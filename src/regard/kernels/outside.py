"""What a captured pass reads and did not make: memory that must stay where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Outside(TorchDispatchMode):
    """Notes the memory that operations read and none of them made: weights, and whatever a model keeps between passes.

    A model may replace what it keeps, such as a table of positions when a longer text comes, and its memory would go to others
    while a captured pass still reads there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.read: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (at := x.untyped_storage().data_ptr()) not in self.made:
                self.read[at] = x.untyped_storage()
        out = func(*args, **(kwargs or {}))
        made = {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, Tensor)}
        self.made |= made - self.read.keys()
        return out
