"""The interface of arena tasks: splits as integer tensors, trivial floors, slices of the score, and the usual model and budget.

A task is a frozen dataclass of options, written by the grammar of specs: `recall(length=128, pairs=8)`. It has no code for models
or training. A task of your own subclasses `ArenaTask`, sets `name`, and defines `vocab`, `classes` and `examples`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, NamedTuple, Self

from torch import Generator, Tensor

from regard.options import Options

ExamplesPart = Literal["train", "val", "test"]
TaskForm = Literal["label", "pair", "token", "next"]
IGNORED = -100  # a target that is not scored; the default of torch's cross_entropy


class Examples(NamedTuple):
    """Hold one split as integer tensors on the host; padding is 0, behind the tokens of an example."""

    tokens: Tensor  # (examples, n); (examples, 2, n) for pairs; uint8 or int16 where the vocabulary allows
    targets: Tensor  # (examples,), or (examples, n) for a label per token, IGNORED where nothing is scored
    lengths: Tensor | None = None  # (examples,) or (examples, 2); None where all examples are full
    slices: Mapping[str, Tensor] = {}


class SideTargets(NamedTuple):
    """Hold what is asked for at the tokens of a training batch, beside the labels of its examples."""

    tokens: Tensor  # that the model reads: some may be hidden
    targets: Tensor  # of the shape of tokens, IGNORED where nothing is asked


@dataclass(frozen=True)
class ArenaModel:
    """Hold the model that a task is usually compared with."""

    width: int = 64
    depth: int = 2
    heads: int = 2
    ffn: int = 128  # 0: blocks without a feed-forward layer
    positions: str = "sinusoidal"  # "none": mechanisms see the order only as their pattern does
    dropout: float = 0.0
    gated: bool = False  # SwiGLU instead of GELU
    conv: int = 0  # kernel of a short causal convolution before each mixer, 0: none
    bottleneck: bool = False  # all targets are read from the last vector, each by its position: an auto-encoder
    pooling: str = "mean"  # of the vectors of a sequence, for its label: mean, max, smooth (a softmax over positions), token


@dataclass(frozen=True)
class ArenaBudget:
    """Hold how a task is usually trained: AdamW, linear warm-up, one cosine."""

    steps: int = 2000
    batch: int = 64
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # learning rates, the best on validation is taken
    weight_decay: float = 0.01
    warmup: float = 0.1  # of all steps
    evaluations: int = 10  # on validation, equally spaced, the last one at the end
    clip: float = 1.0  # of the gradient's norm, 0: none
    stop: float = 0.0  # training ends with an evaluation of this score or a better one; 0: with the last step
    buckets: int = 1  # padded lengths of batches, where examples differ in length: a batch has examples of about one length


@dataclass(frozen=True)
class ArenaTask(Options):
    """Describe a task. Forms: a label per sequence, a label for a pair of sequences, a label per token, the next token."""

    form: ClassVar[TaskForm] = "label"
    causal: ClassVar[bool] = False  # the model sees no later token; always so for the form "next"
    metric: ClassVar[str] = "accuracy"  # or "bits per token", the only one where less is better
    title: ClassVar[str] = ""  # one line for tables
    source: ClassVar[str] = ""  # paper or data set
    techniques: ClassVar[tuple[str, ...]] = ()  # options of training alone: they change batches or losses, no split, no floor
    slice_names: ClassVar[Mapping[str, Sequence[str]]] = {}  # slice -> words for its values 0, 1 ..., where it has some
    needs: ClassVar[str] = ""  # the data set that must be there, as `regard.data.locate` names it; generated where empty

    def __str__(self) -> str:
        """Write the task with its options, as `arena_task` reads it; techniques that are off are left out."""
        options = {x.name: getattr(self, x.name) for x in fields(self)}
        off = [x.name for x in fields(self) if x.name in self.techniques and options[x.name] == x.default]
        values = ", ".join(f"{name}={value!r}" for name, value in options.items() if name not in off)
        return f"{self.name}({values})" if values else self.name

    @property
    def length(self) -> int:
        """Tokens of the longest example."""
        raise NotImplementedError

    @property
    def vocab(self) -> int:
        """Return the number of token ids, padding included."""
        raise NotImplementedError

    @property
    def classes(self) -> int:
        """Return the number of labels."""
        raise NotImplementedError

    @property
    def side_labels(self) -> int:
        """Return the number of labels that training asks for at some tokens, beside the label of the example; 0: it does not."""
        return 0

    def side_targets(self, tokens: Tensor, valid: Tensor | None, generator: Generator | None = None) -> SideTargets:
        """Return what is asked for at tokens of a training batch, on its device, by operations of constant shapes."""
        raise NotImplementedError

    def examples(self, part: ExamplesPart) -> Examples:
        """Return one split: a pure function of the options. No example is in two splits."""
        raise NotImplementedError

    def plain(self) -> Self:
        """Return the task with all of its techniques off: it has the same splits and floors."""
        return replace(self, **{x.name: x.default for x in fields(self) if x.name in self.techniques})

    def floors(self) -> dict[str, float]:
        """Return scores on test that need no attention, by name: the most frequent label, bytes counted, chance ..."""
        raise NotImplementedError

    def model(self) -> ArenaModel:
        """Return the usual model."""
        return ArenaModel()

    def budget(self) -> ArenaBudget:
        """Return the usual budget."""
        return ArenaBudget()

    def augment(self, tokens: Tensor, targets: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Change a batch of training examples on its device, by operations of constant shapes: a step may be captured."""
        return tokens, targets


@dataclass
class ArenaScore:
    """Hold the score of a model on one split."""

    value: float
    count: int  # targets that were scored
    slices: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # slice -> value of it -> score, count
