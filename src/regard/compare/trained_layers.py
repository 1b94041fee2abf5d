"""Attention of trained models, from the weights of a comparison: matrices of every layer, and their singular values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from regard.analysis.probe import attention_matrix, has_weights
from regard.arena.arena_task import ArenaModel, ArenaTask
from regard.compare.cell_record import CellRecord
from regard.compare.cell_store import GRID, CellStore
from regard.compare.compared_model import ComparedModel, build_model
from regard.compare.own_code import read_task
from regard.mixers.attention import Attention
from regard.mixers.base import Places
from regard.training.atomic_files import RunError, read_json

LONGEST_SEEN = 256  # tokens of the example that is shown
SIDE = 64  # cells of a matrix, at most
CUMULATED = 32  # points of a curve of singular values
UNREADABLE = (RunError, ValueError, RuntimeError, TypeError, KeyError, OSError)


@dataclass
class TrainedLayer:
    """Hold one layer of one trained model on a test example."""

    task: str
    mixer: str
    family: str
    layer: int  # from 1
    tokens: int
    matrices: list[Tensor]  # one a head, (side, side), the largest weight of each cell
    spectrum: list[float] = field(
        default_factory=list
    )  # share of the sum of singular values in the largest of them, mean of heads


@dataclass
class TrainedLayers:
    """Hold the layers of all models that could be shown, and a sentence for each that could not."""

    layers: list[TrainedLayer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def trained_layers(folder: Path, records: list[CellRecord]) -> TrainedLayers:
    """Load the weights of every mixer's first seed and probe each layer on the first test example of its task."""
    found = TrainedLayers()
    store = CellStore(folder)
    examples: dict[str, tuple[ArenaTask, Tensor]] = {}
    for record in records:
        if not record.final or record.seed != 0 or not record.weights:
            continue
        try:
            if record.task not in examples:
                examples[record.task] = _example(record.task, _own_files(folder))
            task, tokens = examples[record.task]
            model = _loaded(store, record, task)
            layers = list(_probed(model, tokens, record))
        except UNREADABLE as error:
            found.notes.append(
                f"{record.mixer} on {record.task}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            continue
        found.layers += layers
        if not layers:
            found.notes.append(f"{record.mixer} on {record.task}: it has no attention weights")
    return found


def _own_files(folder: Path) -> tuple[str, ...]:
    path = folder / GRID
    if not path.exists():
        return ()
    found = read_json(path, "it is written again by regard compare")
    return tuple(found.get("settings", {}).get("files", ()))


def _example(text: str, files: tuple[str, ...]) -> tuple[ArenaTask, Tensor]:
    """Return a task and the real tokens (1 n) of its first test example; of the first sequence of a pair."""
    task = read_task(text, files)
    made = task.examples("test")
    tokens, lengths = made.tokens[0], None if made.lengths is None else made.lengths[0]
    if tokens.dim() == 2:
        tokens, lengths = tokens[0], None if lengths is None else lengths[0]
    real = len(tokens) if lengths is None else int(lengths)
    count = min(real, LONGEST_SEEN)
    return task, tokens[None, :count].long()


def _loaded(store: CellStore, record: CellRecord, task: ArenaTask) -> ComparedModel:
    settings: dict[str, Any] = record.settings["model"]
    model = build_model(task, record.mixer, ArenaModel(**settings))
    model.load_state_dict(store.load_weights(record))
    return model.eval()


@torch.no_grad()
def _probed(model: ComparedModel, tokens: Tensor, record: CellRecord) -> Iterator[TrainedLayer]:
    """Yield the layers that are weighted sums of values; mixers without queries and keys are passed over."""
    seen: dict[Attention, Tensor] = {}
    mixers = [block.mixer for block in model.stack if isinstance(block.mixer, Attention)]

    def record_input(mixer: Any, args: tuple[Any, ...]) -> None:
        seen[mixer] = args[0]

    hooks = [mixer.register_forward_pre_hook(record_input) for mixer in mixers]
    try:
        places = model.embed.places(tokens)
        model.stack(model.embed(tokens, places), places)
    finally:
        for hook in hooks:
            hook.remove()
    for number, mixer in enumerate(mixers, 1):
        x = seen[mixer]
        if mixer.rate > 1 or not has_weights(mixer.core, min(4, x.shape[1])):
            continue
        q, k, _ = mixer.heads(x, Places.of(x))
        weights = attention_matrix(mixer.core, q, k, causal=mixer.dims.causal)[0].float()
        pooled = [pooled_matrix(head) for head in weights]
        yield TrainedLayer(record.task, record.mixer, record.family, number, x.shape[1], pooled, cumulated_spectrum(weights))


def pooled_matrix(matrix: Tensor, side: int = SIDE) -> Tensor:
    """Reduce a matrix to at most side x side cells: the largest absolute weight of each."""
    n, m = matrix.shape
    if n <= side and m <= side:
        return matrix.abs()
    return adaptive_max_pool2d(matrix.abs()[None], (min(n, side), min(m, side)))[0]


def cumulated_spectrum(weights: Tensor) -> list[float]:
    """Return the share of the sum of singular values in the first ones, at CUMULATED counts up to n, mean over heads (h n n)."""
    sizes = torch.linalg.svdvals(weights)
    shares = sizes.cumsum(-1) / sizes.sum(-1, keepdim=True).clamp_min(1e-30)
    count = shares.shape[-1]
    points = torch.linspace(1, count, min(CUMULATED, count)).round().long() - 1
    return shares.mean(0)[points].tolist()


def spectrum_rank(weights_spectrum: list[float], tokens: int, share: float = 0.9) -> int:
    """Return how many singular values hold a share of their sum, by interpolation in a curve of `cumulated_spectrum`."""
    count = len(weights_spectrum)
    index = next((i for i, value in enumerate(weights_spectrum) if value >= share), count - 1)
    return round(1 + index * (tokens - 1) / max(1, count - 1))
