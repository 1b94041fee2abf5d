"""Lightning's Trainer, lean: it moves the model, calls the learner, and minds the signals."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from regard.text import unknown
from regard.training.atomic_files import RunError
from regard.training.learner import Trainer  # imported there, with a sentence where it is missing


@contextmanager
def trainer_in(kind: str, out: Path) -> Iterator[Trainer]:
    """A Lightning Trainer with everything off that costs time in a step or writes files of its own."""
    from lightning_fabric.plugins.environments import LightningEnvironment

    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]
    levels, interrupt = [logger.level for logger in loggers], signal.getsignal(signal.SIGINT)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GPU available but not used")  # a CPU was asked for
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 uses an old name of torch's
            trainer = Trainer(
                accelerator=kind,
                devices=1,
                max_epochs=1,  # of our own: it ends when the updates do
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
                default_root_dir=out,
                plugins=[LightningEnvironment()],
            )
            yield trainer
    except SystemExit as ended:  # so Lightning ends at Control-C, and leaves that key dead
        if trainer.received_sigterm or ended.code == 143:
            raise SystemExit(143) from None  # Lightning's 0 would say that it is finished
        signal.signal(signal.SIGINT, interrupt)
        raise KeyboardInterrupt from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def rounded(precision: str) -> Iterator[None]:
    """With tf32, matrix products of a GPU round their factors to 10 bits; afterwards all is as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_of(accelerator: str) -> str:
    if accelerator not in ("auto", "cpu", "cuda"):
        raise ValueError(unknown("there is no accelerator", accelerator, ["auto", "cpu", "cuda"]))
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise RunError("there is no CUDA device here: use accelerator='cpu', or 'auto' to take what there is")
    return ("cuda" if torch.cuda.is_available() else "cpu") if accelerator == "auto" else accelerator
