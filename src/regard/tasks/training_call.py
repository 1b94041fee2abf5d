"""Training in Python: `train` reads the data of a task, trains its model in a folder, and loads the run that it has made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from regard import tasks
from regard.tasks.run_settings import check_decoding, choose_device, refuse_unused, started_config
from regard.tasks.trained_run import TrainedRun


def train(
    task: str,
    out: str | os.PathLike[str],
    *,
    preset: str | None = None,
    data: str | os.PathLike[str] | None = None,
    device: str = "auto",
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a task as `regard train` does, and return the run: `train("text", "runs/book", file="book.txt").predict(["It was"])`.

    `task` is its name, `out` the folder of the run: an interrupted one goes on there, and a finished one with larger `steps`.
    `preset` is one of the task ("cpu"), `data` the folder of its data or above it, else REGARD_DATA, `device` auto, cpu or cuda.
    `quiet` prints nothing. Further arguments are `settings` of the task, those of own files among them: `csv`, `jsonl`, `folder`,
    `text` and `label` of classify, `folder` of images, `file` of text, `pairs` of translate, `conll` of tag, `valid` and `test`
    of all five. The number of threads is that of torch.

    >>> import pathlib, tempfile, regard
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "book.txt").write_text("to be or not to be, that is the question. " * 40)
    >>> small = {"width": 8, "heads": 2, "depth": 1, "ffn": 16, "window": 16, "steps": 1}
    >>> run = regard.train("text", folder / "run", file=folder / "book.txt", device="cpu", quiet=True, **small)
    >>> len(run.evaluate("test")) > 1, run.folder.name
    (True, 'run')
    """
    from regard.training.fit import fit
    from regard.training.progress import print_line

    kind, folder = choose_device(device), Path(out)
    config = started_config(task, folder, preset).replace({name: _plain(value) for name, value in settings.items()})
    made = tasks.make_task(config)
    refuse_unused(made.unused(), settings)
    check_decoding(config)
    made.go_on(folder)
    made.read(None if data is None else Path(data))
    for line in () if quiet else made.describe_data():
        print_line(line)
    fit(made, folder, accelerator=kind, quiet=quiet)
    return TrainedRun.open(folder, device=kind)


def _plain(value: Any) -> Any:
    """Return a path as a text, also in a list: settings are JSON values."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
