"""Molecules from SMILES by RDKit: atoms, bonds, path lengths, fingerprints and scaffolds; Tox21, and molecules that are drawn.

RDKit is imported when a molecule is parsed, and only then.
"""

from __future__ import annotations

import csv
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from regard.data.locate import file
from regard.data.text_files import DataError, read_lines

ELEMENTS = (
    *("C", "N", "O", "F", "P", "S", "Cl", "Br", "I", "B", "Si", "Se", "Na", "K", "Li", "Ca", "Mg", "Zn", "Sn", "As", "Hg", "Cu"),
    *("Fe", "Co", "Al", "H"),
)
HYBRIDISATIONS = ("SP", "SP2", "SP3")
BOND_TYPES = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
# choices of each number of an atom: element, neighbours, hydrogens, charge, hybridisation, chirality, aromatic, in a ring
ATOM_SIZES = (len(ELEMENTS) + 1, 8, 6, 7, len(HYBRIDISATIONS) + 1, 3, 2, 2)
BOND_CLASSES = 4 * len(BOND_TYPES)  # of a type, conjugated or not, in a ring or not
UNCONNECTED = 255
MOST_ATOMS = 1000  # of a molecule that is read: its shortest paths take seconds, and cubically more for larger ones
FINGERPRINT_BITS = 2048
TOX21_LABELS = (
    *("NR-AR", "NR-AR-LBD", "NR-AhR", "NR-Aromatase", "NR-ER", "NR-ER-LBD", "NR-PPAR-gamma", "SR-ARE", "SR-ATAD5", "SR-HSE"),
    *("SR-MMP", "SR-p53"),
)
MOTIF_LABELS = ("nitrogen", "ring", "near")


class Molecule(NamedTuple):
    """Hold a molecule of n heavy atoms as numbers."""

    atoms: np.ndarray  # uint8 (n, 8): a choice of each of ATOM_SIZES
    bonds: np.ndarray  # uint8 (n, n): 0 where there is none, else 1 + type + 4 conjugated + 8 in a ring
    paths: np.ndarray  # uint8 (n, n): bonds of the shortest path, UNCONNECTED where there is none


class LabelledMolecule(NamedTuple):
    """Hold the SMILES of a molecule and its labels: 0, 1, or None where it was not measured."""

    smiles: str
    labels: tuple[int | None, ...]
    parsed: Any  # a molecule of RDKit


class MoleculeSplits(NamedTuple):
    """Hold molecules of train, val and test, and what was left out on the way."""

    train: list[LabelledMolecule]
    val: list[LabelledMolecule]
    test: list[LabelledMolecule]
    names: tuple[str, ...]  # of the labels
    left_out: tuple[str, ...] = ()  # SMILES that RDKit refuses
    conflicts: int = 0  # labels that rows of the same molecule do not agree on, taken as not measured


@cache
def _rdkit() -> Any:
    """Import what is used of RDKit."""
    try:
        from rdkit import Chem, rdBase
        from rdkit.Chem import rdFingerprintGenerator
        from rdkit.Chem.Scaffolds import MurckoScaffold
    except ModuleNotFoundError:
        raise ModuleNotFoundError("molecules need RDKit: pip install 'regard[molecules]', or rdkit", name="rdkit") from None
    prints = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=FINGERPRINT_BITS)
    return Chem, rdBase, prints, MurckoScaffold


def _parsed(smiles: str) -> Any:
    """Parse SMILES into a molecule of RDKit; None where it refuses."""
    chem, base, _, _ = _rdkit()
    with base.BlockLogs():
        found = chem.MolFromSmiles(smiles.strip())
    return found if found is not None and found.GetNumAtoms() else None


def parse_smiles(smiles: str) -> Any:
    """Parse SMILES into a molecule of RDKit; raises ValueError where it refuses, or where there are too many atoms."""
    found = _parsed(smiles)
    if found is None:
        raise ValueError(f"{smiles.strip()[:60]!r} is not SMILES of a molecule that RDKit accepts, such as CCO")
    if found.GetNumAtoms() > MOST_ATOMS:
        raise ValueError(f"{smiles.strip()[:60]!r}... has {found.GetNumAtoms():,} atoms, but at most {MOST_ATOMS:,} are read")
    return found


def molecule(found: Any) -> Molecule:
    """Convert a molecule of RDKit to numbers."""
    count = found.GetNumAtoms()
    atoms = np.array([_atom(atom) for atom in found.GetAtoms()], np.uint8)
    bonds = np.zeros((count, count), np.uint8)
    for bond in found.GetBonds():
        i, j, kind = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), str(bond.GetBondType())
        number = BOND_TYPES.index(kind) if kind in BOND_TYPES else 0
        bonds[i, j] = bonds[j, i] = 1 + number + 4 * bond.GetIsConjugated() + 8 * bond.IsInRing()
    paths = np.minimum(_rdkit()[0].GetDistanceMatrix(found), UNCONNECTED).astype(np.uint8)
    return Molecule(atoms, bonds, paths)


def _atom(atom: Any) -> tuple[int, ...]:
    element, hybridisation, chirality = atom.GetSymbol(), str(atom.GetHybridization()), str(atom.GetChiralTag())
    found = (
        ELEMENTS.index(element) if element in ELEMENTS else len(ELEMENTS),
        atom.GetDegree(),
        atom.GetTotalNumHs(),
        min(max(atom.GetFormalCharge(), -3), 3) + 3,
        HYBRIDISATIONS.index(hybridisation) if hybridisation in HYBRIDISATIONS else len(HYBRIDISATIONS),
        2 if chirality.endswith("CCW") else int(chirality.endswith("CW")),
        int(atom.GetIsAromatic()),
        int(atom.IsInRing()),
    )
    return tuple(min(number, size - 1) for number, size in zip(found, ATOM_SIZES, strict=True))


