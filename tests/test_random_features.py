"""Random features: without bias, better with their number, drawn from a seed and from nothing else."""

import warnings

import pytest
import torch
from torch import Tensor

from conftest import DEVICE, data
from regard import Dims, attend, core, layer
from regard.analysis.cost import cost
from regard.analysis.probe import estimation_error
from regard.mixers.base import Places
from regard.mixers.estimation import PoorEstimate
from regard.mixers.exp_features import Performer
from regard.mixers.linear_attention import RFA

D = 5
DIMS = Dims(width=4 * D, heads=4)


def bessel(z: Tensor) -> Tensor:
    """The mean of exp(w . z) over w of length sqrt(D) and any direction: 0F1(D / 2; D |z|^2 / 4)."""
    term = total = torch.ones_like(z[..., 0])
    for order in range(60):
        term = term * D * z.square().sum(-1) / 4 / ((order + 1) * (D / 2 + order))
        total = total + term
    return total


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "regularized"])
def test_performer_is_unbiased(kind: str) -> None:
    """The mean over seeds of phi(q) . phi(k) meets exp(q . k / sqrt(d)), also along the axes, where a bad draw shows.

    Of the regularized softmax kernel that is the mean over the sphere instead. Nothing here is longer than the bound.
    """
    core = Performer(DIMS, features=2 * D, kind=kind, max_norm=20.0)
    x = torch.cat([torch.randn(6, D, dtype=torch.float64) / 2, torch.eye(D, dtype=torch.float64)])
    draws = []
    for seed in range(2000):
        core.redraw(seed)
        phi = core.logs(x[None, None])[0, 0].exp()
        draws.append(phi @ phi.mT)
    drawn, y = torch.stack(draws), x / D**0.25
    exact = (x @ x.mT / D**0.5).exp()
    if kind == "regularized":
        size = y.square().sum(-1)
        exact = bessel(y[:, None] + y) * (-(size[:, None] + size) / 2).exp()
    error = drawn.mean(0) - exact
    assert float((error.abs() / (drawn.std(0) / len(draws) ** 0.5)).max()) < 4.5


def unit(n: int = 256, d: int = 64, seed: int = 7) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, d, generator=random, dtype=torch.float64).to(DEVICE) for _ in range(3)]


def off(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).detach().norm() / exact.norm())


def test_performer_is_nearer_than_equal_weights_at_unit_variance_and_better_with_features() -> None:
    q, k, v = unit()
    exact = torch.softmax(q @ k.mT / 8, -1) @ v
    equal, errors = off(v.mean(2, keepdim=True).expand_as(exact), exact), []
    for features in (64, 256, 1024):
        draws = [core(f"performer(features={features}, seed={s})", Dims(128, 2)).to(DEVICE, torch.float64) for s in range(3)]
        errors.append(sum(off(attend(q, k, v, one), exact) for one in draws) / 3)
    assert equal > errors[0] > errors[1] > errors[2]
    paper = core("performer(kind='positive', max_norm=None)", Dims(128, 2)).to(DEVICE, torch.float64)
    with pytest.warns(PoorEstimate, match="performer: its weights are"):
        assert off(attend(q, k, v, paper), exact) > 2 * equal


@pytest.mark.parametrize("size", [1.0, 8.0, 1e3, 1e15])
@pytest.mark.parametrize("causal", [False, True])
def test_performer_stays_in_the_hull_of_the_values(causal: bool, size: float) -> None:
    q, k, v = (x.float() for x in unit(96))
    made = core("performer(features=64)", Dims(128, 2)).to(DEVICE)
    q, k = ((size * x).requires_grad_() for x in (q, k))
    out = attend(q, k, v, made, causal=causal)
    assert ((out <= v.amax(2, keepdim=True) + 1e-4) & (out >= v.amin(2, keepdim=True) - 1e-4)).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), (q, k)))


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rfa_never_leaves_the_range_of_the_values_by_much(causal: bool, gated: bool, scale: float) -> None:
    """However small a sum of waves is: the bound is 9, on random tokens it is not reached, and gradients are as tame."""
    q, k, v = unit()
    k = torch.nn.functional.pad(k, (0, int(gated)))
    made = RFA(Dims(128, 2), features=32, scale=scale, gated=gated).to(DEVICE, torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoorEstimate)
        out = attend(q, k, v, made, causal=causal)
    assert out.abs().max() < 2 * v.abs().max()
    for gradient in torch.autograd.grad(out.square().mean(), inputs):
        assert gradient.abs().max() < 0.1


def test_rfa_at_worst_is_within_nine_times_the_values() -> None:
    """Values chosen against it: the sign of every weight."""
    q, k, _ = unit(64)
    made = RFA(Dims(128, 2), features=4, scale=8.0).to(DEVICE, torch.float64)
    weights = made._queries(q) @ made._queries(k).mT
    for i in range(8):
        v = weights[:, :, i, :, None].sign()
        memory = made.push(made.empty(k, v), k, v, Places.of(k[:, 0]))
        out = made.read(memory, q[:, :, i : i + 1], Places.of(q[:, 0, i : i + 1]))
        assert out.abs().max() <= 9


def test_orthogonal_waves_estimate_better() -> None:
    q, k, v = unit()
    cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    exact = torch.softmax(cosines, -1) @ v
    errors = []
    for orthogonal in (True, False):
        draws = [RFA(Dims(128, 2), orthogonal=orthogonal, seed=seed).to(DEVICE, torch.float64) for seed in range(3)]
        errors.append(sum(off(attend(q, k, v, one), exact) for one in draws) / 3)
    assert errors[0] < 0.7 * errors[1]


