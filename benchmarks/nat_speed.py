"""Autoregressive beside non-autoregressive translation: trained runs, one sentence at a time, in one run and taking turns.

    regard train multi30k --out runs/words
    regard train multi30k --out runs/ctc --set decoder=ctc                     and so on: masked, length, fixed
    python benchmarks/nat_speed.py --runs runs/words runs/ctc --device cuda    into results/nat_speed.json

The first autoregressive run is the base. A time is that of one answer, from the tokens of a source to the tokens of its answer on
the host, for somebody who waits for it: batch 1. Beams on the clock stop when as many answers have ended as there are beams, as
is usual; to be sure of the best one takes longer. Scores are those of the whole split, by the task itself. `model` is the model
as it is, `ready` is `regard.decoding.StaticDecoder` or `NatDecoder`; its tokens must be those of the
model, and `same` is how often they were.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common import Progress, save, seconds
from regard.cli.infer import trained
from regard.decoding import NatDecoder, StaticDecoder, why_not_static
from regard.decoding.nat_decoding import generate_nat
from regard.tasks.decoder_options import Length, Masked
from regard.tasks.run_settings import choose_device
from regard.tasks.support import generate_answers
from regard.tasks.translation import TranslationTask

BEAMS, ROUNDS = (1, 5), (1, 4)  # of a decoder that goes from word to word; of a masked one
BASES = ("model beam 5", "model greedy", "ready beam 5", "ready greedy")

Answer = Callable[[list[int]], list[int]]


class Run(NamedTuple):
    name: str
    task: TranslationTask
    model: Any
    sources: list[list[int]]


class Way(NamedTuple):
    """One way to get answers from a run."""

    run: Run
    by: str  # model or ready
    asked: dict[str, int]  # settings of the task: beam, or lengths and iterations
    answer: Answer

    @property
    def text(self) -> str:
        beams = self.asked.get("beam")
        if beams is not None:
            return f"{self.by} {'greedy' if beams == 1 else f'beam {beams}'}"
        return " ".join([self.by, *(f"{name} {value}" for name, value in self.asked.items())])


def loaded(folder: Path, device: str, split: str, data: Path | None) -> Run:
    task, model = trained(folder, [], device)
    if not isinstance(task, TranslationTask):
        raise SystemExit(f"{folder} is a run of {task.config.task}: only translation is said word by word or at once")
    task.read(data)
    if not task.splits.get(split):
        raise SystemExit(f"{task.config.task} has no {split} split")
    return Run(folder.name, task, model, [source for source, _ in task.splits[split]])


def by_words(speaker: Any, config: Any, device: torch.device, beams: int, row: list[int]) -> list[int]:
    source = torch.tensor([row], device=device)
    return generate_answers(
        speaker, speaker.start(source), source, config=config, most=config.max_new_tokens, beams=beams, early=True
    )[0]


def by_nat_model(model: Any, device: torch.device, asked: dict[str, int], row: list[int]) -> list[int]:
    return generate_nat(model, torch.tensor([row], device=device), **asked)[0]


def by_nat_decoder(fast: NatDecoder, asked: dict[str, int], row: list[int]) -> list[int]:
    return fast(torch.tensor([row]), **asked)[0]  # it takes sources from the host, in one copy


def ways(run: Run, device: torch.device) -> list[Way]:
    config, model, decoder = run.task.config, run.model, run.task.decoder
    found = []
    if decoder.autoregressive:
        for beams in BEAMS:
            asked = {"beam": beams}
            found.append(Way(run, "model", asked, partial(by_words, model, config, device, beams)))
            if (
                why_not_static(model) is None
            ):  # one for each, so that neither takes the other's room, which is no larger than it must be
                fast = StaticDecoder(model, room=min(config.max_new_tokens, config.max_len) + 1)
                found.append(Way(run, "ready", asked, partial(by_words, fast, config, device, beams)))
        return found
    parallel = NatDecoder(model)
    own = {"lengths": decoder.lengths} if isinstance(decoder, Masked | Length) else {}
    many = [own]
    if isinstance(decoder, Masked):
        many = [{**own, "iterations": rounds} for rounds in sorted({*ROUNDS, decoder.iterations})]
    for asked in many:
        found.append(Way(run, "model", asked, partial(by_nat_model, model, device, asked)))
        found.append(Way(run, "ready", asked, partial(by_nat_decoder, parallel, asked)))
    return found


def scored(run: Run, asked: dict[str, int], split: str) -> dict[str, float]:
    """Of the whole split, in batches, by the task's own measure."""
    before = run.task.config, run.task.decoder
    if run.task.decoder.autoregressive:
        run.task.config = run.task.config.replace(asked)
    else:
        run.task.decoder = replace(run.task.decoder, **asked)
    try:
        return run.task.score(run.model, split)
    finally:
        run.task.config, run.task.decoder = before


