"""Backends of bucketed attention: each computes what the reference defines, gradients and dropout included."""

import pytest
import torch

from conftest import DEVICE, close, data, some
from regard import Dims, core, layer
from regard.ops.backend import backends, choose_backend
from regard.ops.bucket import bucket_launch
from regard.ops.bucket import triton as fused
from regard.ops.bucket.bucket_op import BucketCall, LabelCall, bucket_attention, product_labels
from regard.ops.bucket.cluster_attention import MOST_MEMBERS, cluster_attention, takes_clusters
from regard.ops.bucket.few_queries import few_bucket_queries
from regard.ops.bucket.members import Members, gather_members, gather_three, mean_of_members
from regard.ops.bucket.reference import _seen_pairs
from regard.ops.dense import sdpa

OTHERS = [name for name in backends("bucket") if name != "reference"]
HALVES = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]  # the interpreter has no bfloat16 products
CASES = {
    "causal": {},
    "chunks": {"causal": False},
    "causal, dropout, padding": {"dropout": 0.3, "padded": True},
    "chunks, dropout, padding": {"causal": False, "dropout": 0.3, "padded": True, "g": 2},
    "one round, itself": {"rounds": 1, "own": True, "unit_keys": False},
    "one round, chunks, itself": {"rounds": 1, "own": True, "causal": False, "reach": 4, "padded": True},
    "three rounds, key and value sizes": {"rounds": 3, "d": 5, "e": 19, "n": 20},
    "one label": {"count": 1, "rounds": 1, "n": 21},
    "every token alone": {"count": 400, "rounds": 2, "n": 18, "dropout": 0.4},
    "only padding in a row": {"padded": "all", "n": 10},
    "one token": {"n": 1},
    "short keys": {"short": True, "n": 18},
}


def call_of(
    n=34,
    g=1,
    d=6,
    e=4,
    rounds=2,
    count=3,
    reach=7,
    causal=True,
    own=False,
    unit_keys=True,
    dropout=0.0,
    padded=False,
    short=False,
):
    shapes = ((2, n, d), (g, n, d), (g, n, e))
    q, k, v = (torch.randn(1, *shape, device=DEVICE) for shape in shapes)
    if short:
        k[:, :, ::3] *= 1e-8
    labels = torch.randint(0, count, (1, 2, n, rounds), dtype=torch.int32, device=DEVICE).transpose(2, 3)
    if padded:
        valid = torch.zeros(1, n, dtype=torch.bool, device=DEVICE) if padded == "all" else some(1, n)
        labels = labels.masked_fill(~valid[:, None, None], count)
    seed = torch.tensor(31, device=DEVICE) if dropout else None
    inputs = (x.requires_grad_() for x in (q, k, v))
    return BucketCall(*inputs, labels, seed, count, reach, causal, own, unit_keys, 0.8, dropout)


def results(call, backend):
    """Outputs and all gradients."""
    out = bucket_attention(call, backend)
    up = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, call[:3], up)]


def agree(found, expected, tol=2e-5):
    for a, b in zip(found, expected, strict=True):
        scale = b.abs().max().clamp_min(1)
        torch.testing.assert_close(a / scale, b / scale, rtol=tol, atol=tol)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_every_backend_computes_the_reference(backend, case):
    call = call_of(**CASES[case])
    agree(results(call, backend), results(call, "reference"))


