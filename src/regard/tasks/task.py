"""A task: data, a model, what it loses and how well it does. All that training and the command line know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from regard.config import Config
from regard.data.batch import Batch
from regard.training.losses import Loss

Step = int | Tensor  # the number of an update, from 1; in captured passes (`config.graphs`) only the device knows it
SplitExamples = Mapping[str, Sequence[Any]]


class Task:
    """One thing to learn, made of its configuration alone; `read` gives it data, `restore` what a run has learned of it.

    Examples are encoded: what `batch` takes. The splits are "train", "val" and "test".
    """

    best: ClassVar[tuple[str, str]] = ("loss", "min")  # the validation score that chooses, and where it is better

    sample: str = ""  # a text that it could be asked; `read` finds one
    answering: tuple[str, ...] = ()  # settings that only say how it answers: they may change after training
    steady: bool = False  # its loss does the same work at every update, without a look at the device: config.graphs may be set

    def __init__(self, config: Config) -> None:
        self.config = config
        self.splits: SplitExamples = {}

    def read(self, folder: Path | None = None) -> None:
        """Find the data, learn vocabularies from its training part, and encode it into `splits`."""
        raise NotImplementedError

    def assets(self) -> dict[str, str]:
        """What a run must keep beside its weights, by file name: vocabularies, labels."""
        return {}

    def restore(self, assets: Mapping[str, str]) -> None:
        """The opposite of `assets`: enough to build the model and to predict, without data."""

    def size(self, example: Any) -> int:
        """Its tokens: batches hold so many at most."""
        raise NotImplementedError

    def batch(self, examples: Sequence[Any]) -> Batch:
        raise NotImplementedError

    @property
    def multiple(self) -> int:
        """Of which batches are made long: few shapes where every shape is captured."""
        return 8 if self.config.graphs else 1

    def model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:
        """Summed over what is predicted, in training, at this update."""
        raise NotImplementedError

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        """How well it does on a split, `best` among the names."""
        raise NotImplementedError

    def signatures(self) -> dict[str, str]:
        """How scores that come in several kinds were computed, by name: sacreBLEU's signature of BLEU."""
        return {}

    def watch(self, model: nn.Module) -> dict[str, float]:
        """The scores that training looks at now and then: those of validation, or something cheaper, `best` among them."""
        return self.score(model, "val")

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """An answer for every line of text."""
        raise NotImplementedError
