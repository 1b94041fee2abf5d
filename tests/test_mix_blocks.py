"""Blocks that are mixed where they lie: kernels beside plain operations, in tiles that nothing fills."""

import pytest
import torch

from conftest import DEVICE
from regard import Dims, clear_caches, core
from regard.mixers.sinkhorn import _Cut, _two_blocks
from regard.ops import mix_blocks
from regard.ops.mix_blocks import add_mixed, key_and_value_products, mix_keys_and_values, mixes_in_place, product_slices
from regard.ops.two_blocks import _mixing_key

pytest.importorskip("triton")
on_a_card = pytest.mark.skipif(DEVICE.type == "cpu", reason="slow in the interpreter")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """In the interpreter a tile is as small as a product may be: launches are prepared for it, and forgotten."""
    clear_caches()
    if DEVICE.type == "cpu":
        for name, size in (("INNER", 16), ("MOST_ROWS", dict.fromkeys((True, False), 16)), ("PROGRAMS", 300)):
            monkeypatch.setattr(mix_blocks, name, size)
        monkeypatch.setattr(mix_blocks, "MOST_COLUMNS", dict.fromkeys((True, False), 32))
    yield
    clear_caches()


def by_token(c: int, p: int, d: int, dtype: torch.dtype, b: int = 2, h: int = 3) -> torch.Tensor:
    """Blocks (b h c p d), the heads of a token side by side."""
    return torch.randn(b, c, p, h, d, device=DEVICE).to(dtype).permute(0, 3, 1, 2, 4)


