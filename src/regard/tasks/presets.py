"""Presets of tasks: settings by name, such as `regard train multi30k --preset cpu`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Preset = Mapping[str, Any]

# Designed for about 20 minutes of training on two cores: benchmarks/cpu_presets.py trains them all.
CPU_PRESETS: dict[str, Preset] = {
    "multi30k": {
        "width": 128,
        "depth": 3,
        "ffn": 512,
        "vocab": 6000,
        "dropout": 0.15,
        "mode": "teacher_forcing",
        "steps": 3600,
        "batch_tokens": 2048,
        "lr": 2.5e-3,
        "warmup": 400,
        "validate_every": 1200,
        "save_every": 100,
        "average": 8,
    },
    "ewt": {
        "width": 192,
        "heads": 6,
        "ffn": 384,
        "spelling": 192,
        "dropout": 0.3,
        "steps": 2000,
        "lr": 2e-3,
        "validate_every": 400,
        "save_every": 100,
    },
    "gum": {
        "mixer": ["rnn", "softmax"],
        "width": 160,
        "depth": 3,
        "decoder_depth": 2,
        "ffn": 512,
        "dropout": 0.2,
        "precision": "32",
        "steps": 4000,
        "batch_tokens": 2048,
        "lr": 2e-3,
        "validate_every": 1000,
        "save_every": 250,
        "average": 4,
    },
    "imdb": {
        "cut": 512,
        "max_len": 512,
        "dropout": 0.4,
        "steps": 3500,
        "batch_tokens": 8192,
        "lr": 1.5e-3,
        "validate_every": 500,
        "save_every": 500,
    },
    "shakespeare": {
        "window": 128,
        "width": 128,
        "heads": 4,
        "depth": 4,
        "ffn": 512,
        "dropout": 0.1,
        "weight_dropout": 0.0,
        "decay": 0.1,
        "steps": 4000,
        "batch_tokens": 4096,
        "lr": 2e-3,
        "validate_every": 500,
        "save_every": 250,
        "average": 4,
        "max_len": 1024,
    },
}
