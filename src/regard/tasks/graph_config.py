"""Settings of tasks on graphs and molecules."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class NodeLabels(Config):
    """Labels of the nodes of one graph."""

    mixer: str | list[str] = "gat"  # gat: the published graph attention; gcn: graph convolution, whose weights are of degrees
    out_heads: int = 1  # heads of the last layer, which are averaged
    l2: float = 5e-4  # penalty: half of it times the squares of all weights of gat, of the first layer of gcn


def cora_config() -> NodeLabels:
    """Make the settings of the graph attention paper."""
    return NodeLabels(
        task="cora",
        width=64,
        heads=8,
        depth=2,
        dropout=0.6,
        weight_dropout=0.6,
        steps=2000,
        batch_tokens=4096,
        lr=5e-3,
        schedule="constant",
        warmup=0,
        betas=[0.9, 0.999],
        clip=0.0,
        validate_every=5,
        save_every=500,
        patience=20,
    )


def communities_config() -> NodeLabels:
    return NodeLabels(
        task="communities",
        width=32,
        heads=4,
        depth=2,
        dropout=0.5,
        steps=300,
        batch_tokens=4096,
        lr=1e-2,
        schedule="constant",
        warmup=0,
        betas=[0.9, 0.999],
        clip=0.0,
        validate_every=10,
        save_every=100,
    )


@dataclass
class MoleculeLabels(Config):
    """Labels of molecules."""

    mixer: str | list[str] = "softmax"  # every atom attends to every atom; scores have a bias for the pair
    paths: int = 8  # the longest shortest path with a bias of its own: longer ones share it; 0: none has
    bonds: bool = True  # bonded atoms have a bias for the kind of their bond


def tox21_config() -> MoleculeLabels:
    return MoleculeLabels(
        task="tox21",
        precision="tf32",
        width=128,
        heads=8,
        depth=4,
        ffn=256,
        activation="gelu",
        dropout=0.2,
        steps=2000,
        batch_tokens=2048,
        lr=5e-4,
        schedule="cosine",
        warmup=200,
        decay=0.05,
        validate_every=100,
        save_every=500,
    )


def motifs_config() -> MoleculeLabels:
    return MoleculeLabels(
        task="motifs",
        width=32,
        heads=4,
        depth=2,
        ffn=64,
        dropout=0.0,
        steps=400,
        batch_tokens=1024,
        lr=3e-3,
        schedule="cosine",
        warmup=50,
        validate_every=100,
        save_every=100,
    )
