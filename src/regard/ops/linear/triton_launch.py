"""Launch the Triton kernels of linear attention: sizes of tiles and segments, buffers, and the order of kernels."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from regard.ops.linear.feature_maps import FEATURES
from regard.ops.linear.triton_backward import linear_backward_keys, linear_backward_queries
from regard.ops.linear.triton_kernels import linear_forward, linear_scan, linear_sums
from regard.ops.triton_support import block_of, dot_precision, kernel_config

OptionalT = TypeVar("OptionalT", Tensor, Tensor | None)
STATE_TILE = 1 << 14  # elements of a state that one program holds
SCAN_BLOCK = 16  # segments that the scan loads at once


class LinearInputs(NamedTuple):
    """Tensors and options of one launch: a call, or its reading or writing half."""

    q: Tensor | None  # None: the state is written and not read
    k: Tensor | None  # None: all queries read the given state
    v: Tensor | None
    state: Tensor  # (b g f e)
    log_decay: Tensor | None
    norm_state: Tensor | None
    valid: Tensor | None
    feature: str
    scale: float
    normalize: bool


class LinearStates(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs."""

    out: Tensor | None  # (b h n e), if it is divided by the norm
    den: Tensor | None  # (b h n)
    states: Tensor  # (b g slots f e) before every segment and behind the last
    norms: Tensor | None  # (b g slots f)
    decays: Tensor | None  # (b g slots f) log decay of every segment
    levels: Tensor | None  # (b g n f) log decay of every feature from the start of the chunk


class LinearGrads(NamedTuple):
    """Gradients of all tensors of a launch."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    state: Tensor
    log_decay: Tensor | None
    norm_state: Tensor | None


class LinearLaunch:
    """The sizes, flags and buffers that the kernels of one pass share."""

    def __init__(self, x: LinearInputs) -> None:
        self.x = _aligned(x)
        x = self.x
        tokens = x.q if x.q is not None else x.k
        assert tokens is not None
        self.device = tokens.device
        self.b, self.n = tokens.shape[0], tokens.shape[2]
        self.g, self.f, self.e = x.state.shape[1:]
        self.h = self.g if x.q is None else x.q.shape[1]
        self.bf, self.be = block_of(self.f, self.device), block_of(self.e, self.device)
        self.decay = 0 if x.log_decay is None else (1 if x.log_decay.shape[-1] == 1 else 2)
        self.norm = x.norm_state is not None
        dtype = tokens.dtype if x.v is None else x.v.dtype  # of products: features may come in more digits
        half = dtype == torch.bfloat16  # the range of float16 is too small for sums over a sequence
        exact = dtype == torch.float32
        precision = dot_precision(torch.float32) if exact else "tf32"
        if precision == "ieee":
            precision = "tf32x3"  # all digits of float32, by three products on tensor cores
        self.product = {"TYPE": tl.bfloat16 if half else tl.float32, "PRECISION": precision}
        width = max(self.bf, self.be)
        self.key = f"{'half' if half else 'single'} {width}"
        if self.decay == 2:
            self.key += " features"
        self.seg = self._segment()
        self.segs = -(-self.n // self.seg)
        self.flags = {
            "f": self.f,
            "e": self.e,
            "DECAY": self.decay,
            "NORM": self.norm,
            "FEATURE": FEATURES.index(x.feature),
            "HAS_VALID": x.valid is not None,
        }

    def tiles(self, kernel: str) -> dict[str, Any]:
        """The tile sizes of a kernel that walks in chunks; with a decay per feature all kernels have the same chunks."""
        config = dict(kernel_config(kernel, self.key, self.device))
        chunk = config.pop("chunk")
        if self.decay == 2:
            chunk = kernel_config("linear_sums", self.key, self.device)["chunk"]
        config["C"] = chunk
        if kernel != "linear_sums":
            config["HALVINGS"] = chunk.bit_length() - 1
        return config

    def _segment(self) -> int:
        """Tokens in a segment: fewer where there would be too few programs for the card."""
        config = kernel_config("linear_segment", self.key, self.device)
        size, programs = config["tokens"], config["programs"]
        smallest = config["smallest"]
        while size > smallest and self.b * self.g * -(-self.n // size) < programs:
            size //= 2
        return size

    def strides(self, *tensors: Tensor | None) -> list[int]:
        """The strides of batch, head and token; 0 for tensors that are not there."""
        found: list[int] = []
        for t in tensors:
            found += (0, 0, 0) if t is None else t.stride()[:3]
        return found

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def tokens(self, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor (b heads n size) in the layout (b n heads size), from which heads are joined without a copy."""
        return self.new(self.b, self.n, heads, size, dtype=dtype).transpose(1, 2)

    def slots(self, heads: int, *size: int) -> Tensor:
        return self.new(self.b, heads, self.segs + 1, *size)


