"""Tile attention of two streams side by side: ordinary tokens, and special tokens with projections of their own.

    out_i = attention of q_i to k, v over a pattern, or for special i of q'_i to k', v' over all keys

q, k and v hold both streams in the last dimension: (b h n 2d). The special stream is computed up to its last token alone, and its
results replace those rows. Gradients of both streams are written side by side, as their projections read them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.composite import tile_attention_composite
from regard.ops.dropout_hash import draw_seed
from regard.ops.joined_linear import gradient_buffers
from regard.ops.kernel_launch import SharedConstants, tensor_key
from regard.ops.tile.call import HeadPlans, TileCall
from regard.ops.tile.tile_launch import TritonPass
from regard.ops.tile.tile_op import HeadPatterns, heads_by_plan
from regard.ops.tile.triton import TritonTiles
from regard.patterns import Rows
from regard.patterns.tiles import MASKED_SCORE, Span
from regard.transforms import differentiable_grads


class StreamCall(NamedTuple):
    """One call: the patterns of the ordinary stream and of the special one, whose rows are the special tokens."""

    local: HeadPatterns
    special: HeadPatterns
    rows: Rows
    causal: bool
    scale: float
    dropout: float


class StreamPass:
    """The two passes of all calls with one signature."""

    def __init__(self, call: StreamCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        n, m = q.shape[2], k.shape[2]
        tokens = call.rows.bound(n, m).positions(0, n)
        self.end = int(tokens.max()) + 1 if len(tokens) else 0
        self.index = None if self.end == len(tokens) else SharedConstants(tokens.to(q.device))
        self.call = call
        self.plans = tuple(
            heads_by_plan(own.each, Span(0, size, 0, m), call.causal) for own, size in ((call.local, n), (call.special, self.end))
        )
        self.passes: list[TritonPass] = []
        self.size = 0
        if self.end == 0:
            return
        found = [_written_pass(*one) for one in zip(self.tile_calls(q, k, v, (None, None)), self.plans, strict=True)]
        strides = [x.stride() for x in gradient_buffers(*(torch.empty(x.shape, device="meta") for x in (q, k, v)))]
        for run in found:
            if run is None:
                return
            run.grads = [(shape, own) for (shape, _), own in zip(run.grads, strides, strict=True)]
            self.passes.append(run)
        self.size = sum(run.size for run in self.passes)

    @property
    def ready(self) -> bool:
        """Return whether kernels take both streams."""
        return len(self.passes) == len(self.plans)

    def tile_calls(self, q: Tensor, k: Tensor, v: Tensor, seeds: tuple[Tensor | None, ...]) -> list[TileCall]:
        """Return the calls of the two streams."""
        streams = zip(*(x.chunk(2, -1) for x in (q, k, v)), seeds, (q.shape[2], self.end), strict=True)
        scale, dropout = self.call.scale, self.call.dropout
        return [TileCall(x[:, :, :size], y, z, None, None, seed, scale, dropout) for x, y, z, seed, size in streams]

    def replace_rows(self, out: Tensor, apart: Tensor) -> None:
        """Write the rows of special tokens (b h end .) into those of all tokens (b h n .)."""
        if self.index is None:
            out[:, :, : self.end] = apart
            return
        (tokens,) = self.index.read()
        out.index_copy_(2, tokens, apart.index_select(2, tokens))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seeds: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return out (b h n e), and the log-sum-exp of both streams: that of special tokens hides them from the ordinary one."""
        local, special = self.tile_calls(q, k, v, seeds)
        out, lse = self.passes[0].forward(local)
        apart, special_lse = self.passes[1].forward(special)
        self.replace_rows(out, apart)
        self.replace_rows(lse[..., None], torch.full_like(special_lse, MASKED_SCORE)[..., None])
        return out, lse, special_lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, seeds: tuple[Tensor | None, ...], found: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, given the results of `forward`."""
        out, lse, special_lse = found
        local, special = self.tile_calls(q, k, v, seeds)
        whole = gradient_buffers(q, k, v)
        dq, dk, dv = (x.chunk(2, -1) for x in whole)
        self.passes[0].backward(local, out, lse, grad, None, (dq[0], dk[0], dv[0]))
        rows = slice(None, self.end)
        into = dq[1][:, :, rows], dk[1], dv[1]
        self.passes[1].backward(special, out[:, :, rows], special_lse, grad[:, :, rows], None, into)
        dq[1][:, :, self.end :].zero_()
        return whole

    def composite(self, q: Tensor, k: Tensor, v: Tensor, seeds: tuple[Tensor | None, ...]) -> Tensor:
        """Compute out in differentiable operations: the definition."""
        calls = self.tile_calls(q, k, v, seeds)
        out, apart = (tile_attention_composite(plans, call)[0] for plans, call in zip(self.plans, calls, strict=True))
        special = self.call.rows.bound(q.shape[2], k.shape[2]).special(torch.arange(self.end, device=q.device))
        front = torch.where(special[:, None], apart, out[:, :, : self.end])
        return torch.cat([front, out[:, :, self.end :]], 2)


def _written_pass(call: TileCall, plans: HeadPlans) -> TritonPass | None:
    """Return a pass of its own whose gradients may be written anywhere; None where kernels do not take the call so."""
    backend = TritonTiles()
    if backend.refuses(call, plans) is not None:
        return None
    run = backend.prepare(call, plans)
    return run if isinstance(run, TritonPass) and run.sums == run.dtype else None


@signature_cache
def _stream_pass(key: tuple[Any, ...], call: StreamCall, q: Tensor, k: Tensor, v: Tensor) -> StreamPass:  # noqa: ARG001
    return StreamPass(call, q, k, v)


def stream_attention(q: Tensor, k: Tensor, v: Tensor, call: StreamCall) -> Tensor | None:
    """Return out (b h n e) of both streams, q, k and v (b h n 2d) at positions 0, 1, ...; None where kernels do not take it."""
    precision = torch.get_float32_matmul_precision()
    texts = call.local.text, call.special.text, call.rows, *call[3:], precision, q.get_device()
    run = _stream_pass((*texts, *tensor_key(q), *tensor_key(k), *tensor_key(v)), call, q, k, v)
    if not run.ready:
        return None
    seeds = (draw_seed(q.device), draw_seed(q.device)) if call.dropout else (None, None)
    return _Streams.apply(q, k, v, *seeds, run)


class _Streams(torch.autograd.Function):
    """The passes for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, second: Tensor | None, run: StreamPass
    ) -> Tensor:
        found = run.forward(q, k, v, (first, second))
        ctx.save_for_backward(q, k, v, first, second, *found)
        ctx.run = run
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, first, second, *found = ctx.saved_tensors
        run, seeds = ctx.run, (first, second)
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(lambda *x: (run.composite(*x, seeds),), (q, k, v), (grad,)), None, None, None
        return *run.backward(q, k, v, seeds, tuple(found), grad), None, None, None
