"""A softmax over features of queries and one over the tokens so far of keys, as linear attention takes them: the definition.

    out_i = sum_f softmax_f(q_i)_f sum_{j <= i} softmax_j(k_jf) v_j = sum_f mix_if S_if,   mix = softmax_f(q) / z

z and S are sums of exp(k - top), top_if the largest k_jf so far; a top that rises is a log decay of both. Units cancel in the
output, so that tops are constants for gradients. `running_softmax_launch.py` computes the same by kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.backend import AUTO
from regard.ops.linear.feature_maps import min_log_decay
from regard.ops.linear.linear_op import decayed_prefix_sum
from regard.ops.linear.prefix import cumulative_max
from regard.ops.triton_support import triton_cannot_run
from regard.transforms import needs_plain_ops

WIDEST_FEATURES = 256


class RunningSoftmax(NamedTuple):
    """What linear attention takes, and the sums behind the last token."""

    mix: Tensor  # (b h n f) how much of each sum a query takes
    keys: Tensor  # (b g n f) in units of exp(top) at their time
    log_decay: Tensor  # (b g n f) by which units grow
    z: Tensor  # (b g f)
    top: Tensor  # (b g f)


def running_softmax_plain(
    q: Tensor, k: Tensor, first_z: Tensor, first_top: Tensor, valid: Tensor | None, backend: str = AUTO
) -> RunningSoftmax:
    """Compute the features of q (b h n f) and k (b g n f) behind the sums (b g f) of earlier tokens; valid (b n): real tokens."""
    if valid is not None:
        k = k.masked_fill(~valid[:, None, :, None], -torch.inf)
    top = cumulative_max(k.detach(), first_top)
    before = torch.cat([first_top.unsqueeze(2), top[:, :, :-1]], 2)
    decay = (before - top).clamp(min=min_log_decay(k.dtype)).masked_fill(before == -torch.inf, 0)
    keys = (k - top.masked_fill(top == -torch.inf, 0)).exp()
    z = decayed_prefix_sum(keys, first_z, log_decay=decay, backend=backend)
    norm = z.clamp(min=1)  # the top itself counts 1, so it is less only where nothing was seen
    if q.shape[1] != k.shape[1]:
        norm = norm.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return RunningSoftmax(torch.softmax(q, -1) / norm, keys, decay, z[:, :, -1], top[:, :, -1])


def running_kernels_fit(q: Tensor, k: Tensor) -> bool:
    """Return whether kernels can compute the features of these queries and keys."""
    plain = needs_plain_ops() or q.dtype != k.dtype or q.numel() == 0
    return not plain and q.shape[-1] <= WIDEST_FEATURES and triton_cannot_run(q, k) is None


def running_softmax(q: Tensor, k: Tensor, first_z: Tensor, first_top: Tensor, valid: Tensor | None) -> RunningSoftmax:
    """Compute `running_softmax_plain` by kernels, of tensors that `running_kernels_fit`."""
    if torch.compiler.is_compiling():
        from regard.ops.linear.running_softmax_compiled import running_softmax_operator

        return RunningSoftmax(*running_softmax_operator(q, k, first_z, first_top, valid))
    from regard.ops.linear.running_softmax_launch import RunningSoftmaxFunction

    return RunningSoftmax(*RunningSoftmaxFunction.apply(q, k, first_z, first_top, valid))
