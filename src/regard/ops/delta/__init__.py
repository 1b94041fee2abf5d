"""The delta rule: a state that keys and values are written into, each in place of what was stored. `api` has the functions."""

from regard.ops.backend import register_backend
from regard.ops.delta.reference import ReferenceDelta
from regard.ops.delta.torch import TorchDelta
from regard.ops.delta.triton import TritonDelta

register_backend("delta", TorchDelta())
register_backend("delta", ReferenceDelta())
register_backend("delta", TritonDelta(), first=True)
