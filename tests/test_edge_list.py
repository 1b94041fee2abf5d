"""Lists of pairs say the same as the plain predicate, and are remembered within bounds."""

import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

import regard.cache as remember
from pattern_strategies import graphs, head_patterns
from regard import Local
from regard.patterns.edge_list import edge_list
from regard.patterns.tiles import Span

CPU = torch.device("cpu")


@given(head_patterns, st.integers(0, 40), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30), st.booleans())
@budget(max_examples=100)
def test_listed_pairs_are_those_of_the_predicate(p, n, m, t, u, causal):
    p = p.for_head(0, 1)
    i, j = torch.arange(t, t + n)[:, None], torch.arange(u, u + m)
    want = p.bound(n, m)(0, i, j).expand(n, m) if n and m else torch.zeros(n, m, dtype=torch.bool)
    want = want & (i >= j) if causal else want
    assert torch.equal(edge_list(p, Span(t, n, u, m), causal, CPU), want.nonzero().T)


@given(graphs(), graphs(), st.booleans())
@budget(max_examples=30)
def test_listed_edges_are_the_edges(a, b, causal):
    for p in (a, a | b, a & b, a & Local(5), a | Local(2)):
        want = p(0, torch.arange(20)[:, None], torch.arange(20)).expand(20, 20)
        want = want.tril() if causal else want
        assert torch.equal(edge_list(p, Span(0, 20, 0, 20), causal, CPU), want.nonzero().T)


def test_lists_are_remembered_within_bounds(monkeypatch):
    calls = []

    @remember.bounded_cache(torch.numel)
    def count(n):
        calls.append(n)
        return torch.zeros(n)

    monkeypatch.setattr(remember, "MAX_ELEMENTS", 100)
    for n in (40, 50, 40, 60, 40, 50, 1000, 1000, 40):
        count(n)
    assert calls == [40, 50, 60, 50, 1000, 40]
