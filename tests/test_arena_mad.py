"""The six tasks of MAD: every sequence is read back by its definition, and the published sizes are the defaults."""

from dataclasses import replace

import pytest
import torch

from regard.arena.arena_catalogue import arena_task
from regard.arena.arena_task import IGNORED
from regard.compare.compared_model import build_model

PARTS = ("train", "val", "test")
SMALL = [
    "mad_recall(length=20, train=300, test=100)",
    "mad_noisy_recall(length=20, noise_share=0.4, train=300, test=100)",
    "mad_fuzzy_recall(length=40, train=300, test=100)",
    "mad_selective_copy(length=30, copied=4, train=300, test=100)",
    "mad_compression(length=8, train=300, test=100)",
    "mad_memorization(length=8, symbols=16, train=300, test=100)",
]


@pytest.mark.parametrize("text", SMALL)
def test_splits_share_nothing_and_are_small_integers(text):
    task = arena_task(text)
    made = {part: task.examples(part) for part in PARTS}
    assert torch.equal(task.examples("val").targets, made["val"].targets)
    rows = {part: {tuple(row) for row in made[part].tokens.tolist()} for part in PARTS}
    assert not rows["train"] & (rows["val"] | rows["test"]) and not rows["val"] & rows["test"]
    for part, (tokens, targets, lengths, slices) in made.items():
        assert lengths is None and tokens.dtype == torch.uint8 and targets.dtype == torch.int16
        assert tokens.shape == targets.shape == (task.train if part == "train" else 100, task.length)
        assert tokens.min() >= 1 and tokens.max() < task.vocab and (targets != IGNORED).any(1).all()
        assert all(values.shape == tokens.shape for values in slices.values())


@pytest.mark.parametrize("text", SMALL[:2])
def test_a_value_is_scored_where_its_key_comes_again(text):
    task = arena_task(text)
    noise = 1 + task.keys + task.answers
    made = task.examples("test")
    noisy = 0
    for row, target, distance in zip(made.tokens.tolist(), made.targets.tolist(), made.slices["distance"].tolist(), strict=True):
        value, place_of = {}, {}
        for place in range(0, 20, 2):
            key, answer = row[place : place + 2]
            if key >= noise:
                assert answer >= noise and target[place] == IGNORED
                noisy += 1
                continue
            assert key <= task.keys < answer < noise and value.setdefault(key, answer) == answer
            assert target[place] == (answer if key in place_of else IGNORED)
            if key in place_of:
                assert distance[place] <= place - place_of[key] - 1 < 2 * distance[place]
            place_of[key] = place
        assert target[1::2] == [IGNORED] * 10 and target[18] == row[19]
    assert noisy / 1000 == pytest.approx(0.32 if "noisy" in text else 0, abs=0.06)  # 8 of 10 pairs can be noise
    train = task.examples("train")
    assert torch.equal(train.targets[:, :-1], train.tokens[:, 1:].short()) and (train.targets[:, -1] == IGNORED).all()


def runs(task, tokens):
    """Motifs of a fuzzy sequence: tokens of keys, tokens of values, and so on, with their places."""
    found = []
    for place, token in enumerate(tokens):
        kind = token > task.keys
        if not found or found[-1][0] != kind:
            found.append((kind, [], place))
        found[-1][1].append(token)
    return found


@pytest.mark.parametrize("part", ["train", "test"])
def test_fuzzy_keys_have_one_value_each_and_the_last_was_shown(part):
    task = arena_task(SMALL[2])
    made = task.examples(part)
    sizes = []
    for row, target in zip(made.tokens.tolist(), made.targets.tolist(), strict=True):
        pad = next(place for place, token in enumerate(row) if token != task.symbols)
        assert pad >= 1 and task.symbols not in row[pad:]
        whole = row[pad:] + target[-1:]
        found = runs(task, whole)
        value, expected = {}, [IGNORED] * len(whole)
        for (_, key, _), (_, answer, place) in zip(found[0::2], found[1::2], strict=True):
            assert len(set(key)) == len(key) <= 3 and len(set(answer)) == len(answer) <= 3
            sizes.append(len(key))
            if tuple(key) in value:
                expected[place : place + len(answer)] = answer
            assert value.setdefault(tuple(key), answer) == answer
        assert expected[-1] == whole[-1]
        assert target == ([*row[1:], whole[-1]] if part == "train" else ([IGNORED] * pad + expected)[1:])
    mean = sum(sizes) / len(sizes)
    assert mean == 3 if part == "test" else mean == pytest.approx(2, abs=0.1)


def test_a_fuzzy_probe_lies_anywhere():
    task = arena_task("mad_fuzzy_recall(symbols=64, train=10, test=400)")
    begins = []
    for row, last in zip(task.examples("test").tokens.tolist(), task.examples("test").targets[:, -1].tolist(), strict=True):
        found = runs(task, [token for token in row if token != task.symbols] + [last])
        key = found[-2][1]
        begins.append(next(place for _, motif, place in found if motif == key))
    shares = torch.tensor(begins).float().histc(4, 0, 116) / len(begins)
    assert shares.min() > 0.15 and shares.max() < 0.35


