"""Labels of molecules, several for each, of which some were not measured: toxicity of SMILES."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.checks import need
from regard.data.batch import NO_LABEL, Batch
from regard.data.locate import find
from regard.data.molecules import (
    ATOM_SIZES,
    BOND_CLASSES,
    UNCONNECTED,
    LabelledMolecule,
    Molecule,
    MoleculeSplits,
    drawn_molecules,
    fingerprints,
    molecule,
    parse_smiles,
    read_tox21,
    similarities,
)
from regard.mixers.base import Dims
from regard.models.molecule_transformer import MoleculeTransformer
from regard.options import check_choice
from regard.scores import mean_roc_auc
from regard.tasks.graph_config import MoleculeLabels
from regard.tasks.support import device_under, evaluating, in_order, kept_labels, learned
from regard.tasks.task import Task
from regard.training.learnable import Step
from regard.training.losses import Loss, binary_cross_entropy

INFERENCE_ATOMS = 8192  # of a batch when nothing is kept for a backward pass
NEIGHBOURS = 10  # molecules of train that the floor takes labels from


class MoleculeExample(NamedTuple):
    """Hold a molecule as numbers, and its labels with NO_LABEL where it was not measured."""

    molecule: Molecule
    labels: list[int]


class MoleculeLabelsTask(Task):
    """Several labels of 0 or 1 for every molecule; scored by the mean area under the ROC curve of the labels, from 0 to 100.

    The floor takes the labels of the most similar molecules of train, by fingerprints; chance has 50.
    """

    best = ("roc_auc", "max")
    bodies = ()
    config: MoleculeLabels

    def __init__(self, config: MoleculeLabels) -> None:
        super().__init__(config)
        check_choice("mixer", config.mixer if isinstance(config.mixer, str) else str(config.mixer), ("softmax",))
        check_choice("norm", config.norm, ("pre",))
        need("paths", config.paths, 0, UNCONNECTED - 1)
        self.names: list[str] | None = None
        self.floors: dict[str, float] = {}
        self.parts: MoleculeSplits | None = None

    def unused(self) -> dict[str, str]:
        return super().unused() | dict.fromkeys(("positions", "max_len", "share", "smoothing"), "sequences of tokens")

    def data(self, folder: Path | None) -> MoleculeSplits:
        """Read the molecules and their splits."""
        return read_tox21(find("tox21", folder))

    def read(self, folder: Path | None = None) -> None:
        self.parts = self.data(folder)
        self.names = list(self.parts.names)
        rows = {"train": self.parts.train, "val": self.parts.val, "test": self.parts.test}
        self.splits = {name: [_example(x) for x in own] for name, own in rows.items()}
        self.floors = neighbour_floors(rows)
        self.sample = self.parts.val[0].smiles

    def describe_data(self) -> list[str]:
        parts = learned(self.parts)
        counts = ", ".join(f"{len(own):,} {name}" for name, own in self.splits.items())
        known = [label for own in self.splits.values() for x in own for label in x.labels if label != NO_LABEL]
        lines = [f"molecules: {counts}; {len(known):,} labels of {len(parts.names)} kinds, {sum(known):,} of them 1"]
        if parts.left_out:
            lines.append(f"left out: {len(parts.left_out)} molecules that RDKit refuses, such as {parts.left_out[0]}")
        if parts.conflicts:
            lines.append(f"taken as not measured: {parts.conflicts} labels that rows of one molecule do not agree on")
        floors = " and ".join(f"{value:.1f} on {name}" for name, value in self.floors.items())
        return [*lines, f"floor: labels of the {NEIGHBOURS} most similar molecules of train have a ROC-AUC of {floors}"]

    def assets(self) -> dict[str, str]:
        return {"labels.json": json.dumps(learned(self.names))}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.names = kept_labels(assets, "labels.json")

    def size(self, example: MoleculeExample) -> int:
        return len(example.molecule.atoms)

    def batch(self, examples: Sequence[MoleculeExample]) -> Batch:
        longest, many = max(map(self.size, examples)), len(examples)
        atoms = np.zeros((many, longest, len(ATOM_SIZES)), np.int64)
        pairs = np.zeros((many, longest, longest), np.int64)
        valid = np.zeros((many, longest), bool)
        for row, (found, _) in enumerate(examples):
            count = len(found.atoms)
            atoms[row, :count], valid[row, :count] = found.atoms, True
            pairs[row, :count, :count] = self._pair_classes(found)
        target = torch.tensor([x.labels for x in examples])
        mask = None if valid.all() else torch.from_numpy(valid)
        return Batch(torch.from_numpy(atoms), mask, target, extra={"pairs": torch.from_numpy(pairs)})

    def _pair_classes(self, found: Molecule) -> np.ndarray:
        """Return the class of every pair of atoms (n n): its path up to `paths` (all further ones alike), or its bond."""
        config = self.config
        apart = found.paths == UNCONNECTED
        classes = np.where(apart, config.paths + 1, np.minimum(found.paths, config.paths)).astype(np.int64)
        if not config.bonds:
            return classes
        return np.where(found.bonds > 0, config.paths + 1 + found.bonds, classes)

    def model(self) -> MoleculeTransformer:
        config = self.config
        return MoleculeTransformer(
            ATOM_SIZES,
            config.paths + 2 + BOND_CLASSES,
            len(learned(self.names)),
            dims=Dims(config.width, config.heads, dropout=config.weight_dropout),
            depth=config.depth,
            ffn=config.ffn,
            activation=config.activation,
            gated=config.gated,
            dropout=config.dropout,
        )

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        return binary_cross_entropy(_scores(model, batch), batch.target)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        examples = self.splits[split]
        truth = np.array([x.labels for x in examples])
        found = {"roc_auc": mean_roc_auc(np.array(self._logits(model, examples)), truth)}
        return {**found, "floor": self.floors[split], "molecules": float(len(examples))}

    def _logits(self, model: nn.Module, examples: Sequence[MoleculeExample]) -> list[list[float]]:
        def answer(part: list[MoleculeExample]) -> list[list[float]]:
            return _scores(model, self.batch(part).to(device_under(model))).float().tolist()

        with evaluating(model):
            return in_order(examples, self.size, INFERENCE_ATOMS, answer)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Answer SMILES by the probability of every label: "NR-AR 0.02, NR-AhR 0.71"."""
        names = learned(self.names)
        coded = [MoleculeExample(molecule(parse_smiles(line)), [NO_LABEL] * len(names)) for line in lines if line.strip()]
        found = iter(self._logits(model, coded))
        return [_answer(names, next(found)) if line.strip() else "" for line in lines]


