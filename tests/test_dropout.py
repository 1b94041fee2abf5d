"""Dropout with masks of random bits: what it keeps, how it scales, where it is PyTorch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard.models import build  # noqa: F401 - models are imported as users do, before their modules are looked at
from regard.ops import dropout
from regard.ops.dropout import DRAW_LEVELS, Dropout, drop_out
from regard.spec import layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_a_share_is_dropped_and_the_mean_stays(dtype, p):
    """300,001 elements: not a multiple of the four that a draw gives. Five standard errors."""
    torch.manual_seed(0)
    y = drop_out(torch.ones(300_001, dtype=dtype), p)
    kept = y != 0
    error = 5 * (p * (1 - p) / y.numel()) ** 0.5
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=error)
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / (1 - round(p * DRAW_LEVELS) / DRAW_LEVELS)))


def test_neighbours_are_dropped_independently():
    """Of the four elements of a draw, and of the same place in two draws, pairs are kept as often as chance has it."""
    torch.manual_seed(0)
    kept = (drop_out(torch.ones(400_000), 0.5) != 0).double()
    for apart in (1, 2, 3, 4, 8):
        assert (kept[apart:] * kept[:-apart]).mean().item() == pytest.approx(0.25, abs=0.004), apart


def test_gradients_go_through_what_is_kept():
    torch.manual_seed(0)
    x = torch.randn(7, 5, 3, dtype=torch.float64, requires_grad=True)
    y = drop_out(x, 0.3)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(y, x * grad) and 0 < (grad == 0).sum() < x.numel()


def test_a_seed_gives_a_mask_and_evaluation_changes_nothing():
    drop, x = Dropout(0.4), torch.randn(33, 9)
    torch.manual_seed(3)
    one, other = drop(x), drop(x)
    torch.manual_seed(3)
    assert torch.equal(one, drop(x)) and not torch.equal(one, other)
    assert drop.eval()(x) is x


@pytest.mark.parametrize("p", [0.0, 1e-6, 1.0])
def test_shares_that_bits_do_not_have_are_pytorchs(p):
    torch.manual_seed(0)
    mine = drop_out(torch.ones(50), p)
    torch.manual_seed(0)
    assert torch.equal(mine, F.dropout(torch.ones(50), p))


def test_compilers_and_transforms_get_pytorchs(monkeypatch):
    """They trace operations, and draws of integers would be the same for every row of a vmap."""
    calls = []
    monkeypatch.setattr(dropout.F, "dropout", lambda x, p, _training: calls.append(p) or x)
    torch.func.grad(lambda x: drop_out(x, 0.5).sum())(torch.ones(4))
    drop_out(torch.ones(4, device="meta"), 0.25)
    assert calls == [0.5, 0.25]


def test_every_dropout_of_a_model_is_the_fast_one():
    """A layer that is added with nn.Dropout would be 2.5 times as slow on a CPU."""
    import regard.models as models
    from regard.blocks import Stack

    stack = Stack.of("softmax", width=16, heads=2, depth=1, dropout=0.1, ffn=32)
    made = models.Reader(models.Encoder(models.Tokens(20, 16, dropout=0.1), stack), models.PerSequence(16, 3, dropout=0.1))
    kinds = {type(module) for module in made.modules() if isinstance(module, nn.Dropout)}
    assert kinds == {Dropout}
    assert not any(isinstance(module, nn.Dropout) for module in layer("softmax", width=16, heads=2).modules())
