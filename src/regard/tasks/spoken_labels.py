"""One label for a recording: the digit of FSDD whatever the voice, or the voice, with verification of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.locate import find
from regard.data.speech_features import raised_floor, trimmed
from regard.data.speech_sets import SpokenDigit, read_fsdd
from regard.data.wav_files import Recording
from regard.models.encoder_head import Reader
from regard.models.heads import POOLS, PerSequence, pooled
from regard.options import check_choice
from regard.scores import equal_error_rate
from regard.tasks.speech_config import SpokenLabel
from regard.tasks.speech_task import SPEECH_INFERENCE, Normaliser, SpeechTask
from regard.tasks.support import device_under, evaluating, in_order
from regard.text import unknown
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy

TAKES = 5  # recordings of each digit and voice in the official test part, and as many for validation
NEW = -1  # the label of a voice that is not learned
DECIBELS = 200.0  # more than recordings have between their loudest and their quietest


class SpokenExample(NamedTuple):
    """Features of a recording before they are normalised, and its label; `voice` tells apart those that have none."""

    windows: Tensor  # (t f)
    label: int
    voice: str


class SpokenDigitTask(SpeechTask):
    """The digit of a recording. Test are all recordings of the voices in `held_out`, or without any the official test part."""

    config: SpokenLabel
    best = ("accuracy", "max")

    def __init__(self, config: SpokenLabel) -> None:
        super().__init__(config)
        check_choice("pool", config.pool, POOLS[1:])  # a recording has no first token of its own
        for name in ("trim", "floor", "floor_change"):
            if not 0 <= getattr(config, name) <= DECIBELS:
                raise ValueError(f"{name} is in decibels, from 0 to {DECIBELS}, not {getattr(config, name)!r}")
        if config.features != "mel" and (config.trim or config.floor):
            raise ValueError("trim and floor are of log energies: use features=mel")
        if config.floor_change > config.floor:
            raise ValueError(f"floor_change is at most floor, {config.floor:g} decibels, not {config.floor_change:g}")
        self.labels: list[str] = []

    def unused(self) -> dict[str, str]:
        return super().unused() | {"share": "models that predict tokens"}

    def label(self, x: SpokenDigit) -> str:
        """Return what is learned of a recording."""
        return x.digit

    def split(self, x: SpokenDigit) -> str:
        """Return the part of a recording."""
        if self.config.held_out:
            return "test" if x.speaker in self.config.held_out else "val" if x.take < TAKES else "train"
        return "test" if x.take < TAKES else "val" if x.take < 2 * TAKES else "train"

    def read(self, folder: Path | None = None) -> None:
        found = read_fsdd(find("fsdd", folder))
        voices = sorted({x.speaker for x in found})
        for name in self.config.held_out:
            if name not in voices:
                raise ValueError(unknown("no recording is by", name, voices))
        if len(set(self.config.held_out)) >= len(voices):
            raise ValueError(f"held_out leaves no voice to learn from: there are {', '.join(voices)}")
        parts: dict[str, list[SpokenDigit]] = {"train": [], "val": [], "test": []}
        for x in found:
            parts[self.split(x)].append(x)
        raw = {
            name: [(x, self.windows_of(x.recording, speed)) for x in part for speed in self._speeds(name)]
            for name, part in parts.items()
        }
        if not self.labels:
            self.labels = sorted({self.label(x) for x in parts["train"]})
        if self.config.normalise == "train" and self.normaliser is None:
            self.normaliser = Normaliser.of([self._with_floor(windows, self.config.floor) for _, windows in raw["train"]])
        places = {label: place for place, label in enumerate(self.labels)}
        self.splits = {
            name: [SpokenExample(y, places.get(self.label(x), NEW), x.speaker) for x, y in rows] for name, rows in raw.items()
        }

    def windows_of(self, recording: Recording, speed: float = 1.0) -> Tensor:
        windows = super().windows_of(recording, speed)
        return trimmed(windows, self.config.trim) if self.config.trim else windows

    def _with_floor(self, x: Tensor, decibels: Tensor | float, valid: Tensor | None = None) -> Tensor:
        return raised_floor(x, decibels, valid) if self.config.floor else x

    def prepared(self, batch: Batch, *, training: bool = False) -> Batch:
        """Raise the floor of the recordings of a batch and normalise them; in training each has a floor of its own, and masks."""
        x, valid, change = batch.source, batch.source_valid, self.config.floor_change
        moved = change * (2 * torch.rand(len(x), 1, 1, device=x.device) - 1) if training and change else 0.0
        x = self.normalised(self._with_floor(x, self.config.floor + moved, valid), valid)
        made = batch._replace(source=x)
        return self.augmented(made) if training else made

    def _speeds(self, part: str) -> Sequence[float]:
        return self.config.speeds if part == "train" else (1.0,)

    def assets(self) -> dict[str, str]:
        return self.speech_assets(labels=self.labels)

    def restore(self, assets: Mapping[str, str]) -> None:
        kept = self.restore_speech(assets).get("labels")
        if not isinstance(kept, list) or not kept or not all(isinstance(label, str) for label in kept):
            raise ValueError("speech.json holds no list of labels: restore it")
        self.labels = kept

    def size(self, example: SpokenExample) -> int:
        return len(example.windows)

    def batch(self, examples: Sequence[SpokenExample]) -> Batch:
        x, valid = self.padded_windows([example.windows for example in examples])
        return Batch(x, valid, torch.tensor([example.label for example in examples]))

    def model(self) -> nn.Module:
        head = PerSequence(self.config.width, len(self.labels), pool=self.config.pool, dropout=self.config.dropout)
        return Reader(self.encoder, head)

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every step
        assert batch.target is not None
        changed = self.prepared(batch, training=True)
        return cross_entropy(model(changed.source, changed.source_valid), batch.target, smoothing=self.config.smoothing)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        known = [x for x in self.splits[split] if x.label != NEW]
        right = sum(x.label == found for x, found in zip(known, self._labelled(model, known), strict=True))
        return {"accuracy": 100 * right / max(1, len(known)), "recordings": float(len(known))}

    def _labelled(self, model: nn.Module, examples: Sequence[SpokenExample]) -> list[int]:
        def answer(part: list[SpokenExample]) -> list[int]:
            batch = self.prepared(self.batch(part).to(device_under(model)))
            return model(batch.source, batch.source_valid).argmax(-1).tolist()

        with evaluating(model):
            return in_order(examples, self.size, SPEECH_INFERENCE, answer)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Label every wav file."""
        examples = [SpokenExample(self.read_windows(line), NEW, "") for line in lines]
        return [self.labels[found] for found in self._labelled(model, examples)]


