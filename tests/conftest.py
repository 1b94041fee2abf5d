"""What every test can lean on: the device, the catalogue's examples as cases, data from a seed."""

import os
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, settings

from regard.catalogue import CATALOGUE
from regard.catalogue_row import Example, Row
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Dims, Mixer
from regard.ops.budget import DEFAULT, DEVICES
from regard.spec import Spec

DEVICE = torch.device(os.environ.get("REGARD_DEVICE", "cpu"))
WIDTH, HEADS = 32, 4

settings.register_profile("regard", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("regard")


@pytest.fixture(autouse=True)
def _same_dice():
    torch.manual_seed(0)
    random.seed(0)


def small_budget(monkeypatch, **changes):
    """Change tuning constants of every device for one test: see `regard.ops.budget`."""
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(DEVICES, kind, replace(DEVICES.get(kind, DEFAULT), **changes))


@pytest.fixture
def set_limits(monkeypatch):
    """Change tuning constants for one test: set_limits(strip=1 << 10)."""
    return partial(small_budget, monkeypatch)


class Case:
    """One example of one row of the catalogue."""

    def __init__(self, row: Row, example: Example, positions: str | None = None) -> None:
        self.row, self.example, self.positions = row, example, positions
        self.spec = Spec(row.name, **example.options)

    def __repr__(self) -> str:
        return f"{self.spec}{f' + {self.positions}' if self.positions else ''}"

    def build(self, dtype: torch.dtype = torch.float64, shared_qk: bool = False, **dims) -> Mixer:
        torch.manual_seed(0)
        dims = {"width": WIDTH, "heads": HEADS, "max_len": 128, **dims}
        return self.spec.build(Dims(**dims), shared_qk=shared_qk, positions=self.positions).to(DEVICE, dtype).eval()

    def can(self, claim: Can, **dims) -> bool:
        try:
            return claim in self.build(**dims).can
        except ValueError:
            return False


def placed(name: str, number: int, positions: str) -> Case:
    """An example of a row with positions that act inside it."""
    row = CATALOGUE[name]
    example = row.examples[number]
    valued = positions.startswith("relative") and "values=False" not in positions  # adds to the answer, whatever the values are
    return Case(row, replace(example, weights=example.weights and not valued), positions)


CASES = [Case(row, example) for row in CATALOGUE.values() for example in row.examples]
CASES += [
    placed("softmax", 0, "rotary"),
    placed("softmax", 0, "alibi"),
    placed("softmax", 0, "relative(clip=4)"),
    placed("additive", 0, "relative(clip=3, values=False)"),
    placed("relu", 0, "alibi"),
    placed("sparse", 0, "relative(clip=4)"),
    placed("sparse", 5, "alibi"),
    placed("longformer", 0, "rotary"),
    placed("longformer", 1, "relative(clip=5)"),
    placed("bigbird", 0, "relative(clip=9)"),
]


def asked(fits):
    """A law for the cases that fit; `fits` stays with it, for a mechanism that is no row of the catalogue."""

    def mark(law):
        law.fits = fits
        return pytest.mark.parametrize("case", [c for c in CASES if fits(c)], ids=repr)(law)

    return mark


def claiming(claim: Can, cores: bool = False, **dims):
    """The cases that make a claim, when built like this."""
    return asked(lambda c: c.can(claim, **dims) and (not cores or isinstance(c.build(**dims), Attention)))


every = asked(lambda _: True)
every_core = claiming(Can.NOTHING, cores=True)


def modes(case: Case):
    """The ways in which a case can be built: causal or not."""
    return [{"causal": c} for c in (False, True) if not c or case.can(Can.CAUSAL, causal=True)]


def data(n: int, seed: int = 1, b: int = 3, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(b, n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def some(b: int, n: int, seed: int = 4, share: float = 0.7) -> torch.Tensor:
    """A random valid mask with at least one real token in each row."""
    valid = torch.rand(b, n, generator=torch.Generator().manual_seed(seed)) < share
    valid[:, n // 2] = True
    return valid.to(DEVICE)


def close(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)
