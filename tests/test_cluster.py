"""Attention among tokens that are alike: slow definitions, limits, and no leak at any boundary."""

import pytest
import torch
from torch.nn.functional import normalize

from conftest import DEVICE, close, compiled_passes, data, some
from regard import Dims, attend, core, layer
from regard.mixers.base import Places
from regard.ops.bucket.members import Members, gather_members, mean_of_members
from regard.ops.triton_support import has_triton
from test_limits import ask, check_same, largest, qkv

B, H, D = 2, 4, 8


def make(spec, causal, heads=H, d=D):
    return core(spec, Dims(heads * d, heads, causal=causal)).to(DEVICE, torch.float64).eval()


def weighed(seen, s, v):
    """Softmax over the pairs seen; nothing seen, nothing said."""
    weights = s.masked_fill(~seen, -1e30).softmax(-1) * seen
    return weights @ v


def hashed(made, k):
    """Buckets (b h n rounds), as the paper writes them."""
    turned = torch.einsum("bhnd,hdf->bhnf", k, made.rotations).unflatten(-1, (made.rounds, -1))
    return torch.cat([turned, -turned], -1).argmax(-1)


def reformer_pairs(made, k, valid):
    """All pairs of all rounds but i = j, token by token; then i = j where there is no other."""
    seen = torch.zeros(B, H, k.shape[2], k.shape[2], dtype=torch.bool, device=DEVICE)
    buckets = hashed(made, k) if made.labels > 1 else torch.zeros(*k.shape[:3], 1)
    for b, h, r in torch.cartesian_prod(*(torch.arange(x) for x in (B, H, made.rounds))).tolist():
        label = buckets[b, h, :, r].tolist()
        real = valid[b].nonzero()[:, 0].tolist()
        order = sorted(real, key=lambda i: (label[i], i))
        chunk = {i: at // made.chunk for at, i in enumerate(order)}
        for i in real:
            peers = [j for j in real if label[j] == label[i]]
            if made.dims.causal:
                peers = [j for j in peers if j <= i][-2 * made.chunk :]
            else:
                peers = [j for j in peers if 0 <= chunk[i] - chunk[j] <= 1]
            seen[b, h, i, peers] = True
    one = torch.eye(k.shape[2], dtype=torch.bool, device=DEVICE)
    seen &= ~one
    return seen | (one & ~seen.any(-1, keepdim=True) & valid[:, None, :, None])


def reformer_slowly(made, valid):
    def f(q, k, v):
        seen = reformer_pairs(made, k.detach(), valid)
        return weighed(seen, q @ (k / k.norm(dim=-1, keepdim=True)).mT, v)

    return f


def routing_slowly(made, valid):
    """Cluster by cluster: its best queries, its best keys, softmax among them, and the mean over clusters."""

    def f(q, k, v):
        near = [normalize(x.detach(), dim=-1) @ normalize(made.centroids, dim=-1).mT for x in (q, k)]
        out, times = torch.zeros_like(v), torch.zeros(*v.shape[:3], 1, dtype=v.dtype, device=DEVICE)
        s = q @ k.mT * D**-0.5
        for c in range(made.labels):
            taken = [torch.zeros(B, H, x.shape[2], dtype=torch.bool, device=DEVICE) for x in (q, k)]
            for mask, similar in zip(taken, near, strict=True):
                for b in range(B):
                    real = valid[b].nonzero()[:, 0]
                    best = similar[b, :, real, c].argsort(-1, descending=True)[:, : made.window]
                    mask[b].scatter_(1, real[best], True)
            seen = taken[0][..., None] & taken[1][:, :, None]
            out, times = out + weighed(seen, s, v), times + taken[0][..., None]
        return out / times.clamp_min(1)

    return f


def routing_causal_slowly(made, valid):
    def f(q, k, v):
        label = (normalize(k.detach(), dim=-1) @ made.centroids.mT).argmax(-1)
        n = k.shape[2]
        seen = torch.zeros(B, H, n, n, dtype=torch.bool, device=DEVICE)
        for b, h in torch.cartesian_prod(torch.arange(B), torch.arange(H)).tolist():
            for i in valid[b].nonzero()[:, 0].tolist():
                peers = [j for j in range(i + 1) if valid[b, j] and label[b, h, j] == label[b, h, i]]
                seen[b, h, i, peers[-made.window :]] = True
        return weighed(seen, q @ k.mT * D**-0.5, v)

    return f


REFORMERS = [
    "reformer(rounds=2, buckets=4, chunk=6)",
    "reformer(rounds=3, buckets=6, chunk=2)",
    "reformer(rounds=4, buckets=2, chunk=25)",
    "reformer(rounds=1, buckets=8, chunk=1)",
    "reformer(rounds=2, buckets=256, chunk=4)",  # more buckets than tokens
    "reformer(rounds=2, buckets=4, chunk=500)",  # a chunk longer than the sequence
    "reformer(buckets=1, chunk=9)",
]
ROUTINGS = [f"routing(clusters={c}, window={w})" for c, w in ((4, 8), (3, 1), (1, 20), (7, 200), (200, 2), (5, 33))]


def padded(n, holes):
    return some(B, n) if holes else torch.ones(B, n, dtype=torch.bool, device=DEVICE)


def check_meaning(made, slow, n, holes, spec_causal):
    valid = padded(n, holes)
    given = {"valid": valid} if holes else {}
    if holes and not spec_causal:
        given["query_valid"] = valid
    check_same(lambda *x: attend(*x, made, causal=spec_causal, **given), slow(made, valid), qkv(n))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("spec", REFORMERS)
def test_reformer_is_softmax_over_the_union_of_its_rounds(spec, holes, causal):
    check_meaning(make(spec, causal), reformer_slowly, 53, holes, causal)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("spec", ROUTINGS)
def test_routing_is_its_definition(spec, holes):
    check_meaning(make(spec, False), routing_slowly, 53, holes, False)
    check_meaning(make(spec, True), routing_causal_slowly, 53, holes, True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 12, 16, 17, 48])