class SpeakerTask(SpokenDigitTask):
    """The voice of a recording, among those that are learned, and whether two recordings are of one voice.

    Verification scores a pair by the cosine of the two pooled vectors of the encoder. `eer` is its equal error rate over all
    pairs of the split with voices that are learned, `eer_new` over those with voices that are not.
    """

    def label(self, x: SpokenDigit) -> str:
        return x.speaker

    def split(self, x: SpokenDigit) -> str:
        new = x.speaker in self.config.held_out
        return "test" if x.take < TAKES else "val" if x.take < 2 * TAKES else "test" if new else "train"

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        scores = super().score(model, split)
        for name, new in (("eer", False), ("eer_new", True)):
            rows = [x for x in self.splits[split] if (x.label == NEW) == new]
            if len({x.voice for x in rows}) > 1:
                scores[name] = self._verification(model, rows)
        return scores

    def _verification(self, model: nn.Module, rows: Sequence[SpokenExample]) -> float:
        cosines = _cosines(self.vectors(model, rows))
        pairs = list(combinations(range(len(rows)), 2))
        return equal_error_rate([cosines[i][j] for i, j in pairs], [rows[i].voice == rows[j].voice for i, j in pairs])

    def vectors(self, model: Any, examples: Sequence[SpokenExample]) -> Tensor:
        """Return the pooled vectors (examples, w) of recordings, which verification compares."""

        def answer(part: list[SpokenExample]) -> list[Tensor]:
            batch = self.prepared(self.batch(part).to(device_under(model)))
            read = model.encoder(batch.source, batch.source_valid)
            return list(pooled(read.x, read.valid, self.config.pool).float().cpu())

        with evaluating(model):
            return torch.stack(in_order(examples, self.size, SPEECH_INFERENCE, answer))

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Name the voice of every wav file; for two paths with a tab between them, give their cosine."""
        found = []
        for line in lines:
            one, tab, other = line.partition("\t")
            if not tab:
                found += super().predict(model, [one])
                continue
            rows = [SpokenExample(self.read_windows(path), NEW, "") for path in (one, other)]
            found.append(f"{_cosines(self.vectors(model, rows))[0][1]:.3f}")
        return found


def _cosines(vectors: Tensor) -> list[list[float]]:
    unit = nn.functional.normalize(vectors, dim=-1)
    return (unit @ unit.mT).tolist()
