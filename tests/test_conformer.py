"""Blocks made of parts, and the Conformer: formulas by hand, padding as if absent, streams equal to a whole pass."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard.blocks import FeedForward
from regard.blocks.conformer import ConvModule, conformer
from regard.blocks.parts_block import BlockPart, PartsBlock
from regard.mixers.base import Dims
from regard.spec import layer


def made(**options):
    torch.manual_seed(0)
    stack = conformer("softmax", **{"width": 8, "heads": 2, "depth": 2, "ffn": 12, "kernel": 5, **options}).double().eval()
    for name, p in stack.named_parameters():  # a norm that does nothing yet would hide where it stands
        if "norm" in name:
            nn.init.normal_(p, 1.0, 0.3)
    return stack


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_conformer_block_is_its_formula():
    (block, _), x = made().blocks, data(2, 9, 8)
    first, attention, convolution, second = block.parts
    y = x + 0.5 * first(block.norms[0](x))
    y = y + attention(block.norms[1](y))
    y = y + convolution(block.norms[2](y))
    y = y + 0.5 * second(block.norms[3](y))
    torch.testing.assert_close(block(x), block.last_norm(y))


def test_the_convolution_module_is_its_formula():
    torch.manual_seed(0)
    mixer, x = ConvModule(Dims(8, 2), kernel=5).double(), data(1, 7, 8)
    a, b = mixer.into(x).chunk(2, -1)
    h, taps = F.pad(a * b.sigmoid(), (0, 0, 2, 2)), mixer.filter[:, 0]
    c = torch.stack([(h[0, i : i + 5] * taps.mT).sum(0) for i in range(7)])
    torch.testing.assert_close(mixer(x)[0], mixer.out(F.silu(mixer.norm(c))))


def test_padding_anywhere_is_as_if_absent_gradients_included():
    stack, x = made(positions="relative"), data(1, 6, 8)
    alone, padded = x.clone().requires_grad_(), torch.full((1, 9, 8), torch.nan, dtype=torch.float64)
    where = torch.tensor([0, 2, 3, 5, 6, 8])
    padded[0, where] = x[0]
    padded.requires_grad_()
    valid = torch.zeros(1, 9, dtype=torch.bool)
    valid[0, where] = True
    y, z = stack(alone), stack(padded, valid)
    torch.testing.assert_close(z[0, where], y[0])
    assert (z[~valid] == 0).all()
    y.square().sum().backward()
    z.square().sum().backward()
    torch.testing.assert_close(padded.grad[0, where], alone.grad[0])


def test_a_causal_conformer_streams():
    stack, x = made(causal=True), data(2, 11, 8)
    state, parts = stack.start(2), []
    for part in x.split([1, 4, 0, 6], 1):
        y, state = stack.extend(state, part)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), stack(x))
    with pytest.raises(ValueError, match="another kind of module"):
        stack.extend(state._replace(memory=(state.memory[0], state.memory[1]._replace(memory=()))), x)


def test_parts_that_fit_no_block_are_refused():
    feedforward = FeedForward(8, 12)
    with pytest.raises(ValueError, match="at least one"):
        PartsBlock([BlockPart(feedforward)])
    with pytest.raises(ValueError, match="one width"):
        PartsBlock([BlockPart(layer("softmax", width=8, heads=2)), BlockPart(layer("softmax", width=16, heads=2))])
    with pytest.raises(ValueError, match="all causal"):
        PartsBlock([BlockPart(layer("softmax", width=8, heads=2, causal=True)), BlockPart(layer("softmax", width=8, heads=2))])
    with pytest.raises(ValueError, match="pass a context"):
        made()(data(1, 3, 8), context=data(1, 3, 8))
