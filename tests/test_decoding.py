"""Decoding: by start, extend and reorder alone it finds what a search without any state finds, for every kind of mechanism."""

import itertools
import math

import pytest
import torch
from torch import nn

from conftest import DEVICE
from regard.blocks import Stack
from regard.decoding import Constraints, Greedy, Sample, beam, generate, generate_stream
from regard.decoding.beam import _Search

END = 0


class Talker(nn.Module):
    """A small language model with random weights, sharp enough to have opinions."""

    def __init__(self, spec="softmax", vocab=7, width=32):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.body = Stack.of(spec, width=width, heads=4, depth=2, causal=True, ffn=32, max_len=64)
        self.to(DEVICE, torch.float64).eval()

    def forward(self, tokens):
        return 3 * self.head(self.body(self.embed(tokens)))

    def start(self, batch):
        return self.body.start(batch)

    def extend(self, state, tokens, valid=None):
        y, state = self.body.extend(state, self.embed(tokens), valid)
        return 3 * self.head(y), state


def prompts(b=3, n=4, vocab=7):
    return torch.randint(1, vocab, (b, n), generator=torch.Generator().manual_seed(1)).to(DEVICE)


@torch.no_grad()
def logs(model, prompt, said):
    """log p of every next token, from the whole text anew."""
    return model(torch.tensor([prompt + said], device=DEVICE))[0, -1].log_softmax(-1).tolist()


def greedy_slowly(model, prompt, constraints):
    said = []
    while len(said) < constraints.max_new_tokens:
        p = logs(model, prompt, said)
        token = max((t for t in range(len(p)) if t != END or len(said) >= constraints.min_new_tokens), key=lambda t: p[t])
        if token == END:
            break
        said.append(token)
    return said


def beam_slowly(model, prompt, constraints, width, penalty, early=False):
    """Lists of texts, sorted: no state, and no stop before the end unless `width` answers are enough."""
    alive, ended = [(0.0, [])], []
    for t in range(1, constraints.max_new_tokens + 1):
        if early and len(ended) >= width:
            return sorted(ended, key=lambda x: -x[0])[:width]
        longer = [(s + p, [*said, w]) for s, said in alive for w, p in enumerate(logs(model, prompt, said))]
        longer = sorted(longer, key=lambda x: -x[0])[: 2 * width]
        ended += [(s / t**penalty, said) for s, said in longer[:width] if said[-1] == END]
        alive = [x for x in longer if x[1][-1] != END][:width]
    ended += [(s / constraints.max_new_tokens**penalty, said) for s, said in alive]
    return sorted(ended, key=lambda x: -x[0])[:width]


def brute_force(model, prompt, constraints, penalty):
    """Every answer there is."""
    found = []
    words = range(1, 4)
    for length in range(constraints.max_new_tokens + 1):
        for said in itertools.product(words, repeat=length):
            said = list(said)
            total = sum(logs(model, prompt, said[:i])[said[i]] for i in range(length))
            if length < constraints.max_new_tokens:
                found.append(((total + logs(model, prompt, said)[END]) / (length + 1) ** penalty, said))
            else:
                found.append((total / length**penalty, said))
    return sorted(found, key=lambda x: -x[0])


SPECS = ["softmax", "Local(4) | Global(first=1)", "delta", "reformer(rounds=2, buckets=4, chunk=3)", "conv(kernel=3)", "rnn"]


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_and_beam_are_those_without_a_state(spec):
    model, x, constraints = Talker(spec), prompts(), Constraints(eos=END, max_new_tokens=9)
    assert generate(model, model.start(3), x, constraints=constraints) == [
        greedy_slowly(model, row, constraints) for row in x.tolist()
    ]
    found = beam(model, model.start(3), x, constraints=constraints, width=4, penalty=0.7, best=4)
    for row, answers, scores in zip(x.tolist(), found.answers(END), found.scores.tolist(), strict=True):
        slow = beam_slowly(model, row, constraints, 4, 0.7)
        assert answers == [[w for w in said if w != END] for _, said in slow]
        assert scores == pytest.approx([s for s, _ in slow], abs=1e-9)


