"""Rewards of whole answers: on problems small enough to list every answer, gradients are those of the expected reward."""

import itertools

import pytest
import sacrebleu
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import DEVICE, close
from decoders import batch_of, gradients, rows, small
from regard.data.batch import BEGIN, END, MASK, PAD, UNKNOWN, Batch, padded
from regard.decoding import Constraints, Greedy, generate
from regard.training.decoder_modes import teacher_forcing
from regard.training.reinforce import log_probability, minimum_risk, self_critical, sentence_bleu

SPECIAL = (PAD, UNKNOWN, BEGIN, MASK)
RULES = Constraints(END, max_new_tokens=2, banned=SPECIAL)
WORDS = (5, 6)
ANSWERS = [list(a) for n in range(3) for a in itertools.product(WORDS, repeat=n)]  # all that two words and two tokens allow

tokens = st.lists(st.integers(0, 5), max_size=8)


def tiny():
    """Two words, so seven answers; three examples."""
    model = small(seed=1, vocab=7)
    source, valid = padded([[5, 6, 6], [6], [5, 5]])
    target, target_valid = padded([[5, 6, END], [6, END], [END]])
    return model, Batch(source, valid, target, target_valid).to(DEVICE)


def fair(answers, truths):
    """Any reward will do."""
    return [sum(a) % 4 + len(set(a) & set(t)) - 0.5 * (a == t) for a, t in zip(answers, truths, strict=True)]


def expected(model, batch, reward=fair, constraints=RULES, answers=ANSWERS):
    """The sum over examples of the expected reward, over every answer there is."""
    truths = [[t for t in target if t != END] for _, target in rows(batch)]
    every = [(i, answer) for i in range(len(truths)) for answer in answers]
    logs = log_probability(model, batch, [a for _, a in every], constraints=constraints, rows=[i for i, _ in every])
    rewards = torch.tensor(reward([a for _, a in every], [truths[i] for i, _ in every]), dtype=logs.dtype, device=DEVICE)
    return (logs.exp() * rewards).sum()


@pytest.mark.parametrize(
    "constraints",
    [
        RULES,
        Constraints(END, 4),
        Constraints(END, 4, min_new_tokens=2),
        Constraints(END, 5, no_repeat_ngram_size=1, banned=(7, 8)),
        Constraints(END, 1),
    ],
)
def test_the_probability_of_an_answer_is_that_of_saying_it(constraints):
    """One token at a time, from the whole text anew, with what the constraints allow."""
    model, batch = small(), batch_of(b=4)
    model.head.map.weight.data /= 4
    state, begin = model.start(batch.source, batch.source_valid), batch.source.new_full((4, 1), BEGIN)
    drawn = generate(model, state, begin, constraints=constraints, choice=lambda s: s.softmax(-1).multinomial(1)[:, 0])
    logs = log_probability(model, batch, drawn, constraints=constraints)
    for (source, _), answer, found in zip(rows(batch), drawn, logs, strict=True):
        total, heard = 0.0, [BEGIN]
        for token in [*answer, END][: constraints.max_new_tokens]:
            scores = model(torch.tensor([source], device=DEVICE), None, torch.tensor([heard], device=DEVICE))[:, -1]
            total += constraints(scores, torch.tensor([heard[1:]], device=DEVICE, dtype=torch.long)).log_softmax(-1)[0, token]
            heard.append(token)
        close(found, total)


@pytest.mark.parametrize(("constraints", "answers"), [(RULES, ANSWERS), (RULES._replace(min_new_tokens=1), ANSWERS[1:])])
def test_the_probabilities_of_all_answers_sum_to_one(constraints, answers):
    model, batch = tiny()
    close(
        expected(model, batch, lambda a, _: [1.0] * len(a), constraints, answers),
        torch.tensor(3.0, dtype=torch.float64, device=DEVICE),
    )


