"""Kernels of single steps of a mechanism: small systems, the balance of a Sinkhorn sort, few keys or queries, landmarks."""

import pytest
import torch
from torch import nn

import regard.mixers.attention as attention
import regard.ops.joined_linear as joined
import regard.ops.slot_attention as slot_attention
from conftest import DEVICE
from regard import Dims, core, layer
from regard.mixers import compressed, landmarks, low_rank
from regard.mixers.attend import attend
from regard.mixers.sinkhorn import _Cut, _two_blocks
from regard.ops import balance, few_keys
from regard.ops.balance import balance_matrices, balanced, balanced_in_time
from regard.ops.dense import sdpa, sdpa_composite
from regard.ops.many_keys import many_keys_answers
from regard.ops.spd_solve import _SpdSolve, spd_solve
from regard.ops.stride_merge import StrideSplit, divide_strides, divide_strides_plain, merge_stride_answers, merge_strides_plain
from regard.ops.stride_pool import pool_shared_strides, pool_strides_plain
from regard.ops.triton_support import trial_configs
from regard.ops.two_blocks import _BlockSums, block_sums, two_blocks_attention
from regard.patterns.tiles import MASKED_SCORE

on_a_card = pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter multiplies bfloat16 as integers")


@pytest.mark.parametrize(("n", "e"), [(5, 3), (20, 70)])
def test_small_systems_are_solved_as_by_linalg(n, e):
    s = torch.rand(2, n, n, dtype=torch.float64, device=DEVICE)
    a = s.mT @ s + 1e-3 * torch.eye(n, dtype=torch.float64, device=DEVICE)
    a, b = a.requires_grad_(), torch.randn(2, n, e, dtype=torch.float64, device=DEVICE, requires_grad=True)
    up = torch.randn(2, n, e, dtype=torch.float64, device=DEVICE)
    found, expected = _SpdSolve.apply(a, b), torch.linalg.solve(a, b)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(spd_solve(a, b), expected, rtol=1e-8, atol=1e-8)
    for x, y in zip(torch.autograd.grad(found, (a, b), up), torch.autograd.grad(expected, (a, b), up), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * float(y.abs().max()))


