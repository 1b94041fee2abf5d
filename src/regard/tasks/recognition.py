"""The text of a recording, in characters: AN4 from its cepstra, strings of FSDD's digits from wav files."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.data.batch import BEGIN, END, UNKNOWN, Batch, padded, shifted
from regard.data.locate import find
from regard.data.speech_augment import change_tempo
from regard.data.speech_features import with_slopes
from regard.data.speech_sets import AN4_RANGE, AN4_RATE, CepstraText, SpokenDigit, read_an4, read_fsdd
from regard.data.token_labels import token_labels
from regard.data.vocabulary import FIRST_TEXT_ID, Characters, vocabulary
from regard.data.wav_files import Recording
from regard.decoding.ctc_search import CtcAnswer, ctc_greedy, ctc_prefix_beam
from regard.models.guided import record_alignments
from regard.models.recogniser import READERS, CtcSlotLogs, recogniser
from regard.options import check_choice
from regard.scores import character_errors, word_errors
from regard.tasks.recording_attention import RecordingAttention, recording_attention
from regard.tasks.speech_config import DigitStrings, Recognition
from regard.tasks.speech_task import SPEECH_INFERENCE, Normaliser, SpeechTask
from regard.tasks.support import device_under, evaluating, generate_answers, in_order, learned
from regard.tasks.task import ENCODER, ENCODER_DECODER, GENERATION_SETTINGS
from regard.tasks.text_attention import StackTokens
from regard.text import unknown
from regard.training.learnable import Step
from regard.training.losses import Loss
from regard.training.speech_loss import speech_loss

DECODES = ("ctc", "attention", "joint")
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STRINGS = {"train": 1500, "val": 150, "test": 300}
STRING_SEED = 1


class Utterance(NamedTuple):
    """Normalised features of a recording, and its text."""

    windows: Tensor  # (t f)
    target: list[int]  # with its END
    text: str


class RecognitionTask(SpeechTask):
    """The text of every recording; scored by the word error rate, and by that of characters."""

    config: Recognition
    best = ("wer", "min")

    def __init__(self, config: Recognition) -> None:
        super().__init__(config)
        check_choice("reader", config.reader, READERS)
        check_choice("decode", config.decode, DECODES)
        if not 0 <= config.ctc_weight <= 1:
            raise ValueError(f"ctc_weight is a share of the loss, from 0 to 1, not {config.ctc_weight!r}")
        if not self.joint and (config.decode != "ctc" or config.reader != "cross"):
            raise ValueError("with ctc_weight=1 there is no decoder: leave out decode and reader")
        if config.ctc_weight == 0 and config.decode != "attention":
            raise ValueError("with ctc_weight=0 CTC learns nothing: use decode=attention")
        self.bodies = ENCODER_DECODER if self.joint else ENCODER
        self.answering = (*GENERATION_SETTINGS, "decode") if self.joint else ("beam",)
        self.vocabulary: Characters | None = None

    @property
    def joint(self) -> bool:
        """Return whether the model has a decoder."""
        return self.config.ctc_weight < 1

    def unused(self) -> dict[str, str]:
        found = super().unused()
        return found if self.joint else found | dict.fromkeys(("share", "smoothing"), "models with a decoder")

    def utterances(self, folder: Path | None) -> dict[str, list[tuple[Tensor, str]]]:
        """Read features, before they are normalised, and texts; those of "train" at all speeds."""
        raise NotImplementedError

    def read(self, folder: Path | None = None) -> None:
        parts = self.utterances(folder)
        if self.vocabulary is None:
            self.vocabulary = Characters.of(text for _, text in parts["train"])
        if self.config.normalise == "train" and self.normaliser is None:
            self.normaliser = Normaliser.of([windows for windows, _ in parts["train"]])
        self.splits = {name: [self._coded(*pair) for pair in part] for name, part in parts.items()}
        self.splits["train"] = [x for x in self.splits["train"] if not self.too_long(x.windows)]

    def _coded(self, windows: Tensor, text: str) -> Utterance:
        return Utterance(self.normalised(windows), [*learned(self.vocabulary).encode(text), END], text)

    def assets(self) -> dict[str, str]:
        return {"vocabulary.json": learned(self.vocabulary).to_json(), **self.speech_assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        found = vocabulary(assets["vocabulary.json"])
        if not isinstance(found, Characters):
            raise ValueError(f"recognition is by characters, but vocabulary.json is of the kind {found.kind!r}")
        self.vocabulary = found
        self.restore_speech(assets)

    def size(self, example: Utterance) -> int:
        return len(example.windows)

    def batch(self, examples: Sequence[Utterance]) -> Batch:
        x, valid = self.padded_windows([example.windows for example in examples])
        target, target_valid = padded([example.target for example in examples], multiple=self.multiple)
        return Batch(x, valid, target, target_valid)

    def model(self) -> nn.Module:
        reader = self.config.reader if self.joint else None
        return recogniser(self.config, self.encoder, len(learned(self.vocabulary)), reader=reader)

    def loss(self, model: Any, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every step
        config = self.config
        return speech_loss(model, self.augmented(batch), ctc_weight=config.ctc_weight, smoothing=config.smoothing)

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Compute the scores of the likeliest path, or of greedy answers where CTC learns nothing."""
        return self._scored(model, "val", 1, "attention" if self.config.ctc_weight == 0 else "ctc")

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return self._scored(model, split, self.config.beam, self.config.decode)

    def _scored(self, model: nn.Module, split: str, beams: int, decode: str) -> dict[str, float]:
        examples = self.splits[split]
        texts = self.texts(model, examples, beams=beams, decode=decode)
        expected = [x.text for x in examples]
        wer, cer = word_errors(texts, expected), character_errors(texts, expected)
        return {"wer": wer, "cer": cer, "utterances": float(len(examples))}

    def texts(self, model: nn.Module, examples: Sequence[Utterance], *, beams: int, decode: str) -> list[str]:
        """Recognise utterances, the text of one that is too long being empty."""
        short = [x for x in examples if not self.too_long(x.windows)]
        with evaluating(model):
            ids = iter(in_order(short, self.size, SPEECH_INFERENCE, lambda rows: self._recognised(model, rows, beams, decode)))
        known = learned(self.vocabulary)
        return ["" if self.too_long(x.windows) else known.decode(next(ids)) for x in examples]

    def _recognised(self, model: Any, rows: list[Utterance], beams: int, decode: str) -> list[list[int]]:
        batch = self.batch(rows).to(device_under(model))
        if decode == "attention":
            state, most = model.start(batch.source, batch.source_valid), self.config.max_new_tokens
            return generate_answers(model, state, batch.source, config=self.config, most=most, beams=beams)
        slots = model.slots(batch.source, batch.source_valid)
        logs = slots.logs.clone()
        logs[..., UNKNOWN:FIRST_TEXT_ID] = -torch.inf  # none of them is text
        lengths = [logs.shape[1]] * len(rows) if slots.valid is None else slots.valid.sum(1).tolist()
        if decode == "ctc" and beams == 1:
            return ctc_greedy(logs, lengths)
        best = beams if decode == "joint" else 1
        found = [ctc_prefix_beam(row[:n], width=beams, best=best) for row, n in zip(logs.cpu(), lengths, strict=True)]
        if decode == "ctc":
            return [list(answers[0].tokens) for answers in found]
        return [self._better(model, slots, place, answers) for place, answers in enumerate(found)]

    def _better(self, model: Any, slots: CtcSlotLogs, place: int, answers: list[CtcAnswer]) -> list[int]:
        """Return the answer to a row that CTC and the decoder together give the highest probability."""
        device, weight = slots.logs.device, self.config.ctc_weight
        target, valid = (None if x is None else x.to(device) for x in padded([[*x.tokens, END] for x in answers]))
        assert target is not None
        rows = torch.full((len(answers),), place, device=device)
        memory = model.memory(slots.encoded)
        memory = memory._replace(contexts=tuple(x[rows] for x in memory.contexts), places=memory.places.select(rows))
        logs = model.head(model.hidden(memory, shifted(target), valid)).float().log_softmax(-1)
        own = logs.gather(-1, target[..., None])[..., 0]
        decoder = (own if valid is None else own.masked_fill(~valid, 0)).sum(1).tolist()
        totals = [weight * x.log + (1 - weight) * log for x, log in zip(answers, decoder, strict=True)]
        return list(answers[totals.index(max(totals))].tokens)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Recognise every wav file."""
        examples = [Utterance(self.normalised(self.read_windows(line)), [END], "") for line in lines]
        return self.texts(model, examples, beams=self.config.beam, decode=self.config.decode)

    def alignment(self, model: nn.Module, path: str) -> list[Tensor]:
        """Return the weights (h m n) of every aligner on a wav file and the text that it is recognised as."""
        windows = self.normalised(self.read_windows(path))
        text = self.predict(model, [path])[0]
        batch = self.batch([Utterance(windows, [*learned(self.vocabulary).encode(text), END], text)]).to(device_under(model))
        assert batch.target is not None
        with evaluating(model), record_alignments(model) as found:
            model(batch.source, batch.source_valid, shifted(batch.target))
        return [weights[0] for weights in found]

    def attention(self, model: nn.Module, line: str) -> RecordingAttention:
        """Compute the attention to a wav file, and to the text that it is recognised as: the decoder is fed it."""
        path = line.strip()
        text, known = self.predict(model, [path])[0], learned(self.vocabulary)
        batch = self.batch([self._coded(self.read_windows(path), text)]).to(device_under(model))
        assert batch.target is not None
        fed, ids = shifted(batch.target), batch.target[0].tolist()
        said = [StackTokens(token_labels(known, [BEGIN, *ids[:-1]]), token_labels(known, ids))] if self.joint else []
        given = (batch.source, batch.source_valid, fed)[: 3 if self.joint else 2]
        return recording_attention(self, model, lambda: model(*given), path, text, said)


class An4Task(RecognitionTask):
    """Spelled words, names and numbers. The data set has cepstra only; those of a wav file are computed in the same ranges."""

    wav_rate = AN4_RATE
    mel_range = AN4_RANGE

    def __init__(self, config: Recognition) -> None:
        super().__init__(config)
        if config.features != "mfcc":
            raise ValueError("an4 has cepstra and no recordings: use features=mfcc")

    def utterances(self, folder: Path | None) -> dict[str, list[tuple[Tensor, str]]]:
        train, val, test = read_an4(find("an4", folder))
        return {
            "train": [pair for x in train for pair in (self._at(x, speed) for speed in self.config.speeds)],
            "val": [self._at(x) for x in val],
            "test": [self._at(x) for x in test],
        }

    @staticmethod
    def _at(x: CepstraText, speed: float = 1.0) -> tuple[Tensor, str]:
        """Return the cepstra at a speed, with their slopes: without samples it is the tempo that changes, not the pitch."""
        cepstra = torch.from_numpy(x.cepstra)
        return with_slopes(cepstra if speed == 1 else change_tempo(cepstra, speed)), x.text


class DigitStringTask(RecognitionTask):
    """Strings of one to five digits by one voice, made of recordings of FSDD: test are the voices in `held_out`."""

    config: DigitStrings

    def utterances(self, folder: Path | None) -> dict[str, list[tuple[Tensor, str]]]:
        parts = digit_strings(read_fsdd(find("fsdd", folder)), self.config.held_out)
        found = {}
        for name, part in parts.items():
            speeds = self.config.speeds if name == "train" else [1.0]
            found[name] = [(self.windows_of(recording, speed), text) for recording, text in part for speed in speeds]
        return found


def digit_strings(found: Sequence[SpokenDigit], held_out: Sequence[str]) -> dict[str, list[tuple[Recording, str]]]:
    """Join recordings of one voice to strings, by a fixed seed: `held_out` voices for test, the first takes of others for val."""
    voices = sorted({x.speaker for x in found})
    for name in held_out:
        if name not in voices:
            raise ValueError(unknown("no recording is by", name, voices))
    if not held_out or len(set(held_out)) >= len(voices):
        raise ValueError(f"held_out names the voices of the test part, some of {', '.join(voices)}, not {list(held_out)!r}")
    parts: dict[str, dict[str, list[SpokenDigit]]] = {"train": {}, "val": {}, "test": {}}
    for x in found:
        part = "test" if x.speaker in held_out else "val" if x.take < 5 else "train"
        parts[part].setdefault(x.speaker, []).append(x)
    draws, made = random.Random(STRING_SEED), {}
    for part, by_voice in parts.items():
        own = sorted(by_voice)
        made[part] = [_joined(draws.choices(by_voice[draws.choice(own)], k=draws.randint(1, 5))) for _ in range(STRINGS[part])]
    return made


def _joined(digits: Sequence[SpokenDigit]) -> tuple[Recording, str]:
    samples = torch.cat([x.recording.samples for x in digits])
    return Recording(samples, digits[0].recording.rate), " ".join(DIGIT_WORDS[int(x.digit)] for x in digits)
