"""What tasks on recordings share: features of wav files, their normalisation, batches, and changes in training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.checks import need
from regard.data.batch import Batch
from regard.data.speech_augment import change_speed, resized, spec_augment
from regard.data.speech_features import centred, log_mel, mfcc, with_slopes
from regard.data.strict_json import JsonError, read_value
from regard.data.wav_files import Recording, read_wav
from regard.mixers.places import mask_padding
from regard.models.encoder import Encoder
from regard.models.recogniser import SPEECH_BLOCKS, speech_encoder
from regard.options import check_choice
from regard.tasks.speech_config import Speech
from regard.tasks.task import Task

SPEECH_INFERENCE = 100_000  # windows of a batch when nothing is kept for a backward pass
CEPSTRA = 13
SPEED_LIMITS = (0.5, 2.0)


class Normaliser(NamedTuple):
    """Mean and spread of every feature in the training part."""

    mean: Tensor  # (f)
    spread: Tensor  # (f)

    @staticmethod
    def of(parts: Sequence[Tensor]) -> Normaliser:
        """Measure windows (t f) of many recordings."""
        whole = torch.cat(list(parts)).double()
        return Normaliser(whole.mean(0).float(), whole.std(0, unbiased=False).clamp_min(1e-3).float())


class SpeechTask(Task):
    """A task on windows of speech; `predict` takes the paths of wav files."""

    config: Speech
    steady = True
    file_ending = ".wav"
    wav_rate = 8000  # of the recordings it learns from: others are resampled
    mel_range = (20.0, 4000.0)  # Hz

    def __init__(self, config: Speech) -> None:
        super().__init__(config)
        check_choice("features", config.features, ("mel", "mfcc"))
        check_choice("normalise", config.normalise, ("utterance", "mean", "train"))
        check_choice("block", config.block, SPEECH_BLOCKS)
        for name in ("mels", "kernel"):
            need(name, getattr(config, name))
        for name in ("halvings", "channels", "time_masks", "bands", "band_width"):
            need(name, getattr(config, name), 0)
        if config.channels and not config.halvings:
            raise ValueError("channels are those of the convolutions that halve the windows: halvings=0 has none")
        if not 0 <= config.time_share <= 1:
            raise ValueError(f"time_share is a share of a recording, from 0 to 1, not {config.time_share!r}")
        if config.band_width > self.feature_count:
            raise ValueError(f"band_width is at most {self.feature_count}, the number of features, not {config.band_width}")
        low, high = SPEED_LIMITS
        if not config.speeds or any(not low <= speed <= high for speed in config.speeds):
            raise ValueError(f"speeds are numbers from {low} to {high}, at least one, not {config.speeds!r}")
        if config.features == "mfcc" and config.mels < CEPSTRA:
            raise ValueError(f"{CEPSTRA} cepstra need at least as many mels, not {config.mels}")
        self.normaliser: Normaliser | None = None

    @property
    def feature_count(self) -> int:
        """Return the number of features of a window."""
        return self.config.mels if self.config.features == "mel" else 3 * CEPSTRA

    @property
    def encoder(self) -> Encoder:
        """Build the encoder, with random weights."""
        config = self.config
        stem = {"halvings": config.halvings, "channels": config.channels}
        return speech_encoder(config, self.feature_count, **stem, scale=config.scale, block=config.block, kernel=config.kernel)

    def resampled(self, recording: Recording) -> Tensor:
        """Return the samples (n) of a recording at the rate of the task."""
        if recording.rate == self.wav_rate:
            return recording.samples
        return resized(recording.samples, max(1, math.ceil(len(recording.samples) * self.wav_rate / recording.rate)))

    def windows_of(self, recording: Recording, speed: float = 1.0) -> Tensor:
        """Compute the features (t f) of a recording, before they are normalised."""
        samples, low = self.resampled(recording), self.mel_range[0]
        if speed != 1:
            samples = change_speed(samples, speed)
        options: dict[str, Any] = {"mels": self.config.mels, "low": low, "high": self.mel_range[1]}
        if self.config.features == "mel":
            return log_mel(samples, self.wav_rate, **options)
        return with_slopes(mfcc(samples, self.wav_rate, cepstra=CEPSTRA, **options))

    def normalised(self, windows: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise features (t f) or (b t f) as the settings have it; windows that are not `valid` (b t) become 0."""
        if self.config.normalise != "train":
            return centred(windows, valid, spread=self.config.normalise == "utterance")
        if self.normaliser is None:
            raise RuntimeError("a task measures its features in data, or gets their mean from a run: call read() or restore()")
        if self.normaliser.mean.device != windows.device:  # moved once: a captured pass may not copy from the host
            self.normaliser = Normaliser(*(x.to(windows.device) for x in self.normaliser))
        return mask_padding((windows - self.normaliser.mean) / self.normaliser.spread, valid)

    def too_long(self, windows: Tensor) -> bool:
        """Return whether a recording has more tokens than the model has positions."""
        return -(-len(windows) // 2**self.config.halvings) > self.config.max_len

    def read_windows(self, path: str) -> Tensor:
        """Read the features (t f) of a wav file, before they are normalised; every error names it."""
        windows = self.windows_of(read_wav(path))
        if self.too_long(windows):
            seconds = self.config.max_len * 2**self.config.halvings / 100
            raise ValueError(f"{path} has {len(windows) / 100:.1f} s, but this model reads {seconds:.1f} s at most: cut it")
        return windows

    def speech_assets(self, **more: Any) -> dict[str, str]:
        """Write what all runs keep: how features are normalised, and further values."""
        found = self.normaliser
        kept = None if found is None else {"mean": found.mean.tolist(), "spread": found.spread.tolist()}
        return {"speech.json": json.dumps({"normaliser": kept, **more})}

    def restore_speech(self, assets: Mapping[str, str]) -> dict[str, Any]:
        """Read what `speech_assets` wrote, and return the further values."""
        text = assets["speech.json"]
        try:
            kept = read_value(text)
            found = kept.pop("normaliser")
            if found is not None:
                self.normaliser = Normaliser(*(torch.tensor(found[name], dtype=torch.float32) for name in ("mean", "spread")))
                if any(x.shape != (self.feature_count,) for x in self.normaliser):
                    raise ValueError
        except (JsonError, KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"speech.json has no mean and spread of {self.feature_count} features: restore it") from None
        return kept

    def padded_windows(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Pad windows (t f) of several recordings to one tensor (b t f), with its mask: None where nothing is padded."""
        longest = -(-max(map(len, rows)) // self.multiple) * self.multiple
        x = torch.zeros(len(rows), longest, self.feature_count)
        for place, row in zip(x, rows, strict=True):
            place[: len(row)] = row
        lengths = torch.tensor([len(row) for row in rows])
        valid = torch.arange(longest) < lengths[:, None]
        return x, None if self.multiple == 1 and bool(valid.all()) else valid

    def augmented(self, batch: Batch) -> Batch:
        """Mask stretches and bands of the windows of a training batch."""
        config = self.config
        changed = spec_augment(
            batch.source,
            batch.source_valid,
            time_masks=config.time_masks,
            time_share=config.time_share,
            bands=config.bands,
            band_width=config.band_width,
        )
        return batch._replace(source=changed)
