"""Names of the package `regard` itself, which imports this module when one of them is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.cache import clear_caches
from regard.catalogue import CATALOGUE
from regard.catalogue_row import Example, Row
from regard.mixers.attend import attend
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Mixer, Places, State, select
from regard.mixers.feature_math import per_query_head
from regard.mixers.graph_attention import disjoint, edge_weights, on_graph
from regard.mixers.graph_layer import GraphAttention
from regard.mixers.low_rank import tie_linformer
from regard.modules import MultiheadAttention, replace_attention
from regard.patterns import (
    Blocks,
    Causal,
    Columns,
    Dilated,
    Edges,
    Everything,
    Global,
    Local,
    Neighbourhood,
    Pattern,
    PerHead,
    Random,
    Rows,
    Stride,
    Tail,
    Truncated,
)
from regard.positions import Positions
from regard.spec import Spec, core, layer, register

if TYPE_CHECKING:
    from regard.tasks.trained_run import load
    from regard.tasks.training_call import train

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
    "Example",
    "Global",
    "GraphAttention",
    "Local",
    "Mixer",
    "MultiheadAttention",
    "Neighbourhood",
    "Pattern",
    "PerHead",
    "Places",
    "Positions",
    "Random",
    "Row",
    "Rows",
    "Spec",
    "State",
    "Stride",
    "Tail",
    "Truncated",
    "attend",
    "clear_caches",
    "core",
    "disjoint",
    "edge_weights",
    "layer",
    "load",
    "on_graph",
    "per_query_head",
    "register",
    "replace_attention",
    "select",
    "tie_linformer",
    "train",
]


_HOMES = {"load": "regard.tasks.trained_run", "train": "regard.tasks.training_call"}


def __getattr__(name: str) -> Any:
    """Import names of runs when they are first used: layers need no tasks."""
    if name not in _HOMES:
        raise AttributeError(f"module 'regard.api' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