@pytest.mark.parametrize("most", [4, 25])
def test_a_row_that_may_stop_early_has_as_many_answers_as_beams_whatever_others_do(most):
    model, x, constraints = Talker(), prompts(b=8), Constraints(eos=END, max_new_tokens=most)
    found = beam(model, model.start(8), x, constraints=constraints, width=3, penalty=1.0, best=3, early=True)
    others = 0
    for row, answers, scores in zip(x.tolist(), found.answers(END), found.scores.tolist(), strict=True):
        slow, exact = (beam_slowly(model, row, constraints, 3, 1.0, early=early) for early in (True, False))
        assert answers == [[w for w in said if w != END] for _, said in slow]
        assert scores == pytest.approx([s for s, _ in slow], abs=1e-9)
        others += slow != exact
    assert others  # it is not for nothing that the others go on


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_enough_beams_find_the_best_of_all_answers(penalty):
    model, x, constraints = Talker(vocab=4), prompts(vocab=4), Constraints(eos=END, max_new_tokens=4)
    found = beam(model, model.start(3), x, constraints=constraints, width=130, penalty=penalty, best=5)
    for row, answers, scores in zip(x.tolist(), found.answers(END), found.scores.tolist(), strict=True):
        best = brute_force(model, row, constraints, penalty)[:5]
        assert answers == [said for _, said in best]
        assert scores == pytest.approx([s for s, _ in best], abs=1e-9)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5, -0.5])
def test_stopping_early_changes_nothing(penalty, monkeypatch):
    model, x, constraints = Talker(), prompts(b=8), Constraints(eos=END, max_new_tokens=25)
    found = beam(model, model.start(8), x, constraints=constraints, width=3, penalty=penalty, best=2)
    monkeypatch.setattr(_Search, "over", lambda self, *_: torch.zeros(len(self.tokens), dtype=torch.bool))
    slow = beam(model, model.start(8), x, constraints=constraints, width=3, penalty=penalty, best=2)
    assert torch.equal(found.tokens, slow.tokens)
    assert torch.equal(found.lengths, slow.lengths)


class Clock:
    """Says the same chances whatever was said before, others at every step: it is its own state."""

    def __init__(self, *chances, t=0):
        self.chances, self.t = chances, t

    def extend(self, state, tokens, valid=None):  # noqa: ARG002
        now = torch.tensor(self.chances[min(state.t, len(self.chances) - 1)], dtype=torch.float64, device=DEVICE)
        return now.log().expand(*tokens.shape, -1), Clock(*self.chances, t=state.t + tokens.shape[1])

    def fan(self, _k):
        return self

    def select(self, _rows, within=False):  # noqa: ARG002
        return self


def test_beams_go_on_while_a_longer_answer_may_win_or_one_of_the_best_is_missing():
    x = prompts(b=2, n=1)
    late = Clock([0.6, 0.3, 0.1], [0.01, 0.98, 0.01])  # an end at once is likely, and yet the longest is the likeliest a token
    assert (
        beam(late, late, x, constraints=Constraints(END, max_new_tokens=10), width=2, penalty=1.0).answers(END)
        == [[[1] * 10]] * 2
    )
    soon = Clock([0.9, 0.06, 0.04], [0.5, 0.3, 0.2])
    assert (
        beam(soon, soon, x, constraints=Constraints(END, max_new_tokens=4), width=2, penalty=0.0, best=2).answers(END)
        == [[[], [1]]] * 2
    )


def test_one_beam_is_greedy_and_rows_do_not_meet():
    model, x, constraints = Talker(), prompts(), Constraints(eos=END, max_new_tokens=12)
    one = beam(model, model.start(3), x, constraints=constraints, width=1, penalty=0.0)
    assert [row[0] for row in one.answers(END)] == generate(model, model.start(3), x, constraints=constraints)
    whole = beam(model, model.start(3), x, constraints=constraints, width=3)
    alone = [beam(model, model.start(1), row[None], constraints=constraints, width=3) for row in x]
    assert [a for row in alone for a in row.answers(END)] == whole.answers(END)