class MotifsTask(MoleculeLabelsTask):
    """Labels of molecules that are drawn: what is in them, and how far apart."""

    def data(self, folder: Path | None) -> MoleculeSplits:  # noqa: ARG002 - made, not read
        return drawn_molecules()


def _example(x: LabelledMolecule) -> MoleculeExample:
    return MoleculeExample(molecule(x.parsed), [NO_LABEL if label is None else label for label in x.labels])


def _scores(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.source, batch.extra["pairs"], batch.source_valid)


def _answer(names: Sequence[str], logits: Sequence[float]) -> str:
    shares = torch.tensor(logits).sigmoid().tolist()
    return ", ".join(f"{name} {share:.2f}" for name, share in zip(names, shares, strict=True))


def neighbour_floors(parts: Mapping[str, Sequence[LabelledMolecule]]) -> dict[str, float]:
    """Compute the ROC-AUC on val and test of labels of similar molecules: the mean of the nearest, weighed by similarity.

    Of each label, the nearest are molecules of train that were measured for it.
    """
    prints = {name: fingerprints([x.parsed for x in own]) for name, own in parts.items()}
    truth = {name: np.array([[NO_LABEL if y is None else y for y in x.labels] for x in own]) for name, own in parts.items()}
    found = {}
    for split in ("val", "test"):
        near = similarities(prints[split], prints["train"])
        scores = np.zeros(truth[split].shape)
        for label, known in enumerate((truth["train"] != NO_LABEL).T):
            own, values = torch.from_numpy(near[:, known]), truth["train"][known, label]
            weights, best = (x.numpy() for x in own.topk(min(NEIGHBOURS, own.shape[1])))
            scores[:, label] = (weights * values[best]).sum(1) / np.maximum(weights.sum(1), 1e-9)
        found[split] = mean_roc_auc(scores, truth[split])
    return found
