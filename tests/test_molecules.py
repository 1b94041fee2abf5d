"""Labels of molecules: SMILES as numbers, the graph transformer against its definition, blanks, scores, splits and answers."""

from __future__ import annotations

import gzip
import os
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import DEVICE, close
from regard.data import molecules
from regard.data.batch import NO_LABEL
from regard.data.molecules import TOX21_LABELS, UNCONNECTED, drawn_molecules, group_split, parse_smiles, read_tox21, similarities
from regard.data.text_files import DataError
from regard.mixers.base import Dims
from regard.models.molecule_transformer import MoleculeTransformer, PairBiasAttention
from regard.scores import mean_roc_auc, roc_auc
from regard.tasks import config, make_task
from regard.tasks.molecule_labels import MoleculeLabelsTask
from regard.training.fit import fit
from regard.training.losses import binary_cross_entropy
from test_faults import remembered


@pytest.fixture
def rdkit() -> None:
    pytest.importorskip("rdkit", reason="molecules need RDKit: pip install 'regard[molecules]'")


def few(**changes: object) -> MoleculeLabelsTask:
    small = {"width": 8, "heads": 2, "depth": 1, "ffn": 8, "steps": 6, "validate_every": 3, "save_every": 3, "warmup": 2}
    made = make_task(config("motifs").replace(small | changes))
    assert isinstance(made, MoleculeLabelsTask)
    return made


# without RDKit


def test_attention_adds_a_number_for_every_pair() -> None:
    torch.manual_seed(0)
    layer = PairBiasAttention(Dims(8, 2), 5).to(DEVICE, torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64, device=DEVICE, requires_grad=True)
    pairs = torch.randint(5, (2, 6, 6), device=DEVICE)
    valid = torch.ones(2, 6, dtype=torch.bool, device=DEVICE)
    valid[1, 4:] = False
    q, k, v = (part.view(2, 6, 2, 4).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    scores = q @ k.mT / 2 + layer.pair_embedding.weight[pairs].permute(0, 3, 1, 2)
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
    slow = layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) * valid[..., None]
    fast, wanted = layer(x, pairs, valid), (x, *layer.parameters())
    close(fast, slow)
    up = torch.randn_like(fast)
    for one, two in zip(*(torch.autograd.grad((y * up).sum(), wanted) for y in (fast, slow)), strict=True):
        close(one, two)


def test_the_order_of_atoms_and_padding_do_not_matter() -> None:
    torch.manual_seed(0)
    model = MoleculeTransformer([3, 2], 4, 5, dims=Dims(8, 2), depth=2, ffn=8).to(DEVICE, torch.float64).eval()
    atoms, pairs = torch.randint(2, (1, 6, 2), device=DEVICE), torch.randint(4, (1, 6, 6), device=DEVICE)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=DEVICE)
    found = model(atoms, pairs)
    close(found, model(atoms[:, order], pairs[:, order][:, :, order]))
    wide = torch.zeros(1, 9, 2, dtype=torch.long, device=DEVICE)
    wide_pairs = torch.zeros(1, 9, 9, dtype=torch.long, device=DEVICE)
    wide[:, :6], wide_pairs[:, :6, :6] = atoms, pairs
    close(found, model(wide, wide_pairs, torch.arange(9, device=DEVICE)[None] < 6))
    pairs[0, 1, 2] = 3 - pairs[0, 1, 2]
    assert (model(atoms, pairs) - found).abs().max() > 1e-9


