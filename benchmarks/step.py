"""What one training step asks of the machine: kernels started, bytes walked over, memory held. And what one decoding step asks.

Counted where PyTorch hands operations to a device, so that a busy machine changes nothing: an operation that moves no number (a
view) is none, and the bytes of one are those of the tensors that it reads and writes. Dropout is counted as a GPU does it, in one
kernel. `--beside PATH` counts another checkout with its own copy of this script (git worktree add PATH COMMIT) and keeps both.

    python benchmarks/step.py [--beside PATH] [--tokens 8192]
    python benchmarks/step.py --rows --list         operations by name, and nothing is saved
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import ROOT, alone, peak_bytes, save, timed
from regard.config import Config
from regard.data.batch import Batch
from regard.models import translator
from regard.training.decoder_modes import teacher_forcing
from regard.training.learner import optimizer

VOCAB, LENGTH = 10_000, 14
FREE = ("empty", "detach", "alias", "_unsafe_view", "view", "lift_fresh", "is_same_size", "_local_scalar_dense", "resize_")
NEW = ("new_", "zeros", "ones", "full", "arange", "scalar_tensor")  # read nothing
FEW = (
    "gather",
    "nll_loss_forward",
    "index",
    "embedding",
    "scatter_",
    "scatter_add_",
    "index_put_",
)  # look at some of the first one


class Count(TorchDispatchMode):
    """Kernels and bytes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not (func.is_view or name.startswith(FREE) or (made and not any(x.numel() for x in made))):
            self.kernels[name] += 1
            self.bytes[name] += _walked(func._schema, name, args, kwargs, made)
        return out

    def row(self) -> dict[str, float]:
        return {"kernels": self.kernels.total(), "megabytes": round(self.bytes.total() / 1e6, 1)}


def _walked(schema: Any, name: str, args: Any, kwargs: Any, made: list[Tensor]) -> int:
    """Bytes read and written: what is changed in place is both, what is written into is not read, of a table a few rows are."""
    fresh = _size(made) if any(x.alias_info is None for x in schema.returns) else 0
    if name.startswith(NEW):
        return fresh
    given = {
        about.name: (about, args[i] if i < len(args) else kwargs[about.name])
        for i, about in enumerate(schema.arguments)
        if i < len(args) or about.name in kwargs
    }
    size = 0
    for place, (about, value) in enumerate(given.values()):
        changed = about.alias_info is not None and about.alias_info.is_write
        own = _size(value)
        if name in FEW and place == 0:
            own = min(own, _size([x for _, x in given.values()][1:]) if changed else _size(made))
        size += own * (2 if changed and not about.is_out else 1)
    return size + fresh


def _size(tensors: Any) -> int:
    return sum(_held(x) for x in tree_leaves(tensors) if isinstance(x, Tensor))


def _held(x: Tensor) -> int:
    """What lies in memory: an expanded tensor is as large as what it was made of."""
    size = x.element_size() if x.numel() else 0
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


@contextmanager
def dropout_in_one() -> Iterator[None]:
    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
        return torch.native_dropout(x, p, True)[0] if training and p else x

    with patch("torch.nn.functional.dropout", drop):
        yield


def setting(tokens: int, device: torch.device) -> tuple[Any, Batch, Any]:
    torch.manual_seed(0)
    config = Config(width=256, heads=4, depth=4, ffn=512, dropout=0.3)
    model = translator(config, VOCAB).to(device).train()
    rows = max(1, tokens // LENGTH)
    lengths = torch.randint(LENGTH - 4, LENGTH + 1, (rows, 1))
    lengths[0] = LENGTH
    source, target = (torch.randint(5, VOCAB, (rows, LENGTH)) for _ in range(2))
    batch = Batch(source, torch.arange(LENGTH) < lengths, target, None).to(device)
    return model, batch, optimizer(model, config)


def steps(tokens: int, device: torch.device) -> dict[str, Any]:
    """By name: a thing to do."""
    model, batch, made = setting(tokens, device)

    def forward() -> Any:
        return teacher_forcing(model, batch, smoothing=0.1).mean

    def learn() -> None:
        forward().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        made.step()
        made.zero_grad()

    def infer() -> None:
        with torch.no_grad():
            model(batch.source, batch.source_valid, batch.target)

    with torch.no_grad():
        state = model.start(batch.source, batch.source_valid)
        _, state = model.extend(state, batch.target[:, :3])
    kept = [state]

    def say() -> None:
        with torch.no_grad():
            kept[0] = model.extend(kept[0], batch.target[:, :1])[1]

    return {"training step": (model.train, learn), "forward pass": (model.eval, infer), "decoding step": (model.eval, say)}


def counted(tokens: int, listed: bool = False) -> list[dict[str, Any]]:
    rows, device = [], torch.device("cpu")
    for name, (mode, do) in steps(tokens, device).items():
        mode()
        do()
        with dropout_in_one(), Count() as count:
            do()
        rows.append({"what": name, **count.row(), "cpu_ms": round(1e3 * min(timed(do, device, 3)))})
        for op, size in count.bytes.most_common() if listed else ():
            print(f"{name:16}{op:56}{count.kernels[op]:6}{size / 1e6:12.1f} MB", file=sys.stderr)
    return rows


def timed_on_cuda(tokens: int) -> list[dict[str, Any]]:
    """Kernels as the GPU saw them, and how long they kept it busy: what is left when a CUDA graph hides their launches."""
    rows, device = [], torch.device("cuda")
    for name, (mode, do) in steps(tokens, device).items():
        mode()
        for _ in range(3):
            do()
        held = peak_bytes(do, device)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            do()
            torch.cuda.synchronize()
        events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(e.device_time_total for e in events) / 1e3
        rows.append({"what": name, "cuda_kernels": len(events), "cuda_ms": round(busy, 3), "cuda_peak_mb": round(held / 1e6)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--beside", type=Path, help="another checkout, counted as well")
    parser.add_argument("--list", action="store_true", help="operations by name, on standard error")
    parser.add_argument("--rows", action="store_true", help="print the rows and save nothing")
    args = parser.parse_args()
    if args.rows:
        torch.set_num_threads(1)
        rows = counted(args.tokens, args.list)
        if torch.cuda.is_available():
            rows = [{**x, **y} for x, y in zip(rows, timed_on_cuda(args.tokens), strict=True)]
        print(json.dumps(rows))
        return
    rows = []
    for which, path in {"before": args.beside, "now": ROOT}.items():
        if path is not None:
            script = path / "benchmarks" / "step.py"  # its own: names inside the package may have changed
            command = [str(script), "--rows", "--tokens", str(args.tokens)]
            found = alone(*command, env={"PYTHONPATH": str(path.resolve() / "src")})
            rows += [{"which": which, **row} for row in found]
    for row in rows:
        print(row)
    settings = {"tokens": args.tokens, "length": LENGTH, "vocab": VOCAB, "width": 256, "heads": 4, "depth": 4, "ffn": 512}
    print(save("step", settings, rows))


if __name__ == "__main__":
    main()