@pytest.mark.parametrize("way", ["at once", "in parts", "in time", "in time, in strips"])
@pytest.mark.parametrize(("masked", "size"), [(False, 16), (False, 19), (True, 19)])
def test_blocks_are_balanced_as_by_plain_operations(way, masked, size, monkeypatch):
    """Whole blocks of a kernel and a part of one; logits far apart."""
    in_time = way.startswith("in time")
    if way.endswith("in strips"):
        for name, number in (("LARGEST_IN_TIME", 1), ("STRIP_ELEMENTS", 64)):
            monkeypatch.setattr(balance, name, number)
    if way == "in parts":  # of several strips, and of 19 rows one part is missing
        monkeypatch.setattr(balance, "LARGEST_MATRIX", 1)
    logits = torch.randn(2, 3, size, size, device=DEVICE)
    logits[0] *= 1 if in_time else 30
    seen = torch.ones(size, size, dtype=torch.bool, device=DEVICE)
    if masked:
        seen[5] = False
        seen[:, 5] = False
    if in_time:
        seen = seen.tril(-1)
    logits = logits.masked_fill(~seen, MASKED_SCORE).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    expected = balanced_in_time(4, exact) if in_time else balanced(4, exact, seen.expand_as(exact))
    columns = f"{1 << (size - 1).bit_length()} columns"
    parts = {
        (kernel, columns): {"elements": 64, "parts": 4, "num_warps": 2} for kernel in ("balance_parts", "balance_part_grads")
    }
    up = torch.randn_like(logits)
    with trial_configs(parts) as trial:
        found = balance_matrices(logits, 4, in_time)
        (mine,) = torch.autograd.grad(found, logits, up)
    assert trial.used == (parts if way == "in parts" else {})
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (theirs,) = torch.autograd.grad(expected, exact, up.double())
    torch.testing.assert_close(mine.double(), theirs * seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_two_blocks_are_as_by_plain_operations(causal):
    q, k, k2 = (torch.randn(1, 3, 8, 2, 6, device=DEVICE).permute(0, 3, 1, 2, 4) for _ in range(3))
    v, v2, bias = torch.randn(1, 2, 3, 8, 5), torch.randn(1, 2, 3, 8, 5), torch.randn(1, 2, 3, 16)
    bias[0, 0, 1, 12:] = MASKED_SCORE
    bias[0, 1, 2, 5:8] = MASKED_SCORE
    blocks = [x.to(DEVICE).requires_grad_() for x in (q, k, v, k2, v2, bias)]
    exact = [x.detach().double().requires_grad_() for x in blocks]

    def plain(*x):
        return _two_blocks(causal, *x)[0]

    found, expected = two_blocks_attention(tuple(blocks), causal, plain), plain(*exact)
    up = torch.randn_like(found)
    mine = [found, *torch.autograd.grad(found, blocks, up, retain_graph=True)]
    theirs = [expected, *torch.autograd.grad(expected, exact, up.double())]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    (first,) = torch.autograd.grad(found.square().sum(), blocks[0], create_graph=True)
    assert first.requires_grad


def test_sums_of_blocks_have_the_gradient_of_sums():
    k = torch.randn(1, 2, 3, 4, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.equal(block_sums(k, torch.float64), k.sum(3))
    assert torch.autograd.gradcheck(lambda k: _BlockSums.apply(k, torch.float64), k)
    assert torch.autograd.gradgradcheck(lambda k: _BlockSums.apply(k, torch.float64).square(), k)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_mixed_blocks_are_as_by_plain_operations(causal, by_token):
    """Blocks in both orders of memory; shares of a block that gets nothing, and of one that keeps itself."""
    sinkhorn = core("sinkhorn(block=8)", Dims(12, 2, causal=causal))
    shape = (1, 5, 8, 2) if by_token else (1, 2, 5, 8)
    q, k, v = (torch.randn(*shape, size, device=DEVICE) for size in (6, 6, 5))
    if by_token:
        q, k, v = (x.permute(0, 3, 1, 2, 4) for x in (q, k, v))
    shares = torch.randn(1, 2, 5, 5, device=DEVICE).softmax(-1)
    shares[0, 0, 2] = torch.eye(5, device=DEVICE)[2]
    given = [x.requires_grad_() for x in (q, k, v, shares)]
    exact = [x.detach().double().requires_grad_() for x in given]
    there = torch.ones(1, 5, 8, dtype=torch.bool, device=DEVICE)

    def run(q, k, v, shares):
        return sinkhorn._mixed(q, _Cut(k, v, there, True, True), shares, causal)

    def plain(q, k, v, shares):
        own = torch.eye(5, dtype=torch.bool, device=DEVICE)
        k2, v2, bias = _Cut(k, v, there, True, True).sorted_by(shares.masked_fill(own, 0))
        return _two_blocks(causal, q, k, v, k2, v2, torch.cat([torch.zeros_like(bias), bias], -1))[0]

    found, expected = run(*given), plain(*exact)
    up = torch.randn_like(found)
    mine = [found, *torch.autograd.grad(found, given, up, retain_graph=True)]
    theirs = [expected, *torch.autograd.grad(expected, exact, up.double())]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(found.square().sum(), given[0], create_graph=True)[0].requires_grad


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_sorted_blocks_are_as_by_plain_operations(training, by_token, monkeypatch):
    """Blocks in both orders of memory, in more than one tile of scores; outputs and gradients, of the sort too."""
    made = core("sinkhorn(block=4, iterations=3)", Dims(12, 2)).to(DEVICE).train(training)
    shape = (1, 18, 4, 2) if by_token else (1, 2, 18, 4)
    q, k, v = (torch.randn(*shape, size, device=DEVICE) for size in (6, 6, 5))
    if by_token:
        q, k, v = (x.permute(0, 3, 1, 2, 4) for x in (q, k, v))
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in given]
    there = torch.ones(1, 18, 4, dtype=torch.bool, device=DEVICE)
    torch.manual_seed(3)
    tiles = {(kernel, "any"): {"BC": 16, "num_warps": 8, "num_stages": 1} for kernel in ("block_scores", "block_score_grads")}
    with trial_configs(tiles) as trial:
        found = made._sorted(given[0], _Cut(given[1], given[2], there, True, True))
        up = torch.randn_like(found)
        mine = [found, *torch.autograd.grad(found, [*given, made.sort], up, retain_graph=True)]
    assert tiles.items() <= trial.used.items()
    true = core("sinkhorn(block=4, iterations=3)", Dims(12, 2)).to(DEVICE, torch.float64).train(training)
    true.load_state_dict(made.state_dict())
    torch.manual_seed(3)
    noise = torch.empty(1, 2, 18, 18, device=DEVICE).exponential_().double()
    monkeypatch.setattr(true, "_noisy", lambda x, _: (x - noise.log() if training else x) / true.temperature)
    cut = _Cut(exact[1], exact[2], there, True, True)
    own = torch.eye(18, dtype=torch.bool, device=DEVICE)
    k2, v2, bias = cut.sorted_by(true.shares(cut, False).masked_fill(own, 0))
    expected = _two_blocks(False, *exact, k2, v2, torch.cat([torch.zeros_like(bias), bias], -1))[0]
    theirs = [expected, *torch.autograd.grad(expected, [*exact, true.sort], up.double())]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)
    assert torch.autograd.grad(found.square().sum(), given[0], create_graph=True)[0].requires_grad