def _aligned(x: LinearInputs) -> LinearInputs:
    """Make the features of every token adjacent, and states contiguous float32."""
    q, k, v, log_decay = (_adjacent(t) for t in (x.q, x.k, x.v, x.log_decay))
    state = x.state.float().contiguous()
    norm_state = None if x.norm_state is None else x.norm_state.float().contiguous()
    valid = None if x.valid is None else x.valid.contiguous().view(torch.uint8)
    return LinearInputs(q, k, v, state, log_decay, norm_state, valid, x.feature, x.scale, x.normalize)


def _adjacent(x: OptionalT) -> OptionalT:
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch_forward(
    inputs: LinearInputs, *, keep: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, LinearStates]:
    """Return out (b h n e), its norm (b h n), the last state and norm state, and what the backward pass needs if `keep`."""
    run = LinearLaunch(inputs)
    x = run.x
    last, last_z = x.state, x.norm_state
    states, norms, decays, levels = x.state, x.norm_state, None, x.log_decay
    at_once = x.q is not None and run.segs == 1 and not keep  # a decoding step: one kernel
    if run.decay == 2 and run.n > 1:
        at_once = False
    if x.k is not None:
        last = torch.empty_like(x.state)
        last_z = None if x.norm_state is None else torch.empty_like(x.norm_state)
        if not at_once:
            states, norms, decays, levels = _segment_states(run, last, last_z)
    kept = LinearStates(None, None, states, norms, decays, levels)
    if x.q is None:
        return None, None, last, last_z, kept
    out, den = _outputs(run, kept, (last, last_z) if at_once and x.k is not None else None)
    return out, den, last, last_z, kept._replace(out=out if x.normalize else None, den=den)


def launch_states(inputs: LinearInputs, out: Tensor, den: Tensor | None) -> LinearStates:
    """Return what the backward pass needs, from results of a forward pass that kept nothing else."""
    run = LinearLaunch(inputs)
    x = run.x
    states, norms, decays, levels = x.state, x.norm_state, None, x.log_decay
    if x.k is not None:
        last_z = None if x.norm_state is None else torch.empty_like(x.norm_state)
        states, norms, decays, levels = _segment_states(run, torch.empty_like(x.state), last_z)
    return LinearStates(out, den, states, norms, decays, levels)


