"""Every way of paying attention: each mechanism a value you pass, each claim tested."""

from regard._version import version as __version__
from regard.catalogue import CATALOGUE
from regard.mixers.attention import Attention, attend
from regard.mixers.base import Can, Core, Dims, Mixer, Places, State, select
from regard.mixers.patterns import (
    Blocks,
    Causal,
    Columns,
    Dilated,
    Edges,
    Everything,
    Global,
    Local,
    Pattern,
    PerHead,
    Random,
    Rows,
    Stride,
    Tail,
    Truncated,
)
from regard.spec import Spec, core, layer

__all__ = [
    "CATALOGUE",
    "Attention",
    "Blocks",
    "Can",
    "Causal",
    "Columns",
    "Core",
    "Dilated",
    "Dims",
    "Edges",
    "Everything",
    "Global",
    "Local",
    "Mixer",
    "Pattern",
    "PerHead",
    "Places",
    "Random",
    "Rows",
    "Spec",
    "State",
    "Stride",
    "Tail",
    "Truncated",
    "__version__",
    "attend",
    "core",
    "layer",
    "select",
]