@pytest.mark.parametrize("masked", [False, True])
def test_few_keys_are_as_by_plain_operations(masked, monkeypatch):
    """Three segments of queries, the last not full; query heads share keys."""
    monkeypatch.setattr(few_keys, "MOST_SEGMENTS", 12)
    q = torch.randn(1, 70, 4, 6, device=DEVICE).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(1, 2, 5, size, device=DEVICE, requires_grad=True) for size in (6, 3))
    bias = torch.zeros(1, 4, 5, device=DEVICE) if masked else None
    if bias is not None:
        bias[0, 1, 2:4] = -torch.inf
    mask = None if bias is None else bias.unsqueeze(2)

    def plain(*x):
        return sdpa_composite(*x, mask, 0.3, False)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    found, expected = few_keys.few_keys_attention(q, k, v, bias, 0.3, plain), plain(*exact)
    up = torch.randn_like(found)
    mine = [found, *torch.autograd.grad(found, (q, k, v), up, retain_graph=True)]
    theirs = [expected, *torch.autograd.grad(expected, exact, up.double())]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    (first,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize("masked", [False, True])
def test_few_queries_are_answered_in_more_digits_than_keys_have(masked, monkeypatch):
    """Segments of keys, the last not full; query heads share keys, and one row has none."""
    monkeypatch.setattr(few_keys, "MOST_SEGMENTS", 16)
    q = torch.randn(2, 4, 5, 6, device=DEVICE, requires_grad=True)
    k, v = (torch.randn(2, 70, 2, size, device=DEVICE).half().transpose(1, 2).requires_grad_() for size in (6, 3))
    valid = torch.rand(2, 70, device=DEVICE) < 0.7 if masked else None
    if valid is not None:
        valid[1] = False

    def plain(q, k, v):
        return sdpa(q, k.to(q.dtype), v.to(q.dtype), scale=0.3, valid=valid)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    found, expected = many_keys_answers(q, k, v, valid, 0.3, plain), plain(*exact)
    assert (found - expected).norm() < 1e-6 * expected.norm()
    up = torch.randn_like(found)
    mine = torch.autograd.grad(found, (q, k, v), up, retain_graph=True)
    theirs = torch.autograd.grad(expected, exact, up.double())
    for a, b, bound in zip(mine, theirs, (1e-6, 1e-3, 1e-3), strict=True):
        assert a.dtype == (torch.float32 if bound < 1e-3 else torch.float16)
        assert (a - b).norm() < bound * b.norm()
    (first,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("", torch.float16),
        (", iterations=6", torch.float16),
        pytest.param(", iterations=6", torch.bfloat16, marks=on_a_card),
        pytest.param("", torch.bfloat16, marks=on_a_card),
    ],
)
@pytest.mark.parametrize(("n", "m", "kv_heads"), [(70, 70, 2), (5, 90, 1)])
def test_landmarks_are_as_by_plain_operations(options, dtype, n, m, kv_heads, monkeypatch):
    """Segments of unequal length, several parts of keys and queries, and fewer queries than landmarks."""
    monkeypatch.setattr(few_keys, "MOST_SEGMENTS", 6)
    mechanism = core(f"nystrom(landmarks=9{options})", Dims(12, 2, kv_heads=kv_heads)).to(DEVICE)
    q, k, v = (
        torch.randn(1, size, heads, 6, device=DEVICE).mul(2).to(dtype).transpose(1, 2).requires_grad_()
        for size, heads in ((n, 2), (m, kv_heads), (m, kv_heads))
    )
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attend(*exact, mechanism)
    monkeypatch.setattr(landmarks, "takes_landmarks", lambda *_: True)
    found = attend(q, k, v, mechanism)
    up = torch.randn_like(found)
    mine = [found, *torch.autograd.grad(found, (q, k, v), up, retain_graph=True)]
    for a, b in zip(mine, [expected, *torch.autograd.grad(expected, exact, up.double())], strict=True):
        assert a.dtype == dtype
        assert (a - b).norm() < (3e-3 if dtype == torch.float16 else 2e-2) * b.norm()
    (first,) = torch.autograd.grad(found.float().square().sum(), q, create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize(("share", "bias"), [("head", True), ("kv", True), ("head", False)])
def test_a_layer_of_slots_is_as_by_plain_operations(share, bias, monkeypatch):
    """Fewer tokens than positions, key heads that share; one slot is never written; then none of them is."""
    monkeypatch.setattr(few_keys, "MOST_SEGMENTS", 6)
    monkeypatch.setattr(slot_attention, "JOINED_TOKENS", 40)
    made = layer(f"linformer(rank=5, share={share!r})", width=24, heads=4, kv_heads=2, max_len=90).to(DEVICE)
    if not bias:
        made.q.bias = made.k.bias = made.v.bias = None
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) / 5)
        for weight in made.core.parameters():
            weight[:, :, 3] = 0
    x = torch.randn(2, 70, 24, device=DEVICE, requires_grad=True)
    weights = dict(made.named_parameters())
    up = torch.randn(2, 70, 24, device=DEVICE)

    def found():
        y = made(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *weights.values()], up)]

    for _ in range(2):
        expected = found()
        with monkeypatch.context() as patch:
            patch.setattr(low_rank, "takes_slots", lambda *_: True)
            for a, b in zip(found(), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()) + 1e-6)
            (first,) = torch.autograd.grad(made(x).square().sum(), x, create_graph=True)
            assert first.requires_grad
        with torch.no_grad():
            for weight in made.core.parameters():
                weight.zero_()


