"""Launch the backward kernels of linear attention: adjoint states, gradients of queries, keys and values, gradients of decays."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.kernel_launch import ALIGNMENT
from regard.ops.linear.triton_keys import linear_decay_grads, linear_gradients
from regard.ops.linear.triton_launch import (
    LaunchParts,
    LinearInputs,
    LinearLaunch,
    LinearStates,
    PairOfStates,
    features_adjacent,
    linear_launch,
    scan_segments,
    state_part,
)
from regard.ops.linear.triton_queries import linear_adjoint
from regard.ops.linear.triton_walk_grads import linear_walk_grads
from regard.ops.triton_support import kernel_config


class LinearGrads(NamedTuple):
    """Gradients of all tensors of a launch."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    state: Tensor | None
    log_decay: Tensor | None
    norm_state: Tensor | None


class _Adjoint(NamedTuple):
    """The adjoint states behind the segments."""

    states: Tensor | None  # (b g slots f e), or (b g f e) where it is the same for all; None: they are 0
    norms: Tensor | None
    slots: int
    first: PairOfStates | None  # the gradients of the states before the first token
    dots: Tensor | None  # (b g slots f) products of states and adjoints


def launch_backward(
    inputs: LinearInputs,
    kept: LinearStates,
    d_out: Tensor | None,
    d_norm: Tensor | None,
    d_last: Tensor | None,
    d_last_z: Tensor | None,
    *,
    decay_grad: bool,
    state_grad: bool = True,
    beside: bool = False,
    run: LinearLaunch | None = None,
) -> LinearGrads:
    """Return the gradients of all tensors, given those of out (b h n e), norm (b h n), and the last states.

    beside: gradients of keys and gates may be parts of one tensor, as keys and gates are.
    """
    run = run or linear_launch(inputs)
    x = run.inputs(inputs)
    decay_grad = decay_grad and x.log_decay is not None
    last = _given_last(run, x, d_last, d_last_z)
    own: tuple[Tensor | None, Tensor | None] = (None, None)
    dd = tile_sums = None
    if x.q is not None:
        if d_out is None:
            d_out = torch.zeros((), dtype=x.q.dtype, device=run.device).expand(run.b, run.h, run.n, run.e)
        d_out = features_adjacent(d_out)
        dd = _norm_grad(run, x, d_norm)
        alone = run.segs == 1 and last is None and not state_grad and not decay_grad
        if not alone or x.normalize:  # sums of one segment alone are the gradient of the state before it
            tile_sums = run.norms_of_tiles(run.h)
            own = _adjoint_sums(run, x, kept, d_out, dd, tile_sums)
        if alone:
            own = (None, None)
    adjoint = _adjoint_states(run, x, kept, own, last, decay_grad, state_grad)
    beside = beside and decay_grad and gates_beside_keys(x)
    d_k, into = _key_buffers(run, x, beside)
    d_q, d_v, products = _token_grads(run, x, kept, d_out, dd, adjoint, tile_sums, d_k, decay_grad)
    d_decay = _decay_grads(run, x, products, adjoint.dots, into) if adjoint.dots is not None else None
    d_state, d_norm_state = adjoint.first or (None, None)
    return LinearGrads(d_q, d_k, d_v, d_state, d_decay, d_norm_state)


def gates_beside_keys(x: LinearInputs) -> bool:
    """Return whether gates follow the keys of every token in memory, as the parts of one tensor that was split."""
    k, gates = x.k, x.log_decay
    if k is None or gates is None or not x.gate_root or gates.dtype != k.dtype or gates.stride()[:3] != k.stride()[:3]:
        return False
    size = k.element_size()
    aligned = (k.shape[-1] + gates.shape[-1]) * size % ALIGNMENT == 0  # otherwise kernels would store number by number
    return aligned and gates.data_ptr() == k.data_ptr() + k.shape[-1] * size


