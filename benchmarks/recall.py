"""Associative recall: pairs of a key and a value, then keys alone. What was the value? (Arora et al. 2023, arXiv:2312.04927)

The same two-layer model for every mechanism of the catalogue, causal where a mechanism can be, else over all tokens: the answers
are not in the input, so both are the same task. A run ends when 99 % of held-out answers are right, or out of steps.

python benchmarks/recall.py --device cuda --jobs 8                    all of it, into results/recall.json
python benchmarks/recall.py --spec softmax --length 32 --steps 300    one mechanism, as a line of JSON
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import Progress, alone, save
from regard import CATALOGUE, Dims, Places, Spec
from regard.blocks import Stack
from regard.positions import Sinusoidal

KEYS = VALUES = 32
WIDTH, HEADS, DEPTH, FFN = 64, 2, 2, 128
WARMUP, EVERY, HELD_OUT, SOLVED, FAILED = 50, 50, 512, 0.99, 0.9

# Options at a length of 64: windows that end before the pairs begin, or reach them by a way that the mechanism is known for.
SPECS: dict[str, tuple[str, ...]] = {
    "additive": ("additive(hidden=32)",),
    "relu": ("relu(norm='count')", "relu(norm='sum')"),
    "sparse": ("Local(8)", "Local(8) | Global(first=16)", "Local(8) | Stride(8)"),
    "longformer": ("longformer(window=8, first=16)",),
    "bigbird": ("bigbird(block=8, globals=1, random=2)", "bigbird(block=8, globals=1, random=0)"),
    "sparse_transformer": ("sparse_transformer(stride=8)",),
    "rfa": ("rfa(features=64)", "rfa(features=64, gated=True)"),
    "performer": ("performer(features=64)",),
    "gla": ("gla",),
    "delta": ("delta", "delta(gated=True)"),
    "hybrid": ("hybrid(pattern=Local(8))",),
    "sinks": ("sinks(window=8, first=2)", "sinks(window=8, first=16)"),
    "gmlp": ("gmlp(expand=2)", "gmlp(expand=2, tiny=32)"),
    "mlp_mixer": ("mlp_mixer(hidden=64)",),
    "conv": ("conv(kernel=5)",),
    "rnn": ("rnn", "rnn(cell='lstm')"),
    "window_fc": ("window_fc(window=8)",),
    "gat": ("gat(pattern=Local(64))", "gat(pattern=Local(64), v2=True)"),
    "reformer": ("reformer(rounds=4, buckets=8, chunk=16)",),
    "routing": ("routing(clusters=4, window=24)",),
    "sinkhorn": ("sinkhorn(block=8)", "sinkhorn(block=8, form='sortcut')"),
    "synthesizer": ("synthesizer", "synthesizer(form='random')", "synthesizer(mix='learned')"),
    "linformer": ("linformer(rank=16)",),
    "compressed": ("compressed(rate=2)", "compressed(rate=4)"),
    "nystrom": ("nystrom(landmarks=16)",),
}
LEFT_OUT = {"pooled_queries": "it has fewer answers than there are questions"}

OUTSIDE = "the answer lies outside its window"
BLIND = "what meets what does not depend on the tokens"
RELAY = "most answers are two steps away, and the token between does not know the question"
SMALL = "one vector has to hold all pairs"
# Why a mechanism should fail. Printed only beside a measurement that agrees.
WHY = {
    "identity": "tokens do not meet",
    "sparse(pattern=Local(8))": OUTSIDE,
    "sinks(window=8, first=2)": OUTSIDE,
    "bigbird(block=8, globals=1, random=0)": OUTSIDE,
    "conv(kernel=5)": OUTSIDE,
    "window_fc(window=8)": OUTSIDE,
    "sparse_transformer(stride=8)": RELAY,
    "rnn": SMALL,
    "rnn(cell='lstm')": SMALL,
    "fnet": BLIND,
    "gmlp(expand=2)": BLIND,
    "mlp_mixer(hidden=64)": BLIND,
    "synthesizer(form='random')": BLIND,
    "synthesizer": "a token chooses places, not tokens: it does not know what stands there",
    "gat(pattern=Local(64))": "all queries rank the keys alike: a sum of two scores cannot compare",
}


def specs() -> list[str]:
    """The catalogue, with the options above where there are any, else those of a row's first example."""
    texts = []
    for name, row in CATALOGUE.items():
        if name not in LEFT_OUT:
            texts += [str(Spec.of(x)) for x in SPECS.get(name, (str(Spec(name, **row.examples[0].options)),))]
    return texts


def form_of(spec: Spec, length: int) -> bool:
    """Causal, where it can be."""
    try:
        spec.build(Dims(WIDTH, HEADS, causal=True, max_len=length))
    except ValueError:
        return False
    return True