@pytest.mark.parametrize("rounds", [1, 3])
def test_tokens_are_sorted_by_counting_as_by_a_radix_sort(rounds, monkeypatch):
    monkeypatch.setattr(bucket_launch, "COUNT_BLOCK", 64)
    monkeypatch.setattr(bucket_launch, "PLACE_STEP", 16)
    call = call_of(n=150, rounds=rounds, count=5, padded=True)
    found = [torch.full((6 if rounds > 1 else 3, 1, 2, rounds, 150), -7, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    bucket_launch.counted_places(call, found[0])
    bucket_launch.radix_places(call, found[1])
    assert torch.equal(*found) and (found[0] >= -1).all()


def test_a_case_has_what_its_name_claims():
    """Pairs of several rounds, tokens that see no other, and padding."""
    calls = {name: call_of(**case) for name, case in CASES.items()}
    sizes = {name: _seen_pairs(call).sum(-1) for name, call in calls.items()}
    assert (sizes["causal"] > 7).any()
    assert (sizes["causal, dropout, padding"] == 0).any()
    alone = _seen_pairs(calls["every token alone"]).diagonal(0, 2, 3)
    assert 18 < alone.sum() <= 36
    assert sizes["only padding in a row"].sum() == 0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_near_the_float32_reference(dtype):
    call = call_of(n=18)
    low = call._replace(**{name: getattr(call, name).detach().to(dtype).requires_grad_() for name in "qkv"})
    true = call._replace(**{name: getattr(low, name).detach().float().requires_grad_() for name in "qkv"})
    found = results(low, "triton")
    assert {x.dtype for x in found} == {dtype}
    agree([x.float() for x in found], results(true, "reference"), 4 * torch.finfo(dtype).eps)


def test_the_kernels_take_strides_and_return_heads_side_by_side():
    call = call_of(n=18, g=2)
    wide = torch.randn(1, 18, 3, 2, 6, device=DEVICE)
    q, k, v = (wide[:, :, i].transpose(1, 2).requires_grad_() for i in range(3))
    found = results(call._replace(q=q, k=k, v=v), "triton")
    agree(found, results(call._replace(q=q, k=k, v=v), "reference"))
    assert all(x.transpose(1, 2).is_contiguous() for x in found)


@pytest.mark.parametrize("causal", [True, False])
def test_layers_compute_the_same_by_every_backend(causal):
    found = []
    for backend in backends("bucket"):
        torch.manual_seed(0)
        options = {"causal": causal, "dropout": 0.2, "backend": backend}
        made = layer("reformer(rounds=2, buckets=4, chunk=4)", width=12, heads=2, **options).to(DEVICE).train()
        x = data(21, b=1, dtype=torch.float32)[..., :12].requires_grad_()
        torch.manual_seed(5)
        y = made(x, valid=some(1, 21))
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])])
    for other in found[1:]:
        agree(other, found[0])


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("rounds, f, opposite", [(3, 5, True), (2, 1, True), (1, 7, False), (1, 37, False), (2, 20, True)])
def test_every_backend_gives_the_same_labels(backend, rounds, f, opposite):
    for g, kind in ((1, torch.float32), (2, torch.float16)):
        k = torch.randn(2, 21, g, 6, device=DEVICE).to(kind).transpose(1, 2)
        for directions in (torch.randn(2, 6, rounds * f, device=DEVICE), torch.randn(2, 6, rounds * f, device=DEVICE).to(kind)):
            found = product_labels(k, directions, rounds, opposite=opposite, backend=backend)
            assert found.dtype == torch.int32
            expected = product_labels(k.double(), directions.double(), rounds, opposite=opposite, backend="reference")
            assert torch.equal(found, expected)
            assert found.max() < f * (1 + opposite)


def test_labels_without_an_order_are_labels():
    k = torch.full((1, 1, 5, 6), torch.nan, device=DEVICE)
    for backend in OTHERS:
        found = product_labels(k, torch.randn(1, 6, 6, device=DEVICE), 2, opposite=True, backend=backend)
        assert ((found >= 0) & (found < 6)).all()


def routed(backend, made, x, valid, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 21, 2, 6, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    members = Members(x, valid, 21)
    picked = [gather_members(y, members, backend) for y in (q, k, v)]
    out = mean_of_members(made(*picked), members, 2, backend)
    return [out, *torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)]


@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_members_are_gathered_and_averaged_by_every_backend(padded):
    """With tokens of several clusters and of none, and gradients of gradients."""
    index = torch.stack([torch.randperm(21, device=DEVICE)[:7] for _ in range(4 * 3)]).view(4, 3, 7)
    real = torch.arange(7, device=DEVICE) < torch.tensor([[7], [7], [5], [0]], device=DEVICE) if padded else None

    def inside(q, k, v):
        weights = (q @ k.mT).sigmoid()
        return (weights if real is None else weights * real[:, None, None]) @ v

    found = [routed(name, inside, index, real) for name in ("triton", "torch")]
    agree(*found)
    assert (found[0][0] == 0).all(-1).any()
    twice = []
    for name in ("triton", "torch"):
        torch.manual_seed(0)
        q = torch.randn(2, 2, 21, 6, device=DEVICE, requires_grad=True)
        members = Members(index, real, 21)
        out = mean_of_members(gather_members(q, members, name).square(), members, 2, name)
        (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), q))
    agree(*twice)


