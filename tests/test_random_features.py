"""Random features: without bias, better with their number, drawn from a seed and from nothing else."""

import pytest
import torch

from conftest import DEVICE
from regard import Dims, attend
from regard.mixers.base import Places
from regard.mixers.kernel import RFA
from regard.mixers.peaked import Performer

D = 5
DIMS = Dims(width=4 * D, heads=4)


def test_performer_is_unbiased() -> None:
    """The mean over seeds of phi(q) . phi(k) meets exp(q . k / sqrt(d)), also along the axes, where a bad draw shows."""
    core = Performer(DIMS, features=2 * D)
    x = torch.cat([torch.randn(6, D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)])
    draws = []
    for seed in range(2000):
        core.redraw(seed)
        phi = core.logs(x).exp()
        draws.append(phi @ phi.mT)
    draws = torch.stack(draws)
    error = draws.mean(0) - (x @ x.mT / D**0.5).exp()
    assert float((error.abs() / (draws.std(0) / len(draws) ** 0.5)).max()) < 4.5


def test_rfa_is_unbiased() -> None:
    """The mean over seeds of phi(q) . phi(k) meets exp(scale (cos(q, k) - 1)); the features see angles alone."""
    x = torch.randn(1, 1, 8, D, dtype=torch.float64, device=DEVICE) * 3
    core, place, draws = RFA(DIMS, features=D, scale=2.0).to(DEVICE, torch.float64), Places.of(x[:, 0]), []
    for seed in range(2000):
        core.redraw(seed)
        phi = core._queries(x, place)
        draws.append(phi @ phi.mT)
    draws = torch.stack(draws)
    unit = torch.nn.functional.normalize(x, dim=-1)
    error = (draws.mean(0) - (2 * (unit @ unit.mT - 1)).exp()).abs()
    assert float((error / (draws.std(0) / len(draws) ** 0.5 + 1e-12)).max()) < 4.5


@pytest.mark.parametrize("kind", [Performer, RFA])
def test_error_falls_as_one_over_the_root_of_the_features(kind: type) -> None:
    q, k, v = (torch.randn(1, 1, 24, 8, dtype=torch.float64) / 2 for _ in range(3))  # exponentials of small numbers vary little
    scores = q @ k.mT / 8**0.5 if kind is Performer else torch.nn.functional.cosine_similarity(q[..., None, :], k[:, :, None], -1)
    exact, counts, errors = torch.softmax(scores, -1) @ v, [2**p for p in range(4, 11)], []
    for count in counts:
        cores = [kind(Dims(8, 1), features=count, seed=seed).double() for seed in range(40)]
        errors.append(torch.stack([(attend(q, k, v, core) - exact).square().mean() for core in cores]).mean().sqrt())
    x, y = torch.tensor(counts).double().log(), torch.stack(errors).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())  # least squares over 16 .. 1024
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.1 * exact.std()


def test_performer_directions_are_orthogonal_with_gaussian_lengths() -> None:
    core = Performer(Dims(64, 1), features=64 * 20 + 7).double()
    for block in core.directions.split(64):
        gram = block @ block.mT
        assert float((gram - gram.diag().diag()).abs().max()) < 1e-4  # the buffer is float32 at birth
    squares = core.directions.square().sum(-1)  # chi squared with 64 degrees of freedom: mean 64, variance 128
    assert abs(float(squares.mean()) - 64) < 4 * (128 / len(squares)) ** 0.5
    assert 0.8 < float(squares.var()) / 128 < 1.25


@pytest.mark.parametrize("kind", [Performer, RFA])
def test_draws_repeat_are_saved_and_change_only_on_request(kind: type) -> None:
    q, k, v = (torch.randn(2, 4, 20, x) for x in (D, D, D))
    core = kind(DIMS, features=8, seed=3).train()
    first = attend(q, k, v, core)
    assert torch.equal(attend(q, k, v, core), first)
    assert torch.equal(attend(q, k, v, kind(DIMS, features=8, seed=3)), first)
    other = kind(DIMS, features=8, seed=4)
    assert not torch.equal(attend(q, k, v, other), first)
    other.load_state_dict(core.state_dict())
    assert torch.equal(attend(q, k, v, other), first)
    core.redraw(5)
    assert not torch.equal(attend(q, k, v, core), first)
    core.redraw(3)
    assert torch.equal(attend(q, k, v, core), first)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (Performer, {"features": 0}, "features must be a positive integer, not 0"),
        (Performer, {"features": 8.0}, "features must be a positive integer, not 8.0"),
        (Performer, {"seed": "x"}, "seed must be an integer, not 'x'"),
        (RFA, {"features": True}, "features must be a positive integer, not True"),
        (RFA, {"scale": -1.0}, "scale must be a positive number"),
        (RFA, {"scale": "2"}, "scale must be a positive number"),
        (RFA, {"gated": 1}, "gated must be True or False, not 1"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(kind: type, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(DIMS, **options)
