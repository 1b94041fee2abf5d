"""Tables of what attention changes in detection and in GANs: means over seeds, and differences with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from tables_base import Made, not_yet, table

HEADS = {
    "queries": "object queries (attention)",
    "cells": "queries that begin as cells (attention)",
    "dense": "dense head (convolutions)",
}
GAN_LAYERS = {"attention": "attention", "convolution": "a convolution of as many weights", "none": "nothing"}
SCORES = {"map50": "mAP at IoU .5", "map": "mAP, .5 to .95", "count": "count right, %"}
# of Student's distribution, two-sided 95 %, for 1, 2, ... degrees of freedom
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def difference(one: dict[int, float], other: dict[int, float], digits: int = 1) -> str:
    """Mean difference of scores by seed, with its 95 % interval by Student's distribution over the seeds that both have."""
    away = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if len(away) < 2:
        return f"{mean(away):+.{digits}f} (one seed: no interval)" if away else "no seed in common"
    half = QUANTILES[min(len(away) - 1, len(QUANTILES)) - 1] * stdev(away) / len(away) ** 0.5
    return f"{mean(away):+.{digits}f} ({mean(away) - half:+.{digits}f} to {mean(away) + half:+.{digits}f})"


def _source(made: Made) -> str:
    where = made["made_with"]
    return f"({where['device']}, torch {where['torch']}, commit {where['commit']}.)"


def _chosen(rows: list[dict[str, Any]], head: str) -> list[dict[str, Any]]:
    """Rows of the learning rate that was best on validation with the first seed."""
    own = [row for row in rows if row["head"] == head]
    first = [row for row in own if row["seed"] == 1]
    rate = max(first, key=lambda row: row["val"]["map50"])["lr"]
    return [row for row in own if row["lr"] == rate]


def detection(made: Made) -> str:
    """Scores on the test scenes by head, their difference, and the floors."""
    if not made["rows"]:
        return not_yet("detection.py")
    rows = {head: _chosen(made["rows"], head) for head in HEADS if any(row["head"] == head for row in made["rows"])}
    body = []
    for head, own in rows.items():
        size, rate = f"{own[0]['parameters'] / 1e6:.2f} M", f"{own[0]['lr']:g}"
        scores = [spread([row["test"][name] for row in own]) for name in SCORES]
        seconds, sure = f"{mean(row['seconds'] for row in own):.0f}", ", ".join(f"{row['sure']:g}" for row in own)
        body.append([HEADS[head], len(own), size, f"{own[0]['steps']:,}", rate, *scores, sure, seconds])
    by_seed = {kind: {name: {r["seed"]: r["test"][name] for r in own} for name in SCORES} for kind, own in rows.items()}
    for kind in [name for name in rows if name != "dense" and "dense" in rows]:
        away = [difference(by_seed[kind][name], by_seed["dense"][name]) for name in SCORES]
        body.append([f"{kind} - dense (95 %)", "", "", "", "", *away, "", ""])
    floors = ", ".join(f"{name} {score:.1f}" for name, score in made["floors"].items())
    head = ["head", "seeds", "parameters", "updates", "lr", *SCORES.values(), "counted from a score of", "seconds"]
    which = f"`--preset {name}`. " if (name := made["settings"]["preset"]) else ""
    return f"{which}Floors on test, %: {floors}. {_source(made)}\n\n{table(head, body)}"


def gan(made: Made) -> str:
    """Distances of samples by layer, their differences to the GAN without one, and the floors."""
    if not made["rows"]:
        return not_yet("gan.py")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in GAN_LAYERS}
    for row in made["rows"]:
        rows[row["layer"]].append(row)
    by_seed = {name: {row["seed"]: row["distance"] for row in own} for name, own in rows.items()}
    body = []
    for name, own in rows.items():
        if not own:
            continue
        away = difference(by_seed[name], by_seed["none"], 2) if name != "none" else ""
        size = f"{own[0]['parameters']['generator'] / 1e6:.2f} + {own[0]['parameters']['critic'] / 1e6:.2f} M"
        distance, seconds = spread([row["distance"] for row in own], 2), f"{mean(row['seconds'] for row in own):.0f}"
        body.append([GAN_LAYERS[name], len(own), size, f"{own[0]['steps']:,}", distance, away, seconds])
    floors = dict(made["floors"])
    right = floors.pop("accuracy of the classifier")
    near = ", ".join(f"{name} {score:.2f}" for name, score in floors.items())
    s = made["settings"]
    data = {"cifar10": "CIFAR-10 (JPEG copy)", "digits": "scikit-learn's digits at 32 x 32"}[s["data_set"]]
    intro = (
        f"Data: {data}; the layer is over {s['at']} x {s['at']} cells; {s['samples']:,} samples. The classifier of the features "
        f"is right on {right:.1f} % of the test images. Distances to the training images: {near}. {_source(made)}"
    )
    head = [
        "over the feature map",
        "seeds",
        "generator + critic",
        "updates",
        "distance",
        "difference (95 %)",
        "seconds",
    ]
    return f"{intro}\n\n{table(head, body)}"
