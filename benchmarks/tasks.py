"""The real tasks, trained and scored through the command line: python benchmarks/tasks.py --work DIR [--only GROUP ...]

Every row is a run of `regard train`, chosen on validation by the run itself, and scored once on test by `regard evaluate`.
Many runs at once share a GPU: small models leave it idle most of the time. Needs REGARD_DATA. Writes results/tasks.json, in which
rows of earlier calls stay unless they are run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, Progress, save
from regard.tasks.presets import CPU_PRESETS

MAIN = [sys.executable, "-m", "regard"]
SEEDS = (1, 2, 3)
STEADY = ("translate", "mixers", "parts", "language", "copy", "parse", "go", "parallel")  # groups whose passes are alike
SMALL_TEACHER = "multi30k small"
DECODINGS = (["beam=1"], *(["beam=5", f"length_penalty={power}"] for power in (0.0, 1.0, 2.0)), ["beam=10"])


@dataclass
class Row:
    """A run: what is trained, with which settings, and how it is scored."""

    name: str
    group: str
    task: str
    sets: list[str] = field(default_factory=list)
    after: str | None = None  # a run that must have ended: {after} in a setting is its folder, {after}.taught its answers
    split: str = "test"
    scored: tuple[list[str], ...] = ([],)  # decoding settings of each evaluation


MIXERS = ("softmax", "Local(8)", "Local(4) | Global(first=1)", "conv", "linear", "synthesizer", "performer", "gla")
PLAIN = ["mode=teacher_forcing", "dropout=0.4", "batch_tokens=12288", "lr=2e-3"]  # what suits teacher forcing best
FEW = [*PLAIN, "steps=1000", "validate_every=500"]  # for all mixers alike
SMALL = CPU_PRESETS["multi30k"]  # a model for a CPU
FEW_SMALL = {**SMALL, "steps": 800, "warmup": 200, "validate_every": 400, "save_every": 400, "average": 1}  # for all parts alike
SIZES = ("width", "depth", "ffn", "vocab", "dropout")  # of it, which further training keeps
POSITIONS = ("learned", "rotary", "relative", "alibi", "none")  # the model as it is has sinusoidal ones
PARTS = [*(f"positions={x}" for x in POSITIONS), *(f"wiring={x}" for x in ("each", "both", "mixed")), "norm=post", "mixer=relu"]


BOARD = {"width": 32, "depth": 6, "precision": "32", "batch_tokens": 361 * 32, "steps": 3000, "lr": 2e-3}  # for a CPU, all alike
BOARD |= {"validate_every": 1000, "save_every": 500}
READERS = {"heads": 2, "ffn": 128}  # of nets with attention
BOARDS = {"conv": {}, "pooled": {}, "hybrid": {**READERS, "every": 3}, "attention": READERS}


def sets_of(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def rows() -> list[Row]:
    many: list[Row] = []
    plain = [*PLAIN, "steps=3000", "validate_every=750"]
    for name, sets in (("rdrop", []), ("softmax", plain)):
        for seed in SEEDS:
            scored = ([], *DECODINGS) if seed == 1 else ([],)
            many.append(Row(f"multi30k {name} {seed}", "translate", "multi30k", [f"seed={seed}", *sets], scored=scored))
    many.append(Row("multi30k cased", "translate", "multi30k", ["lower=false"]))
    many += [Row(f"multi30k {mixer}", "mixers", "multi30k", [f"mixer={mixer}", *FEW]) for mixer in MIXERS]
    many += [Row("multi30k as it is", "parts", "multi30k", sets_of(FEW_SMALL))]
    many += [Row(f"multi30k {part}", "parts", "multi30k", [part, *sets_of(FEW_SMALL)]) for part in PARTS]
    many += [Row(SMALL_TEACHER, "small", "multi30k", sets_of(SMALL))]
    many += [Row(f"ewt {seed}", "tag", "ewt", [f"seed={seed}"]) for seed in SEEDS]
    many += [Row(f"imdb {seed}", "sentiment", "imdb", [f"seed={seed}"]) for seed in SEEDS]
    many += [Row(f"imdb softmax {seed}", "sentiment", "imdb", ["mixer=softmax", f"seed={seed}"]) for seed in SEEDS]
    many += [Row("shakespeare", "language", "shakespeare", ["precision=bf16-mixed"], split="val")]
    for task in ("acl_titles", "wikisql"):
        many += [Row(f"{task} copy={copy}", "copy", task, [f"copy={copy}"]) for copy in ("true", "false")]
    many += [Row(f"gum {seed}", "parse", "gum", [f"seed={seed}"], scored=([], ["beam=1"])) for seed in SEEDS]
    many += [Row(f"gum {text}", "parse", "gum", [text]) for text in ("tags=false", 'mixer=["rnn", "softmax"]')]
    nets = ("conv", "pooled", "hybrid", "attention")
    brief = [f"batch_tokens={361 * 256}", "steps=6000", "validate_every=1000"]  # of one network on a shared GPU
    many += [Row(f"go {net}", "go", "go", [f"net={net}", *brief], scored=([], ["views=8"])) for net in nets]
    for seed in (1, 2):
        for net, own in BOARDS.items():
            many.append(Row(f"go small {net} {seed}", "boards", "go", [f"net={net}", f"seed={seed}", *sets_of(BOARD | own)]))
    teacher = "multi30k rdrop 1"
    ctc, taught = ["decoder=ctc(upsample=2)", "mode=rdrop(alpha=3)"], ["init_from={after}", "distilled={after}.taught"]
    short = ["batch_tokens=4096", "steps=4000", "lr=1e-3", "validate_every=2000"]
    many += [
        Row("multi30k ctc", "parallel", "multi30k", [*ctc, *short, *taught], teacher),
        Row("multi30k ctc, not taught", "parallel", "multi30k", ctc),
        *(
            Row(f"multi30k {name}", "parallel", "multi30k", [f"decoder={name}", "mode=teacher_forcing", *short, *taught], teacher)
            for name in ("masked", "length", "fixed")
        ),
    ]
    then = ["init_from={after}", "steps=300", "lr=1e-4", "warmup=30", "batch_tokens=2048", "validate_every=300", "average=1"]
    modes = ("teacher_forcing", "two_pass", "parallel", "scheduled", "free_running", "self_critical", "minimum_risk")
    for mode in modes:
        many.append(Row(f"multi30k then {mode}", "modes", "multi30k", [*then, "save_every=300", f"mode={mode}"], teacher))
    sizes = sets_of({name: SMALL[name] for name in SIZES})
    for mode in modes:
        sets = [*sizes, *then, "save_every=300", f"mode={mode}"]
        many.append(Row(f"multi30k small then {mode}", "modes", "multi30k", sets, SMALL_TEACHER))
    return many


def command(work: Path, row: Row, device: str, graphs: bool) -> str:
    """What a shell does for a row. Passes are captured if they are asked to be and can be."""
    folder, before = work / slug(row.name), None if row.after is None else work / slug(row.after)
    steps = []
    if any("taught" in text for text in row.sets):
        taught = f"{before}.taught"
        steps.append(f"(test -f {taught} || {quoted([*MAIN, 'distil', str(before), '--out', taught, '--device', device])})")
    sets = [part for text in row.sets for part in ("--set", text.replace("{after}", str(before)))]
    train = quoted([*MAIN, "train", row.task, "--out", str(folder), "--device", device, *sets])
    steps.append(f"({train} --set graphs=true || (rm -rf {folder} && {train}))" if graphs else train)
    for settings in row.scored:
        chosen = [part for text in settings for part in ("--set", text)]
        steps.append(quoted([*MAIN, "evaluate", str(folder), "--split", row.split, "--device", device, *chosen]))
    return " && ".join(steps)


def quoted(parts: list[str]) -> str:
    return " ".join("'" + part.replace("'", "'\\''") + "'" for part in parts)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def run(chosen: list[Row], work: Path, device: str, jobs: int, limit: float, graphs: bool) -> None:
    """Several at once; one that waits for another begins when that has ended."""
    waiting, running, start, shown = list(chosen), dict[str, Any](), time.monotonic(), Progress(len(chosen))
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "COLUMNS": "200"}
    while waiting or running:
        for name, process in list(running.items()):
            if process.poll() is not None:
                shown.step(f"{name}: {'done' if process.returncode == 0 else f'failed, see {work / slug(name)}.log'}")
                del running[name]
        ready = [row for row in waiting if row.after is None or (work / slug(row.after) / "scores.json").exists()]
        ready = [row for row in ready if "taught" not in str(row.sets) or row.after is None or _free(work, row, running, chosen)]
        for row in ready[: max(0, jobs - len(running))]:
            waiting.remove(row)
            with open(f"{work / slug(row.name)}.log", "w") as log:
                shell = command(work, row, device, graphs and row.group in STEADY)
                running[row.name] = subprocess.Popen(
                    ["bash", "-c", shell], stdout=log, stderr=log, env=env, start_new_session=True
                )
        if time.monotonic() - start > limit or (waiting and not running and not ready):
            for process in running.values():
                os.killpg(process.pid, signal.SIGTERM)
            print(f"left undone: {', '.join([*running, *(row.name for row in waiting)])}", file=sys.stderr)
            return
        time.sleep(0.5)


def _free(work: Path, row: Row, running: dict[str, Any], chosen: list[Row]) -> bool:
    """One run writes the teacher's answers, the others wait for them."""
    taught = Path(f"{work / slug(row.after or '')}.taught").exists()
    return taught or not any(name in running for name in (other.name for other in chosen if other.after == row.after))


