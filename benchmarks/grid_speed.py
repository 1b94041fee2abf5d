"""How many training steps a second one device makes of the small models of a comparison: one model at a time or several.

    python benchmarks/grid_speed.py [--minutes 1] [--mixers "softmax;gla"] [--models 1,8,16] [--processes 2x4,2x8] [--small]

Models are those of the task `recall`; a model step is one update of one model. Modes: eager steps of one model; captured steps
(one CUDA graph each) of one model; of 2, 4, 8 and 16 models on streams of one process; of 4 or 8 models in each of 2 and 4
processes. Every 25 steps a model waits for its loss, as training does. Also the seconds that a new model takes before its first
captured step, those of an evaluation, and those that the host takes to start a step. Rows are saved as they come; what --minutes
leaves no time for is left out. On a CPU (--small) steps are eager, and nothing is saved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common import save
from regard.arena.arena_catalogue import arena_task
from regard.arena.arena_task import ArenaTask
from regard.compare.cell_training import CHECKED, EVALUATED
from regard.compare.compared_model import build_model
from regard.compare.device_split import DeviceSplit, load_split
from regard.compare.size_changes import changed_sizes, read_changes
from regard.compare.split_score import target_points
from regard.compare.training_step import EAGER_STEPS, TrainingStep
from regard.compare.worker_pool import QUEUES

MIXERS = ("softmax", "gla", "reformer(rounds=2, buckets=4, chunk=16)", "delta", "linear")
FEW_STEPS = 4  # that are started without waiting
FIRST = 3  # mixers that are measured in all modes before the others
MODELS = (1, 2, 4, 8, 16)  # in one process
PROCESSES = ((2, 4), (2, 8), (4, 4), (4, 8))  # processes, models in each
TIMED, SMALL_TIMED = 0.35, 0.05  # seconds of each measurement
TASK = "recall(length=64, pairs=8, vocab=512, train=8192, test=1000)"
CHANGES = ("batch=64",)


class Lane:
    """Hold one model on a stream of its own, and count its steps."""

    def __init__(self, mixer: str, data: LaneData, graphs: bool = True) -> None:
        begun = time.perf_counter()
        model, usual = changed_sizes(data.task.model(), data.task.budget(), dict(data.changes))
        torch.manual_seed(0)
        built = build_model(data.task, mixer, model).to(data.device)
        self.step = TrainingStep(built, data.task, data.train, usual, graphs=graphs)
        self.data, self.steps = data, 0
        self.index = torch.arange(len(self.step.index), device=data.device)
        self.waiting = False
        data.wait()
        self.times = {"build_s": time.perf_counter() - begun}
        for name, count in (("first_step_s", 1), ("warm_up_s", EAGER_STEPS - 1), ("capture_s", 2)):
            begun = time.perf_counter()
            self.start(count)
            data.wait()
            self.times[name] = time.perf_counter() - begun

    def start(self, count: int) -> None:
        with self.step.on_stream():
            for _ in range(count):
                self.step(self.index, 1e-4)

    def advance(self) -> None:
        """Wait for the steps that were started, and start more, as training does."""
        if self.waiting:
            with self.step.on_stream():
                float(self.step.total_loss)
            self.steps += CHECKED
        self.start(CHECKED)
        self.waiting = True

    def host_seconds(self) -> float:
        """Return the seconds that the host takes to start a step, of a few that the device need not have done."""
        self.data.wait()
        begun = time.perf_counter()
        self.start(FEW_STEPS)
        seconds = (time.perf_counter() - begun) / FEW_STEPS
        self.data.wait()
        return seconds

    def evaluation_seconds(self) -> float:
        """Return the seconds of a pass over the validation split."""
        batch = EVALUATED[self.data.device.type] * len(self.step.index)
        begun = time.perf_counter()
        with self.step.on_stream():
            target_points(self.step.model, self.data.val, "accuracy", batch, torch.float32)
        return time.perf_counter() - begun


class LaneData:
    """Hold the task of all models and its splits on the device."""

    def __init__(self, task: str, changes: tuple[str, ...], device: torch.device) -> None:
        self.task: ArenaTask = arena_task(task)
        self.changes, self.device = read_changes(changes), device
        self.train: DeviceSplit = load_split(self.task, "train", device)[0]
        self.val: DeviceSplit = load_split(self.task, "val", device)[0]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def steps_a_second(lanes: list[Lane], seconds: float) -> float:
    """Return the steps that all lanes together make in a second."""
    for lane in lanes:
        lane.steps, lane.waiting = 0, False
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for lane in lanes:
            lane.advance()
    for lane in lanes:
        with lane.step.on_stream():
            float(lane.step.total_loss)
        lane.steps += CHECKED
    return sum(lane.steps for lane in lanes) / (time.perf_counter() - begun)


def kernels_of_step(mixer: str, data: LaneData) -> Iterator[dict[str, Any]]:
    """Count the kernels of one eager training step on a GPU."""
    lane = Lane(mixer, data, graphs=False)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        lane.start(1)
        torch.cuda.synchronize()
    count = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())
    yield {"mixer": mixer, "mode": "counted", "processes": 1, "models": 1, "kernels": count, "note": f"{count} kernels a step"}


def one_process(mixer: str, data: LaneData, models: tuple[int, ...], seconds: float) -> Iterator[dict[str, Any]]:
    """Measure one mixer in this process, with more models at each row."""
    eager = Lane(mixer, data, graphs=False)
    row: dict[str, Any] = {"mixer": mixer, "mode": "eager", "processes": 1, "models": 1}
    yield row | {"steps_per_s": steps_a_second([eager], seconds)} | eager.times
    del eager
    if data.device.type != "cuda":
        models = tuple(n for n in models if n > 1)
    lanes: list[Lane] = []
    for count in models:
        lanes += [Lane(mixer, data) for _ in range(count - len(lanes))]
        mode = "captured" if lanes[0].step.captured else "eager"
        found = row | {"mode": mode, "models": count, "steps_per_s": steps_a_second(lanes, seconds)} | lanes[-1].times
        found["evaluation_s"] = lanes[-1].evaluation_seconds()
        found["host_s"] = lanes[-1].host_seconds()
        found["note"] = lanes[0].step.note
        yield found


def serve_lanes(link: Any, task: str, changes: tuple[str, ...], device: str) -> None:
    """Make models and time them on command, in a process of its own: ("make", mixer, count) and ("time", count, seconds)."""
    torch.set_num_threads(1)
    data, lanes = LaneData(task, changes, torch.device(device)), []
    link.send("ready")
    while True:
        kind, *rest = link.recv()
        if kind == "end":
            return
        if kind == "make":
            mixer, count = rest
            lanes = [Lane(mixer, data) for _ in range(count)]
            link.send("made")
        else:
            count, seconds = rest
            link.send(steps_a_second(lanes[:count], seconds))


class LaneProcesses:
    """Run lanes in several processes and time them at the same moment."""

    def __init__(self, count: int, task: str, changes: tuple[str, ...], device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.links, self.processes = [], []
        for _ in range(count):
            own, other = context.Pipe()
            process = context.Process(target=serve_lanes, args=(other, task, changes, device), daemon=True)
            process.start()
            other.close()
            self.links.append(own)
            self.processes.append(process)
        for link in self.links:
            link.recv()

    def ask(self, count: int, *message: Any) -> list[Any]:
        for link in self.links[:count]:
            link.send(message)
        return [link.recv() for link in self.links[:count]]

    def close(self) -> None:
        for link, process in zip(self.links, self.processes, strict=True):
            link.send(("end",))
            process.join(5)


def several_processes(
    mixer: str, pool: LaneProcesses, forms: tuple[tuple[int, int], ...], seconds: float
) -> Iterator[dict[str, Any]]:
    """Measure one mixer in several processes."""
    pool.ask(len(pool.links), "make", mixer, max(models for _, models in forms))
    for processes, models in forms:
        found = pool.ask(processes, "time", models, seconds)
        row = {"mixer": mixer, "mode": "captured", "processes": processes, "models": models}
        yield row | {"steps_per_s": sum(found)}


class Kept:
    """Print and save rows as they come, until the time is used up."""

    def __init__(self, name: str, settings: dict[str, Any], minutes: float) -> None:
        self.name, self.settings, self.end = name, settings, time.perf_counter() + 60 * minutes
        self.rows: list[dict[str, Any]] = []

    @property
    def open(self) -> bool:
        return time.perf_counter() < self.end

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append({name: round(x, 6) if isinstance(x, float) else x for name, x in row.items()})
        more = " ".join(f"{name} {x:.3g}" for name, x in row.items() if name.endswith("_s") and name != "steps_per_s")
        head = f"{row['mixer']:40}{row['mode']:10}{row['processes']} x {row['models']:<3}"
        print(f"{head}{row.get('steps_per_s', 0):10.0f} steps/s  {more} {row.get('note', '')}", flush=True)
        if self.settings["device"] == "cuda":
            save(self.name, self.settings, self.rows)

    def measure(self, mixer: str, rows: Iterator[dict[str, Any]]) -> None:
        """Add rows while there is time; an error is a row with its reason."""
        try:
            for row in rows:
                self.add(row)
                if not self.open:
                    return
        except Exception as error:  # noqa: BLE001 - one mixer that fails is no reason to stop
            note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.add({"mixer": mixer, "mode": "failed", "processes": 0, "models": 0, "note": note})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of the whole benchmark")
    parser.add_argument("--mixers", default=";".join(MIXERS), help="with semicolons")
    parser.add_argument("--models", default=",".join(map(str, MODELS)), help="in one process, with commas")
    parser.add_argument("--processes", default=",".join(f"{p}x{n}" for p, n in PROCESSES), help="2x4: two with four models; none")
    parser.add_argument("--name", default="grid_speed", help="of the file in results/")
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--set", nargs="*", default=list(CHANGES), help="of the model and the budget: batch=64 width=64")
    parser.add_argument("--small", action="store_true", help="a try of every part on a CPU; saves nothing")
    args = parser.parse_args()
    for name, value in QUEUES.items():
        os.environ.setdefault(name, value)
    device = "cpu" if args.small or not torch.cuda.is_available() else "cuda"
    if device == "cpu":
        torch.set_num_threads(1)
    forms = tuple(tuple(map(int, form.split("x"))) for form in args.processes.split(",") if "x" in form)
    models, forms = ((1, 2), ((2, 1),)) if args.small else (tuple(map(int, args.models.split(","))), forms)
    seconds = SMALL_TIMED if args.small else TIMED
    task = TASK.replace("8192", "256").replace("1000", "50") if args.small else args.task
    mixers, changes = [part.strip() for part in args.mixers.split(";")], tuple(args.set)
    kept = Kept(
        args.name, {"task": task, "changes": changes, "device": device, "seconds": seconds, "checked": CHECKED}, args.minutes
    )
    data = LaneData(task, changes, torch.device(device))
    for some in (mixers[:FIRST], mixers[FIRST:]):
        for mixer in some:
            if kept.open:
                kept.measure(mixer, one_process(mixer, data, models, seconds))
        if kept.open and some and forms:
            pool = LaneProcesses(max(count for count, _ in forms), task, changes, device)
            for mixer in some:
                if kept.open:
                    kept.measure(mixer, several_processes(mixer, pool, forms, seconds))
            pool.close()
    for mixer in mixers if device == "cuda" else ():
        if kept.open:
            kept.measure(mixer, kernels_of_step(mixer, data))
    print(f"{len(kept.rows)} rows" + ("" if kept.open else ": stopped by --minutes"), file=sys.stderr)


if __name__ == "__main__":
    main()
