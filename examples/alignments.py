"""Where a decoder looks while it speaks: plain, guided, monotonic and location-aware attention on the same task, side by side.

Say each letter once or twice, as the small number at it demands: sources and targets advance together, so the diagonal is nearly
where to look, and a loss that rewards it (guided) helps at an equal number of updates. Takes about half a minute; with --quick
a second, after which no mechanism has learned anything yet.
python examples/alignments.py --out alignments.png
"""

import argparse
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard.config import Config
from regard.data.batch import BEGIN, END, PAD, shifted
from regard.decoding import Constraints, generate
from regard.models.build import encoder
from regard.models.guided import guided_translator, record_alignments
from regard.plots.mechanism_plot import GREY, INK, paint, scale_of
from regard.training.guided_loss import guided_attention_loss
from regard.training.losses import cross_entropy

LETTERS, N, FIRST, STEPS, TESTED = 9, 10, 5, 500, 500
QUICK_STEPS, QUICK_TESTED = 10, 20
CONFIG = Config(width=32, heads=1, depth=1, ffn=64, dropout=0.0, max_len=64)
READERS = {
    "plain": ("plain", 0.0, "softmax over all letters, anew\nat every step"),
    "guided": ("plain", 3.0, "the same, with a loss for\nlooking far from the diagonal"),
    "monotonic": ("monotonic", 0.0, "walks on until it decides\nto stop; never back"),
    "location-aware": ("location", 0.0, "softmax that sees where\nit looked a step before"),
}


def examples(b, dice):
    """Letters, none twice in a row; each said 1 + letter % 2 times, then END; and which letter each of those words stands for."""
    source = (torch.randint(1, LETTERS, (b, N), generator=dice).cumsum(1) % LETTERS) + FIRST
    truth = [[j for j, letter in enumerate(row) for _ in range(times(letter))] for row in source.tolist()]
    target = [[*row[at].tolist(), END] for row, at in zip(source, truth, strict=True)]
    longest = max(map(len, target))
    return source, torch.tensor([row + [PAD] * (longest - len(row)) for row in target]), truth


def times(letter):
    return 1 + letter % 2


def train(kind, weight, steps):
    """`weight` of the guided attention loss. The encoder does not mix, so that all looking is the reader's."""
    torch.manual_seed(0)
    model, dice = guided_translator(CONFIG, FIRST + LETTERS, kind), torch.Generator().manual_seed(1)
    model.encoder = encoder(replace(CONFIG, mixer="identity"), model.encoder.embed)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        source, target, _ = examples(32, dice)
        real = target != PAD
        with record_alignments(model) as weights:
            loss = cross_entropy(model(source, None, shifted(target), real), target, real).mean
        optimizer.zero_grad()
        (loss + weight * guided_attention_loss(weights[0], None, real).mean).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def tested(model, count):
    """The share of strings it says right by itself, that of steps that go back, and how it looks at one string (m n)."""
    source, target, truth = examples(count, torch.Generator().manual_seed(20261116))  # which no setting was chosen on
    with record_alignments(model) as weights:
        model(source, None, shifted(target), target != PAD)
    at = weights[0][:, 0].argmax(-1).tolist()
    moves = [b < a for row, marks in zip(at, truth, strict=True) for a, b in pairwise(row[: len(marks)])]
    constraints = Constraints(END, max_new_tokens=2 * N + 1)
    outputs = generate(model, model.start(source), torch.full((count, 1), BEGIN), constraints=constraints)
    right = [output == row[: row.index(END)] for output, row in zip(outputs, target.tolist(), strict=True)]
    return sum(right) / len(right), sum(moves) / len(moves), weights[0][0, 0, : len(truth[0])], (source[0].tolist(), truth[0])


def draw(found, steps, count):
    figure = Figure(figsize=(12.8, 8.4), dpi=150, facecolor="white")
    figure.text(0.05, 0.945, "Where a decoder looks while it speaks", fontsize=17, weight="bold", color=INK)
    task = "Task: say every letter once or twice, as its number demands. A row is a step, a column a letter of the source"
    figure.text(0.05, 0.91, f"{task}; framed: the letter that is said.", color=GREY)
    scale = scale_of(torch.stack([weights for _, _, weights, _ in found.values()]))
    for i, (name, (right, back, weights, (source, truth))) in enumerate(found.items()):
        axes = figure.add_axes((0.05 + 0.236 * i, 0.155, 0.215, 0.64))
        paint(axes, weights, scale)
        for step, j in enumerate(truth):
            axes.add_patch(Rectangle((j - 0.5, step - 0.5), 1, 1, fill=False, edgecolor="#2b6cb0", linewidth=1.1))
        letters = [chr(ord("a") + letter - FIRST) for letter in source]
        numbered = [f"{name}{'¹²'[times(letter) - 1]}" for name, letter in zip(letters, source, strict=True)]
        axes.set_xticks(range(N), numbered)
        axes.set_yticks(range(len(truth)), [letters[j] for j in truth] if i == 0 else [""] * len(truth))
        axes.tick_params(length=0, pad=5, labelsize=11, labelcolor=INK, top=False)
        axes.set_title(name, fontsize=13, color=INK, weight="bold", loc="left", pad=40)
        axes.text(0, 1.015, READERS[name][2], transform=axes.transAxes, fontsize=9.5, color=GREY, va="bottom", linespacing=1.3)
        said = f"strings said right  {right:.1%}\nsteps that look back  {back:.1%}"
        axes.set_xlabel(said, fontsize=10.5, color=INK, loc="left", labelpad=10)
    note = f"One string that none has seen, after {steps} updates each; percentages over {count}."
    shades = "Dark is a weight of 1, pale nearly none (by the root, so that small weights show), grey none at all."
    figure.text(0.05, 0.03, f"{note} {shades}", fontsize=9.5, color=GREY)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "alignments.png")
    parser.add_argument("--quick", action="store_true", help="a few updates and a few strings")
    args = parser.parse_args()
    steps, count = (QUICK_STEPS, QUICK_TESTED) if args.quick else (STEPS, TESTED)
    found = {}
    for name, (kind, weight, _) in READERS.items():
        found[name] = tested(train(kind, weight, steps), count)
        print(f"{name:15s} strings said right {found[name][0]:6.1%}, steps that look back {found[name][1]:6.1%}")
    assert found["monotonic"][1] == 0, "a monotonic reader never looks back"
    assert args.quick or found["guided"][0] > found["plain"][0], "where the diagonal is true, guidance helps"
    draw(found, steps, count).savefig(args.out)
    print(f"drawn into {args.out}")
