"""The launches of the Triton kernels of the delta rule, forward and backward, on ordinary tensors without autograd."""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.delta.delta_op import DeltaCall
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, block_of, dot_precision, kernel_config


class DeltaChunks(NamedTuple):
    """What the forward pass leaves for the backward pass: matrices of every chunk of tokens."""

    inverse: Tensor  # (b g c p p) W, in the type of the keys
    lost: Tensor  # (b g c f f) N: see `turn_type`
    whole: Tensor  # (b g c) exp(L_last), in float32
    states: Tensor  # (b g c f e) before each chunk, in the type of the keys, which products of them have


def turn_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of N: its elements are at most about 1, where float16 has the digits that tensor cores use of float32."""
    return torch.float16 if dtype in HALVES else torch.float32


def chunk_tokens(k: Tensor) -> int:
    """Return the tokens of a chunk for the type and the device of the keys."""
    return kernel_config("delta", "half" if k.dtype in HALVES else "float", k.device)["chunk"]


class _Sizes:
    """The sizes and constants that the kernels of one call share."""

    def __init__(self, call: DeltaCall) -> None:
        (self.b, self.g, self.n, self.f), self.e = call.k.shape, call.v.shape[-1]
        self.device, self.dtype, self.half = call.k.device, call.k.dtype, call.k.dtype in HALVES
        self.chunk = chunk_tokens(call.k)
        self.chunks = -(-self.n // self.chunk)
        self.share = 0 if call.q is None else call.q.shape[1] // self.g
        self.precision = _precision(call.k)
        self.fixed = {
            "F": self.f,
            "E": self.e,
            "BF": block_of(self.f, self.device),
            "C": self.chunk,
            "DECAYS": call.log_decay is not None,
            "DOT": self.precision,
        }
        self.lengths = (self.n, self.chunks, self.g)

    def config(self, kernel: str) -> dict[str, Any]:
        """Return the tile sizes of a kernel for these types and head sizes."""
        kind = "half" if self.half else "float"
        found = dict(kernel_config(kernel, f"{kind} {self.fixed['BF']}", self.device))
        if "BE" in found:
            found["BE"] = min(found["BE"], block_of(self.e, self.device))
        return found

    def grid(self, config: dict[str, Any]) -> tuple[int, int, int]:
        """Return a program for every chunk, state and block of value columns."""
        return self.chunks, self.b * self.g, -(-self.e // config["BE"])

    def empty(self, *shape: int) -> Tensor:
        """Return float32 numbers (b g ...) of a call."""
        return self.typed(torch.float32, *shape)

    def typed(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return numbers (b g ...) of a call."""
        return torch.empty(self.b, self.g, *shape, dtype=dtype, device=self.device)


def _precision(x: Tensor) -> str:
    """Return how products are computed: float32 as three products of tensor cores, which err like one of float32."""
    found = dot_precision(x.dtype)
    return "tf32x3" if found == "ieee" and x.is_cuda else found


def _inner(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension lies side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor | None) -> list[int]:
    """List the strides of all but the last of four dimensions; zeros for a tensor that is not there."""
    found: list[int] = []
    for x in tensors:
        found += (0, 0, 0) if x is None else x.stride()[:3]
    return found


def _arranged(call: DeltaCall) -> DeltaCall:
    q = None if call.q is None else _inner(call.q)
    return call._replace(q=q, k=_inner(call.k), v=_inner(call.v))


def delta_chunks(call: DeltaCall) -> tuple[Tensor, Tensor, DeltaChunks]:
    """Compute out (b h n e), the state (b g f e) in float32 after the last token, and the matrices of all chunks.

    Without queries, out has no heads.
    """
    from regard.ops.delta import triton_kernels as kernels

    call, sizes = _arranged(call), _Sizes(call)
    q, k, v, beta, state, decay = call
    c, f, e, chunk = sizes.chunks, sizes.f, sizes.e, sizes.chunk
    w, lost = sizes.typed(k.dtype, c, chunk, chunk), sizes.typed(turn_type(k.dtype), c, f, f)
    new, whole = sizes.empty(c, f, e), sizes.empty(c)
    config = sizes.config("delta_prepare")
    grid = (c, sizes.b * sizes.g)
    strides = _strides(k, v, beta, decay)
    tensors: tuple[Tensor | None, ...] = (k, v, beta, decay, w, lost, new, whole)
    launch_kernel(kernels.delta_prepare, grid, tensors, (*strides, *sizes.lengths), {**sizes.fixed, **config})
    after = sizes.empty(f, e)
    states = walk_states(sizes, lost, whole, new, state.contiguous(), after, back=False)
    del new  # its memory is free for out
    out = v.new_empty(sizes.b, sizes.n, sizes.g * sizes.share, e).transpose(1, 2)  # a layer joins the heads of a token
    if q is not None:
        config = sizes.config("delta_outputs")
        strides = _strides(q, k, v, beta, decay, out)
        tensors = (q, k, v, beta, decay, w, states, out)
        constants = {"SHARE": sizes.share, **sizes.fixed, **config}
        launch_kernel(kernels.delta_outputs, sizes.grid(config), tensors, (*strides, *sizes.lengths), constants)
    return out, after, DeltaChunks(w, lost, whole, states)


