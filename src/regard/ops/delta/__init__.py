"""The delta rule: a state that keys and values are written into, each in place of what was stored. `api` has the functions."""

from regard.ops.backend import register_backend
from regard.ops.delta.reference import ReferenceDelta
from regard.ops.delta.torch import TorchDelta

register_backend("delta", TorchDelta())
register_backend("delta", ReferenceDelta())
