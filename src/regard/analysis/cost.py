"""Measure the cost of a mechanism at a given length: FLOPs, state size, pairs, distance to softmax."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from regard.analysis.probe import attention_matrix, estimation_error, has_weights, sampled
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Mixer, Places, nbytes
from regard.mixers.estimation import Estimator, PoorEstimate
from regard.mixers.softmax import Softmax
from regard.mixers.sparse import Sparse, count_pairs
from regard.patterns import Pattern
from regard.spec import Spec, option_defaults
from regard.text import growth

GROWTH_LENGTH = 16_384  # growth is measured from half this length to it, or at the requested length if that is longer
MEASURED = 16_384  # tokens of the longest state that is filled; longer ones are extrapolated by their growth
HEAVY = 1 << 25  # elements of a mixer that is too large to be built only to measure the growth of its state
COMPARED = 512  # tokens of the matrix that is compared with softmax
DEVIATIONS = (1.0, 0.5, 0.25)  # standard deviations of the queries and keys on which an estimate is compared
SHORT = 512  # tokens of a pass from which longer ones are extrapolated
MAX_BLOCKS = 2048  # a side; where there would be more, larger ones are counted


@dataclass(frozen=True)
class FlopCount:
    """Hold the parameters and the FLOPs of a forward pass over one sequence, projections included."""

    parameters: int
    flops: int
    growth: float | None  # mixing alone grows as n ** growth; None: it has one length only


@dataclass(frozen=True)
class StateSize:
    """Hold the size of the streaming state of one sequence in float32."""

    bytes: int
    growth: float  # as t ** growth


@dataclass(frozen=True)
class Pairs:
    """Hold the number of pairs of a pattern."""

    per_head: float
    density: float  # as a share of full attention, causal or not
    block: int  # tokens a side
    block_density: float  # the share of blocks that hold a pair


@dataclass(frozen=True)
class Distance:
    """Hold || A - softmax's A || / || softmax's A || on q, k of unit variance."""

    tokens: int
    to_softmax: float
    of_uniform: float  # the same for equal weights, as a baseline


@dataclass(frozen=True)
class Estimate:
    """Hold the errors of a core that estimates a softmax, on Gaussian q and k of several standard deviations."""

    tokens: int
    deviations: tuple[float, ...]  # of q and k
    errors: tuple[float, ...]  # of its weights, relative
    of_equal_weights: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Hold the measurements of one mechanism at one length. None: not applicable."""

    spec: Spec
    dims: Dims
    length: int
    claims: Can
    work: FlopCount
    state: StateSize | None
    pairs: Pairs | None
    distance: Distance | None
    estimate: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        row, dims = self.spec.row, self.dims
        about = {"text": str(self.spec), "family": row.family, "summary": row.summary, "paper": row.paper}
        settings = {"length": self.length, "causal": dims.causal, "heads": dims.heads, "width": dims.width}
        claims = [c.name.lower() for c in Can if c in self.claims and c.name]
        measured = {name: part and asdict(part) for name, part in self._parts().items()}
        options = option_defaults(row.name)
        return {"spec": self.spec.to_json(), **about, "options": options, **settings, "claims": claims, **measured}

    def _parts(self) -> dict[str, Any]:
        parts = {"work": self.work, "state": self.state, "pairs": self.pairs, "distance": self.distance}
        return {**parts, "estimate": self.estimate}

    def lines(self) -> list[tuple[str, str]]:
        """Return a label and a phrase for every measurement that applies, for tables and figures."""
        found = [
            ("claims", str(self.claims)),
            ("measured at", self._setting()),
            ("parameters", f"{self.work.parameters:,}"),
            ("FLOPs of a pass", _si_number(self.work.flops) + _grows(self.work.growth, "n", ", mixing ")),
        ]
        if self.state:
            size, power = self.state.bytes, self.state.growth
            found.append(("streaming state", f"{_si_number(size)}B{_grows(power, 't', ', ')}"))
        if self.pairs:
            found.append(("pairs per head", f"{self.pairs.per_head:,.0f}, {_percent(self.pairs.density)} of all"))
            found.append((f"blocks of {self.pairs.block}", f"{_percent(self.pairs.block_density)} hold a pair"))
        if self.distance:
            far, uniform, n = self.distance.to_softmax, self.distance.of_uniform, self.distance.tokens
            found.append(("distance to softmax", f"{far:.2f} on {n} tokens; equal weights {uniform:.2f}"))
        if self.estimate:
            found += _estimation(self.estimate)
        return [*found, ("paper", self.spec.row.paper)]

    def _setting(self) -> str:
        form = ", causal" if self.dims.causal else ""
        heads = "1 head" if self.dims.heads == 1 else f"{self.dims.heads} heads"
        return f"{self.length:,} tokens{form}, width {self.dims.width:,}, {heads}"


