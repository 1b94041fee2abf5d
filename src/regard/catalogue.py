"""The one table of mechanisms. Tests, pictures, the command line and the README iterate over it.

A new mechanism is one class in its family's file and one row here.
"""

from __future__ import annotations

from regard.mixers.kernel import RFA, Efficient, Linear, Performer
from regard.mixers.patterns import Blocks, Dilated, Global, Local, PerHead, Stride, Truncated
from regard.mixers.softmax import Additive, Identity, Relu, Softmax
from regard.mixers.sparse import BigBird, Longformer, Sparse, SparseTransformer
from regard.row import Example, Row, growth

_ROWS = [
    Row(
        "softmax",
        Softmax,
        "softmax",
        "Every query weighs every key by the softmax of their scaled dot product.",
        "Vaswani et al. 2017, arXiv:1706.03762",
        (Example(), Example({"scale": 1.0})),
    ),
    Row(
        "additive",
        Additive,
        "softmax",
        "A small network scores each pair instead of a dot product.",
        "Bahdanau et al. 2014, arXiv:1409.0473",
        (Example({"hidden": 16}),),
    ),
    Row(
        "relu",
        Relu,
        "softmax",
        "Positive scores are the weights, divided by the number of keys or by their sum.",
        "Wortsman et al. 2023, arXiv:2309.08586",
        (Example({"norm": "count"}), Example({"norm": "sum"})),
    ),
    Row(
        "identity",
        Identity,
        "softmax",
        "Every token sees only itself: the control of every comparison.",
        "Yu et al. 2022, arXiv:2210.13452",
        (Example({}, cost=1, memory=0),),
    ),
    Row(
        "sparse",
        Sparse,
        "sparse",
        "Softmax over the pairs of a pattern that a person chose.",
        "Child et al. 2019, arXiv:1904.10509",
        (
            Example({"pattern": Local(8) | Global(first=2)}, cost=1, memory=0),
            Example({"pattern": Dilated(4, 3)}, cost=1, memory=0),
            Example({"pattern": Stride(7)}, cost=2, memory=1),
            Example({"pattern": Truncated(5, 2)}, cost=1, memory=0),
            Example({"pattern": Blocks(8)}, cost=1, memory=0),
            Example({"pattern": PerHead([Local(4), Local(16), Dilated(4, 2), Blocks(8, around=1)])}, cost=1, memory=0),
        ),
    ),
    Row(
        "longformer",
        Longformer,
        "sparse",
        "A sliding window, dilated in some heads, and special tokens with projections of their own.",
        "Beltagy et al. 2020, arXiv:2004.05150",
        (
            Example({"window": 8, "first": 2}, cost=1, memory=0),
            Example({"window": 4, "dilation": 3, "dilated_heads": 2, "at": [0, 5]}, cost=1, memory=0),
            Example({"window": 8, "first": 2, "shared": True}, cost=1, memory=0),
        ),
    ),
    Row(
        "bigbird",
        BigBird,
        "sparse",
        "Blocks of a window, special tokens and random pairs.",
        "Zaheer et al. 2020, arXiv:2007.14062",
        (
            Example({"block": 8, "globals": 1, "random": 2}, cost=1),
            Example({"block": 8, "globals": 1, "random": 0}, cost=1, memory=0),
            Example({"block": 8, "globals": 1, "random": 2, "special": "external"}, cost=1, weights=False),
        ),
    ),
    Row(
        "sparse_transformer",
        SparseTransformer,
        "sparse",
        "Half of the heads see their neighbourhood, the other half every so many tokens.",
        "Child et al. 2019, arXiv:1904.10509",
        (Example({"stride": 8}), Example({"stride": 8, "form": "fixed", "summary": 2})),
    ),
    Row(
        "linear",
        Linear,
        "kernel",
        "A feature map elu(x) + 1 replaces the exponential, so that keys and values are summed once.",
        "Katharopoulos et al. 2020, arXiv:2006.16236",
        (Example({}, cost=1, memory=0),),
    ),
    Row(
        "efficient",
        Efficient,
        "kernel",
        "Queries are normalised over features and keys over positions, then multiplied in the cheap order.",
        "Shen et al. 2018, arXiv:1812.01243",
        (Example({}, cost=1, memory=0),),
    ),
    Row(
        "rfa",
        RFA,
        "kernel",
        "Random Fourier features of normalised queries and keys approximate the exponential.",
        "Peng et al. 2021, arXiv:2103.02143",
        (Example({"features": 32}, cost=1, memory=0), Example({"features": 32, "gated": True}, cost=1, memory=0)),
    ),
    Row(
        "performer",
        Performer,
        "kernel",
        "Positive orthogonal random features estimate the exponential without bias.",
        "Choromanski et al. 2020, arXiv:2009.14794",
        (Example({"features": 32}, cost=1, memory=0),),
    ),
]

CATALOGUE: dict[str, Row] = {row.name: row for row in _ROWS}


def catalogue_table() -> str:
    """The README's table, in Markdown."""
    lines = ["| name | what it does | claims | cost | memory | paper |", "|---|---|---|---|---|---|"]
    for row in CATALOGUE.values():
        first = row.examples[0]
        cells = (f"`{row.name}`", row.summary, str(row.can), growth(first.cost, "n"), growth(first.memory, "t"), row.paper)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
