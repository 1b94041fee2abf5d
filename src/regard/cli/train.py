"""`regard train TASK` trains a task, with any mechanism."""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from regard.cli import settings
from regard.cli.completion import complete_preset, complete_spec, complete_task
from regard.cli.console import aside, labelled, number, screen, sentences, stop, write_json
from regard.cli.threads import Threads, choose_threads, used
from regard.config import Config
from regard.tasks.run_settings import choose_device

if TYPE_CHECKING:
    from regard.tasks.task import Task
    from regard.training.fit import Result

RUNS = Path("runs")
NAME_LETTERS = 80  # characters of the mechanism in the name of a folder


class TrainCommand(TyperCommand):
    """Refuse one file behind --pairs in words of its own: the parser would take the next option for the second file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, word in enumerate([] if ctx.resilient_parsing else args):  # completion has half of a command
            name, _, first = word.partition("=")
            files = [file for file in (first, *args[at + 1 : at + 3]) if file][:2]
            if name == "--pairs" and (len(files) < 2 or any(file.startswith("-") for file in files)):
                stop("--pairs takes two files, one behind the other: --pairs SOURCES TARGETS")
        return super().parse_args(ctx, args)


def train_(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Its name: see `regard tasks`.", autocompletion=complete_task)],
    mixer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help="The mechanism, as in `regard show`; several take turns.", autocompletion=complete_spec
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Settings by name: `regard tasks TASK` lists them.", autocompletion=complete_preset),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another value of a setting: see `regard tasks TASK`.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the data, or above it; else REGARD_DATA.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; that of an interrupted run makes it go on.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="classify: texts and labels, columns of a CSV file.")] = None,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="classify: or keys of JSON objects, one a line.")] = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="classify, images: a folder for each label.")] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="classify: the column of the texts; else text.")] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="classify: the column of the labels; else label.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="text: the text to learn; mlm: lines of texts.")
    ] = None,
    pairs: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="FILE FILE", help="translate: sources and targets, line by line."),
    ] = None,
    conll: Annotated[Path | None, typer.Option(metavar="FILE", help="tag: words and tags, CoNLL-U or two columns.")] = None,
    valid: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Your file of validation; twice for translate. Else split off.")
    ] = None,
    test: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Your file of the test; twice for translate. Else split off.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The folder and the result, machine-readable.")] = False,
) -> None:
    """Learn a task with any mechanism. With the same --out an interrupted run goes on, and a finished one with more steps."""
    from regard import tasks as known
    from regard.cli.model_check import check_model

    with sentences():
        kind = choose_device(device)
        files = {"csv": csv, "jsonl": jsonl, "folder": folder, "file": file, "pairs": pairs, "conll": conll}
        own = _own_settings(data, **files, valid=valid or None, test=test or None, text=text, label=label)
        config = settings.config_of(task, mixer or [], changes or [], out, own, preset)
        _check_folder(out, config)
        made = known.make_task(config)
        settings.check_used(made, changes or [], own)
        count, note = choose_threads(config, threads, kind, out)
    check_model(made, out)
    with sentences():
        fit = _fitter()
        if out is not None:
            made.go_on(out)
        made.read(data)
        new = out is None or not out.exists()
        place = _fresh(config) if out is None else out
        aside(f"{_title(made)} in {place}{note and ', ' + note}")
        for line in made.describe_data():
            aside(line)
    try:
        with sentences(), used(count):
            result = fit(made, place, accelerator=kind, quiet=as_json)
    except (KeyboardInterrupt, SystemExit) as ended:  # SIGTERM is the second
        stop(_interrupted(task, place, data), 130 if isinstance(ended, KeyboardInterrupt) else 143)
    finally:
        if new:
            _tidy(place)
    with sentences():
        (_write_result if as_json else _print_result)(made, place, result, data)


def _own_settings(data: Path | None, **options: Path | Sequence[Path] | str | None) -> dict[str, str | list[str]]:
    """Collect the options that name a user's files and their columns."""
    files: dict[str, str | list[str]] = {name: _absolute(value) for name, value in options.items() if isinstance(value, Path)}
    files |= {name: [_absolute(path) for path in value] for name, value in options.items() if isinstance(value, tuple | list)}
    if data is not None and files:
        raise ValueError(f"--{next(iter(files))} names the file itself: leave --data out")
    return files | {name: value for name, value in options.items() if isinstance(value, str)}


def _absolute(path: Path) -> str:
    return str(path.expanduser().absolute())


def _check_folder(out: Path | None, config: Config) -> None:
    """Check that a folder is new, or holds this very run, whose `steps` and `patience` may grow."""
    from regard.training.checkpoints import load_config
    from regard.training.run_info import GROWS, grown, kept_settings

    if out is None or not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file: a run needs a folder")
    begun = load_config(out)
    if begun is None:
        if any(not path.name.startswith(".") for path in out.iterdir()):
            raise ValueError(f"{out} is not empty and holds no run: choose another folder")
        return
    begun, now = kept_settings(begun, config), config.to_json()
    larger = grown(begun, now)
    if other := [key for key in now if now[key] != begun.get(key, now[key]) and key not in larger]:
        shown = "; ".join(f"{key} is {begun[key]!r} there, not {now[key]!r}" for key in other)
        may = f" ({' and '.join(GROWS)} may only grow)" if set(other) & set(GROWS) else ""
        raise ValueError(f"{out} holds a run with other settings: {shown}{may}. Choose another folder, or leave the settings out")


