"""Commands for a trained run: scores (`evaluate`), answers (`predict`), distilled targets (`distil`)."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import settings
from regard.cli.console import aside, labelled, number, screen, sentences, stop, write_json
from regard.cli.inputs import Line, input_lines, is_recording
from regard.cli.speech_file import check_speech_file, write_speech
from regard.cli.threads import Threads, choose_threads, used
from regard.data.text_files import NotTextError

if TYPE_CHECKING:
    from torch import nn

    from regard.tasks.trained_run import TrainedRun
    from regard.tasks.translation import TranslationTask

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the data, or above it; else REGARD_DATA.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of inference: beam=5.")]
CheckpointName = Annotated[
    str | None, typer.Option(metavar="NAME", help="best (on validation), last, or an update: 400. Else the final weights.")
]


def trained(
    run: Path, changes: Iterable[str], device: str, threads: int | None = None, checkpoint: str | None = None
) -> tuple[TrainedRun, int]:
    """Load a run for inference, and choose a number of threads; of an unfinished one, print which update its weights are of."""
    from regard.tasks.support import device_under
    from regard.tasks.trained_run import TrainedRun

    found = TrainedRun.open(run, checkpoint=checkpoint, device=device, settings=settings.by_name(list(changes)))
    if found.note:
        aside(found.note)
    return found, choose_threads(found.config, threads, device_under(found.model).type)[0]


def evaluate(
    run: Folder,
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    changes: Changes = None,
    data: Data = None,
    device: Device = "auto",
    threads: Threads = None,
    checkpoint: CheckpointName = None,
    as_json: Annotated[bool, typer.Option("--json", help="The scores, machine-readable.")] = False,
) -> None:
    """Score a run on data it has not learned from, and keep the scores in RUN/scores.json."""
    with sentences():
        found, count = trained(run, changes or [], device, threads, checkpoint)
        task, update = found.task, found.update
        with used(count):
            scores = found.evaluate(split, data)
        settings_used = {name: getattr(task.config, name) for name in task.answering}
        line: dict[str, Any] = {"split": split, "settings": settings_used, "scores": scores, "signatures": task.signatures()}
        line |= {} if update is None else {"update": update}  # of a checkpoint
        line["weights"] = found.sha256
        _save_scores(run / "scores.json", line)
    if as_json:
        write_json({"run": str(run), "task": task.config.task, **line})
        return
    how = task.signatures()
    rows = [(name, number(value) + (f"   {how[name]}" if name in how else "")) for name, value in scores.items()]
    console = screen()
    which = "" if update is None else f", update {update}"
    console.print(f"\n{run} on {split}{which}", style="bold", markup=False, highlight=False)
    console.print(labelled([*rows, ("", ""), ("kept in", str(run / "scores.json"))]), highlight=False)


def _save_scores(path: Path, line: dict[str, Any]) -> None:
    """Write scores beside others; those of the same split, settings and update are replaced, those of gone weights removed."""
    from regard.data.strict_json import read_value
    from regard.training import atomic_files

    kept: list[Any] = []
    if path.is_file():
        try:
            kept = read_value(path.read_bytes())
            kept = [old for old in kept if _what(old) != _what(line) and not _gone(old, line)]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is not as it was written: delete or restore it, and evaluate again") from None
    atomic_files.replace(path, atomic_files.as_json([*kept, line]))


def _what(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["split"], line["settings"], line.get("update")


def _gone(old: dict[str, Any], line: dict[str, Any]) -> bool:
    """Return whether old scores are of final weights that are others now, as the run went on; versions before did not say."""
    return "update" not in old and "update" not in line and old.get("weights", line["weights"]) != line["weights"]


def predict(
    run: Folder,
    source: Annotated[
        str,
        typer.Argument(metavar="TEXT|FILE|-", help="A text, a file with one a line, - for stdin, or a wav or image file."),
    ],
    changes: Changes = None,
    device: Device = "auto",
    threads: Threads = None,
    checkpoint: CheckpointName = None,
    live: Annotated[
        bool, typer.Option("--live", help="Feed a wav file in tenths of a second; words as they are decided.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on each line: text and answer, as they are.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speech of one text: a .wav file, or a picture of it (.png, .pdf, .svg).")
    ] = None,
) -> None:
    """Answer a text, or every line of a file or of stdin: one line for each. A line break in an answer is written as \\n."""
    with sentences():
        from regard.tasks.trained_run import LINES_PER_BATCH

        check_speech_file(out)
        many, lines = input_lines(source)
        found, count = trained(run, changes or [], device, threads, checkpoint)
        if out is not None:
            with used(count):
                return write_speech(found, lines, out)
        if is_recording(source) and not found.task.file_ending:
            raise ValueError(f"{source} is a recording, but {run} is a run of {found.config.task}, which answers texts")
        if not is_recording(source) and source.lower().endswith(tuple(found.task.file_ending.split())):
            lines = iter([Line(source, "this file")])  # the file itself, not lines of it
        elif found.task.file_ending:
            lines = _paths(lines, source, found.task.file_ending)
        if live:
            if as_json:
                raise ValueError("--live prints words as they are decided, not JSON: leave --live or --json out")
            with used(count):
                return _live(found, source)
        written = _json_line if as_json else _plain_line
        for part in _parts(lines, LINES_PER_BATCH if many else 1):
            with used(count):
                answers = found.predict([line.text for line in part], [line.where for line in part])
            for line, answer in zip(part, answers, strict=True):
                sys.stdout.buffer.write(written(line.text, answer).encode(errors="replace") + b"\n")
            sys.stdout.flush()


def _paths(lines: Iterator[Line], source: str, endings: str) -> Iterator[Line]:
    """Yield the lines of a text, each with the path of a file; one that is not text was meant to be such a file itself."""
    try:
        yield from lines
    except NotTextError:
        kinds = ", ".join(endings.split())
        raise ValueError(f"{source} is no file of {kinds}, and no text with the path of one on each line") from None


def _plain_line(_: str, answer: str) -> str:
    return answer.replace("\r", "\\r").replace("\n", "\\n")


def _json_line(text: str, answer: str) -> str:
    return json.dumps({"text": text, "answer": answer}, ensure_ascii=False)


def _live(found: TrainedRun, source: str) -> None:
    """Recognise a wav file as if it were being recorded: print each word as soon as it is decided."""
    from regard.data.wav_files import read_wav
    from regard.tasks.live_recognition import LiveRecogniser
    from regard.tasks.recognition import RecognitionTask

    if not is_recording(source) or not isinstance(found.task, RecognitionTask):
        raise ValueError(
            f"--live is for a wav file and a run that recognises its words, not for {source} and {found.config.task}"
        )
    live = LiveRecogniser(found.task, found.model)
    aside(f"words are decided {live.latency:.2f} s after their samples at the earliest")
    for part in found.task.resampled(read_wav(source)).split(live.rate // 10):
        sys.stdout.write(live.feed(part))
        sys.stdout.flush()
    sys.stdout.write(live.finish() + "\n")


def _parts(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    while part := list(islice(lines, size)):
        yield part


def distil_(
    run: Folder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="One answer a line; it must not be there yet.")],
    changes: Changes = None,
    data: Data = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Write a run's answers to all training sources, as distilled targets: --set distilled=FILE. What is stopped goes on."""
    from regard.cli.partial_answers import Partial
    from regard.tasks.translation import TranslationTask

    with sentences():
        if out.exists():
            raise ValueError(f"{out} is there already: choose another name, or delete it")
        if not out.parent.is_dir():
            raise ValueError(f"cannot write {out}: there is no folder {out.parent}")
        found, count = trained(run, changes or [], device, threads)
        task, model = found.task, found.model
        if not isinstance(task, TranslationTask):
            raise ValueError(f"{run} is a run of {task.config.task}: only translation learns from distilled targets")
        task.read(data)
        kept, total = Partial(out, _answers_key(task, model)), len(task.texts["train"])
        if kept.answers:
            aside(f"going on behind {len(kept.answers):,} of {total:,} answers in {kept.path}")
        try:
            with used(count), _progress(total, len(kept.answers)) as shown:
                for answers in task.distil(model, len(kept.answers)):
                    kept.add(answers)
                    shown(len(kept.answers))
        except (KeyboardInterrupt, SystemExit) as ended:  # SIGTERM is the second
            again = shlex.join(["regard", "distil", str(run), "--out", str(out), *_parse_options(changes, data)])
            far = f"{len(kept.answers):,} of {total:,} answers are kept in {kept.path}"
            stop(f"stopped; {far}, go on with: {again}", 130 if isinstance(ended, KeyboardInterrupt) else 143)
        kept.finish()
    target = f"distilled={out.absolute()}"
    learn = ["regard", "train", task.config.task, *_data_options(task, data), "--set", "decoder=ctc", "--set", target]
    console = screen()
    console.print(labelled([("written", f"{total:,} answers, {out}")]), highlight=False)
    console.print(f"learn    {shlex.join(learn)}", markup=False, highlight=False, soft_wrap=True)  # on one line


