"""Generated tasks of recall and copying: every target by its definition, splits that share nothing, floors by counting."""

from collections import Counter, defaultdict

import pytest
import torch

from regard.arena import example_draws
from regard.arena.arena_catalogue import ARENA, arena_class, arena_task
from regard.arena.arena_task import IGNORED, Examples
from regard.arena.quick_tasks import QUICK_TASKS
from regard.arena.token_floors import token_floors

PARTS = ("train", "val", "test")
SMALL = [
    "recall(length=32, pairs=4, vocab=40, train=300, test=100)",
    "mixed_recall(vocab=600, train=90, test=70)",
    "selective_copy(length=24, copied=5, symbols=6, train=300, test=100)",
    "induction(length=16, symbols=5, train=300, test=100, trained=12)",
]
each = pytest.mark.parametrize("text", SMALL)


def rows(examples):
    return {tuple(row) for row in examples.tokens.tolist()}


@each
def test_splits_are_functions_of_the_options_and_share_nothing(text):
    task = arena_task(text)
    made = {part: task.examples(part) for part in PARTS}
    torch.manual_seed(3)
    again = task.examples("train")
    assert torch.equal(again.tokens, made["train"].tokens) and torch.equal(again.targets, made["train"].targets)
    assert not rows(made["train"]) & rows(made["test"]) and not rows(made["val"]) & (rows(made["train"]) | rows(made["test"]))
    assert not torch.equal(arena_task(text.replace("train=", "seed=2, train=")).examples("train").tokens, again.tokens)
    assert [len(made[part].tokens) for part in PARTS] == [task.train, task.test, task.test]


@each
def test_splits_are_small_integers_in_the_declared_ranges(text):
    task = arena_task(text)
    for part in PARTS:
        tokens, targets, lengths, slices = task.examples(part)
        assert tokens.element_size() <= 2 and targets.dtype == torch.int16
        assert tokens.shape == targets.shape and tokens.shape[1] <= task.length
        assert tokens.shape[1] == task.length or part != "test"
        real = torch.ones_like(tokens, dtype=torch.bool) if lengths is None else torch.arange(tokens.shape[1]) < lengths[:, None]
        assert tokens[real].min() >= 1 and tokens.max() < task.vocab and not tokens[~real].any()
        scored = targets != IGNORED
        assert scored.any(1).all() and not scored[~real].any()
        assert targets[scored].min() >= 1 and targets[scored].max() < task.classes
        assert all(values.shape in (tokens.shape, tokens.shape[:1]) for values in slices.values())


def test_small_spaces_are_drawn_again_until_splits_differ_or_refused():
    task = arena_task("induction(length=4, symbols=6, train=300, test=100)")  # 2 * 6 ** 2 sequences
    with pytest.raises(ValueError, match="too few different examples for three splits"):
        task.examples("train")
    task = arena_task("induction(length=6, symbols=4, train=2000, test=300)")  # 4 * 4 ** 4 sequences, most of them in test or val
    made = {part: task.examples(part) for part in PARTS}
    assert not rows(made["train"]) & (rows(made["test"]) | rows(made["val"])) and len(made["train"].tokens) == 2000


def test_hashes_tell_rows_apart_and_ignore_padding():
    tokens = torch.randint(1, 5, (3000, 9), generator=torch.Generator().manual_seed(0))
    found = example_draws.row_hashes(tokens)
    assert torch.equal(example_draws.row_hashes(torch.nn.functional.pad(tokens, (0, 50))), found)
    assert len(found.unique()) == len(tokens.unique(dim=0))


@pytest.mark.parametrize("text", SMALL[:2])
@pytest.mark.parametrize("part", ["train", "test"])
def test_recall_scores_each_key_once_with_its_value(text, part):
    task = arena_task(text)
    made = task.examples(part)
    sizes = [made.tokens.shape[1]] * len(made.tokens) if made.lengths is None else made.lengths.tolist()
    for number, (row, target, size) in enumerate(zip(made.tokens.tolist(), made.targets.tolist(), sizes, strict=True)):
        pairs = int(made.slices["pairs"][number])
        value = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(value) == pairs == len(set(value.values())) and max(value) < task.vocab // 2 <= min(value.values())
        scored = [place for place in range(size) if target[place] != IGNORED]
        assert sorted(row[place] for place in scored) == sorted(value) and scored[0] >= 2 * pairs
        assert all(target[place] == value[row[place]] for place in scored)
        if part == "test":
            for place in scored:
                distance = int(made.slices["distance"][number, place])
                assert distance <= place - row.index(target[place]) < 2 * distance


def test_gaps_follow_the_power_law():
    task = arena_task("recall(length=16, pairs=2, power=0.5)")
    gaps = task.gaps(40_000, 2, 6, torch.Generator().manual_seed(1))
    weights = torch.arange(1.0, 7) ** -0.5
    first = weights / weights.sum()
    assert torch.allclose(gaps[:, 0].bincount(minlength=6) / 40_000, first, atol=0.01)
    second = sum(first[i] * (weights * (torch.arange(6) != i)) / (weights.sum() - weights[i]) for i in range(6))
    assert torch.allclose(gaps[:, 1].bincount(minlength=6) / 40_000, second, atol=0.01)