def cost(spec: Spec | str | Pattern, length: int = 1024, *, causal: bool = False, heads: int = 4, width: int = 256) -> Cost:
    """Measure all numbers that `regard show` prints, with a fixed seed. FLOPs are counted on meta tensors."""
    spec, dims = Spec.of(spec), Dims(width=width, heads=heads, causal=causal)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", PoorEstimate)  # the error is one of the measurements
        torch.manual_seed(0)
        return _cost(spec, dims, length)


def _cost(spec: Spec, dims: Dims, length: int) -> Cost:
    mixer = spec.build(replace(dims, max_len=length))
    pairs = _pair_count(pattern_of(mixer), length, dims)
    tokens = sample(mixer, length, COMPARED)
    comparable = isinstance(mixer, Attention) and mixer.rate == 1 and has_weights(mixer.core, tokens)
    distance = _softmax_distance(mixer.core, tokens) if comparable else None  # type: ignore[arg-type]
    work = _work(spec, dims, length)
    state = _state(mixer, spec, length)
    return Cost(spec, dims, length, mixer.can, work, state, pairs, distance, _estimate(mixer, tokens))


class _Flops(NamedTuple):
    all: int
    mixing: int  # all but the projections


def _work(spec: Spec, dims: Dims, length: int) -> FlopCount:
    """Count FLOPs and parameters on meta tensors."""
    far = max(length, GROWTH_LENGTH)
    with torch.device("meta"):
        mixer, parameters = (spec.build(replace(dims, max_len=n)) for n in (far, length))
    count: Callable[[int], _Flops] = cache(partial(_count_flops, mixer))
    if pattern_of(mixer) is None:
        count = partial(_parabola, count)
    grows = _holds(mixer, far) and _holds(mixer, far // 2)
    power = _exponent(count(far // 2).mixing, count(far).mixing) if grows else None
    total = sum(p.numel() for p in parameters.parameters())
    return FlopCount(total, count(length).all, power)


@torch.no_grad()
def _count_flops(mixer: Mixer, n: int) -> _Flops:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mixer(torch.empty(1, n, mixer.dims.width, device="meta"))
    counts, kind = counter.get_flop_counts(), type(mixer).__name__
    projections = [f"{kind}.{name}" for name, part in mixer.named_modules() if isinstance(part, nn.Linear)]
    projected = sum(sum(counts[name].values()) for name in projections if name in counts)
    total = int(counter.get_total_flops())
    return _Flops(total, total - projected)


def _parabola(count: Callable[[int], _Flops], n: int) -> _Flops:
    """Extrapolate a count where four short ones lie on a parabola: some mechanisms take many small steps."""
    if n <= 4 * SHORT:
        return count(n)
    x = n / SHORT - 1
    found = []
    for one, two, three, four in zip(*(count(SHORT * x) for x in (1, 2, 3, 4)), strict=True):
        slope = two - one
        bend = three - 2 * two + one
        if four != one + 3 * slope + 3 * bend:
            return count(n)
        curve = x * (x - 1) / 2 * bend
        found.append(round(one + x * slope + curve))
    return _Flops(*found)


def _exponent(once: float, twice: float) -> float:
    """Return the exponent of growth from the values at a length and at twice that length."""
    return math.log2(twice / once) if once > 0 and twice > 0 else 0.0


def _state(mixer: Mixer, spec: Spec, length: int) -> StateSize | None:
    """Measure the size of the streaming state, or return None where a mixer does not stream."""
    if Can.CAUSAL not in mixer.can:
        return None
    filled = min(length, MEASURED)
    far = min(max(length, GROWTH_LENGTH), MEASURED)
    shortest = 2 * max(filled, 4 * SHORT)
    while far >= shortest and _elements(spec, replace(mixer.dims, causal=True, max_len=far)) > HEAVY:
        far //= 2  # weights per position, or per pair of positions
    # the state of a core may depend on the content of its keys; all other sizes are measured on meta tensors
    with torch.device("cpu" if isinstance(mixer, Attention) else "meta"):
        mixer = spec.build(replace(mixer.dims, causal=True, max_len=max(far, length)))
    if Can.STREAM not in mixer.can:
        return None
    power = _exponent(_state_bytes(mixer, far // 2), _state_bytes(mixer, far))
    longer = (length / filled) ** power
    return StateSize(round(_state_bytes(mixer, filled) * longer), power)


def _elements(spec: Spec, dims: Dims) -> int:
    """Count the elements of the weights and buffers of a mixer, on the meta device."""
    with torch.device("meta"):
        mixer = spec.build(dims)
    return sum(x.numel() for x in (*mixer.parameters(), *mixer.buffers()))


@torch.no_grad()
def _state_bytes(mixer: Mixer, length: int) -> int:
    dims = mixer.dims
    if not isinstance(mixer, Attention):
        tokens = torch.empty(1, length, dims.width, device="meta")
        return mixer.extend(mixer.start(1), tokens)[1].nbytes
    core = mixer.core
    rng = torch.Generator().manual_seed(0)  # random keys: a core that sorts them by content would drop equal ones
    k, v = (torch.randn(1, dims.g, length, size, generator=rng) for size in core.sizes)
    memory = core.push(core.empty(k, v), k, v, Places.of(k[:, 0]))
    return nbytes(core.forget(memory, torch.tensor([length])))


def pattern_of(mixer: Mixer) -> Pattern | None:
    """Return the union of the patterns of all parts of a mixer; None: it has no pattern."""
    found = [part.pattern for part in mixer.modules() if isinstance(part, Sparse)]
    return reduce(or_, found) if found else None


def sample(mixer: Mixer, length: int, most: int) -> int:
    """Return a length of at most `most` tokens, unless a pattern (the edges of a graph) fits one length alone."""
    shorter = min(length, most)
    return shorter if _holds(mixer, shorter) else length


def _holds(mixer: Mixer, n: int) -> bool:
    """Return whether the pattern of a mixer can be used at length n."""
    pattern = pattern_of(mixer)
    try:
        return pattern is None or pattern.bound(n, n) is not None
    except ValueError:
        return False


def _pair_count(pattern: Pattern | None, length: int, dims: Dims) -> Pairs | None:
    if pattern is None:
        return None
    block = 64 * -(-length // (64 * MAX_BLOCKS))
    found = count_pairs(pattern, length, causal=dims.causal, heads=dims.heads, block=block)
    return Pairs(found.pairs / dims.heads, found.density, block, found.block_density)


@torch.no_grad()
def _softmax_distance(core: Core, n: int) -> Distance:
    """Measure the distance of attention weights, and of equal weights, to those of softmax."""
    dims, rng = core.dims, torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, n, dims.d, generator=rng) for h in (dims.heads, dims.g))
    exact = attention_matrix(Softmax(dims), q, k, causal=dims.causal)
    found = attention_matrix(core, sampled(core, q)[0], sampled(core, k)[1], causal=dims.causal)
    visible = torch.ones(n, n).tril() if dims.causal else torch.ones(n, n)
    uniform = visible / visible.sum(-1, keepdim=True)
    size = exact.norm()
    return Distance(n, float((found - exact).norm() / size), float((uniform - exact).norm() / size))


def _estimate(mixer: Mixer, n: int) -> Estimate | None:
    """Measure the errors of a core that estimates a softmax, for several sizes of queries and keys."""
    if not isinstance(mixer, Attention) or not isinstance(mixer.core, Estimator):
        return None
    core, dims, rng = mixer.core, mixer.dims, torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, n, dims.d, generator=rng) for h in (dims.heads, dims.g))
    found = [estimation_error(core, s * q, pad(s * k, (0, core.gates))) for s in DEVIATIONS]
    return Estimate(n, DEVIATIONS, *zip(*found, strict=True))


def _estimation(estimate: Estimate) -> list[tuple[str, str]]:
    rows = zip(estimate.deviations, estimate.errors, estimate.of_equal_weights, strict=True)
    words = "; ".join(f"{error:.2g} (equal weights {equal:.2g}) at deviation {s:g}" for s, error, equal in rows)
    return [("estimation error", f"{words} of q and k"), ("on your data", "regard.analysis.probe.estimation_error(layer, x)")]


def _grows(power: float | None, letter: str, before: str) -> str:
    if power is None:
        return ""
    rounded = round(power, 1)
    return f"{before}grows as {growth(rounded, letter)}" if rounded else f"{before}does not grow"


def _percent(share: float) -> str:
    """Format a share with three significant digits."""
    return f"{100 * share:.3g} %"


def _si_number(number: float) -> str:
    """Format 1234567 as 1.23 M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} "
