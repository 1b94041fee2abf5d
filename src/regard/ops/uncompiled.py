"""Call a function outside torch.compile. Import this module only while a function is compiled: it loads torch._dynamo."""

from collections.abc import Callable
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")


@torch.compiler.disable(reason="no graph can hold the steps of recurrent networks and the training of reversible stacks")
def uncompiled(f: Callable[..., ResultT], *args: object) -> ResultT:
    """Call f(*args) with a graph break before and after it."""
    return f(*args)