def test_distinct_numbers_are_distinct_and_uniform():
    for choices in (5, 50):  # by sorting, by drawing again
        found = example_draws.distinct_numbers(6000, 4, choices, torch.Generator().manual_seed(2))
        assert all(len(set(row)) == 4 for row in found.tolist()) and found.min() >= 0 and found.max() < choices
        shares = found.T.flatten().reshape(4, -1)
        for column in shares:
            assert torch.allclose(column.bincount(minlength=choices) / 6000, torch.tensor(1 / choices), atol=0.025)


def test_selective_copy_writes_the_data_down_in_order():
    task = arena_task(SMALL[2])
    made = task.examples("test")
    for row, target, distance in zip(made.tokens.tolist(), made.targets.tolist(), made.slices["distance"].tolist(), strict=True):
        data = [(place, token) for place, token in enumerate(row[:-5]) if token != 1]
        assert row[-5:] == [2] * 5 and target == [IGNORED] * 19 + [token for _, token in data] and min(target[-5:]) > 2
        for marker, (place, _) in enumerate(data, 19):
            assert distance[marker] <= marker - place < 2 * distance[marker]


def test_induction_names_the_token_behind_the_first_trigger():
    task = arena_task(SMALL[3])
    for part, length in (("val", 12), ("test", 16)):
        made = task.examples(part)
        assert made.tokens.shape[1] == length
        for row, target in zip(made.tokens.tolist(), made.targets.tolist(), strict=True):
            first = row.index(1)
            assert row.count(1) == 2 and row[-1] == 1 and first < length - 2
            assert target == [IGNORED] * (length - 1) + [row[first + 1]]


@pytest.mark.parametrize("text", SMALL[2:])
def test_fresh_batches_are_drawn_by_the_generator_alone(text):
    task = arena_task(text)
    made = task.examples("train")
    draws = [task.augment(made.tokens[:50], made.targets[:50], torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[0][0], draws[2][0])
    for tokens, targets in draws:
        assert tokens.dtype == made.tokens.dtype and targets.dtype == made.targets.dtype and tokens.shape == targets.shape
        assert torch.equal((targets != IGNORED).sum(1), (made.targets[:50] != IGNORED).sum(1))
    fixed = arena_task(text.replace("train=", "fresh=False, train="))
    assert fixed.augment(made.tokens, made.targets, None) == (made.tokens, made.targets)


def test_token_floors_count_labels():
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(1, 4, (40, 6), generator=generator) for _ in range(2))
    targets[torch.rand(40, 6, generator=generator) < 0.5] = IGNORED
    fitted, test = Examples(tokens[:20], targets[:20]), Examples(tokens[20:], targets[20:])
    for name, kind in {"most frequent": (0, 0), "token": (1, 0), "position": (0, 1)}.items():
        counts = defaultdict(Counter)
        for row, target in zip(fitted.tokens.tolist(), fitted.targets.tolist(), strict=True):
            for place, label in enumerate(target):
                if label != IGNORED:
                    counts[kind[0] * row[place] + kind[1] * place][label] += 1
        best = [sum(c.values()) and max(c.values()) for c in counts.values()]
        own = token_floors(fitted, fitted, 4)[name]
        assert own == pytest.approx(sum(best) / int((fitted.targets != IGNORED).sum()))
        assert 0 <= token_floors(fitted, test, 4)[name] <= 1


def test_floors_are_what_trivial_readers_reach():
    found = arena_task("recall(length=64, pairs=4, vocab=64, train=4000, test=1000)").floors()
    assert found["chance"] == 1 / 32 and found["a value of it"] == 1 / 4 and 0.25 < found["pair by position"] < 0.5
    assert max(found[name] for name in ("most frequent", "token", "position")) < 0.06
    found = arena_task("selective_copy(length=40, copied=4, symbols=4, test=1000)").floors()
    assert found["chance"] == 1 / 4 and found["most frequent of it"] == pytest.approx(0.5312, abs=0.02)  # of 4 draws from 4
    found = arena_task("induction(length=3, symbols=4, train=10, test=8)").floors()
    assert found["token before"] == 1  # there is no room for another token


def test_quick_tasks_are_small_and_need_no_data():
    for quick in QUICK_TASKS:
        task = arena_task(quick.task)
        assert not task.needs and task.length <= 64 and task.test <= 500
        assert quick.budget.batch * quick.budget.steps <= 20_000 and max(task.floors().values()) < 0.6


def test_every_task_is_registered_under_its_name():
    assert list(ARENA) == sorted(ARENA)
    assert all(arena_class(name).name == name and arena_class(name).title and arena_class(name).source for name in ARENA)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("recall(length=30, pairs=8)", "8 pairs need a length of at least 32, not 30"),
        ("recall(pairs=8, vocab=16)", "8 different keys and values need a vocab of at least 18, not 16"),
        ("recall(power=0)", "power must be above 0"),
        ("mixed_recall(vocab=300)", "256 different keys"),
        ("selective_copy(length=32, copied=16)", "16 copied tokens need a length of at least 33, not 32"),
        ("selective_copy(symbols=1)", "symbols must be an integer of at least 2"),
        ("induction(length=2)", "two triggers and an answer need a length of at least 3, not 2"),
        ("induction(trained=300)", "trained must be 0 or from 3 to the length of 256, not 300"),
        ("induction(train=0)", "train must be an integer of at least 1"),
        ("induction(seed=-1)", "seed must be from 0"),
    ],
)
def test_options_without_a_meaning_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        arena_task(text)
