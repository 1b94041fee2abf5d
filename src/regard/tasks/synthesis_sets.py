"""What synthesis learns from: generated tones, strings of FSDD's digits, and corpora in the layout of LJ Speech."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from regard.checks import need
from regard.data.locate import find
from regard.data.speech_sets import read_fsdd
from regard.data.spoken_texts import SpokenText, digit_texts, read_corpus
from regard.data.tone_texts import read_tones, tone_texts
from regard.scores import character_errors
from regard.tasks.synthesis import Spoken, SynthesisTask, TextFrames
from regard.tasks.synthesis_config import CorpusSynthesis, DigitSynthesis


class TonesTask(SynthesisTask):
    """Letters as chords: scored also by the error rate of the letters that are found again in its frames."""

    slack = 1  # no letter is shorter than a step

    def spoken(self, folder: Path | None) -> dict[str, list[SpokenText]]:  # noqa: ARG002 - made, not read
        return tone_texts()

    def scored(self, model: nn.Module, rows: Sequence[TextFrames]) -> tuple[dict[str, float], list[Spoken]]:
        scores, spoken = super().scored(model, rows)
        texts = [read_tones(one.mel, low=self.low_hertz, high=self.high_hertz) for one in spoken]
        return {**scores, "cer": character_errors(texts, [x.text for x in rows])}, spoken


class DigitSynthesisTask(SynthesisTask):
    """Strings of one to three digits in one voice of FSDD."""

    config: DigitSynthesis

    def spoken(self, folder: Path | None) -> dict[str, list[SpokenText]]:
        return digit_texts(read_fsdd(find("fsdd", folder)), self.config.voice)


class CorpusSynthesisTask(SynthesisTask):
    """Texts of a corpus: metadata.csv and wavs/, as LJ Speech has them and `regard prepare espeak` makes them."""

    config: CorpusSynthesis

    def __init__(self, config: CorpusSynthesis) -> None:
        super().__init__(config)
        self.wav_rate = need("rate", config.rate, 4000, 48_000)

    def spoken(self, folder: Path | None) -> dict[str, list[SpokenText]]:
        return read_corpus(find("tts", folder))
