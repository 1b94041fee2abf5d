"""Layers that run backwards: the gradients of plain autograd, without what it keeps."""

import pytest
import torch

from conftest import DEVICE, HEADS, WIDTH, close, data, each_path, modes, some
from regard.blocks import Block, FeedForward, ReversibleStack, Stack
from regard.mixers.base import Can, Dims, Free
from test_blocks import stack


class Counting(Free):
    """A buffer that counts the passes."""

    can = Can.NOTHING

    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x, *, context=None, valid=None):  # noqa: ARG002
        if self.training:
            self.passes += 1
        return x * self.passes


def test_it_is_its_formula():
    made, x = stack(["softmax", "linear"], ReversibleStack), data(12)
    one = two = x
    for block in made:
        one = one + block.mixer(block.mixer_norm(two))
        two = two + block.channel(block.channel_norm(one))
    close(made(x), made.final_norm((one + two) / 2))
    assert made.state_dict().keys() == stack(["softmax", "linear"], Stack).state_dict().keys()


def both(made, x, valid=None, seed=3):
    """Output and gradients of a reversible stack, and of the same operations under plain autograd."""
    up = data(x.shape[1], seed=9, b=x.shape[0], dtype=x.dtype)
    weights, found = [p for p in made.parameters() if p.requires_grad], []
    for run in (made, lambda x, valid: made._mean(made.run(x, valid), x, valid)):
        torch.manual_seed(seed)
        y = run(x, valid)
        after = torch.rand(1)
        found.append([y, after, *torch.autograd.grad((y * up).sum(), [x, *weights], allow_unused=True)])
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("specs", ["softmax", ["linear", "Local(5) | Global(first=1)", "softmax"]], ids=str)
def test_running_backwards_gives_the_same_gradients(specs, dropout, padded):
    for causal in (False, True):
        made = stack(specs, ReversibleStack, depth=4, causal=causal, dropout=dropout).train()
        x = data(33).requires_grad_()
        fast, slow = both(made, x, some(3, 33) if padded else None)
        assert len(fast) == len(slow) and fast[2].abs().max() > 1e-3
        for a, b in zip(fast, slow, strict=True):
            close(a, b)
        if dropout:
            assert not torch.equal(made(x), made(x))


@each_path
def test_every_mechanism_runs_backwards(case):
    for mode in modes(case):
        if case.build(**mode).rate > 1:
            with pytest.raises(ValueError, match="an output for every token"):
                stack(case.spec, ReversibleStack, **mode)
            continue
        made = stack(case.spec, ReversibleStack, depth=2, positions=case.positions, dropout=0.1, **mode).train()
        if case.row.name == "routing":  # its centroids move in training
            with pytest.raises(RuntimeError, match="changes its buffers in training"):
                made(data(40))
            made.eval()
        for a, b in zip(*both(made, data(40).requires_grad_()), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)


def test_dropped_weights_fall_as_they_fell():
    made = stack("softmax", ReversibleStack, depth=3, weight_dropout=0.4).train()
    for a, b in zip(*both(made, data(20).requires_grad_()), strict=True):
        close(a, b)


def test_the_dice_are_left_alone():
    made, x = stack("softmax", ReversibleStack, dropout=0.3).train(), data(9).requires_grad_()
    y = made(x)
    torch.manual_seed(5)
    y.sum().backward()
    seen = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(seen, torch.rand(3))


def test_a_reversible_stack_streams_as_it_is():
    made, x, valid = stack(["softmax", "linear"], ReversibleStack, causal=True), data(30), some(3, 30)
    y = made(x, valid)
    assert (y[~valid] == 0).all()
    for row in range(3):
        close(y[row][valid[row]], made(x[row][valid[row]][None])[0])
    with torch.no_grad():
        close(made(x, valid), y)
        first, state = made.extend(made.start(3), x[:, :19], valid[:, :19])
        second, _ = made.extend(state, x[:, 19:], valid[:, 19:])
    close(torch.cat([first, second], 1), y)


def test_shared_and_frozen_weights():
    made = stack("softmax", ReversibleStack, depth=2).train()
    twice = ReversibleStack([made.blocks[0], made.blocks[1], made.blocks[0]], made.final_norm)
    made.blocks[1].requires_grad_(False)
    for a, b in zip(*both(twice, data(12).requires_grad_()), strict=True):
        close(a, b)
    x = data(12)  # an input without a gradient, as behind frozen embeddings
    twice(x).square().sum().backward()
    assert made.blocks[0].channel.up.weight.grad.abs().max() > 0 and made.blocks[1].channel.up.weight.grad is None


def saved_bytes(made, x):
    """What autograd keeps for the backward pass, weights apart."""
    weights, kept = {p.untyped_storage().data_ptr() for p in made.parameters()}, {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = made(x)
    assert y.requires_grad
    return sum(kept.values())


def test_memory_does_not_grow_with_depth():
    x = data(64).requires_grad_()
    plain = {depth: saved_bytes(stack(kind=Stack, depth=depth).train(), x) for depth in (2, 8)}
    reversible = {depth: saved_bytes(stack(kind=ReversibleStack, depth=depth).train(), x) for depth in (2, 8)}
    assert reversible[2] == reversible[8] < 6 * x.nbytes
    assert 3.5 < plain[8] / plain[2] < 4.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision(dtype):
    """Under autocast, and with weights in half precision: the streams are float32, so inverting them loses next to nothing."""
    made = stack("softmax", ReversibleStack, depth=6, dropout=0.2).train().to(dtype)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.float32):
        fast, slow = both(made, data(20, dtype=dtype).requires_grad_())
    assert torch.equal(fast[0], slow[0])
    for a, b in zip(fast[2:], slow[2:], strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= 0.01 * b.norm() + 1e-6


def test_a_graph_may_be_kept_but_not_differentiated_twice():
    made, x = stack("softmax", ReversibleStack, dropout=0.2).train(), data(9).requires_grad_()
    y = made(x)
    up = data(9, seed=5)
    one = torch.autograd.grad(y, x, up, retain_graph=True)[0]
    close(torch.autograd.grad(y, x, up)[0], one)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad = torch.autograd.grad(made(x), x, up, create_graph=True)[0]
        grad.sum().backward()


def test_what_changed_cannot_be_run_backwards():
    made, x = stack("softmax", ReversibleStack), data(9).requires_grad_()
    y = made(x)
    with torch.no_grad():
        made.blocks[0].channel.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
        y.sum().backward()
    counting = ReversibleStack([Block(Counting(Dims(WIDTH, HEADS)), FeedForward(WIDTH, 8))]).to(DEVICE, torch.float64)
    with pytest.raises(RuntimeError, match="changes its buffers in training"):
        counting(x)
    counting.eval()(x).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, where a graph goes on behind a break
def test_compiled_training_runs_eagerly_or_refuses():
    torch._dynamo.reset()
    made, x = stack("softmax", ReversibleStack, depth=2), data(9).requires_grad_()
    y = torch.compile(made, backend="aot_eager", dynamic=False)(x)
    up = data(9, seed=5)
    close(torch.autograd.grad(y, x, up)[0], torch.autograd.grad(made(x), x, up)[0])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="training of reversible stacks"):
        torch.compile(made, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(made, backend="aot_eager", fullgraph=True)(x), made(x))
