"""The speech that a run makes of a text, as a wav file or a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.console import check_place, labelled, screen
from regard.cli.inputs import Line
from regard.cli.picture_file import FORMATS, check_out, load_plot, save_picture

if TYPE_CHECKING:
    from regard.tasks.trained_run import TrainedRun


def check_speech_file(out: Path | None) -> None:
    """Check the name of the file, before any work is done."""
    if out is None or out.suffix.lower() in FORMATS:
        return check_out(out)
    if out.suffix.lower() != ".wav":
        raise ValueError(f"speech goes into a .wav file, or its picture into {', '.join(FORMATS)}, not into {str(out)!r}")
    check_place(out)


def write_speech(found: TrainedRun, lines: Iterable[Line], out: Path) -> None:
    """Write the speech of one text, or draw it."""
    from regard.data.wav_files import write_wav
    from regard.tasks.synthesis import SynthesisTask

    task = found.task
    if not isinstance(task, SynthesisTask):
        raise ValueError(f"--out is for speech that a run makes of a text, not for {found.config.task}")
    texts = [line.text for line in islice(lines, 2)]
    if len(texts) != 1 or not texts[0].strip():
        raise ValueError("--out is for the speech of one text: give one that is not empty")
    text = task.checked_texts(texts)[0]
    spoken = task.speak(found.model, [text])[0]
    if out.suffix.lower() == ".wav":
        part = out.with_name(f".{out.name}.{os.getpid()}.part")
        write_wav(part, task.recording(spoken))
        part.replace(out)
    else:
        draw = load_plot("utterance_plot", "draw_utterance")
        save_picture(lambda: draw(spoken.mel, spoken.weights, text, reduction=task.config.reduction), out)
    screen().print(labelled([("written", str(out)), ("speech", task.described(spoken))]), highlight=False)
