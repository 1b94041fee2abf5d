"""Attention over all pairs by scores that the fused kernels of PyTorch do not have. `pair_op` has the function."""

from regard.ops.backend import register_backend
from regard.ops.pair.reference import ReferencePairs
from regard.ops.pair.torch import TorchPairs
from regard.ops.pair.triton import TritonPairs

register_backend("pair", TorchPairs())
register_backend("pair", ReferencePairs())
register_backend("pair", TritonPairs(), first=True)
