"""Exposure bias: one wrong token is forced into the answer of a trained translator, and the rest that it generates is scored.

    python benchmarks/exposure_bias.py --work DIR --picture exposure.png                           strings turned around, on a CPU
    python benchmarks/exposure_bias.py --work DIR --task multi30k --device cuda --set steps=3000   the same on captions

Trains one run for each mode (teacher forcing against scheduled sampling), with the same settings, and takes test sentences. A
decoder is fed the true tokens up to a place, there the true token or a drawn wrong one, the same one for all modes, and then
generates the rest greedily. `rest` is 100 x (1 - edits / length) of the rest against the true rest, END counted, at least 0, a
mean over sentences; `lost` is the paired difference of the two, with the half-width of its 95 % interval. Writes
results/exposure_bias.json, or with another task results/exposure_bias_TASK.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch

import regard
from common import save
from regard.data.batch import BEGIN, END
from regard.data.vocabulary import FIRST_TEXT_ID
from regard.decoding import generate
from regard.scores import edits
from regard.tasks.support import constraints_of, device_under
from tasks import Row, run, slug

MODES = ("teacher_forcing", "scheduled", "two_pass")
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)  # of an answer, in front of the forced token
BATCH, SEED = 250, 5
COLOURS = {"teacher_forcing": "#d1495b", "scheduled": "#3b6fb6", "two_pass": "#2a9d6f"}
INK, GREY, LINE = "#16181d", "#6f7580", "#d9dce1"
Example = tuple[list[int], list[int]]


def rest_score(answer: list[int], reference: list[int]) -> float:
    """Score the generated rest against the true one, both without END, which counts as one token."""
    return max(0.0, 100 * (1 - edits([*answer, END], [*reference, END]) / (len(reference) + 1)))


def wrong_tokens(examples: list[Example], share: float) -> list[tuple[int, int]]:
    """Draw for each example the place of the forced token, and a token of other targets that is not the true one there."""
    dice = Random(SEED + round(100 * share))
    every = sorted({token for _, target in examples for token in target if token >= FIRST_TEXT_ID})
    found = []
    for _, target in examples:
        place = int(share * (len(target) - 1))
        token = target[place]
        while token == target[place]:
            token = dice.choice(every)
        found.append((place, token))
    return found


@torch.no_grad()
def rest_scores(task: Any, model: Any, examples: list[Example], forced: list[tuple[int, int]], wrong: bool) -> list[float]:
    """Score the rest of each example behind its forced place; prompts of one length are a batch."""
    groups, scores, device = defaultdict[int, list[int]](list), [0.0] * len(examples), device_under(model)
    for i, (place, _) in enumerate(forced):
        groups[place].append(i)
    for place, members in groups.items():
        for part in (members[at : at + BATCH] for at in range(0, len(members), BATCH)):
            batch = task.batch([examples[i] for i in part]).to(device)
            told = [[BEGIN, *examples[i][1][:place], forced[i][1] if wrong else examples[i][1][place]] for i in part]
            most = 2 * max(len(examples[i][1]) for i in part)
            state = model.start(batch.source, batch.source_valid)
            prompt, rules = torch.tensor(told, device=device), constraints_of(task.config, most)
            answers = generate(model, state, prompt, constraints=rules)
            for i, answer in zip(part, answers, strict=True):
                scores[i] = rest_score(answer, examples[i][1][place + 1 : -1])
    return scores


def measured(folder: Path, mode: str, seed: int, device: str, most: int) -> list[dict[str, Any]]:
    """Measure one run at every place."""
    loaded = regard.load(folder, device=device)
    loaded.task.read()
    examples = [x for x in loaded.task.splits["test"] if len(x[1]) > 1 / (1 - SHARES[-1])][:most]
    rows = []
    for share in SHARES:
        forced = wrong_tokens(examples, share)
        true, wrong = (rest_scores(loaded.task, loaded.model, examples, forced, x) for x in (False, True))
        lost = [a - b for a, b in zip(true, wrong, strict=True)]
        error = 1.96 * statistics.stdev(lost) / len(lost) ** 0.5
        means = {"true": statistics.fmean(true), "wrong": statistics.fmean(wrong), "lost": statistics.fmean(lost), "error": error}
        rows.append({"mode": mode, "seed": seed, "share": share, "examples": len(examples), **means})
        shown = "  ".join(f"{name} {value:.2f}" for name, value in means.items())
        print(f"{mode} seed {seed} at {share}: {shown}", flush=True)
    return rows


def draw(rows: list[dict[str, Any]], task: str, path: Path) -> None:
    """Draw the score of the rest by the place of the wrong token: means over seeds, with every seed as a thin line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.6), dpi=150, facecolor="white")
    axes = figure.add_axes((0.09, 0.14, 0.67, 0.66))
    ends = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == mode]
        for kind, style in (("true", (0, (4, 3))), ("wrong", "-")):
            for seed in {row["seed"] for row in own} if len({row["seed"] for row in own}) > 1 else ():
                axes.plot(
                    SHARES, [row[kind] for row in own if row["seed"] == seed], color=COLOURS[mode], alpha=0.25, linewidth=0.8
                )
            means = [statistics.fmean(row[kind] for row in own if row["share"] == share) for share in SHARES]
            axes.plot(SHARES, means, color=COLOURS[mode], linestyle=style, linewidth=2, marker="o" if kind == "wrong" else None)
            ends[mode, kind] = means[-1]
    heights: list[float] = []
    low, high = axes.get_ylim()
    for (mode, kind), y in sorted(ends.items(), key=lambda item: item[1]):
        height = max(y, heights[-1] + (high - low) * 0.055) if heights else y
        heights.append(height)
        text = f"{mode.replace('_', ' ')}, {kind} token"
        axes.annotate(
            text, (SHARES[-1], height), (8, 0), textcoords="offset points", color=COLOURS[mode], fontsize=8.5, va="center"
        )
    axes.set(xlim=(-0.03, SHARES[-1] + 0.01), xticks=SHARES)
    axes.set_xlabel("share of the answer in front of the forced token", color=GREY, fontsize=9)
    axes.set_ylabel("score of the rest", color=GREY, fontsize=9)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.text(0.03, 0.92, f"One wrong token, and the rest of the answer: {task}", fontsize=13, weight="bold", color=INK)
    about = "100 x (1 - edits / length) of what is generated behind it; dashed: behind the true token"
    figure.text(0.03, 0.865, about, fontsize=9, color=GREY)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs")
    parser.add_argument("--task", default="reverse", help="reverse, numbers, multi30k")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting of all runs: steps=600")
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--examples", type=int, default=1000, help="test sentences at most")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    work, named = asked.work.resolve(), [(mode, seed) for seed in asked.seeds for mode in asked.modes]
    title = {pair: f"{asked.task} {pair[0]} {pair[1]}" for pair in named}
    rows = [Row(title[mode, seed], "exposure", asked.task, [f"mode={mode}", f"seed={seed}", *asked.sets]) for mode, seed in named]
    run(rows, work, asked.device, asked.jobs, float("inf"), False)
    lines = [line for pair in named for line in measured(work / slug(title[pair]), *pair, asked.device, asked.examples)]
    name = "exposure_bias" if asked.task == "reverse" else f"exposure_bias_{asked.task}"
    print(save(name, {"task": asked.task, "sets": asked.sets, "seeds": asked.seeds}, lines))
    if asked.picture:
        draw(lines, asked.task, asked.picture)
        print(asked.picture)


if __name__ == "__main__":
    main()