def fingerprints(molecules: Sequence[Any]) -> np.ndarray:
    """Compute Morgan fingerprints of radius 2 of molecules of RDKit, (n, 2048) of 0 and 1, as float32. Rogers and Hahn 2010."""
    prints = _rdkit()[2]
    return np.array([prints.GetFingerprintAsNumPy(found) for found in molecules], np.float32).reshape(-1, FINGERPRINT_BITS)


def similarities(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the Tanimoto similarity of fingerprints (n, bits) and (m, bits), |a and b| / |a or b|: (n, m)."""
    both = a @ b.T
    either = a.sum(1)[:, None] + b.sum(1) - both
    return both / np.maximum(either, 1)


def scaffold(found: Any) -> str:
    """Compute the Bemis-Murcko scaffold as SMILES: rings and what joins them; "" without a ring. Bemis and Murcko 1996."""
    return _rdkit()[3].MurckoScaffoldSmiles(mol=found, includeChirality=False)


def group_split(groups: Sequence[Hashable], train: float = 0.8, val: float = 0.1) -> tuple[list[int], list[int], list[int]]:
    """Split examples by their groups, such as scaffolds, without chance: large groups are train, small ones val and then test.

    No group is in two splits, so that test has what train lacks. The scaffold split of MoleculeNet, arXiv:1703.00564.
    """
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    first: list[int] = []
    second: list[int] = []
    third: list[int] = []
    for own in sorted(places.values(), key=lambda own: (-len(own), own[0])):
        if len(first) + len(own) <= train * len(groups):
            first += own
        elif len(first) + len(second) + len(own) <= (train + val) * len(groups):
            second += own
        else:
            third += own
    return first, second, third


def read_tox21(folder: Path) -> MoleculeSplits:
    """Read tox21.csv, split by scaffold; rows of one SMILES text are one molecule, and a blank was not measured."""
    path = file(folder, "tox21.csv")
    merged: dict[str, list[set[int]]] = {}
    for number, row in enumerate(csv.DictReader(read_lines(path)), 2):
        if missing := [name for name in ("smiles", *TOX21_LABELS) if row.get(name) is None]:
            raise DataError(f"{path}, line {number}: no {missing[0]} in this row")
        known = merged.setdefault(row["smiles"].strip(), [set() for _ in TOX21_LABELS])
        for name, values in zip(TOX21_LABELS, known, strict=True):
            if row[name] not in ("", "0", "1", "0.0", "1.0"):
                raise DataError(f"{path}, line {number}: {name} is 0, 1 or empty, not {row[name]!r}")
            if row[name]:
                values.add(int(row[name][0]))
    if not merged:
        raise DataError(f"{path} has no molecules in it")
    parsed = {smiles: _parsed(smiles) for smiles in merged}
    refused = tuple(smiles for smiles, found in parsed.items() if found is None)
    rows = [
        LabelledMolecule(smiles, tuple(next(iter(x)) if len(x) == 1 else None for x in known), parsed[smiles])
        for smiles, known in merged.items()
        if parsed[smiles] is not None
    ]
    conflicts = sum(len(values) > 1 for known in merged.values() for values in known)
    first, second, third = ([rows[place] for place in own] for own in group_split([scaffold(row.parsed) for row in rows]))
    return MoleculeSplits(first, second, third, TOX21_LABELS, refused, conflicts)


def drawn_molecules(train: int = 1000, val: int = 100, test: int = 200, *, seed: int = 1) -> MoleculeSplits:
    """Draw chains of carbon with groups on them: is there nitrogen, is there a ring, is nitrogen within three bonds of oxygen?

    The third label is one of distances: what the groups are does not decide it. A tenth of all labels is blank.
    """
    rng = Random(seed)
    found: dict[str, tuple[int | None, ...]] = {}
    while len(found) < train + val + test:
        smiles, labels = _drawn_molecule(rng)
        found[smiles] = tuple(None if rng.random() < 0.1 else label for label in labels)
    rows = [LabelledMolecule(smiles, labels, parse_smiles(smiles)) for smiles, labels in found.items()]
    return MoleculeSplits(rows[:train], rows[train : train + val], rows[train + val :], MOTIF_LABELS)


def _drawn_molecule(rng: Random) -> tuple[str, tuple[int, ...]]:
    """Write a chain whose carbons have side groups: a place for oxygen, often one for nitrogen, perhaps one for a ring."""
    length = rng.randint(8, 12)
    oxygen, other, ring = rng.sample(range(length), 3)
    if rng.random() < 0.4:  # side by side
        oxygen, other, ring = rng.choice(((1, 2, 4), (3, 2, 0), (4, 5, 7), (6, 5, 2)))
    sides = {oxygen: "O", other: rng.choice(("N", "N", "F", "Cl")), ring: rng.choice(("c1ccccc1", "C1CCCCC1", "CCC", "C"))}
    sides |= {place: "C" for place in range(length) if place not in sides and rng.random() < 0.25}
    smiles = "".join(f"C({sides[place]})" if place in sides else "C" for place in range(length))
    nitrogen = sides[other] == "N"
    near = nitrogen and abs(oxygen - other) == 1
    return smiles, (int(nitrogen), int("1" in sides[ring]), int(near))
