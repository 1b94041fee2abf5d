"""Labels of the nodes of a graph: the published layers, the task on a drawn graph, and Cora where it is there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import DEVICE, close
from regard import Edges, load
from regard.cli.model_check import check_model
from regard.cli.settings import check_used
from regard.data.labelled_graph import LabelledGraph, drawn_communities, graph_of_json, read_cora
from regard.data.text_files import DataError
from regard.mixers.graph_layer import GraphConvolution
from regard.models.node_classifier import NodeClassifier
from regard.tasks import config, make_task
from regard.tasks.node_labels import NodeLabelsTask, propagated_labels
from regard.training.fit import fit
from test_faults import remembered

SMALL = LabelledGraph([[0, 2], [1], [2, 3], [], [0]], 4, [[0, 1], [1, 2], [3, 4]], [0, 1, 0, 1, 1], ["a", "b"])
FEW = {"width": 8, "heads": 2, "steps": 12, "validate_every": 4, "save_every": 4}


def tiny(name: str = "communities", **changes: object) -> NodeLabelsTask:
    made = make_task(config(name).replace(FEW | changes))
    assert isinstance(made, NodeLabelsTask)
    return made


def test_a_convolution_is_the_published_product() -> None:
    """D^-1/2 A D^-1/2 x W with dense matrices, and its gradients."""
    edges = Edges(torch.randint(9, (2, 14), generator=torch.Generator().manual_seed(0)), nodes=9, both=True, loops=True)
    layer = GraphConvolution(5, 3, pattern=edges).to(DEVICE, torch.float64)
    torch.nn.init.normal_(layer.bias)
    j, i = edges.index
    a = torch.zeros(9, 9, dtype=torch.float64, device=DEVICE)
    a[i, j] = 1
    scale = a.sum(1).rsqrt()
    x = torch.randn(2, 9, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    fast, slow = layer(x), (scale[:, None] * a * scale) @ (x @ layer.w.weight.T) + layer.bias
    up, wanted = torch.randn_like(fast), (x, *layer.parameters())
    close(fast, slow, 1e-6)  # its weights are float32
    for one, two in zip(*(torch.autograd.grad((y * up).sum(), wanted) for y in (fast, slow)), strict=True):
        close(one, two, 1e-6)
    with pytest.raises(ValueError, match="the graph has 9 nodes"):
        layer(x[:, :4])
    with pytest.raises(ValueError, match="needs Edges"):
        GraphConvolution(5, 3, pattern="Local(2)")  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", ["gat", "gcn"])
def test_words_are_read_as_rows_of_their_shares(layers: str) -> None:
    """The first layer sums rows of its map by word; the definition is a product with a dense matrix of shares."""
    torch.manual_seed(0)
    model = NodeClassifier(SMALL, layers=layers, width=6, heads=2).eval().to(DEVICE)
    x = torch.zeros(1, 5, 4, device=DEVICE)
    for node, own in enumerate(SMALL.words):
        for word in own:
            x[0, node, word] = 1 / len(own)
    first, second = model.layers
    slow = second(model.bend(first(x)))[0]
    close(model(), slow, 1e-5)
    for one, two in zip(*(torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (model(), slow)), strict=True):
        close(one, two, 1e-5)


def test_the_last_heads_are_averaged_and_the_penalty_is_that_of_the_papers() -> None:
    gat, gcn = (NodeClassifier(SMALL, layers=name, width=6, heads=2, out_heads=3) for name in ("gat", "gcn"))
    assert gat.layers[-1].dims.heads == 3 and gat().shape == gcn().shape == (5, 2)
    assert [p.shape for p in gcn.penalised()] == [(6, 4)] and len(list(gat.penalised())) == len(list(gat.parameters())) == 8
    made = tiny(l2=0.5)
    made.read()
    model, plain = made.model().eval(), tiny(l2=0.0)
    plain.read()
    batch = made.batch(made.splits["train"])
    squares = sum(float(p.detach().square().sum()) for p in model.parameters())
    more = made.loss(model, batch, 1).mean - plain.loss(model, batch, 1).mean
    assert more.item() == pytest.approx(squares / 4, rel=1e-4)


def test_it_learns_what_neither_words_nor_edges_give_and_answers(tmp_path: Path) -> None:
    made = tiny(width=32, heads=4, steps=60, validate_every=20)
    made.read()
    fit(made, tmp_path / "run", accelerator="cpu", quiet=True)
    trained = load(tmp_path / "run", device="cpu")
    found = trained.evaluate("test")
    assert found["floor"] < 30 < found["propagation"] < found["accuracy"] and found["accuracy"] > 75
    graph = made.graph
    assert graph is not None
    near = [b if a == 9 else a for a, b in graph.edges if 9 in (a, b)]
    words = " ".join(map(str, graph.words[9]))
    cites = " ".join(map(str, near))
    lines = ["0", f"cites {cites} words {words}", f"words {words}", f"cites {cites}"]
    answers = trained.predict(lines)
    assert set(answers) <= set(graph.names) and answers == [trained.predict([line])[0] for line in lines]
    for line, match in (
        ("600", "there is no node 600: they go from 0 to 599"),
        ("cites 1 600", "there is no node 600"),
        ("words 400", "there is no word 400: they go from 0 to 399"),
        ("a b c", "'a b c' is no node: a line is the number of a node"),
        ("cites words", "nothing to be read"),
    ):
        with pytest.raises(ValueError, match=match):
            trained.predict([line])


def test_an_interrupted_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    for name, parts in (("whole", [12]), ("parts", [4, 12])):
        for steps in parts:
            made = tiny(steps=steps)
            made.read()
            fit(made, tmp_path / name, accelerator="cpu", quiet=True)
    assert remembered(tmp_path / "parts") == remembered(tmp_path / "whole")


def test_labels_spread_along_edges() -> None:
    assert propagated_labels(SMALL, [0, 3]) == [0, 0, 0, 1, 1]


def test_a_drawn_graph_is_the_same_every_time_and_its_splits_are_apart() -> None:
    first, nodes = drawn_communities(seed=3)
    assert (first, nodes) == tuple(drawn_communities(seed=3)) and first != drawn_communities(seed=4).graph
    assert sorted(node for own in nodes.values() for node in own) == list(range(600)) and len(nodes["train"]) == 40
    assert graph_of_json(first.to_json()) == first
    with pytest.raises(ValueError, match=r"graph\.json holds no graph"):
        graph_of_json('{"words": 1}')


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mixer": "softmax"}, "mixer cannot be 'softmax'"),
        ({"mixer": ["gat", "gcn"]}, "has one mixer for all layers, gat or gcn"),
        ({"width": 9}, "width 9 is not divisible by 2 heads"),
        ({"l2": -1.0}, "l2 must not be below 0"),
        ({"dropout": 1.5}, "dropout must be"),
    ],
)
def test_a_sentence_for_wrong_settings(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tiny(**changes)


def test_settings_of_blocks_and_of_attention_are_refused_where_they_do_nothing() -> None:
    check_model(tiny())
    check_used(tiny(), ["heads=2"])
    with pytest.raises(ValueError, match="ffn does nothing here: it is for models of blocks"):
        check_used(tiny(), ["ffn=8"])
    with pytest.raises(ValueError, match="out_heads does nothing here: it is for mixer=gat"):
        check_used(tiny(mixer="gcn"), ["out_heads=2"])


def save_cora(folder: Path, **changes: object) -> Path:
    """Write a citation graph of five papers as Cora's file has it."""
    arrays = {
        "indptr": [0, 2, 3, 5, 5, 6],
        "indices": [0, 2, 1, 2, 3, 0],
        "data": [1] * 6,
        "shape": [5, 4],
        "label": [0, 1, 0, 1, 1],
        "edges": [[0, 1], [1, 2], [3, 4]],
        "train_idx": [0, 3],
        "val_idx": [1],
        "test_idx": [2, 4],
    }
    folder.mkdir(exist_ok=True)
    np.savez(folder / "cora.npz", **{name: np.array(x) for name, x in {**arrays, **changes}.items() if x is not None})
    return folder


