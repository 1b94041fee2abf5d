"""Tasks of the arena that are read from data sets: small sets of our own, and the real ones where they are."""

import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.arena import read_task, retrieval, trivial_floors
from regard.arena.arena_catalogue import arena_task
from regard.arena.arena_task import Examples
from regard.arena.split_cache import cached_floors
from regard.compare import own_code
from regard.data.datasets import Splits
from regard.data.locate import find
from regard.data.paper_pairs import LabelledPair
from regard.data.text_files import DataError

PARTS = ("train", "val", "test")
PAPERS = {f"P{number:02d}": f"paper {number} about topic{'abcdef'[number % 6]} " * 3 for number in range(60)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Reviews whose label is in their last word, citations inside of topics, images whose label is their gray level."""
    root = tmp_path_factory.mktemp("data")
    reviews = [{"text": f"review {i} été {'x' * (i % 50)} {['bad', 'good'][i % 2]}", "label": i % 2} for i in range(3200)]
    (root / "imdb").mkdir()
    for part, own in {"train": reviews[:2700], "test": reviews[2690:]}.items():  # ten are in both
        (root / "imdb" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, own)))
    (root / "aan_scisumm").mkdir()
    lines = [json.dumps({"id": name, "text": text}) for name, text in PAPERS.items()]
    (root / "aan_scisumm" / "docs.jsonl").write_text("\n".join(lines))
    rng, names = np.random.default_rng(0), list(PAPERS)
    pairs = [tuple(rng.choice(60, 2, replace=False)) for _ in range(600)]
    rows = [f"{int(a % 6 == b % 6)}\t{names[a]}\t{names[b]}" for a, b in pairs]
    turned = ["\t".join([x.split("\t")[0], *x.split("\t")[:0:-1]]) for x in rows[500:510]]
    for part, own in {"train": rows[:400] + turned, "val": rows[400:500], "test": rows[500:]}.items():
        (root / "aan_scisumm" / f"pairs.{part}.tsv").write_text("\n".join(["label\tdoc1\tdoc2", *own]) + "\n")
    (root / "cifar10").mkdir()
    labels = np.arange(300, dtype=np.uint8) % 10
    images = (labels[:, None, None] * 20 + rng.integers(0, 40, (300, 32, 32))).astype(np.uint8)
    images[3] = images[250]  # one of train is in test too
    for part, own in {"train": slice(0, 200), "test": slice(200, 300)}.items():
        for what, array in {"images": images[own], "labels": labels[own]}.items():
            with lzma.open(root / "cifar10" / f"gray_{part}_{what}.npy.xz", "wb", preset=0) as file:
                np.save(file, array)
    return root


@pytest.fixture(autouse=True)
def here(data, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(data))


def keys(found: Examples) -> set[bytes]:
    return {row.numpy().tobytes() for row in found.tokens}


def test_text_is_bytes_in_splits_that_share_nothing():
    task = arena_task("text(length=40)")
    parts = {part: task.examples(part) for part in PARTS}
    assert [len(found.targets) for found in parts.values()][2] == 510
    assert len(parts["train"].targets) + len(parts["val"].targets) == 2690
    assert not keys(parts["train"]) & keys(parts["test"]) and not keys(parts["train"]) & keys(parts["val"])
    assert not keys(parts["val"]) & keys(parts["test"])
    first = parts["test"]
    text = f"review 2690 été {'x' * 40} bad".encode()[:40]
    assert bytes(first.tokens[0].numpy()) == text and first.tokens.dtype == torch.uint8
    assert int(first.lengths[0]) == 40 and int(first.targets[1]) == 1
    short = int(first.lengths.argmin())
    assert not first.tokens[short, first.lengths[short] :].any() and first.tokens[short, : first.lengths[short]].all()
    assert torch.equal(first.slices["bytes"], 2 ** first.lengths.float().log2().floor().int())


def test_some_examples_are_a_fixed_choice():
    task = arena_task("text(train=20, val=10, test=30)")
    found = {part: task.examples(part) for part in PARTS}
    assert [len(x.targets) for x in found.values()] == [20, 10, 30]
    assert keys(found["test"]) < keys(arena_task("text").examples("test"))
    assert torch.equal(found["test"].tokens, task.examples("test").tokens)
    assert set(found["train"].targets.tolist()) == {0, 1}
    with pytest.raises(ValueError, match=r"test=600 is more than text has: 510 examples"):
        arena_task("text(test=600)").examples("test")


def test_read_splits_are_kept_until_the_files_change(data, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "kept"))
    task = arena_task("retrieval(length=20)")
    made = task.examples("val")
    with monkeypatch.context() as without:
        without.setattr(retrieval, "read_papers", lambda _: pytest.fail("the papers were read again"))
        again = task.examples("val")
    assert all(torch.equal(a, b) for a, b in zip(made[:3], again[:3], strict=True)) and list(again.slices) == ["papers in train"]
    (data / "aan_scisumm" / "more.txt").write_text("x")
    task.examples("val")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_floors_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    assert cached_floors("text(x=1)", lambda: {"chance": 0.5}) == {"chance": 0.5}
    assert cached_floors("text(x=1)", lambda: pytest.fail("they were computed again")) == {"chance": 0.5}
    assert cached_floors("text(x=2)", lambda: {"chance": 0.25}) == {"chance": 0.25}
    for path in tmp_path.iterdir():
        path.write_text("[")
    with pytest.raises(DataError, match=r"cannot be read .*: delete it, and it is made again"):
        cached_floors("text(x=1)", dict)


def test_floors_of_text():
    floors = arena_task("text(length=100)").floors()
    assert floors["most frequent label"] == pytest.approx(0.5, abs=0.01)
    assert floors["4-grams of bytes in it, naive Bayes"] > 0.95
    assert floors["bytes counted, ridge regression"] > 0.95


def test_a_text_with_padding_in_it_is_refused():
    assert read_task.text_bytes("aéb", 2, "here") == "aé".encode()[:2]
    with pytest.raises(DataError, match="here: a text has a NUL character in it"):
        read_task.text_bytes("a\0b", 3, "here")


def pairs_of(found: Examples) -> set[frozenset[bytes]]:
    return {frozenset(x.numpy().tobytes() for x in pair) for pair in found.tokens}


@pytest.mark.parametrize("split", ["pairs", "documents"])
def test_pairs_of_papers_are_in_one_split_in_either_order(split):
    task = arena_task(f"retrieval(length=20, split={split!r})")
    parts = {part: task.examples(part) for part in PARTS}
    assert task.form == "pair" and parts["train"].tokens.shape[1:] == (2, 20) and parts["train"].lengths.shape[1:] == (2,)
    sets = [pairs_of(found) for found in parts.values()]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
    papers = [frozenset().union(*own) for own in sets]
    seen = parts["test"].slices["papers in train"]
    if split == "documents":
        assert not papers[0] & papers[1] and not papers[0] & papers[2] and not papers[1] & papers[2]
        assert not seen.any()
    else:
        assert papers[0] & papers[2] and len(parts["test"].targets) == 100
        assert seen.tolist() == [sum(x.numpy().tobytes() in papers[0] for x in pair) for pair in parts["test"].tokens]
    for pair, label in zip(parts["test"].tokens, parts["test"].targets, strict=True):
        first, second = (int(bytes(x.numpy()).split()[1]) % 6 for x in pair)
        assert int(label) == (first == second)


def test_floors_of_retrieval():
    floors = arena_task("retrieval").floors()
    assert floors["words in common, tf-idf cosine"] == 1
    assert floors["most frequent label"] > 0.7
    small = arena_task("retrieval(length=8)").floors()  # "paper 12"
    assert small["words in common, tf-idf cosine"] < 1


def test_papers_that_are_always_cited_betray_the_label():
    train = [LabelledPair(1, "hub", f"x{i}") for i in range(9)] + [LabelledPair(0, f"y{i}", f"x{i}") for i in range(9)]
    test = [LabelledPair(1, "new", "hub"), LabelledPair(0, "y1", "new"), LabelledPair(0, "new", "other")]
    odds = retrieval.paper_odds(train, test)
    assert odds[0] > 0 > odds[1] and odds[2] == 0
    own = retrieval.paper_odds(train, train)
    assert own[0] == pytest.approx(np.log(9) + np.log(1 / 2))  # without itself
    assert retrieval.split_papers(Splits(train, [], [])) == retrieval.split_papers(Splits([], train, []))


def test_images_are_sequences_of_pixels():
    task = arena_task("image")
    parts = {part: task.examples(part) for part in PARTS}
    assert [len(found.targets) for found in parts.values()] in ([179, 20, 100], [180, 19, 100])  # one was in test too
    assert len(set.union(*map(keys, parts.values()))) == 299
    for found in parts.values():
        assert found.tokens.dtype == torch.uint8 and found.lengths is None
        assert torch.equal(found.tokens.float().mean(1).sub(20).div(20).round().long(), found.targets)
        assert torch.equal(found.slices["class"].long(), found.targets)
    with lzma.open(find("cifar10") / "gray_test_images.npy.xz") as file:
        raw = np.load(file)
    assert torch.equal(parts["test"].tokens[7].view(32, 32), torch.from_numpy(raw[7]))
    floors = task.floors()
    assert floors["most frequent label"] == 0.1 and floors["nearest mean"] == 1
    assert 0.5 < floors["random Fourier features, ridge regression"] <= 1


@pytest.mark.parametrize(
    ("name", "what"),
    [("text", "imdb is IMDB reviews"), ("retrieval", "aan_scisumm is papers"), ("image", "cifar10 is CIFAR-10 in gray")],
)
def test_missing_data_is_a_sentence(name, what, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"there is no folder .*{what}.* from https://.* Put .* into {tmp_path}"):
        arena_task(name).examples("test")
    monkeypatch.delenv("REGARD_DATA")
    with pytest.raises(DataError, match=rf"{what}.* name the folder above it by REGARD_DATA"):
        arena_task(name).floors()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("text(length=0)", "length must be an integer of at least 1"),
        ("text(train=-1)", r"train must be 0 \(all examples\) or more, not -1"),
        ('retrieval(split="papers")', "split cannot be 'papers'"),
    ],
)
def test_options_that_make_no_sense_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        arena_task(text)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("pairs.val.tsv", "label\tdoc1\n", r"line 1: 2 columns instead of label, doc1, doc2"),
        ("pairs.val.tsv", "doc1\tdoc2\tlabel\n", r"line 1: the columns must be label, doc1, doc2, not doc1"),
        ("pairs.val.tsv", "label\tdoc1\tdoc2\n2\tP01\tP02\n", r"line 2: the label must be 0 or 1, not '2'"),
        ("pairs.val.tsv", "label\tdoc1\tdoc2\n1\tP01\tP99\n", r"line 2: docs.jsonl has no paper 'P99'"),
        ("docs.jsonl", '{"id": "P01", "text": "a"}\n' * 2, r"line 2: 'P01' is there twice"),
    ],
)
def test_damaged_pairs_are_refused_with_their_line(file, text, sentence, data, tmp_path, monkeypatch):
    folder = tmp_path / "aan_scisumm"
    folder.mkdir()
    for path in (data / "aan_scisumm").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / file).write_text(text)
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=sentence):
        arena_task("retrieval").examples("val")


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.zeros(99, np.uint8), r"images of test are \(100, 32, 32\) and labels \(99,\)"),
        (np.full(100, 10, np.uint8), "labels of test go up to 10, not to 9"),
        (np.zeros(100, np.int64), "holds int64, not uint8"),
        (np.array([{}]), "is not a whole .npy file: it holds no plain numbers"),
        (None, "is not a whole .npy file"),
    ],
)
def test_damaged_images_are_refused(labels, sentence, data, tmp_path, monkeypatch):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for path in (data / "cifar10").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "gray_test_labels.npy.xz").unlink()
    if labels is None:
        (folder / "gray_test_labels.npy").write_bytes(b"\x93NUMPY")
    else:
        np.save(folder / "gray_test_labels.npy", labels, allow_pickle=True)
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=sentence):
        arena_task("image").examples("test")


def test_thresholds_and_nearest_means():
    scores, labels = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.9]), torch.tensor([0, 0, 1, 1, 1])
    assert trivial_floors.threshold(scores, labels, torch.tensor([0.24, 0.26, 0.05]), torch.tensor([0, 1, 0])) == 1
    assert trivial_floors.threshold(-scores, labels, torch.tensor([-0.24, -0.26, -0.05]), torch.tensor([0, 1, 0])) == 1
    assert trivial_floors.threshold(torch.ones(4), torch.tensor([1, 1, 1, 0]), torch.ones(2), torch.tensor([1, 0])) == 0.5
    assert trivial_floors.threshold(torch.ones(3), torch.tensor([0, 0, 1]), torch.ones(2), torch.tensor([0, 0])) == 1
    mixed = torch.tensor([0, 1, 0, 1, 1, 1, 1])
    assert trivial_floors.threshold(torch.arange(7.0), mixed, torch.arange(7.0), mixed) == pytest.approx(6 / 7)
    x = torch.tensor([[0.0, 0.0], [0.0, 2.0], [5.0, 1.0]])
    near = trivial_floors.nearest_mean(x, torch.tensor([0, 0, 1]), torch.tensor([[2.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1]))
    assert near == 1


def test_naive_bayes_counts_a_token_once():
    tokens, lengths = torch.tensor([[1, 2, 0, 0]] * 3 + [[3, 2, 0, 0]] * 2), torch.full((5,), 2)
    train = Examples(tokens, torch.tensor([0, 0, 0, 1, 1]), lengths)
    test = Examples(torch.tensor([[1, 3, 3, 3], [3, 3, 9, 9]]), torch.tensor([0, 1]), torch.tensor([4, 2]))
    assert trivial_floors.token_bayes(train, test, 1, buckets=1 << 19) == 1


REAL = Path(os.environ.get("REGARD_DATA") or "/nowhere")


@pytest.mark.skipif(not (REAL / "aan_scisumm").is_dir(), reason="needs aan_scisumm in REGARD_DATA")
def test_the_real_pairs(monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(REAL))
    found = arena_task('retrieval(length=64, split="documents")').examples("test")
    assert len(found.targets) == 779 and int(found.targets.sum()) == 392


@pytest.mark.parametrize("kind", ["GeneratedTask", "ReadTask"])
def test_a_changed_task_of_your_own_is_drawn_again(kind, tmp_path, monkeypatch):
    """The code of a task that is not of the arena is a part of what its splits are kept under."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "kept"))
    (tmp_path / "data" / "imdb").mkdir(parents=True)
    for part in ("train", "test"):
        (tmp_path / "data" / "imdb" / f"{part}.jsonl").write_text("{}")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "data"))
    found = {}
    for label in (1, 2, 1):
        path = tmp_path / f"own_{label}.py"
        path.write_text(OWN_TASK.format(kind=kind, module=OWN_MODULES[kind], label=label))
        found[label] = own_code.read_task("mine", (str(path),)).examples("test").targets.unique().tolist()
    assert found == {1: [1], 2: [2]} and len(list((tmp_path / "kept").iterdir())) == 2


OWN_MODULES = {"GeneratedTask": "generated_task", "ReadTask": "read_task"}
OWN_TASK = """
from dataclasses import dataclass
import torch
from regard.arena.arena_task import Examples
from regard.arena.{module} import {kind}


@dataclass(frozen=True)
class Mine({kind}):
    name = "mine"
    needs = "imdb" if "{kind}" == "ReadTask" else ""
    length, vocab, classes = 8, 100, 3
    test: int = 4

    def read_examples(self, part):
        return Examples(torch.arange(8 * 4).view(4, 8), torch.full((4,), {label}))

    def draws(self, generator):
        yield self.read_examples("")
"""
