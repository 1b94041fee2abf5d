"""Attention of a trained recogniser on a recording, and on the text that it is recognised as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.data.speech_features import HOP, log_mel
from regard.data.wav_files import read_wav
from regard.tasks.speech_task import SpeechTask
from regard.tasks.support import evaluating
from regard.tasks.text_attention import LayerAttention, StackTokens, TextAttention, text_attention


@dataclass(frozen=True, repr=False, kw_only=True)
class RecordingAttention(TextAttention):
    """Hold the attention of all layers on one recording, whose path is `text`. Tokens are called by where they begin, in s."""

    mel: Tensor  # (t f) log energies of its windows, one every 10 ms
    token_seconds: float  # of a token of the encoder

    @property
    def alignments(self) -> list[LayerAttention]:
        """List the layers of the decoder that read the recording: rows are characters of the answer, columns tokens."""
        return [layer for layer in self.layers if layer.kind == "cross"]

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "token_seconds": self.token_seconds}


def recording_attention(
    task: SpeechTask, model: nn.Module, forward: Callable[[], object], path: str, answer: str, said: Sequence[StackTokens]
) -> RecordingAttention:
    """Run a pass of a model over one recording, and collect the weights; `said` are the tokens of its decoder, if it has one."""
    recording, (low, high) = read_wav(path), task.mel_range
    mel = log_mel(task.resampled(recording), task.wav_rate, mels=task.config.mels, low=low, high=high)
    rate = 2**task.config.halvings
    tokens = StackTokens([f"{start * HOP:.2f}" for start in range(0, len(mel), rate)])
    with evaluating(model):
        found = text_attention(model, forward, [tokens, *said], path, answer)
    return RecordingAttention(found.text, found.answer, found.layers, found.missing, mel=mel, token_seconds=rate * HOP)