def test_a_blank_counts_neither_in_the_loss_nor_in_the_score() -> None:
    scores = torch.tensor([[2.0, -1.0], [0.5, 3.0]], requires_grad=True)
    loss = binary_cross_entropy(scores, torch.tensor([[1, NO_LABEL], [0, 1]]))
    p = scores.detach().sigmoid()
    assert loss.over == 3
    assert loss.total.item() == pytest.approx(-(p[0, 0].log() + (1 - p[1, 0]).log() + p[1, 1].log()).item())
    loss.total.backward()
    assert scores.grad is not None and scores.grad[0, 1] == 0
    with pytest.raises(ValueError, match="need as many labels"):
        binary_cross_entropy(scores, torch.tensor([1, 0]))
    labels = np.array([[1, NO_LABEL], [0, 1], [1, 1], [NO_LABEL, 1]])
    assert mean_roc_auc(np.array([[2.0, 0], [1, 0], [0, 0], [9, 0]]), labels) == 50  # the second has one label alone


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(5, size=40).astype(float), rng.integers(2, size=40)
    ones, zeros = scores[labels == 1], scores[labels == 0]
    share = np.mean([(a > b) + 0.5 * (a == b) for a, b in product(ones, zeros)])
    assert roc_auc(scores, labels) == pytest.approx(100 * share) and roc_auc(scores, labels * 0) is None
    assert mean_roc_auc(np.zeros((2, 1)), np.ones((2, 1))) == 50


def test_no_group_is_in_two_splits_and_large_ones_are_train() -> None:
    groups = list("aaaabbbccdefghijklmn")
    parts = group_split(groups)
    assert sorted(place for own in parts for place in own) == list(range(len(groups)))
    kinds = [{groups[place] for place in own} for own in parts]
    assert not kinds[0] & kinds[1] and not kinds[1] & kinds[2] and {"a", "b", "c"} <= kinds[0]
    assert [len(own) for own in parts] == [16, 2, 2]