def test_prompts_of_different_length():
    model, x, constraints = Talker(), prompts(n=6), Constraints(eos=END, max_new_tokens=8)
    valid = torch.arange(6, device=DEVICE) < torch.tensor([[6], [2], [4]], device=DEVICE)
    for side in (valid, valid.flip(1)):
        tokens = torch.where(side, x, 5)
        for b in range(3):
            own = tokens[b][side[b]][None]
            assert (
                generate(model, model.start(3), tokens, constraints=constraints, valid=side)[b]
                == generate(model, model.start(1), own, constraints=constraints)[0]
            )
            one = beam(model, model.start(1), own, constraints=constraints, width=3).answers(END)[0]
            assert beam(model, model.start(3), tokens, constraints=constraints, width=3, valid=side).answers(END)[b] == one


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_rules_are_kept(search):
    model, x = Talker(), prompts(b=6)
    constraints = Constraints(eos=END, max_new_tokens=14, min_new_tokens=6, no_repeat_ngram_size=2, banned=(3,))
    if search == "beam":
        answers = [row[0] for row in beam(model, model.start(6), x, constraints=constraints, width=3).answers(END)]
    else:
        answers = generate(
            model, model.start(6), x, constraints=constraints, choice=Greedy() if search == "greedy" else Sample(seed=1)
        )
    for said in answers:
        pairs = list(itertools.pairwise(said))
        assert 6 <= len(said) <= 14
        assert 3 not in said
        assert len(pairs) == len(set(pairs))
    free = generate(model, model.start(6), x, constraints=Constraints(eos=END, max_new_tokens=14))
    assert any(3 in said or len(said) < 6 or len(set(itertools.pairwise(said))) < len(said) - 1 for said in free)


@pytest.mark.parametrize("search", ["greedy", "beam", "stream"])
def test_the_prompt_counts_only_where_it_is_asked_for_and_padding_in_it_is_as_if_absent(search):
    model, x = Talker(), prompts(b=6, n=5)
    side = torch.arange(5, device=DEVICE) >= torch.tensor([[0], [3], [1], [4], [2], [0]], device=DEVICE)

    def said(count, tokens=x, valid=side):
        constraints, state = (
            Constraints(eos=END, max_new_tokens=8, no_repeat_ngram_size=2, count_prompt=count),
            model.start(len(tokens)),
        )
        if search == "beam":
            return [row[0] for row in beam(model, state, tokens, constraints=constraints, width=3, valid=valid).answers(END)]
        if search == "greedy":
            return generate(model, state, tokens, constraints=constraints, valid=valid)
        parts = torch.stack(list(generate_stream(model, state, tokens, constraints=constraints, valid=valid)), 1).tolist()
        return [row[: row.index(END)] if END in row else row for row in parts]

    counted = said(True)
    for b, answer in enumerate(counted):
        own = x[b][side[b]]
        text = own.tolist() + answer
        pairs = list(itertools.pairwise(text))
        assert all(pair not in pairs[:i] for i, pair in enumerate(pairs) if i >= len(own) - 1)
        assert answer == said(True, own[None], None)[0]
        flipped = torch.cat([x.flip(1)[b].masked_fill(side.flip(1)[b], 0)[None], x[b][None]], 1)  # padding may hold anything
        assert answer == said(True, flipped, torch.cat([torch.zeros_like(side[b]), side[b]])[None])[0]
    assert counted != said(False)


def test_a_row_with_nothing_left_may_end():
    constraints = Constraints(eos=END, max_new_tokens=9, min_new_tokens=5, banned=(1, 2))
    scores = constraints(torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.long))
    assert scores.tolist() == [[0.0, -math.inf, -math.inf]]


