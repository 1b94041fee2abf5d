"""Tables of images: accuracy against the number of training images, and mechanisms over the same patches."""

from __future__ import annotations

from statistics import mean
from typing import Any

from tables_base import Made, code, not_yet, table

IMAGES_COMMAND = "images.py"


def image_scores(made: Made) -> str:
    """Accuracy on the 10,000 test images, best models first, then by share of the training images, then by mechanism."""
    if not made["rows"]:
        return not_yet(IMAGES_COMMAND)
    groups = {name: [row for row in made["rows"] if row["part"] == name] for name in ("best", "curve", "mechanisms")}
    parts = [_models(groups["best"])] if groups["best"] else []
    parts += _curves(groups["curve"])
    parts += [_mechanisms(groups["mechanisms"])] if groups["mechanisms"] else []
    floors = ", ".join(f"{name} {score:.1f} %" for name, score in made["floors"].items())
    where = made["made_with"]
    source = f"({where['device']}, torch {where['torch']}, commit {where['commit']}.)"
    return "\n\n".join([f"Data: {made['settings']['data']}. Floors on test: {floors}. {source}", *parts])


def _row(own: list[dict[str, Any]]) -> list[str]:
    scores = [f"{mean(row[split] for row in own):.2f}" for split in ("val", "test")]
    size = f"{own[0]['parameters'] / 1e6:.1f} M"
    return [str(len(own)), size, f"{own[0]['steps']:,}", *scores, f"{mean(row['seconds'] for row in own):.0f}"]


HEAD = ["seeds", "parameters", "updates", "val", "test", "seconds"]


def recipe(row: dict[str, Any]) -> str:
    """Name what training changes in its images."""
    config = row["config"]
    if config.get("trivial"):
        return "crop, flip, TrivialAugment, mixup, cutmix"
    return ", ".join(["crop", "flip", *(name for name in ("colour", "cutout", "mixup", "cutmix") if config.get(name))])


def _models(rows: list[dict[str, Any]]) -> str:
    """A row for each model, number of updates and weight decay."""
    found: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["steps"], row["config"]["decay"]), []).append(row)
    body = [[name, recipe(own[0]), f"{decay:g}", *_row(own)] for (name, _, decay), own in sorted(found.items())]
    return table(["all images", "training changes", "weight decay", *HEAD], body)


def _mechanisms(rows: list[dict[str, Any]]) -> str:
    """A row for each mechanism and number of updates, the best first."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["mixer"], row["steps"]), []).append(row)
    ordered = sorted(found.items(), key=lambda item: -mean(row["test"] for row in item[1]))
    return table(["over 64 patches", *HEAD], [[code(name), *_row(own)] for (name, _), own in ordered])


def curve_parts(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the rows of curves by what training changes: most points first, of equally many the later ones."""
    found: dict[bool, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(bool(row["config"].get("trivial")), []).append(row)
    return [own for _, own in sorted(found.items(), key=lambda item: (len(item[1]), item[0]), reverse=True)]


def _curves(rows: list[dict[str, Any]]) -> list[str]:
    """Test accuracy: a row for each share of the training images, a column for each model, a table for each way of training."""
    return [part for own in curve_parts(rows) for part in (_curve_words(own), _curve(own))]


def _curve_words(rows: list[dict[str, Any]]) -> str:
    steps = sorted(row["steps"] for row in rows)
    kinds = list(dict.fromkeys(recipe(row) for row in rows))
    return f"With {steps[0]:,} to {steps[-1]:,} updates; training changes: {' or '.join(kinds)}."


def _curve(rows: list[dict[str, Any]]) -> str:
    shares = sorted({row["share"] for row in rows})
    names = list(dict.fromkeys(row["model"] for row in rows))
    cells: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["share"]), []).append(row)
    counts = {share: own[0]["train_images"] for (_, share), own in cells.items()}
    scores = {key: f"{mean(row['test'] for row in own):.2f}" for key, own in cells.items()}
    body = [[f"{counts[share]:,}", *(scores.get((name, share), "") for name in names)] for share in shares]
    return table(["training images", *names], body)
