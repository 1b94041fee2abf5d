"""Which backends computed a call: what REGARD_LOG=kernels would print, as a list."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from regard.analysis.cost import sample
from regard.cache import forget_signatures
from regard.mixers.base import Dims
from regard.ops import backend
from regard.spec import Spec

LOG = "REGARD_LOG"
SHOWN_TOKENS = 512  # tokens of the pass that shows which backends there are


def backends_here(spec: Spec, dims: Dims, length: int) -> dict[str, Any]:
    """Run a forward pass of a layer as `auto` would on this machine's device: bfloat16 on a GPU, float32 on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixer = spec.build(replace(dims, max_len=length)).to(device, dtype).eval()
        x = torch.randn(1, sample(mixer, length, SHOWN_TOKENS), dims.width, device=device, dtype=dtype)
        chosen = backends_of(lambda: mixer(x))
    return {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "backends": chosen}


def backends_of(call: Callable[[], Any]) -> list[str]:
    """Run a call and list the backends that `auto` chose in it: "tile: triton"."""
    with _own_log():
        call()
        return sorted(f"{operation}: {name}" for operation, name in backend._logged)


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """Log backends into nothing, from an empty list on; afterwards everything is as before."""
    setting, logged = os.environ.get(LOG), set(backend._logged)
    backend._logged.clear()
    forget_signatures()  # of prepared calls, which choose no backend any more
    os.environ[LOG] = "kernels"
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        backend._logged.clear()
        backend._logged.update(logged)
        if setting is None:
            del os.environ[LOG]
        else:
            os.environ[LOG] = setting