def test_self_critical_gradients_are_on_average_those_of_the_expected_reward():
    model, batch = tiny()
    model.head.map.weight.data /= 2
    exact = gradients(model, -expected(model, batch))
    dice, times, runs = torch.Generator(DEVICE).manual_seed(3), 150, 25
    many = Batch(*(x.repeat_interleave(times, 0) for x in batch[:4]))
    found = torch.stack(
        [gradients(model, self_critical(model, many, fair, constraints=RULES, dice=dice).total / times) for _ in range(runs)]
    )
    directions = torch.randn(len(exact), 12, dtype=exact.dtype, device=DEVICE)
    mean, error = (found @ directions).mean(0), (found @ directions).std(0) / runs**0.5
    assert ((mean - exact @ directions).abs() < 4 * error).all()
    assert torch.cosine_similarity(found.mean(0), exact, dim=0) > 0.98


def test_self_critical_is_its_formula_and_reports_what_it_got():
    model, batch = tiny()
    truths = [[5, 6], [6], []]
    state, begin = model.start(batch.source, batch.source_valid), batch.source.new_full((3, 1), BEGIN)
    seen = []

    def reward(answers, wanted):
        assert wanted == truths
        seen.append(answers)
        return fair(answers, wanted)

    loss = self_critical(model, batch, reward, constraints=RULES, dice=torch.Generator(DEVICE).manual_seed(1))
    drawn, likeliest = seen
    assert likeliest == generate(model, state, begin, constraints=RULES, choice=Greedy())
    got, base = (torch.tensor(fair(x, truths), dtype=torch.float64, device=DEVICE) for x in seen)
    close(loss.total, -((got - base) * log_probability(model, batch, drawn, constraints=RULES)).sum())
    assert loss.over == 3 and loss.parts["reward"] == got.sum() and loss.parts["greedy"] == base.sum()


@pytest.mark.parametrize("truth", [False, True])
def test_minimum_risk_over_every_answer_is_the_expected_reward_and_its_gradient(truth):
    model, batch = tiny()
    model.head.map.weight.data /= 4  # so that 400 draws see all seven
    seen = []

    def reward(answers, truths):
        seen.extend(answers)
        return fair(answers, truths)

    loss = minimum_risk(model, batch, reward, constraints=RULES, samples=400, alpha=1.0, truth=truth)
    assert sorted(seen) == sorted(3 * ANSWERS)
    exact = -expected(model, batch)
    close(loss.total, exact)
    close(gradients(model, loss.total), gradients(model, exact))
    assert loss.over == 3 and loss.parts["reward"] == -loss.total


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_minimum_risk_is_its_formula_over_distinct_answers_and_the_truth(alpha):
    model, batch = tiny()
    seen = []

    def reward(answers, truths):
        seen.extend(zip(answers, truths, strict=True))
        return fair(answers, truths)

    loss = minimum_risk(model, batch, reward, constraints=RULES, samples=2, alpha=alpha)
    total = 0.0
    for i, truth in enumerate([[5, 6], [6], []]):
        few = [a for a, t in seen if t == truth]
        assert truth in few and 1 <= len(few) <= 3 and len(few) == len({*map(tuple, few)})
        chances = (alpha * log_probability(model, batch, few, constraints=RULES, rows=[i] * len(few))).softmax(0)
        total = total - (chances * torch.tensor(fair(few, [truth] * len(few)), dtype=torch.float64, device=DEVICE)).sum()
    close(loss.total, total)
    close(gradients(model, loss.total), gradients(model, total))


def test_a_truth_that_may_not_be_said_does_no_harm():
    model, batch = tiny()
    for constraints in (RULES._replace(max_new_tokens=1), RULES._replace(banned=(*SPECIAL, 6)), RULES._replace(min_new_tokens=1)):
        loss = minimum_risk(model, batch, fair, constraints=constraints, samples=3, alpha=1.0)
        assert torch.isfinite(loss.total) and torch.isfinite(gradients(model, loss.total)).all()


def test_a_truth_that_is_too_long_to_be_said_is_not_among_the_answers():
    model, batch = tiny()
    seen = []
    minimum_risk(model, batch, lambda a, t: (seen.extend(a), fair(a, t))[1], constraints=RULES._replace(max_new_tokens=1))
    assert [6] in seen and [5, 6] not in seen


