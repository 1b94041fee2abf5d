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
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, block_of, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

JOINED_TOKENS = 256  # whose weights a program joins
WEIGHT_TILE = 64  # tokens of a tile


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
    largest = torch.maximum(to_k.detach().abs().amax(0), to_v.detach().abs().amax(0))
    seen = (largest > 0).any()
    bias = torch.zeros_like(largest).masked_fill((largest == 0) & seen, -torch.inf)
    return sdpa_composite(q, k, v * seen, bias[None, None, None], sizes.scale, False)


class JoinedWeights(NamedTuple):
    """The weights of positions of keys and values together, and what depends on them alone."""

    both: Tensor  # (n 2r)
    mass: Tensor  # (2 r): the sum of the weights of a slot, which multiplies the bias of a map
    bias: Tensor  # (b 1 r): what is added to the scores of slots, -inf where a slot has no weight
    seen: Tensor  # (): 1 if one of them has a weight, else 0, where all are shown


def _joined_weights(to_k: Tensor, to_v: Tensor, b: int, n: int) -> JoinedWeights:
    """Join weights (positions r) of n tokens, the first of which is at the first position."""
    from regard.ops.slot_attention_kernels import finish_slot_weights, join_slot_weights

    r = to_k.shape[1]
    programs = ceil_div(n, JOINED_TOKENS)
    both, parts = to_k.new_empty(n, 2 * r), to_k.new_empty(programs, 4, r, dtype=torch.float32)
    sizes = {"R": block_of(r, to_k.device)}
    constants = {**sizes, "BN": WEIGHT_TILE}
    launch_kernel(join_slot_weights, (programs,), (to_k, to_v, both, parts), (n, r, JOINED_TOKENS), constants)
    mass, bias, seen = to_k.new_empty(2, r), parts.new_empty(r), parts.new_empty(())
    launch_kernel(finish_slot_weights, (1,), (parts, mass, bias, seen), (programs, r), sizes)
    return JoinedWeights(both, mass, bias.expand(b, 1, r), seen)


def _mapped(sums: Tensor, mass: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return sums of keys or values (b g r .) from sums of tokens (b r w), and the sum of the weights of each, (r)."""
    b, r, w = sums.shape
    y = (sums.view(b * r, w) @ weight.mT).view(b, r, -1)
    if bias is not None:
        y.addcmul_(mass[:, None], bias)
    return y.view(b, r, groups, -1).transpose(1, 2)


class MapGradients(NamedTuple):
    """Gradients of slots, summed, and what they add to those of biases and masses."""

    key: Tensor  # (b r, g d)
    value: Tensor  # (b r, g e)
    key_bias: Tensor | None
    value_bias: Tensor | None
    mass: Tensor | None  # (2r) in float32


def _map_gradients(parts_k: Tensor, parts_v: Tensor, given: SlotTensors, weights: JoinedWeights) -> MapGradients:
    """Sum the gradients of slots (b g parts r .)."""
    from regard.ops.slot_attention_kernels import slot_map_gradients

    (b, g, parts, r, d), e = parts_k.shape, parts_v.shape[-1]
    like, biased = given.x, given.key_bias is not None
    flat_k, flat_v = like.new_empty(b * r, g * d), like.new_empty(b * r, g * e)
    dmass, dbias_k, dbias_v = (parts_k.new_empty(b * g, 2 * r), parts_k.new_empty(b, g * d), parts_k.new_empty(b, g * e))
    device = like.device
    blocks = {"R": block_of(r, device), "D": d, "E": e, "BD": block_of(d, device), "BE": block_of(e, device)}
    known = (parts_k, parts_v, weights.mass, given.key_bias, given.value_bias, weights.seen)
    tensors = (*known, flat_k, flat_v, dmass, dbias_k, dbias_v)
    launch_kernel(slot_map_gradients, (2 * b * g,), tensors, (b * g, parts, r, g), {"BIASED": biased, **blocks})
    if not biased:
        return MapGradients(flat_k, flat_v, None, None, None)
    kind = like.dtype
    return MapGradients(flat_k, flat_v, sum_columns(dbias_k, kind), sum_columns(dbias_v, kind), sum_columns(dmass))


def _position_gradients(dweights: Tensor, dmass: Tensor | None, like: Tensor, start: int) -> list[Tensor]:
    """Return the gradients of all weights of keys and values (1 positions r), from those of every row (b n 2r)."""
    from regard.ops.slot_attention_kernels import slot_position_gradients

    (b, n, _), (_, positions, r) = dweights.shape, like.shape
    found = [torch.empty_like(like) for _ in range(2)]
    constants = {"BIASED": dmass is not None, "R": block_of(r, like.device), "BN": WEIGHT_TILE}
    numbers = (positions, start, n, r, b)
    launch_kernel(slot_position_gradients, (ceil_div(positions, WEIGHT_TILE),), (dweights, dmass, *found), numbers, constants)
    return found


class _SlotAttention(torch.autograd.Function):
    """The products and kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, sizes: SlotSizes, *inputs: Any) -> Tensor:
        given = SlotTensors(*inputs)
        x = given.x.contiguous()
        b, n, w = x.shape
        weights = _joined_weights(given.to_k[0, sizes.start :], given.to_v[0, sizes.start :], b, n)
        r = weights.mass.shape[1]
        sums = torch.bmm(weights.both.mT.expand(b, 2 * r, n), x).view(b, 2, r, w).transpose(0, 1).contiguous()
        k = _mapped(sums[0], weights.mass[0], given.key, given.key_bias, sizes.groups)
        v = _mapped(sums[1], weights.mass[1], given.value, given.value_bias, sizes.groups)
        q = linear(x, given.query, given.query_bias).view(b, n, sizes.heads, -1).transpose(1, 2)
        ctx.save_for_backward(*given, q, k, v, sums, *weights)
        ctx.sizes = sizes
        return launch_few_keys(q, k, v, weights.bias, sizes.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, sizes = ctx.saved_tensors, ctx.sizes
        given = SlotTensors(*saved[:9])
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return None, *differentiable_grads(lambda *x: (slot_attention_plain(SlotTensors(*x), sizes),), given, (grad,))
        q, k, v, sums, *rest = saved[9:]
        weights = JoinedWeights(*rest)
        (b, n, w), r = given.x.shape, sums.shape[2]
        dq, parts_k, parts_v = launch_few_keys_gradients((q, k, v, weights.bias), grad, sizes.scale)
        slots = _map_gradients(parts_k, parts_v, given, weights)
        dsums = torch.cat([(slots.key @ given.key).view(b, r, w), (slots.value @ given.value).view(b, r, w)], 1)
        dkey, dvalue = slots.key.mT @ sums[0].view(b * r, w), slots.value.mT @ sums[1].view(b * r, w)
        flat = dq.transpose(1, 2).reshape(b * n, -1)
        dx = (flat @ given.query).view(b, n, w)
        dx.baddbmm_(weights.both.expand(b, n, 2 * r), dsums)
        dweights = torch.bmm(given.x, dsums.mT)
        dto_k, dto_v = _position_gradients(dweights, slots.mass, given.to_k, sizes.start)
        dquery_bias = None if given.query_bias is None else sum_columns(flat)
        dquery = flat.mT @ given.x.reshape(b * n, w)
        return None, dx, dquery, dquery_bias, dkey, slots.key_bias, dvalue, slots.value_bias, dto_k, dto_v
