"""`attend` with queries that are only some of the tokens: where they are in the sequence of the keys, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from conftest import DEVICE, Case, close, law_test
from regard import Dims, Places, attend, core, laws
from regard.positions import positions


def moves_no_query(case: Case) -> bool:
    """Whether the answer to a query depends on its position, or on the others."""
    core = case.core()
    return core.positional or core.joint


test_some_queries_get_what_all_get = law_test(laws.some_queries_get_what_all_get)
test_a_core_tells_whether_positions_matter = law_test(laws.positions_are_declared)
test_what_is_ambiguous_is_refused = law_test(laws.ambiguity_is_refused)
test_permuted_queries_get_permuted_answers = law_test(laws.permuted_queries, unfit=moves_no_query)


def test_one_query_is_the_newest_of_a_window() -> None:
    q, k, v = (torch.randn(2, 4, 101, 16, dtype=torch.float64) for _ in range(3))
    window = core("Local(16)", Dims(64, 4))
    near = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k[:, :, -16:], v[:, :, -16:])
    for causal in (False, True):
        close(attend(q[:, :, -1:], k, v, window, causal=causal, offset=100), near)
    behind = attend(q[:, :, -1:], k[:, :, :100], v[:, :, :100], window, offset=100)  # its own key is not among them
    close(behind, torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k[:, :, 85:100], v[:, :, 85:100]))
    valid = torch.arange(101) < torch.tensor([[101], [60]])
    behind = attend(q[:, :, -1:], k, v, window, valid=valid, offset=101)  # as in a prompt with padding behind it
    close(behind[1], attend(q[1:, :, -1:], k[1:, :, :60], v[1:, :, :60], window, offset=60)[0])


@pytest.mark.parametrize("offset", [-1, True, 1.0, "3"])
def test_an_offset_is_an_index(offset: object) -> None:
    q, k, v = (torch.randn(1, 4, 9, 16) for _ in range(3))
    with pytest.raises(ValueError, match="offset must be an integer from 0 on"):
        attend(q, k, v, core("softmax", Dims(64, 4)), offset=offset)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["softmax", "Local(4)", "linear", "PerHead([Local(2), Local(9)])", "additive", "performer"])
@pytest.mark.parametrize(
    ("dims", "built"),
    [
        (Dims(32, 4), "4 heads with queries of 8 and keys of 8"),
        (Dims(64, 4), "4 heads with queries of 16 and keys of 16"),
        (Dims(128, 8), "8 heads with queries of 16 and keys of 16"),
    ],
)
def test_heads_are_those_that_the_core_was_built_for(spec: str, dims: Dims, built: str) -> None:
    """One of fewer heads left the answers of the others as they lay in memory, and its plan to cores of as many."""
    q, k, v = (torch.randn(2, 8, 20, 8) for _ in range(3))
    right = core(spec, Dims(64, 8))
    with pytest.raises(ValueError, match=f"was built for {built}: build one with {re.escape('Dims(width=64, heads=8)')}"):
        attend(q, k, v, core(spec, dims))
    assert attend(q, k, v, right).shape == v.shape


@pytest.mark.parametrize("near", [0, 1, 2])
def test_strides_that_stay_near_are_there_for_later_queries(near: int) -> None:
    """A core that is built for both ways is asked in the causal form, from some token on."""
    q, k, v = (torch.randn(2, 2, 29, 8, dtype=torch.float64) for _ in range(3))
    own = core(f"compressed(rate=3, near={near})", Dims(16, 2)).double()
    whole = attend(q, k, v, own, causal=True)
    for first in (1, 10, 24, 28):
        close(attend(q[:, :, first:], k, v, own, causal=True, offset=first), whole[:, :, first:])


def test_queries_beyond_the_positions_of_cosformer_are_refused_where_rows_differ_too() -> None:
    q, k, v = (torch.randn(2, 2, 8, 8) for _ in range(3))
    own = core("cosformer", Dims(16, 2, max_len=10))
    for valid in (None, torch.ones(2, 8, dtype=torch.bool), torch.arange(8) < torch.tensor([[8], [5]])):
        with pytest.raises(ValueError, match="cosformer was built for max_len=10"):
            attend(q, k, v, own, offset=50, valid=valid)


def test_what_cannot_go_on_from_a_memory_says_so() -> None:
    q, k, v = (torch.randn(1, 4, 32, 16) for _ in range(3))
    drawn = core("Random(2, 4)", Dims(64, 4, causal=True))
    with pytest.raises(ValueError, match=r"cannot do stream: .* so give a query for each of the 32 keys"):
        attend(q[:, :, 30:], k, v, drawn, causal=True, offset=30)


def test_positions_that_add_to_scores_make_a_core_positional() -> None:
    dims = Dims(64, 4)
    own = core("softmax", dims)
    assert not own.positional
    own.honour(positions("alibi", dims))
    assert own.positional


@pytest.mark.parametrize("spec", ["softmax", "retention", "Local(4)"])
def test_all_tokens_at_once_keep_no_memory(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal pass over all tokens is the one that layers use, which writes no memory for later."""
    made = core(spec, Dims(16, 2, causal=True)).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 9, 8, device=DEVICE) for _ in range(3))
    expected = made.scan(made.unwritten(k, v), q, k, v, Places.of(k[:, 0]))[0]
    seen = []
    whole = made.scan_all
    monkeypatch.setattr(made, "scan_all", lambda *given: seen.append(spec) or whole(*given))
    close(attend(q, k, v, made, causal=True), expected)
    assert seen == [spec]
