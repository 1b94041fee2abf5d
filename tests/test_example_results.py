"""Facts about structure that the examples show: order, recurrence, graphs. Checked here in numbers, not only run."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def shown(name):
    """What an example works out, without its printing and saving."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


def test_attention_without_positions_is_blind_to_order():
    example = shown("permutation")
    found = example["deviations"]()
    blind = {name for name, (without, _) in found.items() if without < 1e-9}
    assert {"softmax", "additive", "relu", "identity", "linear", "efficient", "rfa", "performer"} <= blind
    ordered = {"sparse", "longformer", "bigbird", "sparse_transformer", "gat", "conv", "rnn", "linformer", "sinkhorn"}
    assert not blind & ordered and ordered <= set(found)
    assert all(without < 1e-9 or without > 1e-3 for without, _ in found.values())  # one or the other, never nearly
    assert all(told > 1e-3 for _, told in found.values())  # with positions everybody knows
    assert len(example["draw"](found).axes[0].get_yticklabels()) == len(found)


def test_a_sinusoid_says_where():
    wave = shown("permutation")["sinusoid"](64, 16)
    assert wave.shape == (64, 16) and torch.equal(wave[0], torch.tensor([0.0, 1.0] * 8, dtype=torch.float64))
    assert torch.cdist(wave, wave).fill_diagonal_(1).min() > 0.1  # no two places are alike


@pytest.mark.parametrize(("spec", "grows"), [("softmax", True), ("linear", False)])
def test_causal_kernels_are_recurrent_networks(spec, grows):
    sizes, errors, by_hand = shown("rnn_view")["stream"](spec)
    assert max(errors) < 1e-12
    assert (sizes[-1] > 100 * sizes[0]) == grows and (len(set(sizes)) == 1) != grows
    assert (by_hand is None) == grows and (by_hand is None or by_hand < 1e-12)


def test_attention_on_a_graph_is_the_masked_dense_form():
    example = shown("graph_view")
    assert set(example["differences"]) == {"outputs", "weights", "gradients"}
    assert max(example["differences"].values()) < 1e-12
    edges, along = example["edges"], example["along"]
    sums = torch.zeros(14, 4, dtype=torch.float64).index_add(0, edges[1], along.detach())
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert len(example["draw"]().axes) == 3
