"""What hashing and clustering promise: chances of a collision, more neighbours by more rounds, balance, centroids that learn."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize, one_hot, pad

from conftest import DEVICE, close, data, some
from regard import attend, layer
from regard.mixers.base import Places
from test_cluster import B, D, H, make
from test_limits import qkv


def pair(theta, d=D):
    """Two directions that are theta apart."""
    x, y = torch.linalg.qr(torch.randn(d, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(7)))[0].unbind(1)
    return torch.stack([x, math.cos(theta) * x + math.sin(theta) * y]).to(DEVICE)


def collision(theta, buckets):
    """The chance that two directions share a bucket, integrated: the largest |u_i| and |v_i| at the same i, with the same sign.

    2 m int_{u, v > 0} p(u, v) P(|U| < u, |V| < v)^(m - 1), with m = buckets / 2 and p normal with correlation cos(theta).
    """
    m, step = buckets // 2, 0.01
    u = torch.arange(0, 6, step, dtype=torch.float64) + step / 2
    rho = math.cos(theta)

    def density(rho):
        square = u[:, None] ** 2 - 2 * rho * u[:, None] * u + u**2
        return (-square / (2 * (1 - rho**2))).exp() / (2 * math.pi * math.sqrt(1 - rho**2)) * step**2

    upto = pad((2 * (density(rho) + density(-rho))).cumsum(0).cumsum(1), (1, 0, 1, 0))
    inside = (upto[1:, 1:] + upto[1:, :-1] + upto[:-1, 1:] + upto[:-1, :-1]) / 4  # in the middle of a cell
    return float(2 * m * (density(rho) * inside ** (m - 1)).sum())


@pytest.mark.parametrize("theta", [0.3, 1.0, math.pi / 2, 2.5])
def test_two_buckets_are_shared_as_angles_say(theta):
    assert abs(collision(theta, 2) - (1 - theta / math.pi)) < 1e-4  # the oracle itself
    check_collisions(theta, 2, 1 - theta / math.pi)


@pytest.mark.parametrize("buckets", [4, 8, 32])
@pytest.mark.parametrize("theta", [0.3, 1.0, math.pi / 2])
def test_more_buckets_are_shared_as_integrals_say(buckets, theta):
    assert abs(collision(math.pi / 2, buckets) - 1 / buckets) < 1e-4  # the oracle itself
    check_collisions(theta, buckets, collision(theta, buckets))


def check_collisions(theta, buckets, chance):
    """Over independent seeds, heads and rounds: within four standard errors of the truth."""
    heads, rounds, seeds = 16, 32, 40
    made = make(f"reformer(rounds={rounds}, buckets={buckets})", False, heads)
    k, hits = pair(theta).expand(1, heads, -1, -1), []
    for seed in range(seeds):
        made.redraw(seed)
        label = made.label(k)
        hits.append((label[:, :, 0] == label[:, :, 1]).double().mean())
    trials = heads * rounds * seeds
    assert abs(torch.stack(hits).mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / trials)
    spread = torch.stack(hits).std() / math.sqrt(chance * (1 - chance) / (heads * rounds))
    assert 0.6 < spread < 1.5  # heads and rounds are independent, as many hashes as there are


def test_more_rounds_find_more_of_the_nearest_keys():
    k = torch.randn(1, 1, 256, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    near = normalize(k, dim=-1) @ normalize(k, dim=-1).mT
    near.diagonal(dim1=2, dim2=3).fill_(-2)
    best, found = near.topk(8).indices, []
    for rounds in (1, 2, 4, 8):
        shares = []
        for seed in range(20):
            made = make(f"reformer(rounds={rounds}, buckets=8, chunk=64, seed={seed})", False, 1, 16)
            one = torch.eye(256, dtype=torch.float64, device=DEVICE).expand(1, 1, -1, -1)
            seen = attend(k, k, one, made) > 0
            shares.append(seen.gather(3, best).double().mean())
        found.append(torch.stack(shares).mean())
    assert all(b > a + 0.05 for a, b in pairwise(found)), found
    assert found[0] > 2 / 8  # twice as many as chance in one round


@pytest.mark.parametrize("real", [4, 8, 40, 60])
def test_clusters_are_balanced(real):
    made, x = make("routing(clusters=5, window=8)", False), qkv(60)[0]
    valid = torch.arange(60, device=DEVICE).expand(B, -1) < real
    taken = made._members(x, valid)
    index, there = taken.index, taken.real
    assert index.shape == (B * H, 5, 8)
    for row in index:
        for cluster in row:
            members = cluster[there[0]]
            assert len(members.unique()) == min(8, real)
            assert (members < real).all()


def distortion(made, x):
    return float(1 - made._similar(x).amax(-1).mean())


@pytest.mark.parametrize("causal", [False, True])
def test_training_lowers_the_distance_to_the_centroids(causal):
    made, (q, _, v) = make("routing(clusters=6, window=16, decay=0.8)", causal), qkv(120)
    centre = torch.randn(1, H, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    q = (3 * centre.repeat_interleave(20, 2) + q).detach()
    fell = [distortion(made, q)]
    made.train()
    for _ in range(30):
        attend(q, q, v, made, causal=causal)
        fell.append(distortion(made, q))
    assert all(b <= a + 1e-3 for a, b in pairwise(fell))
    assert fell[-1] < 0.6 * fell[0]
    close(made.centroids.norm(dim=-1), torch.ones(H, 6, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("causal", [False, True])
def test_centroids_move_in_training_only_and_after_the_pass(causal):
    m, x = layer("routing(clusters=4, window=8, decay=0.5)", width=32, heads=4, causal=causal).to(DEVICE, torch.float64), data(40)
    before = m.core.centroids.clone()
    quiet = m.eval()(x)
    assert torch.equal(m.core.centroids, before)
    close(m.train()(x), quiet)  # the update comes after the answers
    moved = m.core.centroids.clone()
    assert not torch.equal(moved, before)
    again = m.eval()(x)
    assert torch.equal(m.core.centroids, moved)
    assert not torch.allclose(again, quiet)
    other = layer("routing(clusters=4, window=8, seed=5)", width=32, heads=4, causal=causal).to(DEVICE, torch.float64).eval()
    other.load_state_dict(m.state_dict())
    assert torch.equal(other(x), again)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_does_not_move_centroids(causal):
    x, valid = data(50), some(3, 50)
    padded = torch.where(valid[..., None], x, 30.0)
    found = []
    for rows in ([(padded, valid)], [(x[r][valid[r]][None], None) for r in range(3)]):
        torch.manual_seed(0)
        m = layer("routing(clusters=4, window=8, decay=0)", width=32, heads=4, causal=causal).to(DEVICE, torch.float64).train()
        torch.nn.init.zeros_(m.q.bias)
        total = torch.zeros_like(m.core.centroids)
        first = m.core.centroids.clone()
        for tokens, real in rows:  # without decay a centroid becomes the mean direction of its own tokens
            m.core.centroids.copy_(first)
            unit = [normalize(y, dim=-1) for y in m.heads(tokens, Places.of(tokens, real))[:2]]
            for y in unit[1:] if causal else unit:
                near = one_hot((y @ first.mT).argmax(-1), 4).double()
                near = near if real is None else near * real[:, None, :, None]
                total += (near.mT @ y).sum(0)
            m(tokens, valid=real)
        found.append((normalize(total, dim=-1), m.core.centroids.clone()))
    close(found[0][0], found[1][0])
    close(found[0][1], found[0][0])
    m.core.centroids.copy_(found[0][1])
    m(padded, valid=torch.zeros_like(valid))
    close(m.core.centroids, found[0][1])  # nothing but padding moves nothing
