"""What a mechanism costs and keeps at a given length: counted and measured, never declared."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.catalogue import growth
from regard.mixers.attention import Attention, attend
from regard.mixers.base import Can, Core, Dims, Mixer, Places, nbytes
from regard.mixers.patterns import Pattern
from regard.mixers.softmax import Softmax
from regard.mixers.sparse import census
from regard.probe import attention_matrix, has_weights
from regard.spec import Spec

MEASURED = 16_384  # the longest state that is filled with real tokens; beyond it, growth says the rest
COMPARED = 256  # tokens of the matrix that is compared with softmax


@dataclass(frozen=True)
class Facts:
    """Numbers for one mechanism at one length. None: the question does not apply to it."""

    spec: Spec
    length: int
    causal: bool
    heads: int
    width: int
    claims: Can
    parameters: int
    flops: int  # of a forward pass over one sequence, projections included
    cost: float  # the FLOPs of mixing grow as n ** cost from this length to twice it
    state: int | None  # bytes after `length` tokens, float32, one sequence
    memory: float | None  # the state grows as t ** memory up to this length
    pairs: float | None  # of the pattern, per head
    density: float | None  # of pairs, among those that could be seen
    block_density: float | None  # of blocks of 64 x 64 that hold a pair
    error: float | None  # || A - softmax's A || / || softmax's A || on q, k of unit variance
    uniform_error: float | None  # the same for equal weights: what knowing nothing costs

    def to_json(self) -> dict[str, Any]:
        row, claims = self.spec.row, [c.name.lower() for c in Can if c in self.claims and c.name]
        about = {"text": str(self.spec), "family": row.family, "summary": row.summary, "paper": row.paper}
        return {**asdict(self), "spec": self.spec.to_json(), **about, "claims": claims}

    def lines(self) -> list[tuple[str, str]]:
        """Label and sentence of every fact that applies, for tables and figures."""
        found = [
            ("claims", str(self.claims)),
            ("measured at", f"{self.length:,} tokens{', causal' * self.causal}, width {self.width:,}, {self.heads} head{'s' * (self.heads > 1)}"),
            ("parameters", f"{self.parameters:,}"),
            ("FLOPs of a pass", f"{_short(self.flops)}, mixing {_grows(self.cost, 'n')}"),
        ]
        if self.state is not None and self.memory is not None:
            found.append(("streaming state", f"{_short(self.state)}B, {_grows(self.memory, 't')}"))
        if self.pairs is not None:
            found.append(("pairs per head", f"{self.pairs:,.0f}, {self.density:.2%} of all; {self.block_density:.1%} of blocks"))
        if self.error is not None:
            found.append(("distance to softmax", f"{self.error:.2f}; equal weights are at {self.uniform_error:.2f}"))
        return [*found, ("paper", self.spec.row.paper)]


def facts(
    spec: Spec | str | Pattern, length: int = 1024, *, causal: bool = False, heads: int = 4, width: int = 256
) -> Facts:
    """All the numbers `regard show` prints. Any length is cheap: passes are counted on tensors without content."""
    spec, dims = Spec.of(spec), Dims(width=width, heads=heads, causal=causal)
    mixer = spec.build(dims)
    core = mixer.core if isinstance(mixer, Attention) else None
    state, memory = _state(spec, dims, length)
    pairs, density, blocks = _pairs(getattr(core or mixer, "pattern", None), length, dims)
    error, uniform = _error(core, dims, min(length, COMPARED)) if core is not None and has_weights(core) else (None, None)
    flops, cost = _flops(mixer.to("meta"), length)
    parameters = sum(p.numel() for p in mixer.parameters())
    return Facts(
        spec, length, causal, heads, width, mixer.can, parameters, flops, cost,
        state, memory, pairs, density, blocks, error, uniform,
    )  # fmt: skip


def _short(number: float) -> str:
    """1234567 as 1.23 M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} "


def _grows(power: float, letter: str) -> str:
    return f"grows as {growth(power, letter)}" if (power := round(power, 1)) else "does not grow"


def _exponent(once: float, twice: float) -> float:
    """The power by which something grows when its length doubles."""
    return math.log2(twice / once) if once > 0 and twice > 0 else 0.0


def _flops(mixer: Mixer, length: int) -> tuple[int, float]:
    """FLOPs of a whole pass, and the power by which those of mixing alone grow."""
    if isinstance(mixer, Attention):
        once, twice = (_count(_attending(mixer, n)) for n in (length, 2 * length))
    else:
        once, twice = (_count(_passing(mixer, n)) for n in (length, 2 * length))
    return _count(_passing(mixer, length)), _exponent(once, twice)


def _passing(mixer: Mixer, n: int) -> Any:
    x = torch.empty(1, n, mixer.dims.width, device="meta")
    return lambda: mixer(x)


def _attending(mixer: Attention, n: int) -> Any:
    q, k, v = mixer.heads(torch.empty(1, n, mixer.dims.width, device="meta"))
    return lambda: attend(q, k, v, mixer.core, causal=mixer.dims.causal)


def _count(run: Any) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _state(spec: Spec, dims: Dims, length: int) -> tuple[int | None, float | None]:
    """Bytes kept after `length` tokens, and the power by which they grow."""
    mixer = spec.build(Dims(width=dims.width, heads=dims.heads))
    if Can.CAUSAL not in mixer.can:
        return None, None
    mixer = spec.build(Dims(width=dims.width, heads=dims.heads, causal=True))
    if Can.STREAM not in mixer.can:
        return None, None
    filled = min(length, MEASURED)
    half, whole = _kept(mixer, (filled + 1) // 2), _kept(mixer, filled)
    power = _exponent(half, whole)
    return round(whole * (length / filled) ** power), power


@torch.no_grad()
def _kept(mixer: Mixer, length: int) -> int:
    dims = mixer.dims
    if not isinstance(mixer, Attention):
        return mixer.extend(mixer.start(1), torch.zeros(1, length, dims.width))[1].nbytes
    core = mixer.core
    k, v = (torch.zeros(1, dims.g, length, size * core.streams) for size in (dims.d, dims.e))
    return nbytes(core.forget(core.push(core.empty(k, v), k, v, Places.of(k[:, 0])), torch.tensor([length])))


def _pairs(pattern: Pattern | None, length: int, dims: Dims) -> tuple[float | None, float | None, float | None]:
    if pattern is None:
        return None, None, None
    found = census(pattern, length, causal=dims.causal, heads=dims.heads)
    return found.pairs / dims.heads, found.pairs / found.possible, found.blocks / found.possible_blocks


@torch.no_grad()
def _error(core: Core, dims: Dims, n: int) -> tuple[float, float]:
    """How far the weights are from softmax's, beside how far equal weights are."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, n, dims.d, generator=random) for h in (dims.heads, dims.g))
    exact = attention_matrix(Softmax(dims), q, k, causal=dims.causal)
    q, k = (x.repeat(1, 1, 1, core.streams) for x in (q, k))
    visible = torch.ones(n, n).tril() if dims.causal else torch.ones(n, n)
    uniform = visible / visible.sum(-1, keepdim=True)
    return _distance(attention_matrix(core, q, k, causal=dims.causal), exact), _distance(uniform.expand_as(exact), exact)


def _distance(a: Tensor, exact: Tensor) -> float:
    return float((a - exact).norm() / exact.norm())
