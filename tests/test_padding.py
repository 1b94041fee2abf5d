"""Padding may hold anything: NaN, infinity or numbers near the largest change no output and no gradient."""

import math

import pytest
import torch

from conftest import CASES, DEVICE, HEADS, WIDTH, Case, claiming, data, modes, some
from regard import Dims, attend, core
from regard.blocks import ReversibleStack, Stack
from regard.config import Config
from regard.mixers.attention import Attention
from regard.mixers.base import Can
from regard.mixers.places import Places
from regard.models import language_model, translator

POISON = (math.nan, math.inf, -math.inf, 1e4, -1e10, 1e20, 3e38)


def poisoned(x, valid):
    """x (b n w) with all kinds of poison at padding, one a token."""
    kinds = torch.tensor(POISON, dtype=x.dtype, device=x.device)
    fill = kinds[torch.arange(x.shape[1], device=x.device) % len(POISON)]
    return torch.where(valid[..., None], x, fill[:, None])


def same(found, wanted):
    """Bit for bit on a CPU; a GPU may add up in another order."""
    tol = 0 if DEVICE.type == "cpu" else 1e-4
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def passed(module, x, call):
    """The output of call(x), the gradient of x, and those of all weights."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def holds(module, x, valid, call):
    clean = passed(module, torch.where(valid[..., None], x, 0), call)
    assert all(part.isfinite().all() for part in clean)
    same(passed(module, poisoned(x, valid), call), clean)


@claiming(Can.PADDING)
def test_a_layer_ignores_what_padding_holds(case):
    x, valid = data(40, dtype=torch.float32), some(3, 40)
    for mode in modes(case):
        m = case.build(dtype=torch.float32, **mode)
        holds(m, x, valid, lambda z, m=m: m(z, valid=valid))


@claiming(Can.CROSS | Can.PADDING, cross=True)
def test_a_context_and_queries_may_hold_anything_at_padding(case):
    m, x, c = case.build(dtype=torch.float32, cross=True), data(20, dtype=torch.float32), data(33, 3, dtype=torch.float32)
    real, read = some(3, 20, seed=6), some(3, 33)
    holds(m, c, read, lambda z: m(x, context=z, valid=read))
    holds(m, x, real, lambda z: m(z, context=c, valid=read, query_valid=real))


@claiming(Can.STREAM | Can.PADDING, causal=True)
def test_a_prompt_may_hold_anything_at_padding(case):
    m, x, step = case.build(dtype=torch.float32, causal=True), data(40, dtype=torch.float32), data(3, 9, dtype=torch.float32)
    valid = some(3, 40)

    def call(z):
        y, state = m.extend(m.start(3), z, valid)
        return torch.cat([y, m.extend(state, step)[0]], 1)

    holds(m, x, valid, call)


@claiming(Can.PADDING, core=True)
def test_attend_ignores_what_padding_holds(case):
    made = core(case.spec, Dims(WIDTH, HEADS, max_len=128)).to(DEVICE).eval()
    g = torch.Generator().manual_seed(5)
    shapes = ((HEADS, made.dims.d * made.streams), *((HEADS, size) for size in made.sizes))
    q, k, v = (torch.randn(2, h, 40, size, generator=g).to(DEVICE) for h, size in shapes)
    valid = some(2, 40)

    def call(fill):
        tensors = [torch.where(valid[:, None, :, None], x, fill).requires_grad_() for x in (q, k, v)]
        y = attend(*tensors, made, valid=valid, query_valid=valid)
        y.square().sum().backward()
        return [y.detach(), *(x.grad for x in tensors if x.grad is not None)]

    for fill in (math.nan, math.inf, 3e38):
        same(call(fill), call(0.0))


@pytest.mark.parametrize("kind", [Stack, ReversibleStack])
def test_a_stack_ignores_what_padding_holds(kind):
    for spec in ("softmax", "Local(8) | Global(first=2)", "gla", "conv", "reformer(buckets=4, chunk=6)"):
        for causal in (False, True):
            torch.manual_seed(0)
            m = kind.of(spec, width=WIDTH, heads=HEADS, depth=2, ffn=WIDTH, causal=causal).to(DEVICE)
            valid = some(3, 30)
            holds(m, data(30, dtype=torch.float32), valid, lambda z, m=m, valid=valid: m(z, valid))


def test_a_block_that_reads_ignores_what_padding_holds():
    torch.manual_seed(0)
    m = Stack.of("softmax", width=WIDTH, heads=HEADS, depth=2, ffn=WIDTH, causal=True, cross="linear").to(DEVICE)
    x, c, valid = data(20, dtype=torch.float32), data(33, 3, dtype=torch.float32), some(3, 33)
    holds(m, c, valid, lambda z: m(x, context=z, context_valid=valid))
    block = m.blocks[0]
    holds(block, c, valid, lambda z: block(x, context=z, context_valid=valid))
    real = some(3, 20, seed=6)
    holds(block, x, real, lambda z: block(z, real, context=c, context_valid=valid))
    holds(block, x, real, lambda z: block.extend(block.start(context=c), z, real)[0])


def test_a_model_takes_any_token_for_padding():
    config = Config(mixer="softmax", width=WIDTH, heads=HEADS, depth=1, ffn=WIDTH, dropout=0.0)
    torch.manual_seed(0)
    both, one = translator(config, vocab=50).to(DEVICE).eval(), language_model(config, vocab=50).to(DEVICE).eval()
    tokens, valid = torch.randint(5, 50, (3, 12), device=DEVICE), some(3, 12)
    for fill in (-100, -1, 50, 10**12):
        odd, zero = torch.where(valid, tokens, fill), torch.where(valid, tokens, 0)
        same([both(odd, valid, tokens)], [both(zero, valid, tokens)])
        same([one(odd, valid)], [one(zero, valid)])


def test_the_law_can_fail():
    """Without the zeros at the way in, NaN at padding reaches the gradients of a plain layer."""
    case: Case = next(c for c in CASES if c.row.name == "softmax")
    m = case.build(dtype=torch.float32)
    assert isinstance(m, Attention)
    x, valid = data(40, dtype=torch.float32), some(3, 40)
    with pytest.raises(AssertionError):
        holds(m, x, valid, lambda z: m.forward_at(z, Places.of(z, valid)))