@pytest.mark.parametrize("padded", [False, True])
def test_kernels_choose_the_members_of_the_definition(padded):
    """More clusters than a block holds, equal tokens, and rows with fewer real tokens than a cluster takes.

    Which of several equal tokens is taken is left to the rounding of a matrix product, so tokens are compared by their contents.
    """
    x = torch.randn(3, 2, 7, 6, device=DEVICE).repeat(1, 1, 3, 1)
    valid = torch.arange(21, device=DEVICE) % 5 < torch.tensor([[4], [1], [0]], device=DEVICE) if padded else None
    found = []
    for backend in ("triton", "torch"):
        made = core("routing(clusters=18, window=6)", Dims(12, 2, backend=backend)).to(DEVICE)
        found.append(made._members(x, valid))
        near = made._nearest(x) if backend == "torch" else found[0].nearest
        assert torch.equal(near, found[0].nearest)
    kinds = [own.index.long() % 7 for own in found]
    mine, theirs = (x.masked_fill(~own.real[:, None], 99) if padded else x for x, own in zip(kinds, found, strict=True))
    assert torch.equal(mine.sort(-1).values, theirs.sort(-1).values)
    assert all(len(set(row)) == len(row) for own in found for row in own.index[0].tolist())
    again = Members(found[0].index, found[0].real, 21)
    assert torch.equal(again.where, found[0].where)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_clusters_of_half_precision_are_those_of_the_same_numbers_in_float32(dtype):
    """Directions are split into parts of the type: which tokens are chosen, and where centroids move."""
    x = torch.randn(2, 2, 70, 6, device=DEVICE).to(dtype)
    found = []
    for each in (x, x.float()):
        made = core("routing(clusters=5, window=9)", Dims(12, 2, backend="triton")).to(DEVICE)
        queries, keys = made._both_members(each, each.flip(2), None, None)
        made._learn((each, None, queries.nearest), (each.flip(2), None, keys.nearest))
        found.append((queries.index, keys.where, queries.nearest, made.centroids))
    for mine, theirs in zip(*found, strict=True):
        close(mine.float(), theirs.float(), 1e-6)


def test_routing_computes_the_same_by_every_backend():
    found = []
    for backend in backends("bucket"):
        torch.manual_seed(0)
        made = layer("routing(clusters=3, window=5)", width=12, heads=2, kv_heads=1, backend=backend).to(DEVICE).train()
        x = data(21, b=2, dtype=torch.float32)[..., :12].requires_grad_()
        y = made(x, valid=some(2, 21))
        found.append([y, made.core.centroids, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])])
    for other in found[1:]:
        agree(other, found[0])


def test_few_queries_are_the_last_rows_of_all():
    call = call_of(dropout=0.3, padded=True)
    whole = bucket_attention(call, "torch")
    for n in (1, 5, 34):
        close(few_bucket_queries(call._replace(q=call.q[:, :, 34 - n :])), whole[:, :, 34 - n :], 1e-5)


def test_the_gradients_of_the_kernels_have_gradients():
    call = call_of(n=12, dropout=0.3)
    found = []
    for backend in ("triton", "torch"):
        out = bucket_attention(call, backend)
        first = torch.autograd.grad(out.sin().sum(), call[:3], create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), call[:3]))
    agree(*found)


def test_transforms_go_around_the_kernels():
    call = call_of(n=12)

    def loss(q, backend):
        return bucket_attention(call._replace(q=q), backend).square().sum()

    q = call.q.detach()
    agree(*([torch.func.grad(loss)(q, name)] for name in ("triton", "reference")))


def test_the_operators_of_the_kernels_are_operators():
    for case in ({"n": 9}, {"n": 9, "g": 2, "rounds": 1, "unit_keys": False, "own": True, "dropout": 0.3}):
        call = call_of(**case)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.regard.bucket_attention.default, tuple(call), test_utils=tests)
        with torch.no_grad():
            found = torch.ops.regard.bucket_attention(*call)
        given = (torch.ones_like(found[0]), *(x if x is None else x.detach() for x in call[:5]), *found, *call[5:])
        torch.library.opcheck(torch.ops.regard.bucket_attention_backward.default, given, test_utils=tests)


def test_the_operator_of_labels_is_an_operator():
    k = torch.randn(1, 1, 5, 6, device=DEVICE)
    torch.library.opcheck(torch.ops.regard.product_labels.default, (k, torch.randn(2, 6, 6, device=DEVICE), 2, True))


