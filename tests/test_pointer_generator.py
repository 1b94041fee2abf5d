"""Copying: what the formula says word by word is what comes out at once, and a copied word keeps its place under beams."""

import json
import math
from dataclasses import replace

import pytest
import torch

from conftest import DEVICE, close
from regard.config import Config
from regard.data.length_buckets import Batches
from regard.decoding import Constraints, beam, generate
from regard.models.pointer_generator import PointerGenerator, coverage, pointer_generator
from regard.tasks.copying import CopyTask, oov_recall
from regard.tasks.copying_config import acl_titles_config, wikisql_config
from regard.training.losses import cross_entropy

VOCAB, BEGIN, END = 11, 2, 3
SMALL = Config(width=16, heads=2, depth=1, ffn=16, dropout=0.0, max_len=32)


def small(seed=0, heads=2, **changes) -> PointerGenerator:
    torch.manual_seed(seed)
    model = pointer_generator(replace(SMALL, **changes), VOCAB, heads=heads).to(DEVICE, torch.float64).eval()
    with torch.no_grad():  # sharp enough to have opinions
        for part in (model.point.q, model.point.k, model.head.map, model.gate, model.lean):
            part.weight.mul_(3)
    return model


def sources(pad=False):
    """Two sources with words that occur twice, some of which only they know: ids from VOCAB on."""
    extended = torch.tensor([[5, 11, 7, 11, 12, 5, 5], [13, 6, 11, 12, 8, 6, 9]], device=DEVICE)
    valid = None
    if pad:
        valid = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool, device=DEVICE)
    return extended.masked_fill(extended >= VOCAB, 1), valid, extended


def told():
    return torch.tensor([[BEGIN, 5, 11, 12], [BEGIN, 13, 8, 6]], device=DEVICE)


def by_loops(model, source, valid, target, extended):
    """p_gen times the vocabulary, plus (1 - p_gen) times what the source's words get, one word after another."""
    heard = model.encode(source, valid)
    y = model.hidden(heard, target)
    x, b, n = heard.contexts[-1], *source.shape
    real = torch.ones_like(source, dtype=torch.bool) if valid is None else valid
    o = max(int(extended[real].max()) + 1 - VOCAB, 0)
    d = 16 // model.point.heads
    rows = []
    for i in range(b):
        for t in range(target.shape[1]):
            q, k = model.point.q(y[i, t]), model.point.k(x[i])
            mean = [0.0] * n
            for h in range(model.point.heads):
                scores = {
                    j: (q[h * d : h * d + d] * k[j, h * d : h * d + d]).sum() / math.sqrt(d) for j in range(n) if real[i, j]
                }
                norm = sum(torch.exp(s) for s in scores.values())
                for j, s in scores.items():
                    mean[j] = mean[j] + torch.exp(s) / norm / model.point.heads
            lean = model.gate(y[i, t])[0] + sum(mean[j] * model.lean(x[i, j])[0] for j in range(n))
            p = torch.sigmoid(lean)
            words = list(p * model.head(y[i, t]).softmax(-1)) + [torch.zeros((), dtype=y.dtype, device=DEVICE)] * o
            for j in range(n):
                if real[i, j]:
                    words[int(extended[i, j])] = words[int(extended[i, j])] + (1 - p) * mean[j]
            rows.append(torch.stack(words))
    return torch.stack(rows).view(b, -1, VOCAB + o)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_scores_are_the_logs_of_the_definition_by_loops_and_so_are_gradients(pad, heads):
    model = small(heads=heads)
    source, valid, extended = sources(pad)
    scores, slow = model(source, valid, told(), None, extended), by_loops(model, source, valid, told(), extended)
    close(scores.exp(), slow)
    close(scores[slow > 0], slow[slow > 0].log())
    answer = torch.tensor([[5, 11, 12, END], [12, 8, 6, 11]], device=DEVICE)
    parts = list(model.parameters())
    fast = torch.autograd.grad(-scores.gather(2, answer[..., None]).sum(), parts)
    slow = torch.autograd.grad(-slow.gather(2, answer[..., None]).log().sum(), parts)
    for a, b in zip(fast, slow, strict=True):
        close(a, b)


