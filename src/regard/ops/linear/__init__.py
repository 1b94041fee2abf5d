"""Linear attention: sums over keys and values that tokens are added to in order. `api` has the functions."""

from regard.ops.backend import register_backend
from regard.ops.linear.reference import ReferenceLinear
from regard.ops.linear.torch import TorchLinear
from regard.ops.linear.triton import TritonLinear

register_backend("linear", TorchLinear())
register_backend("linear", ReferenceLinear())
register_backend("linear", TritonLinear(), first=True)
