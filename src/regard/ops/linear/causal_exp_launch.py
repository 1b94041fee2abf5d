"""Launch the Triton kernels of causal attention by exponential random features, on ordinary tensors without autograd."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.linear import causal_exp_grad_kernels as grad_kernels
from regard.ops.linear import causal_exp_kernels as kernels
from regard.ops.linear.noncausal_launch import NoncausalInputs, NoncausalLaunch, noncausal_key, ready_inputs
from regard.ops.linear.triton_kernels import linear_scan
from regard.ops.linear.triton_launch import LaunchParts, features_adjacent
from regard.ops.linear.zero_state import is_zero_state
from regard.ops.triton_support import block_of, kernel_config

CAUSAL_RANDOM = "causal random"  # the feature of `NoncausalInputs`


def causal_inputs(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, directions: Tensor, log_norm: Tensor | None
) -> NoncausalInputs:
    """Return the arguments of a pass: queries (b h n d), keys (b g n d), values (b g n e), padding and features."""
    return NoncausalInputs(q, k, v, valid, directions, log_norm, CAUSAL_RANDOM)


class ExpState(NamedTuple):
    """Sums over tokens in units of exp(top)."""

    s: Tensor  # (b g f e)
    z: Tensor  # (b g f)
    top: Tensor  # (b g 1)


class CausalExpKept(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs and outputs."""

    s: Tensor  # (b g tiles f e) state before every tile since the start of its run, in the type of products
    z: Tensor  # (b g tiles f)
    tops: Tensor  # (b g tiles f) their units, to base 2
    run_s: Tensor  # (b g runs f e) state before every run
    run_z: Tensor
    run_tops: Tensor
    own: Tensor  # (b g blocks n) largest exponent of every key, in blocks of features
    begin: Tensor  # (b g tiles) largest exponent of all keys before a tile
    end: Tensor  # (b g tiles) and up to its end
    lse: Tensor  # (b h n) log to base 2 of the sum of the weights of a query
    w_logs: Tensor | None  # directions in the type of products that make exponents, if that is not their own
    w_grads: Tensor | None  # and in the type of other products


