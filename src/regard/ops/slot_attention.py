"""Attention of tokens to a few sums of them, projections included: the layer of linformer as one operation on CUDA devices.

Autograd would keep and start one node for every step of what is a handful of products. Sums of tokens with the weights of keys
and of values are one product, and the gradient of tokens is accumulated in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from regard.ops.dense import sdpa_composite
from regard.ops.few_keys import FEWEST_QUERIES, fits_few_keys, launch_few_keys, launch_few_keys_gradients
from regard.ops.joined_linear import sum_columns
from regard.ops.triton_support import HALVES, has_triton
from regard.transforms import differentiable_grads, needs_plain_ops


class SlotSizes(NamedTuple):
    """What tensors do not tell."""

    heads: int  # of queries
    groups: int  # of keys and values
    start: int  # position of the first token
    scale: float


class SlotTensors(NamedTuple):
    """What is differentiated."""

    x: Tensor  # (b n w)
    query: Tensor  # weights of the maps, (h d, w), (g d, w), (g e, w), and their biases, or none of those
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    to_k: Tensor  # (1 positions r): a weight for every position and slot
    to_v: Tensor


def takes_slots(x: Tensor, rank: int, d: int, e: int) -> bool:
    """Return whether `slot_attention` takes tokens x (b n w), for `rank` slots and heads of these sizes."""
    if not x.is_cuda or torch.compiler.is_compiling() or x.shape[1] < FEWEST_QUERIES or not has_triton() or needs_plain_ops():
        return False
    return x.dtype in HALVES and fits_few_keys(x, rank, max(d, e))


def slot_attention(inputs: SlotTensors, sizes: SlotSizes) -> Tensor:
    """Return softmax(q K'^T) V' (b h n e): slots K', V' (b g r .) are sums of all keys and values, q of all tokens.

    A slot without any weight but 0 is not seen.
    """
    return _SlotAttention.apply(sizes, *inputs)


def slot_attention_plain(inputs: SlotTensors, sizes: SlotSizes) -> Tensor:
    """Compute `slot_attention` by differentiable operations: the definition."""
    x, n = inputs.x, inputs.x.shape[1]
    to_k, to_v = (w[0, sizes.start : sizes.start + n] for w in (inputs.to_k, inputs.to_v))
    q = linear(x, inputs.query, inputs.query_bias).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
    k, v = linear(x, inputs.key, inputs.key_bias), linear(x, inputs.value, inputs.value_bias)
    k, v = ((w.mT @ y).unflatten(-1, (sizes.groups, -1)).transpose(1, 2) for w, y in ((to_k, k), (to_v, v)))
    bias, seen = _hidden_slots(torch.cat([to_k, to_v], 1))
    return sdpa_composite(q, k, v * seen, bias.unsqueeze(2), sizes.scale, False)


def _hidden_slots(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is added to the scores of slots (1 1 r), and 1 if one of them is seen, else 0, where all are shown.

    weights (n 2r): those of keys and of values.
    """
    largest = torch.linalg.vector_norm(weights.detach(), torch.inf, 0).unflatten(0, (2, -1)).amax(0)
    seen = (largest.amax(-1) > 0).to(weights.dtype)
    hidden = (largest == 0) & (seen > 0)
    return torch.zeros_like(largest).masked_fill_(hidden, -torch.inf)[None, None], seen


def _mapped(sums: Tensor, mass: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return sums of keys or values (b g r .) from sums of tokens (b r w), and the sum of the weights of each, (r)."""
    y = (sums.flatten(0, 1) @ weight.mT).unflatten(0, sums.shape[:2])
    if bias is not None:
        y.addcmul_(mass[:, None], bias[None])
    return y.unflatten(-1, (groups, -1)).transpose(1, 2)


def _map_gradients(
    parts: Tensor, seen: Tensor | None, sums: Tensor, mass: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of sums of tokens (b r w), of a map and its bias, and of masses (r).

    parts (b g parts r .): gradients of keys or values, to be summed.
    """
    b, g, _, r, d = parts.shape
    grad = weight.new_empty(b, r, g, d)
    total = parts.sum(2).transpose(1, 2)
    grad.copy_(total if seen is None else total * seen)
    flat = grad.view(b * r, g * d)
    dsums, dweight = (flat @ weight).view(b, r, -1), flat.mT @ sums.flatten(0, 1)
    if bias is None:
        return dsums, dweight, None, None
    return dsums, dweight, flat.mT @ mass.repeat(b), (flat @ bias).view(b, r).sum(0)


def _position_gradients(dweights: Tensor, dmass: Tensor | None, like: Tensor, start: int) -> Tensor:
    """Return the gradient of all weights (1 positions r), from those of positions start ... (n r)."""
    n, found = len(dweights), torch.empty_like(like)
    found[:, :start] = 0
    found[:, start + n :] = 0
    found[0, start : start + n] = dweights if dmass is None else dweights + dmass
    return found


class _SlotAttention(torch.autograd.Function):
    """The products and kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, sizes: SlotSizes, *inputs: Any) -> Tensor:
        given = SlotTensors(*inputs)
        x = given.x.contiguous()
        b, n, _ = x.shape
        weights = torch.cat([one[0, sizes.start : sizes.start + n] for one in (given.to_k, given.to_v)], 1)  # (n 2r)
        sums = torch.bmm(weights.mT.expand(b, -1, -1), x).unflatten(1, (2, -1)).transpose(0, 1).contiguous()  # (2 b r w)
        mass = weights.sum(0).view(2, -1)
        bias, seen = _hidden_slots(weights)
        bias = bias.expand(b, -1, -1)
        k = _mapped(sums[0], mass[0], given.key, given.key_bias, sizes.groups)
        v = _mapped(sums[1], mass[1], given.value, given.value_bias, sizes.groups)
        q = linear(x, given.query, given.query_bias).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        ctx.save_for_backward(*given, q, k, v, bias, seen, weights, sums, mass)
        ctx.sizes = sizes
        return launch_few_keys(q, k, v, bias, sizes.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, sizes = ctx.saved_tensors, ctx.sizes
        given = SlotTensors(*saved[:9])
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return None, *differentiable_grads(lambda *x: (slot_attention_plain(SlotTensors(*x), sizes),), given, (grad,))
        q, k, v, bias, seen, weights, sums, mass = saved[9:]
        (b, n, w), r = given.x.shape, sums.shape[2]
        dq, dk, dv = launch_few_keys_gradients((q, k, v, bias), grad, sizes.scale)
        dsums_k, dkey, dkey_bias, dmass_k = _map_gradients(dk, None, sums[0], mass[0], given.key, given.key_bias)
        dsums_v, dvalue, dvalue_bias, dmass_v = _map_gradients(dv, seen, sums[1], mass[1], given.value, given.value_bias)
        dsums = torch.cat([dsums_k, dsums_v], 1)
        flat = dq.transpose(1, 2).reshape(b * n, -1)
        dx = (flat @ given.query).view(b, n, w)
        dx.baddbmm_(weights.expand(b, -1, -1), dsums)
        x = given.x.reshape(b * n, w)
        dweights = torch.bmm(given.x, dsums.mT).sum(0)
        dto_k = _position_gradients(dweights[:, :r], dmass_k, given.to_k, sizes.start)
        dto_v = _position_gradients(dweights[:, r:], dmass_v, given.to_v, sizes.start)
        dquery_bias = None if given.query_bias is None else sum_columns(flat)
        return None, dx, flat.mT @ x, dquery_bias, dkey, dkey_bias, dvalue, dvalue_bias, dto_k, dto_v
