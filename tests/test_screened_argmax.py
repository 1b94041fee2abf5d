"""Screening the vocabulary in bfloat16 never misses the likeliest word."""

import pytest
import torch

import regard.runtime.screened_argmax as sketch
from regard.config import Config
from regard.decoding import Constraints, Sample, StaticDecoder, generate
from regard.models import NextToken, language_model, translator
from regard.runtime.packed_linear import pack_linears
from regard.runtime.screened_argmax import BF16_UNIT, EXACT_WORDS, ScreenedHead, has_bfloat16

VOCAB, END = 5000, 3
pytestmark = pytest.mark.skipif(
    not has_bfloat16(), reason="this processor has no products of bfloat16: nothing is sketched on it"
)


def rough(weight, bias=None):
    head = NextToken(weight.shape[1], len(weight), bias=bias is not None)
    head.map.weight.data.copy_(weight)
    if bias is not None:
        head.map.bias.data.copy_(bias)
    return ScreenedHead.of(pack_linears(head.requires_grad_(False)))


def everything(scores):
    return scores


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_are_off_by_no_more_than_it_says(scale, bias):
    torch.manual_seed(1)
    weight, x = torch.randn(VOCAB, 96) * torch.rand(VOCAB, 1), scale * torch.randn(40, 96)
    by = rough(weight, torch.randn(VOCAB) if bias else None)
    exact = x.double() @ weight.double().mT + (by.bias.double() if bias else 0)
    found = by(x)
    far, known = (found.scores.double() - exact).abs(), BF16_UNIT * found.scores.abs() + found.off[:, None]
    assert (far <= known).all() and (known < 0.05 * exact.abs().amax(1, keepdim=True)).all()
    torch.testing.assert_close(found.likeliest(everything), exact.argmax(1))


@pytest.mark.parametrize("side", ["weights", "vectors"])
def test_errors_that_all_point_one_way_are_within_what_it_says(side):
    """Numbers just above and just below 1 all round to 1, and what they add up to is rounded away."""
    signs = torch.tensor([1.0, -1.0]).repeat(32)
    near = 1 + 0.45 * 2**-8 * signs
    weight, x = (near, signs) if side == "weights" else (signs, near)
    found = rough(weight.expand(VOCAB, -1).contiguous())(x[None])
    exact = float(weight.double() @ x.double())
    assert exact > 0.1 and float(found.scores[0, 0]) == 0 and exact <= float(found.off) < 3 * exact


def test_words_that_are_nearly_as_good_are_told_apart_by_looking_at_all():
    torch.manual_seed(2)
    weight = torch.randn(VOCAB, 64)
    weight[100 : 100 + 3 * EXACT_WORDS] = 2 * weight[100] + 1e-6 * torch.randn(
        3 * EXACT_WORDS, 64
    )  # more of them than are looked at
    x = torch.cat([weight[100:101], torch.randn(3, 64)])
    by, looks = rough(weight), []
    by.head.register_forward_hook(lambda *_: looks.append(1))
    torch.testing.assert_close(by(x).likeliest(everything), (x @ weight.mT).argmax(1))
    assert looks == [1]
    by(x[1:]).likeliest(everything)
    assert looks == [1]  # where it is sure it does not look


def test_the_first_of_words_that_are_exactly_as_good():
    weight = torch.zeros(VOCAB, 8)
    weight[[70, 40, 900]] = 1.0
    assert rough(weight)(torch.ones(1, 8)).likeliest(everything).tolist() == [40]


def test_what_is_no_number_is_looked_at_exactly():
    by, x = rough(torch.randn(VOCAB, 8)), torch.full((1, 8), torch.nan)
    assert by(x).likeliest(everything).tolist() == by.head(x).argmax(1).tolist()


@pytest.mark.parametrize("kind", ["language", "translator"])
@pytest.mark.parametrize(
    "constraints", [{}, {"banned": (0, 1, 2, 4)}, {"no_repeat_ngram_size": 1}, {"min_new_tokens": 6, "no_repeat_ngram_size": 2}]
)
def test_a_ready_model_says_what_the_model_says(kind, constraints):
    torch.manual_seed(3)
    config = Config(width=32, heads=4, depth=2, ffn=48, dropout=0.0, max_len=64)
    model = (language_model if kind == "language" else translator)(config, VOCAB).eval()
    fast, constraints = StaticDecoder(model), Constraints(END, max_new_tokens=12, **constraints)
    assert fast.rough is not None
    source, begin = torch.randint(5, VOCAB, (3, 7)), torch.tensor([[2], [9], [17]])
    said = [
        generate(m, m.start(3) if kind == "language" else m.start(source), begin, constraints=constraints) for m in (model, fast)
    ]
    assert said[0] == said[1] and max(map(len, said[0])) > 4


def test_chance_and_beams_are_given_all_scores(monkeypatch):
    torch.manual_seed(3)
    model = language_model(Config(width=32, heads=4, depth=1, ffn=48, dropout=0.0, max_len=64), VOCAB).eval()
    fast = StaticDecoder(model)
    monkeypatch.setattr(fast, "rough", lambda _: pytest.fail("only the likeliest is sketched"))
    constraints, begin = Constraints(END, max_new_tokens=6), torch.tensor([[2], [9]])
    said = [generate(m, m.start(2), begin, constraints=constraints, choice=Sample(seed=1)) for m in (model, fast)]
    assert said[0] == said[1]


def test_few_words_and_other_heads_are_not_sketched(monkeypatch):
    config = Config(width=32, heads=4, depth=1, ffn=48, dropout=0.0, max_len=64)
    assert StaticDecoder(language_model(config, 100).eval()).rough is None
    assert StaticDecoder(language_model(config, VOCAB).double().eval()).rough is None
    monkeypatch.setattr(sketch, "has_bfloat16", lambda: False)
    assert StaticDecoder(language_model(config, VOCAB).eval()).rough is None
