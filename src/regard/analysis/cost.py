"""What a mechanism costs and keeps at a given length: counted and measured, never declared."""

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
from regard.mixers.sparse import Sparse, census
from regard.patterns import Pattern
from regard.spec import Spec
from regard.text import growth

GROWTH_LENGTH = 16_384  # growth is measured from half this length to it, or from half the length asked for if that is longer
MEASURED = 16_384  # tokens of the longest state that is really filled; beyond it, its growth says the rest
HEAVY = 1 << 25  # numbers in a mixer that is too large to be made only to measure how its state grows
COMPARED = 512  # tokens of the matrix that is compared with softmax
DEVIATIONS = (1.0, 0.5, 0.25)  # of the queries and keys on which an estimate is compared with what it estimates
SHORT = 512  # tokens of a pass that may stand for longer ones
MAX_BLOCKS = 2048  # a side; where there would be more, larger ones are counted


@dataclass(frozen=True)
class FlopCount:
    """A forward pass over one sequence, projections included."""

    parameters: int
    flops: int
    growth: float | None  # mixing alone grows as n ** growth; None: it has one length only


@dataclass(frozen=True)
class StateSize:
    """What streaming has to remember, of one sequence in float32."""

    bytes: int
    growth: float  # as t ** growth


@dataclass(frozen=True)
class Pairs:
    """The pairs of a pattern."""

    per_head: float
    density: float  # among those that full attention, causal or not, has
    block: int  # tokens a side
    block_density: float  # of blocks that hold a pair, which is what hardware sees


@dataclass(frozen=True)
class Distance:
    """|| A - softmax's A || / || softmax's A || on q, k of unit variance."""

    tokens: int
    to_softmax: float
    of_uniform: float  # the same for equal weights: what knowing nothing costs


