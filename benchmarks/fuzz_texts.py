"""Fuzz the grammar: random patterns, specs, positions and layers, each a value or a sentence within 50 ms and 100 MB.

python benchmarks/fuzz_texts.py            into results/fuzz_texts.json (a few minutes)
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter

import torch

from common import ROOT, peak_bytes, save

sys.path.insert(0, str(ROOT / "tests"))
from texts import answer, text_of

SLOW, LARGE = 0.050, 100e6  # seconds of the processor, bytes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--texts", type=int, default=30_000)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    asked = options.parse_args()
    torch.set_num_threads(1)
    for seed in range(200):  # imports and tables that the first texts would pay for
        answer(*text_of(seed))
    gc.collect()
    gc.freeze()  # what PyTorch keeps is not searched again and again while texts are read
    counts: Counter[str] = Counter()
    slowest, largest, broken = (0.0, -1), (0, -1), []
    for seed in range(asked.first, asked.first + asked.texts):
        kind, text = text_of(seed)
        try:
            began = time.process_time()
            found = answer(kind, text)
            took = time.process_time() - began
        except Exception as error:  # noqa: BLE001 - any other one is what this is looking for
            broken.append({"seed": seed, "kind": kind, "text": text[:200], "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        counts[f"{kind}: {found}"] += 1
        slowest = max(slowest, (took, seed))
        if took > SLOW / 5 or len(text) > 5000 or seed % 50 == 0:  # memory that takes no time is small
            largest = max(largest, (peak_bytes(lambda: answer(kind, text), torch.device("cpu")), seed))  # noqa: B023
    row = {
        "slowest_ms": round(1e3 * slowest[0], 1),
        "slowest_seed": slowest[1],
        "most_mb": round(largest[0] / 1e6, 1),
        "most_seed": largest[1],
        "outcomes": dict(sorted(counts.items())),
        "broken": broken,
    }
    save("fuzz_texts", {"texts": asked.texts, "first_seed": asked.first, "clock": "process time"}, [row])
    if broken or slowest[0] > SLOW or largest[0] > LARGE:
        raise SystemExit(f"{len(broken)} broken, slowest {slowest}, largest {largest}")


if __name__ == "__main__":
    main()
