"""What every test can lean on: the device, the catalogue's examples as cases, data from a seed."""

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, settings

from regard.catalogue import CATALOGUE
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Dims, Mixer
from regard.row import Example, Row
from regard.spec import Spec

DEVICE = torch.device(os.environ.get("REGARD_DEVICE", "cpu"))
WIDTH, HEADS = 32, 4

settings.register_profile("regard", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("regard")


@pytest.fixture(autouse=True)
def _same_dice():
    torch.manual_seed(0)
    random.seed(0)


class Case:
    """One example of one row of the catalogue."""

    def __init__(self, row: Row, example: Example) -> None:
        self.row, self.example = row, example
        self.spec = Spec(row.name, **example.options)

    def __repr__(self) -> str:
        return str(self.spec)

    def build(self, dtype: torch.dtype = torch.float64, shared_qk: bool = False, **dims) -> Mixer:
        torch.manual_seed(0)
        dims = {"width": WIDTH, "heads": HEADS, "max_len": 128, **dims}
        return self.spec.build(Dims(**dims), shared_qk=shared_qk).to(DEVICE, dtype).eval()

    def can(self, claim: Can, **dims) -> bool:
        try:
            return claim in self.build(**dims).can
        except ValueError:
            return False


CASES = [Case(row, example) for row in CATALOGUE.values() for example in row.examples]


def claiming(claim: Can, cores: bool = False, **dims):
    """The cases that make a claim, when built like this."""
    cases = [c for c in CASES if c.can(claim, **dims) and (not cores or isinstance(c.build(**dims), Attention))]
    return pytest.mark.parametrize("case", cases, ids=repr)


every = pytest.mark.parametrize("case", CASES, ids=repr)
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
