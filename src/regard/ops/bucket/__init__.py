"""Bucketed attention: softmax among tokens with the same label. `bucket_op` has the function."""

from regard.ops.backend import register_backend
from regard.ops.bucket.reference import ReferenceBuckets
from regard.ops.bucket.torch import TorchBuckets
from regard.ops.bucket.triton import TritonBuckets

register_backend("bucket", TorchBuckets())
register_backend("bucket", ReferenceBuckets())
register_backend("bucket", TritonBuckets(), first=True)
