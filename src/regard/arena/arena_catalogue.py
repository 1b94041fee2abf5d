"""The tasks of the arena by name; a module is imported when its task is used."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from regard.arena.arena_task import ArenaTask
from regard.options import parse_options

ARENA: dict[str, str] = {  # name -> module:class
    "image": "regard.arena.image_pixels:ImagePixels",
    "induction": "regard.arena.induction:Induction",
    "listops": "regard.arena.listops:ListOps",
    "mad_compression": "regard.arena.mad_memory:MadCompression",
    "mad_fuzzy_recall": "regard.arena.mad_recall:MadFuzzyRecall",
    "mad_memorization": "regard.arena.mad_memory:MadMemorization",
    "mad_noisy_recall": "regard.arena.mad_recall:MadNoisyRecall",
    "mad_recall": "regard.arena.mad_recall:MadRecall",
    "mad_selective_copy": "regard.arena.mad_memory:MadSelectiveCopy",
    "mixed_recall": "regard.arena.recall:MixedRecall",
    "papers": "regard.arena.papers:Papers",
    "pathfinder": "regard.arena.pathfinder:Pathfinder",
    "recall": "regard.arena.recall:Recall",
    "retrieval": "regard.arena.retrieval:Retrieval",
    "selective_copy": "regard.arena.selective_copy:SelectiveCopy",
    "text": "regard.arena.text_bytes:TextBytes",
}


def arena_task(text: str) -> ArenaTask:
    """Read a task with its options, such as `recall(length=128, pairs=8)`."""
    return parse_options(text, {name: arena_class(name) for name in ARENA})


def short_task(text: str) -> str:
    """Write a task with those of its options alone that are not the usual ones; a task of your own as it is."""
    try:
        task = arena_task(text)
    except ValueError:
        return text
    changed = [f"{x.name}={getattr(task, x.name)!r}" for x in fields(task) if getattr(task, x.name) != x.default]
    return f"{task.name}({', '.join(changed)})" if changed else task.name


def task_source(task: ArenaTask) -> str:
    """Return a hash of the file of a task of your own; empty for those of the arena."""
    if task.name in ARENA and type(task) is arena_class(task.name):
        return ""
    return source_digest(inspect.getsourcefile(type(task)))


def source_digest(path: str | None) -> str:
    """Return a short hash of what a file holds; empty without a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""


def arena_class(name: str) -> type[ArenaTask]:
    """Return the class of a task."""
    module, own = ARENA[name].split(":")
    return getattr(import_module(module), own)
