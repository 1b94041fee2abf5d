"""`regard tune` measures configurations of the kernels on this machine's card and writes the best of them into a table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import check_place, columns, one_of, progress_reporter, screen, sentences

if TYPE_CHECKING:
    from regard.bench.tune import PlannedKernel, Settings, Trial, TuneRequest, TuneRow

KERNEL_FAMILIES = ("tile", "linear", "delta", "bucket", "pair", "step", "few", "sort")
TUNED_TYPES = ("bf16", "fp16", "fp32")
HEAD_SIZES = ("16", "32", "64", "128", "256")
EXAMPLES = {"kernels": "tile,linear", "width": "64,128", "cases": "'bands; prefix sums'"}


def tune(
    kernels: Annotated[
        str,
        typer.Option(
            help="tile, linear, delta, bucket, pair, step (decoding), few (keys or queries), sort (of blocks), with commas; all "
            "unless given."
        ),
    ] = ",".join(KERNEL_FAMILIES),
    cases: Annotated[
        str | None, typer.Option(help="Tune these workloads of the kernels alone: their names or parts of them, with semicolons.")
    ] = None,
    width: Annotated[str, typer.Option(help="Sizes of a head, with commas: 16, 32, 64, 128, 256.")] = "64",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    minutes: Annotated[float, typer.Option(min=0.01, help="Stop after so long; what was found until then is kept.")] = 30.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table to write; else the file that REGARD_TUNED names, or that of the package."),
    ] = None,
    trials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was tried as JSON: times, and what was refused and why.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Compile kernels ahead by so many; one less than there are CPUs unless given."),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="List what would be tried, and stop. Needs no GPU.")] = False,
) -> None:
    """Tune the kernels for the GPU of this machine: tile sizes, warps and stages."""
    with sentences():
        families = tuple(one_of("kernels", word, KERNEL_FAMILIES) for word in _words("kernels", kernels))
        widths = tuple(int(one_of("width", word, HEAD_SIZES)) for word in _words("width", width))
        kind = one_of("dtype", dtype, TUNED_TYPES)
        if dry and processes is not None:
            raise ValueError("--dry compiles nothing: leave out one of --dry and --processes")
        if dry and trials is not None:
            raise ValueError("--dry tries nothing: leave out one of --dry and --trials")
        chosen = () if cases is None else tuple(_words("cases", cases, ";"))
        if not dry:
            _check_device()
        path = table_path(out)

        from regard.bench.tune import TuneRequest
        from regard.ops.tuned_table import current_table

        current_table()  # a damaged table is found before anything is measured
        request = TuneRequest(families, widths, kind, minutes, cases=chosen)
        request.chosen()  # a name that is no case is found before, too
        if dry:
            print_plan(request, path)
            return
        check_table_file(path)
        if trials is not None:
            check_place(trials)
            if trials.resolve() == path.resolve():
                raise ValueError(f"--trials and the table are the same file, {str(path)!r}: name another one")
        print_tuned(_run(request, path, trials, processes), path)


def _words(name: str, text: str, separator: str = ",") -> list[str]:
    found = [word.strip() for word in text.split(separator) if word.strip()]
    if not found:
        raise ValueError(f"--{name} names nothing: write for example --{name} {EXAMPLES[name]}, or leave it out")
    return list(dict.fromkeys(found))


def _check_device() -> None:
    import torch

    from regard.ops.triton_support import has_triton

    if not torch.cuda.is_available():
        raise ValueError("regard tune measures kernels on a CUDA device, and there is none here: --dry lists what it would try")
    if not has_triton():
        raise ValueError("regard tune measures Triton kernels, and the package triton is not installed: pip install triton")


def table_path(out: Path | None) -> Path:
    """Return the table that is written: the given one, the one that REGARD_TUNED names, or the shipped one."""
    from regard.ops.tuned_table import OWN_TABLE, TUNED

    own = os.environ.get(OWN_TABLE)
    return out or (Path(own) if own else TUNED)


def check_table_file(path: Path) -> None:
    """Refuse a table that cannot be read or written, before anything is measured."""
    from regard.ops.tuned_table import OWN_TABLE, read_table, shipped_table

    check_place(path)
    if not os.access(path.parent, os.W_OK):
        advice = f"write another file by --out FILE, and set {OWN_TABLE}=FILE to use it"
        raise ValueError(f"cannot write {str(path)!r}: its folder is read-only; {advice}")
    if path.exists():
        read_table(path, shipped_table())


def _run(request: TuneRequest, path: Path, trials: Path | None, processes: int | None) -> list[TuneRow]:
    import torch

    from regard.bench.tune import TuneRun, table_writer
    from regard.bench.tune_compile import compile_ahead, compile_jobs, default_processes
    from regard.bench.tune_trials import trials_writer
    from regard.ops.triton_support import card_name

    run = TuneRun(request, table_writer(path, card_name(torch.device(request.device))), progress_reporter())
    if trials is not None:
        run.record = trials_writer(trials, request)
    count = default_processes() if processes is None else processes
    if count:
        jobs = [job for planned in run.plan for job in compile_jobs(*planned)]
        compile_ahead(jobs, count, progress_reporter(), 60 * request.minutes / 2)
    return run.rows()


def print_plan(request: TuneRequest, path: Path) -> None:
    """Print every kernel with its candidates."""
    console, plan = screen(), request.plan()
    table = columns("workload", "kernel", "candidates", "values")
    for planned in plan:
        table.add_row(planned.what, planned.kernel, str(len(planned.candidates)), _values(planned))
    console.print(table, highlight=False)
    count = sum(len(planned.candidates) for planned in plan)
    counts = f"{count} candidates of {len(plan)} kernels, {request.dtype}, {request.minutes:g} minutes at most"
    text = f"{counts}. Next: without --dry they are measured, and the best go into {path}."
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def _values(planned: PlannedKernel) -> str:
    """Return the values of every field, over all candidates."""
    fields = dict.fromkeys(field for changes in planned.candidates for field in changes)
    each = {field: sorted({changes[field] for changes in planned.candidates if field in changes}) for field in fields}
    return ", ".join(f"{field} {' '.join(map(str, values))}" for field, values in each.items())


def print_tuned(rows: list[TuneRow], path: Path) -> None:
    """Print times before and after, the configurations, and what to do next."""
    console = screen()
    table = columns("workload", "kernel", "before", "after", "times as fast", "configuration", "left out")
    for planned, found, note in rows:
        cells = [planned.what, planned.kernel]
        if found is None:
            table.add_row(*cells, "", "", "", note, "")
            continue
        ratio = "" if found.before.problem or found.after.problem else f"{found.before.slower_than(found.after):.2f}"
        config = _configuration(found.after.settings) if found.changed else note or "as before"
        times = _microseconds(found.before), _microseconds(found.after)
        table.add_row(*cells, *times, ratio, config, str(len(found.refused) or ""))
    console.print(table, highlight=False)
    for line in _wrong_results(rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_next(rows, path), style="dim", highlight=False, markup=False, soft_wrap=True)


def _microseconds(trial: Trial) -> str:
    """Return the time of every pass."""
    return " / ".join(f"{1e6 * seconds:.1f}" for seconds in trial.seconds)


def _configuration(settings: Settings) -> str:
    config = next(iter(settings.values()))
    return ", ".join(f"{field} {value}" for field, value in config.items())


def _wrong_results(rows: list[TuneRow]) -> list[str]:
    """Return a line for every candidate that ran and computed something else."""
    lines = []
    for row in rows:
        refused = row.tuned.refused if row.tuned else ()
        wrong = [trial for trial in refused if trial.problem.startswith("results differ")]
        lines += [f"{row.planned.kernel}, {_configuration(trial.settings)}: {trial.problem}" for trial in wrong]
    return lines


def _next(rows: list[TuneRow], path: Path) -> str:
    from regard.ops.tuned_table import OWN_TABLE, TUNED

    changed = sum(row.tuned is not None and row.tuned.changed for row in rows)
    units = "Microseconds of a CUDA graph, forward and with backward, of every pass. Left out: candidates that fail or err."
    if not changed:
        return f"{units} Nothing is faster by 2 %: the table stays as it is."
    use = "" if path == TUNED else f" {OWN_TABLE}={path} makes regard read it;"
    return f"{units} {changed} kernels have new configurations in {path}. Next:{use} regard bench measures mechanisms with them."