def delta_chunk_grads(call: DeltaCall, saved: DeltaChunks, d_out: Tensor, d_state: Tensor) -> list[Tensor]:
    """Compute the gradients of q, k, v, beta, state and log_decay, of those that are there, in this order."""
    from regard.ops.delta import delta_grad_kernels as kernels

    call, sizes = _arranged(call), _Sizes(call)
    q, k, v, beta, state, decay = call
    d_out = _inner(d_out)
    common = {**sizes.fixed, "SHARE": sizes.share}
    dr, new = sizes.typed(k.dtype, sizes.n, sizes.e), sizes.empty(*saved.states.shape[2:])
    config = sizes.config("delta_state_grads")
    strides = _strides(q, k, beta, decay, d_out)
    tensors: tuple[Tensor | None, ...] = (q, k, beta, decay, saved.inverse, d_out, dr, new)
    launch_kernel(kernels.delta_state_grads, sizes.grid(config), tensors, (*strides, *sizes.lengths), {**common, **config})
    d_first = sizes.empty(sizes.f, sizes.e)
    d_states = walk_states(sizes, saved.lost, saved.whole, new, d_state.contiguous(), d_first, back=True)
    del new  # its memory is free for gradients
    u, dv = torch.empty_like(dr), torch.empty_like(v)
    config = sizes.config("delta_value_grads")
    strides = _strides(k, v, beta, decay, dv)
    tensors = (k, v, beta, decay, saved.inverse, saved.states, d_states, u, dr, dv)
    launch_kernel(kernels.delta_value_grads, sizes.grid(config), tensors, (*strides, *sizes.lengths), {**sizes.fixed, **config})
    dq, dk = (None if x is None else torch.empty_like(x) for x in (q, k))
    d_beta, d_decay = sizes.empty(sizes.n), None if decay is None else sizes.empty(sizes.n)
    slope = None if decay is None else sizes.empty(sizes.share, sizes.n)
    if q is not None:
        strides = _strides(q, k, decay, d_out, dq)
        tensors = (q, k, decay, saved.states, u, d_out, dq, slope)
        constants = {**common, **sizes.config("delta_query_grads")}
        grid = (sizes.chunks, sizes.b * q.shape[1])
        launch_kernel(kernels.delta_query_grads, grid, tensors, (*strides, *sizes.lengths), constants)
    strides = _strides(q, k, v, beta, decay, d_out, dk)
    tensors = (q, k, v, beta, decay, saved.states, d_states, u, dr, d_out, slope, dk, d_beta, d_decay)
    constants = {**common, **sizes.config("delta_key_grads")}
    launch_kernel(kernels.delta_key_grads, (sizes.chunks, sizes.b * sizes.g), tensors, (*strides, *sizes.lengths), constants)
    grads = [dq, dk, dv, d_beta.unsqueeze(-1).to(beta.dtype), d_first.to(state.dtype)]
    if decay is not None and d_decay is not None:
        grads.append(d_decay.unsqueeze(-1).to(decay.dtype))
    return [x for x in grads if x is not None]


def _steps(sizes: _Sizes, columns: int, direct: int, programs: int) -> int:
    """Return the chunks of a segment: all of them where they are few, or where many states keep the device busy."""
    if sizes.chunks <= direct or sizes.b * sizes.g * columns >= programs:
        return sizes.chunks
    return 1 << (isqrt(sizes.chunks) - 1).bit_length()


def walk_states(sizes: _Sizes, lost: Tensor, whole: Tensor, new: Tensor, first: Tensor, last: Tensor, *, back: bool) -> Tensor:
    """Return the state before every chunk (b g c f e), from a first state on and what each adds, and write the last one.

    back: from the last chunk to the first. Many chunks are divided into segments: what each does is found first, for all at the
    same time, then the states between segments, then those inside of them.
    """
    from regard.ops.delta import triton_kernels as kernels

    config = sizes.config("delta_walk")
    columns = -(-sizes.e // config["BE"])
    steps = _steps(sizes, columns, config.pop("direct"), config.pop("programs"))
    segments, rows = -(-sizes.chunks // steps), sizes.b * sizes.g
    fixed = {x: sizes.fixed[x] for x in ("F", "E", "BF", "DOT")} | {"BACK": back} | config
    states = sizes.typed(sizes.dtype, *new.shape[2:]) if sizes.half else new
    lengths = (steps, sizes.chunks)
    if segments == 1:
        launch_kernel(kernels.delta_walk, (columns, 1, rows), (lost, whole, new, states, first, last), lengths, fixed)
        return states
    f, e = sizes.f, sizes.e
    own_lost, own_whole, own_new = sizes.typed(lost.dtype, segments, f, f), sizes.empty(segments), sizes.empty(segments, f, e)
    every = columns + -(-f // config["BE"])
    tensors = (lost, whole, new, own_lost, own_whole, own_new)
    launch_kernel(kernels.delta_totals, (every, segments, rows), tensors, lengths, fixed)
    ends = torch.empty_like(own_new)
    tensors = (own_lost, own_whole, own_new, own_new, first, last)
    launch_kernel(kernels.delta_walk, (columns, 1, rows), tensors, (segments, segments), fixed)
    launch_kernel(kernels.delta_walk, (columns, segments, rows), (lost, whole, new, states, own_new, ends), lengths, fixed)
    return states
