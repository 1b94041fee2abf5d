"""Modules of torch.nn with any mechanism inside, and their exchange in a model that is there already."""

from regard.modules.attention_swap import replace_attention
from regard.modules.multihead_attention import MultiheadAttention

__all__ = ["MultiheadAttention", "replace_attention"]
