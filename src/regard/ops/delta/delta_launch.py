"""The launches of the Triton kernels of the delta rule, forward and backward, on ordinary tensors without autograd."""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.delta.delta_op import DeltaCall
from regard.ops.triton_support import HALVES, block_of, dot_precision, kernel_config


class DeltaChunks(NamedTuple):
    """What the forward pass leaves for the backward pass: matrices of every chunk of tokens."""

    inverse: Tensor  # (b g c p p) W
    lost: Tensor  # (b g c f f) N, in float32
    whole: Tensor  # (b g c) exp(L_last), in float32
    states: Tensor  # (b g c f e) before each chunk, in float32


def chunk_tokens(device: torch.device) -> int:
    """Return the tokens of a chunk on a device."""
    return kernel_config("delta", "any", device)["chunk"]


class _Sizes:
    """The sizes and constants that the kernels of one call share."""

    def __init__(self, call: DeltaCall) -> None:
        (self.b, self.g, self.n, self.f), self.e = call.k.shape, call.v.shape[-1]
        self.device, self.half = call.k.device, call.k.dtype in HALVES
        self.chunk = chunk_tokens(self.device)
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
        return torch.empty(self.b, self.g, *shape, dtype=torch.float32, device=self.device)


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
    w = torch.empty(sizes.b, sizes.g, c, chunk, chunk, dtype=k.dtype, device=k.device)
    lost, states, whole = sizes.empty(c, f, f), sizes.empty(c, f, e), sizes.empty(c)
    config = sizes.config("delta_prepare")
    grid = (c, sizes.b * sizes.g)
    strides = _strides(k, v, beta, decay)
    kernels.delta_prepare[grid](k, v, beta, decay, w, lost, states, whole, *strides, *sizes.lengths, **sizes.fixed, **config)
    after = sizes.empty(f, e)
    walk_states(sizes, lost, whole, states, state.contiguous(), after, back=False)
    out = v.new_empty(sizes.b, sizes.g * sizes.share, sizes.n, e)
    if q is not None:
        config = sizes.config("delta_outputs")
        strides = _strides(q, k, v, beta, decay, out)
        kernels.delta_outputs[sizes.grid(config)](
            q, k, v, beta, decay, w, states, out, *strides, *sizes.lengths, SHARE=sizes.share, **sizes.fixed, **config
        )
    return out, after, DeltaChunks(w, lost, whole, states)


def delta_chunk_grads(call: DeltaCall, saved: DeltaChunks, d_out: Tensor, d_state: Tensor) -> list[Tensor]:
    """Compute the gradients of q, k, v, beta, state and log_decay, of those that are there, in this order."""
    from regard.ops.delta import delta_grad_kernels as kernels

    call, sizes = _arranged(call), _Sizes(call)
    q, k, v, beta, state, decay = call
    d_out = _inner(d_out)
    common = {**sizes.fixed, "SHARE": sizes.share}
    dr = torch.empty(sizes.b, sizes.g, sizes.n, sizes.e, dtype=k.dtype, device=k.device)
    d_states = torch.empty_like(saved.states)
    config = sizes.config("delta_state_grads")
    strides = _strides(q, k, beta, decay, d_out)
    kernels.delta_state_grads[sizes.grid(config)](
        q, k, beta, decay, saved.inverse, d_out, dr, d_states, *strides, *sizes.lengths, **common, **config
    )
    d_first = sizes.empty(sizes.f, sizes.e)
    walk_states(sizes, saved.lost, saved.whole, d_states, d_state.contiguous(), d_first, back=True)
    u, dv = torch.empty_like(dr), torch.empty_like(v)
    config = sizes.config("delta_value_grads")
    strides = _strides(k, v, beta, decay, dv)
    kernels.delta_value_grads[sizes.grid(config)](
        *(k, v, beta, decay, saved.inverse, saved.states, d_states, u, dr, dv),
        *strides,
        *sizes.lengths,
        **sizes.fixed,
        **config,
    )
    dq, dk = (None if x is None else torch.empty_like(x) for x in (q, k))
    d_beta, d_decay = sizes.empty(sizes.n), sizes.empty(sizes.n)
    strides = _strides(q, k, v, beta, decay, d_out, dq, dk)
    kernels.delta_key_grads[(sizes.chunks, sizes.b * sizes.g)](
        *(q, k, v, beta, decay, saved.states, d_states, u, dr, d_out, dq, dk, d_beta, d_decay),
        *strides,
        *sizes.lengths,
        **common,
        **sizes.config("delta_key_grads"),
    )
    grads = [dq, dk, dv, d_beta.unsqueeze(-1).to(beta.dtype), d_first.to(state.dtype)]
    if decay is not None:
        grads.append(d_decay.unsqueeze(-1).to(decay.dtype))
    return [x for x in grads if x is not None]


def _steps(sizes: _Sizes, columns: int, direct: int, programs: int) -> int:
    """Return the chunks of a segment: all of them where they are few, or where many states keep the device busy."""
    if sizes.chunks <= direct or sizes.b * sizes.g * columns >= programs:
        return sizes.chunks
    return 1 << (isqrt(sizes.chunks) - 1).bit_length()


def walk_states(sizes: _Sizes, lost: Tensor, whole: Tensor, states: Tensor, first: Tensor, last: Tensor, *, back: bool) -> None:
    """Replace what every chunk adds (b g c f e) by the state before it, from a first state on, and write the last one.

    back: from the last chunk to the first. Many chunks are divided into segments: what each does is found first, for all at the
    same time, then the states between segments, then those inside of them.
    """
    from regard.ops.delta import triton_kernels as kernels

    config = sizes.config("delta_walk")
    columns = -(-sizes.e // config["BE"])
    steps = _steps(sizes, columns, config.pop("direct"), config.pop("programs"))
    segments, rows = -(-sizes.chunks // steps), sizes.b * sizes.g
    fixed = {x: sizes.fixed[x] for x in ("F", "E", "BF", "DOT")} | {"BACK": back} | config
    if segments == 1:
        kernels.delta_walk[(columns, 1, rows)](lost, whole, states, first, last, steps, sizes.chunks, **fixed)
        return
    own_lost, own_states = sizes.empty(segments, sizes.f, sizes.f), sizes.empty(segments, sizes.f, sizes.e)
    own_whole = sizes.empty(segments)
    every = columns + -(-sizes.f // config["BE"])
    kernels.delta_totals[(every, segments, rows)](
        lost, whole, states, own_lost, own_whole, own_states, steps, sizes.chunks, **fixed
    )
    kernels.delta_walk[(columns, 1, rows)](own_lost, own_whole, own_states, first, last, segments, segments, **fixed)
    ends = torch.empty_like(own_states)
    kernels.delta_walk[(columns, segments, rows)](lost, whole, states, own_states, ends, steps, sizes.chunks, **fixed)