def _segment_states(
    run: LinearLaunch, last: Tensor, last_z: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The state and the norm before every segment, the log decay of each, and decays as the other kernels take them."""
    x, some = run.x, run.x.state
    assert x.k is not None and x.v is not None
    own = run.slots(run.g, run.f, run.e)
    own_z = run.slots(run.g, run.f) if run.norm else None
    decays = run.slots(run.g, run.f) if run.decay else None
    levels = run.new(run.b, run.g, run.n, run.f) if run.decay == 2 else x.log_decay
    width = _part(run.be, run.bf)
    parts = run.be // width
    tiles = run.tiles("linear_sums")
    linear_sums[(parts * run.segs * run.b * run.g,)](
        x.k, x.v, _or(x.log_decay, some), _or(x.valid, some), own, _or(own_z, some), _or(decays, some),
        _or(levels, some), *run.strides(x.k, x.v, x.log_decay), run.n, run.segs, run.seg, run.g,
        BF=run.bf, BE=width, PARTS=parts, **run.flags, **run.product, **tiles,
    )  # fmt: skip
    _scan(run, own, own_z, (own, own_z), decays, (x.state, x.norm_state), (last, last_z), heads=1)
    return own, own_z, decays, levels


def _scan(
    run: LinearLaunch,
    own: Tensor | None,
    own_z: Tensor | None,
    into: tuple[Tensor, Tensor | None],
    decays: Tensor | None,
    first: tuple[Tensor, Tensor | None],
    last: tuple[Tensor, Tensor | None],
    *,
    heads: int,
    reverse: bool = False,
    other: tuple[Tensor, Tensor | None] | None = None,
    dots: Tensor | None = None,
) -> None:
    """Scan over the segments; `other` and `dots`: see the kernel."""
    some = first[0]
    with_dot = dots is not None
    others = other if other is not None else (some, some)
    linear_scan[(run.b * run.g * run.f,)](
        _or(own, some), _or(own_z, some), into[0], _or(into[1], some), _or(decays, some),
        first[0], _or(first[1], some), last[0], _or(last[1], some), others[0], _or(others[1], some), _or(dots, some),
        run.segs, heads,
        f=run.f, e=run.e, BE=run.be, SB=SCAN_BLOCK, DECAY=run.decay, NORM=run.norm, REVERSE=reverse,
        HAS_OWN=own is not None, WITH_DOT=with_dot, **kernel_config("linear_scan", run.key, run.device),
    )  # fmt: skip


def _outputs(run: LinearLaunch, kept: LinearStates, last: tuple[Tensor, Tensor | None] | None) -> tuple[Tensor, Tensor | None]:
    x, some = run.x, run.x.state
    assert x.q is not None
    out = run.tokens(run.h, run.e, x.q.dtype if x.v is None else x.v.dtype)
    den = run.new(run.b, run.h, run.n) if run.norm else None
    width = _part(run.be, run.bf)
    parts = run.be // width
    ends = last if last is not None else (some, some)
    slots = run.segs + 1 if kept.states.dim() == 5 else 1
    linear_forward[(parts * run.segs * run.b * run.h,)](
        x.q, _or(x.k, some), _or(x.v, some), _or(kept.levels, some), _or(x.valid, some), kept.states, _or(kept.norms, some),
        out, _or(den, some), ends[0], _or(ends[1], some),
        *run.strides(x.q, x.k, x.v, kept.levels), x.scale, run.n, run.segs, run.seg, slots, run.h, run.h // run.g,
        BF=run.bf, BE=width, PARTS=parts, NORMALIZE=x.normalize, HAS_KEYS=x.k is not None, WITH_LAST=last is not None,
        **run.flags, **run.product, **run.tiles("linear_forward"),
    )  # fmt: skip
    return out, den


def launch_backward(
    inputs: LinearInputs,
    kept: LinearStates,
    d_out: Tensor | None,
    d_norm: Tensor | None,
    d_last: Tensor | None,
    d_last_z: Tensor | None,
    *,
    decay_grad: bool,
) -> LinearGrads:
    """Return the gradients of all tensors, given those of out (b h n e), norm (b h n), and the last states."""
    run = LinearLaunch(inputs)
    x = run.x
    last = torch.zeros_like(x.state) if d_last is None else d_last.float().contiguous()
    last_z = None
    if x.norm_state is not None:
        last_z = torch.zeros_like(x.norm_state) if d_last_z is None else d_last_z.float().contiguous()
    decay_grad = decay_grad and x.log_decay is not None
    d_q = own = own_z = dd = qd = None
    if x.q is not None:
        if d_out is None:
            d_out = torch.zeros((), dtype=x.q.dtype, device=run.device).expand(run.b, run.h, run.n, run.e)
        d_out = _adjacent(d_out)
        assert d_out is not None
        dd = _norm_grad(run, d_norm)
        d_q, own, own_z, qd = _query_grads(run, kept, d_out, dd, decay_grad)
    d_state = torch.empty_like(x.state)
    d_norm_state = None if x.norm_state is None else torch.empty_like(x.norm_state)
    adjoint = (run.slots(run.g, run.f, run.e), run.slots(run.g, run.f) if run.norm else None)
    dots = run.slots(run.g, run.f) if decay_grad else None
    _scan(
        run, own, own_z, adjoint, kept.decays, (last, last_z), (d_state, d_norm_state),
        heads=run.h // run.g, reverse=True, other=(kept.states, kept.norms), dots=dots,
    )  # fmt: skip
    if x.k is None:
        return LinearGrads(d_q, None, None, d_state, None, d_norm_state)
    d_k, d_v, d_decay = _key_grads(run, kept, d_out, dd, adjoint, qd, dots)
    return LinearGrads(d_q, d_k, d_v, d_state, d_decay, d_norm_state)


def _norm_grad(run: LinearLaunch, d_norm: Tensor | None) -> Tensor | None:
    """The gradient of the norm (b h n): given, 0, or room for the kernel to compute it."""
    if not run.norm:
        return None
    if run.x.normalize:
        return run.new(run.b, run.h, run.n)
    if d_norm is None:
        return torch.zeros(run.b, run.h, run.n, device=run.device)
    return d_norm.float().contiguous()


def _query_grads(
    run: LinearLaunch, kept: LinearStates, d_out: Tensor, dd: Tensor | None, decay_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x, some = run.x, run.x.state
    assert x.q is not None
    width = _part(run.bf, run.be)
    parts = run.bf // width
    d_q = run.tokens(run.h, run.f, x.q.dtype)
    own = run.slots(run.h, run.f, run.e)
    own_z = run.slots(run.h, run.f) if run.norm else None
    qd = None
    if decay_grad:
        qd = run.new(parts, run.b, run.h, run.n) if run.decay == 1 else run.new(run.b, run.h, run.n, run.f)
    slots = run.segs + 1 if kept.states.dim() == 5 else 1
    linear_backward_queries[(parts * run.segs * run.b * run.h,)](
        x.q, _or(x.k, some), _or(x.v, some), _or(kept.levels, some), _or(x.valid, some), d_out, _or(kept.out, some),
        _or(kept.den, some), _or(dd, some), kept.states, _or(kept.norms, some), d_q, own, _or(own_z, some), _or(qd, some),
        *run.strides(x.q, x.k, x.v, kept.levels, d_out),
        x.scale, run.n, run.segs, run.seg, slots, run.b * run.h, run.h, run.h // run.g,
        BF=width, BE=run.be, PARTS=parts, NORMALIZE=x.normalize, HAS_KEYS=x.k is not None, DECAY_GRAD=decay_grad,
        **run.flags, **run.product, **run.tiles("linear_backward_queries"),
    )  # fmt: skip
    return d_q, own, own_z, qd


def _key_grads(
    run: LinearLaunch,
    kept: LinearStates,
    d_out: Tensor | None,
    dd: Tensor | None,
    adjoint: tuple[Tensor, Tensor | None],
    qd: Tensor | None,
    dots: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    x, some = run.x, run.x.state
    assert x.k is not None and x.v is not None
    features, values = _part(run.bf, run.be), _part(run.be, run.bf)
    parts = run.bf // features
    d_k = run.tokens(run.g, run.f, x.k.dtype)
    d_v = run.tokens(run.g, run.e, x.v.dtype)
    d_decay = None
    if dots is not None:
        d_decay = run.new(parts, run.b, run.g, run.n) if run.decay == 1 else run.new(run.b, run.g, run.n, run.f)
    linear_backward_keys[((parts + run.be // values) * run.segs * run.b * run.g,)](
        _or(x.q, some), x.k, x.v, _or(kept.levels, some), _or(x.valid, some), _or(d_out, some), _or(kept.den, some),
        _or(dd, some), adjoint[0], _or(adjoint[1], some), _or(qd, some), _or(dots, some), d_k, d_v, _or(d_decay, some),
        *run.strides(x.q, x.k, x.v, kept.levels, d_out),
        x.scale, run.n, run.segs, run.seg, run.b * run.h, run.b * run.g, run.h, run.h // run.g,
        BF=run.bf, BE=run.be, PF=features, PE=values, NORMALIZE=x.normalize, HAS_QUERIES=x.q is not None,
        DECAY_GRAD=dots is not None, **run.flags, **run.product, **run.tiles("linear_backward_keys"),
    )  # fmt: skip
    if d_decay is not None:
        assert x.log_decay is not None
        if run.decay == 1:
            d_decay = d_decay[0] if parts == 1 else d_decay.sum(0)
            d_decay = d_decay.unsqueeze(-1)
        d_decay = d_decay.to(x.log_decay.dtype)
    return d_k, d_v, d_decay


def _part(width: int, other: int) -> int:
    """How much of one dimension of a state one program holds, where it holds all of the other."""
    return min(width, max(STATE_TILE // other, 16))


def _or(x: Tensor | None, some: Tensor) -> Tensor:
    """A tensor, or any other one in its place, which the kernel does not read."""
    return some if x is None else x