def test_a_layer_of_slots_has_the_products_of_autocast(monkeypatch):
    """Weights in float32, tokens in float32: sums of tokens and all maps are products of half precision."""
    made = layer("linformer(rank=5, share='head')", width=24, heads=4, max_len=90).to(DEVICE)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) / 5)
    x = torch.randn(2, 70, 24, device=DEVICE, requires_grad=True)
    up = torch.randn(2, 70, 24, device=DEVICE)
    sources = [x, *made.parameters()]
    exact = [(y := made(x)).detach(), *torch.autograd.grad(y, sources, up)]
    taken = []

    def takes(tokens, *_):
        taken.append(tokens.dtype)
        return True

    for fused in (True, False):
        with monkeypatch.context() as patch, torch.autocast(DEVICE.type, torch.float16):
            patch.setattr(low_rank, "takes_slots", takes if fused else lambda *_: False)
            y = made(x)
            found = [y.detach(), *torch.autograd.grad(y, sources, up.to(y.dtype))]
        for a, b in zip(found, exact, strict=True):
            assert (a.double() - b).norm() <= 1e-2 * b.double().norm() + 1e-6
        assert all(a.dtype == b.dtype for a, b in zip(found[1:], exact[1:], strict=True))
    assert taken == [torch.float16]


@pytest.mark.parametrize(("n", "strides"), [(70, 18), (72, 18), (70, 15)])
def test_strides_are_pooled_as_by_plain_operations(n, strides):
    k, v = (torch.randn(2, n, 3, size, device=DEVICE).transpose(1, 2).requires_grad_() for size in (6, 5))
    taps = [torch.randn(3, 4, device=DEVICE, requires_grad=True) for _ in range(2)]
    exact = [x.detach().double().requires_grad_() for x in (k, v, *taps)]
    found, expected = pool_shared_strides(k, v, *taps, strides), pool_strides_plain(*exact, strides)
    for used in (slice(0, 4), slice(1, 4)):
        up = [torch.randn_like(x) for x in found[used]]
        mine = [*found, *torch.autograd.grad(found[used], (k, v, *taps), up, retain_graph=True)]
        theirs = [*expected, *torch.autograd.grad(expected[used], exact, [x.double() for x in up], retain_graph=True)]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    (first,) = torch.autograd.grad(found[2].square().sum(), k, create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize("n", [70, 72])
def test_queries_are_divided_and_answers_merged_as_by_plain_operations(n):
    split = StrideSplit(8, -(-(n - 8) // 4), 4)
    q = torch.randn(2, n, 3, 6, device=DEVICE).transpose(1, 2).requires_grad_()
    exact = q.detach().double().requires_grad_()
    found, expected = divide_strides(q, split), divide_strides_plain(exact, split)
    up = [torch.randn_like(x) for x in found]
    mine = [*found, *torch.autograd.grad(found, q, up, retain_graph=True)]
    theirs = [*expected, *torch.autograd.grad(expected, exact, [x.double() for x in up])]
    shapes = (2, 3, n, 5), (2, 3, n), (2, 12, split.slots, 5), (2, 12, split.slots)
    answers = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    exact_answers = [x.detach().double().requires_grad_() for x in answers]
    out = merge_stride_answers((answers[0], answers[1]), (answers[2], answers[3]), split)
    merged = merge_strides_plain(*exact_answers, split)
    grad = torch.randn_like(out)
    mine += [out, *torch.autograd.grad(out, answers, grad, retain_graph=True)]
    theirs += [merged, *torch.autograd.grad(merged, exact_answers, grad.double())]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    for y, x in ((found[1], q), (out, answers[0])):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        assert first.requires_grad


@pytest.mark.parametrize("causal", [False, True])
def test_compressed_with_kernels_is_as_without(causal, monkeypatch):
    mechanism = core("compressed", Dims(24, 4, kv_heads=2, causal=causal)).to(DEVICE)
    with torch.no_grad():
        for weight in mechanism.parameters():
            weight.add_(torch.randn_like(weight))
    inputs = [torch.randn(2, 70, heads, 6, device=DEVICE).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    inputs += mechanism.parameters()

    def found():
        y = attend(*inputs[:3], mechanism, causal=causal)
        return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))]

    expected = found()
    monkeypatch.setattr(compressed, "takes_strides", lambda *_: True)
    for a, b in zip(found(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("empty", [False, True])
def test_slots_of_heads_are_as_by_plain_operations(empty, monkeypatch):
    """Fewer tokens than positions, several segments, query heads that share; one slot of a head is never written, or none."""
    monkeypatch.setattr(few_keys, "MOST_SEGMENTS", 4)
    mechanism = core("linformer(rank=5)", Dims(24, 4, kv_heads=2, max_len=160)).to(DEVICE)
    with torch.no_grad():
        for weight in mechanism.parameters():
            weight.add_(torch.randn_like(weight) / 5)
            weight[1, :, slice(None) if empty else 3] = 0
    inputs = [torch.randn(2, 150, heads, 6, device=DEVICE).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    inputs += mechanism.parameters()

    def found():
        y = attend(*inputs[:3], mechanism)
        return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)]

    expected = found()
    monkeypatch.setattr(low_rank, "takes_head_slots", lambda *_: True)
    mine = found()
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    (first,) = torch.autograd.grad(mine[0].square().sum(), inputs[0], create_graph=True)
    assert first.requires_grad


@pytest.mark.parametrize("bias", [False, True])
def test_joined_maps_are_the_maps(bias, monkeypatch):
    """Gradients come side by side, without a copy, or apart."""
    maps = [nn.Linear(10, size, bias=bias).to(DEVICE) for size in (12, 6, 6)]
    monkeypatch.setattr(joined, "SUMMED_ROWS", 40)
    x = torch.randn(2, 50, 10, device=DEVICE, requires_grad=True)
    weights = [one.weight for one in maps]
    biases = [one.bias for one in maps] if bias else []
    expected = [one(x).unflatten(-1, (-1, 3)) for one in maps]
    found = joined.joined_linear(x, weights, biases, 3)
    q, k, v = (y.transpose(1, 2) for y in found)
    together = joined.gradient_buffers(q, k, v)
    apart = [torch.randn_like(y) for y in expected]
    for grad, up in zip(together, apart, strict=True):
        grad.copy_(up.transpose(1, 2))
    theirs = torch.autograd.grad(expected, (x, *weights, *biases), apart)
    copied = []
    monkeypatch.setattr(torch, "cat", lambda *x, cat=torch.cat: copied.append(1) or cat(*x))
    for grads, copies in ((apart, 1), ([y.transpose(1, 2) for y in together], 0)):
        mine = torch.autograd.grad(found, (x, *weights, *biases), grads, retain_graph=True)
        assert len(copied) == copies
        copied.clear()
        for a, b in zip((*found, *mine), (*expected, *theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (first,) = torch.autograd.grad(found[1].square().sum(), x, create_graph=True)
    assert first.requires_grad


def test_a_layer_with_joined_maps_is_as_without(monkeypatch):
    made = layer("linformer(rank=5)", width=24, heads=4, kv_heads=2, max_len=70).to(DEVICE)
    x = torch.randn(2, 70, 24, device=DEVICE, requires_grad=True)

    def found():
        y = made(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]

    expected = found()
    monkeypatch.setattr(attention, "_joins", lambda *_: True)
    for a, b in zip(found(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
