"""Generated tasks of the Long Range Arena: listops and pathfinder. Values by a second evaluator, splits that share nothing."""

from statistics import median

import pytest
import torch

from regard.arena import generated_task, listops
from regard.arena.arena_catalogue import ARENA, arena_class, arena_task
from regard.arena.arena_task import Examples

WORDS = [".", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
RULES = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(median(x)), "[SM": lambda x: sum(x) % 10}
SMALL = "listops(length=60, depth=5, train=300, val=100, test=100)"


def tree(words):
    """A nested list from words: [operator, arguments ...]; the words are consumed."""
    word = words.pop(0)
    if word not in RULES:
        return int(word)
    found = [word]
    while words[0] != "]":
        found.append(tree(words))
    words.pop(0)
    return found


def value(node, levels=99):
    """Nothing of an operator below so many levels."""
    if isinstance(node, int):
        return node
    found = [value(x, levels - 1) for x in node[1:]] if levels else []
    found = [x for x in found if x is not None]
    return RULES[node[0]](found) if found else None


def height(node):
    return 0 if isinstance(node, int) else 1 + max(map(height, node[1:]))


def rows(examples: Examples):
    return {bytes(row.numpy().tobytes()) for row in examples.tokens}


@pytest.fixture(scope="module")
def small():
    task = arena_task(SMALL)
    return {part: task.examples(part) for part in ("train", "val", "test")}


def test_every_tree_has_its_value_and_its_slices(small):
    found = small["train"]
    for row, target, length in zip(found.tokens, found.targets, found.lengths, strict=True):
        assert 15 < length < 60 and not row[length:].any() and row[:length].all()
        words = [WORDS[x] for x in row[:length]]
        made = tree(words)
        assert words == [] and value(made) == target
    for number in range(100):
        made = tree([WORDS[x] for x in found.tokens[number] if x])
        readers = [value(made, k) == value(made) for k in (1, 2, 3, 99)]
        needed = 1 + max([k for k in (1, 2, 3) if not readers[k - 1]], default=0)
        own = {name: int(values[number]) for name, values in found.slices.items()}
        quarter = int(found.lengths[number]) // 15 * 15
        operator = list(RULES).index(made[0])
        assert own == {"operator": operator, "depth": height(made), "levels": needed, "tokens": quarter}
        for k in (1, 2, 3):
            assert listops.shallow_value(found.tokens[number].tolist(), k) == (-1 if value(made, k) is None else value(made, k))


def test_listops_has_the_shape_of_the_published_one():
    """Means over many trees: arguments 2 to 10, a quarter of them operators, nested nine times, lengths between the bounds."""
    task = arena_task("listops(train=300, val=1, test=1)")
    found = task.examples("train")
    assert (task.length, task.vocab, task.classes, found.tokens.dtype) == (2000, 16, 10, torch.uint8)
    assert found.lengths.min() > 500 and found.lengths.max() < 2000
    assert 950 < found.lengths.double().mean() < 1120
    assert found.slices["depth"].max() == 9
    operators = ((found.tokens >= 11) & (found.tokens < 15)).sum()
    digits = ((found.tokens >= 1) & (found.tokens < 11)).sum()
    assert (found.tokens == 15).sum() == operators
    assert 5.5 < (operators + digits - 300) / operators < 6.5
    assert 0.12 < operators / (operators + digits) < 0.25  # fewer than a quarter: the last level has none
    model, budget = task.model(), task.budget()
    assert (model.depth, model.width, model.heads, model.ffn, budget.steps, budget.batch) == (2, 64, 2, 128, 5000, 32)


def test_deep_trees_may_be_shallow_and_narrow():
    found = arena_task("listops(length=12, shortest=3, depth=3, arguments=2, train=50, val=5, test=5)").examples("train")
    assert found.slices["depth"].max() == 2
    assert all(len(x) == 3 for row in found.tokens for x in _operators(tree([WORDS[i] for i in row if i])))


def _operators(node):
    return [] if isinstance(node, int) else [node, *(x for child in node[1:] for x in _operators(child))]


def test_floors_of_listops_are_shares_of_test(small):
    task, test = arena_task(SMALL), small["test"]
    floors = task.floors()
    trees = [tree([WORDS[x] for x in row if x]) for row in test.tokens]
    for k in (1, 2, 3):
        right = sum(value(made, k) == int(target) for made, target in zip(trees, test.targets, strict=True))
        assert floors[f"levels of operators evaluated: {k}"] == pytest.approx(right / 100)
    best = int(small["train"].targets.bincount().argmax())
    assert floors["most frequent label"] == pytest.approx(float((test.targets == best).double().mean()))
    assert floors["most frequent label"] < floors["most frequent label of the root operator"] < 1


FEW = "listops(length=6, shortest=3, depth=2, arguments=2, train=200, val=50, test=50)"  # of 400 trees