@pytest.mark.parametrize("learn", [self_critical, minimum_risk])
def test_what_padding_holds_changes_nothing_and_the_same_dice_say_the_same(learn):
    model, batch = small(), batch_of(padding="anywhere")
    other = batch._replace(
        source=torch.where(batch.source_valid, batch.source, 9), target=torch.where(batch.target_valid, batch.target, 8)
    )
    constraints = Constraints(END, 6)
    a, b = (
        learn(model, x, sentence_bleu, constraints=constraints, dice=torch.Generator(DEVICE).manual_seed(1))
        for x in (batch, other)
    )
    close(a.total, b.total)
    close(a.parts["reward"], b.parts["reward"])


@pytest.mark.parametrize("learn", [self_critical, minimum_risk])
def test_answers_are_given_without_dropout_and_learned_from_with_it(learn):
    model, batch = small(dropout=0.5).float().train(), batch_of(b=8)
    model.encoder.embed.drop.eval()  # somebody wants this one quiet
    before = [module.training for module in model.modules()]
    modes = []
    model.decoder.register_forward_pre_hook(lambda *_: modes.append(model.training))
    real, model.decoder.extend = model.decoder.extend, lambda *a: (modes.append(model.training), real(*a))[1]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = learn(model, batch, fair, constraints=Constraints(END, 5))
    loss.mean.backward()
    assert modes[-1] and not any(modes[:-1]) and len(modes) > 2
    assert before == [module.training for module in model.modules()]
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def turned(count, dice):
    """Two words, to be said the other way round."""
    words = torch.randint(5, 10, (count, 2), generator=dice)
    return Batch(words, None, torch.cat([words.flip(1), torch.full((count, 1), END)], 1)).to(DEVICE)


@pytest.mark.parametrize(
    ("learn", "options", "steps"), [(self_critical, {}, 100), (minimum_risk, {"samples": 4, "alpha": 0.5}, 50)]
)
def test_a_hundred_steps_raise_bleu_on_a_toy_task(learn, options, steps):
    model, dice = small(vocab=10, sharp=1.0, width=32, ffn=64).float().train(), torch.Generator().manual_seed(1)
    constraints = Constraints(END, max_new_tokens=3, banned=SPECIAL)

    def score():
        batch = turned(200, torch.Generator().manual_seed(9))
        answers = generate(model, model.start(batch.source), batch.source.new_full((200, 1), BEGIN), constraints=constraints)
        return sum(sentence_bleu(answers, batch.target[:, :-1].tolist())) / 200

    def train(lr, steps, loss):
        optimizer = torch.optim.Adam(model.parameters(), lr)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(turned(48, dice)).mean.backward()
            optimizer.step()

    train(3e-3, 10, lambda batch: teacher_forcing(model, batch))
    before = score()
    train(1e-3, steps, lambda batch: learn(model, batch, sentence_bleu, constraints=constraints, **options))
    assert score() > before + 0.2


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3))
def test_bleu_of_a_sentence_is_sacrebleus(pairs):
    metric = sacrebleu.metrics.BLEU(smooth_method="add-k", smooth_value=1, effective_order=True, tokenize="none")
    theirs = [metric.sentence_score(_text(a), [_text(b)]).score / 100 for a, b in pairs]
    assert sentence_bleu([a for a, _ in pairs], [b for _, b in pairs]) == pytest.approx(theirs)


def _text(tokens):
    return " ".join(f"w{t}" for t in tokens)


def test_bleu_of_a_sentence_is_one_for_the_truth_and_zero_for_nothing_right():
    assert sentence_bleu([[1, 2, 3, 4, 5], [1], [], [7, 8]], [[1, 2, 3, 4, 5], [1], [1], [1, 2]]) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda m, b: minimum_risk(m, b, fair, constraints=RULES, samples=0), "samples must be at least 1"),
        (lambda m, b: minimum_risk(m, b, fair, constraints=RULES, alpha=0.0), "alpha above 0"),
        (lambda m, b: self_critical(m, b, lambda *_: [1.0], constraints=RULES), "a number for each of 3 answers"),
        (lambda m, b: self_critical(m, b, fair, constraints=Constraints(END, 0)), "max_new_tokens must be at least 1"),
        (lambda m, b: self_critical(m, b._replace(target=None), fair, constraints=RULES), "target needs shape"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong(*tiny())