def _fitter() -> Callable[..., Result]:
    """Import training: a package that it lacks is found out before data is read."""
    from regard.training.fit import fit

    return fit


def _mixers(config: Config, between: str = ", ") -> str:
    """Write the mixers of a run as they were given, each of them once."""
    texts = [config.mixer] if isinstance(config.mixer, str) else config.mixer
    return between.join(dict.fromkeys(text.strip() for text in texts))


def _fresh(config: Config) -> Path:
    """Make a folder with a number that was never used, named after the mechanism as it was written: reverse-Local-8+gla-1.

    Letters, digits and = stay, so that no shell needs quotes; a long text is cut.
    """
    RUNS.mkdir(exist_ok=True)
    words = re.sub(r"[^\w.=+]+", "-", _mixers(config, "+"), flags=re.ASCII)
    stem = f"{config.task}-{words[:NAME_LETTERS].strip('-').replace('-+', '+')}-"
    taken = [int(found[1]) for path in RUNS.iterdir() if (found := re.fullmatch(re.escape(stem) + r"(\d+)", path.name))]
    for count in itertools.count(max(taken, default=0) + 1):
        folder = RUNS / f"{stem}{count}"
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _tidy(folder: Path) -> None:
    """Remove the folder of a run that has not begun."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock"}:
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()


def _interrupted(task: str, folder: Path, data: Path | None) -> str:
    from regard.training import checkpoints

    if checkpoints.load_config(folder) is None:
        return f"stopped before anything was written into {folder}: train again"
    found = checkpoints.steps(folder)
    saved = f"update {found[-1]} is saved, and the run goes on from there" if found else "nothing was saved yet, so train again"
    again = shlex.join(["regard", "train", task, "--out", str(folder), *(["--data", str(data)] if data else [])])
    return f"stopped; {saved} with: {again}"


def _validation_scores(lines: list[dict[str, Any]], result: Result) -> dict[str, Any]:
    """Return the scores on validation of the weights that were chosen, from the lines of metrics.jsonl."""
    best: dict[str, Any] = next((line.get("val", {}) for line in lines if line["step"] == result.best_step), {})
    scores = (result.averaged_scores or {}) if result.chosen == "average" else best
    return {**scores, **({} if result.score is None else {result.name: result.score})}


def _write_result(made: Task, folder: Path, result: Result, _: Path | None) -> None:
    """Write the folder, the scores on validation and result.json as one JSON object."""
    from regard.training.metrics_log import read_metrics

    scores = _validation_scores(read_metrics(folder / "metrics.jsonl"), result)
    write_json({"run": str(folder), "task": made.config.task, "split": "val", "scores": scores, "result": asdict(result)})


def _print_result(made: Task, folder: Path, result: Result, data: Path | None) -> None:
    """Print the scores, the folder, and the commands to go on with."""
    from regard.training.metrics_log import read_metrics

    lines = read_metrics(folder / "metrics.jsonl")
    scores = _validation_scores(lines, result)
    where = ["--data", str(data)] if data else []
    shown = (f"{name} {number(value)}" for name, value in scores.items() if isinstance(value, int | float))
    rows = [("validation", "  ".join(shown) or "no score")]
    if result.tokens_per_second and result.peak_memory:
        cost = f"{result.tokens_per_second:,.0f} tokens a second in training, {result.peak_memory / 2**20:,.0f} MiB at most"
        rows.append(("cost", cost))
    rows += [("run", str(folder)), ("picture", _draw_curve(made, folder, result, lines))]
    rows += [("evaluate", shlex.join(["regard", "evaluate", str(folder), *where]))]
    sample = _sample(made)
    dash = ["--"] if sample.startswith("-") else []  # else it would be read as an option
    rows += [("predict", f"{shlex.join(['regard', 'predict', str(folder), *dash])} {shlex.quote(sample)}")]
    screen().print(labelled(rows), highlight=False)


def _draw_curve(made: Task, folder: Path, result: Result, lines: list[dict[str, Any]]) -> str:
    """Draw the training curve into the folder; returns its path, or what drawing needs."""
    from regard.training import atomic_files

    try:
        from regard.plots.training_plot import training_plot
    except ModuleNotFoundError as error:
        return f"drawing needs {error.name}: pip install 'regard[draw]'"
    lines = [line for line in lines if {"time", "loss"} <= line.keys()]
    if not lines:
        return "nothing was measured"
    paper = BytesIO()
    kept = result.best_step if result.chosen == "best" else None
    training_plot(lines, result.name, _title(made), kept).savefig(paper, format="png")
    atomic_files.replace(folder / "curve.png", paper.getvalue())
    return str(folder / "curve.png")


def _title(made: Task) -> str:
    """Name a task and its mechanism, where it has one."""
    config = made.config
    return config.task if "mixer" in made.unused() else f"{config.task} with {_mixers(config)}"


def _sample(made: Task) -> str:
    """Shorten an input for `predict` to one line."""
    kinds = made.file_ending.split()
    return textwrap.shorten(made.sample, 60, placeholder="") or (f"input{kinds[0]}" if kinds else "…")
