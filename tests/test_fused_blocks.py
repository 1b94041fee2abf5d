"""Blocks by kernels that fuse sums, norms, activations and the gradients of biases: as by plain operations."""

import pytest
import torch
from torch import nn

import regard.blocks.feedforward as feedforward
import regard.mixers.attention as attention
import regard.ops.add_norm as add_norm
from conftest import DEVICE
from regard.blocks import FeedForward, Stack
from regard.ops import feed_forward, joined_linear

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def errors(found, exact):
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in zip(found, exact, strict=True)]


def randn(*shape, dtype=SINGLE):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(
    ("of_x", "of_y", "of_norm"), [(SINGLE, HALF, HALF), (SINGLE, SINGLE, SINGLE), (HALF, HALF, HALF), (SINGLE, None, HALF)]
)
def test_a_sum_and_its_norm_are_those_of_float64(kind, of_x, of_y, of_norm):
    """Gradients have the types of what they belong to; those of weights are summed in float32 over more than one program."""
    norm, exact = kind(40, eps=1e-5).to(DEVICE), kind(40, eps=1e-5).to(DEVICE, DOUBLE)
    for p, q in zip(norm.parameters(), exact.parameters(), strict=True):
        q.data.copy_(p.data.normal_())
    x, y = randn(3, 90, 40, dtype=of_x), None if of_y is None else randn(3, 90, 40, dtype=of_y)
    inputs = [one for one in (x, y) if one is not None]
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    total, out = add_norm.fused_add_norm(x, y, norm, of_norm)
    assert (total.dtype, out.dtype) == (of_x, of_norm)
    expected = sum(doubles[1:], doubles[0] + 0)
    ups = torch.randn_like(total), torch.randn_like(out)
    found = torch.autograd.grad((total, out), [*inputs, *norm.parameters()], ups, retain_graph=True)
    assert [g.dtype for g in found[: len(inputs)]] == [one.dtype for one in inputs]
    wanted = torch.autograd.grad((expected, exact(expected)), [*doubles, *exact.parameters()], [up.double() for up in ups])
    bound = 5e-3 if HALF in (of_x, of_norm) else 1e-6
    assert max(errors((total, out, *found), (expected, exact(expected), *wanted))) < bound
    (first,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    assert first.requires_grad
    (alone,) = torch.autograd.grad(total, x, ups[0])
    assert torch.equal(alone, ups[0])


@pytest.mark.parametrize("activation", feed_forward.KERNEL_ACTIVATIONS)
def test_a_feed_forward_layer_in_one_node_is_that_of_float64(activation, monkeypatch):
    monkeypatch.setattr(feed_forward, "ROWS_SUMMED", 40)
    layer = FeedForward(12, 40, activation=activation).to(DEVICE)
    exact = FeedForward(12, 40, activation=activation).to(DEVICE, DOUBLE)
    exact.load_state_dict(layer.state_dict())
    x = randn(2, 50, 12)
    given = x.detach().double().requires_grad_()
    found, expected = feed_forward.fused_feed_forward(x, layer.up, layer.down, activation), exact(given)
    up = torch.randn_like(found)
    mine = torch.autograd.grad(found, [x, *layer.parameters()], up, retain_graph=True)
    theirs = torch.autograd.grad(expected, [given, *exact.parameters()], up.double())
    assert max(errors((found, *mine), (expected, *theirs))) < 1e-5
    (first,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    assert first.requires_grad


def fuse_everywhere(monkeypatch):
    """Take the fused operations on every device, and count their calls."""
    calls = []

    def counted(module, name):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: calls.append(name) or plain(*given))

    monkeypatch.setattr(add_norm, "takes_add_norm", lambda *_: True)
    monkeypatch.setattr(feedforward, "takes_feed_forward", lambda *_: True)
    monkeypatch.setattr(attention, "_joins", lambda *_: True)
    counted(add_norm, "fused_add_norm")
    counted(feedforward, "fused_feed_forward")
    counted(attention, "joined_linear")
    return calls


def passes(stack, x):
    with torch.autocast(DEVICE.type, HALF, enabled=x.dtype == SINGLE):
        y = stack(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *stack.parameters()], allow_unused=True)]


@pytest.mark.parametrize("mixer", ["softmax", "conv", "fnet"])
def test_a_fused_stack_is_as_exact_as_a_plain_one(mixer, monkeypatch):
    """Under autocast, where the norm comes in half precision to maps alone."""
    torch.manual_seed(0)
    stack = Stack.of(mixer, width=16, heads=2, depth=2, ffn=24).to(DEVICE)
    exact = Stack.of(mixer, width=16, heads=2, depth=2, ffn=24).to(DEVICE, DOUBLE)
    exact.load_state_dict(stack.state_dict())
    x = randn(2, 30, 16)
    wanted = passes(exact, x.detach().double().requires_grad_())
    there = [one is not None and float(one.detach().norm()) > 1e-6 for one in wanted]  # the bias of keys has no gradient
    plain = passes(stack, x)
    calls = fuse_everywhere(monkeypatch)
    found = passes(stack, x)
    assert calls.count("fused_add_norm") == 5 and calls.count("fused_feed_forward") == 2
    assert calls.count("joined_linear") == (4 if mixer == "softmax" else 0)
    assert [a is None for a in found] == [b is None for b in plain]
    assert all(a.dtype == b.dtype for a, b in zip(found, plain, strict=True) if a is not None)
    kept = [[one for one, real in zip(many, there, strict=True) if real] for many in (found, plain, wanted)]
    mine, theirs = errors(kept[0], kept[2]), errors(kept[1], kept[2])
    assert max(mine) < 1.5 * max(theirs) + 1e-3


def test_dropout_and_hooks_keep_plain_operations(monkeypatch):
    stack = Stack.of("softmax", width=16, heads=2, depth=2, ffn=24, dropout=0.5).to(DEVICE)
    x = randn(2, 30, 16)
    calls, seen = fuse_everywhere(monkeypatch), []
    stack(x)
    assert "fused_feed_forward" not in calls
    stack.eval()
    stack.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    stack.blocks[1].channel.up.register_forward_hook(lambda *_: seen.append("up"))
    calls.clear()
    stack(x)
    assert seen == ["block", "up"] and calls.count("fused_feed_forward") == 1


def test_joined_maps_follow_autocast():
    """The product of float32 tokens and weights is of the type of autocast, gradients are float32."""
    one = nn.Linear(10, 12).to(DEVICE)
    x = randn(2, 50, 10)
    with torch.autocast(DEVICE.type, HALF):
        (found,), expected = joined_linear.joined_linear(x, (one.weight,), (one.bias,), 12), one(x)
    assert found.dtype == expected.dtype == HALF
    up = torch.randn_like(expected)
    inputs = x, one.weight, one.bias
    mine, theirs = torch.autograd.grad(found, inputs, up[:, :, None]), torch.autograd.grad(expected, inputs, up)
    for a, b in zip((found[:, :, 0], *mine), (expected, *theirs), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
