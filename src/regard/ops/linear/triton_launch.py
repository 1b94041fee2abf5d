"""Launch the Triton kernels of linear attention: sizes of tiles and segments, buffers, and the order of kernels."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from regard.ops.linear.feature_maps import FEATURES
from regard.ops.linear.linear_op import gain_of_heads
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
    gain: Tensor | None  # (b g n 1) constant factor of every output
    gate_root: float  # above 0: log_decay holds gates


class LinearStates(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs."""

    out: Tensor | None  # (b h n e), if it is divided by the norm
    den: Tensor | None  # (b h n)
    states: Tensor  # (b g slots f e) before every segment and behind the last
    norms: Tensor | None  # (b g slots f)
    decays: Tensor | None  # (b g slots f) log decay of every segment
    levels: Tensor | None  # (b g n 1) or (b g n f) log decay from the start of the chunk


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
        self.divides = 2 if x.gain is not None else int(x.normalize)
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
        """The tile sizes of a kernel that walks in chunks; with a decay all kernels have the same chunks."""
        config = dict(kernel_config(kernel, self.key, self.device))
        chunk = config.pop("chunk")
        if self.decay and self.n > 1:
            chunk = kernel_config("linear_sums", self.key, self.device)["chunk"]
        config["C"] = chunk
        if kernel != "linear_sums":
            config["HALVINGS"] = 0 if self.n == 1 else chunk.bit_length() - 1
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

    def factors(self) -> Tensor | None:
        """The given factors of all outputs (b h n)."""
        if self.x.gain is None:
            return None
        return gain_of_heads(self.x.gain, self.h).float().contiguous()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def tokens(self, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor (b heads n size) in the layout (b n heads size), from which heads are joined without a copy."""
        return self.new(self.b, self.n, heads, size, dtype=dtype).transpose(1, 2)

    def slots(self, heads: int, *size: int) -> Tensor:
        return self.new(self.b, heads, self.segs + 1, *size)


def _aligned(x: LinearInputs) -> LinearInputs:
    """Make the features of every token adjacent, and states contiguous float32."""
    q, k, v, log_decay = (features_adjacent(t) for t in (x.q, x.k, x.v, x.log_decay))
    state = x.state.float().contiguous()
    norm_state = None if x.norm_state is None else x.norm_state.float().contiguous()
    valid = None if x.valid is None else x.valid.contiguous().view(torch.uint8)
    return LinearInputs(q, k, v, state, log_decay, norm_state, valid, x.feature, x.scale, x.normalize, x.gain, x.gate_root)


def features_adjacent(x: OptionalT) -> OptionalT:
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
    if run.decay and (run.n > 1 or x.gate_root):  # decays are computed by the first kernel
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
    return out, den if run.norm else None, last, last_z, kept._replace(out=out if x.normalize else None, den=den)


def launch_states(inputs: LinearInputs, out: Tensor, den: Tensor | None) -> LinearStates:
    """Return what the backward pass needs, from results of a forward pass that kept nothing else."""
    run = LinearLaunch(inputs)
    x = run.x
    states, norms, decays, levels = x.state, x.norm_state, None, x.log_decay
    if x.k is not None:
        last_z = None if x.norm_state is None else torch.empty_like(x.norm_state)
        states, norms, decays, levels = _segment_states(run, torch.empty_like(x.state), last_z)
    return LinearStates(out, den if x.gain is None else run.factors(), states, norms, decays, levels)


def _segment_states(
    run: LinearLaunch, last: Tensor, last_z: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The state and the norm before every segment, the log decay of each, and decays as the other kernels take them."""
    x, some = run.x, run.x.state
    assert x.k is not None and x.v is not None
    own = run.slots(run.g, run.f, run.e)
    own_z = run.slots(run.g, run.f) if run.norm else None
    decays = run.slots(run.g, run.f) if run.decay else None
    levels = run.new(run.b, run.g, run.n, 1 if run.decay == 1 else run.f) if run.decay else None
    width = state_part(run.be, run.bf)
    parts = run.be // width
    tiles = run.tiles("linear_sums")
    linear_sums[(parts * run.segs * run.b * run.g,)](
        *filled(some, x.k, x.v, x.log_decay, x.valid, own, own_z, decays, levels),
        *run.strides(x.k, x.v, x.log_decay), x.gate_root, run.n, run.segs, run.seg, run.g,
        BF=run.bf, BE=width, PARTS=parts, GATES=x.gate_root > 0, CUMSUM=tiles["num_warps"] <= 4,
        **run.flags, **run.product, **tiles,
    )  # fmt: skip
    scan_segments(run, own, own_z, (own, own_z), decays, (x.state, x.norm_state), (last, last_z), heads=1)
    return own, own_z, decays, levels


def scan_segments(
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
        *filled(some, own, own_z, *into, decays, *first, *last, *others, dots),
        run.segs, heads,
        f=run.f, e=run.e, BE=run.be, SB=SCAN_BLOCK, DECAY=run.decay, NORM=run.norm, REVERSE=reverse,
        HAS_OWN=own is not None, WITH_DOT=with_dot, **kernel_config("linear_scan", run.key, run.device),
    )  # fmt: skip


def _outputs(run: LinearLaunch, kept: LinearStates, last: tuple[Tensor, Tensor | None] | None) -> tuple[Tensor, Tensor | None]:
    x, some = run.x, run.x.state
    assert x.q is not None
    out = run.tokens(run.h, run.e, x.q.dtype if x.v is None else x.v.dtype)
    den = run.factors()
    if den is None and run.norm:
        den = run.new(run.b, run.h, run.n)
    width = state_part(run.be, run.bf)
    parts = run.be // width
    ends = last if last is not None else (some, some)
    slots = run.segs + 1 if kept.states.dim() == 5 else 1
    linear_forward[(parts * run.segs * run.b * run.h,)](
        *filled(some, x.q, x.k, x.v, kept.levels, x.valid, kept.states, kept.norms, out, den, *ends),
        *run.strides(x.q, x.k, x.v, kept.levels), x.scale, run.n, run.segs, run.seg, slots, run.h, run.h // run.g,
        BF=run.bf, BE=width, PARTS=parts, NORMALIZE=run.divides, HAS_KEYS=x.k is not None, WITH_LAST=last is not None,
        **run.flags, **run.product, **run.tiles("linear_forward"),
    )  # fmt: skip
    return out, den


def state_part(width: int, other: int) -> int:
    """How much of one dimension of a state one program holds, where it holds all of the other."""
    return min(width, max(STATE_TILE // other, 16))


def filled(some: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return tensors, with any other one in place of those that a kernel does not read."""
    return [some if x is None else x for x in tensors]