@pytest.mark.parametrize("text", [SMALL, FEW])
def test_splits_share_nothing_and_repeat(text):
    task = arena_task(text)
    parts = {part: task.examples(part) for part in ("train", "val", "test")}
    sizes = [getattr(task, part) for part in parts]
    keys = [rows(found) for found in parts.values()]
    assert [len(key) for key in keys] == sizes == [len(found.targets) for found in parts.values()]
    assert len(set.union(*keys)) == sum(sizes)
    again = task.examples("val")
    assert torch.equal(again.tokens, parts["val"].tokens) and torch.equal(again.targets, parts["val"].targets)
    first = task.first_examples("train", 7)
    assert torch.equal(first.tokens, parts["train"].tokens[:7])
    other = type(task)(**{**vars(task), "seed": 2}).examples("val")
    assert rows(other) != keys[1]


def test_splits_are_kept_on_disk_whole_or_not_at_all(tmp_path, monkeypatch, small):
    """Read back bit by bit; another seed is another file; a damaged file is refused; a failed write leaves nothing."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "kept"))
    task = arena_task(SMALL)
    made = task.examples("val")
    (path,) = (tmp_path / "kept").iterdir()
    monkeypatch.setattr(listops.ListOps, "draws", lambda *_: pytest.fail("the split was drawn again"))
    again = task.examples("val")
    for found in (made, again):
        assert all(torch.equal(a, b) for a, b in zip(found[:3], small["val"][:3], strict=True))
        assert {name: x.tolist() for name, x in found.slices.items()} == {n: x.tolist() for n, x in small["val"].slices.items()}
    monkeypatch.undo()
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "kept"))
    assert rows(arena_task(SMALL.replace("train=300", "train=300, seed=2")).examples("val")) != rows(made)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ValueError, match=rf"{path} cannot be read .*: delete it, and it is made again"):
        task.examples("val")
    path.unlink()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        task.examples("val")
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_too_few_different_trees_end_in_a_sentence():
    task = arena_task("listops(length=6, shortest=3, depth=2, arguments=2, train=10000, val=10, test=10)")
    with pytest.raises(ValueError, match=r"has no 10,000 different examples .*: \d+ were found"):
        task.examples("train")
    assert len(task.examples("val").targets) == 10


def test_rows_are_told_apart_up_to_a_count():
    taken = set()
    tokens = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6], [7, 8]], dtype=torch.uint8)
    assert generated_task.new_rows(tokens, taken, 3) == [0, 1, 3]
    assert generated_task.new_rows(tokens, taken) == [4]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("listops(length=5)", "length must be at least 6, not 5"),
        ("listops(length=20, shortest=19)", "shortest must be from 0 to length - 2 = 18, not 19"),
        ("listops(depth=1)", "depth must be from 2 to 100, not 1"),
        ("listops(arguments=101)", "arguments must be from 2 to 100, not 101"),
        ("listops(train=0)", "train must be an integer of at least 1, not 0"),
        ("listops(seed=-1)", "seed must not be below 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        arena_task(text)


@pytest.mark.parametrize("name", ARENA)
def test_every_task_describes_itself(name):
    """Its own name, a title, a source, and options that its text repeats."""
    kind = arena_class(name)
    task = arena_task(name)
    assert kind.name == name and kind.title and kind.source and task.length > 0
    assert arena_task(str(task)) == task


def test_the_catalogue_is_sorted():
    assert list(ARENA) == sorted(ARENA)


def test_shuffled_arguments_keep_the_value(small):
    """Every operator has its arguments as before, in another order; orders are drawn evenly; padding stays."""
    task = arena_task(SMALL.replace("depth=5", "depth=5, shuffled=True"))
    found = small["train"]
    tokens = found.tokens.long()
    mixed, targets = task.augment(tokens, found.targets, torch.Generator().manual_seed(0))
    assert torch.equal(targets, found.targets) and torch.equal(mixed == 0, tokens == 0)
    assert not any(torch.equal(a, b) for a, b in zip(mixed, tokens, strict=True) if len(a.unique()) > 4)
    for before, after in zip(tokens.tolist(), mixed.tolist(), strict=True):
        words = [WORDS[x] for x in after if x]
        assert sorted_tree(tree(words)) == sorted_tree(tree([WORDS[x] for x in before if x])) and words == []
    assert arena_task(SMALL).augment(tokens, targets, None)[0] is tokens


def sorted_tree(node):
    return node if isinstance(node, int) else [node[0], *sorted(map(sorted_tree, node[1:]), key=str)]


def test_every_order_of_arguments_is_as_likely():
    """[MAX 1 [SM 2 3] 4] has six orders of three arguments and two of the inner two: twelve expressions."""
    tokens = torch.tensor([[12, 2, 14, 3, 4, 15, 5, 15, 0]]).expand(6000, -1)
    task = arena_task("listops(length=9, shortest=2, depth=3, shuffled=True)")
    mixed, _ = task.augment(tokens, tokens[:, 0], torch.Generator().manual_seed(1))
    rows, counts = mixed.unique(dim=0, return_counts=True)
    assert len(rows) == 12 and counts.min() > 400 and counts.max() < 600