def test_without_rdkit_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    molecules._rdkit.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"molecules need RDKit: pip install 'regard\[molecules\]'"):
        parse_smiles("CCO")


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"mixer": "gla"}, "mixer cannot be 'gla'"), ({"norm": "post"}, "norm cannot be 'post'"), ({"paths": -1}, "paths must be")],
)
def test_a_sentence_for_wrong_settings(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        few(**changes)


# with it


@pytest.mark.usefixtures("rdkit")
def test_a_molecule_is_its_atoms_bonds_and_paths() -> None:
    ethanol = molecules.molecule(parse_smiles("CCO"))
    assert ethanol.paths.tolist() == [[0, 1, 2], [1, 0, 1], [2, 1, 0]] and ethanol.bonds.tolist() == [
        [0, 1, 0],
        [1, 0, 1],
        [0, 1, 0],
    ]
    assert ethanol.atoms[:, 0].tolist() == [0, 0, 2] and ethanol.atoms[:, 2].tolist() == [3, 2, 1]  # elements, hydrogens
    ring = molecules.molecule(parse_smiles("c1ccccc1"))
    assert set(ring.bonds[ring.bonds > 0].tolist()) == {1 + 3 + 4 + 8} and ring.atoms[:, 6].all() and ring.paths.max() == 3
    salt = molecules.molecule(parse_smiles("[Na+].[Cl-]"))
    assert salt.paths[0, 1] == UNCONNECTED and salt.atoms[:, 3].tolist() == [4, 2]
    left, right = (molecules.molecule(parse_smiles(text)).atoms[:, 5].max() for text in ("C[C@H](N)O", "C[C@@H](N)O"))
    assert {left, right} == {1, 2}
    for wrong in ("C(", "hello", "c1ccccc", ""):
        with pytest.raises(ValueError, match="is not SMILES of a molecule"):
            parse_smiles(wrong)
    assert molecules.scaffold(parse_smiles("CCOc1ccccc1")) == "c1ccccc1" and molecules.scaffold(parse_smiles("CCO")) == ""
    prints = molecules.fingerprints([parse_smiles(text) for text in ("CCO", "CCO", "c1ccccc1")])
    near = similarities(prints, prints)
    assert near[0, 1] == 1 and near[0, 2] < 0.1 and prints.shape == (3, 2048)


@pytest.mark.usefixtures("rdkit")
def test_pairs_are_classes_of_paths_or_bonds() -> None:
    found = molecules.molecule(parse_smiles("CCCO.C"))
    assert few(paths=2)._pair_classes(found)[0].tolist() == [0, 4, 2, 2, 3]
    assert few(paths=2, bonds=False)._pair_classes(found)[0].tolist() == [0, 1, 2, 2, 3]
    assert few(paths=0, bonds=False)._pair_classes(found)[0].tolist() == [0, 0, 0, 0, 1]


@pytest.fixture
def drawn(rdkit: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    some = drawn_molecules(60, 12, 12)
    monkeypatch.setattr("regard.tasks.molecule_labels.drawn_molecules", lambda: some)


@pytest.mark.usefixtures("drawn")
def test_it_trains_answers_and_goes_on_as_an_undisturbed_run(tmp_path: Path) -> None:
    for name, parts in (("whole", [6]), ("parts", [3, 6])):
        for steps in parts:
            made = few(steps=steps, schedule="constant")
            made.read()
            fit(made, tmp_path / name, accelerator="cpu", quiet=True)
    assert remembered(tmp_path / "parts") == remembered(tmp_path / "whole")
    from regard import load

    run = load(tmp_path / "whole", device="cpu")
    scores = run.evaluate("test")
    assert set(scores) == {"roc_auc", "floor", "molecules"} and scores["floor"] > 50
    answers = run.predict(["CCO", "", "c1ccccc1N"])
    assert answers[1] == "" and answers[0].startswith("nitrogen 0.") and answers[0].count(",") == 2
    assert run.predict(["c1ccccc1N"]) == answers[2:]
    with pytest.raises(ValueError, match="line 2: 'C1CC' is not SMILES of a molecule"):
        run.predict(["CCO", "C1CC"])
    with pytest.raises(ValueError, match=r"has 1,001 atoms, but at most 1,000 are read"):  # of 9,000, paths would take minutes
        run.predict(["C" * 1001])


@pytest.mark.usefixtures("rdkit")
def test_drawn_molecules_are_the_same_every_time_and_blank_in_places() -> None:
    first, again = drawn_molecules(20, 5, 5), drawn_molecules(20, 5, 5)
    rows, others = ([x[:2] for part in found[:3] for x in part] for found in (first, again))
    assert rows == others and len({smiles for smiles, _ in rows}) == 30
    assert {label for _, labels in rows for label in labels} == {0, 1, None}


@pytest.mark.usefixtures("rdkit")
def test_rows_of_one_molecule_are_merged_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    def written(*rows: str, head: str = ",".join((*TOX21_LABELS, "mol_id", "smiles"))) -> Path:
        with gzip.open(tmp_path / "tox21.csv.gz", "wt") as out:
            out.write("\n".join((head, *rows)) + "\n")
        return tmp_path

    blank = "," * 10
    rows = (f"1,0{blank},a,CCO", f"1,1{blank},b,CCO", f",{blank},c,CC(", f"0,{blank},d,c1ccccc1")
    found = read_tox21(written(*rows))
    every = {x.smiles: x.labels for x in (*found.train, *found.val, *found.test)}
    assert every == {"CCO": (1, *[None] * 11), "c1ccccc1": (0, *[None] * 11)}
    assert found.left_out == ("CC(",) and found.conflicts == 1 and found.names == TOX21_LABELS
    with pytest.raises(DataError, match=r"tox21\.csv\.gz, line 3: NR-AR is 0, 1 or empty, not '2'"):
        read_tox21(written(rows[0], f"2,{blank},a,CCO"))
    with pytest.raises(DataError, match="line 2: no smiles in this row"):
        read_tox21(written("1,CCO", head="NR-AR,SMILES"))
    with pytest.raises(DataError, match="has no molecules in it"):
        read_tox21(written())


@pytest.mark.usefixtures("rdkit")
@pytest.mark.skipif("REGARD_DATA" not in os.environ, reason="set REGARD_DATA to the folder that has tox21/")
def test_tox21_is_there_with_its_twelve_labels() -> None:
    path = Path(os.environ["REGARD_DATA"]) / "tox21" / "tox21.csv.gz"
    with gzip.open(path, "rt") as lines:
        assert set(TOX21_LABELS) < set(next(lines).strip().split(","))