def test_one_graph_serves_all_lengths():
    torch._dynamo.reset()
    made = layer("reformer(rounds=1, buckets=4, chunk=3)", width=8, heads=1, causal=True, backend="triton").to(DEVICE).eval()
    graphs = []

    def count(graph, inputs):  # noqa: ARG001
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, backend=count, fullgraph=True, dynamic=True)
    for n in (12, 19, 33):
        x = data(n, b=1, dtype=torch.float32)[..., :8]
        with torch.no_grad():
            close(compiled(x), made(x), 1e-5)
    assert len(graphs) == 1
    assert any("bucket_attention" in str(node.target) for node in graphs[0].graph.nodes)


def test_what_the_kernels_cannot_compute_is_a_sentence(monkeypatch):
    call = call_of(n=5)
    double = call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double())
    with pytest.raises(ValueError, match="backend 'triton' cannot compute this bucket attention: its kernels take float16"):
        bucket_attention(double, "triton")
    for changed, sentence in [
        (call._replace(v=call.v.half()), "of one type"),
        (call._replace(q=call.q.new_zeros(1, 2, 5, 257)), "up to 256 dimensions"),
        (call._replace(labels=call.labels.new_zeros(1, 2, 17, 5)), "up to 16 rounds, not 17"),
    ]:
        assert sentence in fused.TritonBuckets().refuses(changed)
    wide = LabelCall(call.k.new_zeros(1, 1, 5, 257), call.k.new_zeros(1, 257, 4), 1, False)
    assert "up to 256 dimensions" in fused.TritonBuckets().refuses(wide)
    if DEVICE.type == "cpu":
        assert choose_backend("bucket", "auto", call).name == "torch"
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        assert "run on CUDA devices" in fused.TritonBuckets().refuses(call)
    else:
        assert choose_backend("bucket", "auto", call).name == "triton"
    assert choose_backend("bucket", "auto", double).name == "torch"


def test_a_mechanism_without_the_backend_refuses_it():
    dims = Dims(8, 1, backend="triton")
    assert core("reformer", dims).dims.backend == "triton"
    with pytest.raises(ValueError, match="backend"):
        core("fnet", dims)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("w, d, e", [(7, 6, 6), (20, 5, 33), (1, 16, 4)])
def test_attention_inside_of_clusters_is_that_of_gathered_rows(padded, w, d, e):
    """Also its gradients and theirs, with tokens of several clusters and of none, and rows without a real token."""
    n = 21
    index = [torch.stack([torch.randperm(n, device=DEVICE)[:w] for _ in range(12)]).view(4, 3, w) for _ in range(2)]
    number = torch.tensor([[w], [w], [w // 2], [0]], device=DEVICE)
    real = torch.arange(w, device=DEVICE) < number if padded else None
    inputs = [torch.randn(2, n, 2, size, device=DEVICE).transpose(1, 2).requires_grad_() for size in (d, d, e)]

    def by_kernel(q, k, v, queries, keys):
        assert takes_clusters(q, k, v, queries, keys, "triton")
        return cluster_attention(q, k, v, queries, keys, 0.3)

    def by_rows(q, k, v, queries, keys):
        out = sdpa(*gather_three(q, k, v, queries, keys, "torch"), scale=0.3, valid=keys.real)
        return mean_of_members(out, queries, 2, "torch")

    found = []
    for kind, f in ((torch.float32, by_kernel), (torch.float64, by_rows)):
        x = [y.detach().to(kind).requires_grad_() for y in inputs]
        members = [Members(each, real, n) for each in index]
        grads = torch.autograd.grad(f(*x, *members).sin().sum(), x)
        out = f(*x, *members)
        first = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        second = torch.autograd.grad(sum(y.square().sum() for y in first), x)
        found.append([y.double() for y in (out, *grads, *first, *second)])
    agree(*found)


def test_large_clusters_are_gathered():
    q = torch.randn(1, 1, 300, 8, device=DEVICE, dtype=torch.float16)  # a card pads heads to 64 columns: too many in float32
    few, many = (Members(torch.arange(w, device=DEVICE).expand(1, 1, w), None, 300) for w in (MOST_MEMBERS, MOST_MEMBERS + 1))
    assert takes_clusters(q, q, q, few, few, "triton")
    assert not takes_clusters(q, q, q, many, many, "triton")
    assert not takes_clusters(q, q, q, few, few, "torch")
