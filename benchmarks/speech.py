"""Speech tasks, trained and scored through the command line: python benchmarks/speech.py --work DIR [--only GROUP ...]

Groups: digits (fsdd, every voice held out once), front (fsdd, two voices held out, without one of its settings), voices
(fsdd_speaker), an4 (Conformer and Transformer of equal size, decoders), ahead (an4 by CTC alone: full attention, and Truncated by
look-ahead, with the latency of its stream), strings (fsdd_strings),
floors (scores without a network). Runs that are there go on. LIMIT or --limit is the seconds after which what still runs is
stopped. Needs REGARD_DATA. Writes results/speech.json, in which rows of earlier calls stay unless they are run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, save
from regard.arena.trivial_floors import most_frequent, ridge
from regard.scores import character_errors, equal_error_rate, word_errors
from regard.tasks import config, make_task
from tasks import Row, found, run

VOICES = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
PAIRS = (("nicolas", "theo"), ("george", "lucas"), ("jackson", "yweweler"))
AHEAD = (0, 1, 2, 4, 8)
LEFT_OUT = {  # one thing at a time, with the two voices held out on which the settings were chosen
    "as it is": [],
    "divided by the spread": ["normalise=utterance"],
    "without a floor": ["floor=0", "floor_change=0"],
    "the same floor always": ["floor_change=0"],
    "without trimming": ["trim=0"],
    "convolutions over time alone": ["channels=0"],
    "with masked bands": ["bands=2"],
}
AN4_SEEDS = (1, 2, 3, 4, 5)
TINY = ["width=8", "heads=2", "depth=1", "ffn=8", "steps=2", "warmup=1", "validate_every=2", "save_every=2", "batch_tokens=2000"]
DECODES = ([], ["beam=1"], ["decode=attention", "beam=5"], ["decode=joint", "beam=10"])


def rows(tiny: bool = False) -> list[Row]:
    """List the runs."""
    many = [
        Row(f"fsdd {voice} {seed}", "digits", "fsdd", [f'held_out=["{voice}"]', f"seed={seed}"])
        for seed in (1, 2, 3)
        for voice in VOICES
    ]
    for what, sets in LEFT_OUT.items():
        many.append(Row(f"fsdd {what}", "front", "fsdd", ['held_out=["lucas", "nicolas"]', *sets]))
    for one, two in PAIRS:
        many.append(Row(f"fsdd_speaker {one} {two}", "voices", "fsdd_speaker", [f'held_out=["{one}", "{two}"]']))
    equal = ["block=transformer", "depth=8"]  # 8 layers have about the parameters of 4 of the Conformer
    for name, sets in (("conformer", []), ("transformer", equal)):
        for seed in AN4_SEEDS:
            many.append(Row(f"an4 {name} {seed}", "an4", "an4", [f"seed={seed}", *sets], scored=DECODES))
    for reader in ("location", "monotonic"):
        many.append(Row(f"an4 {reader}", "an4", "an4", [f"reader={reader}"], scored=DECODES))
    ctc = ["ctc_weight=1", "kernel=5", "dropout=0.2"]  # a kernel of 5 adds 2 tokens a layer to the latency
    for seed in (1, 2, 3):
        many.append(Row(f"an4 ctc softmax {seed}", "ahead", "an4", [*ctc, f"seed={seed}"]))
        for ahead in AHEAD:
            sets = [*ctc, f"mixer=Truncated(32, {ahead})", f"seed={seed}"]
            many.append(Row(f"an4 ctc Truncated(32, {ahead}) {seed}", "ahead", "an4", sets))
    many += [Row(f"fsdd_strings {voice}", "strings", "fsdd_strings", [f'held_out=["{voice}"]']) for voice in ("theo", "george")]
    if tiny:
        for row in many:
            row.sets += TINY
    return many


def with_latency(line: dict[str, Any]) -> dict[str, Any]:
    """Add the latency of the stream of a run whose layers look ahead a bounded number of tokens, in seconds."""
    from regard.blocks.look_ahead import LookAhead
    from regard.tasks.speech_task import SpeechTask

    task = make_task(config(line["task"]).replace({k: v for k, v in line["settings"].items() if k != "task"}))
    assert isinstance(task, SpeechTask)
    try:
        latency = LookAhead(task.encoder.stack).latency
    except ValueError:
        return {**line, "latency_s": None}
    return {**line, "latency_s": 0.025 + 0.01 * 2**task.config.halvings * (latency + 1)}


# floors


def _summary(rows: list[Any]) -> Tensor:
    """Describe recordings by mean and spread of every feature."""
    return torch.stack([torch.cat([x.windows.mean(0), x.windows.std(0, unbiased=False)]) for x in rows])


def _fifths(rows: list[Any]) -> Tensor:
    """Describe recordings by the mean of each fifth of their time, and the spread of every feature."""
    parts = [[*(part.mean(0) for part in x.windows.tensor_split(5)), x.windows.std(0, unbiased=False)] for x in rows]
    return torch.stack([torch.cat(x) for x in parts])


def _labels(rows: list[Any]) -> Tensor:
    return torch.tensor([x.label for x in rows])


def _normalised(task: Any, part: str) -> list[Any]:
    """Return the recordings of a part with their features as a model gets them."""
    return [x._replace(windows=task.prepared(task.batch([x])).source[0]) for x in task.splits[part]]


def digit_floors() -> list[dict[str, Any]]:
    """Score the most frequent digit and two ridge regressions for every voice held out.

    One has means and spreads of cepstra, the other the features that models get: the mean of each fifth, and the spreads.
    """
    made = []
    for voice in VOICES:
        plain = {"features": "mfcc", "normalise": "train", "trim": 0.0, "floor": 0.0, "floor_change": 0.0}
        scores = {}
        for how, describe, changes in (("ridge", _summary, plain), ("ridge of fifths", _fifths, {})):
            task = make_task(config("fsdd").replace({"held_out": [voice], "speeds": [1.0], **changes}))
            task.read()
            train, test = (_normalised(task, part) for part in ("train", "test"))
            scores["most frequent"] = 100 * most_frequent(_labels(train), _labels(test))
            scores[how] = 100 * ridge(describe(train), _labels(train), describe(test), _labels(test))
        made += [{"name": f"floor fsdd {voice}, {how}", "group": "floors", "accuracy": score} for how, score in scores.items()]
    return made


def voice_floors() -> list[dict[str, Any]]:
    """Score voices by a ridge regression, and pairs of new voices by the cosine of means and spreads."""
    made = []
    for pair in PAIRS:
        task = make_task(config("fsdd_speaker").replace({"held_out": list(pair), "features": "mfcc", "normalise": "train"}))
        task.read()
        train, test = (_normalised(task, part) for part in ("train", "test"))
        known, new = [x for x in test if x.label >= 0], [x for x in test if x.label < 0]
        accuracy = 100 * ridge(_summary(train), _labels(train), _summary(known), _labels(known))
        unit = torch.nn.functional.normalize(_summary(new), dim=-1)
        cosines, couples = (unit @ unit.mT).tolist(), list(combinations(range(len(new)), 2))
        eer = equal_error_rate([cosines[i][j] for i, j in couples], [new[i].voice == new[j].voice for i, j in couples])
        made.append({"name": f"floor fsdd_speaker {' '.join(pair)}", "group": "floors", "accuracy": accuracy, "eer_new": eer})
    return made


def an4_floors() -> list[dict[str, Any]]:
    """Score the text of the nearest training utterance by mean and spread of cepstra, and the most frequent word alone."""
    task = make_task(config("an4").replace({"normalise": "train", "speeds": [1.0]}))
    task.read()
    train, test = list(task.splits["train"]), list(task.splits["test"])
    nearest = torch.cdist(_summary(test), _summary(train)).argmin(1).tolist()
    words = [word for x in train for word in x.text.split()]
    answers = {"nearest utterance": [train[i].text for i in nearest], "most frequent word": [max(set(words), key=words.count)]}
    made, expected = [], [x.text for x in test]
    for how, texts in answers.items():
        said = texts if len(texts) > 1 else texts * len(test)
        scores = {"wer": word_errors(said, expected), "cer": character_errors(said, expected)}
        made.append({"name": f"floor an4, {how}", "group": "floors", **scores})
    return made


FLOORS: tuple[Callable[[], list[dict[str, Any]]], ...] = (an4_floors, digit_floors, voice_floors)


def floors() -> list[dict[str, Any]]:
    made = []
    for floor in FLOORS:
        try:
            made += floor()
        except Exception as error:  # noqa: BLE001 - one floor that fails must not end the others
            print(f"{floor.__name__}: {error}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs; those that are there go on")
    parser.add_argument("--only", nargs="*", default=[], help="groups or names")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="two updates of small models, to try the script; nothing is written")
    parser.add_argument("--limit", type=float, default=float(os.environ.get("LIMIT", "inf")))
    asked = parser.parse_args()
    known = rows(asked.tiny)
    chosen = [row for row in known if not asked.only or row.group in asked.only or row.name in asked.only]
    asked.work.mkdir(parents=True, exist_ok=True)
    run(chosen, asked.work.resolve(), asked.device, asked.jobs, asked.limit, False)
    lines = [with_latency(line) for row in chosen if (line := found(asked.work.resolve(), row))]
    if not asked.only or "floors" in asked.only:
        lines += floors()
    for line in lines:
        best = line.get("scores", [line])
        print(line["name"], *(x.get("scores", {k: v for k, v in x.items() if isinstance(v, float)}) for x in best), flush=True)
    if asked.tiny:
        return
    path = RESULTS / "speech.json"
    kept = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    kept |= {line["name"]: line for line in lines}
    print(f"{len(kept)} rows are in {save('speech', {'jobs': asked.jobs}, list(kept.values()))}")


if __name__ == "__main__":
    main()
