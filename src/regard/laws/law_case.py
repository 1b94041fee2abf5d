"""Cases of laws: a mechanism with its options, built small in float64, and tokens from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.catalogue_row import Example, Row
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Mixer
from regard.own_mechanism import UNMEASURED
from regard.spec import Named, Spec

LAW_WIDTH, LAW_HEADS, LAW_MAX_LEN = 32, 4, 160
LONG = 150  # tokens of one case of a law: more than two chunks of 64, which fast paths of mechanisms may have
CONTROL = "identity"  # the one row that mixes nothing: what others must depend on, it must not


class Case:
    """Hold a mechanism with its options, and with positions inside attention if they are named. Laws take one.

    `example` has the claims of growth: the one of its row with the same options unless given, or None where nothing is claimed.

    `spec` is a mechanism as in `layer`, `positions` act inside attention, `device` is where it is built.

    >>> from regard.laws import Case
    >>> case = Case("softmax", positions="rotary")
    >>> case
    softmax + rotary
    >>> tuple(case.build()(case.data(7)).shape)
    (3, 7, 32)
    """

    def __init__(
        self,
        spec: Named,
        example: Example | None = None,
        positions: str | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = Spec.of(spec)
        self.row: Row = self.spec.row
        self.example = _example(self.spec) if example is None else example
        self.positions, self.device = positions, torch.device(device)
        self.latest: dict[str, Any] = {}  # how it was built last: what a failure reports
        self.claims: dict[tuple, tuple[Can, bool] | None] = {}  # by dims: each is built once for all the laws

    def __repr__(self) -> str:
        return f"{self.spec}{f' + {self.positions}' if self.positions else ''}"

    @property
    def control(self) -> bool:
        return self.row.name == CONTROL

    def build(self, dtype: torch.dtype = torch.float64, shared_qk: bool = False, **dims: Any) -> Mixer:
        """Build the layer for evaluation, always with the same weights."""
        seed_torch(self.device)
        self.latest = {"dtype": dtype, "shared_qk": shared_qk, **dims}
        sizes = Dims(**{"width": LAW_WIDTH, "heads": LAW_HEADS, "max_len": LAW_MAX_LEN, **dims})
        made = self.spec.build(sizes, shared_qk=shared_qk, positions=self.positions)
        return made.to(self.device, dtype).eval()

    def core(self, **dims: Any) -> Core:
        """Build the layer, and return its core."""
        made = self.build(**dims)
        assert isinstance(made, Attention)
        return made.core

    def can(self, claim: Can, core: bool = False, **dims: Any) -> bool:
        """Return whether it makes a claim when built like this, and is a core in a layer if that is needed."""
        key = tuple(sorted(dims.items()))
        if key not in self.claims:
            self.claims[key] = self._claims(**dims)
        found = self.claims[key]
        return found is not None and claim in found[0] and (found[1] or not core)

    def _claims(self, **dims: Any) -> tuple[Can, bool] | None:
        try:
            made = self.build(**dims)
        except ValueError:
            return None
        return made.can, isinstance(made, Attention)

    def modes(self) -> list[dict[str, Any]]:
        """Return the ways in which it can be built: causal or not."""
        return [{"causal": c} for c in (False, True) if not c or self.can(Can.CAUSAL, causal=True)]

    def data(self, n: int, seed: int = 1, b: int = 3, width: int = LAW_WIDTH, dtype: torch.dtype = torch.float64) -> Tensor:
        return random_tokens(n, seed, b, width, dtype, self.device)

    def some(self, b: int, n: int, seed: int = 4, share: float = 0.7) -> Tensor:
        return random_valid(b, n, seed, share, self.device)

    def heads(self, core: Core, b: int, n: int) -> list[Tensor]:
        """Draw queries, keys and values (b h n d), (b g n d) and (b g n e) for a core, in float64."""
        draw = torch.Generator().manual_seed(5)
        shapes = ((core.dims.heads, core.dims.d * core.streams), *((core.dims.g, size) for size in core.sizes))
        return [torch.randn(b, h, n, x, dtype=torch.float64, generator=draw).to(self.device) for h, x in shapes]


def seed_torch(device: torch.device, number: int = 0) -> None:
    """Seed torch. Without a GPU `torch.manual_seed` keeps a stack trace for each of its devices: 500 times the time."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def random_tokens(n: int, seed: int, b: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw tokens (b n width) from a seed, the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(b, n, width, generator=draw, dtype=torch.float64).to(device, dtype)


def random_valid(b: int, n: int, seed: int, share: float, device: torch.device) -> Tensor:
    """Draw a valid mask (b n) with at least one real token in each row."""
    valid = torch.rand(b, n, generator=torch.Generator().manual_seed(seed)) < share
    valid[:, n // 2 : n // 2 + 1] = True
    return valid.to(device)


def _example(spec: Spec) -> Example | None:
    """Find the example of the row with these options, unless its growth is what a row has that was made from a class."""
    for example in spec.row.examples:
        if example is not UNMEASURED and Spec(spec.name, **example.options) == spec:
            return example
    return None