def clocked(every: list[Way], chosen: list[int], device: torch.device, progress: Progress) -> tuple[list, list]:
    """Answers and seconds of every way for the chosen sentences. All are said once before, so that nothing new comes later."""
    said: list[list[list[int]]] = [[] for _ in every]
    times: list[list[float]] = [[] for _ in every]
    for warm in (True, False):
        for count, i in enumerate(chosen, 1):
            for number, way in enumerate(every):  # in turns, so that a busy moment hits all alike
                row = way.run.sources[i]
                if warm:
                    said[number].append(way.answer(row))
                else:
                    times[number].append(seconds(partial(way.answer, row), device))
            if count % max(1, len(chosen) // 5) == 0:
                progress.step(f"{'warming up' if warm else 'on the clock'}: {count} of {len(chosen)} sentences")
    return said, times


def table(every: list[Way], scores: list[dict[str, float]], said: list, times: list) -> list[dict[str, Any]]:
    means = [statistics.mean(own) for own in times]
    base = next(way.run for way in every if way.run.task.decoder.autoregressive)
    bases = {way.text: mean for way, mean in zip(every, means, strict=True) if way.run is base}
    rows = []
    for way, score, answers, own, mean in zip(every, scores, said, times, means, strict=True):
        model = next(i for i, x in enumerate(every) if x.run is way.run and x.by == "model" and x.asked == way.asked)
        rows.append(
            {
                "name": way.run.name,
                "decoder": way.run.task.decoder.name,
                "way": way.text,
                "beams": way.asked.get("beam"),
                "lengths": way.asked.get("lengths"),
                "iterations": way.asked.get("iterations"),
                "bleu": None,
                **score,
                "ms_per_sentence": 1e3 * mean,
                "ms_median": 1e3 * statistics.median(own),
                "tokens_per_second": sum(map(len, answers)) / sum(own),
                "tokens_per_sentence": statistics.mean(map(len, answers)),
                "same": statistics.mean(a == b for a, b in zip(answers, said[model], strict=True)),
                **{f"speedup_{name.replace(' ', '_')}": bases[name] / mean if name in bases else None for name in BASES},
            }
        )
    return rows


def shown(rows: list[dict[str, Any]], best: str) -> None:
    against = [name for name in BASES if rows[0][f"speedup_{name.replace(' ', '_')}"] is not None]
    print(f"{'run':<16}{'way':<34}{best:>8}{'ms':>9}{'median':>9}{'tokens/s':>10}" + "".join(f"{'x ' + n:>16}" for n in against))
    for row in rows:
        ratios = "".join(f"{row['speedup_' + name.replace(' ', '_')]:>16.2f}" for name in against)
        numbers = f"{row[best]:>8.2f}{row['ms_per_sentence']:>9.2f}{row['ms_median']:>9.2f}{row['tokens_per_second']:>10.0f}"
        print(f"{row['name'][:15]:<16}{row['way']:<34}{numbers}{ratios}")


def readable(runs: list[Run], wanted: int) -> list[int]:
    """The first sentences that every run can be asked."""
    if len({(run.task.config.task, len(run.sources)) for run in runs}) > 1:
        raise SystemExit("all runs must be of one task and one set of data: " + ", ".join(run.task.config.task for run in runs))
    can = [i for i in range(len(runs[0].sources)) if all(0 < len(run.sources[i]) <= run.task.config.max_len for run in runs)]
    return can[:wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, type=Path, metavar="RUN", help="folders of `regard train`")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--split", default="test", choices=["test", "val"])
    parser.add_argument("--sentences", type=int, default=200, help="how many are put on the clock")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="the folder of the data; else REGARD_DATA")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    if args.sentences < 1:
        parser.error("--sentences must be at least 1")
    try:
        kind = choose_device(args.device)
        runs = [loaded(folder, kind, args.split, args.data) for folder in args.runs]
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    if not any(run.task.decoder.autoregressive for run in runs):
        raise SystemExit("none of these runs goes from word to word: give one with decoder=autoregressive to compare with")
    measure(args, runs, torch.device(kind))


@torch.no_grad()
def measure(args: argparse.Namespace, runs: list[Run], device: torch.device) -> None:
    chosen = readable(runs, args.sentences)
    every = [way for run in runs for way in ways(run, device)]
    asked = [way for way in every if way.by == "model"]
    parts = len(chosen) // max(1, len(chosen) // 5)
    progress, scores = Progress(2 * parts + len(asked)), dict[tuple[int, str], dict[str, float]]()
    said, times = clocked(every, chosen, device, progress)
    for way in asked:
        scores[id(way.run), str(way.asked)] = found = scored(way.run, way.asked, args.split)
        progress.step(f"{way.run.name}, {way.text}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    rows = table(every, [scores[id(way.run), str(way.asked)] for way in every], said, times)
    best = runs[0].task.best[0]
    shown(rows, best)
    for row in rows:
        if row["same"] < 1:
            print(f"{row['name']}, {row['way']}: {1 - row['same']:.1%} of its answers are not those of the model itself")
    settings = {
        "task": runs[0].task.config.task,
        "runs": [str(folder) for folder in args.runs],
        "split": args.split,
        "sentences": len(chosen),
        "batch": 1,
        "device": device.type,
        "dtype": str(next(runs[0].model.parameters()).dtype).removeprefix("torch."),
        "matmul": torch.get_float32_matmul_precision(),
        "signatures": runs[0].task.signatures(),
        "value": "seconds of one answer at batch 1, all ways in turns; speedup is the mean of a base / the own mean; "
        "scores of the whole split, of `ready` those of its model; tokens are those of answers, without ends",
    }
    if args.no_save:
        print("not saved: leave out --no-save to write results/nat_speed.json")
    else:
        print(f"written to {save('nat_speed', settings, rows)}: show it in docs/numbers.md")


if __name__ == "__main__":
    main()
