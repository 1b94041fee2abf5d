"""Hypothesis strategies for patterns: any expression a user could write."""

from hypothesis import strategies as st

from regard.patterns import (
    Blocks,
    Causal,
    Columns,
    Dilated,
    Edges,
    Everything,
    Global,
    Local,
    Neighbourhood,
    PerHead,
    Random,
    Rows,
    Stride,
    Tail,
    Truncated,
)

small = st.integers(1, 9)
specials = st.fixed_dictionaries(
    {"first": st.integers(0, 3), "at": st.lists(st.integers(0, 90), max_size=3).map(tuple), "last": st.sampled_from([0, 0, 2])}
).filter(lambda options: any(options.values()))


def tails(size: int):
    return st.builds(Tail, st.just(size), st.integers(1, size))


atoms = st.one_of(
    st.builds(Local, st.integers(1, 90)),
    st.builds(Truncated, st.integers(0, 40), st.integers(0, 40)),
    st.builds(Dilated, small, small),
    st.builds(Stride, st.integers(1, 40)),
    st.builds(Blocks, st.integers(1, 150), st.integers(0, 2)),
    st.builds(Neighbourhood, st.integers(1, 20), st.integers(0, 3), st.none() | st.integers(0, 4), st.integers(0, 3)),
    specials.map(lambda o: Global(**o)),
    specials.map(lambda o: Rows(**o)),
    specials.map(lambda o: Columns(**o)),
    st.integers(1, 20).flatmap(tails),
    st.builds(Random, st.integers(1, 4), st.integers(1, 20), st.integers(0, 5), st.booleans(), st.booleans()),
    st.just(Causal()),
    st.just(Everything()),
)


def combined(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(pairs.map(lambda p: p[0] | p[1]), pairs.map(lambda p: p[0] & p[1]))


head_patterns = st.recursive(atoms, combined, max_leaves=5)
patterns = st.one_of(
    head_patterns,
    st.lists(head_patterns, min_size=2, max_size=2).map(PerHead),
    st.tuples(st.lists(head_patterns, min_size=2, max_size=2), atoms).map(lambda p: PerHead(p[0]) | p[1]),
)


@st.composite
def graphs(draw, nodes: int = 20):
    edges = draw(st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=60))
    return Edges([[j for j, _ in edges], [i for _, i in edges]], nodes=nodes, loops=draw(st.booleans()))