class CausalExpLaunch(NoncausalLaunch):
    """The sizes, flags and launches that all passes of one signature share."""

    def __init__(self, x: NoncausalInputs) -> None:
        super().__init__(x)
        sizes = kernel_config("causal_exp", self.key, self.device)
        self.chunk, self.tiles_of_run = sizes["chunk"], sizes["tiles"]
        self.tile_count = (self.n + self.chunk - 1) // self.chunk
        self.runs = (self.tile_count + self.tiles_of_run - 1) // self.tiles_of_run
        self.own_blocks = -(-self.f // self.config("causal_exp_sums")["BF"])
        self.lengths = (self.n, self.tile_count, self.runs, self.tiles_of_run)
        self.heads = (self.h, self.ratio, self.h // self.bounds, self.g // self.bounds)

    def config(self, kernel: str) -> dict[str, Any]:
        """The tokens in a tile, C, the features in a tile, BF, and options of a kernel."""
        found = dict(kernel_config(kernel, self.key, self.device))
        return {"C": self.chunk, "BF": min(found.pop("features"), block_of(self.f, self.device)), **found}

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Room for `count` states of every key-value head, and for one number of each of their features."""
        at = (self.b, self.g, count, self.f)
        return self.new(*at, self.e, dtype=dtype), self.new(*at)


@signature_cache
def _prepared_causal(key: Hashable, x: NoncausalInputs) -> CausalExpLaunch:  # noqa: ARG001 - the key of the cache
    return CausalExpLaunch(x)


def empty_results(x: NoncausalInputs) -> tuple[Tensor, ExpState, CausalExpKept]:
    """Return tensors with the shapes and layouts of what `launch_causal_exp` returns; sizes may be symbols."""
    run = CausalExpLaunch(x)
    return run.tokens(run.h, run.n, run.e, x.q.dtype), _new_last(run), _new_kept(run)


def _launch_of(inputs: NoncausalInputs) -> tuple[CausalExpLaunch, NoncausalInputs]:
    x = ready_inputs(inputs)
    return _prepared_causal(noncausal_key(x), x), x


def launch_causal_exp(inputs: NoncausalInputs, first: ExpState) -> tuple[Tensor, ExpState, CausalExpKept]:
    """Return out (b h n e), the state behind the last token, and what the backward pass needs."""
    run, x = _launch_of(inputs)
    kept, sums = _new_kept(run), (*run.states(run.runs), run.new(run.b, run.g, run.runs, run.f))
    most = run.new(run.b, run.g, run.runs, run.own_blocks)
    kv = (*x.k.stride()[:3], *x.v.stride()[:3])
    padded = {"HAS_VALID": x.valid is not None}

    def sum_parts() -> LaunchParts:
        numbers = (*kv, run.root, *run.lengths, run.g, run.heads[3])
        constants = run.constants(run.config("causal_exp_sums"), **padded)
        return (run.own_blocks * run.runs * run.b * run.g,), numbers, constants

    tensors = (x.k, x.v, x.directions, x.log_norm, x.valid, kept.s, kept.z, kept.tops, kept.own, *sums, most)
    run.launch("sums", kernels.causal_exp_sums, tensors, sum_parts)
    last = _scan(run, x, first, kept, (*sums, most))
    out = run.tokens(run.h, run.n, run.e, x.q.dtype)

    def read_parts() -> LaunchParts:
        numbers = (*x.q.stride()[:3], *kv, run.root, *run.lengths, *run.heads)
        sizes = {"ALL": block_of(run.f, run.device), "OWN_BLOCKS": run.own_blocks}
        constants = run.constants(run.config("causal_exp_read"), **sizes, **padded)
        return (run.tile_count * run.b * run.h,), numbers, constants

    w = x.directions if kept.w_logs is None else kept.w_logs
    given = (x.q, x.k, x.v, w, x.log_norm, x.valid, *kept[:7], out, kept.lse, kept.begin, kept.end)
    run.launch("read", kernels.causal_exp_read, given, read_parts)
    return out, last, kept


def _new_kept(run: CausalExpLaunch) -> CausalExpKept:
    """Room for all that is kept."""
    tiles, heads = run.tile_count, (run.b, run.g)
    copies = [run.new(run.f, run.d, dtype=t) if run.copies else None for t in (torch.float16, torch.bfloat16)]
    begin, end, lse = run.new(*heads, tiles), run.new(*heads, tiles), run.new(run.b, run.h, run.n)
    before = (*run.states(tiles, run.type), run.new(*heads, tiles, run.f))
    runs = (*run.states(run.runs), run.new(*heads, run.runs, run.f))
    return CausalExpKept(*before, *runs, run.new(*heads, run.own_blocks, run.n), begin, end, lse, *copies)


def _new_last(run: CausalExpLaunch) -> ExpState:
    """Room for the state behind the last token."""
    return ExpState(run.new(run.b, run.g, run.f, run.e), run.new(run.b, run.g, run.f), run.new(run.b, run.g, 1))


def _scan(run: CausalExpLaunch, x: NoncausalInputs, first: ExpState, kept: CausalExpKept, sums: tuple[Tensor, ...]) -> ExpState:
    """Fill the states before all runs; the state behind the last token."""
    last = _new_last(run)
    given: tuple[Tensor | None, ...] = (None, None, None)
    if not is_zero_state(first.s):
        given = tuple(t.detach().float().contiguous() for t in first)

    def parts() -> LaunchParts:
        config = dict(kernel_config("causal_exp_scan", run.key, run.device))
        sizes = {"f": run.f, "d": run.d, "e": run.e, "BD": run.sizes["BD"], "BE": run.sizes["BE"], "SB": config.pop("segments")}
        numbers = (math.log(run.f) / 2, run.runs, run.runs * run.own_blocks)
        constants = {**sizes, "HAS_FIRST": given[0] is not None, "COPY": run.copies, **config}
        return (run.b * run.g * run.f,), numbers, constants

    tensors = (*sums, *given, x.directions, *kept[3:6], *last, kept.w_logs, kept.w_grads)
    run.launch(("scan", given[0] is None), kernels.causal_exp_scan, tensors, parts)
    return last


class CausalExpGrads(NamedTuple):
    """Gradients of a pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_norm: Tensor | None
    s: Tensor  # of the state before the first token
    z: Tensor


def launch_causal_exp_grads(
    inputs: NoncausalInputs, kept: CausalExpKept, out: Tensor, d_out: Tensor, d_last: tuple[Tensor | None, Tensor | None]
) -> CausalExpGrads:
    """Return all gradients, given those of out (b h n e), and of the sums behind the last token."""
    run, x = _launch_of(inputs)
    d_out = features_adjacent(d_out)
    delta, d_norm = run.new(run.b, run.h, run.n), None
    if x.log_norm is not None:
        d_norm = run.new(run.b, run.g, (run.ratio + 1) * run.tile_count)
    w_logs, w_grads = (x.directions if w is None else w for w in (kept.w_logs, kept.w_grads))
    directed = (w_logs, w_grads, x.log_norm, x.valid)
    kind = d_out.stride(), d_out.dtype
    tokens = [*x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *d_out.stride()[:3], run.root, *run.lengths]
    every = 0 if d_norm is None else d_norm.shape[2]
    d_q = run.tokens(run.h, run.n, run.d, x.q.dtype)

    def parts_of(config: dict[str, Any], heads: int, **more: Any) -> LaunchParts:
        more |= {"OWN_BLOCKS": run.own_blocks, "HAS_VALID": x.valid is not None}
        constants = run.constants(config, **more)
        return (run.tile_count * run.b * heads,), (*tokens, every, *run.heads), constants

    tensors = (x.q, x.k, x.v, *directed, *kept[:8], kept.lse, out, d_out, delta, d_q, d_norm)
    parts = lambda: parts_of(run.config("causal_exp_query_grads"), run.h)  # noqa: E731
    run.launch(("query grads", *kind), grad_kernels.causal_exp_query_grads, tensors, parts)
    near, far, of_first = _adjoint(run, x, kept, w_logs, delta, d_out, d_last)
    d_k, d_v = run.tokens(run.g, run.n, run.d, x.k.dtype), run.tokens(run.g, run.n, run.e, x.v.dtype)
    given = (x.q, x.k, x.v, *directed, *kept[6:9], *near, *far, kept.lse, delta, d_out, d_k, d_v, d_norm)
    parts = lambda: parts_of(run.config("causal_exp_key_grads"), run.g, GROUPED=run.ratio > 1)  # noqa: E731
    run.launch(("key grads", *kind), grad_kernels.causal_exp_key_grads, given, parts)
    of_norm = None
    if x.log_norm is not None and d_norm is not None:
        of_norm = d_norm.sum((0, 2)).sum_to_size(x.log_norm.shape).to(x.log_norm.dtype)
    return CausalExpGrads(d_q, d_k, d_v, of_norm, *of_first)


PairOfSums = tuple[Tensor, Tensor]


def _adjoint(
    run: CausalExpLaunch,
    x: NoncausalInputs,
    kept: CausalExpKept,
    w: Tensor | None,
    delta: Tensor,
    d_out: Tensor,
    d_last: tuple[Tensor | None, Tensor | None],
) -> tuple[PairOfSums, PairOfSums, PairOfSums]:
    """What lies behind every tile in its run, behind every run, and the gradients of the sums before the first token."""
    near, own = run.states(run.tile_count, run.type), run.states(run.runs + 1)
    decays = torch.empty_like(own[1])

    def parts() -> LaunchParts:
        numbers = (*x.q.stride()[:3], *d_out.stride()[:3], run.root, *run.lengths, *run.heads[:3])
        config = run.config("causal_exp_adjoint")
        blocks = -(-run.f // config["BF"])
        return (blocks * run.runs * run.b * run.g,), numbers, run.constants(config)

    tensors = (x.q, w, x.log_norm, kept.begin, kept.end, kept.lse, delta, d_out, *near, *own, decays)
    run.launch(("adjoint", d_out.stride(), d_out.dtype), grad_kernels.causal_exp_adjoint, tensors, parts)
    far, of_first = run.states(run.runs + 1), (run.new(run.b, run.g, run.f, run.e), run.new(run.b, run.g, run.f))
    last: tuple[Tensor | None, Tensor | None] = (None, None)
    if d_last[0] is not None or d_last[1] is not None:
        s, z = (torch.zeros_like(t) if g is None else g.float() for g, t in zip(d_last, of_first, strict=True))
        last = s.contiguous(), -z.contiguous()

    def scan_parts() -> LaunchParts:
        config = dict(kernel_config("linear_scan", run.key, run.device))
        sizes = {"f": run.f, "e": run.e, "BE": run.sizes["BE"], "SB": config.pop("segments"), "DECAY": 1, "NORM": True}
        there = {"HAS_OWN": True, "HAS_FIRST": last[0] is not None, "WITH_STATES": True, "WITH_DOT": False}
        return (run.b * run.g * run.f,), (run.runs, 1), {**sizes, "REVERSE": True, **there, **config}

    scanned = (*own, *far, decays, *last, *of_first, None, None, None)
    run.launch(("scan grads", last[0] is None), linear_scan, scanned, scan_parts)
    return near, far, (of_first[0], -of_first[1])
