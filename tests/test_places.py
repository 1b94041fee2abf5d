"""Positions, padding and the masks derived from them: made once a pass, shared by all layers."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import DEVICE, close
from regard import layer
from regard.blocks import Block, FeedForward, Stack
from regard.mixers import attention
from regard.mixers.base import Places

WIDTH, HEADS = 16, 2


class Names(TorchDispatchMode):
    """Operations by name."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def tokens(n=9, b=3):
    return torch.randn(b, n, WIDTH, device=DEVICE, dtype=torch.float64)


def some(b=3, n=9):
    valid = torch.rand(b, n, device=DEVICE) < 0.6
    valid[:, 2] = True
    return valid


def made(**more):
    return Stack.of("softmax", width=WIDTH, heads=HEADS, ffn=8, **more).to(DEVICE, torch.float64)


@pytest.mark.parametrize("learns", [True, False])
def test_all_layers_share_masks_and_positions(learns):
    found = []
    for depth in (1, 4):
        stack = made(depth=depth, causal=True, cross="softmax")
        with Names() as names, torch.set_grad_enabled(learns):
            stack(tokens(), context=tokens(7), context_valid=some(n=7))
        found.append([names.seen[name] for name in ("any", "cumsum", "arange", "bitwise_or")])
    assert found[0] == found[1] == [1, 1, 1, 1]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_is_silenced_behind_the_last_block_and_by_every_block_that_is_asked_alone(norm):
    stack, x, valid = made(depth=2, norm=norm), tokens(), some()
    y = stack(x, valid)
    assert (y[~valid] == 0).all()
    places = Places.of(x, valid)
    x = x.masked_fill(~valid[..., None], 0)
    for block in stack:
        loud, x = block(x, places), block(x, valid)
        assert (x[~valid] == 0).all() and (loud[~valid] != 0).any()
        close(loud[valid], x[valid])
    close(y[valid], (x if stack.final_norm is None else stack.final_norm(x))[valid])


def test_a_row_that_sees_nothing_says_nothing_and_learns_nothing():
    x, c, real = tokens().requires_grad_(), tokens(7).requires_grad_(), some(n=7)
    real[1] = False
    for mixer, more in (
        (layer("softmax", width=WIDTH, heads=HEADS, cross=True), {"context": c, "valid": real}),
        (layer("softmax", width=WIDTH, heads=HEADS), {"valid": torch.cat([real, real[:, :2]], 1)}),
    ):
        nn.init.zeros_(mixer.out.bias)  # what it says is what it has seen
        y = mixer.to(DEVICE, torch.float64)(x, **more)
        grads = torch.autograd.grad(y.square().sum(), (x, c), allow_unused=True)
        assert (y[1] == 0).all() and y[0].any()
        assert all(grad is None or ((grad[1] == 0).all() and grad.isfinite().all()) for grad in grads)


def test_three_maps_in_one_product_are_the_three_maps():
    x, maps = tokens().requires_grad_(), [nn.Linear(WIDTH, size).to(DEVICE, torch.float64) for size in (16, 8, 8)]
    given = (x, *(p for one in maps for p in one.parameters()))
    with Names() as names:
        joint = attention.fused_linear(x, *maps)
    assert names.seen["addmm"] == 1
    alone = [one(x) for one in maps]
    found = [torch.autograd.grad(sum(y.square().sum() for y in ys), given) for ys in (joint, alone)]
    for mine, theirs in zip((*joint, *found[0]), (*alone, *found[1]), strict=True):
        close(mine, theirs)


def test_maps_that_are_fewer_than_the_tokens_or_watched_or_of_another_kind_are_called():
    x, maps = tokens(), [nn.Linear(WIDTH, WIDTH).to(DEVICE, torch.float64) for _ in range(2)]
    few, heard = x[:1, :3], []
    with Names() as names, torch.no_grad():
        attention.fused_linear(x, *maps)  # nobody learns: weights are not worth copying
    assert names.seen["addmm"] == 2
    for given, parts in (
        (few, maps),
        (x, [maps[0], nn.Linear(WIDTH, WIDTH, bias=False).to(DEVICE, torch.float64)]),
        (x, [maps[0], attention.UnmadeProjection(4)]),
    ):
        for mine, one in zip(attention.fused_linear(given, *parts), parts, strict=True):
            close(mine, one(given))
    maps[1].register_forward_hook(lambda *_: heard.append(1))
    attention.fused_linear(x, *maps)
    assert heard == [1]


def test_a_block_streams_loudly_as_well():
    block = Block(layer("softmax", width=WIDTH, heads=HEADS, causal=True), FeedForward(WIDTH, 8)).to(DEVICE, torch.float64)
    x, valid = tokens(), some()
    (loud, _), (y, _) = (block.extend(block.start(3), x, given) for given in (Places.of(x, valid), valid))
    assert (y[~valid] == 0).all()
    close(loud[valid], y[valid])