@pytest.mark.parametrize("pad", [False, True])
def test_the_likelihood_of_an_answer_is_what_the_scores_say_of_it_with_the_same_gradients(pad):
    model = small()
    source, valid, extended = sources(pad)
    answer = torch.tensor([[5, 11, 12, END], [12, 8, 6, 11]], device=DEVICE)
    scores = model(source, valid, told(), None, extended).gather(2, answer[..., None])[..., 0]
    logs, weights = model.likelihood(source, valid, told(), None, extended, answer)
    close(logs, scores)
    close(weights.sum(-1), torch.ones_like(logs))
    parts = list(model.parameters())
    for a, b in zip(torch.autograd.grad(logs.sum(), parts), torch.autograd.grad(scores.sum(), parts), strict=True):
        close(a, b)


@pytest.mark.parametrize("pad", [False, True])
def test_probabilities_sum_to_one_and_words_of_another_source_have_none(pad):
    source, valid, extended = sources(pad)
    scores = small()(source, valid, told(), None, extended)
    o = 2 if pad else 3  # the only 13 is padding
    assert scores.shape == (2, 4, VOCAB + o)
    close(scores.exp().sum(-1), torch.ones(2, 4, dtype=torch.float64, device=DEVICE))
    assert (scores[0, :, VOCAB + 2 :] == -torch.inf).all()
    assert scores[:, :, : VOCAB + 2].isfinite().all()


def test_a_word_that_stands_in_the_source_several_times_collects_all_its_mass():
    model = small()
    with torch.no_grad():
        model.gate.bias.fill_(-60)  # nothing but copying
    source, _, extended = sources()
    scores = model(source, None, told(), None, extended)
    _, weights = model.likelihood(source, None, told(), None, extended, told())
    close(scores[0, :, 5].exp(), weights[0][:, [0, 5, 6]].sum(-1))
    close(scores[0, :, 11].exp(), weights[0][:, [1, 3]].sum(-1))


def test_padding_is_as_if_absent_whatever_stands_there():
    model = small()
    source, valid, extended = sources(pad=True)
    dirty = extended.masked_fill(~valid, 40)
    whole = model(source, valid, told(), None, dirty)
    for i in range(2):
        alone = model(source[i : i + 1, valid[i]], None, told()[i : i + 1], None, extended[i : i + 1, valid[i]])
        close(whole[i : i + 1, :, : alone.shape[2]], alone)
        assert (whole[i, :, alone.shape[2] :] == -torch.inf).all()


def test_a_source_that_is_all_padding_is_answered_from_the_vocabulary_alone():
    model = small()
    source, valid, extended = sources(pad=True)
    valid[0] = False
    scores = model(source, valid, told(), None, extended)
    close(scores[0, :, :VOCAB].exp().sum(-1), torch.ones(4, dtype=torch.float64, device=DEVICE))
    logs, _ = model.likelihood(source, valid, told(), None, extended, torch.full_like(told(), 5))
    close(logs, scores[..., 5])
    logs.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_saturated_pointers_and_gates_leave_all_gradients_finite():
    model = small().float()
    source, valid, extended = sources(pad=True)
    with torch.no_grad():
        model.point.q.weight.mul_(1e4)
        model.gate.bias.fill_(300)
    answer = torch.tensor([[5, 11, 12, END], [12, 8, 6, 11]], device=DEVICE)
    scores = model(source, valid, told(), None, extended)
    assert scores.dtype == torch.float32 and not scores.isnan().any()
    logs, _ = model.likelihood(source, valid, told(), None, extended, answer)
    assert logs.isfinite().all()
    for loss in (logs.sum(), cross_entropy(scores, answer).total):
        for grad in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True):
            assert grad is None or grad.isfinite().all()


