"""The byte language model over papers: windows that cover each paper once, splits by paper, n-grams by counting."""

import json
import math
from collections import Counter, defaultdict
from random import Random

import pytest
import torch

from regard.arena.arena_catalogue import arena_task
from regard.arena.arena_task import IGNORED
from regard.arena.papers import ngram_bits, split_texts
from regard.data.text_files import DataError

PARTS = ("train", "val", "test")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = Random(1)
    texts = ["".join(rng.choices("ab cé", k=rng.randint(2, 300))) for _ in range(60)]
    texts += [texts[0], "x"]  # a paper that is there twice, and one without a next byte
    own = tmp_path / "aan_scisumm"
    own.mkdir()
    (own / "docs.jsonl").write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    for part in PARTS:
        (own / f"pairs.{part}.tsv").write_text("label\tdoc1\tdoc2\n0\t1\t2\n")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    return texts


def test_every_paper_is_in_one_split_and_scored_once(folder):
    splits = {part: split_texts(part) for part in PARTS}
    found = [text.decode() for part in PARTS for text in splits[part]]
    assert sorted(found) == sorted(set(folder) - {"x"}) and all(splits.values())
    assert len(splits["train"]) > 3 * len(splits["test"])
    for part in PARTS:
        tokens, targets, lengths, slices = arena_task("papers(length=70)").examples(part)
        assert tokens.dtype == torch.uint8 and targets.dtype == torch.int16 and tokens.shape == targets.shape
        real = torch.arange(70) < lengths[:, None]
        assert torch.equal(targets != IGNORED, real) and torch.equal(tokens != 0, real)
        scored = bytes(targets[targets != IGNORED].tolist())
        assert scored == b"".join(text[1:] for text in splits[part])
        assert torch.equal(tokens[:, 1:][real[:, 1:]].short(), targets[:, :-1][real[:, 1:]])
        assert slices["position"][0].tolist() == [0] * 64 + [64] * 6
    assert len(arena_task("papers(length=70, test=3)").examples("test").tokens) == 3


@pytest.mark.usefixtures("folder")
def test_buckets_of_positions_are_powers_of_two():
    values = arena_task("papers(length=300)").examples("test").slices["position"]
    assert values.unique().tolist() == [0, 64, 128, 256] and values[0, 127] == 64 and values[0, 128] == 128


@pytest.mark.usefixtures("folder")
def test_ngrams_are_counted_on_train_and_scored_on_test():
    task = arena_task("papers(length=50)")
    train, test = task.examples("train"), task.examples("test")
    counts = [defaultdict(Counter) for _ in range(3)]
    sequences = [
        [
            bytes(row[:length].tolist()) + bytes(target[length - 1 : length].tolist())
            for row, target, length in zip(*part[:3], strict=True)
        ]
        for part in (train, test)
    ]
    for window in sequences[0]:
        for place in range(1, len(window)):
            for size in range(min(place, 2) + 1):
                counts[size][window[place - size : place]][window[place]] += 1

    def chance(context, byte):
        own = counts[len(context)][context]
        if not context:
            return (own[byte] + 1) / (sum(own.values()) + 256)
        lower = chance(context[1:], byte)
        return (own[byte] + len(own) * lower) / (sum(own.values()) + len(own)) if own else lower

    expected = [0.0] * 3
    total = sum(len(window) - 1 for window in sequences[1])
    for window in sequences[1]:
        for place in range(1, len(window)):
            for size in range(3):
                expected[size] -= math.log2(chance(window[max(0, place - size) : place], window[place])) / total
    assert ngram_bits(train, test) == pytest.approx(expected)


@pytest.mark.usefixtures("folder")
def test_floors_are_bits_per_byte():
    found = arena_task("papers(length=50)").floors()
    assert list(found) == ["unigrams", "bigrams", "trigrams", "gzip", "lzma"]
    assert 1.5 < found["bigrams"] < found["unigrams"] < 3 and 2 < found["gzip"] < 8 and 2 < found["lzma"] < 8


def test_the_form_is_that_of_a_language_model():
    task = arena_task("papers")
    assert (task.form, task.metric, task.vocab, task.length) == ("next", "bits per token", 256, 8192)
    assert task.budget().steps == 6 * 611 and arena_task("papers(train=80)").budget().steps == 60


def test_missing_papers_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"there is no folder .*aan_scisumm.*scisumm-corpus.*docs.jsonl"):
        arena_task("papers").examples("test")
