"""StaticDecoder generates the tokens of its model: packed weights, caches of one static size, beams that share a source."""

import pytest
import torch
from torch import nn

import regard.decoding.beam
import regard.decoding.generate
import regard.runtime.static_decoder
from conftest import DEVICE
from regard.blocks import Stack
from regard.blocks.feedforward import ACTIVATIONS, FeedForward
from regard.config import Config
from regard.decoding import Constraints, Sample, StaticDecoder, beam, generate, generate_stream, why_not_static
from regard.decoding.generate import EndDetector
from regard.models import LanguageModel, NextToken, Tokens, language_model, translator
from regard.ops.topk import argmax_first, topk_by_part
from regard.runtime.packed_linear import FUSED_ACTIVATIONS, PackedLinear, linear_plus, pack_linears
from regard.runtime.static_step import GraphedStepReplay

VOCAB, END = 23, 3
FORMS = ["steps", "products", "walked", *(["graph"] if DEVICE.type == "cuda" else [])]


class Walked(GraphedStepReplay):
    """All that a CUDA graph would do, kernel by kernel."""

    def captured(self):
        self.graph = self
        return None

    def replay(self, tokens, rows=None):
        self.cache.tokens.copy_(tokens)
        if self.cache.k > 1:
            self.cache.rows.copy_(self.cache.same if rows is None else rows)
        return self.run()


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """How a step is made: with sizes that the host knows, or with fixed room and masks, and that as a graph."""
    if request.param == "walked":
        monkeypatch.setattr(regard.runtime.static_decoder, "GraphedStepReplay", Walked)
    if request.param == "products":
        monkeypatch.setattr(regard.runtime.static_decoder, "MANY_ROWS", 1)  # sources are heard by two products

    def make(model, room=8):
        fast = StaticDecoder(model, room=room, graphs=request.param == "graph")
        fast.graphs = request.param not in ("steps", "products")
        return fast

    return make


def config(**changes):
    plain = Config(width=16, heads=4, depth=2, ffn=24, dropout=0.0, max_len=64)
    return plain.replace(changes)