def joined(c: int, p: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks that are a part of wider tokens."""
    return by_token(c, p, d + 3, dtype)[..., :d]


def shared(c: int, p: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of one head for all heads."""
    return by_token(c, p, d, dtype, h=1).expand(2, 3, c, p, d)


def contiguous(c: int, p: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    return by_token(c, p, d, dtype).contiguous()


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm() + 1e-6


def all_mixed(
    weights: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dk2: torch.Tensor, dv2: torch.Tensor
) -> list[torch.Tensor]:
    """Mixed blocks, the gradient of weights, and gradients of blocks added to ones."""
    key, k2, v2 = _mixing_key(k, v), torch.empty_like(dk2), torch.empty_like(dv2)
    mix_keys_and_values(key, weights, k, v, k2, v2)
    by_keys, by_values = key_and_value_products(key, k, v, dk2, dv2)
    dk, dv = torch.ones_like(k), torch.ones_like(v)
    return [k2, v2, by_keys.sum(0) + by_values.sum(0), *add_mixed(key, weights, (k, v), dk, dv, dk2, dv2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("layouts", "c", "p", "d", "e"),
    [
        ((by_token, by_token), 16, 4, 16, 16),
        ((by_token, by_token), 2, 1, 6, 6),
        ((by_token, by_token), 37, 5, 6, 11),
        ((joined, by_token), 19, 8, 16, 16),
        ((shared, by_token), 17, 3, 20, 4),
        ((contiguous, by_token), 20, 7, 5, 5),
        ((contiguous, contiguous), 20, 7, 5, 6),
        pytest.param((by_token, by_token), 200, 64, 64, 64, marks=on_a_card),
    ],
)
def test_blocks_are_mixed_as_by_plain_operations(layouts, c, p, d, e, dtype):
    """Tokens whose heads lie side by side, parts of wider tokens, shared heads: bits are the same in every call."""
    k, v = (layout(c, p, size, dtype) for layout, size in zip(layouts, (d, e), strict=True))
    dk2, dv2 = (contiguous(c, p, size, dtype) for size in (d, e))
    weights = torch.randn(6, c, c, device=DEVICE).softmax(-1).to(dtype)
    assert mixes_in_place(k, v) == (layouts != (contiguous, contiguous))
    found = all_mixed(weights, k, v, dk2, dv2)
    w, x, y, dx, dy = (one.double() for one in (weights.view(2, 3, c, c), k, v, dk2, dv2))
    sums = [torch.einsum("bhuc,bhcpd->bhupd", w, z) for z in (x, y)]
    products = sum(torch.einsum("bhupd,bhcpd->bhuc", a, z) for a, z in ((dx, x), (dy, y)))
    back = [1 + torch.einsum("bhuc,bhupd->bhcpd", w, a) for a in (dx, dy)]
    for a, b in zip(found, (*sums, products.view(6, c, c), *back), strict=True):
        near(a, b, dtype)
    for a, b in zip(found, all_mixed(weights, k, v, dk2, dv2), strict=True):
        assert torch.equal(a, b)


def test_products_are_divided_where_there_are_few_programs(monkeypatch):
    """By powers of two, never into more than there are numbers."""
    monkeypatch.setattr(mix_blocks, "PROGRAMS", 512)
    monkeypatch.setattr(mix_blocks, "INNER", 64)
    k = torch.empty(1, 64, 64, 8, 64, dtype=torch.float16, device=DEVICE).permute(0, 3, 1, 2, 4)
    v = torch.empty_like(k)
    monkeypatch.setattr(mix_blocks, "MOST_ROWS", {True: 64, False: 64})
    assert product_slices(k.expand(8, *k.shape[1:]), v) == 4
    assert product_slices(k, v) == mix_blocks.MOST_SLICES
    assert product_slices(k[:, :, :, :2], v[:, :, :, :2]) == 2
    assert product_slices(k.contiguous(), v.contiguous()) == 1
    monkeypatch.setattr(mix_blocks, "MOST_MIXED", 0)
    assert product_slices(k, v) == 1


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the guard is one of Triton's interpreter")
@pytest.mark.parametrize(("c", "p", "d", "e"), [(19, 3, 6, 11), (2, 1, 5, 5), (33, 5, 16, 16)])
def test_no_address_lies_outside_of_the_blocks(c, p, d, e):
    from memory_guard import guarded_memory

    k, v = (by_token(c, p, size, torch.float32) for size in (d, e))
    dk2, dv2 = (contiguous(c, p, size, torch.float32) for size in (d, e))
    with guarded_memory() as guard:
        all_mixed(torch.rand(6, c, c), k, v, dk2, dv2)
    assert guard.launches == (3 if d == e else 6)
    assert not guard.outside


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_attention_to_mixed_blocks_is_as_by_plain_operations(causal, dtype, in_place, monkeypatch):
    """More tiles than one, with gradients; without the kernels too. No block may be sorted to an earlier one if it is causal."""
    monkeypatch.setattr(mix_blocks, "MOST_MIXED", 1024 if in_place else 0)
    sinkhorn = core("sinkhorn(block=4)", Dims(18, 3, causal=causal))
    q, k, v = (by_token(19, 4, size, dtype) for size in (6, 6, 5))
    scores = torch.randn(2, 3, 19, 19, device=DEVICE)
    shares = (scores.masked_fill(torch.ones_like(scores).triu() > 0, -1e4) if causal else scores).softmax(-1)
    given = [x.detach().requires_grad_() for x in (q, k, v, shares)]
    exact = [x.detach().double().requires_grad_() for x in given]
    there = torch.ones(1, 19, 4, dtype=torch.bool, device=DEVICE)
    found = sinkhorn._mixed(given[0], _Cut(given[1], given[2], there, True, True), given[3], causal)
    own = torch.eye(19, dtype=torch.bool, device=DEVICE)
    k2, v2, bias = _Cut(exact[1], exact[2], there, True, True).sorted_by(exact[3].masked_fill(own, 0))
    expected = _two_blocks(causal, *exact[:3], k2, v2, torch.cat([torch.zeros_like(bias), bias], -1))[0]
    up = torch.randn_like(found)
    mine = [found, *torch.autograd.grad(found, given, up)]
    theirs = [expected, *torch.autograd.grad(expected, exact, up.double())]
    for a, b in zip(mine, theirs, strict=True):
        near(a, b, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sort_in_place_is_one_of_copies(dtype, monkeypatch):
    """The whole of sinkhorn attention, the gradient of the sort included, and the same bits once more."""
    made = core("sinkhorn(block=4, iterations=3)", Dims(18, 3)).to(DEVICE).eval()
    given = [by_token(21, 4, size, dtype).detach().requires_grad_() for size in (6, 6, 6)]
    up = by_token(21, 4, 6, dtype)
    there = torch.ones(1, 21, 4, dtype=torch.bool, device=DEVICE)

    def run():
        out = made._sorted(given[0], _Cut(given[1], given[2], there, True, True))
        return [out, *torch.autograd.grad(out, [*given, made.sort], up)]

    found, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    monkeypatch.setattr(mix_blocks, "MOST_MIXED", 0)
    for a, b in zip(found, run(), strict=True):
        near(a, b.double(), dtype)