@dataclass(frozen=True)
class Estimate:
    """How far a core that estimates a softmax is from it, on Gaussian q and k of some standard deviations."""

    tokens: int
    deviations: tuple[float, ...]  # of q and k
    errors: tuple[float, ...]  # of its weights, relative
    of_equal_weights: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Numbers for one mechanism at one length. None: the question does not apply to it."""

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
        asked = {"length": self.length, "causal": dims.causal, "heads": dims.heads, "width": dims.width}
        claims = [c.name.lower() for c in Can if c in self.claims and c.name]
        found = {name: part and asdict(part) for name, part in self._parts().items()}
        return {"spec": self.spec.to_json(), **about, **asked, "claims": claims, **found}

    def _parts(self) -> dict[str, Any]:
        parts = {"work": self.work, "state": self.state, "pairs": self.pairs, "distance": self.distance}
        return {**parts, "estimate": self.estimate}

    def lines(self) -> list[tuple[str, str]]:
        """A label and a phrase for every fact that applies, for tables and figures."""
        form, heads = ", causal" * self.dims.causal, f"{self.dims.heads} head{'s' * (self.dims.heads > 1)}"
        found = [
            ("claims", str(self.claims)),
            ("measured at", f"{self.length:,} tokens{form}, width {self.dims.width:,}, {heads}"),
            ("parameters", f"{self.work.parameters:,}"),
            ("FLOPs of a pass", _si_number(self.work.flops) + _grows(self.work.growth, "n", ", mixing ")),
        ]
        if self.state:
            found.append(("streaming state", f"{_si_number(self.state.bytes)}B" + _grows(self.state.growth, "t", ", ")))
        if self.pairs:
            found.append(("pairs per head", f"{self.pairs.per_head:,.0f}, {_percent(self.pairs.density)} of all"))
            found.append((f"blocks of {self.pairs.block}", f"{_percent(self.pairs.block_density)} hold a pair"))
        if self.distance:
            far, uniform, n = self.distance.to_softmax, self.distance.of_uniform, self.distance.tokens
            found.append(("distance to softmax", f"{far:.2f} on {n} tokens; equal weights {uniform:.2f}"))
        if self.estimate:
            found += _estimation(self.estimate)
        return [*found, ("paper", self.spec.row.paper)]


def cost(spec: Spec | str | Pattern, length: int = 1024, *, causal: bool = False, heads: int = 4, width: int = 256) -> Cost:
    """All the numbers `regard show` prints, the same every time. Long passes are counted on tensors without content."""
    spec, dims = Spec.of(spec), Dims(width=width, heads=heads, causal=causal)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", PoorEstimate)  # how poor it is, is one of the facts
        torch.manual_seed(0)
        return _cost(spec, dims, length)


def _cost(spec: Spec, dims: Dims, length: int) -> Cost:
    mixer = spec.build(replace(dims, max_len=length))
    pairs, tokens = _pair_count(pattern_of(mixer), length, dims), sample(mixer, length, COMPARED)
    known = isinstance(mixer, Attention) and mixer.rate == 1 and has_weights(mixer.core, tokens)
    distance = _distance(mixer.core, tokens) if known else None  # type: ignore[arg-type]
    work, state, estimate = _work(spec, dims, length), _state(mixer, spec, length), _estimate(mixer, tokens)
    return Cost(spec, dims, length, mixer.can, work, state, pairs, distance, estimate)


class _Flops(NamedTuple):
    all: int
    mixing: int  # all but the projections


def _work(spec: Spec, dims: Dims, length: int) -> FlopCount:
    """Counted on a mixer without content."""
    far = max(length, GROWTH_LENGTH)
    with torch.device("meta"):
        mixer, parameters = (spec.build(replace(dims, max_len=n)) for n in (far, length))
    count: Callable[[int], _Flops] = cache(partial(_count_flops, mixer))
    if pattern_of(mixer) is None:
        count = partial(_parabola, count)
    grows = _holds(mixer, far) and _holds(mixer, far // 2)
    power = _exponent(count(far // 2).mixing, count(far).mixing) if grows else None
    return FlopCount(sum(p.numel() for p in parameters.parameters()), count(length).all, power)


@torch.no_grad()
def _count_flops(mixer: Mixer, n: int) -> _Flops:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mixer(torch.empty(1, n, mixer.dims.width, device="meta"))
    each, kind = counter.get_flop_counts(), type(mixer).__name__
    projections = [f"{kind}.{name}" for name, part in mixer.named_modules() if isinstance(part, nn.Linear)]
    total = int(counter.get_total_flops())
    return _Flops(total, total - sum(sum(each[name].values()) for name in projections if name in each))


def _parabola(count: Callable[[int], _Flops], n: int) -> _Flops:
    """The same count, quick at any length where four short ones lie on a parabola: some mechanisms take many small steps."""
    if n <= 4 * SHORT:
        return count(n)
    found = []
    for one, two, three, four in zip(*(count(SHORT * x) for x in (1, 2, 3, 4)), strict=True):
        slope, bend, x = two - one, three - 2 * two + one, n / SHORT - 1
        if four != one + 3 * slope + 3 * bend:
            return count(n)
        found.append(round(one + x * slope + x * (x - 1) / 2 * bend))
    return _Flops(*found)


def _exponent(once: float, twice: float) -> float:
    """The power by which something grows when its length doubles."""
    return math.log2(twice / once) if once > 0 and twice > 0 else 0.0


def _state(mixer: Mixer, spec: Spec, length: int) -> StateSize | None:
    far, filled = min(max(length, GROWTH_LENGTH), MEASURED), min(length, MEASURED)
    if Can.CAUSAL not in mixer.can:
        return None
    while far // 2 >= max(filled, 4 * SHORT) and _numbers(spec, replace(mixer.dims, causal=True, max_len=far)) > HEAVY:
        far //= 2  # weights per position, or even per pair of them
    # only a core may look at what it keeps; all else shows the size of its state without content, and without the work
    with torch.device("cpu" if isinstance(mixer, Attention) else "meta"):
        mixer = spec.build(replace(mixer.dims, causal=True, max_len=max(far, length)))
    if Can.STREAM not in mixer.can:
        return None
    power = _exponent(_remembered(mixer, far // 2), _remembered(mixer, far))
    return StateSize(round(_remembered(mixer, filled) * (length / filled) ** power), power)


def _numbers(spec: Spec, dims: Dims) -> int:
    """Weights and buffers of a mixer, without making them."""
    with torch.device("meta"):
        mixer = spec.build(dims)
    return sum(x.numel() for x in (*mixer.parameters(), *mixer.buffers()))


@torch.no_grad()
def _remembered(mixer: Mixer, length: int) -> int:
    dims = mixer.dims
    if not isinstance(mixer, Attention):
        return mixer.extend(mixer.start(1), torch.empty(1, length, dims.width, device="meta"))[1].nbytes
    core = mixer.core
    random = torch.Generator().manual_seed(0)  # keys that differ: what sorts them by likeness would forget equal ones
    k, v = (torch.randn(1, dims.g, length, size, generator=random) for size in core.sizes)
    return nbytes(core.forget(core.push(core.empty(k, v), k, v, Places.of(k[:, 0])), torch.tensor([length])))


def pattern_of(mixer: Mixer) -> Pattern | None:
    """All pairs that some part of it may look at; None: it does not choose among pairs."""
    found = [part.pattern for part in mixer.modules() if isinstance(part, Sparse)]
    return reduce(or_, found) if found else None


def sample(mixer: Mixer, length: int, most: int) -> int:
    """At most so many tokens to look at, unless its pattern, say the edges of a graph, holds for one length alone."""
    return min(length, most) if _holds(mixer, min(length, most)) else length


def _holds(mixer: Mixer, n: int) -> bool:
    try:
        return (pattern := pattern_of(mixer)) is None or pattern.bound(n, n) is not None
    except ValueError:
        return False


def _pair_count(pattern: Pattern | None, length: int, dims: Dims) -> Pairs | None:
    if pattern is None:
        return None
    block = 64 * -(-length // (64 * MAX_BLOCKS))
    found = census(pattern, length, causal=dims.causal, heads=dims.heads, block=block)
    return Pairs(found.pairs / dims.heads, found.density, block, found.block_density)


@torch.no_grad()
def _distance(core: Core, n: int) -> Distance:
    """How far the weights are from softmax's, beside how far equal weights are."""
    dims, random = core.dims, torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, n, dims.d, generator=random) for h in (dims.heads, dims.g))
    exact = attention_matrix(Softmax(dims), q, k, causal=dims.causal)
    found = attention_matrix(core, sampled(core, q)[0], sampled(core, k)[1], causal=dims.causal)
    visible = torch.ones(n, n).tril() if dims.causal else torch.ones(n, n)
    uniform = visible / visible.sum(-1, keepdim=True)
    return Distance(n, *(float((a - exact).norm() / exact.norm()) for a in (found, uniform)))


