"""Speech from text, in characters: frames of log-mel energies, how they are scored, and recordings of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.analysis.alignment_failures import SLACK, AlignmentFailure, alignment_failure, diagonality, dtw_distance
from regard.checks import need
from regard.data.batch import END, UNKNOWN, Batch, padded
from regard.data.griffin_lim import wav_of_mel
from regard.data.speech_augment import resized
from regard.data.speech_features import log_mel
from regard.data.spoken_texts import SpokenText
from regard.data.strict_json import JsonError, read_value
from regard.data.tone_texts import TONE_RATE
from regard.data.vocabulary import Characters, vocabulary
from regard.data.wav_files import Recording
from regard.models.guided import ALIGNERS
from regard.models.synthesiser import Synthesiser, synthesiser
from regard.options import check_choice
from regard.tasks.nearest_texts import nearest_texts
from regard.tasks.speech_task import Normaliser
from regard.tasks.support import check_lengths, device_under, evaluating, in_order, learned
from regard.tasks.synthesis_config import Synthesis
from regard.tasks.task import ENCODER_DECODER, Task
from regard.tasks.text_attention import LayerAttention, TextAttention
from regard.training.learnable import Step
from regard.training.losses import Loss
from regard.training.synthesis_loss import FRAME_LOSSES, frame_errors, last_frames, synthesis_loss

WATCHED_TEXTS = 40  # texts of a validation during training
SPOKEN_AT_ONCE = 20_000  # frames of a batch of answers
NATS_OF_DECIBEL = math.log(10) / 10
SLOWEST_PACE = 2.0  # times the slowest pace of train: the steps after which an answer is endless


class TextFrames(NamedTuple):
    """Hold a text and its normalised frames, as many as whole steps have."""

    source: list[int]  # characters and END
    frames: Tensor  # (m r, f)
    text: str


class Spoken(NamedTuple):
    """Hold what a model makes of a text."""

    mel: Tensor  # (t f) log energies, as `log_mel` has them
    frames: Tensor  # (t f) the same, normalised
    weights: Tensor  # (m n), of the last reader and the mean of its heads: n characters, the last of them END
    failure: AlignmentFailure


class SynthesisTask(Task):
    """Speech of every text; scored by the distance of frames, and by whether texts were read to the end."""

    config: Synthesis
    best = ("distance", "min")
    bodies = ENCODER_DECODER
    answering = ("test_dropout", "take", "phases")
    steady = True
    wav_rate = TONE_RATE
    low_hertz = 20.0
    slack = SLACK  # characters that a path may leave out or go back

    def __init__(self, config: Synthesis) -> None:
        super().__init__(config)
        check_choice("reader", config.reader, ALIGNERS)
        check_choice("frame_loss", config.frame_loss, FRAME_LOSSES)
        for name in ("mels", "reduction", "prenet", "take", "phases"):
            need(name, getattr(config, name))
        if config.guide < 0 or not config.guide_width > 0:
            raise ValueError(f"guide is at least 0 and guide_width above 0, not {config.guide!r} and {config.guide_width!r}")
        if not config.decibels > 0:
            raise ValueError(f"decibels are a range of energies, above 0, not {config.decibels!r}")
        if not 0 <= config.prenet_dropout < 1:
            raise ValueError(f"prenet_dropout is a share from 0 to below 1, not {config.prenet_dropout!r}")
        self.vocabulary: Characters | None = None
        self.normaliser: Normaliser | None = None
        self.left_out = 0  # texts that are too long
        self.floor = 0.0  # the lowest log energy
        self.pace = 1.0  # steps a character, of the slowest text of train

    def unused(self) -> dict[str, str]:
        found = super().unused() | {"cross": "decoders of other tasks, here it is reader", "share": "models that generate tokens"}
        return found | {"smoothing": "labels"}

    @property
    def high_hertz(self) -> float:
        """Return the upper end of the filters: half of the rate."""
        return self.wav_rate / 2

    def spoken(self, folder: Path | None) -> dict[str, list[SpokenText]]:
        """Read or make the recordings with their texts."""
        raise NotImplementedError

    def mel_of(self, recording: Recording) -> Tensor:
        """Compute the log-mel energies (t f) of a recording."""
        samples = recording.samples
        if recording.rate != self.wav_rate:
            samples = resized(samples, max(1, math.ceil(len(samples) * self.wav_rate / recording.rate)))
        return log_mel(samples, self.wav_rate, mels=self.config.mels, low=self.low_hertz, high=self.high_hertz)

    def read(self, folder: Path | None = None) -> None:
        parts = {name: [(self.mel_of(x.recording), x.text) for x in part] for name, part in self.spoken(folder).items()}
        if self.vocabulary is None:
            self.vocabulary = Characters.of(text for _, text in parts["train"])
        if self.normaliser is None:
            loudest = max(float(mel.max()) for mel, _ in parts["train"])
            self.floor = loudest - self.config.decibels * NATS_OF_DECIBEL
            self.normaliser = Normaliser.of([mel.clamp_min(self.floor) for mel, _ in parts["train"]])
        made = {name: [self._coded(mel, text) for mel, text in part] for name, part in parts.items()}
        self.splits = {name: [x for x in part if self._fits(x)] for name, part in made.items()}
        self.left_out = sum(map(len, made.values())) - sum(map(len, self.splits.values()))
        train, val = self.splits["train"], self.splits["val"]
        if not train:
            raise ValueError(f"every text of train has more than {self.config.max_len} steps: use a larger max_len or reduction")
        self.pace = max(self._steps(x) / len(x.source) for x in train)
        self.sample = val[0].text if val else ""

    def _coded(self, mel: Tensor, text: str) -> TextFrames:
        """Normalise frames, and repeat the last until they fill a step."""
        known = learned(self.normaliser)
        frames = (mel.clamp_min(self.floor) - known.mean) / known.spread
        more = -len(frames) % self.config.reduction
        return TextFrames(self._characters(text), torch.cat([frames, frames[-1:].expand(more, -1)]), text)

    def _characters(self, text: str) -> list[int]:
        return [*learned(self.vocabulary).encode(text), END]

    def _steps(self, x: TextFrames) -> int:
        return len(x.frames) // self.config.reduction

    def _fits(self, x: TextFrames) -> bool:
        return max(self._steps(x), len(x.source)) <= self.config.max_len

    def describe_data(self) -> list[str]:
        counts = ", ".join(f"{len(rows):,} {name}" for name, rows in self.splits.items())
        seconds = sum(len(x.frames) for x in self.splits["train"]) / 100
        found = [f"texts: {counts}; {seconds:,.0f} s of train, {len(learned(self.vocabulary).characters)} characters"]
        longest = f"{self.config.max_len} steps of {self.config.reduction} frames"
        return [*found, f"left out: {self.left_out:,} that are longer than {longest}"] if self.left_out else found

    def assets(self) -> dict[str, str]:
        known = learned(self.normaliser)
        kept = {"mean": known.mean.tolist(), "spread": known.spread.tolist(), "pace": self.pace, "floor": self.floor}
        return {"vocabulary.json": learned(self.vocabulary).to_json(), "synthesis.json": json.dumps(kept)}

    def restore(self, assets: Mapping[str, str]) -> None:
        found, text = vocabulary(assets["vocabulary.json"]), assets["synthesis.json"]
        if not isinstance(found, Characters):
            raise ValueError(f"synthesis is by characters, but vocabulary.json is of the kind {found.kind!r}")
        self.vocabulary = found
        try:
            kept = read_value(text)
            self.normaliser = Normaliser(*(torch.tensor(kept[name], dtype=torch.float32) for name in ("mean", "spread")))
            self.pace, self.floor = float(kept["pace"]), float(kept["floor"])
            if any(x.shape != (self.config.mels,) for x in self.normaliser) or not 0 < self.pace < math.inf > abs(self.floor):
                raise ValueError
        except (JsonError, KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"synthesis.json has no mean and spread of {self.config.mels} features and no pace: restore it"
            ) from None

    def size(self, example: TextFrames) -> int:
        return max(len(example.frames), len(example.source))

    def batch(self, examples: Sequence[TextFrames]) -> Batch:
        source, source_valid = padded([x.source for x in examples], multiple=self.multiple)
        steps = [self._steps(x) for x in examples]
        longest = -(-max(steps) // self.multiple) * self.multiple
        frames = torch.zeros(len(examples), longest * self.config.reduction, self.config.mels)
        for place, x in zip(frames, examples, strict=True):
            place[: len(x.frames)] = x.frames
        valid = torch.arange(longest) < torch.tensor(steps)[:, None]
        return Batch(source, source_valid, frames, None if self.multiple == 1 and bool(valid.all()) else valid)

    def model(self) -> Synthesiser:
        config = self.config
        made = synthesiser(
            config,
            len(learned(self.vocabulary)),
            config.mels,
            reader=config.reader,
            reduction=config.reduction,
            hidden=config.prenet,
            dropout=config.prenet_dropout,
            always=config.test_dropout,
        )
        made.embed.reseed(config.take)
        return made

    def loss(self, model: Any, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every step
        assert batch.target is not None
        config = self.config
        return synthesis_loss(
            model,
            batch.source,
            batch.source_valid,
            batch.target,
            batch.target_valid,
            reduction=config.reduction,
            kind=config.frame_loss,
            guide=config.guide,
            sharpness=config.guide_width,
        )

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Compute the scores of some texts of validation, without floors."""
        return self.scored(model, self.splits["val"][:WATCHED_TEXTS])[0]

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        rows = self.splits[split]
        scores, _ = self.scored(model, rows)
        return {**scores, **self.floors(split), "texts": float(len(rows))}

    def floors(self, split: str) -> dict[str, float]:
        """Compute the distance of the mean frame of train, and that of the frames of the nearest text of train."""
        rows, train = self.splits[split], self.splits["train"]
        nearest = nearest_texts([x.text for x in rows], [x.text for x in train])
        still = sum(float(x.frames.abs().mean()) for x in rows)
        copied = sum(dtw_distance(train[at].frames, x.frames) for at, x in zip(nearest, rows, strict=True))
        return {"floor_mean": still / max(1, len(rows)), "floor_nearest": copied / max(1, len(rows))}

    def scored(self, model: nn.Module, rows: Sequence[TextFrames]) -> tuple[dict[str, float], list[Spoken]]:
        """Compute the scores of examples, and what the model makes of their texts."""
        spoken = self.speak(model, [x.text for x in rows], [x.source for x in rows])
        count = max(1, len(rows))
        far = sum(dtw_distance(one.frames, x.frames) for one, x in zip(spoken, rows, strict=True))
        scores = {"distance": far / count, "mel_error": self._forced_error(model, rows)}
        for name in ("any", "skips", "repeats", "endless"):
            wrong = sum(getattr(one.failure, name) for one in spoken)
            scores["failures" if name == "any" else name] = 100 * wrong / count
        scores["diagonality"] = sum(diagonality(one.weights) for one in spoken) / count
        return scores, spoken

    def _forced_error(self, model: nn.Module, rows: Sequence[TextFrames]) -> float:
        """Compute the mean absolute error of frames that follow the true ones."""

        def answer(part: list[TextFrames]) -> list[float]:
            batch = self.batch(part).to(device_under(model))
            assert batch.target is not None
            made = model(batch.source, batch.source_valid, last_frames(batch.target, self.config.reduction))
            errors = frame_errors(made[..., :-1].float(), batch.target).cpu()
            return [float(row[: self._steps(x)].sum()) for row, x in zip(errors, part, strict=True)]

        with evaluating(model):
            sums = in_order(rows, self.size, SPOKEN_AT_ONCE, answer)
        return sum(sums) / max(1, sum(map(self._steps, rows)))

    def speak(self, model: Any, texts: Sequence[str], sources: Sequence[list[int]] | None = None) -> list[Spoken]:
        """Make the frames of texts, each step from the one before."""
        known = learned(self.normaliser)

        def answer(part: list[list[int]]) -> list[Spoken]:
            source, valid = padded(part)
            most = [min(self.config.max_len, math.ceil(SLOWEST_PACE * self.pace * len(row))) for row in part]
            device = device_under(model)
            found = model.generate(source.to(device), None if valid is None else valid.to(device), torch.tensor(most))
            return [
                Spoken(frames * known.spread + known.mean, frames, weights, alignment_failure(weights, stopped, slack=self.slack))
                for frames, weights, stopped in zip(*found, strict=True)
            ]

        rows = [self._characters(text) for text in texts] if sources is None else sources
        with evaluating(model):
            return in_order(
                rows, lambda row: math.ceil(SLOWEST_PACE * self.pace * len(row)) * self.config.reduction, SPOKEN_AT_ONCE, answer
            )

    def recording(self, spoken: Spoken) -> Recording:
        """Make samples of the energies of an utterance."""
        return wav_of_mel(spoken.mel, self.wav_rate, low=self.low_hertz, high=self.high_hertz, rounds=self.config.phases)

    def checked_texts(self, lines: Sequence[str]) -> list[str]:
        """Return texts with single spaces; refuse characters that no text of train has, and texts that are too long."""
        texts = [" ".join(line.split()) for line in lines]
        for text in texts:
            new = [sign for sign, number in zip(text, learned(self.vocabulary).encode(text), strict=True) if number == UNKNOWN]
            if new:
                known = "".join(learned(self.vocabulary).characters)
                raise ValueError(f"{new[0]!r} is in no text that was learned: known are {known!r}")
        check_lengths([self._characters(text) for text in texts], self.config.max_len)
        return texts

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Describe the speech of every line: its length, and what went wrong."""
        texts = self.checked_texts(lines)
        found = iter(self.speak(model, [text for text in texts if text]))
        return [self.described(next(found)) if text else "" for text in texts]

    def described(self, spoken: Spoken) -> str:
        """Describe an utterance: its seconds, and its failures."""
        wrong = [name for name, failed in zip(("skips", "repeats", "no stop"), spoken.failure, strict=True) if failed]
        return f"{len(spoken.mel) / 100:.2f} s, {' and '.join(wrong) or 'read to the end'}"

    def attention(self, model: nn.Module, line: str) -> TextAttention:
        """Show where the last reader is in a text while it speaks."""
        text = self.checked_texts([line])[0]
        spoken = self.speak(model, [text])[0]
        step = self.config.reduction / 100
        times = [f"{i * step:.2f} s" for i in range(len(spoken.weights))]
        layer = LayerAttention("decoder 1", "cross", self.config.reader, spoken.weights[None], times, [*text, "<end>"])
        return TextAttention(text, self.described(spoken), [layer])
