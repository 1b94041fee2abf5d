"""Tokens per second beside Hugging Face's `generate`: the same weights, the same tokens, in one run and taking turns.

python benchmarks/decoding.py                    into results/decoding.json (three minutes on two cores)
python benchmarks/decoding.py --device cuda      into results/decoding_gpu.json
python benchmarks/decoding.py --only step        into results/decode_step.json: steps by mechanism, see decode_step.py

Weights are random, and no answer ends early, so that both generate as many tokens. Greedy answers must be equal, or there is no
result.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: weights are made here

import decode_step
from common import Progress, save, seconds
from regard.decoding import Constraints, StaticDecoder, beam, generate

WIDTH, HEADS, DEPTH, PROMPT, SEED = 512, 8, 6, 32, 0
VOCAB = {"gpt2": 50_257, "marian": 32_000}
NO_END = -1  # a token that is in no vocabulary
SHAPES = [(1, 1), (1, 5), (32, 1), (32, 5)]  # rows, beams
TOKENS = {  # new ones; a CPU is given fewer where a token takes it long
    "cuda": {"gpt2": dict.fromkeys(SHAPES, 128), "marian": dict.fromkeys(SHAPES, 64)},
    "cpu": {
        "gpt2": dict(zip(SHAPES, (128, 64, 48, 12), strict=True)),
        "marian": dict.fromkeys(SHAPES, 64),  # as many as there: of fewer, most of the time is that of reading
    },
}


class Case(NamedTuple):
    model: str
    rows: int
    beams: int
    new: int
    source: Tensor  # (rows PROMPT)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB["gpt2"],
        n_positions=256,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        initializer_range=0.1,  # with smaller weights a model repeats one token
    )
    return GPT2LMHeadModel(config)


def marian() -> Any:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=VOCAB["marian"],
        d_model=WIDTH,
        encoder_layers=DEPTH,
        decoder_layers=DEPTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        scale_embedding=True,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        init_std=0.05,
    )
    return MarianMTModel(config)


def both(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return their model, and ours with its weights."""
    from regard.pretrained import load_pretrained

    torch.manual_seed(SEED)
    theirs = {"gpt2": gpt2, "marian": marian}[name]().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_pretrained(folder, device=device, dtype=dtype)
    asked = theirs.generation_config
    asked.eos_token_id = asked.forced_eos_token_id = None
    asked.pad_token_id = 0
    return theirs.to(device, dtype), ours


def theirs_generate(model: Any, case: Case, cache: str | None = None) -> Tensor:
    options = {} if cache is None else {"cache_implementation": cache}
    new = {"max_new_tokens": case.new, "min_new_tokens": case.new}
    mask = torch.ones_like(case.source)
    out = model.generate(case.source, attention_mask=mask, num_beams=case.beams, do_sample=False, **new, **options)
    return out[:, -case.new :]


def generated(model: Any, case: Case) -> Tensor:
    constraints, x = Constraints(NO_END, max_new_tokens=case.new), case.source
    state, prompt = (model.start(case.rows), x) if case.model == "gpt2" else (model.start(x), x.new_full((case.rows, 1), 2))
    if case.beams == 1:
        return torch.tensor(generate(model, state, prompt, constraints=constraints), device=x.device)
    return beam(model, state, prompt, constraints=constraints, width=case.beams).tokens[:, 0]


def measured(case: Case, ways: dict[str, Callable[[], Tensor]], device: torch.device, rounds: int, exact: bool) -> list[dict]:
    """Return tokens per second of each way; its first answer is compared, and warms it up."""
    tokens = {way: f() for way, f in ways.items()}
    same = {way: (tokens[way] == tokens["transformers"]).float().mean().item() for way in ways}
    if exact and case.beams == 1 and min(same.values()) < 1:
        raise RuntimeError(f"{case.model}, {case.rows} rows: greedy answers differ from those of transformers: {same}")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, f in ways.items():
            times[way].append(seconds(f, device))
    rows, base = [], times["transformers"]
    for way, own in times.items():
        ratios = {"ratio": min(base) / min(own), "median_ratio": statistics.median(base) / statistics.median(own)}
        speed = case.rows * case.new / min(own)
        shape = {"model": case.model, "batch": case.rows, "beams": case.beams, "new_tokens": case.new}
        rows.append(
            {**shape, "by": way, "tokens_per_second": speed, "step_ms": 1e3 * min(own) / case.new, **ratios, "same": same[way]}
        )
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--static", action="store_true", help="their static cache as well, which they compile on a GPU: slow to start"
    )
    parser.add_argument("--only", default="", help="of the cases model/batch/beams, those that begin with this: gpt2/1; or step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    decode_step.add_options(parser)
    args = parser.parse_args()
    if args.only == "step":
        rows = decode_step.benchmark(args)
        if not args.no_save:
            print(decode_step.write(args, rows))
        return
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    cases = [(m, b, k, n) for m, counts in TOKENS[args.device].items() for (b, k), n in counts.items()]
    cases = [case for case in cases if "/".join(map(str, case)).startswith(args.only)]
    rows = []
    progress, kept = Progress(len(cases)), ("", None, None)
    for name, b, k, new in cases:
        if kept[0] != name:
            kept = (name, *both(name, device, dtype))
        _, theirs, ours = kept
        fast = StaticDecoder(ours, room=new + (PROMPT if name == "gpt2" else 1))
        source = torch.randint(5, VOCAB[name], (b, PROMPT), generator=torch.Generator().manual_seed(SEED)).to(device)
        case = Case(name, b, k, new, source)
        ways = {"transformers": partial(theirs_generate, theirs, case), "ready": partial(generated, fast, case)}
        long = args.device == "cpu" and b * k > 32
        if not long:
            ways["model"] = partial(generated, ours, case)
        if args.static:
            ways["transformers, static cache"] = partial(theirs_generate, theirs, case, "static")
        rows += measured(case, ways, device, 1 if long else min(args.rounds, 2) if b > 1 else args.rounds, dtype == torch.float32)
        here = [row for row in rows if row["model"] == name and row["batch"] == b and row["beams"] == k]
        progress.step(
            f"{name} batch {b} beams {k}: " + ", ".join(f"{r['by']} {r['step_ms']:.2f} ms {r['ratio']:.2f} x" for r in here)
        )
    worst = math.inf if not rows else min(row["ratio"] for row in rows if row["by"] == "ready")
    print(f"least ratio of a StaticDecoder: {worst:.2f} x")
    settings = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "prompt": PROMPT, "dtype": args.dtype, "seed": SEED}
    if not args.no_save:
        settings |= {"rounds": args.rounds, "value": "fastest of the rounds; ratio is theirs / ours", "device": args.device}
        print(save("decoding_gpu" if args.device == "cuda" else "decoding", settings, rows))


if __name__ == "__main__":
    main()
