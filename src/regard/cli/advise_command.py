"""`regard advise`: is attention the bottleneck of a model, and which mechanism would speed it up, end to end, on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.bench_command import KINDS, _lengths, _specs, _writer
from regard.cli.completion import complete_spec
from regard.cli.console import columns, one_of, progress_reporter, screen, sentences
from regard.cli.picture_file import check_out, load_plot, save_picture

if TYPE_CHECKING:
    from rich.table import Table

    from regard.bench.advised_model import AdviceRequest

CANDIDATES = (
    *("softmax", "Local(256)", "Local(128) | Global(first=2)", "bigbird(block=64)", "linear", "performer(features=128)"),
    *("retention", "linformer(rank=128)", "nystrom(landmarks=64)", "fnet"),
)
ADVICE_LENGTHS = {"cuda": "512,4k,16k", "cpu": "256,512,2k"}
ADVICE_TOKENS = {"cuda": 32768, "cpu": 2048}
NOT_FOR_FACTORIES = ("mixer", "width", "depth", "ffn")


def advise(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(metavar="FACTORY", help="A torch module of yours, package.module:function; a model of regard unless given."),
    ] = "",
    mixer: Annotated[
        str, typer.Option(metavar="SPEC", help="The mechanism that the model of regard has now.", autocompletion=complete_spec)
    ] = "softmax",
    mixers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help="Mechanisms that might replace it; several with ';' between them.", autocompletion=complete_spec
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of a sequence: 512,4k,16k unless given, on a CPU 256,512,2k.")
    ] = None,
    width: Annotated[int, typer.Option(min=1, max=2**16)] = 768,
    depth: Annotated[int, typer.Option(min=1, max=1024, help="Layers.")] = 12,
    heads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="12 unless given; of a factory's model where it does not name them.")
    ] = None,
    ffn: Annotated[
        int | None, typer.Option(min=1, help="Width of the feed-forward layer: four times the width unless given.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences; tokens / length unless given.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in all: 32768 unless given, on a CPU 2048.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="A decoder instead of an encoder.")] = False,
    inference: Annotated[bool, typer.Option("--inference", help="Forward passes alone: no gradients, no optimiser.")] = False,
    attention: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="A class of a factory's model that is attention, if it is not found."),
    ] = None,
    checks: Annotated[int, typer.Option(min=0, help="Whole models that are measured, to state the error of the prediction.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 (mixed precision), fp32; bf16 on a GPU unless given.")] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="For each time that is measured.")] = 0.3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers into this file.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PICTURE", help="Draw shares over lengths (.png, .pdf or .svg).")] = None,
) -> None:
    """Measure which part of a model takes its time and memory, and predict what another mechanism would change end to end."""
    from regard.tasks.run_settings import choose_device

    with sentences():
        check_out(out)
        share_plot = load_plot("share_plot", "share_plot") if out else None  # before anything is measured
        _check_factory_use(context, model)
        where = choose_device(device)
        kind = one_of("dtype", dtype or KINDS[where], ("bf16", "fp16", "fp32"))
        sizes = {"width": width, "depth": depth, "heads": heads or 12, "ffn": ffn or 4 * width}
        machine = {"device": where, "dtype": kind, "seed": seed, "seconds": seconds, "tokens": tokens or ADVICE_TOKENS[where]}
        common: dict[str, Any] = {
            "mixers": _specs(mixers or list(CANDIDATES)),
            "lengths": _lengths(lengths or ADVICE_LENGTHS[where]),
        }
        request = _request(common | sizes | machine, mixer, causal)
        changes = {"batch": batch, "training": not inference, "checks": checks, "factory": model, "heads": heads}
        record = _advice(request, changes | {"attention": tuple(attention or ())}, json_file)
        if out is not None and share_plot is not None:
            save_picture(lambda: share_plot(record), out)
    print_advice(record, json_file, out)


def _check_factory_use(context: typer.Context, model: str) -> None:
    """Refuse options that would do nothing."""
    for name in NOT_FOR_FACTORIES if model else ("attention",):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            whose = "a model of regard" if model else "a model of your own"
            raise ValueError(f"--{name} is for {whose}: leave it out, or {'leave out' if model else 'add'} --model")


def _request(options: dict[str, Any], mixer: str, causal: bool) -> AdviceRequest:
    from regard.bench.advised_model import AdviceRequest
    from regard.bench.whole_models import DECODER_MODEL, ENCODER_MODEL, ModelRequest
    from regard.spec import Spec

    base = Spec.parse(mixer)
    return AdviceRequest(ModelRequest(**options), base, DECODER_MODEL if causal else ENCODER_MODEL)


def _advice(request: AdviceRequest, changes: dict[str, Any], json_file: Path | None) -> dict[str, Any]:
    from dataclasses import replace

    from regard.bench.advice import advice_record

    return advice_record(replace(request, **changes), progress_reporter(), _writer(json_file))


def print_advice(record: dict[str, Any], json_file: Path | None, out: Path | None) -> None:
    """Print shares over lengths, the ranking, the error of the prediction, and what follows."""
    from regard.bench.advice_text import advice_lines

    console = screen()
    console.print("\nshare of one step, by part", style="bold")
    console.print(_share_table(record), highlight=False)
    console.print("\npredicted time of the whole model, fastest first at the longest n", style="bold")
    console.print(_ranking_table(record), highlight=False)
    for line in advice_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    kept = f"numbers in {json_file}" if json_file else "--json FILE keeps the numbers"
    drawn = f"picture in {out}" if out else "--out shares.png draws the shares"
    device = record["made_with"]["device"]
    console.print(f"\n{device}. {kept}; {drawn}.", style="dim", highlight=False, markup=False)


def _share_table(record: dict[str, Any]) -> Table:
    from regard.bench.advice_text import shares_of

    rows = record["shares"]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.get("parts_ms", {})))
    table = columns("n", "batch", "ms", "limited by", *kinds, "memory of attention")
    for row in rows:
        cells = [f"{row['n']:,}", str(row["batch"])]
        if "ms" not in row:
            table.add_row(*cells, "", row["reason"])
            continue
        shares = shares_of(row["parts_ms"])
        held = shares_of(row["parts_bytes"]).get("attention", 0.0)
        numbers = [f"{100 * shares.get(kind, 0):.0f} %" for kind in kinds]
        table.add_row(*cells, f"{row['ms']:.4g}", row["bound"], *numbers, f"{100 * held:.0f} %")
    return table


def _ranking_table(record: dict[str, Any]) -> Table:
    rows = record["predictions"]
    lengths = list(dict.fromkeys(row["n"] for row in rows))
    table = columns("mechanism", *(f"n = {n:,}: ms (gain)" for n in lengths))
    found = {(row["spec"], row["n"]): row for row in rows}
    names = dict.fromkeys(row["spec"] for row in rows)
    last = lengths[-1] if lengths else 0
    for name in sorted(names, key=lambda name: found[name, last].get("ms", float("inf"))):
        cells = [found.get((name, n), {}) for n in lengths]
        texts = [_predicted_text(row) for row in cells]
        table.add_row(name, *texts)
    return table


def _predicted_text(row: dict[str, Any]) -> str:
    """Write a predicted time with its spread over the turns of its measurements."""
    if "ms" not in row:
        return row.get("reason", "")
    spread = row["spread_ms"]
    host = ", host" if row["bound"] == "host" else ""
    return f"{row['ms']:.4g} ± {spread:.2g} ({row['gain']:.2f} x{host})"