def test_any_length(n, causal):
    check_meaning(make("reformer(rounds=2, buckets=4, chunk=4)", causal), reformer_slowly, n, False, causal)
    check_meaning(
        make("routing(clusters=4, window=8)", causal), routing_causal_slowly if causal else routing_slowly, n, False, causal
    )


@pytest.mark.parametrize("causal", [False, True])
def test_pieces_mean_the_same(causal, set_limits):
    """Long sequences pass a few tiles at a time and are computed again in the backward pass."""
    set_limits(strip=1 << 9)
    check_meaning(make(REFORMERS[0], causal), reformer_slowly, 53, True, causal)
    check_meaning(make(ROUTINGS[0], causal), routing_causal_slowly if causal else routing_slowly, 53, True, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 90])
def test_one_bucket_is_softmax_with_shared_queries_and_keys(n, causal):
    def shared(q, v):
        s = q @ normalize(q, dim=-1).mT
        seen = ~torch.eye(n, dtype=torch.bool, device=DEVICE)
        seen = seen.tril() if causal else seen
        seen[0, 0] = causal or n == 1  # alone
        return weighed(seen, s, v)

    q, _, v = qkv(n)
    made = make(f"reformer(buckets=1, chunk={n})", causal)
    check_same(lambda q, v: attend(q, q, v, made, causal=causal), shared, (q, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [90, 1000])
def test_one_cluster_is_softmax(window, causal):
    check_same(ask(f"routing(clusters=1, window={window})", causal), ask("softmax", causal), qkv())


@pytest.mark.parametrize("spec", ["reformer(rounds=3, buckets=8, chunk=16)", "routing(clusters=8, window=32)"])
def test_the_last_token_moves_nobody_before_it(spec):
    """Where others leak: by the boundaries of sorted chunks, and by pushing tokens out of a cluster."""
    m, x = layer(spec, width=32, heads=4, causal=True).to(DEVICE, torch.float64).eval(), data(512, b=1)
    for at in (511, 300, 64):
        z = x.clone()
        z[:, at] = 10 * data(1, seed=2, b=1)[:, 0]
        moved = (m(x) - m(z)).abs().amax(-1)[0] > 1e-12
        assert moved[:at].sum() == 0
        assert moved[at]
    bidirectional = layer(spec, width=32, heads=4).to(DEVICE, torch.float64).eval()
    assert ((bidirectional(x) - bidirectional(z)).abs().amax(-1)[0] > 1e-12)[:64].any()  # and the test can fail


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["reformer(rounds=3, buckets=8, chunk=16)", "routing(clusters=8, window=32)"])
@pytest.mark.parametrize("real", [1, 31, 32, 33, 100, 255])
def test_padding_shifts_no_boundary(spec, causal, real):
    m, x = layer(spec, width=32, heads=4, causal=causal).to(DEVICE, torch.float64).eval(), data(real, b=2)
    alone = m(x)
    for left, every in ((0, 1), (256 - real, 1), (17 if real < 240 else 0, 1), (0, 2 if real < 128 else 1)):
        at = left + every * torch.arange(real, device=DEVICE)
        valid = torch.zeros(2, 256, dtype=torch.bool, device=DEVICE)
        valid[:, at] = True
        z = torch.full((2, 256, 32), 50.0, dtype=x.dtype, device=DEVICE)
        z[:, at] = x
        close(m(z, valid=valid)[:, at], alone)


