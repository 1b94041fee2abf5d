"""Models that are compiled block by block: the same results, and one graph for all blocks of a kind."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import close
from regard.blocks import ReversibleStack, Stack, compile_blocks
from regard.config import Config
from regard.models import language_model, translator


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("depth", [2, 4])
def test_blocks_of_one_kind_share_one_graph_for_all_lengths(depth):
    torch.manual_seed(0)
    config = Config(mixer="Local(8)", width=16, heads=2, depth=depth, ffn=32, dropout=0.0)
    plain = language_model(config, vocab=20).double()
    compiled = copy.deepcopy(plain)
    names = compile_blocks(compiled, dynamic=True, backend="aot_eager", fullgraph=True)
    assert names == [f"stack.blocks.{place}" for place in range(depth)]
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for n in (24, 33, 64):
        ids = torch.randint(20, (3, n))
        losses = [model(ids).square().sum() for model in (plain, compiled)]
        close(losses[1], losses[0])
        for a, b in zip(
            *(torch.autograd.grad(x, list(m.parameters())) for x, m in zip(losses, (plain, compiled), strict=True)), strict=True
        ):
            close(b, a)
    assert graphs() == 1


def test_a_hybrid_has_one_graph_for_each_mechanism():
    stack = Stack.of(["Local(4)", "linear"], width=16, heads=2, depth=4, ffn=32, causal=True)
    compile_blocks(stack, dynamic=True, backend="aot_eager")
    stack(torch.randn(2, 20, 16, requires_grad=True))
    assert graphs() == 2


def test_decoders_that_read_a_source_are_compiled_too():
    torch.manual_seed(0)
    model = translator(Config(width=16, heads=2, depth=2, ffn=32), vocab=20).double().eval()
    source, target = torch.randint(5, 20, (2, 9)), torch.randint(5, 20, (2, 7))
    before = model(source, None, target)
    assert len(compile_blocks(model, dynamic=True, backend="aot_eager")) == 4
    close(model(source, None, target), before)


def test_what_has_no_blocks_that_are_called_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no blocks of regard.blocks: use torch.compile"):
        compile_blocks(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="reversible stack in 0 computes its blocks part by part"):
        compile_blocks(torch.nn.Sequential(ReversibleStack.of("softmax", width=16, heads=2, depth=2)))