def test_a_stream_is_what_is_said_and_stops_when_all_have_ended():
    model, x, constraints = Talker(), prompts(), Constraints(eos=END, max_new_tokens=40)
    with torch.no_grad():
        model.head.bias[END] += 0.9  # it tends to come to an end
    parts = torch.stack(list(generate_stream(model, model.start(3), x, constraints=constraints)), 1)
    assert [[w for w in row if w != END] for row in parts.tolist()] == generate(model, model.start(3), x, constraints=constraints)
    assert parts.shape[1] < 40
    assert (parts[:, -1] == END).all()


def test_a_row_that_has_ended_says_the_end_until_all_have():
    clock, wishes = Clock([0.2, 0.4, 0.4]), iter([[END, 1], [2, 2], [1, END]])
    found = generate_stream(
        clock,
        clock,
        prompts(b=2, n=1),
        constraints=Constraints(END, max_new_tokens=9),
        choice=lambda _: torch.tensor(next(wishes), device=DEVICE),
    )
    assert torch.stack(list(found)).tolist() == [[END, 1], [END, 2], [END, END]]


def test_chance_is_as_filtered():
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]], device=DEVICE)
    p = scores.softmax(-1)
    assert (Sample(top_k=2).filtered(scores) > -math.inf).tolist() == [[True, True, False, False, False]]
    assert (Sample(top_p=float(p[0, 0]) - 1e-3).filtered(scores) > -math.inf).sum() == 1
    assert (Sample(top_p=float(p[0, 0]) + 1e-3).filtered(scores) > -math.inf).sum() == 2
    assert (Sample(min_p=0.13).filtered(scores) > -math.inf).tolist() == [[True, True, True, False, False]]
    choice = Sample(temperature=0.7, top_k=4, seed=5)
    wanted = choice.filtered(scores).softmax(-1)[0]
    drawn = torch.bincount(choice(scores.expand(40_000, -1)), minlength=5) / 40_000
    assert ((drawn - wanted).abs() < 4 * (wanted * (1 - wanted) / 40_000).sqrt() + 1e-9).all()


def test_the_same_seed_says_the_same():
    model, x, constraints = Talker(), prompts(), Constraints(eos=END, max_new_tokens=20)
    one, two, other = (generate(model, model.start(3), x, constraints=constraints, choice=Sample(seed=s)) for s in (4, 4, 5))
    assert one == two != other


def test_a_temperature_below_one_sharpens_before_anything_is_left_out():
    scores = torch.tensor([[3.0, 2.0, 1.0]], device=DEVICE)
    assert Sample(temperature=0.5).filtered(scores).tolist() == [[6.0, 4.0, 2.0]]
    assert (Sample(temperature=0.5, top_p=0.8).filtered(scores) > -math.inf).sum() == 1  # 0.87 of the sharpened, 0.67 before


def test_dice_roll_on_from_token_to_token():
    choice, flat = Sample(seed=4), torch.zeros(32, 7, device=DEVICE)
    assert not torch.equal(choice(flat), choice(flat))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda m: generate(m, m.start(3), prompts(), constraints=Constraints(END, max_new_tokens=0)),
            "max_new_tokens must be at least 1",
        ),
        (
            lambda m: generate(m, m.start(3), prompts(), constraints=Constraints(END, max_new_tokens=4, min_new_tokens=4)),
            "min_new_tokens must be from 0 to 3",
        ),
        (
            lambda m: generate(m, m.start(3), prompts(), constraints=Constraints(END, max_new_tokens=4, banned=(END,))),
            "cannot be among",
        ),
        (
            lambda m: generate(m, m.start(3), prompts()[:, :0], constraints=Constraints(END, max_new_tokens=4)),
            "at least one token",
        ),
        (
            lambda m: generate(m, m.start(3), prompts(), constraints=Constraints(END, 4), valid=prompts() < 0),
            "at least one real token",
        ),
        (lambda m: beam(m, m.start(3), prompts(), constraints=Constraints(END, 4), width=2, best=3), "best=3, width=2"),
        (lambda _: Sample(temperature=0), "Greedy"),
        (lambda _: Sample(top_p=0.0), "top_p must be in"),
        (lambda _: Sample(top_k=0), "top_k must be at least 1"),
    ],
)
def test_bad_wishes_get_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(Talker())