def _key_buffers(run: LinearLaunch, x: LinearInputs, beside: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room for the gradients of keys (b g n f), and beside them for those of gates."""
    if x.k is None:
        return None, None
    if not beside or x.log_decay is None:
        return run.tokens(run.g, run.f, x.k.dtype), None
    both = run.tokens(run.g, run.f + x.log_decay.shape[-1], x.k.dtype)
    return both[..., : run.f], both[..., run.f :]


def _given_last(run: LinearLaunch, x: LinearInputs, d_last: Tensor | None, d_last_z: Tensor | None) -> PairOfStates | None:
    """The gradients of the states behind the last token, or None if nothing depends on them."""
    if d_last is None and d_last_z is None:
        return None
    last = torch.zeros(x.state.shape, device=run.device) if d_last is None else d_last.float().contiguous()
    if x.norm_state is None:
        return last, None
    norms = torch.zeros(x.norm_state.shape, device=run.device) if d_last_z is None else d_last_z.float().contiguous()
    return last, norms


def _norm_grad(run: LinearLaunch, x: LinearInputs, d_norm: Tensor | None) -> Tensor | None:
    """The gradient of the norm (b h n): given, 0, or room for the kernel to compute it."""
    if not run.norm:
        return None
    if x.normalize:
        return run.new(run.b, run.h, run.n)
    if d_norm is None:
        return torch.zeros(run.b, run.h, run.n, device=run.device)
    return d_norm.float().contiguous()


def _adjoint_sums(
    run: LinearLaunch, x: LinearInputs, kept: LinearStates, d_out: Tensor, dd: Tensor | None, tile_sums: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What every segment and head adds to the adjoint, (b h slots f e) and (b h slots f).

    Fills dd if outputs are divided, and tile_sums (b h tiles f), what every tile adds to its norm.
    """
    own = run.slots(run.h, run.f, run.e)
    own_z = run.slots(run.h, run.f) if run.norm else None

    def parts() -> LaunchParts:
        width = state_part(run.bf, run.be)
        parts = run.bf // width
        heads = (run.h, run.h // run.g)
        numbers = (*run.strides(x.q, kept.levels, d_out), x.scale, run.n, run.segs, run.seg, run.norm_tiles, *heads)
        flags = {name: flag for name, flag in run.flags.items() if name != "HAS_VALID"}
        sizes = {"BF": width, "BE": run.be, "PARTS": parts, "NORMALIZE": run.divides, "TILE_NORMS": tile_sums is not None}
        constants = {**sizes, **flags, **run.product, **run.tiles("linear_adjoint")}
        return (parts * run.segs * run.b * run.h,), numbers, constants

    tensors = (x.q, kept.levels, d_out, kept.out, kept.den, dd, own, own_z, tile_sums)
    run.launch(("adjoint", d_out.stride(), d_out.dtype), linear_adjoint, tensors, parts)
    return own, own_z


def _adjoint_states(
    run: LinearLaunch,
    x: LinearInputs,
    kept: LinearStates,
    own: tuple[Tensor | None, Tensor | None],
    last: PairOfStates | None,
    decay_grad: bool,
    state_grad: bool,
) -> _Adjoint:
    """Scan from the last segment to the first, where there is something to scan."""
    if own[0] is None and last is None and not state_grad and not decay_grad:
        return _Adjoint(None, None, 1, None, None)
    if own[0] is None and last is not None and not run.decay:  # nothing reads, nothing decays: all tokens have the same adjoint
        return _Adjoint(*last, 1, last, None)
    first = run.new(*x.state.shape), run.new(*x.norm_state.shape) if x.norm_state is not None else None
    into = None
    if x.k is not None:
        into = run.slots(run.g, run.f, run.e, dtype=run.type), run.slots(run.g, run.f) if run.norm else None
    dots = run.slots(run.g, run.f) if decay_grad else None
    other = (kept.states, kept.norms) if decay_grad else None
    scan_segments(run, own, into, kept.decays, last, first, heads=run.h // run.g, reverse=True, other=other, dots=dots)
    states, norms = into or (None, None)
    return _Adjoint(states, norms, run.segs + 1, first, dots)


Products = tuple[Tensor | None, Tensor | None]


def _token_grads(
    run: LinearLaunch,
    x: LinearInputs,
    kept: LinearStates,
    d_out: Tensor | None,
    dd: Tensor | None,
    adjoint: _Adjoint,
    tile_sums: Tensor | None,
    d_k: Tensor | None,
    decay_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Products]:
    """Fill d_k (b g n f); the gradients of queries and values, and for those of decays the products q . dq and k . dk."""
    features, values = state_part(run.bf, run.be), state_part(run.be, run.bf)
    parts, ratio = run.bf // features, run.h // run.g
    d_q = d_v = qd = kd = None
    if x.q is not None:
        d_q = run.tokens(run.h, run.f, x.q.dtype)
        qd = _products(run, run.h, parts) if decay_grad else None
    if x.k is not None and x.v is not None:
        d_v = run.tokens(run.g, run.e, x.v.dtype)
        kd = _products(run, run.g, parts) if decay_grad else None

    walks = run.walks(x)
    wide = run.f if d_k is None else d_k.stride(1)

    def arguments() -> LaunchParts:
        tiles = run.tiles("linear_walk_grads") if walks else run.tiles("linear_gradients")
        sizes = (run.seg, run.state_slots(kept.states), adjoint.slots)
        numbers = (*run.strides(x.q, x.k, x.v, kept.levels, d_out), x.scale, run.n)
        there = {"HAS_STATE": run.has_states(kept.states), "HAS_ADJOINT": adjoint.states is not None, "DECAY_GRAD": decay_grad}
        constants = {"BF": run.bf, "BE": run.be, "NORMALIZE": run.divides, **there, **run.flags, **run.product, **tiles}
        if walks:
            programs = constants.pop("key_programs")
            constants["TOGETHER"] = programs == 1
            constants |= {"TILE_NORMS": kept.tile_norms is not None, "ADJOINT_NORMS": tile_sums is not None}
            numbers = (*numbers, run.segs, *sizes, run.norm_tiles, wide, run.h, ratio)
            return ((ratio + programs) * run.segs * run.b * run.g,), numbers, constants
        count = -(-run.n // tiles["C"])
        reading = 0 if x.q is None else ratio * parts
        writing = 0 if x.k is None else parts + run.be // values
        constants |= {"PF": features, "PE": values, "HAS_QUERIES": x.q is not None, "HAS_KEYS": x.k is not None}
        numbers = (*numbers, count, *sizes, run.b * run.h, run.b * run.g, wide, run.h, ratio)
        return ((reading + writing) * count * run.b * run.g,), numbers, constants

    given = (x.q, x.k, x.v, kept.levels, x.valid, d_out, kept.den, dd, kept.states, kept.norms)
    sums = (kept.tile_norms, tile_sums) if walks else ()
    tensors = (*given, adjoint.states, adjoint.norms, *sums, d_q, d_k, d_v, qd, kd)
    outer = None if d_out is None else (d_out.stride(), d_out.dtype)
    adjoint_kind = None if adjoint.states is None else (adjoint.states.dtype, adjoint.slots)
    kernel = linear_walk_grads if walks else linear_gradients
    run.launch(("gradients", outer, kept.states.dim(), adjoint_kind, wide), kernel, tensors, arguments)
    return d_q, d_v, (qd, kd)


def _products(run: LinearLaunch, heads: int, parts: int) -> Tensor:
    """Room for one number a token in every part of the features, or for one a feature."""
    return run.new(parts, run.b, heads, run.n) if run.decay == 1 else run.new(run.b, heads, run.n, run.f)


def _decay_grads(run: LinearLaunch, x: LinearInputs, products: Products, dots: Tensor, into: Tensor | None) -> Tensor:
    """The gradient of log decays or gates, in their type; into: room for it."""
    qd, kd = products
    assert x.log_decay is not None and kd is not None
    grads = run.new(*x.log_decay.shape, dtype=x.log_decay.dtype) if into is None else into
    sums = kd.shape[0] if run.decay == 1 else 1

    def parts() -> LaunchParts:
        config = dict(kernel_config("linear_decay_grads", run.key, run.device))
        width = 16 if run.decay == 1 else min(run.bf, 64)
        blocks = 1 if run.decay == 1 else -(-run.f // width)
        sizes = (run.n, run.segs, run.seg, run.b * run.h, run.b * run.g, run.g, run.h // run.g, sums)
        numbers = (*run.strides(x.log_decay, grads), x.gate_root, *sizes)
        there = {"HAS_VALID": x.valid is not None, "HAS_QUERIES": qd is not None, "GATES": x.gate_root > 0}
        widths = {"f": run.f, "BF": width, "C": config.pop("chunk"), "DECAY": run.decay}
        constants = {**widths, **there, "TYPE": run.product["TYPE"], **config}
        return (blocks * run.segs * run.b * run.g,), numbers, constants

    run.launch(("decays", grads.stride()), linear_decay_grads, (qd, kd, dots, x.log_decay, x.valid, grads), parts)
    return grads
