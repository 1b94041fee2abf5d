"""Language model of characters, bytes or subwords."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.checks import need
from regard.data.batch import BEGIN, END, MASK, PAD, UNKNOWN, Batch
from regard.data.datasets import Splits, read_shakespeare
from regard.data.locate import find
from regard.data.token_labels import token_labels
from regard.data.vocabulary import Bytes, Characters, Subwords, vocabulary
from regard.decoding import Constraints, Sample, generate
from regard.models.build import language_model
from regard.tasks.language_modeling_config import Language
from regard.tasks.support import check_lengths, device_under, evaluating
from regard.tasks.task import DECODER_ONLY, Task
from regard.tasks.text_attention import StackTokens, TextAttention, text_attention
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy


class LanguageTask(Task):
    """The next character of a text; scored by cross-entropy, in nats a character. An example is where a window begins.

    A subclass may learn another vocabulary in `learn`, of the class `units_class`.
    """

    best = ("loss", "min")
    steady = True
    bodies = DECODER_ONLY
    answering = ("max_new_tokens", "temperature")
    config: Language

    def __init__(self, config: Language) -> None:
        super().__init__(config)
        need("stride", config.stride)
        if not 1 <= config.window <= config.max_len:
            raise ValueError(f"window must be from 1 to max_len={config.max_len}, not {config.window}")
        if not config.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {config.temperature!r}")
        self.characters: Characters | Bytes | Subwords = Characters([])
        self.units_class: type[Characters | Bytes | Subwords] = Characters
        self.texts: dict[str, torch.Tensor] = {}

    def parts(self, folder: Path | None) -> Splits[str]:
        """Read the texts of train, val and test; "" where there is none."""
        return read_shakespeare(find("tinyshakespeare", folder))

    def learn(self, train: str) -> Characters | Bytes | Subwords:
        """Learn the vocabulary."""
        return Characters.of([train])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of the data."""
        return self.characters.encode(text)

    def read(self, folder: Path | None = None) -> None:
        parts = self.parts(folder)
        if len(self.characters) == len(Characters([])):
            self.characters = self.learn(parts.train)
        self.texts = {name: torch.tensor(self.encode(text)) for name, text in parts._asdict().items() if text}
        self.sample = parts.val.strip().partition("\n")[0]
        window, last = self.config.window, len(self.texts["train"]) - self.config.window - 1
        starts = {"train": range(0, last + 1, self.config.stride)}
        starts |= {name: range(0, len(self.texts.get(name, ())) - 1, window) for name in ("val", "test")}
        self.splits = {name: [(name, at) for at in places] for name, places in starts.items()}

    def assets(self) -> dict[str, str]:
        return {"characters.json": self.characters.to_json()}

    def restore(self, assets: Mapping[str, str]) -> None:
        found = vocabulary(assets["characters.json"])
        if not isinstance(found, self.units_class):
            raise ValueError(f"characters.json holds {found.kind}: restore it")
        self.characters = found

    def size(self, example: tuple[str, int]) -> int:  # noqa: ARG002 - windows are alike
        return self.config.window

    def batch(self, examples: Sequence[tuple[str, int]]) -> Batch:
        """Cut windows, and the next character of each position; one at the end of the text may be shorter, and then all are."""
        window = self.config.window
        text = self.texts[examples[0][0]]
        window = min(window, len(text) - 1 - max(at for _, at in examples))
        index = torch.tensor([at for _, at in examples])[:, None] + torch.arange(window + 1)
        rows = text[index]
        return Batch(rows[:, :-1].contiguous(), None, rows[:, 1:].contiguous())

    def model(self) -> nn.Module:
        return language_model(self.config, len(self.characters))

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        return cross_entropy(model(batch.source), batch.target, smoothing=self.config.smoothing)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        if not self.splits[split]:
            raise ValueError(f"there is no {split} split of this text: it has train and val")
        whole, last = self.splits[split][:-1], self.splits[split][-1:]  # the last window may be shorter
        with evaluating(model):
            parts = [*(whole[i : i + 128] for i in range(0, len(whole), 128)), last]
            losses = [self.loss(model, self.batch(part).to(device_under(model)), 0) for part in parts]
        nll = sum(float(x.parts["nll"]) for x in losses) / sum(int(x.over) for x in losses)
        return {"loss": nll, "bits": nll / math.log(2)}

    def predict(self, model: Any, lines: Sequence[str]) -> list[str]:
        """Continue every line, by sampling with a fixed seed, within the positions of the model.

        A prompt is cut to its end, so that what follows has room, but never to less than half of the positions.
        """
        longest, most = self.config.max_len, self.config.max_new_tokens
        device, answers = device_under(model), []
        for line in lines:
            prompt = self.characters.encode(line or "\n")[-max(longest - most, (longest + 1) // 2) :]
            room = longest - len(prompt) + 1  # the last token is not read
            constraints = Constraints(END, max_new_tokens=min(most, room), banned=(PAD, UNKNOWN, BEGIN, MASK))
            choice = Sample(temperature=self.config.temperature, seed=self.config.seed)
            with evaluating(model):
                continuation = generate(
                    model, model.start(1), torch.tensor([prompt], device=device), constraints=constraints, choice=choice
                )[0]
            given = self.characters.decode(prompt)  # the space in front of subwords belongs to the first of them alone
            answers.append(line + self.characters.decode(prompt + continuation)[len(given) :])
        return answers

    def attention(self, model: nn.Module, line: str) -> TextAttention:
        """Compute the attention on a line; nothing is generated."""
        row = self.characters.encode(line)
        check_lengths([row], self.config.max_len)
        tokens = torch.tensor([row], device=device_under(model))
        read = StackTokens(token_labels(self.characters, row))
        with evaluating(model):
            return text_attention(model, lambda: model(tokens), [read], line, "")