def draw(batch: int, pairs: int, length: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (batch length): key value key value ... key key key, no key told twice; and the values (batch questions)."""
    device = dice.device
    keys = torch.rand(batch, KEYS, generator=dice, device=device).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (batch, pairs), generator=dice, device=device)
    asked = torch.randint(pairs, (batch, length - 2 * pairs), generator=dice, device=device)
    told = torch.stack([keys, KEYS + values], -1).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], 1), values.gather(1, asked)


class Model(nn.Module):
    """Tokens and sinusoidal positions, two blocks, and a score for each value behind every question.

    Every token is also told the one before it, as a short convolution in front of a recurrence would. So a value knows its key,
    and what is asked of the mechanism is to look things up, not to pair neighbours.
    """

    def __init__(self, spec: Spec, causal: bool, length: int) -> None:
        super().__init__()
        self.embed, self.before = (nn.Embedding(KEYS + VALUES, WIDTH) for _ in range(2))
        self.positions = Sinusoidal(Dims(WIDTH, HEADS))
        self.body = Stack.of(spec, width=WIDTH, heads=HEADS, depth=DEPTH, causal=causal, ffn=FFN, max_len=length)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, tokens: Tensor, questions: int) -> Tensor:
        x = self.embed(tokens) + F.pad(self.before(tokens[:, :-1]), (0, 0, 1, 0))
        x = self.positions.add(x, Places.of(tokens))
        return self.head(self.body(x)[:, -questions:])


def train(spec: Spec, causal: bool, lr: float, seed: int, args: argparse.Namespace, end: float) -> dict:
    device = torch.device(args.device)
    torch.manual_seed(seed)
    model = Model(spec, causal, args.length).to(device)
    dice, apart = (torch.Generator(device).manual_seed(s) for s in (seed, 1_000_000 + seed))
    held_out = draw(HELD_OUT, args.pairs, args.length, apart)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
    accuracy, step, stopped = 0.0, 0, "steps"
    for step in range(1, args.steps + 1):
        rate = lr * min(1, step / WARMUP) * (1 + math.cos(math.pi * step / args.steps)) / 2
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens, answers = draw(args.batch, args.pairs, args.length, dice)
        loss = F.cross_entropy(model(tokens, answers.shape[1]).flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % EVERY == 0 or step == args.steps:
            accuracy = right(model, *held_out)
            if args.spec:
                print(f"{spec} lr {lr:g} seed {seed} step {step}: accuracy {accuracy:.3f}", file=sys.stderr, flush=True)
            if accuracy > SOLVED:
                stopped = "solved"
                break
            if time.perf_counter() > end:
                stopped = "time"
                break
    parameters = sum(p.numel() for p in model.parameters())
    return {"lr": lr, "seed": seed, "accuracy": accuracy, "steps": step, "stopped": stopped, "parameters": parameters}


@torch.no_grad()
def right(model: Model, tokens: Tensor, answers: Tensor) -> float:
    model.eval()
    guess = torch.cat([model(part, answers.shape[1]).argmax(-1) for part in tokens.split(128)])
    model.train()
    return (guess == answers).float().mean().item()


def measure(text: str, args: argparse.Namespace) -> dict:
    """One mechanism: learning rates and seeds in turn, until one of them solves it."""
    torch.set_num_threads(args.threads)
    spec, start = Spec.of(text), time.perf_counter()
    causal, runs = form_of(spec, args.length), []
    for seed in args.seeds:
        for lr in args.lrs:
            if not runs or runs[-1]["stopped"] == "steps":
                runs.append(train(spec, causal, lr, seed, args, start + args.seconds))
    best = max(runs, key=lambda run: run["accuracy"])
    return {
        "spec": str(spec),
        "form": "causal" if causal else "bidirectional",
        **best,
        "steps_to_99": best["steps"] if best["stopped"] == "solved" else None,
        "chance": 1 / VALUES,
        "chance_among_the_told": 1 / args.pairs,
        "seconds": time.perf_counter() - start,
        "runs": runs,
        "why": why(str(spec), best["accuracy"], best["stopped"]),
    }


def why(spec: str, accuracy: float, stopped: str) -> str:
    """The reason, where measurement and reason agree that there is one; nothing where they agree that there is none."""
    failed, reason = accuracy < FAILED, WHY.get(spec)
    if failed and reason is None and stopped == "time":
        return "ran out of time"
    return "unexplained" if failed != (reason is not None) else reason or ""


def everything(args: argparse.Namespace) -> None:
    texts = specs()
    shared = ["device", "steps", "seconds", "length", "pairs", "batch", "threads"]
    flags = [x for name in shared for x in (f"--{name}", str(getattr(args, name)))]
    flags += ["--lrs", *map(str, args.lrs), "--seeds", *map(str, args.seeds)]
    rows, progress = {}, Progress(len(texts))
    with ThreadPoolExecutor(args.jobs) as pool:  # each thread waits for a process
        work = {pool.submit(alone, __file__, "--spec", text, *flags): text for text in texts}
        for done in as_completed(work):
            text = work[done]
            try:
                rows[text] = done.result()
                said = f"{rows[text]['form']:13s} {rows[text]['accuracy']:.3f} {rows[text]['why']}"
            except RuntimeError as error:
                rows[text] = {"spec": text, "error": str(error).strip().splitlines()[-1]}
                said = rows[text]["error"]
            progress.step(f"{text:52s} {said}")
    settings = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "ffn": FFN, "keys": KEYS, "values": VALUES, "dtype": "float32"}
    settings |= {name: getattr(args, name) for name in (*shared, "lrs", "seeds", "jobs")} | {"held_out": HELD_OUT}
    print(save("recall", settings, [rows[text] for text in texts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", help="only this mechanism, as a line of JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--steps", type=int, default=1500, help="at most, for each learning rate and seed")
    parser.add_argument("--seconds", type=float, default=600, help="at most, for each mechanism")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-3, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    if not 1 <= args.pairs <= KEYS or args.length <= 2 * args.pairs:
        parser.error(f"pairs must be 1 to {KEYS}, and the length more than twice as many: something has to be asked")
    if args.spec:
        print(json.dumps(measure(args.spec, args)))
    else:
        everything(args)


if __name__ == "__main__":
    main()
