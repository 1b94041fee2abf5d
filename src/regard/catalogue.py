"""The table of all mechanisms. Tests, figures, the command line and the README iterate over it.

A new mechanism is one class in its family's file and one row here.
"""

from __future__ import annotations

from regard.catalogue_row import Example, Row
from regard.mixers.attention_free import GMLP, FNet, MlpMixer
from regard.mixers.baselines import RNN, Conv, WindowFC
from regard.mixers.cluster import Reformer, Routing
from regard.mixers.compressed import Compressed
from regard.mixers.exp_features import Efficient, Performer
from regard.mixers.gated import GLA, Delta, Retention
from regard.mixers.graph_attention import GAT
from regard.mixers.hedgehog import Hedgehog
from regard.mixers.hybrid import Hybrid
from regard.mixers.landmarks import Nystrom, PooledQueries
from regard.mixers.linear_attention import RFA, Cosformer, Linear
from regard.mixers.low_rank import Linformer
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.softmax import Additive, Identity, Relu, Softmax
from regard.mixers.sparse import BigBird, Longformer, Sinks, Sparse, SparseTransformer
from regard.mixers.synthesizer import Synthesizer
from regard.patterns import Blocks, Dilated, Global, Local, PerHead, Stride, Truncated

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
            Example({"pattern": Truncated(5, 2)}, cost=1, memory=None),
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
            Example({"attention_window": 14, "first": 2, "shared": True}, cost=1, memory=0),
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
            Example({"block": 8, "globals": 2, "random": 1, "special": "ends"}, cost=1, memory=None),
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
        "Positive orthogonal random features estimate the exponential, as sharp as their number allows.",
        "Choromanski et al. 2020, arXiv:2009.14794",
        (
            Example({"features": 32}, cost=1, memory=0),
            Example({"features": 32, "kind": "positive", "max_norm": None}, cost=1, memory=0),
        ),
    ),
    Row(
        "cosformer",
        Cosformer,
        "kernel",
        "Positive parts of queries and keys, weighed by a cosine of the distance that falls to zero at the longest one.",
        "Qin et al. 2022, arXiv:2202.08791",
        (Example({}, cost=1, memory=0),),
    ),
    Row(
        "hedgehog",
        Hedgehog,
        "kernel",
        "Linear attention with learned features, a softmax over a map of each head: made to imitate a softmax layer.",
        "Zhang et al. 2024, arXiv:2402.04347",
        (Example({}, cost=1, memory=0),),
    ),
    Row(
        "retention",
        Retention,
        "kernel",
        "A sum over the past that fades at a fixed rate, another in each head.",
        "Sun et al. 2023, arXiv:2307.08621",
        (
            Example({}, cost=1, memory=0),
            Example({"power": 2, "norm": False}, cost=1, memory=0),
            Example({"output_norm": True, "output_gate": True}, cost=1, memory=0),
        ),
    ),
    Row(
        "gla",
        GLA,
        "kernel",
        "A sum over the past with a decay per feature, computed from every token.",
        "Yang et al. 2023, arXiv:2312.06635",
        (
            Example({}, cost=1, memory=0),
            Example({"gate": "head"}, cost=1, memory=0),
            Example({"output_norm": True, "output_gate": True}, cost=1, memory=0),
        ),
    ),
    Row(
        "delta",
        Delta,
        "kernel",
        "A memory where a key that comes again replaces what was stored under it.",
        "Schlag et al. 2021, arXiv:2102.11174",
        (
            Example({}, cost=1, memory=0),
            Example({"gated": True}, cost=1, memory=0),
            Example({"activation": "none"}, cost=1, memory=0),
            Example({"output_norm": True}, cost=1, memory=0),
        ),
    ),
    Row(
        "hybrid",
        Hybrid,
        "hybrid",
        "A sliding window and a memory of everything in one layer, merged by a learned gate per head.",
        "Munkhdalai et al. 2024, arXiv:2404.07143",
        (
            Example({"pattern": Local(8)}, cost=1, memory=0),
            Example({"pattern": Local(8), "far": "delta(gated=True)"}, cost=1, memory=0),
        ),
    ),
    Row(
        "sinks",
        Sinks,
        "sparse",
        "A sliding window, and the first tokens stay visible for ever.",
        "Xiao et al. 2023, arXiv:2309.17453",
        (Example({"window": 8, "first": 3}, cost=1, memory=0),),
    ),
    Row(
        "fnet",
        FNet,
        "free",
        "The real part of a Fourier transform over the sequence and the channels, with nothing to learn.",
        "Lee-Thorp et al. 2021, arXiv:2105.03824",
        (
            Example({}, cost=1, memory=None, weights=False),
            Example({"norm": "none"}, cost=1, memory=None, weights=False),
        ),
    ),
    Row(
        "gmlp",
        GMLP,
        "free",
        "A learned mixture over positions gates every token, with an optional small attention.",
        "Liu et al. 2021, arXiv:2105.08050",
        (Example({"expand": 2}, weights=False), Example({"expand": 2, "tiny": 8}, weights=False)),
    ),
    Row(
        "mlp_mixer",
        MlpMixer,
        "free",
        "A small network across positions, the same for every channel.",
        "Tolstikhin et al. 2021, arXiv:2105.01601",
        (Example({"hidden": 24}, cost=1, memory=None, weights=False),),
    ),
    Row(
        "conv",
        Conv,
        "baselines",
        "A convolution: the same few weights at every position, by distance alone.",
        "Kaiser et al. 2017, arXiv:1706.03059",
        (
            Example({"kernel": 5}, cost=1, memory=0, weights=False),
            Example({"kernel": 3, "dilation": 4}, cost=1, memory=0, weights=False),
            Example({"kernel": 3, "depthwise": False}, cost=1, memory=0, weights=False),
        ),
    ),
    Row(
        "rnn",
        RNN,
        "baselines",
        "A recurrent network, GRU or LSTM, in both directions where it is not causal.",
        "Cho et al. 2014, arXiv:1406.1078",
        (
            Example({}, cost=1, memory=0, weights=False),
            Example({"cell": "lstm", "hidden": 24}, cost=1, memory=0, weights=False),
        ),
        compiles=False,
    ),
    Row(
        "window_fc",
        WindowFC,
        "baselines",
        "A fully connected layer over a window of neighbours, the first thing one tries.",
        "Waibel et al. 1989, doi:10.1109/29.21701",
        (Example({"window": 5}, cost=1, memory=0, weights=False),),
    ),
    Row(
        "sinkhorn",
        Sinkhorn,
        "sinkhorn",
        "Blocks of keys are sorted by a learned, relaxed permutation, and a block of queries sees its own and the sorted one.",
        "Tay et al. 2020, arXiv:2002.11296",
        (Example({"block": 8}), Example({"block": 8, "form": "sortcut"}, cost=1, memory=None)),
    ),
    Row(
        "gat",
        GAT,
        "graph",
        "A node scores its neighbours by what it is plus what they are, along the edges of a graph.",
        "Velickovic et al. 2018, arXiv:1710.10903",
        (
            Example({"pattern": Local(4)}, cost=1, memory=0),
            Example({"pattern": PerHead([Local(3) | Global(first=1), Dilated(3, 2)]), "v2": True}, cost=1, memory=0),
        ),
    ),
    Row(
        "reformer",
        Reformer,
        "cluster",
        "Random rotations hash tokens into buckets, and each token sees its neighbours in its bucket.",
        "Kitaev et al. 2020, arXiv:2001.04451",
        (
            Example({"rounds": 2, "buckets": 4, "chunk": 6}, cost=1, memory=0),
            Example({"rounds": 3, "buckets": 8, "chunk": 2}, cost=1, memory=0),
        ),
        chooses=True,
    ),
    Row(
        "routing",
        Routing,
        "cluster",
        "Learned clusters take the queries and keys nearest to them, and attention stays inside a cluster.",
        "Roy et al. 2020, arXiv:2003.05997",
        (Example({"clusters": 4, "window": 8}, cost=1, memory=0),),
        chooses=True,
    ),
    Row(
        "synthesizer",
        Synthesizer,
        "synthesizer",
        "Weights are made up from each token alone, or are a learned table, without comparing queries and keys.",
        "Tay et al. 2020, arXiv:2005.00743",
        (
            Example({}),
            Example({"form": "random"}),
            Example({"form": "random", "frozen": True}),
            Example({"form": "dense_factorised"}),
            Example({"form": "random_factorised", "rank": 4}),
            Example({"mix": "learned"}),
            Example({"form": "random", "mix": 0.5}),
        ),
    ),
    Row(
        "linformer",
        Linformer,
        "low_rank",
        "Learned weights for every position mix all keys and values into a few slots.",
        "Wang et al. 2020, arXiv:2006.04768",
        (Example({"rank": 8}, cost=1, memory=0), Example({"rank": 12, "share": "kv"}, cost=1, memory=0)),
    ),
    Row(
        "compressed",
        Compressed,
        "low_rank",
        "A convolution turns every few consecutive keys and values into one; what is near is seen token by token.",
        "Liu et al. 2018, arXiv:1801.10198",
        (Example({"rate": 3}), Example({"rate": 4, "near": 1, "kernel": "full"})),
    ),
    Row(
        "pooled_queries",
        PooledQueries,
        "low_rank",
        "Neighbouring queries are averaged, so that there are fewer answers than tokens.",
        "Dai et al. 2020, arXiv:2006.03236",
        (Example({"rate": 3}, memory=None),),
    ),
    Row(
        "nystrom",
        Nystrom,
        "low_rank",
        "Means of consecutive tokens are landmarks, and attention between all is estimated from theirs.",
        "Xiong et al. 2021, arXiv:2102.03902",
        (Example({"landmarks": 8}, cost=1, memory=None), Example({"landmarks": 6, "conv": 3}, cost=1, memory=None)),
    ),
]

#: Every mechanism by its name, as a `Row`; `register` adds one.
#:
#: >>> from regard import CATALOGUE
#: >>> CATALOGUE["bigbird"].summary
#: 'Blocks of a window, special tokens and random pairs.'
CATALOGUE: dict[str, Row] = {row.name: row for row in _ROWS}