def _data_options(task: TranslationTask, data: Path | None) -> list[str]:
    """Write the options of `regard train` that give a student the training sources of this task."""
    from regard.tasks.own_pairs import OwnPairsTask

    if not isinstance(task, OwnPairsTask):
        return ["--data", str(data)] if data else []
    words: list[str] = []
    for split, paths in task.files.find(data).items():
        sides = [str(path.absolute()) for path in paths]
        option = "--valid" if split == "val" else "--test"
        words += ["--pairs", *sides] if split == "train" else [word for side in sides for word in (option, side)]
    return words


def _parse_options(changes: list[str] | None, data: Path | None) -> list[str]:
    return [*(word for change in changes or [] for word in ("--set", change)), *(["--data", str(data)] if data else [])]


def _answers_key(task: TranslationTask, model: nn.Module) -> dict[str, Any]:
    """Collect what answers depend on."""
    from regard.training import atomic_files
    from regard.training.checkpoints import weights_of

    sources = "\n".join(pair.source for pair in task.texts["train"])
    settings_used = {name: getattr(task.config, name) for name in task.answering}
    return {
        "weights": atomic_files.digest(atomic_files.tensors_to_bytes(weights_of(model))),
        "settings": settings_used,
        "sources": atomic_files.digest(sources.encode()),
    }


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr how many answers are made, and how long the others will take."""
    from rich.console import Console

    from regard.training.progress import progress

    shown = progress(total, done, console=Console(stderr=True, emoji=False))
    try:
        yield shown.step
    finally:
        shown.close()
