"""Launch the Triton kernels of linear attention: sizes of tiles and segments, buffers, and the order of kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.kernel_launch import KernelLaunch, present_slots
from regard.ops.linear.feature_maps import FEATURES
from regard.ops.linear.linear_op import gain_of_heads
from regard.ops.linear.triton_kernels import linear_forward, linear_scan, linear_sums
from regard.ops.linear.triton_walk import linear_walk
from regard.ops.linear.zero_state import is_zero_state
from regard.ops.triton_support import block_of, dot_precision, kernel_config

OptionalT = TypeVar("OptionalT", Tensor, Tensor | None)
WIDEST_WALK = 64  # features and numbers of a value, of a state that a program carries from tile to tile
STATE_TILE = 1 << 14  # elements of a state that one program holds


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
    states: Tensor  # (b g slots f e) before every segment and behind the last, in the type of products; or the one given
    norms: Tensor | None  # (b g slots f)
    decays: Tensor | None  # (b g slots f) log decay of every segment
    levels: Tensor | None  # (b g n 1) or (b g n f) log decay from the start of the segment
    tile_norms: Tensor | None = None  # (b g tiles f) sums of the keys of every tile, where all kernels have the same tiles


LaunchParts = tuple[tuple[int, ...], tuple, dict[str, Any]]  # the grid, the numbers and the constants of a kernel


class LinearLaunch:
    """The sizes, flags and launches that all passes of one signature share: see `linear_launch`."""

    def __init__(self, x: LinearInputs, zero: bool) -> None:
        self.zero = zero
        self.ready = _is_aligned(x)
        x = _aligned(x, zero)
        self._launches: dict[Hashable, KernelLaunch] = {}
        tokens = x.q if x.q is not None else x.k
        assert tokens is not None
        self.number = tokens.get_device()
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
        exact = not half and torch.float32 in (dtype, tokens.dtype)
        precision = dot_precision(torch.float32) if exact else "tf32"
        if precision == "ieee":
            precision = "tf32x3"  # all digits of float32, by three products on tensor cores
        self.type = torch.bfloat16 if half else torch.float32
        self.product = {"TYPE": tl.bfloat16 if half else tl.float32, "PRECISION": precision}
        width = max(self.bf, self.be)
        self.key = f"{'half' if half else 'single'} {width}"
        if self.decay == 2:
            self.key += " features"
        self.seg = self._segment()
        self.segs = -(-self.n // self.seg)
        self.norm_tiles = self._norm_tiles(x)
        self.flags = {
            "f": self.f,
            "e": self.e,
            "DECAY": self.decay,
            "NORM": self.norm,
            "FEATURE": FEATURES.index(x.feature),
            "HAS_VALID": x.valid is not None,
        }

    def inputs(self, x: LinearInputs) -> LinearInputs:
        """Return inputs as kernels take them."""
        return x if self.ready and self.zero else _aligned(x, self.zero)

    def launch(self, name: Hashable, kernel: Any, tensors: tuple[Tensor | None, ...], parts: Callable[[], LaunchParts]) -> None:
        """Launch a kernel with those tensors that are there; the name and which they are decide its other arguments."""
        present = tuple([x is not None for x in tensors])
        key = (name, present)
        found = self._launches.get(key)
        if found is None:
            grid, numbers, constants = parts()
            found = KernelLaunch(kernel, grid, present_slots(present), numbers, constants, self.number)
            self._launches[key] = found
        found(*[x for x in tensors if x is not None])

    def tiles(self, kernel: str) -> dict[str, Any]:
        """The tokens in a tile of a kernel, and its warps and stages."""
        config = dict(kernel_config(kernel, self.key, self.device))
        config["C"] = min(config.pop("chunk"), self.seg)
        return config

    def _segment(self) -> int:
        """Tokens in a segment: fewer where there would be too few programs for the card."""
        config = kernel_config("linear_segment", self.key, self.device)
        size, programs = config["tokens"], config["programs"]
        smallest = config["smallest"]
        while size > smallest and self.b * self.g * -(-self.n // size) < programs:
            size //= 2
        return size

    def _norm_tiles(self, x: LinearInputs) -> int:
        """Tiles of a sequence whose sums of keys the walks read; 0: they add those up themselves."""
        sizes = {self.tiles(kernel)["C"] for kernel in ("linear_sums", "linear_adjoint", "linear_walk", "linear_walk_grads")}
        if not self.norm or self.decay or len(sizes) > 1 or not self.walks(x):
            return 0
        return -(-self.n // sizes.pop())

    def norms_of_tiles(self, heads: int) -> Tensor | None:
        return self.new(self.b, heads, self.norm_tiles, self.f) if self.norm_tiles else None

    def walks(self, x: LinearInputs) -> bool:
        """Return whether programs walk along segments: where tokens are read and written, and registers hold a state."""
        return x.q is not None and x.k is not None and max(self.bf, self.be) <= WIDEST_WALK

    def strides(self, *tensors: Tensor | None) -> list[int]:
        """The strides of batch, head and token; 0 for tensors that are not there."""
        found: list[int] = []
        for t in tensors:
            found += (0, 0, 0) if t is None else t.stride()[:3]
        return found

    def factors(self, gain: Tensor | None) -> Tensor | None:
        """The given factors of all outputs (b h n)."""
        if gain is None:
            return None
        return gain_of_heads(gain, self.h).float().contiguous()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def tokens(self, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor (b heads n size) in the layout (b n heads size), from which heads are joined without a copy."""
        wide = heads * size
        return torch.empty_strided((self.b, heads, self.n, size), (self.n * wide, size, wide, 1), dtype=dtype, device=self.device)

    def slots(self, heads: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.new(self.b, heads, self.segs + 1, *size, dtype=dtype)

    def state_slots(self, states: Tensor) -> int:
        """How many states there are: one for each segment, or the given one."""
        return self.segs + 1 if states.dim() == 5 else 1

    def has_states(self, states: Tensor) -> bool:
        """Return whether there are other states than zeros."""
        return states.dim() == 5 or not self.zero


def linear_launch(x: LinearInputs) -> LinearLaunch:
    """Return what is prepared for the signature of these inputs."""
    q, k, v, state, log_decay, norm_state, valid, *options, gain, root = x
    zero = is_zero_state(state)
    some = q if v is None else v
    assert some is not None
    precision = torch.get_float32_matmul_precision() if some.dtype == torch.float32 else None
    there = (norm_state is None, valid is None, gain is None, root, precision)
    key = (*_key(q), *_key(k), *_key(v), *_key(log_decay), there, *options, state.shape, state.get_device(), zero)
    return _prepared_launch(key, x, zero)


def _key(x: Tensor | None) -> tuple[Hashable, ...]:
    return (None,) if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


@signature_cache
def _prepared_launch(key: Hashable, x: LinearInputs, zero: bool) -> LinearLaunch:  # noqa: ARG001 - the key of the cache
    return LinearLaunch(x, zero)


def _is_aligned(x: LinearInputs) -> bool:
    """Return whether no tensor but the states has to be converted for kernels."""
    return x.valid is None and all(features_adjacent(t) is t for t in (x.q, x.k, x.v, x.log_decay))


def _aligned(x: LinearInputs, zero: bool) -> LinearInputs:
    """Make the features of every token adjacent, and states contiguous float32; a state of zeros is not read."""
    q, k, v, log_decay = (features_adjacent(t) for t in (x.q, x.k, x.v, x.log_decay))
    state, norm_state = x.state, x.norm_state
    if not zero:
        state = state.float().contiguous()
        norm_state = None if norm_state is None else norm_state.float().contiguous()
    valid = None if x.valid is None else x.valid.contiguous().view(torch.uint8)
    return LinearInputs(q, k, v, state, log_decay, norm_state, valid, x.feature, x.scale, x.normalize, x.gain, x.gate_root)


def features_adjacent(x: OptionalT) -> OptionalT:
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch_forward(
    inputs: LinearInputs, *, keep: bool, run: LinearLaunch | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, LinearStates]:
    """Return out (b h n e), its norm (b h n), the last state and norm state, and what the backward pass needs if `keep`.

    run: what `linear_launch` gives for these inputs, if the caller has it.
    """
    run = run or linear_launch(inputs)
    x = run.inputs(inputs)
    last, last_z = x.state, x.norm_state
    kept = LinearStates(None, None, x.state, x.norm_state, None, x.log_decay)
    if x.k is not None:
        last = run.new(*x.state.shape)
        last_z = None if x.norm_state is None else run.new(*x.norm_state.shape)
        kept = _segment_states(run, x, last, last_z, with_states=x.q is not None or (keep and run.decay > 0))
    if x.q is None:
        return None, None, last, last_z, kept
    out, den = _outputs(run, x, kept)
    return out, den if run.norm else None, last, last_z, kept._replace(out=out if x.normalize else None, den=den)


def launch_states(inputs: LinearInputs, out: Tensor, den: Tensor | None) -> LinearStates:
    """Return what the backward pass needs, from results of a forward pass that kept nothing else."""
    run = linear_launch(inputs)
    x = run.inputs(inputs)
    kept = LinearStates(None, None, x.state, x.norm_state, None, x.log_decay)
    if x.k is not None:
        last_z = None if x.norm_state is None else run.new(*x.norm_state.shape)
        kept = _segment_states(run, x, run.new(*x.state.shape), last_z, with_states=True)
    return kept._replace(out=out, den=den if x.gain is None else run.factors(x.gain))


def _segment_states(
    run: LinearLaunch, x: LinearInputs, last: Tensor, last_z: Tensor | None, *, with_states: bool
) -> LinearStates:
    """The state and the norm before every segment, the log decay of each, and decays as the other kernels take them.

    One segment alone needs no scan: the state before it is the one given. Slots behind the last segment are for states alone.
    """
    once = run.segs == 1 and not (with_states and run.decay)
    own, own_z = (last, last_z) if once else (run.slots(run.g, run.f, run.e), run.slots(run.g, run.f) if run.norm else None)
    decays = run.slots(run.g, run.f) if run.decay else None
    levels = run.new(run.b, run.g, run.n, 1 if run.decay == 1 else run.f) if run.decay else None
    tile_norms = run.norms_of_tiles(run.g) if with_states else None
    tensors = (x.k, x.v, x.log_decay, x.valid, own, own_z, decays, levels, x.state, x.norm_state, tile_norms)

    def parts() -> LaunchParts:
        width = state_part(run.be, run.bf)
        parts = run.be // width
        tiles = run.tiles("linear_sums")
        sizes = (run.n, run.segs, 1 if once else run.segs + 1, run.seg, run.norm_tiles, run.g)
        numbers = (*run.strides(x.k, x.v, x.log_decay), x.gate_root, *sizes)
        own = {"BF": run.bf, "BE": width, "PARTS": parts, "GATES": x.gate_root > 0, "CUMSUM": tiles["num_warps"] <= 4}
        first = {"WITH_FIRST": once and not run.zero, "TILE_NORMS": tile_norms is not None}
        return (parts * run.segs * run.b * run.g,), numbers, {**own, **first, **run.flags, **run.product, **tiles}

    run.launch(("sums", once), linear_sums, tensors, parts)
    states, norms = x.state, x.norm_state
    if not once:
        if with_states:
            states = run.slots(run.g, run.f, run.e, dtype=run.type)
            norms = run.slots(run.g, run.f) if run.norm else None
        first = None if run.zero else (x.state, x.norm_state)
        scan_segments(run, (own, own_z), (states, norms) if with_states else None, decays, first, (last, last_z), heads=1)
    return LinearStates(None, None, states, norms, decays, levels, tile_norms)


PairOfStates = tuple[Tensor, Tensor | None]


def scan_segments(
    run: LinearLaunch,
    own: tuple[Tensor | None, Tensor | None],
    into: PairOfStates | None,
    decays: Tensor | None,
    first: PairOfStates | None,
    last: PairOfStates,
    *,
    heads: int,
    reverse: bool = False,
    other: PairOfStates | None = None,
    dots: Tensor | None = None,
) -> None:
    """Scan over the segments, from 0 where there is no `first`; `other` and `dots`: see the kernel."""
    nothing = (None, None)
    tensors = (*own, *(into or nothing), decays, *(first or nothing), *last, *(other or nothing), dots)

    def parts() -> LaunchParts:
        config = dict(kernel_config("linear_scan", run.key, run.device))
        sizes = {"f": run.f, "e": run.e, "BE": run.be, "SB": config.pop("segments"), "DECAY": run.decay, "NORM": run.norm}
        there = {"HAS_OWN": own[0] is not None, "HAS_FIRST": first is not None, "WITH_STATES": into is not None}
        constants = {**sizes, "REVERSE": reverse, **there, "WITH_DOT": dots is not None, **config}
        return (run.b * run.g * run.f,), (run.segs, heads), constants

    name = ("scan", reverse, heads, own[0] is None, first is None, into is None, other is None, dots is None)
    run.launch(name, linear_scan, tensors, parts)


def _outputs(run: LinearLaunch, x: LinearInputs, kept: LinearStates) -> tuple[Tensor, Tensor | None]:
    assert x.q is not None
    out = run.tokens(run.h, run.e, x.q.dtype if x.v is None else x.v.dtype)
    den = run.factors(x.gain)
    if den is None and run.norm:
        den = run.new(run.b, run.h, run.n)
    walks = run.walks(x)
    sums = (kept.tile_norms,) if walks else ()
    tensors = (x.q, x.k, x.v, kept.levels, x.valid, kept.states, kept.norms, *sums, out, den)

    def parts() -> LaunchParts:
        tiles = run.tiles("linear_walk") if walks else run.tiles("linear_forward")
        width = run.be if walks else state_part(run.be, run.bf)
        parts = run.be // width
        count = run.segs if walks else -(-run.n // tiles["C"])
        tiled = (run.norm_tiles,) if walks else ()
        sizes = (run.n, count, run.seg, run.state_slots(kept.states), *tiled, run.h, run.h // run.g)
        numbers = (*run.strides(x.q, x.k, x.v, kept.levels), x.scale, *sizes)
        own = {"BF": run.bf, "BE": width, "NORMALIZE": run.divides, "HAS_STATE": run.has_states(kept.states)}
        if walks:
            own["TILE_NORMS"] = kept.tile_norms is not None
        else:
            own |= {"PARTS": parts, "HAS_KEYS": x.k is not None}
        return (parts * count * run.b * run.h,), numbers, {**own, **run.flags, **run.product, **tiles}

    run.launch(("forward", kept.states.dim()), linear_walk if walks else linear_forward, tensors, parts)
    return out, den


def state_part(width: int, other: int) -> int:
    """How much of one dimension of a state one program holds, where it holds all of the other."""
    return min(width, max(STATE_TILE // other, 16))
