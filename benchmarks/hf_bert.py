"""BERT of transformers at 4,096 tokens with its own attention and with mechanisms of regard: seconds and peak memory of a pass.

    python benchmarks/hf_bert.py                  on this CPU, float32, one sequence: results/hf_bert_cpu.json
    python benchmarks/hf_bert.py --device cuda    on a GPU, bfloat16, eight sequences: results/hf_bert_cuda.json, or into $OUT
    python benchmarks/hf_bert.py --small          a tiny model, to try the script; writes nothing

The model has the shape of bert-base with random weights and position embeddings for 4,096 tokens. "forward" is a pass without
gradients, "train" a pass and its backward pass. Every mechanism computes with the same weights; softmax is there to show that its
outputs are those of SDPA. A first call of each warms up, on a GPU with its peak memory; then calls take turns. Times are medians:
of the clock, and of the processor, which on a CPU that others use is the better one (with one thread).
LIMIT in the environment is a limit in seconds; --passes forward leaves training out.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import BertConfig, BertModel

import common
import regard.hf

MECHANISMS = ("sdpa", "softmax", "Local(256) | Global(first=1)", "bigbird(block=64)", "linear")
SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEED = 0


def made_model(sizes: dict[str, int], length: int, device: torch.device, dtype: torch.dtype) -> BertModel:
    """Build BERT with random weights, without dropout, so that passes can be compared."""
    torch.manual_seed(SEED)
    config = BertConfig(**sizes, **UNDROPPED, max_position_embeddings=length)
    return BertModel(config, add_pooling_layer=False).to(device, dtype)


def one_pass(model: BertModel, ids: torch.Tensor, mechanism: str, train: bool) -> torch.Tensor:
    """Compute a pass by a mechanism, and the gradients of all weights if it is one of training."""
    regard.hf.set_attention(model, mechanism)
    with torch.set_grad_enabled(train):
        out = model(ids).last_hidden_state
        if train:
            model.zero_grad()
            out.float().square().mean().backward()
    return out.detach()


def _keep(outputs: dict[str, torch.Tensor], name: str, call: Any) -> None:
    outputs[name] = call().float().cpu()


def row_of(mechanism: str, train: bool, times: list[tuple[float, float]], memory: int | None, tokens: int) -> dict[str, Any]:
    clock, processor = (median(each) for each in zip(*times, strict=True))
    return {
        "mechanism": mechanism,
        "pass": "train" if train else "forward",
        "seconds": clock,
        "processor_seconds": processor,
        "tokens_per_second": tokens / clock,
        "peak_bytes": memory,
    }


def both_clocks(call: Any, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a call: of the clock and of the processor."""
    start = time.process_time()
    spent = common.seconds(call, device)
    return spent, time.process_time() - start


def measure(args: argparse.Namespace, end: float) -> list[dict[str, Any]]:
    """Time every mechanism, forward and in training; calls that would begin behind the limit are left out."""
    device = torch.device(args.device)
    model = made_model(SMALL if args.small else SIZES, args.length, device, getattr(torch, args.dtype))
    ids = torch.randint(5, 30_000, (args.batch, args.length), generator=torch.Generator().manual_seed(SEED)).to(device)
    rows = []
    for train in (False, True):
        if train and (args.passes == "forward" or time.monotonic() > end):
            break
        calls = {name: partial(one_pass, model, ids, name, train) for name in MECHANISMS}
        outputs: dict[str, torch.Tensor] = {}
        first = {name: partial(_keep, outputs, name, call) for name, call in calls.items()}
        memory = {name: common.peak_bytes(call, device) if device.type == "cuda" else call() for name, call in first.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(args.repeats):
            for name, call in calls.items():
                if time.monotonic() < end or not times[name]:
                    times[name].append(both_clocks(call, device))
        for name in calls:
            row = row_of(name, train, times[name], memory[name], ids.numel())
            row["mean_distance_to_sdpa"] = (outputs[name] - outputs["sdpa"]).abs().mean().item()
            rows.append(row)
            print(f"{row['pass']:8s}{row['seconds']:9.4f} s {row['processor_seconds']:9.4f} s  {name}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--length", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--passes", choices=["forward", "both"], default="both")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    gpu = args.device.startswith("cuda")
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    args.length = args.length or (256 if args.small else 4096)
    args.batch = args.batch or (8 if gpu else 1)
    args.repeats = args.repeats or (20 if gpu else 3)
    rows = measure(args, time.monotonic() + float(os.environ.get("LIMIT", "inf")))
    if args.small:
        return
    if os.environ.get("OUT"):
        common.RESULTS = Path(os.environ["OUT"])
    settings = {**vars(args), **SIZES, "seed": SEED, "threads": torch.get_num_threads()}
    print(common.save(f"hf_bert_{'cuda' if gpu else 'cpu'}", settings, rows))


if __name__ == "__main__":
    main()