def test_selective_copying_ends_with_its_tokens():
    made = arena_task(SMALL[3]).examples("test")
    gaps = []
    for row, target, distance in zip(made.tokens.tolist(), made.targets.tolist(), made.slices["distance"].tolist(), strict=True):
        data = [(place, token) for place, token in enumerate(row[:25]) if token != 15]
        assert len(data) == 4 and row[25:] == [16, 15, 15, 15, 15] and data[-1][0] == 24
        assert target == [IGNORED] * 26 + [token for _, token in data]
        assert all(distance[26 + i] <= 26 + i - place < 2 * distance[26 + i] for i, (place, _) in enumerate(data))
        gaps.append([place for place, _ in data])
    blanks = torch.tensor(gaps).diff(prepend=torch.full((100, 1), -1)) - 1
    assert ((blanks.double().mean(0) - 21 / 4).abs() < 1).all()  # 21 blanks, in front of each of the four tokens


def test_compression_repeats_its_tokens_through_a_bottleneck():
    task = arena_task(SMALL[4])
    made = task.examples("test")
    assert torch.equal(made.tokens.short(), made.targets) and (made.tokens[:, -1] == 16).all() and made.tokens[:, :-1].max() == 15
    assert task.model().bottleneck and not arena_task(SMALL[0]).model().bottleneck


def test_labels_behind_a_bottleneck_depend_on_the_last_vector_alone():
    task = arena_task(SMALL[4])
    model = build_model(task, "Local(2)", replace(task.model(), width=16, heads=2, ffn=16, depth=1))
    tokens = task.examples("test").tokens[:3].long()
    scores = model(tokens)
    changed = tokens.clone()
    changed[:, 4] = 1 + tokens[:, 4] % 15
    assert scores.shape == (3, 8, task.classes) and torch.equal(model(changed), scores)  # too far from the last token
    changed[:, 6] = 1 + tokens[:, 6] % 15
    assert ((model(changed) - scores).abs().amax(-1) > 1e-6).all()  # at every position
    valid = torch.arange(8) < 6
    padded = model(tokens, valid.expand(3, 8))
    assert torch.allclose(padded[:, :6], model(tokens[:, :6]), atol=1e-6)
    at = torch.tensor([[1, 5]] * 3)
    assert torch.equal(model(tokens, None, at), scores[:, [1, 5]])
    with pytest.raises(ValueError, match="vector of the last token: nothing is decoded"):
        model.start(3)


def test_facts_are_the_same_in_all_splits():
    task = arena_task(SMALL[5])
    value = {}
    for part in PARTS:
        made = task.examples(part)
        assert (made.tokens[:, 1::2] == 16).all() and (made.targets[:, 0::2] == IGNORED).all()
        for key, answer in zip(made.tokens[:, 0::2].flatten().tolist(), made.targets[:, 1::2].flatten().tolist(), strict=True):
            assert 1 <= key <= 7 < answer <= 15 and value.setdefault(key, answer) == answer
    assert len(set(value.values())) == 7
    assert not torch.equal(arena_task(SMALL[5].replace("train", "seed=2, train")).values(), task.values())


def test_floors_are_what_trivial_readers_reach():
    found = arena_task("mad_recall(length=4, symbols=4, train=2, test=4)").floors()
    assert found["commonest of it"] == 1  # one pair, then its key again
    found = arena_task("mad_recall(length=20, train=10, test=2000)").floors()
    assert found["chance"] == 1 / 8 and 0.3 < found["commonest of it"] < 0.5 and abs(found["token"] - 1 / 8) < 0.03
    found = arena_task("mad_compression(train=10, test=2000)").floors()
    assert found["position"] == pytest.approx(1 / 32 + 31 / 32 / 15, abs=0.01) and "token" not in found
    found = arena_task("mad_memorization").floors()
    assert found["token before"] == 1 and found["token"] < 0.02


@pytest.mark.parametrize(
    "name, length, vocab, train, steps",
    [
        ("mad_recall", 128, 17, 12_800, 20_000),
        ("mad_noisy_recall", 128, 33, 12_800, 20_000),
        ("mad_fuzzy_recall", 128, 17, 12_800, 20_000),
        ("mad_selective_copy", 256, 17, 12_800, 20_000),
        ("mad_compression", 32, 17, 12_800, 20_000),
        ("mad_memorization", 32, 257, 256, 400),
    ],
)
def test_the_published_sizes_are_the_defaults(name, length, vocab, train, steps):
    task = arena_task(name)
    assert (task.length, task.vocab, task.train, task.test) == (length, vocab, train, 1280)
    assert (task.budget().steps, task.budget().batch, task.model().width, task.model().heads) == (steps, 128, 128, 16)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("mad_recall(length=9)", "length must be an even number"),
        ("mad_recall(symbols=3)", "symbols must be at least 4"),
        ("mad_noisy_recall(symbols=19)", "symbols must be at least 20, not 19"),
        ("mad_noisy_recall(noise_share=1)", "noise_share must be from 0 to below 1"),
        ("mad_fuzzy_recall(symbols=6)", "need symbols of at least 7, not 6"),
        ("mad_fuzzy_recall(length=12)", "length must be above 12, not 12"),
        ("mad_selective_copy(length=33)", "16 copied tokens need a length of at least 34, not 33"),
        ("mad_compression(length=1)", "length must be at least 2"),
        ("mad_memorization(length=7)", "length must be even"),
    ],
)
def test_options_without_a_meaning_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        arena_task(text)
