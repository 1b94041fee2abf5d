"""`regard bench` measures the speed of mechanisms beside their peers: times, launches, memory, floors, crossovers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.bench_tables import print_models, print_speed
from regard.cli.completion import complete_spec
from regard.cli.console import check_place, one_of, progress_reporter, sentences
from regard.cli.picture_file import check_out, load_plot, save_picture

if TYPE_CHECKING:
    from regard.bench.record import Save
    from regard.spec import Spec

MIXERS = ("softmax", "Local(256)", "Local(128) | Global(first=2)", "linear", "retention")
PASS_NAMES = ("forward", "both", "step")
FORM_NAMES = {"causal": (True,), "full": (False,), "both": (True, False)}
LEVEL_NAMES = ("auto", "core", "layer")
KINDS = {"cuda": "bf16", "cpu": "fp32"}  # the usual type of numbers by device
TOKENS = {"cuda": 32768, "cpu": 8192}
LENGTHS = {"cuda": "1k,4k,16k", "cpu": "512,2k,8k"}
NOT_FOR_MODELS = ("against", "passes", "form", "level", "batch", "dim", "backend", "graphs", "out")
UNITS = {"k": 1 << 10, "m": 1 << 20}
MAX_LENGTH = 1 << 24


def bench(
    context: typer.Context,
    mixers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help="A mechanism or a pattern; several with ';' between them.", autocompletion=complete_spec
        ),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of a sequence: 1k,4k,16k; on a CPU 512,2k,8k unless given.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    against: Annotated[str, typer.Option(metavar="PEERS", help="all, none, or names of peers with commas.")] = "all",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, fp64; bf16 on a GPU unless given, fp32 on a CPU.")] = None,
    passes: Annotated[str, typer.Option(help="forward, both (with backward), step (decoding), with commas.")] = "forward,both",
    form: Annotated[str, typer.Option(help="causal (where a mechanism has that form), full (bidirectional), both.")] = "causal",
    level: Annotated[
        str, typer.Option(help="core (q, k, v in), layer (with projections), auto: layers only where there is nothing else.")
    ] = "auto",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in all, batch = tokens / length: 32768 unless given, on a CPU 8192.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a decoding step.")] = 32,
    heads: Annotated[int, typer.Option(min=1, max=256)] = 8,
    dim: Annotated[int, typer.Option(min=1, max=1024, help="Size of a head.")] = 64,
    backend: Annotated[str, typer.Option(help="Of the operations of regard: auto, torch, reference ...")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.001, help="For each time that is measured.")] = 0.2,
    graphs: Annotated[bool, typer.Option(help="Also as CUDA graphs, on a GPU.")] = True,
    model: Annotated[bool, typer.Option("--model", help="Whole models of six layers: tokens a second and memory.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="With --model: also with torch.compile, block by block.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers into this file.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PICTURE", help="Draw times over lengths (.png, .pdf or .svg).")] = None,
) -> None:
    """Measure the speed of mechanisms beside their peers, in one run."""
    from regard.tasks.run_settings import choose_device

    with sentences():
        _check_use(context, model, compiled, passes)
        check_out(out)
        if out is not None:
            load_plot("speed_plot", "speed_plot")  # before anything is measured
        where = choose_device(device)
        kind = one_of("dtype", dtype or KINDS[where], ("bf16", "fp16", "fp32", "fp64"))
        common: dict[str, Any] = {"mixers": _specs(mixers or list(MIXERS)), "lengths": _lengths(lengths or LENGTHS[where])}
        common |= {"tokens": tokens or TOKENS[where], "heads": heads, "device": where}
        common |= {"dtype": kind, "seed": seed, "seconds": seconds}
        save = _writer(json_file)
        if model:
            record = _run_models(common, compiled, save)
        else:
            forms = FORM_NAMES[one_of("form", form, tuple(FORM_NAMES))]
            more: dict[str, Any] = {"forms": forms, "passes": _passes(passes), "level": one_of("level", level, LEVEL_NAMES)}
            more |= {"peers": against, "step_batch": batch, "dim": dim, "backend": backend, "graphs": graphs}
            record = _run_speed(common | more, save)
        if out is not None:
            draw_record(record, out)
    (print_models if model else print_speed)(record, json_file, out)


def _check_use(context: typer.Context, model: bool, compiled: bool, passes: str) -> None:
    """Refuse options that would do nothing."""

    def given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    if compiled and not model:
        raise ValueError("--compile is for whole models: add --model, or leave it out")
    for name in NOT_FOR_MODELS:
        if model and given(name):
            raise ValueError(f"--{name} is not for whole models: leave out one of --model and --{name}")
    if given("batch") and "step" not in passes:
        raise ValueError("--batch is for decoding steps, other passes get tokens / length: add step to --passes, or leave it out")


def _run_speed(options: dict[str, Any], save: Save) -> dict[str, Any]:
    from regard.bench.peers import chosen_peers
    from regard.bench.record import speed_record
    from regard.bench.speed import Request
    from regard.ops.backend import check_backend

    check_backend(options["backend"])
    options["peers"] = tuple(chosen_peers(options["peers"]))
    return speed_record(Request(**options), progress_reporter(), save)


def _run_models(options: dict[str, Any], compiled: bool, save: Save) -> dict[str, Any]:
    from regard.bench.record import model_record
    from regard.bench.whole_models import ModelRequest

    forms = (False, True) if compiled else (False,)
    return model_record(ModelRequest(**options, compiled=forms), progress_reporter(), save)


def _specs(texts: list[str]) -> tuple[Spec, ...]:
    """Parse mechanisms; each text may hold several, with semicolons between them."""
    from regard.spec import Spec

    names = [name.strip() for text in texts for name in text.split(";")]
    specs = tuple(Spec.parse(name) for name in names if name)
    if not specs:
        raise ValueError("--mixers names no mechanism: write for example --mixers 'Local(256); linear'")
    return specs


def _lengths(text: str) -> tuple[int, ...]:
    """Parse lengths such as 512,4k,1M, in ascending order."""
    found = {parsed_length(part) for part in text.split(",") if part.strip()}
    if not found:
        raise ValueError("--lengths names no length: write for example --lengths 1k,4k,16k")
    return tuple(sorted(found))


def parsed_length(text: str) -> int:
    """Parse one length: 4096, 4k or 1M."""
    word = text.strip().lower()
    factor = UNITS.get(word[-1:], 1)
    digits = word[:-1] if word[-1:] in UNITS else word
    if not digits.isdecimal() or not 1 <= int(digits) * factor <= MAX_LENGTH:
        raise ValueError(f"a length is a number of tokens from 1 to 16M, such as 4096, 4k or 1M, not {text.strip()!r}")
    return int(digits) * factor


def _passes(text: str) -> tuple[str, ...]:
    from regard.bench.floors import FORWARD, TRAINING
    from regard.bench.token_step import STEP

    names = dict(zip(PASS_NAMES, (FORWARD, TRAINING, STEP), strict=True))
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("--passes names no pass: write for example --passes forward,both")
    return tuple(dict.fromkeys(names[one_of("passes", word, PASS_NAMES)] for word in words))


def _writer(path: Path | None) -> Save:
    """Return a function that writes a record into a file; none without a file."""
    if path is not None:
        check_place(path)

    def save(record: dict[str, Any]) -> None:
        from regard.bench.machine import write_record

        if path is not None:
            write_record(path, record)

    return save


def draw_record(record: dict[str, Any], out: Path) -> None:
    """Draw the times of a record into a file."""
    speed_plot = load_plot("speed_plot", "speed_plot")
    s, with_what = record["settings"], record["made_with"]
    shape = f"{s['tokens']:,} tokens in all, {s['heads']} heads x {s['dim']}, {s['dtype']}"
    title = f"{shape}, {with_what['device']}: regard (solid) and peers (dashed)"
    save_picture(lambda: speed_plot(record["rows"], title), out)
