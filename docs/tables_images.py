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
    groups: dict[str, dict[tuple[str, Any], list[dict[str, Any]]]] = {}
    for row in made["rows"]:
        key = row["mixer"] if row["part"] == "mechanisms" else row["model"]
        groups.setdefault(row["part"], {}).setdefault((key, row["share"]), []).append(row)
    parts = [_models([row for row in made["rows"] if row["part"] == "best"])] if "best" in groups else []
    parts += [_curve(groups["curve"])] if "curve" in groups else []
    parts += [_mechanisms(groups["mechanisms"])] if "mechanisms" in groups else []
    floors = ", ".join(f"{name} {score:.1f} %" for name, score in made["floors"].items())
    where = made["made_with"]
    source = f"({where['device']}, torch {where['torch']}, commit {where['commit']}.)"
    return "\n\n".join([f"Data: {made['settings']['data']}. Floors on test: {floors}. {source}", *parts])


def _row(own: list[dict[str, Any]]) -> list[str]:
    scores = [f"{mean(row[split] for row in own):.2f}" for split in ("val", "test")]
    size = f"{own[0]['parameters'] / 1e6:.1f} M"
    return [str(len(own)), size, f"{own[0]['steps']:,}", *scores, f"{mean(row['seconds'] for row in own):.0f}"]


HEAD = ["seeds", "parameters", "updates", "val", "test", "seconds"]


def _models(rows: list[dict[str, Any]]) -> str:
    """A row for each model, number of updates and weight decay."""
    found: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["steps"], row["config"]["decay"]), []).append(row)
    body = [[name, f"{decay:g}", *_row(own)] for (name, _, decay), own in sorted(found.items())]
    return table(["all images", "weight decay", *HEAD], body)


def _mechanisms(found: dict[tuple[str, Any], list[dict[str, Any]]]) -> str:
    ordered = sorted(found.items(), key=lambda item: -mean(row["test"] for row in item[1]))
    return table(["over 64 patches", *HEAD], [[code(name), *_row(own)] for (name, _), own in ordered])


def _curve(found: dict[tuple[str, Any], list[dict[str, Any]]]) -> str:
    """Test accuracy: a row for each share of the training images, a column for each model."""
    shares = sorted({share for _, share in found})
    names = list(dict.fromkeys(name for name, _ in found))
    counts = {share: own[0]["train_images"] for (_, share), own in found.items()}
    cells = {key: f"{mean(row['test'] for row in own):.2f}" for key, own in found.items()}
    body = [[f"{counts[share]:,}", *(cells.get((name, share), "") for name in names)] for share in shares]
    return table(["training images", *names], body)
