"""What `bench_gpu.py` measures: sets of requests to `regard bench`, those that matter most first, in sets and between them."""

from __future__ import annotations

from typing import Any

from regard.bench.token_step import STEP
from regard.bench.whole_models import DECODER_MODEL, ENCODER_MODEL
from regard.catalogue import CATALOGUE

K = 1024
FULL, FLEX, FLA = "SDPA", "FlexAttention", "flash-linear-attention"
CAUSAL, BIDIRECTIONAL = (True,), (False,)
BOTH_FORMS = (True, False)
BOTH_KINDS = (DECODER_MODEL, ENCODER_MODEL)
PACKAGES = [FULL, "reformer-pytorch", "routing-transformer", "sinkhorn-transformer", "linear-attention-transformer"]
GIVEN = {"sparse": "Local(128) | Global(first=2)", "gat": "gat(Local(128))", "hybrid": "hybrid(pattern=Local(128))"}
LAST = "rnn"  # a step for each token: minutes
HASHED = ["transformers Reformer"]
MAIN = ["softmax", "Local(256)", "linear", "retention"]
REST = [GIVEN.get(name, name) for name in CATALOGUE if name not in (*MAIN, LAST)]

SETS: dict[str, list[dict[str, Any]]] = {
    "windows": [
        {"mixers": ["Local(256)", "Local(128)"], "lengths": [4 * K, 16 * K], "forms": BOTH_FORMS, "peers": [FULL, FLEX]},
        {"mixers": ["Local(256)", "Local(128)"], "lengths": [64 * K], "forms": BOTH_FORMS, "peers": [FULL]},
        {"mixers": ["Local(256)"], "lengths": [256 * K, 1024 * K], "forms": CAUSAL, "peers": []},
    ],
    "linear": [
        {"mixers": ["linear"], "lengths": [4 * K, 64 * K], "forms": CAUSAL, "peers": [FULL, FLA]},
        {
            "mixers": ["gla", "delta", "retention(norm=False)"],
            "lengths": [4 * K, 64 * K, 16 * K],
            "forms": CAUSAL,
            "peers": [FULL, FLA],
        },
        {"mixers": ["linear", "efficient"], "lengths": [4 * K, 64 * K], "forms": BIDIRECTIONAL, "peers": [FULL]},
        {"mixers": ["retention"], "lengths": [4 * K, 64 * K], "forms": CAUSAL, "peers": []},
        {"mixers": ["linear"], "lengths": [16 * K, 1024 * K], "forms": CAUSAL, "peers": []},
    ],
    "patterns": [
        {
            "mixers": ["Local(128) | Global(first=2)", "bigbird(special='ends')", "longformer(window=257, shared=True)"],
            "lengths": [4 * K],
            "forms": BIDIRECTIONAL,
            "level": "core",
            "peers": [FULL, FLEX],
        },
        {
            "mixers": ["longformer(window=257)", "bigbird(special='ends')"],
            "lengths": [4 * K, 16 * K],
            "forms": BIDIRECTIONAL,
            "level": "layer",
            "peers": [FULL, "transformers Longformer", "transformers BigBird"],
        },
        {
            "mixers": ["Local(128) | Global(first=2)", "bigbird"],
            "lengths": [2 * K, 4 * K, 16 * K],
            "forms": CAUSAL,
            "peers": [FULL],
        },
        {
            "mixers": ["Local(128) | Global(first=2)", "longformer(window=257, shared=True)"],
            "lengths": [2 * K],
            "forms": BIDIRECTIONAL,
            "level": "core",
            "peers": [FULL],
        },
    ],
    "softmax": [{"mixers": ["softmax"], "lengths": [4 * K, 16 * K, 64 * K], "forms": CAUSAL, "peers": [FULL]}],
    "steps": [
        {
            "mixers": ["linear", "Local(256) | Global(first=4)", "softmax", "retention", "gla", "delta"],
            "lengths": [16 * K],
            "passes": (STEP,),
            "peers": [FULL],
        }
    ],
    "others": [
        {"mixers": ["performer"], "lengths": [4 * K, 16 * K], "forms": BOTH_FORMS, "peers": [FULL, "performer-pytorch"]},
        {
            "mixers": ["reformer", "routing", "sinkhorn", "efficient"],
            "lengths": [4 * K, 16 * K],
            "forms": BIDIRECTIONAL,
            "level": "core",
            "peers": PACKAGES,
        },
        {
            "mixers": ["nystrom(iterations=6)", "linformer(share='head')", "fnet"],
            "lengths": [4 * K, 16 * K],
            "forms": BIDIRECTIONAL,
            "level": "layer",
            "peers": [FULL, "nystrom-attention", "linformer", "transformers FNet"],
        },
        {
            "mixers": ["reformer"],
            "lengths": [4 * K],
            "forms": BIDIRECTIONAL,
            "level": "layer",
            "peers": ["transformers Reformer"],
        },
    ],
    "models": [
        {"mixers": MAIN, "lengths": [4 * K, 16 * K, 64 * K], "kinds": (DECODER_MODEL,)},
        {"mixers": [*MAIN, *REST], "lengths": [4 * K], "kinds": (ENCODER_MODEL,)},
        {"mixers": REST, "lengths": [4 * K], "kinds": (DECODER_MODEL,)},
    ],
    "lengths": [  # of models: all others, in a file of their own
        {"mixers": MAIN, "lengths": [1 * K, 256 * K, 1024 * K], "kinds": (DECODER_MODEL,)},
        {"mixers": REST, "lengths": [16 * K, 64 * K], "kinds": (DECODER_MODEL,)},
        {"mixers": [*MAIN, *REST], "lengths": [16 * K, 64 * K], "kinds": (ENCODER_MODEL,)},
        {"mixers": REST, "lengths": [1 * K], "kinds": (DECODER_MODEL,)},
        {"mixers": [*MAIN, *REST], "lengths": [1 * K], "kinds": (ENCODER_MODEL,)},
        {"mixers": REST, "lengths": [256 * K, 1024 * K], "kinds": (DECODER_MODEL,)},
        {"mixers": [*MAIN, *REST], "lengths": [256 * K, 1024 * K], "kinds": (ENCODER_MODEL,)},
        {"mixers": [LAST], "lengths": [4 * K], "kinds": (DECODER_MODEL,)},
    ],
}
# By several processes, which take turns on the card: compiling takes longest, and one process does it on one core.
ALL_LENGTHS = [1 * K, 4 * K, 16 * K, 64 * K, 256 * K, 1024 * K]
COMPILED: list[dict[str, Any]] = [
    {"mixers": mixers, "lengths": ALL_LENGTHS, "kinds": (kind,), "compiled": (True,)}
    for mixers in (MAIN, REST)
    for kind in BOTH_KINDS
]