def found(work: Path, row: Row) -> dict[str, Any] | None:
    """What a finished run says of itself."""
    folder = work / slug(row.name)
    if not (folder / "scores.json").exists():
        return None
    result, about = (json.loads((folder / f"{name}.json").read_text()) for name in ("result", "run"))
    return {
        "name": row.name,
        "group": row.group,
        "task": row.task,
        "sets": row.sets,
        "settings": json.loads((folder / "config.json").read_text()),
        "parameters": about.get("parameters"),
        **{name: about.get(name) for name in ("device", "torch", "commit", "data")},
        "steps": result["steps"],
        "seconds": result["seconds"],
        "val": {result["name"]: result["best"], "step": result["best_step"], "averaged": result["averaged"]},
        "chosen": result["chosen"],
        "scores": json.loads((folder / "scores.json").read_text()),
    }


def main() -> None:
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs; those that are there go on")
    groups = ", ".join(dict.fromkeys(row.group for row in known))
    parser.add_argument("--only", nargs="*", default=[], help=f"groups or names, in the order they begin: {groups}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--graphs", action="store_true", help="capture the passes of training, where they can be")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which what still runs is stopped")
    asked = parser.parse_args()
    order = [(place, row) for row in known for place, name in enumerate(asked.only) if name in (row.group, row.name)]
    chosen = [row for _, row in sorted(order, key=lambda pair: pair[0])] if asked.only else known
    if not chosen:
        parser.error(f"there is no run or group called {', '.join(asked.only)}")
    asked.work.mkdir(parents=True, exist_ok=True)
    run(chosen, asked.work.resolve(), asked.device, asked.jobs, asked.limit, asked.graphs)
    path = RESULTS / "tasks.json"
    kept = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    kept |= {row.name: {**line, "jobs": asked.jobs} for row in chosen if (line := found(asked.work.resolve(), row))}
    done = save("tasks", {"jobs": asked.jobs, "graphs": asked.graphs}, [kept[row.name] for row in known if row.name in kept])
    print(f"{len(kept)} of {len(known)} rows are in {done}; the tables: make tables")


if __name__ == "__main__":
    main()
