"""A task: data, a model, a loss and scores. Training and the command line use nothing else of it.

How to add one:

1. Settings: a dataclass that extends `Config` with fields of its own, each with a comment on the same line (`regard tasks TASK`
   prints it), and a function that makes the defaults. They go into a module that does not import torch.
2. A subclass of `Task` with `read`, `size`, `batch`, `model`, `loss`, `score` and `predict`; `assets` and `restore` for what a
   run keeps beside its weights. It describes itself by its attributes: `best`, `bodies`, `answering`, `steady`.
3. A row of `regard.tasks.TASKS`.

`regard tasks`, `train`, `evaluate` and `predict` then work with it, and refuse settings that it does not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.config import Config
from regard.data.batch import Batch
from regard.tasks.text_attention import TextAttention
from regard.training.learnable import Step
from regard.training.losses import Loss

SplitExamples = Mapping[str, Sequence[Any]]
DECODER_SETTINGS = ("cross", "wiring", "decoder_depth")
GENERATION_SETTINGS = ("beam", "length_penalty", "max_new_tokens")


class Body(NamedTuple):
    """One stack of layers of a model."""

    causal: bool = False  # a token sees no later one
    reads: bool = False  # it has cross-attention to the stack before it


ENCODER = (Body(),)
DECODER_ONLY = (Body(causal=True),)
ENCODER_DECODER = (Body(), Body(causal=True, reads=True))
ENCODER_NAT_DECODER = (Body(), Body(reads=True))  # non-autoregressive: a token sees all others


class Task:
    """One thing to learn, made of its configuration alone; `read` gives it data, `restore` what a run has learned of it.

    Examples are encoded: what `batch` takes. The splits are "train", "val" and "test".
    """

    best: tuple[str, str] = ("loss", "min")  # the validation score that selects weights, and where it is better
    bodies: tuple[Body, ...] = ENCODER  # the stacks of its model, the encoder first; none: layers of its own
    answering: tuple[str, ...] = ()  # settings of inference: they may change after training
    steady: bool = False  # its loss does the same work at every update and reads nothing from the device: graphs=true may be set
    file_ending: str = ""  # the ending of the files whose paths `predict` takes; "": it answers lines of text
    sample: str = ""  # a text that `predict` could be given; `read` finds one

    def __init__(self, config: Config) -> None:
        self.config = config
        self.splits: SplitExamples = {}
        self.begun_assets: Mapping[str, str] = {}  # assets of the run that goes on: `read` takes from them what init_from gave it

    @property
    def description(self) -> str:
        """Describe what is learned where that depends on the settings; "" where `regard tasks` says all."""
        return ""

    def unused(self) -> dict[str, str]:
        """Map each setting that has no effect in this task to what it is for. The command line refuses to change one of them."""
        found = {name: "answers of one token after another" for name in GENERATION_SETTINGS if name not in self.answering}
        if not any(body.reads for body in self.bodies):
            found |= dict.fromkeys(DECODER_SETTINGS, "models with a decoder that reads an encoder")
        return found

    def check_answering(self, trained: Config) -> None:
        """Raise ValueError if a setting of inference does not fit weights that were trained with these settings."""

    def read(self, folder: Path | None = None) -> None:
        """Find the data, learn vocabularies from its training part, and encode it into `splits`."""
        raise NotImplementedError

    def go_on(self, out: Path) -> None:
        """Take the assets of the run in a folder, where it has weights of its own: the run of init_from is not needed then."""
        from regard.training import checkpoints

        has_weights = checkpoints.latest(out) is not None or (out / checkpoints.RESULT).is_file()
        if getattr(self.config, "init_from", "") and has_weights:
            checkpoints.check_seals(out)
            self.begun_assets = checkpoints.load_assets(out)

    def check_mixers(self) -> None:
        """Refuse mechanisms that do not fit the tokens, such as a pattern of another grid, before anything is read."""

    def describe_data(self) -> list[str]:
        """Describe what `read` found, in lines: the command line prints them before training. Named data sets need none."""
        return []

    def assets(self) -> dict[str, str]:
        """Write what a run must keep beside its weights, by file name: vocabularies, labels."""
        return {}

    def restore(self, assets: Mapping[str, str]) -> None:
        """Read what `assets` wrote: enough to build the model and to predict, without data."""

    def size(self, example: Any) -> int:
        """Count the tokens of an example: a batch holds at most `config.batch_tokens`."""
        raise NotImplementedError

    def batch(self, examples: Sequence[Any]) -> Batch:
        """Pad examples into tensors. No random number may be drawn here."""
        raise NotImplementedError

    @property
    def multiple(self) -> int:
        """Number that the length of a batch is a multiple of: few shapes where every shape is captured as a CUDA graph."""
        return 8 if self.config.graphs else 1

    def model(self) -> nn.Module:
        """Build the model, with random weights."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:
        """Compute the training loss of a batch at an update, summed over what is predicted."""
        raise NotImplementedError

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        """Compute the scores of a split, `best` among the names."""
        raise NotImplementedError

    def signatures(self) -> dict[str, str]:
        """Describe how scores that come in several kinds were computed, by name: sacreBLEU's signature of BLEU."""
        return {}

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Compute the scores of a validation during training: those of "val", or cheaper ones, `best` among them."""
        return self.score(model, "val")

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Answer every line of text."""
        raise NotImplementedError

    def attention(self, model: nn.Module, line: str) -> TextAttention:  # noqa: ARG002 - for the tasks that have it
        """Compute the attention of every layer on a line, and on the answer to it where that is generated."""
        raise ValueError(f"{self.config.task} has no method that shows its attention")
