"""A trained run in Python: `load` gives its model, its task, and answers to lines. The command line answers through it too."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import tasks
from regard.config import Config
from regard.tasks.run_settings import choose_device, decoding, installed_here, restored

if TYPE_CHECKING:
    from torch import nn

    from regard.tasks.task import Task
    from regard.tasks.text_attention import TextAttention

LINES_PER_BATCH = 256  # lines that are answered at once


def load(
    run: str | os.PathLike[str], *, checkpoint: str | int | None = None, device: str = "auto", **settings: Any
) -> TrainedRun:
    """Load a run that `regard train` has made, finished or not, for inference: its data is not needed.

    `run` is its folder. `checkpoint` is "best" (on validation), "last", or the one of an update (400, "step-000400"); None takes
    the final weights of a finished run, and of an unfinished one the best checkpoint so far, with a warning. `device` is auto,
    cpu or cuda. Further arguments are settings of inference that the task has, such as `beam=5`.

        run = regard.load("runs/saw-softmax-1")
        run.predict(["they saw the duck"])

    >>> import pathlib, tempfile, regard
    >>> from regard.tasks import config, make_task
    >>> from regard.training.fit import fit
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "book.txt").write_text("to be or not to be, that is the question. " * 40)
    >>> small = {"file": str(folder / "book.txt"), "width": 8, "heads": 2, "depth": 1, "ffn": 16, "window": 16, "steps": 1}
    >>> task = make_task(config("text").replace(small))
    >>> task.read()
    >>> _ = fit(task, folder / "run", quiet=True)
    >>> run = regard.load(folder / "run", device="cpu", max_new_tokens=5)
    >>> len(run.predict(["to be"])[0])  # the prompt, and five characters more
    10
    """
    found = TrainedRun.open(run, checkpoint=checkpoint, device=device, settings=settings)
    if found.note:
        warnings.warn(found.note, stacklevel=2)
    return found


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A task and a model with trained weights, in eval mode on its device."""

    folder: Path
    task: Task
    model: nn.Module
    update: int | None = None  # of the weights, where they are those of a checkpoint; None: the final ones
    note: str = ""  # a sentence about an unfinished run
    sha256: str = ""  # of the file of the weights

    @classmethod
    def open(
        cls,
        run: str | os.PathLike[str],
        *,
        checkpoint: str | int | None = None,
        device: str = "auto",
        settings: dict[str, Any] | None = None,
    ) -> TrainedRun:
        """Load a run as `load` does; of an unfinished one, `note` tells which update its weights are of."""
        from regard.training.checkpoints import put_weights
        from regard.training.run_weights import run_weights

        folder, kind = Path(run), choose_device(str(device))
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is a file, not the folder of a run" if folder.is_file() else f"there is no folder {folder}"
            )
        if find_spec("safetensors") is None:
            raise ModuleNotFoundError("the weights of a run need safetensors: pip install 'regard[train]'", name="safetensors")
        kept, weights, sha256, update, note = run_weights(folder, checkpoint)
        config = decoding(restored(kept.config, f"{folder}/config.json"), settings or {})
        task = tasks.make_task(config)
        try:
            task.restore(kept.assets)
        except KeyError as error:
            raise ValueError(f"{folder}/assets lacks {error.args[0]}: restore it, or train again in another folder") from None
        except ValueError as error:
            raise ValueError(f"{folder}/assets: {error}") from None
        with installed_here(folder):
            model = task.model()
        put_weights(model, kept.weights, weights)
        return cls(folder, task, model.to(kind).eval(), update, note, sha256)

    @property
    def config(self) -> Config:
        """Settings of the run, with those of inference that were changed."""
        return self.task.config

    @property
    def description(self) -> str:
        """Describe what was learned, in words of `regard tasks` or, where settings matter, of the task."""
        return self.task.description or tasks.entry_of(self.config.task).summary

    def __repr__(self) -> str:
        which = "final weights" if self.update is None else f"weights of update {self.update}"
        return f"TrainedRun({str(self.folder)!r}: {self.config.task}, {self.description}; {which})"

    def predict(self, lines: Iterable[str], places: Sequence[str] | None = None) -> list[str]:
        """Answer every line, in their order; the answer to an empty one is empty.

        A line that cannot be answered raises ValueError with its place: "line 3", or what `places` has for it.
        """
        texts = _texts(lines, "predict")
        where = [f"line {number}" for number in range(1, len(texts) + 1)] if places is None else list(places)
        parts = (slice(i, i + LINES_PER_BATCH) for i in range(0, len(texts), LINES_PER_BATCH))
        return [answer for part in parts for answer in self._answers(texts[part], where[part])]

    def _answers(self, texts: list[str], places: list[str]) -> list[str]:
        try:
            found = iter(self.task.predict(self.model, [text for text in texts if text.strip()]))
        except ValueError as error:
            if len(texts) == 1:
                raise ValueError(f"{places[0]}: {str(error).replace('line 1 has', 'it has')}") from None
            return [answer for text, place in zip(texts, places, strict=True) for answer in self._answers([text], [place])]
        return [next(found) if text.strip() else "" for text in texts]

    def attention(self, lines: Iterable[str]) -> list[TextAttention]:
        """Compute the attention of every layer and head on each line; `regard show RUN TEXT` draws it.

            found = run.attention(["they saw the duck"])[0]
            found.layers[0].weights  # (heads, queries, keys), with their tokens in .queries and .keys

        A decoder that generates is fed its own answer: the weights of cross-attention are alignments of answer and line. Lines of
        tasks on images and recordings are paths of files, the tokens patches of the image or stretches of the recording.
        """
        texts = _texts(lines, "attention")
        for number, text in enumerate(texts, 1):
            if not text.strip():
                raise ValueError(f"line {number} is empty: there is nothing to attend to")
        return [self.task.attention(self.model, text) for text in texts]

    def evaluate(self, split: str = "test", data: str | os.PathLike[str] | None = None) -> dict[str, float]:
        """Score the run on a split, "test" or "val"; `data` is the folder of the data or above it, else REGARD_DATA."""
        if split not in ("test", "val"):
            raise ValueError(f"the split is test or val, not {split!r}")
        if data is not None or not self.task.splits:
            self.task.read(None if data is None else Path(data))
        if not self.task.splits.get(split):
            other = "val" if split == "test" else "test"
            raise ValueError(f"{self.config.task} has no {split} split: use {other}")
        return self.task.score(self.model, split)


def _texts(lines: Iterable[str], call: str) -> list[str]:
    """Return lines as a list; refuse one text, and what is no text."""
    if isinstance(lines, str):
        raise TypeError(f"{call} takes a list of lines, not one text: {call}([text])")
    texts = list(lines)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{call} takes lines of text, not {text!r}")
    return texts
