"""Padding may hold anything: NaN, infinity or numbers near the largest change no output and no gradient."""

import pytest
import torch

from conftest import CASES, DEVICE, HEADS, WIDTH, Case, data, law_test, some
from regard import laws, layer
from regard.blocks import ReversibleStack, Stack
from regard.config import Config
from regard.laws.padding_laws import ignores_padding
from regard.mixers import pattern_attention
from regard.mixers.attention import Attention
from regard.mixers.places import Places
from regard.models import language_model, translator
from regard.ops.tile.tile_op import tile_attention
from regard.patterns import Pattern

test_a_layer_ignores_what_padding_holds = law_test(laws.padding_holds_anything)
test_a_context_and_queries_may_hold_anything_at_padding = law_test(laws.context_padding_holds_anything)
test_a_prompt_may_hold_anything_at_padding = law_test(laws.prompt_padding_holds_anything)
test_attend_ignores_what_padding_holds = law_test(laws.attend_padding_holds_anything)


def same(found, wanted):
    """Bit for bit on a CPU; a GPU may add up in another order."""
    tol = 0 if DEVICE.type == "cpu" else 1e-4
    torch.testing.assert_close(found, wanted, rtol=tol, atol=tol)


@pytest.mark.parametrize("kind", [Stack, ReversibleStack])
def test_a_stack_ignores_what_padding_holds(kind):
    for spec in ("softmax", "Local(8) | Global(first=2)", "gla", "conv", "reformer(buckets=4, chunk=6)"):
        for causal in (False, True):
            torch.manual_seed(0)
            m = kind.of(spec, width=WIDTH, heads=HEADS, depth=2, ffn=WIDTH, causal=causal).to(DEVICE)
            valid = some(3, 30)
            ignores_padding(m, data(30, dtype=torch.float32), valid, lambda z, m=m, valid=valid: m(z, valid))


def test_a_block_that_reads_ignores_what_padding_holds():
    torch.manual_seed(0)
    m = Stack.of("softmax", width=WIDTH, heads=HEADS, depth=2, ffn=WIDTH, causal=True, cross="linear").to(DEVICE)
    x, c, valid = data(20, dtype=torch.float32), data(33, 3, dtype=torch.float32), some(3, 33)
    ignores_padding(m, c, valid, lambda z: m(x, context=z, context_valid=valid))
    block = m.blocks[0]
    ignores_padding(block, c, valid, lambda z: block(x, context=z, context_valid=valid))
    real = some(3, 20, seed=6)
    ignores_padding(block, x, real, lambda z: block(z, real, context=c, context_valid=valid))
    ignores_padding(block, x, real, lambda z: block.extend(block.start(context=c), z, real)[0])


def test_a_model_takes_any_token_for_padding():
    config = Config(mixer="softmax", width=WIDTH, heads=HEADS, depth=1, ffn=WIDTH, dropout=0.0)
    torch.manual_seed(0)
    both, one = translator(config, vocab=50).to(DEVICE).eval(), language_model(config, vocab=50).to(DEVICE).eval()
    tokens, valid = torch.randint(5, 50, (3, 12), device=DEVICE), some(3, 12)
    for fill in (-100, -1, 50, 10**12):
        odd, zero = torch.where(valid, tokens, fill), torch.where(valid, tokens, 0)
        same(both(odd, valid, tokens), both(zero, valid, tokens))
        same(one(odd, valid), one(zero, valid))


def test_the_law_can_fail():
    """Without the zeros at the way in, NaN at padding reaches the gradients of a plain layer."""
    case: Case = next(c for c in CASES if c.row.name == "softmax")
    m = case.build(dtype=torch.float32)
    assert isinstance(m, Attention)
    x, valid = data(40, dtype=torch.float32), some(3, 40)
    with pytest.raises(AssertionError):
        ignores_padding(m, x, valid, lambda z: m.forward_at(z, Places.of(z, valid)))


@pytest.mark.parametrize(
    "pattern", ["Random(2, 8, seed=3) | Local(5)", "Random(2, 8, per_head=True) | Random(1, 12) | Global(first=3)"]
)
def test_rows_of_as_many_drawn_blocks_are_computed_together(pattern, monkeypatch):
    """The same as row by row, wherever padding lies; a row without tokens, and rows that share a plan, are among them."""
    made = layer(pattern, width=16, heads=4, kv_heads=2).double().to(DEVICE)
    counts = [40, 37, 33, 40, 0, 21, 17, 1]
    valid = torch.stack([torch.randperm(40) < count for count in counts]).to(DEVICE)
    x, up = (torch.randn(len(counts), 40, 16, dtype=torch.float64, device=DEVICE) for _ in range(2))
    x.requires_grad_()

    def found():
        y = made(x, valid=valid)
        return [y, *torch.autograd.grad(y, [x, *made.parameters()], up)]

    spans = []

    def counted(q, *more, **options):
        spans.append(len(q))
        return tile_attention(q, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pattern_attention, "tile_attention", counted)
        together = found()
    assert sum(spans) == len(counts) and len(spans) < len(counts) - 1
    monkeypatch.setattr(pattern_attention.PatternAttention, "_by_pieces", pattern_attention.PatternAttention._by_row)
    for a, b in zip(together, found(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_lengths_with_the_same_pairs_are_known_by_their_pieces():
    grains = {
        "Local(5) | Global(first=2)": 0,
        "Random(2, 8)": 8,
        "Random(2, 8, past=True)": 0,
        "Random(2, 8) | Random(1, 12) & Stride(3)": 4,
        "Random(2, 8) | Columns(last=1)": 1,
        "PerHead([Random(1, 6), Local(3)])": 6,
    }
    for text, grain in grains.items():
        pattern = Pattern.parse(text)
        assert pattern.length_grain == grain, text
        i = torch.arange(24)
        for n in range(1, 24):
            m = min(24, -(-n // grain) * grain) if grain else 24
            pairs = [pattern.for_head(0, 2).bound(size, size)(0, i[:n, None], i[:n]) for size in (n, m)]
            assert torch.equal(*pairs), (text, n)