def built(kind, **changes):
    torch.manual_seed(5)
    make = language_model if kind == "language" else translator
    model = make(config(**changes), VOCAB).to(DEVICE, torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # sharp enough to have opinions
    return model


def asked(kind, ragged):
    """What to start from, the prompt, and which of its tokens are real."""
    torch.manual_seed(6)
    x = torch.randint(5, VOCAB, (3, 9), device=DEVICE)
    valid = torch.arange(9, device=DEVICE) < torch.tensor([[9], [3], [6]], device=DEVICE)
    valid = {"": None, "behind": valid, "before": valid.flip(1)}[ragged]
    if kind == "language":
        return (3,), x, valid
    return (x,) if valid is None else (x, valid), torch.full((3, 1), 2, device=DEVICE), None


@pytest.mark.parametrize("ragged", ["", "behind", "before"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("language", {}),
        ("language", {"positions": "rotary", "norm": "post"}),
        ("language", {"positions": "learned"}),
        ("translator", {}),
        ("translator", {"norm": "post", "wiring": "each", "positions": "none"}),
        ("translator", {"wiring": "both"}),
    ],
)
def test_a_ready_model_says_what_the_model_says(kind, changes, ragged, form):
    model = built(kind, **changes)
    fast = form(model)
    begin, prompt, valid = asked(kind, ragged)
    constraints = Constraints(END, max_new_tokens=21, banned=(0, 1))
    wanted = generate(model, model.start(*begin), prompt, constraints=constraints, valid=valid)
    for _ in range(2):  # the second time in the same cache
        assert generate(fast, fast.start(*begin), prompt, constraints=constraints, valid=valid) == wanted
        one = beam(model, model.start(*begin), prompt, constraints=constraints, width=4, best=4, valid=valid)
        two = beam(fast, fast.start(*begin), prompt, constraints=constraints, width=4, best=4, valid=valid)
        assert torch.equal(one.tokens, two.tokens)
        torch.testing.assert_close(one.scores, two.scores, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["language", "translator"])
def test_its_scores_are_the_models_whatever_it_is_told(kind, form):
    model = built(kind)
    fast = form(model)
    begin, prompt, valid = asked(kind, "behind")
    with torch.no_grad():
        a, state = model.extend(model.start(*begin), prompt, valid)
        b, own = fast.extend(fast.start(*begin), prompt, valid)
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
        for n in (1, 1, 5, 4, 1):  # through three sizes of its room
            tokens = torch.randint(5, VOCAB, (3, n), device=DEVICE)
            a, state = model.extend(state, tokens)
            b, own = fast.extend(own, tokens)
            torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_grouped_heads_and_no_bias_are_ready_too(form):
    torch.manual_seed(5)
    body = Stack.of("softmax", width=16, heads=4, kv_heads=2, depth=2, causal=True, ffn=24, positions="rotary")
    model = LanguageModel(Tokens(VOCAB, 16), body, NextToken(16, VOCAB)).to(DEVICE, torch.float64).eval()
    _, prompt, _ = asked("language", "")
    fast, constraints = form(model), Constraints(END, max_new_tokens=12)
    assert generate(fast, fast.start(3), prompt, constraints=constraints) == generate(
        model, model.start(3), prompt, constraints=constraints
    )


def test_a_source_without_a_token_is_silence_for_a_ready_model_too(form):
    model = built("translator")
    fast = form(model)
    (x,), prompt, _ = asked("translator", "")
    valid = torch.ones_like(x, dtype=torch.bool)
    valid[1] = False
    constraints = Constraints(END, max_new_tokens=8)
    wanted = beam(model, model.start(x, valid), prompt, constraints=constraints, width=3)
    found = beam(fast, fast.start(x, valid), prompt, constraints=constraints, width=3)
    assert torch.equal(wanted.tokens, found.tokens)
    torch.testing.assert_close(wanted.scores, found.scores, atol=1e-9, rtol=0)


def test_beams_that_share_a_source_need_not_move_it():
    model = built("translator")
    (x,), _, _ = asked("translator", "")
    rows = torch.tensor([1, 0, 1, 3, 5, 3, 8, 7, 6], device=DEVICE)  # of three beams each, within their rows
    tokens = torch.randint(5, VOCAB, (9, 1), device=DEVICE)
    with torch.no_grad():
        _, state = model.extend(model.start(x).fan(3), torch.randint(5, VOCAB, (9, 4), device=DEVICE))
        within, naive = state.select(rows, within=True), state.select(rows)
        kept, moved = within.memory[0].memory[1].memory.k, naive.memory[0].memory[1].memory.k
        assert kept is state.memory[0].memory[1].memory.k
        assert torch.equal(kept, moved)
        one, one_after = model.extend(within, tokens)
        two, two_after = model.extend(naive, tokens)
        assert torch.equal(one, two)
        assert torch.equal(model.extend(one_after, tokens)[0], model.extend(two_after, tokens)[0])


@pytest.mark.parametrize("behind", [1, 4, 50])
def test_asking_late_whether_all_have_ended_changes_nothing(behind, monkeypatch):
    model, constraints = built("language"), Constraints(END, max_new_tokens=30)
    with torch.no_grad():
        model.head.map.weight[END] += 0.3  # it tends to come to an end
    _, prompt, _ = asked("language", "")
    ways = [
        lambda: generate(model, model.start(3), prompt, constraints=constraints),
        lambda: generate(model, model.start(3), prompt, constraints=constraints, choice=Sample(seed=4)),
        lambda: beam(model, model.start(3), prompt, constraints=constraints, width=3, best=3).answers(END),
    ]
    at_once = [way() for way in ways]
    assert any(len(said) < 29 for said in at_once[1])
    monkeypatch.setattr(EndDetector, "of", staticmethod(lambda _: EndDetector(behind)))
    assert [way() for way in ways] == at_once
    parts = list(generate_stream(model, model.start(3), prompt, constraints=constraints, choice=Sample(seed=4)))
    assert len(parts) == min(30, max(map(len, at_once[1])) + 1)  # a stream ends when all have ended


def test_a_prompt_is_scored_at_its_last_real_token_alone():
    model = built("language")
    for ragged in ("", "behind", "before"):
        _, prompt, valid = asked("language", ragged)
        with torch.no_grad():
            last, state = model.last(model.start(3), prompt, valid)
            for row in range(3):
                own = prompt[row] if valid is None else prompt[row][valid[row]]
                torch.testing.assert_close(last[row], model(own[None])[0, -1], atol=1e-9, rtol=0)
            scores, after = model.extend(model.start(3), prompt, valid)
            assert torch.equal(state.t, after.t)
            assert scores.shape == (3, 9, VOCAB)


@pytest.mark.parametrize("v", [5, 1024, 5003])
def test_the_likeliest_are_found_by_parts(v):
    scores = torch.randn(4, v, dtype=torch.float64, device=DEVICE).mul(3).round()  # with many that are alike
    scores[2] = -torch.inf
    scores[3, -1] = 99
    assert torch.equal(argmax_first(scores), scores.argmax(-1))
    values, places = topk_by_part(scores, 5)
    assert torch.equal(values, scores.topk(5).values)
    assert torch.equal(scores.gather(1, places), values)
    assert all(len(set(row)) == 5 for row in places[[0, 1, 3]].tolist())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="weights are packed for a CPU; a GPU has its own order")
