"""Probes show what a mechanism really does, facts are what the definitions say, and a picture can be drawn of anything."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch

from regard.analysis.cost import cost
from regard.analysis.probe import sampled
from regard.catalogue import CATALOGUE
from regard.mixers.attend import attend
from regard.mixers.base import Can, Dims
from regard.patterns import Causal, Local
from regard.plots.mechanism_plot import attention_matrix, draw, influence, view
from regard.spec import Spec, core, layer

SPECS = {name: Spec(name, **row.examples[0].options) for name, row in CATALOGUE.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.row.weights and s.name != "longformer"], ids=str)
def test_the_matrix_times_the_values_is_the_output(spec: Spec, causal: bool) -> None:
    if causal and Can.CAUSAL not in spec.row.can:
        return
    torch.manual_seed(0)
    made = core(spec, Dims(width=32, heads=4, causal=causal, max_len=64)).double().eval()
    x, v = torch.randn(2, 2, 4, 40, 8, dtype=torch.float64)
    q, k = sampled(made, x)
    assert torch.allclose(attention_matrix(made, q, k, causal=causal) @ v, attend(q, k, v, made, causal=causal))


def test_the_matrix_of_two_streams_counts_them_together() -> None:
    made = core(SPECS["longformer"], Dims(width=32, heads=4))
    weights = attention_matrix(made, *torch.randn(2, 1, 4, 40, 16), causal=False)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 4, 40))


def test_padding_is_in_neither_rows_nor_columns() -> None:
    valid = torch.arange(12) < 9
    weights = attention_matrix(
        core("softmax", Dims(width=8, heads=1)), *torch.randn(2, 1, 1, 12, 8), causal=False, valid=valid[None]
    )
    assert not weights[0, 0, ~valid].any()
    assert not weights[0, 0, :, ~valid].any()


def test_influence_is_the_norm_of_the_jacobian() -> None:
    torch.manual_seed(0)
    mixer = layer("Local(3)", width=8, heads=2, causal=True).double()
    x = torch.randn(7, 8, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x[None])[0], x)  # (n w n w)
    assert isinstance(jacobian, torch.Tensor)
    found = influence(mixer, x, rows=5)
    assert torch.allclose(found, jacobian.square().sum((1, 3)).sqrt())
    at = torch.arange(7)
    assert torch.equal(found > 0, (Local(3) & Causal())(0, at[:, None], at))


def test_facts_are_what_the_formulas_say() -> None:
    n, w = 256, 64
    known = cost("softmax", n, heads=4, width=w)
    assert known.work.parameters == 4 * (w * w + w)
    assert known.work.flops == 2 * n * 4 * w * w + 2 * 2 * n * n * w
    assert known.work.growth == pytest.approx(2)
    assert known.state is not None
    assert known.state.growth == pytest.approx(1, abs=0.05)
    assert known.state.bytes == pytest.approx(2 * 4 * n * w, rel=0.1)
    assert known.distance is not None
    assert known.distance.to_softmax == pytest.approx(0, abs=1e-5)
    assert known.distance.of_uniform > 0.5


@pytest.mark.parametrize("name", ["softmax", "relu", "linear", "performer"])
def test_a_long_pass_is_counted_as_if_it_had_run(name: str) -> None:
    from regard.analysis.cost import _count_flops, _parabola

    mixer = SPECS[name].build(Dims(width=32, heads=4)).to("meta")
    assert _parabola(lambda n: _count_flops(mixer, n), 4096) == _count_flops(mixer, 4096)


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_growth_is_what_the_catalogue_says(spec: Spec) -> None:
    known, example = cost(spec, 2048, width=32), spec.row.examples[0]
    if known.work.growth:  # nothing to multiply, nothing to grow
        assert known.work.growth == pytest.approx(example.cost, abs=0.2)
    assert (known.state is None) == (example.memory is None)
    if known.state:
        assert known.state.growth == pytest.approx(example.memory, abs=0.2)


def test_a_graph_has_one_length() -> None:
    known = cost("Edges([[0, 1, 2], [1, 2, 0]], loops=True)", 3, heads=2, width=8)
    assert known.work.growth is None
    assert known.state is None
    assert known.pairs is not None
    assert known.pairs.per_head == 6


@pytest.mark.parametrize(
    ("spec", "length", "heads"),
    [
        ("softmax", 1, 1),
        ("rfa(features=4)", 33, 2),
        ("identity", 2, 3),
        ("Local(4) | Global(first=1)", 300, 8),
        ("bigbird(block=4, globals=2, random=1, special='ends')", 16, 2),
        ("Edges([[0, 1, 2], [1, 2, 0]])", 3, 1),
        ("pooled_queries(rate=3)", 20, 4),
        ("fnet", 20, 2),
    ],
)
def test_draws_anything(spec: str, length: int, heads: int) -> None:
    figure = draw(spec, length=length, heads=heads, width=4 * heads, causal=False)
    written = [text.get_text() for text in figure.texts]
    assert str(Spec.of(spec)) in " ".join(written)
    assert any("in cells of 2 x 2" in text for text in written) == (length > 256)  # a pattern is drawn as a whole
    assert not any("Drawn with" in text for text in written)
    file = BytesIO()
    figure.savefig(file)
    assert len(file.getvalue()) > 10_000


def test_a_long_pattern_is_drawn_as_a_whole() -> None:
    """The last tokens see the window and the first token, and nothing in between, in every head."""
    spec = Spec.of("Local(256) | Global(first=16)")
    seen = view(spec, Dims(width=32, heads=4), 4096)
    assert seen.block == 16
    for matrix in seen.matrices.values():
        assert matrix.shape == (256, 256)
        assert matrix[0].eq(1).all() and matrix[:, 0].eq(1).all() and matrix.diagonal().eq(1).all()
        assert not matrix[200, 1:180].any() and not matrix[60, 80:].any()
    assert "Drawn with 256 tokens" in "".join(text.get_text() for text in draw("softmax", length=300, width=32).texts)


def test_facts_repeat_themselves() -> None:
    assert cost("additive(hidden=4)", 16, heads=1, width=8) == cost("additive(hidden=4)", 16, heads=1, width=8)


def test_a_picture_repeats_itself_and_leaves_the_dice_alone() -> None:
    before = torch.get_rng_state()
    first, second = (draw("additive(hidden=4)", length=16, heads=1, width=8).axes[0].images[0].get_array() for _ in range(2))
    assert (first == second).all()
    assert torch.equal(before, torch.get_rng_state())
