"""Records of a comparison that was never run, for tests of its report: any number of mixers, names that are hostile, failures."""

import hashlib
import json
import math
from pathlib import Path

from regard.compare.cell_record import CellRecord

FAMILIES = ("softmax", "sparse", "kernel", "low_rank", "cluster", "hybrid", "free")
NAMES = ("softmax", "Local(16)", "linear", "linformer(rank=8)", "reformer", "hybrid(pattern=Local(8))", "fnet")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
MACHINE = {"torch": "2.13", "device": "a small machine", "commit": "abc"}
HOSTILE = "</script><script>alert(1)</script>&\"'<b>$x_1$"


def record(task: str, mixer: str, family: str, lr: float, seed: int, quality: float, **more) -> CellRecord:
    """A cell whose score falls with the distance of its learning rate from the best one."""
    val = quality - 0.05 * abs(math.log10(lr / 1e-3)) - 0.003 * seed
    curve = [(100 * i, 2.0 / i, val * i / 10, 1.5 * i) for i in range(1, 11)]
    settings = {"model": {"width": 16, "depth": 2}, "device": "cpu", "made_with": MACHINE}
    floors = {"most frequent": 0.25, "chance": 0.1}
    key = hashlib.sha256(repr((task, mixer, lr, seed)).encode()).hexdigest()[:16]
    made = CellRecord(key, task, mixer, family, lr, seed, metric="accuracy", length=128, title="A task", settings=settings)
    made.curve, made.val, made.floors, made.parameters, made.train_seconds = curve, val, floors, 12345, 15.0
    for name, value in more.items():
        setattr(made, name, value)
    return made


def finished(made: CellRecord, place: int) -> CellRecord:
    """Give a cell a test score, slices, and costs if it is of the first seed."""
    made.final, made.test, made.test_count = True, made.val - 0.01, 2000
    made.slices = {"distance": {f"{d}-{2 * d - 1}": (made.test - 0.001 * d, 500) for d in (8, 16, 32, 64)}}
    if made.seed == 0:
        speed = 1e4 * (1 + place)
        made.costs = {"n": 128, "batch": 8, "train_steps_per_s": speed / 1024, "train_tokens_per_s": speed}
        made.costs |= {
            "infer_tokens_per_s": 3 * speed,
            "decode_ms": None,
            "peak_bytes": 1 << (20 + place % 4),
            "state_bytes": None,
        }
        made.cost_by_length = [
            {"n": n, "batch": 4, "forward_ms": cost / 3, "step_ms": cost, "peak_bytes": 1000 * n, "reason": ""}
            for n in (256, 1024, 4096)
            for cost in [n * n / 1e4 if place == 0 else n * (5 + place) / 100]
        ]
    return made


def some_records(count: int = 7, tasks: tuple[str, ...] = ("recall(length=128)",), seeds: int = 2) -> list[CellRecord]:
    """Cells of several mixers; the last but one diverges at its largest rate, one more is refused."""
    found = []
    for task in tasks:
        for place in range(count):
            name = NAMES[place] if place < len(NAMES) else f"mixer_{place}(option={place})"
            family, quality = FAMILIES[place % len(FAMILIES)], 0.95 - 0.06 * (place % 7)
            for lr in RATES:
                found.append(record(task, name, family, lr, 0, quality))
                if lr == RATES[-1] and place == count - 2:
                    found[-1].status, found[-1].reason, found[-1].val, found[-1].curve = "diverged", "not finite", None, []
            chosen = [x for x in found if x.group == (task, name) and x.lr == 1e-3]
            finished(chosen[0], place)
            found += [finished(record(task, name, family, 1e-3, seed, quality), place) for seed in range(1, seeds)]
        found.append(
            record(task, "sinkhorn", "sinkhorn", 1e-3, 0, 0.0, status="refused", reason="it is not causal", val=None, curve=[])
        )
    return found


def write_records(folder: Path, records: list[CellRecord]) -> Path:
    (folder / "cells").mkdir(parents=True)
    for one in records:
        (folder / "cells" / f"{one.key}.json").write_text(json.dumps(one.to_json()))
    return folder
