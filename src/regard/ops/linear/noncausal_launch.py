"""Launch the Triton kernels of linear attention without an order, forward and backward, on ordinary tensors without autograd."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.kernel_launch import KernelLaunch, present_slots
from regard.ops.linear import noncausal_exp_kernels as by_directions
from regard.ops.linear import noncausal_kernels as kernels
from regard.ops.linear.triton_launch import LaunchParts, features_adjacent
from regard.ops.triton_support import block_of, dot_precision, kernel_config

FEW_SEGMENTS = 8  # of a row, which are merged by one warp
FEATURE_NUMBERS = {"elu": 1, "relu": 2, "softmax": 3, "random": 0}


class NoncausalInputs(NamedTuple):
    """Arguments of attention by features in which every query sees all keys."""

    q: Tensor  # (b h n d)
    k: Tensor  # (b g m d)
    v: Tensor  # (b g m e)
    valid: Tensor | None  # (b m) keys that are seen; None: all
    directions: Tensor | None  # (f d) of exponential random features
    log_norm: Tensor | None  # (g) or (1) log of the largest norm of tokens that directions are applied to
    feature: str  # "elu", "relu", "softmax" over tokens and features, or "random" with directions


class NoncausalKept(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs and outputs."""

    mean: Tensor  # (b g f e) mean value of every feature, in the type of products
    level: Tensor  # (b g f) sum of every feature over keys, or its logarithm to base 2
    lse: Tensor | None  # (b h n) log to base 2 of the sum of the weights of a query, with random features
    w_logs: Tensor | None  # directions in the type of products that make exponents, if that is not their own
    w_grads: Tensor | None  # and in the type of other products