@pytest.mark.parametrize("spec", ["reformer(rounds=2, buckets=8, chunk=8)", "routing(clusters=8, window=16)"])
def test_a_long_stream_is_one_pass_and_forgets(spec):
    m, x = layer(spec, width=32, heads=4, causal=True).to(DEVICE, torch.float64).eval(), data(700, b=2)
    cuts = [100, 1, 1, 5, 93, 200, 2, 40, 58, 1, 199]
    with torch.no_grad():
        state, out = m.start(2), []
        for part in x.split(cuts, 1):
            y, state = m.extend(state, part)
            out.append(y)
    close(torch.cat(out, 1), m(x))
    bound = 4 * m.core.rounds * m.core.labels * (m.core.window - 1)
    assert state.memory.log.size <= 1.25 * min(bound, 500)


def test_queries_are_tokens_of_the_memory():
    q, k, v = qkv(20, 24)
    with pytest.raises(ValueError, match="reformer answers all queries together: give a query for each of the 24 keys"):
        attend(q, k, v, make("reformer", False))
    with pytest.raises(ValueError, match="build it with causal=True"):
        attend(k, k, v, make("routing", False), causal=True)
    made = make("reformer(rounds=1, buckets=4, chunk=3)", True)
    memory = made.push(made.empty(k, v), k, v, Places.of(k[:, 0]))
    close(made.read(memory, k[:, :, -5:], Places.of(k[:, 0, :5])), attend(k, k, v, made, causal=True)[:, :, -5:])
    with pytest.raises(ValueError, match="25 queries need no fewer keys, not 24"):
        made.read(memory, torch.cat([k, k[:, :, :1]], 2), Places.of(k[:, 0]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["reformer(rounds=2, buckets=8, chunk=16)", "routing(clusters=8, window=32)"])
def test_nothing_quadratic_is_ever_held(spec, causal, set_limits):
    set_limits(strip=1 << 14)
    assert largest(spec, 8192, causal) <= 2.2 * largest(spec, 4096, causal)
    assert largest(spec, 8192, causal) < 8192**2 / 100


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [REFORMERS[0], ROUTINGS[0]])
def test_the_core_itself_gives_padding_nothing(spec, causal):
    (q, k, v), made, valid = qkv(53), make(spec, causal), some(B, 53)
    places = Places.of(k[:, 0], valid)
    out = made.read(made.push(made.empty(k, v), k, v, places), q, places)
    assert (out.transpose(1, 2)[~valid] == 0).all()
    assert (out.transpose(1, 2)[valid] != 0).any(-1).float().mean() > 0.4


def test_tokens_that_no_cluster_took_get_nothing():
    out = attend(*qkv(60), make("routing(clusters=2, window=3)", False))
    said = (out != 0).any(-1).sum(2)
    assert ((said >= 3) & (said <= 6)).all()


def test_equals_go_to_the_earlier_token():
    """Sixty equal tokens and padding in front: who is taken does not depend on how a library sorts."""
    x = torch.ones(B, H, 60, D, dtype=torch.float64, device=DEVICE)
    valid = torch.arange(60, device=DEVICE).expand(B, -1) >= 7
    index = make("routing(clusters=3, window=5)", False)._members(x, valid).index
    assert (index.sort(-1).values == torch.arange(7, 12, device=DEVICE)).all()


