"""A live recogniser: samples go in as they are recorded, words come out as soon as no later sample can change them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.blocks.look_ahead import LookAhead
from regard.data.batch import UNKNOWN
from regard.data.speech_features import HOP, WINDOW, log_mel, window_sizes
from regard.data.vocabulary import FIRST_TEXT_ID
from regard.decoding.ctc_search import CtcBeam
from regard.models.frames import Frames
from regard.tasks.recognition import RecognitionTask
from regard.tasks.support import device_under, evaluating, learned

LIVE_WITHIN = 8.0  # a prefix e^8 times less likely than the best is given up, so that words are decided


class LiveRecogniser:
    """Recognise a recording while it grows, by CTC: the log-probabilities are those of the whole pass, `latency` seconds later.

    The encoder has a bounded look-ahead (mixer="Truncated(16, 2)") and positions inside of its mixers, and its features are
    normalised by those of the training part.

        live = LiveRecogniser(run.task, run.model)
        for samples in parts:  # (n) each, `live.rate` a second
            print(live.feed(samples), end="")
        print(live.finish())
    """

    def __init__(self, task: RecognitionTask, model: Any, *, beam: int | None = None) -> None:
        config = task.config
        if config.normalise != "train":
            raise ValueError(
                "normalise=utterance needs the end of a recording: a live recogniser is trained with normalise=train"
            )
        if config.features != "mel":
            raise ValueError("slopes of cepstra need later windows: a live recogniser is trained with features=mel")
        if config.ctc_weight == 0:
            raise ValueError("with ctc_weight=0 CTC has learned nothing, and a decoder reads whole recordings")
        embed = model.encoder.embed
        assert isinstance(embed, Frames)
        if embed.positions is not None:
            raise ValueError(f"{config.positions} positions are added to tokens: use some that act in mixers, or none")
        self.task, self.model, self.embed, self.rate = task, model, embed, task.wav_rate
        self.stream = LookAhead(model.encoder.stack)
        self.state = self.stream.start(1)
        self.beam = CtcBeam(config.beam if beam is None else beam, within=LIVE_WITHIN)
        self.device = device_under(model)
        self.samples, self.windows = torch.zeros(0), torch.zeros(0, task.feature_count)
        self.begun = self.kept = False  # whether there was a window; whether the first of `windows` belong to a token before
        self.written = ""

    @property
    def latency(self) -> float:
        """Return the seconds between a sample and the log-probabilities that are final with it, at most."""
        tokens = self.embed.rate * (self.stream.latency + 1)
        return WINDOW + HOP * tokens

    def feed(self, samples: Tensor) -> str:
        """Read further samples (n), and return the words that are decided now, each with a space behind it."""
        self.samples = torch.cat([self.samples, samples.float()])
        size, hop = window_sizes(self.rate)
        if len(self.samples) < size:
            return ""
        count = 1 + (len(self.samples) - size) // hop
        self._windows(self.samples[: (count - 1) * hop + size])
        self.samples = self.samples[count * hop :]
        ready = len(self.windows) // self.embed.rate
        self._tokens(ready)
        decided = learned(self.task.vocabulary).decode(self.beam.agreed())
        return self._new(decided[: decided.rfind(" ") + 1])

    def finish(self) -> str:
        """Return the rest of the text, at the end of the recording."""
        if not self.begun and len(self.samples):
            self._windows(self.samples)
        self._tokens(-(-len(self.windows) // self.embed.rate))
        with evaluating(self.model):
            self._search(self.stream.finish(self.state))
        return self._new(learned(self.task.vocabulary).decode(self.beam.answers()[0].tokens))

    def _windows(self, samples: Tensor) -> None:
        low, high = self.task.mel_range
        made = log_mel(samples, self.rate, mels=self.task.config.mels, low=low, high=high)
        self.windows, self.begun = torch.cat([self.windows, self.task.normalised(made)]), True

    def _tokens(self, ready: int) -> None:
        """Encode the first `ready` tokens of the windows; those of the last one are kept, because the next token sees them."""
        skip = int(self.kept)
        if ready <= skip:
            return
        with evaluating(self.model):
            tokens = self.embed(self.windows[None].to(self.device))[:, skip:ready]
            y, self.state = self.stream.extend(self.state, tokens)
            self._search(y)
        self.windows, self.kept = self.windows[(ready - 1) * self.embed.rate :], True

    def _search(self, y: Tensor) -> None:
        logs = self.model.ctc(y).float().log_softmax(-1)[0]
        logs[:, UNKNOWN:FIRST_TEXT_ID] = -torch.inf  # none of them is text
        self.beam.extend(logs)

    def _new(self, text: str) -> str:
        new = text[len(self.written) :]
        self.written = text if new else self.written
        return new