def _estimate(mixer: Mixer, n: int) -> Estimate | None:
    """Errors of a core that estimates a softmax, by the size of queries and keys."""
    if not isinstance(mixer, Attention) or not isinstance(mixer.core, Estimator):
        return None
    core, dims, random = mixer.core, mixer.dims, torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, n, dims.d, generator=random) for h in (dims.heads, dims.g))
    found = [estimation_error(core, s * q, pad(s * k, (0, core.gates))) for s in DEVIATIONS]
    return Estimate(n, DEVIATIONS, *zip(*found, strict=True))


def _estimation(known: Estimate) -> list[tuple[str, str]]:
    rows = zip(known.deviations, known.errors, known.of_equal_weights, strict=True)
    words = "; ".join(f"{error:.2g} (equal weights {equal:.2g}) at deviation {s:g}" for s, error, equal in rows)
    return [("estimation error", f"{words} of q and k"), ("on your data", "regard.analysis.probe.estimation_error(layer, x)")]


def _grows(power: float | None, letter: str, before: str) -> str:
    if power is None:
        return ""
    return before + (f"grows as {growth(round(power, 1), letter)}" if round(power, 1) else "does not grow")


def _percent(share: float) -> str:
    """Three digits that count, however small it is."""
    return f"{100 * share:.3g} %"


def _si_number(number: float) -> str:
    """1234567 as 1.23 M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} "