def test_under_autocast_log_probabilities_are_float32_and_sum_to_one():
    model = small().float()
    source, valid, extended = sources(pad=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        scores = model(source, valid, told(), None, extended)
    assert scores.dtype == torch.float32
    close(scores.exp().sum(-1), torch.ones(2, 4, device=DEVICE), 1e-4)


@pytest.mark.parametrize("mixer", ["softmax", "linear", "rnn", "delta"])
@pytest.mark.parametrize("wiring", ["last", "both", "mixed"])
def test_steps_equal_the_whole_pass_with_every_kind_of_mixer(mixer, wiring):
    model = small(mixer=mixer, wiring=wiring)
    source, valid, extended = sources()
    whole, state = model(source, valid, told(), None, extended), model.start(source, valid, extended)
    for t in range(4):
        scores, state = model.extend(state, told()[:, t : t + 1])
        close(scores[:, 0], whole[:, t])


@torch.no_grad()
def beam_slowly(model, source, extended, constraints, width, penalty):
    """Lists of texts, sorted; every text scored anew from the whole model."""
    alive, ended = [(0.0, [])], []
    for t in range(1, constraints.max_new_tokens + 1):
        longer = []
        for total, said in alive:
            scores = model(source, None, torch.tensor([[BEGIN, *said]], device=DEVICE), None, extended)[0, -1]
            longer += [(total + float(s), [*said, w]) for w, s in enumerate(scores) if s > -torch.inf]
        longer = sorted(longer, key=lambda x: -x[0])[: 2 * width]
        ended += [(s / t**penalty, said) for s, said in longer[:width] if said[-1] == END]
        alive = [x for x in longer if x[1][-1] != END][:width]
    ended += [(s / constraints.max_new_tokens**penalty, said) for s, said in alive]
    return sorted(ended, key=lambda x: -x[0])[:width]


@torch.no_grad()
def greedy_slowly(model, source, extended, constraints):
    said = []
    while len(said) < constraints.max_new_tokens:
        word = int(model(source, None, torch.tensor([[BEGIN, *said]], device=DEVICE), None, extended)[0, -1].argmax())
        if word == END:
            break
        said.append(word)
    return said


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_beams_find_what_a_search_without_state_finds_and_copies_stay_with_their_source(seed):
    model = small(seed)
    source, _, extended = sources()
    constraints, begin = Constraints(eos=END, max_new_tokens=5), torch.full((2, 1), BEGIN, device=DEVICE)
    with torch.no_grad():
        model.gate.bias.fill_(-3)  # it copies a lot
        found = beam(model, model.start(source, None, extended), begin, constraints=constraints, width=3, best=3)
        greedy = generate(model, model.start(source, None, extended), begin, constraints=constraints)
    copied = 0
    for i in range(2):
        slow = beam_slowly(model, source[i : i + 1], extended[i : i + 1], constraints, 3, 1.0)
        close(found.scores[i], torch.tensor([s for s, _ in slow], dtype=torch.float64, device=DEVICE))
        for tokens, (_, said) in zip(found.answers(END)[i], slow, strict=True):
            assert tokens == [w for w in said if w != END]
            copied += sum(w >= VOCAB for w in said)
        assert greedy[i] == greedy_slowly(model, source[i : i + 1], extended[i : i + 1], constraints)
    assert copied > 0


def test_coverage_counts_what_is_looked_at_twice():
    weights = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]])
    assert coverage(weights).item() == pytest.approx(0.5 + 0.5)
    assert coverage(weights, torch.tensor([[True, False, True]])).item() == pytest.approx(0.0)


def test_a_copier_learns_to_say_words_it_has_never_seen():
    """Say the word behind the mark (10), whatever it is: half of the words are not in the vocabulary."""
    torch.manual_seed(0)
    model = pointer_generator(replace(SMALL, width=32, positions="sinusoidal"), VOCAB).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def examples(b):
        extended = torch.stack([torch.randperm(8)[:6] + 6 for _ in range(b)])  # 6 .. 13, each once
        at = torch.randint(0, 5, (b, 1))
        extended = extended.masked_fill(extended == 10, 5).scatter(1, at, 10)
        return extended.to(DEVICE), extended.gather(1, at + 1).to(DEVICE)

    for _ in range(150):
        extended, answer = examples(64)
        source, begin = extended.masked_fill(extended >= VOCAB, 1), torch.full_like(answer, BEGIN)
        loss = -model.likelihood(source, None, begin, None, extended, answer)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    extended, answer = examples(200)
    state = model.start(extended.masked_fill(extended >= VOCAB, 1), None, extended)
    scores, _ = model.extend(state, torch.full_like(answer, BEGIN))
    right = (scores[:, -1].argmax(-1, keepdim=True) == answer) & (answer >= VOCAB)
    assert right.sum() / (answer >= VOCAB).sum() > 0.95


def test_bad_input_gets_a_sentence():
    model = small()
    source, valid, extended = sources()
    with pytest.raises(ValueError, match=r"ids of shape \(2, 7\)"):
        model(source, valid, told(), None, extended[:, 1:])
    with pytest.raises(ValueError, match="not divisible by 3 heads"):
        pointer_generator(SMALL, VOCAB, heads=3)


NAMES = [f"name{i}" for i in range(400)]


