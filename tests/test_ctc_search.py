"""CTC search against the sum over all alignments; error rates of words, characters and trials."""

import math
from itertools import groupby, pairwise, product

import pytest
import torch

from regard.decoding.ctc_search import CtcBeam, ctc_greedy, ctc_prefix_beam
from regard.scores import character_errors, edits, equal_error_rate, word_errors
from regard.training.ctc import ctc, same


def by_definition(logs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Sum the probabilities of all paths of every output."""
    found: dict[tuple[int, ...], float] = {}
    for path in product(range(logs.shape[1]), repeat=len(logs)):
        output = tuple(k for k, _ in groupby(path) if k)
        chance = sum(float(logs[t, k]) for t, k in enumerate(path))
        found[output] = found.get(output, 0.0) + math.exp(chance)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_is_the_sum_over_all_alignments(seed):
    torch.manual_seed(seed)
    logs = (2 * torch.randn(5, 3, dtype=torch.float64)).log_softmax(-1)
    expected = by_definition(logs)
    found = ctc_prefix_beam(logs, width=1000, best=1000)
    assert {x.tokens for x in found} == set(expected)
    for x in found:
        assert x.log == pytest.approx(math.log(expected[x.tokens]), abs=1e-9)
    assert found[0].tokens == max(expected, key=expected.__getitem__)
    for x in found[:4]:  # and the loss of training is minus its log
        if x.tokens:
            own = torch.tensor([x.tokens])
            columns = torch.cat([torch.zeros(1, 1, dtype=torch.long), own], 1)
            loss = ctc(logs[None].gather(2, columns[:, None].expand(1, 5, -1)), same(own), torch.tensor([own.shape[1]]))
            assert -loss.item() == pytest.approx(x.log)


def test_a_narrow_beam_is_a_lower_bound_and_the_classes_it_leaves_out_change_nothing():
    torch.manual_seed(1)
    logs = (3 * torch.randn(12, 30, dtype=torch.float64)).log_softmax(-1)
    exact = {x.tokens: x.log for x in ctc_prefix_beam(logs, width=400, best=400)}
    for width in (1, 3, 8):
        for x in ctc_prefix_beam(logs, width=width, best=width):
            assert x.log <= exact.get(x.tokens, 0.0) + 1e-9
    path = ctc_prefix_beam(logs, width=50)[0]
    assert path.log >= max(exact.values()) - 0.05


def test_a_beam_over_parts_is_that_over_the_whole_and_what_all_prefixes_share_stays():
    torch.manual_seed(2)
    logs = (6 * torch.randn(40, 6, dtype=torch.float64)).log_softmax(-1)
    beam, agreed = CtcBeam(5), [()]
    for part in logs.split([7, 1, 0, 20, 12]):
        beam.extend(part)
        agreed.append(beam.agreed())
    assert beam.answers(5) == ctc_prefix_beam(logs, width=5, best=5)
    assert len(agreed[-2]) > 5
    assert all(later[: len(before)] == before for before, later in pairwise([*agreed, beam.answers()[0].tokens]))


def test_prefixes_far_below_the_best_are_given_up_and_tokens_decided_earlier():
    """One of two tokens at first, ten times as likely; then others that are nearly certain."""
    logs = torch.full((6, 6), 1e-3)
    logs[0, 1], logs[0, 2] = 0.9, 0.09
    logs[range(1, 6), [3, 0, 4, 0, 5]] = 0.995
    logs = logs.log()
    wide, narrow = CtcBeam(20), CtcBeam(20, within=2.0)
    wide.extend(logs)
    narrow.extend(logs)
    assert wide.agreed() == () and narrow.agreed() == (1, 3, 4, 5)
    assert wide.answers()[0].tokens == narrow.answers()[0].tokens


def test_the_likeliest_path_may_have_another_output():
    logs = torch.tensor([[0.4, 0.6], [0.4, 0.6]]).log()
    assert ctc_greedy(logs[None], [2]) == [[1]]
    logs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert ctc_greedy(logs[None], [2]) == [[]]
    assert ctc_prefix_beam(logs)[0].tokens == (1,)  # 0.64 of the paths
    assert ctc_greedy(torch.eye(3)[[1, 1, 0, 1, 2, 2]][None], [6]) == [[1, 1, 2]]
    with pytest.raises(ValueError, match="one row"):
        ctc_prefix_beam(logs[None])


def test_error_rates_of_words_and_characters():
    assert word_errors(["a b c", "x"], ["a c", "x y"]) == pytest.approx(100 * 2 / 4)
    assert character_errors(["a  bc"], ["a bd"]) == pytest.approx(25)
    assert word_errors([""], ["a b"]) == 100
    assert edits("kitten", "sitting") == 3
    with pytest.raises(ValueError, match="empty"):
        word_errors([""], [""])


def test_equal_error_rate():
    assert equal_error_rate([3, 2, 1, 0], [True, True, False, False]) == 0
    assert equal_error_rate([0, 1], [True, False]) == 100
    assert equal_error_rate([1, 1, 1, 1], [True, False, True, False]) == pytest.approx(50)
    assert equal_error_rate([4, 3, 2, 1], [True, False, True, False]) == pytest.approx(50)
    with pytest.raises(ValueError, match="both kinds"):
        equal_error_rate([1.0], [True])