class NoncausalLaunch:
    """The sizes, flags and launches that all passes of one signature share: see `noncausal_launch`."""

    def __init__(self, x: NoncausalInputs) -> None:
        self._launches: dict[Hashable, KernelLaunch] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self.device, self.number = x.q.device, x.q.get_device()
        (self.b, self.h, self.n, self.d), (self.g, self.m), self.e = x.q.shape, x.k.shape[1:3], x.v.shape[-1]
        self.random = x.directions is not None
        self.f = self.d if x.directions is None else len(x.directions)
        self.ratio = self.h // self.g
        self.half = x.q.dtype == torch.bfloat16
        self.type = torch.bfloat16 if self.half else torch.float32
        product = tl.bfloat16 if self.half else tl.float32
        precision = dot_precision(x.q.dtype)
        bd, be = block_of(self.d, self.device), block_of(self.e, self.device)
        self.key = f"{'half' if self.half else 'single'} {max(bd, be)}"
        self.running = self.random or x.feature == "softmax"
        self.copies = self.random and self.half
        self.product = {"TYPE": product, "PRECISION": precision}
        self.sizes = {"f": self.f, "e": self.e, "BE": be}
        if self.random:
            self.product["LOGS"] = tl.float16 if self.half else tl.float32
            self.sizes |= {"d": self.d, "BD": bd, "HAS_NORM": x.log_norm is not None}
        else:
            self.sizes |= {"BF": bd, "FEATURE": FEATURE_NUMBERS[x.feature]}
        self.bounds = 1 if x.log_norm is None else len(x.log_norm)
        self.root = self.d**-0.25

    def launch(self, name: Hashable, kernel: Any, tensors: tuple[Tensor | None, ...], parts: Callable[[], LaunchParts]) -> None:
        """Launch a kernel with those tensors that are there; the name decides its other arguments."""
        found = self._launches.get(name)
        if found is None:
            grid, numbers, constants = parts()
            slots = present_slots([x is not None for x in tensors])
            found = self._launches[name] = KernelLaunch(kernel, grid, slots, numbers, constants, self.number)
        found(*[x for x in tensors if x is not None])

    def config(self, kernel: str) -> dict[str, Any]:
        """The tokens in a tile, C, the features in a tile, BF, if they have tiles, and options of a kernel."""
        found = self._configs.get(kernel)
        if found is None:
            found = dict(kernel_config(kernel, self.key, self.device))
            found["C"] = found.pop("chunk")
            if "features" in found:
                found["BF"] = min(found.pop("features"), block_of(self.f, self.device))
            self._configs[kernel] = found
        return found

    def blocks(self, config: dict[str, Any]) -> int:
        """How many tiles of features there are."""
        return -(-self.f // config["BF"]) if "BF" in config else 1

    def segments(self, config: dict[str, Any], rows: int, n: int) -> tuple[int, int]:
        """Tokens in a segment and segments of n tokens: whole tiles, and about as many programs as a configuration wants."""
        size = -(-n // max(1, config["programs"] // (rows * self.blocks(config))))
        size = -(-size // config["C"]) * config["C"]
        return size, -(-n // size)

    def constants(self, config: dict[str, Any], **more: Any) -> dict[str, Any]:
        own = {name: value for name, value in config.items() if name != "programs"}
        return {**self.sizes, **self.product, **own, **more}

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def tokens(self, heads: int, n: int, size: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor (b heads n size) in the layout (b n heads size), from which heads are joined without a copy."""
        return self.new(self.b, n, heads, size, dtype=dtype).transpose(1, 2)


def noncausal_key(x: NoncausalInputs) -> tuple[Hashable, ...]:
    """Return the signature of inputs whose tokens have adjacent features."""
    q, k, v, valid, directions, log_norm, feature = x
    precision = torch.get_float32_matmul_precision() if q.dtype == torch.float32 else None
    tokens = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), v.shape, v.stride(), q.get_device())
    drawn = None if directions is None else (directions.shape, directions.dtype)
    bound = None if log_norm is None else (log_norm.shape, log_norm.dtype)
    return *tokens, valid is None, drawn, bound, feature, precision


def noncausal_launch(x: NoncausalInputs) -> NoncausalLaunch:
    """Return what is prepared for the signature of these inputs, whose tokens have adjacent features."""
    return _prepared_launch(noncausal_key(x), x)


@signature_cache
def _prepared_launch(key: Hashable, x: NoncausalInputs) -> NoncausalLaunch:  # noqa: ARG001 - the key of the cache
    return NoncausalLaunch(x)


def ready_inputs(x: NoncausalInputs) -> NoncausalInputs:
    """Return inputs as kernels take them."""
    q, k, v = (features_adjacent(t) for t in x[:3])
    valid = None if x.valid is None else x.valid.contiguous().view(torch.uint8)
    directions = None if x.directions is None else x.directions.contiguous()
    return NoncausalInputs(q, k, v, valid, directions, x.log_norm, x.feature)


def launch_noncausal(inputs: NoncausalInputs) -> tuple[Tensor, NoncausalKept]:
    """Return out (b h n e) and what the backward pass needs."""
    x = ready_inputs(inputs)
    run = noncausal_launch(x)
    mean = run.new(run.b, run.g, run.f, run.e, dtype=run.type)
    level = run.new(run.b, run.g, run.f)
    w_logs = w_grads = None
    if run.copies:
        w_logs, w_grads = run.new(run.f, run.d, dtype=torch.float16), run.new(run.f, run.d, dtype=torch.bfloat16)
    config = run.config("noncausal_exp_sums") if run.random else run.config("noncausal_sums")
    size, segs = run.segments(config, run.b * run.g, run.m)
    sums, norms = run.new(run.b, run.g, segs, run.f, run.e), run.new(run.b, run.g, segs, run.f)
    tops = run.new(run.b, run.g, segs, run.f) if run.running else None

    def parts() -> LaunchParts:
        strides = (*x.k.stride()[:3], *x.v.stride()[:3])
        constants = run.constants(config, HAS_VALID=x.valid is not None)
        if run.random:
            numbers = (*strides, run.root, run.m, segs, size, run.g, run.g // run.bounds)
            return (run.blocks(config) * segs * run.b * run.g,), numbers, constants
        return (segs * run.b * run.g,), (*strides, run.m, segs, size, run.g), constants

    if run.random:
        tensors = (x.k, x.v, x.directions, x.log_norm, x.valid, sums, norms, tops)
        run.launch("sums", by_directions.noncausal_exp_sums, tensors, parts)
    else:
        run.launch("sums", kernels.noncausal_sums, (x.k, x.v, x.valid, sums, norms, tops), parts)
    _merge(run, x, (sums, norms, tops), NoncausalKept(mean, level, None, w_logs, w_grads), segs)
    kept = NoncausalKept(mean, level, run.new(run.b, run.h, run.n) if run.random else None, w_logs, w_grads)
    return _outputs(run, x, kept), kept


def _merge(run: NoncausalLaunch, x: NoncausalInputs, sums: tuple[Tensor | None, ...], into: NoncausalKept, segs: int) -> None:
    """Merge the sums of all segments."""

    def parts() -> LaunchParts:
        constants = {"f": run.f, "d": run.d, "e": run.e, "BD": block_of(run.d, run.device), "BE": run.sizes["BE"]}
        flags = {"RUNNING": run.running, "COPY": run.copies}
        return (run.b * run.g * run.f,), (segs,), {**constants, **flags, **_merge_config(run, segs)}

    tensors = (*sums, x.directions, into.mean, into.level, into.w_logs, into.w_grads)
    run.launch("merge", kernels.noncausal_merge, tensors, parts)


def _merge_config(run: NoncausalLaunch, segs: int) -> dict[str, Any]:
    """Return the sizes of a merge: where there are few segments, tiles of no more of them, by one warp."""
    config = dict(kernel_config("noncausal_merge", run.key, run.device))
    most = config.pop("segments")
    if segs <= FEW_SEGMENTS < most:
        return {**config, "SB": FEW_SEGMENTS, "num_warps": 1}
    return {**config, "SB": most}


def _outputs(run: NoncausalLaunch, x: NoncausalInputs, kept: NoncausalKept) -> Tensor:
    out = run.tokens(run.h, run.n, run.e, x.q.dtype)

    def parts() -> LaunchParts:
        config = run.config("noncausal_exp_read") if run.random else run.config("noncausal_read")
        if run.random:
            tiles = -(-run.n // config["C"])
            numbers = (*x.q.stride()[:3], run.root, run.n, tiles, run.h, run.ratio, run.h // run.bounds)
            return (tiles * run.b * run.h,), numbers, run.constants(config)
        size, segs = run.segments(config, run.b * run.h, run.n)
        numbers = (*x.q.stride()[:3], run.n, segs, size, run.h, run.ratio)
        return (segs * run.b * run.h,), numbers, run.constants(config)

    if run.random:
        w = x.directions if kept.w_logs is None else kept.w_logs
        tensors = (x.q, w, x.log_norm, kept.mean, kept.level, out, kept.lse)
        run.launch("read", by_directions.noncausal_exp_read, tensors, parts)
    else:
        run.launch("read", kernels.noncausal_read, (x.q, kept.mean, kept.level, out), parts)
    return out


class NoncausalGrads(NamedTuple):
    """Gradients of a pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_norm: Tensor | None


def launch_noncausal_grads(inputs: NoncausalInputs, kept: NoncausalKept, out: Tensor, d_out: Tensor) -> NoncausalGrads:
    """Return the gradients of tokens, and that of the log of the largest norm, given that of out (b h n e)."""
    x = ready_inputs(inputs)
    run = noncausal_launch(x)
    d_out = features_adjacent(d_out)
    d_norm = None
    if x.log_norm is not None:
        of_queries, of_keys = run.config("noncausal_exp_query_grads")["C"], run.config("noncausal_exp_key_grads")["C"]
        d_norm = run.new(run.b, run.g, run.ratio * -(-run.n // of_queries) + -(-run.m // of_keys))
    if run.random:
        d_q, adjoints, segs = _random_query_grads(run, x, kept, out, d_out, d_norm)
    else:
        d_q, adjoints, segs = _query_grads(run, x, kept, d_out)
    d_mean, t = torch.empty_like(kept.mean), torch.empty_like(kept.level)

    def parts() -> LaunchParts:
        soft = run.running and not run.random
        constants = {"f": run.f, "e": run.e, "BE": run.sizes["BE"], "SOFT": soft}
        return (run.b * run.g * run.f,), (run.ratio * segs,), {**constants, **_merge_config(run, run.ratio * segs)}

    run.launch("merge grads", kernels.noncausal_merge_grads, (*adjoints, kept.mean, d_mean, t), parts)
    d_k, d_v = _key_grads(run, x, kept, (d_mean, t), d_norm)
    if x.log_norm is None or d_norm is None:
        return NoncausalGrads(d_q, d_k, d_v, None)
    by_head = d_norm.sum((0, 2))
    return NoncausalGrads(d_q, d_k, d_v, by_head.sum_to_size(x.log_norm.shape).to(x.log_norm.dtype))


Adjoints = tuple[Tensor, Tensor]


def _query_grads(run: NoncausalLaunch, x: NoncausalInputs, kept: NoncausalKept, d_out: Tensor) -> tuple[Tensor, Adjoints, int]:
    """The gradients of queries, and what segments of them add to those of the means and norms."""
    config = run.config("noncausal_query_grads")
    size, segs = run.segments(config, run.b * run.h, run.n)
    d_q = run.tokens(run.h, run.n, run.d, x.q.dtype)
    adjoints = run.new(run.b, run.h, segs, run.f, run.e), run.new(run.b, run.h, segs, run.f)

    def parts() -> LaunchParts:
        numbers = (*x.q.stride()[:3], *d_out.stride()[:3], run.n, segs, size, run.h, run.ratio)
        return (segs * run.b * run.h,), numbers, run.constants(config)

    tensors = (x.q, kept.mean, kept.level, d_out, d_q, *adjoints)
    run.launch(("query grads", d_out.stride(), d_out.dtype), kernels.noncausal_query_grads, tensors, parts)
    return d_q, adjoints, segs


def _random_query_grads(
    run: NoncausalLaunch, x: NoncausalInputs, kept: NoncausalKept, out: Tensor, d_out: Tensor, d_norm: Tensor | None
) -> tuple[Tensor, Adjoints, int]:
    """The same with random features: one launch for queries, and one for means and norms."""
    d_q, delta = run.tokens(run.h, run.n, run.d, x.q.dtype), run.new(run.b, run.h, run.n)
    strides = (*x.q.stride()[:3], *d_out.stride()[:3])
    heads = (run.h, run.ratio, run.h // run.bounds)
    kind = d_out.stride(), d_out.dtype

    def parts() -> LaunchParts:
        config = run.config("noncausal_exp_query_grads")
        tiles = -(-run.n // config["C"])
        every = 0 if d_norm is None else d_norm.shape[2]
        return (tiles * run.b * run.h,), (*strides, run.root, run.n, tiles, every, *heads), run.constants(config)

    w_logs, w_grads = (x.directions if w is None else w for w in (kept.w_logs, kept.w_grads))
    tensors = (x.q, w_logs, w_grads, x.log_norm, kept.mean, kept.level, kept.lse, out, d_out, delta, d_q, d_norm)
    run.launch(("query grads", *kind), by_directions.noncausal_exp_query_grads, tensors, parts)
    config = run.config("noncausal_exp_adjoint")
    size, segs = run.segments(config, run.b * run.h, run.n)
    adjoints = run.new(run.b, run.h, segs, run.f, run.e), run.new(run.b, run.h, segs, run.f)

    def adjoint_parts() -> LaunchParts:
        numbers = (*strides, run.root, run.n, segs, size, *heads)
        return (run.blocks(config) * segs * run.b * run.h,), numbers, run.constants(config)

    given = (x.q, w_logs, x.log_norm, kept.level, kept.lse, delta, d_out, *adjoints)
    run.launch(("adjoint", *kind), by_directions.noncausal_exp_adjoint, given, adjoint_parts)
    return d_q, adjoints, segs


def _key_grads(
    run: NoncausalLaunch, x: NoncausalInputs, kept: NoncausalKept, adjoint: Adjoints, d_norm: Tensor | None
) -> tuple[Tensor, Tensor]:
    d_k, d_v = run.tokens(run.g, run.m, run.d, x.k.dtype), run.tokens(run.g, run.m, run.e, x.v.dtype)
    strides = (*x.k.stride()[:3], *x.v.stride()[:3])

    def parts() -> LaunchParts:
        config = run.config("noncausal_exp_key_grads") if run.random else run.config("noncausal_key_grads")
        constants = run.constants(config, HAS_VALID=x.valid is not None)
        if run.random:
            tiles = -(-run.m // config["C"])
            every = 0 if d_norm is None else d_norm.shape[2]
            numbers = (*strides, run.root, run.m, tiles, every, run.g, run.g // run.bounds)
            return (tiles * run.b * run.g,), numbers, constants
        size, segs = run.segments(config, run.b * run.g, run.m)
        return (segs * run.b * run.g,), (*strides, run.m, segs, size, run.g), constants

    if run.random:
        w_logs, w_grads = (x.directions if w is None else w for w in (kept.w_logs, kept.w_grads))
        tensors = (x.k, x.v, w_logs, w_grads, x.log_norm, x.valid, kept.level, *adjoint, d_k, d_v, d_norm)
        run.launch("key grads", by_directions.noncausal_exp_key_grads, tensors, parts)
    else:
        run.launch("key grads", kernels.noncausal_key_grads, (x.k, x.v, x.valid, kept.level, *adjoint, d_k, d_v), parts)
    return d_k, d_v