def papers(folder, copies=300):
    """Abstracts that call something by a name, and titles that are that name: 'We present X, a parser.' -> 'X: a parser'."""
    for part, first in (("train", 0), ("val", 300), ("test", 350)):
        rows = []
        for i in range(copies if part == "train" else 40):
            name, kind = NAMES[(first + i) % 400], ("parser", "tagger", "corpus")[i % 3]
            abstract = f"We present {name.upper()}, a {kind}. It is {'very ' * (i % 4)}good."
            rows.append(json.dumps({"abstract": abstract, "title": f"{name.title()}: a {kind}"}))
        (folder / f"{part}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def titles(folder, **changes):
    config = acl_titles_config().replace(
        {
            "vocab": 40,
            "width": 32,
            "heads": 2,
            "depth": 1,
            "decoder_depth": 1,
            "ffn": 64,
            "dropout": 0.0,
            "max_new_tokens": 8,
            **changes,
        }
    )
    task = CopyTask(config)
    task.read(papers(folder))
    torch.manual_seed(0)
    return task, task.model().to(DEVICE)


@pytest.mark.parametrize("copy", [True, False])
def test_titles_with_names_that_are_not_in_the_vocabulary_need_copying(tmp_path, copy):
    task, model = titles(tmp_path, copy=copy)
    assert len(task.splits["val"][0].oov) == 1 and len(task.vocabulary) == 40
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order = Batches([task.size(example) for example in task.splits["train"]], 1000)
    for step in range(40):
        loss = task.loss(model, task.batch([task.splits["train"][i] for i in order.at(step)]).to(DEVICE), step)
        optimizer.zero_grad()
        loss.mean.backward()
        optimizer.step()
    scores = task.score(model, "val")
    assert set(scores) == {"loss", "exact", "rouge_l", "oov_recall"}
    assert scores["oov_recall"] > 95 if copy else scores["oov_recall"] == 0
    assert scores["exact"] > 95 if copy else scores["exact"] == 0
    assert task.watch(model)["loss"] == pytest.approx(scores["loss"])
    assert model.training
    again = CopyTask(task.config)  # what a run needs to predict is in its assets
    again.restore(task.assets())
    said = again.predict(model, ["We present ZORG, a tagger. It is good.", ""])
    assert said == ["zorg : a tagger", ""] if copy else said[1] == ""


def test_training_looks_at_examples_from_all_over_the_validation_file(tmp_path, monkeypatch):
    """One that is in order of difficulty would else be judged by its easy end."""
    task, model = titles(tmp_path)
    seen = []
    monkeypatch.setattr("regard.tasks.copying.WATCHED", 10)
    monkeypatch.setattr(task, "_answers", lambda _model, examples, _beams: seen.extend(examples) or [["?"]] * len(examples))
    task.watch(model)
    assert [task.splits["val"].index(example) for example in seen] == list(range(0, 40, 4))


def test_a_longer_source_is_cut_and_coverage_is_a_part_of_the_loss(tmp_path):
    task, model = titles(tmp_path, cut=3, coverage=0.5)
    assert all(len(example.source) <= 3 for example in task.splits["train"])
    batch = task.batch(task.splits["val"][:4]).to(DEVICE)
    loss = task.loss(model.eval(), batch, 0)
    close(loss.total, loss.parts["nll"] + 0.5 * loss.parts["coverage"], 1e-5)
    assert loss.over.item() == sum(len(example.target) for example in task.splits["val"][:4])


def test_the_recall_of_new_words_counts_those_that_could_have_been_copied():
    assert oov_recall([["x", "y"], ["z"]], [["x"], ["z"]], [["x", "y", "q"], ["a"]]) == 50
    assert oov_recall([["x"]], [["x"]], [["a"]]) is None


def test_both_tasks_have_settings_and_bad_ones_get_a_sentence():
    assert CopyTask(acl_titles_config()).best == ("rouge_l", "max") and CopyTask(wikisql_config()).best == ("exact", "max")
    with pytest.raises(ValueError, match="use copy=false"):
        CopyTask(wikisql_config().replace({"smoothing": 0.1}))
    with pytest.raises(ValueError, match="leave them out"):
        CopyTask(wikisql_config().replace({"copy": False, "coverage": 1.0}))
    with pytest.raises(RuntimeError, match=r"read\(\) or restore\(\)"):
        CopyTask(wikisql_config()).model()
