"""State of all random generators (Python, NumPy, torch, CUDA) as JSON, for exact resumption."""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # and CUDA's


def rng_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, b64encode(np.asarray(keys).tobytes()).decode(), int(place), int(has_gauss), float(cached)],
        "torch": _encoded_state(torch.get_rng_state()),
        "cuda": _encoded_state(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(b64decode(keys), dtype=np.uint32), *rest))
    torch.set_rng_state(_decoded_state(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_decoded_state(state["cuda"]))


def _encoded_state(x: Tensor) -> str:
    return b64encode(x.numpy().tobytes()).decode()


def _decoded_state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
