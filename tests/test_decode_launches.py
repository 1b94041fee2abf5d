"""How many kernels a captured decoding step launches: few, and never more than before. In Triton's interpreter on a CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu, linear, relu, silu
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from conftest import DEVICE
from regard.bench.timing import FREE_OPS
from regard.config import Config
from regard.decoding import GraphedDecoder
from regard.models import language_model
from regard.ops import kernel_launch
from regard.ops.in_place import may_overwrite, overwritten_states
from regard.ops.row_linear import ROW_ACTIVATIONS, RowMap, RowNorm, add_product, row_product, rows_refuse
from regard.runtime.decode_graph import DecodeGraph
from regard.runtime.fused_step import StepBlock, StepLanguageModel, fuse_steps
from regard.runtime.packed_linear import fuse_qkv
from regard.runtime.state_buffers import StateBuffers
from test_graphed_decoder import captured_on_any_device

pytest.importorskip("triton")

VOCAB = 40
MIXERS = ["linear", "gla", "retention", "delta", "delta(gated=True)", "Local(6)", "sinks(window=6, first=2)"]
FREE = (*FREE_OPS, "new_empty", "promote_types")


class Launches(TorchDispatchMode):
    """Count kernels by name: operations of PyTorch that move numbers, and those of Triton."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = Counter()
        plain = kernel_launch.KernelLaunch.__call__

        def launch(one, *tensors):
            self.names[one.kernel.fn.__name__] += 1
            with _disable_current_modes():
                plain(one, *tensors)

        monkeypatch.setattr(kernel_launch.KernelLaunch, "__call__", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        name = func.overloadpacket.__name__
        if not (func.is_view or (made and not any(made)) or name.startswith(FREE)):
            self.names[name] += 1
        return out


def built(mixer, depth=2, dtype=torch.float32, **more):
    torch.manual_seed(0)
    config = Config(width=16, heads=2, depth=depth, ffn=24, dropout=0.0, max_len=64, mixer=mixer, **more)
    model = language_model(config, VOCAB).to(DEVICE, dtype).eval()
    for block in model.stack:
        for part in (block.mixer, block.mixer.core):
            part.dims = replace(part.dims, backend="triton")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model


@pytest.fixture
def decoder(monkeypatch):
    """A decoder whose graphs are replayed kernel by kernel, with weights as on a GPU."""
    monkeypatch.setattr("regard.runtime.decode_graph.capture_graph", captured_on_any_device)
    monkeypatch.setattr("regard.runtime.packed_linear.packs", lambda _: False)

    def make(model):
        fast = GraphedDecoder(model, room=32, graphs=False)
        fast.graphs = True
        return fast

    return make


def greedy(model, prompt, steps):
    """Return tokens (b steps) and the decoder's last state."""
    with torch.no_grad():
        scores, state = model.last(model.start(len(prompt)), prompt)
        found = []
        for _ in range(steps):
            token = scores.argmax(-1, keepdim=True)
            found.append(token)
            scores, state = model.extend(state, token)
            scores = scores[:, -1]
    return torch.cat(found, 1)


def some_prompt(rows):
    return torch.randint(5, VOCAB, (rows, 3), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def step_launches(monkeypatch, mixer, depth, rows, dtype):
    """Kernels of the second step from nothing, in static buffers: the first one makes what is made only once."""
    plain = fuse_qkv(built(mixer, depth, dtype))
    model = fuse_steps(plain)
    with torch.no_grad():
        state = plain.start(rows)
        graph = DecodeGraph(model, state, StateBuffers(state, lambda _: 8), 64, None)
        graph.run(False)
        with monkeypatch.context() as patch, Launches(patch) as counted:
            graph.run(False)
    return counted.names


@pytest.mark.parametrize("rows", [2, 5])  # few rows; more than the interpreter's table calls few
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_of_a_step_is_five_launches_or_seven(mixer, rows, monkeypatch):
    dtype = torch.bfloat16 if rows == 2 else torch.float32
    one, two = (step_launches(monkeypatch, mixer, depth, rows, dtype) for depth in (1, 2))
    layer = two - one
    window = mixer.startswith(("Local", "sinks"))
    assert layer.total() == (5 if rows == 2 else 7), layer
    assert sum(count for name, count in layer.items() if name.endswith("step_kernel")) == 1
    beside = one.total() - layer.total()
    assert beside <= (7 if window else 4) + (rows == 5), one - layer


@pytest.mark.parametrize("mixer", ["linear", "gla", "retention", "delta(gated=True)", "Local(6)"])
def test_fused_steps_give_the_tokens_of_the_model(mixer, decoder):
    model, prompt = built(mixer), some_prompt(2)
    fast = decoder(model)
    assert torch.equal(greedy(fast, prompt, 4), greedy(model, prompt, 4))
    assert isinstance(fast.step_model, StepLanguageModel) and not fast.refused


def test_parts_that_no_kernel_takes_stay_as_they_are(decoder):
    prompt = some_prompt(2)
    model = built("retention", positions="rotary", depth=1)
    assert torch.equal(greedy(decoder(model), prompt, 2), greedy(model, prompt, 2))
    post = built("gla", norm="post")
    assert fuse_steps(post) is post
    fused = fuse_steps(fuse_qkv(built("gla")))
    assert all(isinstance(block, StepBlock) and block.own and block.channels for block in fused.model.stack.blocks)
    double = built("gla").double()
    assert fuse_steps(double) is double  # kernels have no float64


@pytest.mark.parametrize("activation", ROW_ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_products_of_rows_are_those_of_modules(activation, rows):
    acts = {"none": lambda x: x, "relu": relu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "silu": silu}
    for kind, bias in ((torch.nn.LayerNorm, True), (torch.nn.RMSNorm, False)):
        norm = kind(20).to(DEVICE).requires_grad_(False)
        norm.weight.normal_()
        up = RowMap(torch.randn(37, 20, device=DEVICE), torch.randn(37, device=DEVICE) if bias else None, activation)
        down = RowMap(torch.randn(20, 37, device=DEVICE), torch.randn(20, device=DEVICE) if bias else None)
        x = 3 + torch.randn(rows, 20, device=DEVICE)
        before = x.clone()
        y, base = row_product(x, RowNorm.of(norm), up, down)
        middle = acts[activation](linear(norm(x.double().float()), up.weight, up.bias))
        torch.testing.assert_close(y, middle, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(add_product(base, y, down), x + linear(middle, down.weight, down.bias), rtol=1e-4, atol=1e-3)
        assert torch.equal(x, before)


def test_rows_of_other_types_and_widths_are_refused():
    weight = torch.zeros(4, 6, device=DEVICE)
    assert rows_refuse(weight, None) is None
    assert "one type" in rows_refuse(weight, weight.half())
    assert "side by side" in rows_refuse(weight.t())
    assert "float64" in rows_refuse(weight.double())
    assert "up to 8192 features" in rows_refuse(torch.zeros(1, 8193, device=DEVICE))
    assert RowNorm.of(torch.nn.Identity()) is None and RowNorm.of(torch.nn.LayerNorm(4, elementwise_affine=False)) is None


def test_only_states_that_are_named_are_overwritten():
    state, other = torch.zeros(2, 3), torch.zeros(2, 3)
    with overwritten_states([state]):
        assert may_overwrite(state) and not may_overwrite(other) and not may_overwrite(state[:, :2])
    assert not may_overwrite(state)