# What the user is told.


def test_the_warning_comes_once_and_only_where_it_can_be_known() -> None:
    q, k, v = unit(64)
    sharp = "performer(features=16, kind='positive', max_norm=None)"
    made = core(sharp, Dims(128, 2)).to(DEVICE, torch.float64)
    few = torch.arange(64, device=DEVICE)[None] < 4
    attend(q[:, :, :4], k[:, :, :4], v[:, :, :4], made)  # too few tokens to know
    attend(q, k, v, made, valid=few)
    torch.compile(lambda *x: attend(*x, made), fullgraph=True, backend="eager")(q, k, v)
    attend(*(x.to("meta") for x in (q, k, v)), core(sharp, Dims(128, 2)).to("meta"))
    torch.func.vmap(lambda q, k, v: attend(q, k, v, made))(*(x[None] for x in (q, k, v)))
    made.calls = 0
    with pytest.warns(PoorEstimate, match=r"equal weights only 0\.\d\d .*estimation_error"):
        attend(q, k, v, made, causal=True)
    made.calls = 0
    attend(q, k, v, made)
    short = core(sharp, Dims(128, 2)).to(DEVICE, torch.float64)
    attend(q / 8, k / 8, v, short)
    assert short.calls == 1 and not short.warned


@pytest.mark.parametrize("spec", ["performer(features=32)", "rfa(features=32)", "softmax", "linear", "nystrom(landmarks=4)"])
def test_the_error_on_your_own_data(spec: str) -> None:
    causal = spec != "nystrom(landmarks=4)"
    mixer, x = layer(spec, width=32, heads=4, causal=causal).to(DEVICE, torch.float64), data(40)
    valid = torch.arange(40, device=DEVICE) < torch.tensor([[40], [25], [9]], device=DEVICE)
    found = estimation_error(mixer, x, valid=valid)
    rows = [estimation_error(mixer, x[i : i + 1, :n]) for i, n in enumerate((40, 25, 9))]
    assert min(row.error for row in rows) - 1e-9 <= found.error <= max(row.error for row in rows) + 1e-9
    q, k, _ = mixer.heads(x, Places.of(x))
    assert estimation_error(mixer.core, q, k) == pytest.approx(estimation_error(mixer, x))
    assert (found.error < 1e-9) == (spec == "softmax") and found.of_equal_weights > 0


def test_what_has_no_estimate_is_refused() -> None:
    x = torch.randn(1, 8, 32, device=DEVICE)
    with pytest.raises(ValueError, match="a core takes queries"):
        estimation_error(core("performer", Dims(32, 4)), x)
    with pytest.raises(ValueError, match="tokens x"):
        estimation_error(layer("performer", width=32, heads=4), x, x)
    with pytest.raises(ValueError, match="nothing to compare"):
        estimation_error(layer("pooled_queries", width=32, heads=4).to(DEVICE), x)


def test_facts_tell_the_error_of_an_estimate() -> None:
    lines = dict(cost("performer", 64, width=64, heads=1).lines())
    assert lines["estimation error"].count("equal weights") == 3
    assert cost("linear", 64).estimate is None


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


@pytest.mark.filterwarnings("ignore::regard.mixers.estimation.PoorEstimate")
@pytest.mark.parametrize("kind", [Performer, RFA])
def test_error_falls_as_one_over_the_root_of_the_features(kind: type) -> None:
    q, k, v = (torch.randn(1, 1, 24, 8, dtype=torch.float64) / 2 for _ in range(3))  # exponentials of small numbers vary little
    scores = q @ k.mT / 8**0.5 if kind is Performer else torch.nn.functional.cosine_similarity(q[..., None, :], k[:, :, None], -1)
    exact, counts, errors = torch.softmax(scores, -1) @ v, [2**p for p in range(4, 11)], []
    for count in counts:
        paper = {"kind": "positive", "max_norm": None} if kind is Performer else {}
        cores = [kind(Dims(8, 1), features=count, seed=seed, **paper).double() for seed in range(40)]
        errors.append(torch.stack([(attend(q, k, v, core) - exact).square().mean() for core in cores]).mean().sqrt())
    x, y = torch.tensor(counts).double().log(), torch.stack(errors).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())  # least squares over 16 .. 1024
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.1 * exact.std()


def test_performer_directions_are_orthogonal_with_gaussian_lengths() -> None:
    core = Performer(Dims(64, 1), features=64 * 20 + 7, kind="positive").double()
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
        (Performer, {"features": 0}, "features must be an integer of at least 1, not 0"),
        (Performer, {"features": 8.0}, "features must be an integer of at least 1, not 8.0"),
        (Performer, {"kind": "cosine"}, "kind must be one of 'regularized', 'positive', 'hyperbolic', not 'cosine'"),
        (Performer, {"max_norm": 0}, "max_norm must be 'learned', None or a positive number, not 0"),
        (Performer, {"max_norm": "large"}, "max_norm must be 'learned', None or a positive number, not 'large'"),
        (RFA, {"orthogonal": 1}, "orthogonal must be True or False, not 1"),
        (Performer, {"seed": "x"}, "seed must be an integer, not 'x'"),
        (RFA, {"features": True}, "features must be an integer of at least 1, not True"),
        (RFA, {"scale": -1.0}, "scale must be a positive number"),
        (RFA, {"scale": "2"}, "scale must be a positive number"),
        (RFA, {"gated": 1}, "gated must be True or False, not 1"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(kind: type, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(DIMS, **options)