def test_a_file_of_cora_is_read_or_refused_by_name(tmp_path: Path) -> None:
    graph, nodes = read_cora(save_cora(tmp_path / "planetoid"))
    assert (graph.words, graph.edges, graph.labels) == (SMALL.words, SMALL.edges, SMALL.labels)
    assert nodes == {"train": [0, 3], "val": [1], "test": [2, 4]}
    for changes, match in (
        ({"label": None}, r"cora\.npz has no array label"),
        ({"label": [0, 1, 0, 1, 7]}, "labels go from 0 to 6, but one is 7"),
        ({"edges": [[0, 5]]}, "edges go from 0 to 4, but one is 5"),
        ({"indices": [0, 2, 1, 2, 4, 0]}, "words go from 0 to 3, but one is 4"),
        ({"data": [2] * 6}, "data that is all 1"),
        ({"test_idx": [9]}, "test_idx names papers that are not there"),
        ({"indptr": [0, 2, 3, 5, 4, 6]}, "indptr does not cut 6 words into those of 5 papers"),
        ({"indptr": [0, 2, 3, 5, 5, 5]}, "indptr does not cut"),
        ({"indptr": [1, 2, 3, 5, 5, 6]}, "indptr does not cut"),
        ({"indices": [0.5, 2, 1, 2, 3, 0]}, r"indices has float64 of shape \(6,\), not whole numbers"),
        ({"label": [[0, 1, 0, 1, 1]]}, r"label has int64 of shape \(1, 5\)"),
        ({"edges": [0, 1]}, r"edges has int64 of shape \(2,\), not whole numbers of shape \(2, 2\)"),
        ({"edges": [[0, 1, 2]]}, r"edges has int64 of shape \(1, 3\)"),
        ({"shape": [5]}, r"shape has int64 of shape \(1,\)"),
        ({"shape": [5, 0]}, r"shape is \[5, 0\]"),
        ({"data": [1] * 5}, "with 6 indices and 5 data"),
        ({"train_idx": 0}, r"train_idx has int64 of shape \(\)"),
    ):
        with pytest.raises(DataError, match=match):
            read_cora(save_cora(tmp_path / "planetoid", **changes))
    (tmp_path / "planetoid" / "cora.npz").write_bytes(b"PK\3\4 cut off")
    with pytest.raises(DataError, match=r"cora\.npz is not a whole \.npz file"):
        read_cora(tmp_path / "planetoid")
    (tmp_path / "planetoid" / "cora.npz").write_text("no array at all")  # NumPy would propose to load it as a pickle
    with pytest.raises(DataError, match=r"not a whole \.npz file: it holds no plain numbers"):
        read_cora(tmp_path / "planetoid")


@pytest.mark.skipif("REGARD_DATA" not in os.environ, reason="set REGARD_DATA to the folder that has planetoid/")
def test_cora_is_as_published() -> None:
    made = tiny("cora")
    made.read()
    graph = made.graph
    assert graph is not None
    assert (len(graph.words), graph.vocabulary, len(graph.edges)) == (2708, 1433, 5278)
    assert {name: len(own) for name, own in made.splits.items()} == {"train": 140, "val": 500, "test": 1000}
    assert "71.5 % of test" in made.describe_data()[2]
