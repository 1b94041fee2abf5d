"""Batches: every example once, none too large, and the number of a step says it all."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.length_buckets import Batches

SIZES = st.lists(st.integers(0, 300), max_size=200)


@given(SIZES, st.integers(300, 1000), st.integers(0, 2**40), st.integers(0, 5), st.booleans())
def test_every_example_is_in_one_batch_of_an_epoch_and_no_batch_is_too_large(sizes, most, seed, epoch, shuffle):
    batches = Batches(sizes, most, seed, shuffle)
    found = batches.epoch(epoch)
    assert sorted(index for batch in found for index in batch) == list(range(len(sizes)))
    assert all(batch and len(batch) * max(sizes[index] for index in batch) <= most for batch in found)
    assert len(found) == len(batches)


@given(SIZES.filter(bool), st.integers(0, 9), st.integers(0, 200))
def test_a_batch_depends_on_seed_and_step_alone(sizes, seed, step):
    walked = Batches(sizes, 300, seed)
    for before in range(0, step, 17):
        walked.at(before)
    random.seed(step)
    np.random.seed(step)
    state = random.getstate(), np.random.get_state()[1].tolist()
    fresh = Batches(sizes, 300, seed)
    assert fresh.at(step) == walked.at(step) == fresh.epoch(step // len(fresh))[step % len(fresh)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 400))
def test_what_is_larger_than_a_batch_stands_alone_or_is_refused(sizes, most):
    large = {index for index, size in enumerate(sizes) if size > most}
    if large:
        with pytest.raises(ValueError, match=rf"example {sizes.index(max(sizes))} has .*\(alone=True\)"):
            Batches(sizes, most)
    for batch in Batches(sizes, most, alone=True).epoch(0):
        assert len(batch) == 1 if large & set(batch) else len(batch) * max(sizes[index] for index in batch) <= most


def test_an_epoch_has_its_own_order_and_its_own_company_even_where_no_two_sizes_are_the_same():
    sizes = list(range(100, 1100))
    batches = Batches(sizes, 8000, seed=3)
    first, second = batches.epoch(0), batches.epoch(1)
    company = [{frozenset(batch) for batch in epoch} for epoch in (first, second)]
    assert len(company[0] & company[1]) < len(first) / 10
    assert first != Batches(sizes, 8000, seed=4).epoch(0)
    means = [np.mean([sizes[index] for index in batch]) for batch in first]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3  # not from short to long


def test_examples_of_a_batch_are_of_a_similar_size_so_that_little_is_padding():
    dice = random.Random(0)
    sizes = [max(1, int(dice.lognormvariate(2.6, 0.5))) for _ in range(5000)]
    batches = Batches(sizes, 2048).epoch(0)
    room = sum(len(batch) * max(sizes[index] for index in batch) for batch in batches)
    assert sum(sizes) / room > 0.96
    assert len(batches) < 1.1 * sum(sizes) / 2048


def test_without_shuffling_every_epoch_is_the_same_from_short_to_long():
    batches = Batches([5, 1, 3, 1], 6, shuffle=False)
    assert batches.epoch(0) == batches.epoch(7) == [[1, 3], [2], [0]]
    assert [batches.at(step) for step in (0, 3, 5)] == [[1, 3], [1, 3], [0]]


def test_batches_of_nothing_and_bad_numbers_are_sentences():
    assert len(Batches([], 10)) == 0 and Batches([], 10).epoch(0) == []
    for work, sentence in [
        (lambda: Batches([], 10).at(0), "there are no examples"),
        (lambda: Batches([1], 0), "batch_tokens must be at least 1, not 0"),
        (lambda: Batches([1], 10, seed=-1), "the seed must not be below 0"),
        (lambda: Batches([-1], 10), "none of them below 0"),
        (lambda: Batches([1.5], 10), "one whole number for each example"),
        (lambda: Batches([[1]], 10), "one whole number for each example"),
        (lambda: Batches([1], 10).at(-1), "steps are counted from 0"),
        (lambda: Batches([1], 10).epoch(-1), "epochs are counted from 0"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            work()