def test_packed_weights_are_the_same_map_and_all_others_are_shared():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(9, 40), nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 7, bias=False)).eval()
    fast = pack_linears(made)
    x = torch.randint(9, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), made(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fast(x[:, :1]), made(x[:, :1]), atol=1e-5, rtol=1e-5)
    assert isinstance(fast[1], PackedLinear)
    assert type(made[1]) is nn.Linear
    assert fast[0].weight is made[0].weight
    assert type(pack_linears(made.double())[1]) is nn.Linear  # there is no packed form of these


@pytest.mark.skipif(DEVICE.type != "cpu", reason="weights are packed for a CPU; a GPU has its own order")
@pytest.mark.parametrize(
    ("activation", "gated"), [*((name, False) for name in ACTIVATIONS), ("silu", True)], ids=[*ACTIVATIONS, "gated"]
)
def test_a_packed_layer_bends_and_adds_in_one_go(activation, gated):
    torch.manual_seed(0)
    made = FeedForward(24, 40, activation=activation, gated=gated).eval()
    fast, x, other = pack_linears(made), torch.randn(5, 24), torch.randn(5, 24)
    with torch.no_grad():
        wanted = made(x)
        torch.testing.assert_close(fast(x), wanted, atol=1e-5, rtol=1e-5)
        for module in (fast, made, pack_linears(made.down), made.down):
            own = x if type(module) is FeedForward else made.up(x)[:, :40]
            torch.testing.assert_close(linear_plus(module, own, other), other + module(own), atol=1e-5, rtol=1e-5)
    assert fast.up.activation == (("none", "") if gated else FUSED_ACTIVATIONS[activation])
    assert type(made.up) is nn.Linear and made.act is ACTIVATIONS[activation]


def test_what_cannot_be_ready_is_refused_with_a_reason():
    assert why_not_static(built("language")) is None
    assert "eval()" in why_not_static(built("language").train())
    for changes, reason in (
        ({"mixer": "linear"}, "linear"),
        ({"positions": "alibi"}, "alibi"),
        ({"mixer": "Local(4)"}, "no plain KV cache"),
    ):
        with pytest.raises(ValueError, match=f"cannot be a StaticDecoder: .*{reason}"):
            StaticDecoder(built("language", **changes))
    with pytest.raises(ValueError, match="not just a LanguageModel"):
        StaticDecoder(nn.Linear(2, 2).eval())


def test_a_state_of_a_ready_model_goes_forwards_only(form):
    fast = form(built("language"))
    _, prompt, valid = asked("language", "behind")
    one = prompt[:, :1]
    with torch.no_grad():
        _, first = fast.last(fast.start(3), prompt)
        _, second = fast.extend(first, one)
        fast.extend(second, one)
        for use, sentence in (
            (lambda: fast.extend(second, one), "extended before"),
            (lambda: fast.extend(fast.extend(first, one)[1], one, valid[:, :1]), "extended by real tokens"),
            (lambda: second.fan(2), "before the first new token"),
            (lambda: second.select(torch.tensor([0])), "stay with their rows"),
            (lambda: fast.last(second, prompt), "before the first new token"),
            (lambda: fast.extend(fast.extend(first, one)[1], prompt.repeat(1, 8)), "max_len=64"),
        ):
            with pytest.raises(ValueError, match=sentence):
                use()


def test_a_source_without_tokens_is_heard_as_nothing_in_every_form(form):
    model = built("translator")
    source = torch.zeros(2, 0, dtype=torch.long, device=DEVICE)
    begin = torch.full((2, 1), 2, device=DEVICE)
    fast, constraints = form(model), Constraints(END, max_new_tokens=6)
    slow = beam(model, model.start(source), begin, constraints=constraints, width=3)
    found = beam(fast, fast.start(source), begin, constraints=constraints, width=3)
    assert torch.equal(slow.tokens, found.tokens)
    torch.testing.assert_close(slow.scores, found.scores)