@pytest.mark.parametrize("causal", [False, True])
def test_training_compiles(causal):
    torch._dynamo.reset()
    pair = [layer("routing(clusters=4, window=8, decay=0.5)", width=32, heads=4, causal=causal) for _ in range(2)]
    pair = [m.to(DEVICE, torch.float64).train() for m in pair]
    pair[1].load_state_dict(pair[0].state_dict())
    compiled = torch.compile(pair[1], fullgraph=True, backend="aot_eager", dynamic=False)
    for seed in (1, 2):
        x = data(40, seed)
        close(compiled(x), pair[0](x))
    close(pair[1].core.centroids, pair[0].core.centroids)


class Pinned:
    """Choices of one pass, made again in the next: what is left is arithmetic alone."""

    def __init__(self, made, monkeypatch):
        self.made, self.labels, self.members, self.at, self.turned = made, None, None, 0, 0
        self.label, self.choose = made.label, getattr(made, "_both_members", None)
        monkeypatch.setattr(made, "label", self.again)
        if self.choose:
            monkeypatch.setattr(made, "_both_members", self.members_again)

    def again(self, k):
        own = self.label(k)
        if self.labels is None:
            self.labels = own
            return own
        n, m = k.shape[2], self.labels.shape[2]
        kept = self.labels[:, :, self.at : self.at + n]
        self.at = (self.at + n) % m
        self.turned += int((kept != own).sum())
        return kept

    def members_again(self, *given):
        if self.members is None:
            self.members = self.choose(*given)
        return self.members


CHOOSING = ["reformer(rounds=2, buckets=4, chunk=6)", "reformer(rounds=3, buckets=8, chunk=2)", "routing(clusters=4, window=8)"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", CHOOSING)
def test_half_precision_streams_once_labels_are_the_same(spec, dtype, monkeypatch):
    """Rounding a key may turn its label over, in another batch size as in another type; nothing else may differ by more."""
    torch.manual_seed(0)
    m, x = layer(spec, width=32, heads=4, causal=True).to(DEVICE, dtype).eval(), data(40, dtype=dtype)
    Pinned(m.core, monkeypatch)
    with torch.no_grad():
        whole, state, out = m(x), m.start(3), []
        for part in x.split([17, 1, 1, 21], 1):
            y, state = m.extend(state, part)
            out.append(y)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", CHOOSING)
def test_autocast_is_close_once_choices_are_the_same(spec, causal, monkeypatch):
    torch.manual_seed(0)
    m, x = layer(spec, width=32, heads=4, causal=causal).to(DEVICE).eval(), data(40, dtype=torch.float32)
    Pinned(m.core, monkeypatch)
    true = m(x)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = m(x)
    assert (y.float() - true).abs().max() < 0.05 * true.abs().max()


@pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
@pytest.mark.parametrize("holes", [False, True])
def test_gathering_and_summing_members_are_operators(holes):
    from regard.ops.bucket.members_compiled import gather_operator, sum_operator

    b, h, n, clusters, window = 2, 2, 9, 3, 4
    index = torch.rand(b * h, clusters, n, device=DEVICE).argsort(-1)[..., :window].contiguous()
    real = torch.rand(b * h, window, device=DEVICE) < 0.7 if holes else None
    x, rows = torch.randn(b, h, n, 5, device=DEVICE), torch.randn(b * h, clusters, window, 5, device=DEVICE)
    torch.library.opcheck(gather_operator, (x.requires_grad_(), index, real, n, False))
    torch.library.opcheck(sum_operator, (rows.requires_grad_(), index, real, n, h, True))
    members = Members(index, real, n)
    for found, expected, given in (
        (gather_operator(x, index, real, n, False), gather_members(x, members, "torch"), x),
        (sum_operator(rows, index, real, n, h, True), mean_of_members(rows, members, h, "torch"), rows),
    ):
        there = torch.ones_like(found) if real is None or given is rows else real[:, None, :, None].expand_as(found)
        close(found.masked_fill(~there.bool(), 0), expected.masked_fill(~there.bool(), 0))
        up = torch.randn_like(found).masked_fill(~there.bool(), 0)
        close(*(torch.autograd.grad(y, given, up)[0] for y in (found, expected)))


@pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_routing_layer_by_kernels_is_the_layer(causal):
    torch.compiler.reset()
    mixer = layer("routing(clusters=2, window=4)", width=8, heads=2, causal=causal, backend="triton").to(DEVICE).eval()
    for found, expected in compiled_passes(mixer, (12, 33)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
