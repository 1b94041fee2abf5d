"""Sinkhorn attention: its definition slot by slot, permutations that are other mechanisms, and a future that stays unseen."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import DEVICE, close, some
from regard import Dims, attend, core, layer
from regard.mixers.base import Places
from regard.mixers.kv_cache import KVCache
from regard.mixers.sinkhorn import Sinkhorn, _Cut, balanced, balanced_in_time
from regard.ops.budget import Budget
from regard.ops.mixed_blocks import mixed_blocks, mixed_blocks_in_buffers, takes_mixed_blocks
from test_limits import Largest, check_same, qkv


def made(text="sinkhorn(block=8)", **dims) -> Sinkhorn:
    torch.manual_seed(0)
    found = core(text, Dims(32, 4, **dims)).to(DEVICE, torch.float64).eval()
    assert isinstance(found, Sinkhorn)
    return found


def cut(k, block, valid=None) -> _Cut:
    return _Cut.of(KVCache.empty(k, k).append(k, k, Places.of(k[:, 0], valid)), k, block)


def directions(sums):
    return [x / x.norm(dim=-1, keepdim=True) for x in sums]


def shares(m, blocks, causal):
    """P of one row and all heads, a list of rows (h c), by the formula: in turn, or in the order of time."""
    u = directions([x.sum(1) for x in blocks])
    if not causal:
        r = torch.stack([torch.stack([torch.einsum("ha,hab,hb->h", x, m.sort, y) for y in u], -1) for x in u], 1)
        p = (r / m.temperature).exp()
        for _ in range(m.iterations):
            p = p / p.sum(1, keepdim=True)
            p = p / p.sum(2, keepdim=True)
        return list(p.unbind(1))
    rows, taken = [], torch.zeros_like(m.sort[:, 0, :1]).expand(-1, len(u))
    for i, own in enumerate(blocks):
        x = directions([torch.cat([*blocks[:i], own[:, :1]], 1).sum(1)])[0]
        r = torch.stack([torch.einsum("ha,hab,hb->h", x, m.sort, y) for y in u], -1) / m.temperature
        p = (r - (1 + taken).log())[:, :i].softmax(-1) if i else r[:, :0]
        rows.append(torch.cat([p, torch.zeros_like(r[:, i:])], -1))
        taken = taken + rows[-1]
    return rows


def slowly(m, q, k, v, causal):
    """Query by query, slot by slot; m.form is full."""
    out = []
    for q1, k1, v1 in zip(q, k, v, strict=True):
        keys, values = k1.split(m.block, 1), v1.split(m.block, 1)
        parts = shares(m, keys, causal)
        for t in range(q.shape[2]):
            i, seen = t // m.block, t % m.block + 1 if causal else m.block
            score = torch.einsum("hd,hjd->hj", q1[:, t], keys[i][:, :seen]) / math.sqrt(q.shape[-1])
            weighed = [(score.exp(), values[i][:, :seen])]
            for slot in range(m.block):
                there = [j for j in range(len(keys)) if j != i and slot < keys[j].shape[1] and not (causal and j > i)]
                if not there:
                    continue
                mass = sum(parts[i][:, j] for j in there)
                k2, v2 = (sum(parts[i][:, j, None] * x[j][:, slot] for j in there) / mass[:, None] for x in (keys, values))
                weighed.append(((mass * ((q1[:, t] * k2).sum(-1) / math.sqrt(q.shape[-1])).exp())[:, None], v2[:, None]))
            weights, seen_values = torch.cat([w for w, _ in weighed], -1), torch.cat([x for _, x in weighed], 1)
            out.append(torch.einsum("hj,hje->he", weights / weights.sum(-1, keepdim=True), seen_values))
    return torch.stack(out, 1).unflatten(1, q.shape[::2][:2]).transpose(0, 1)


@pytest.mark.parametrize("n", [6, 37, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_its_definition(n, causal, set_limits):
    set_limits(strip=1 << 10)  # many strips
    m, inputs = made(causal=causal), qkv(n)
    m.sort.data.mul_(2)  # a sort that matters
    check_same(lambda *x: attend(*x[:3], m, causal=causal), lambda *x: slowly(m, *x[:3], causal), [*inputs, m.sort])


def block_keys(c, p):
    """Keys (1 4 c*p 8) whose blocks sum to directions at right angles."""
    k = torch.randn(1, 4, c, p, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    k = k - k.mean(3, keepdim=True) + torch.eye(8, dtype=torch.float64)[:c, None] * 0.5
    return k.flatten(2, 3).to(DEVICE).requires_grad_()


def test_the_identity_is_blocks():
    m, (q, _, v), k = made(), qkv(64, b=1), block_keys(8, 8)
    with torch.no_grad():
        m.sort.copy_(1e4 * torch.eye(8))
    close(m.shares(cut(k, 8), False), torch.eye(8, dtype=k.dtype, device=DEVICE).expand(1, 4, 8, 8))
    check_same(lambda *x: attend(*x, m), lambda *x: attend(*x, core("Blocks(8)", Dims(32, 4))), [q, k, v])


def test_a_permutation_is_two_blocks():
    m, (q, _, v), k = made(), qkv(64, b=1), block_keys(8, 8)
    order = torch.tensor([3, 0, 1, 7, 2, 5, 4, 6], device=DEVICE)  # 5 stays where it is
    with torch.no_grad():
        m.sort.copy_(1e4 * torch.eye(8, device=DEVICE)[order])
    i, j = torch.arange(64, device=DEVICE)[:, None] // 8, torch.arange(64, device=DEVICE) // 8
    seen = (i == j) | (order[i] == j)
    check_same(lambda *x: attend(*x, m), lambda *x: scaled_dot_product_attention(*x, attn_mask=seen), [q, k, v])


@pytest.mark.parametrize("n", [60, 64])
def test_sorted_to_the_block_behind_it(n, monkeypatch):
    m = made(causal=True)
    monkeypatch.setattr(
        Sinkhorn,
        "shares",
        lambda _, c, causal: c.k.new_ones(8).diag_embed().roll(1, 0).tril(-1 * causal).expand(*c.k.shape[:2], 8, 8),
    )
    i, j = torch.arange(n, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
    seen = (i >= j) & (i // 8 - j // 8 <= 1)
    check_same(lambda *x: attend(*x, m, causal=True), lambda *x: scaled_dot_product_attention(*x, attn_mask=seen), qkv(n))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", ["sinkhorn", "sinkhorn(form='sortcut', top=3)"])
def test_one_block_is_softmax(text, causal):
    if causal and "sortcut" in text:
        return
    softmax = core("softmax", Dims(32, 4))
    check_same(lambda *x: attend(*x, made(text), causal=causal), lambda *x: attend(*x, softmax, causal=causal), qkv(60))


def test_a_sortcut_that_sorts_every_block_to_the_front_is_softmax():
    m, (q, _, v), k = made("sinkhorn(block=8, form='sortcut', top=9)"), qkv(64, b=1), block_keys(8, 8)
    with torch.no_grad():
        m.sort.copy_(1e4 * torch.eye(8)[[3, 0, 1, 7, 2, 5, 4, 6, 0]])
    check_same(lambda *x: attend(*x, m), lambda *x: attend(*x, core("softmax", Dims(32, 4))), [q, k, v])


def test_the_rest_of_a_sortcut_is_one_row_for_many():
    m, k = made("sinkhorn(block=8, form='sortcut', top=2, iterations=40)"), qkv(75)[1]
    u = torch.stack(directions([x.sum(2) for x in k.split(8, 2)]), 2)
    every = torch.cat([m.sort @ u.mT / m.temperature, k.new_zeros(2, 4, 8, 10)], 2)  # rows without scores of their own
    close(m.shares(cut(k, 8), False), balanced(40, every)[:, :, :2])


@pytest.mark.parametrize("n", [100, 1000, 4000])
def test_rows_and_columns_sum_to_one(n):
    k = qkv(n)[1].detach()
    valid = torch.ones(2, n, dtype=torch.bool, device=DEVICE)
    valid[1, ::3] = False
    p, cuts = (made(x).shares(cut(k, 8, valid), False) for x in ("sinkhorn(block=8)", "sinkhorn(block=8, form='sortcut')"))
    for row in range(2):
        c = -(-int(valid[row].sum()) // 8)
        inside = p[row, :, :c, :c]
        close(inside.sum(-1), torch.ones_like(inside[..., 0]))
        assert (inside.sum(-2) - 1).abs().max() < 1e-3
        assert (p[row, :, c:] == 0).all() and (p[row, :, :, c:] == 0).all()  # missing blocks have no mass
        assert (cuts[row, :, :, c:] == 0).all()
    close(cuts.sum(-1), torch.ones_like(cuts[..., 0]))
    assert cuts.sum(-2).max() < 1 + 1e-3


@pytest.mark.parametrize("c", [1, 2, 3, 10, 100, 400])
def test_the_default_number_of_iterations_is_enough(c):
    p = balanced(made().iterations, torch.randn(20, c, c, generator=torch.Generator().manual_seed(c)))
    assert (p.sum(-1) - 1).abs().max() < 1e-5 and (p.sum(-2) - 1).abs().max() < 1e-3


def test_what_everybody_wants_is_shared_in_time():
    logits = torch.full((64, 64), -1e30, dtype=torch.float64).masked_fill(torch.ones(64, 64).tril(-1).bool(), 0)
    logits[1:, 0] += 3
    shared, greedy = balanced_in_time(16, logits), logits.softmax(-1)[1:]
    close(shared[1:].sum(-1), torch.ones(63, dtype=torch.float64))
    assert (shared[0] == 0).all() and shared[:, 0].sum() < 0.5 * greedy[:, 0].sum()
    for n in (5, 17, 40):
        assert torch.equal(balanced_in_time(16, logits[:n, :n]), shared[:n, :n])  # what comes later changes nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_token_moves_no_earlier_output(dtype):
    m = layer("sinkhorn(block=16)", width=32, heads=4, causal=True).to(DEVICE, dtype).eval()
    x = torch.randn(1, 512, 32, dtype=dtype, device=DEVICE)
    for t in (511, 500, 496, 495, 17):
        z = x.clone()
        z[:, t] = 1e3 * torch.randn(32, dtype=dtype, device=DEVICE)
        moved = (m(x) != m(z)).any(-1)[0]
        assert int(moved[:t].sum()) == 0 and moved[t]


def test_noise_is_for_training_alone():
    for text in ("sinkhorn(block=8)", "sinkhorn(block=8, form='sortcut')"):
        m, inputs = made(text), qkv(64)
        once = attend(*inputs, m)
        assert torch.equal(once, attend(*inputs, m))
        m.train()
        drawn = [attend(*inputs, m) for _ in range(2)]
        assert not torch.equal(*drawn) and not torch.equal(drawn[0], once)
        (grad,) = torch.autograd.grad(drawn[0].square().sum(), m.sort)
        assert grad.isfinite().all() and grad.abs().max() > 0


def test_temperature_decides_how_hard_the_sort_is():
    blocks = cut(qkv(64)[1], 8)
    hot, cold = (made(f"sinkhorn(block=8, temperature={t}, iterations=200)").shares(blocks, False) for t in (1e3, 0.02))
    assert (hot - 1 / 8).abs().max() < 1e-2 and cold.amax(-1).mean() > 0.95


@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_lie_anywhere(causal):
    m, valid = made(causal=causal), some(2, 90)
    q, k, v = qkv(90)
    out = attend(q, k, v, m, causal=causal, valid=valid, query_valid=None if causal else valid)
    for row in range(2):
        real = [x[row : row + 1, :, valid[row]] for x in (q, k, v)]
        close(out[row : row + 1, :, valid[row]], attend(*real, m, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_no_table_of_all_pairs(causal, set_limits):
    set_limits(strip=1 << 16)
    n, m = 8192, core("sinkhorn(block=64)", Dims(16, 2, causal=causal))
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
    with Largest() as watch:
        attend(q, k, v, m, causal=causal).sum().backward()
    assert watch.most <= 2 * n * 8 * 2  # own and sorted keys of all tokens


def test_a_sortcut_answers_another_sequence():
    m = made("sinkhorn(block=8, form='sortcut')")
    q, k, v = qkv(50, 75)
    assert attend(q, k, v, m).shape == q.shape
    close(attend(q[:, :, 20:], k, v, m), attend(q, k, v, m)[:, :, 20:])


def test_a_step_of_the_balance_is_two_operations():
    """Columns, rows: a kernel each. What a step costs beyond that is launches alone, on blocks as few as these."""
    counts = []
    for iterations in (4, 24):
        m = core(f"sinkhorn(block=8, iterations={iterations})", Dims(32, 4)).eval()
        q, k, v = (torch.randn(1, 4, 64, 8, device=DEVICE) for _ in range(3))
        m = m.to(DEVICE)
        with Kernels() as kernels:
            attend(q, k, v, m)
        counts.append(kernels.count)
    assert counts[1] - counts[0] == 2 * 20


def test_whole_blocks_are_mixed_without_a_pass_for_their_mass():
    """A row of shares is divided by its sum; only a slot that the last block lacks needs a factor of its own."""
    m = made()
    for n, factors in ((64, 0), (60, 2)):
        k = torch.randn(1, 4, n, 8, dtype=torch.float64, device=DEVICE)
        blocks = cut(k, 8)
        assert blocks.every_block and blocks.every_slot == (n == 64)
        parts = m.shares(blocks, False)
        with Kernels() as kernels:
            blocks.sorted_by(parts)
        assert kernels.made.count(("mul", 64 * 4 * 8)) == factors


class Kernels(TorchDispatchMode):
    """Count the operators that compute something: views and empty tensors do not."""

    def __init__(self):
        super().__init__()
        self.count, self.made = 0, []  # all of them; names and sizes of those with one result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += not func.is_view
        if isinstance(out, torch.Tensor):
            self.made.append((func.overloadpacket.__name__, out.numel()))
        return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("filled", [False, True])
def test_products_in_buffers_compute_the_definition(causal, filled, monkeypatch):
    monkeypatch.setattr("regard.ops.mixed_blocks.budget", lambda _: Budget(tile_scores=8 * 6 * 6 * 3))  # strips of 3 and 1
    b, h, u, c, p, d, e = 2, 3, 4, 5, 6, 7, 8
    shapes = ((b, h, u, p, d), (b, h, c, p, d), (b, h, c, p, e), (b, h, u, c), (b, h, u, p), (b, h, u, 2 * p))
    torch.manual_seed(0)
    given = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    some = [x for x in given if not filled or x is not given[4]]
    if filled:
        given[4] = None
    assert takes_mixed_blocks(*some)
    slow, fast = mixed_blocks(*given, causal), mixed_blocks_in_buffers(*given, causal)
    torch.testing.assert_close(fast, slow)
    up = torch.randn_like(slow)
    for ours, theirs in zip(*(torch.autograd.grad(y, some, up) for y in (fast, slow)), strict=True):
        torch.testing.assert_close(ours, theirs)
    first = torch.autograd.grad(mixed_blocks_in_buffers(*given, causal), some[0], up, create_graph=True)[0]
    wanted = torch.autograd.grad(mixed_blocks(*given, causal), some[0], up, create_graph=True)[0]
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), some) for y in (first, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)
