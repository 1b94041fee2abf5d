"""Convert a language model of bytes in Llama's layout: how many bits per byte does each conversion cost, and what does it save?

A LlamaForCausalLM of transformers (6 layers of width 512) is trained on whole papers. Its attention is then replaced by a window
with sinks, a hybrid of that window and linear attention with learned features, and by the latter alone, with 0, 1/4 and 1/2 of
the layers kept: those whose error is largest after alignment. Bits per byte of test: swapped without training, aligned layer by
layer, distilled as a whole. Then speed and memory at 32,768 tokens, and one long answer in constant memory.

LIMIT=400 python benchmarks/hf_convert.py --device cuda                 all of it, into results/hf_convert.json
python benchmarks/hf_convert.py --answers hybrid linear      long answers alone, of untrained weights: results/hf_answers.json
python benchmarks/hf_convert.py --tiny --out FOLDER                     the same code at tiny sizes on generated text, in seconds

It goes on from what an earlier call left in its folder (--folder): the teacher's weights, aligned mechanisms, and rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import regard.hf as hf
from common import RESULTS, save
from regard.arena.papers import split_texts
from regard.bench.machine import made_with, write_record
from regard.mixers.base import nbytes

BYTES = 256
NOT_PRINTED = ("error_before", "error_after", "points", "sentences")
MECHANISM_KEY = ".mechanism."
STARTED = time.monotonic()


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of a run; seconds are shares of LIMIT."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    hidden: int = 1408
    length: int = 2048
    batch: int = 32
    window: int = 256
    sinks: int = 4
    shares: tuple[float, ...] = (0.0, 0.25, 0.5)
    teacher_share: float = 0.25  # of LIMIT, in seconds
    align_share: float = 0.025
    distil_share: float = 0.025
    generate_share: float = 0.02  # each, except for hybrid
    teacher_lr: float = 1e-3
    align_lr: float = 5e-2
    distil_lr: float = 3e-4
    test_windows: int = 192
    long: int = 32768
    most_steps: int = 100_000
    seed: int = 0

    def mechanisms(self) -> dict[str, str]:
        pattern = f"Local({self.window}) | Global(first={self.sinks})"
        return {
            "window + sinks": pattern,
            "hybrid": f"hybrid(pattern={pattern}, far='hedgehog', share=0.1)",
            "linear": "hedgehog",
        }


TINY = Sizes(
    layers=2, width=32, heads=4, hidden=48, length=64, batch=4, window=16, sinks=2, test_windows=4, long=96, most_steps=3
)


def left(limit: float) -> float:
    return limit - (time.monotonic() - STARTED)


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


# Data


class ByteWindows:
    """Draw windows of consecutive bytes, on the device: the batch of a step is a function of the seed and the step."""

    def __init__(self, text: bytes, sizes: Sizes, device: torch.device) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self.sizes, self.device = sizes, device

    def batch(self, step: int, rows: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * self.sizes.seed + step)
        last = len(self.bytes) - self.sizes.length
        first = torch.randint(0, last, (rows or self.sizes.batch, 1), generator=generator).to(self.device)
        return self.bytes[first + torch.arange(self.sizes.length, device=self.device)].long()

    def batches(self, begin: int) -> Iterator[Tensor]:
        while True:
            yield self.batch(begin)
            begin += 1

    def spread(self, rows: int) -> list[Tensor]:
        """Return `rows` windows that are spread evenly over the text, in batches."""
        last = len(self.bytes) - self.sizes.length
        first = torch.linspace(0, last - 1, rows).long().to(self.device)[:, None]
        windows = self.bytes[first + torch.arange(self.sizes.length, device=self.device)].long()
        return list(windows.split(self.sizes.batch))


def read_texts(tiny: bool) -> tuple[bytes, bytes]:
    """Return the bytes of train and test: whole papers, or at tiny sizes some generated lines."""
    if tiny:
        lines = [f"the square of {i} is {i * i}. ".encode() for i in range(1500)]
        return b"".join(lines[:1000]), b"".join(lines[1000:])
    return b"\n\n".join(split_texts("train")), b"\n\n".join(split_texts("test"))


# Quality


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, windows: list[Tensor]) -> float:
    total = count = 0
    model.eval()
    for batch in windows:
        with autocast(batch.device):
            logits = model(batch, use_cache=False).logits[:, :-1]
        total += float(F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
        count += batch[:, 1:].numel()
    return total / count / math.log(2)


def new_model(sizes: Sizes, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(sizes.seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        intermediate_size=sizes.hidden,
        max_position_embeddings=sizes.long,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(device)


def timed_steps(step: Callable[[int], Any], seconds: float, most: int, device: torch.device) -> int:
    """Return how many steps fit into a time, from the time of a few; what they do is done twice, by design of the caller."""
    for warm in range(3):
        step(warm)
    _wait(device)
    begun = time.perf_counter()
    for probe in range(3):
        step(probe)
    _wait(device)
    each = (time.perf_counter() - begun) / 3
    return max(2, min(most, int((seconds - 6 * each) / each)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def train_teacher(model: LlamaForCausalLM, data: ByteWindows, seconds: float) -> dict[str, Any]:
    """Train for about so many seconds: AdamW, warm-up, one cosine. The number of steps comes from the time of the first ones."""
    sizes, device = data.sizes, data.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")

    def step(number: int) -> Tensor:
        ids = data.batch(number)
        with autocast(device):
            logits = model(ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    steps = timed_steps(step, seconds, sizes.most_steps, device)  # with a learning rate of 0: weights stay
    optimizer.state.clear()
    begun = time.perf_counter()
    for number in range(steps):
        rising = min((number + 1) / min(100, steps), 1)
        falling = 0.55 + 0.45 * math.cos(math.pi * number / steps)
        for group in optimizer.param_groups:
            group["lr"] = sizes.teacher_lr * rising * falling
        loss = step(number)
        if number % max(1, steps // 10) == 0:
            say(f"teacher, step {number} of {steps}: {float(loss) / math.log(2):.3f} bits")
    _wait(device)
    return {"steps": steps, "tokens": steps * sizes.batch * sizes.length, "seconds": time.perf_counter() - begun}


# A run: what is there already is not computed again


class Run:
    """Hold the rows and weights of a run in a folder, each written when it is there."""

    def __init__(self, folder: Path, sizes: Sizes, device: torch.device, limit: float) -> None:
        self.folder, self.sizes, self.device, self.limit = folder, sizes, device, limit
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.json"
        self.rows: list[dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else []

    def found(self, **key: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows = [*self.rows, row]
        write_record(self.path, self.rows)
        say(json.dumps({key: value for key, value in row.items() if key not in NOT_PRINTED}))

    def attempt(self, what: str, work: Callable[[], dict[str, Any]], seconds: float, **key: Any) -> None:
        """Add a row if it is not there and its time is left; an error is printed and the run goes on."""
        if self.found(what=what, **key):
            return
        if left(self.limit) < seconds:
            say(f"left out, {left(self.limit):.0f} s are left: {what} {key}")
            return
        try:
            row = work()
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            say(f"failed: {what} {key}: {type(error).__name__}: {str(error)[:300]}")
            return
        self.add({"what": what, **key, **row})


def get_teacher(run: Run, train: ByteWindows, test: list[Tensor]) -> LlamaForCausalLM:
    """Return the trained teacher, its weights rounded to bfloat16, in float32; trained now or by an earlier call."""
    folder = run.folder / "teacher"
    row = run.found(what="teacher")
    if row is not None and folder.is_dir():
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(run.device).eval()
    model = new_model(run.sizes, run.device)
    made = train_teacher(model, train, run.sizes.teacher_share * run.limit)
    half_precision(model).save_pretrained(folder, max_shard_size="14MB")
    model = model.float().eval()
    weights = sum(own.numel() for own in model.parameters())
    run.add({"what": "teacher", "bits": bits_per_byte(model, test), "weights": weights, **made})
    return model


def half_precision(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Round weights to bfloat16, in place. Buffers stay: rounded frequencies would turn far positions by wrong angles."""
    for own in model.parameters():
        own.data = own.data.to(torch.bfloat16)
    return model


def mechanism_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if MECHANISM_KEY in name}


def converted(teacher: LlamaForCausalLM, spec: str, kept: list[int], weights: dict[str, Tensor] | None) -> LlamaForCausalLM:
    """Return a copy of the teacher with other attention, except in the layers that are kept."""
    student = copy.deepcopy(teacher)
    hf.convert(student, spec, keep=kept)
    if weights:
        own = student.state_dict()
        student.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=False)
    return student


def align_all(run: Run, teacher: LlamaForCausalLM, name: str, train: ByteWindows) -> None:
    """Align a mechanism in all layers at once; keep its weights, the errors, and which layers to keep."""
    sizes, file = run.sizes, run.folder / f"aligned_{name.split()[0]}.pt"

    def work() -> dict[str, Any]:
        student = converted(teacher, sizes.mechanisms()[name], [], None)
        amp = torch.bfloat16 if run.device.type == "cuda" else None
        trained = next(iter(mechanism_weights(student)), None) is not None
        steps = 0
        if trained:
            probe = copy.deepcopy(student)
            options = {"lr": sizes.align_lr, "autocast": amp}
            hf.align(probe, train.batches(5_000_000), steps=2, **options)
            begun = time.perf_counter()
            hf.align(probe, train.batches(5_000_000), steps=4, **options)
            _wait(run.device)
            each = (time.perf_counter() - begun) / 5
            steps = max(2, min(sizes.most_steps, int(sizes.align_share * run.limit / each)))
        begun = time.perf_counter()
        report = hf.align(student, train.batches(6_000_000), steps=steps, lr=sizes.align_lr, autocast=amp)
        _wait(run.device)
        torch.save(mechanism_weights(student), file)
        kept = {str(share): report.keep(share) for share in sizes.shares}
        say(str(report))
        return {
            "steps": report.steps,
            "tokens": report.tokens,
            "seconds": time.perf_counter() - begun,
            "error_before": report.before.errors.tolist(),
            "error_after": report.after.errors.tolist(),
            "layers": {share: choice.layers for share, choice in kept.items()},
            "sentences": {share: choice.sentence for share, choice in kept.items()},
        }

    run.attempt("align", work, 2 * sizes.align_share * run.limit, mechanism=name)


def quality(run: Run, teacher: LlamaForCausalLM, name: str, share: float, train: ByteWindows, test: list[Tensor]) -> None:
    """Measure bits per byte of a mechanism with a share of the layers kept: swapped, aligned, distilled."""
    sizes, spec = run.sizes, run.sizes.mechanisms()[name]
    aligned_row = run.found(what="align", mechanism=name)
    if aligned_row is None:
        return
    kept = aligned_row["layers"][str(share)]
    weights = torch.load(run.folder / f"aligned_{name.split()[0]}.pt", map_location=run.device)

    def work() -> dict[str, Any]:
        swapped = bits_per_byte(converted(teacher, spec, kept, None), test)
        student = converted(teacher, spec, kept, weights)
        aligned = bits_per_byte(student, test) if weights else None
        say(f"{name}, kept {kept}: swapped {swapped:.3f}, aligned {aligned}")
        amp = torch.bfloat16 if run.device.type == "cuda" else None
        probe = copy.deepcopy(student)
        hf.distil(probe, teacher, train.batches(7_000_000), steps=2, autocast=amp)
        begun = time.perf_counter()
        hf.distil(probe, teacher, train.batches(7_000_000), steps=3, autocast=amp)
        each = (time.perf_counter() - begun) / 3
        del probe
        steps = max(2, min(sizes.most_steps, int(sizes.distil_share * run.limit / each)))
        begun = time.perf_counter()
        made = hf.distil(student, teacher, train.batches(8_000_000), steps=steps, lr=sizes.distil_lr, autocast=amp)
        spent = time.perf_counter() - begun
        distilled = bits_per_byte(student, test)
        if share == 0:  # for the long answers
            torch.save(student.state_dict(), student_file(run, name, share))
        return {
            **{"kept": kept, "swapped": swapped, "aligned": aligned, "distilled": distilled},
            **{"steps": made.steps, "tokens": made.tokens, "seconds": spent},
        }

    run.attempt("quality", work, 1.5 * sizes.distil_share * run.limit, mechanism=name, share=share)


def student_file(run: Run, name: str, share: float) -> Path:
    return run.folder / f"student_{name.split()[0]}_{round(100 * share)}.pt"


# Speed, memory and long answers


def long_pass(run: Run, model: LlamaForCausalLM, **key: Any) -> None:
    """Measure a pass over `long` tokens without gradients, and a training step: tokens a second, bytes at the peak."""
    sizes, device = run.sizes, run.device

    def forward(ids: Tensor) -> None:
        with torch.no_grad(), autocast(device):
            model(ids, use_cache=False, logits_to_keep=1)

    def train(ids: Tensor) -> None:
        with autocast(device):
            loss = model(ids, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    def work() -> dict[str, Any]:
        ids = torch.randint(0, BYTES, (1, sizes.long), device=device)
        found: dict[str, Any] = {}
        for name, call in (("forward", forward), ("train", train)):
            for _ in range(2):
                call(ids)
            _wait(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            for _ in range(3):
                call(ids)
            _wait(device)
            seconds = (time.perf_counter() - begun) / 3
            found[f"{name}_tokens_per_second"] = sizes.long / seconds
            found[f"{name}_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        return found

    run.attempt("speed", work, 5.0, **key)


class Watch(StoppingCriteria):
    """Record seconds, bytes of the cache and of the device at some lengths of an answer; stop at the end of a time."""

    def __init__(self, cache: Any, every: int, deadline: float) -> None:
        self.cache, self.every, self.deadline = cache, every, deadline
        self.points: list[dict[str, Any]] = []
        self.clock = time.perf_counter if torch.cuda.is_available() else time.process_time  # of one thread: see `main`
        self.begun, self.count = self.clock(), 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002 - the arguments of transformers
        self.count += 1
        late = time.monotonic() > self.deadline
        if self.count % self.every == 0 or late:
            now = self.clock()
            device = torch.cuda.memory_allocated() if input_ids.is_cuda else None
            size = cache_bytes(self.cache)
            point = {"t": self.count, "ms": 1e3 * (now - self.begun) / self.every, "cache_bytes": size, "device_bytes": device}
            if not late:
                self.points.append(point)
            self.begun = now
        return torch.full((len(input_ids),), late, dtype=torch.bool, device=input_ids.device)


def cache_bytes(cache: Any) -> int:
    """Count the bytes of a cache: the states of ours, or keys and values."""
    own = getattr(cache, "nbytes", None)
    if own is None:
        own = sum(nbytes(tuple(x for x in (layer.keys, layer.values) if x is not None)) for layer in cache.layers)
    return own


def long_answer(run: Run, model: LlamaForCausalLM, seconds: float, **key: Any) -> None:
    """Generate `long` tokens one after the other, or as many as the time allows, and record speed and memory by length.

    An answer that an earlier call had too little time for is made again.
    """
    earlier = run.found(what="generate", **key)
    if earlier and earlier["generated"] < run.sizes.long and seconds > 1.2 * earlier["seconds"]:
        run.rows = [row for row in run.rows if row is not earlier]

    def work() -> dict[str, Any]:
        half = half_precision(copy.deepcopy(model)) if run.device.type == "cuda" else model
        softmax = key["mechanism"] == "softmax"
        cache = DynamicCache() if softmax else hf.memory(half)
        watch = Watch(cache, max(1, run.sizes.long // 32), min(time.monotonic() + seconds, STARTED + run.limit))
        prompt = torch.full((1, 1), 32, device=run.device)
        options = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": run.sizes.long}
        begun = time.perf_counter()
        with torch.no_grad():
            half.generate(prompt, past_key_values=cache, stopping_criteria=StoppingCriteriaList([watch]), **options)
        return {"generated": watch.count, "seconds": time.perf_counter() - begun, "points": watch.points}

    run.attempt("generate", work, 10.0, **key)


def untrained_answers(run: Run, names: list[str]) -> None:
    """Generate long answers by mechanisms with random weights: speed and memory are the same, and no data is needed."""
    for name in names:
        model = converted(new_model(run.sizes, run.device).eval(), run.sizes.mechanisms()[name], [], None)
        long_answer(run, model, math.inf, mechanism=name, share=0.0)


def measure_long(run: Run, teacher: LlamaForCausalLM) -> None:
    """Measure speed and memory of the teacher and of every conversion, then long answers.

    Attention of cuDNN plans every new length for some milliseconds, six times a token: it is off while softmax answers.
    """
    sizes = run.sizes
    long_pass(run, teacher, mechanism="softmax", share=1.0)
    for name, spec in sizes.mechanisms().items():
        aligned = run.found(what="align", mechanism=name)
        for share in sizes.shares if aligned else ():
            student = converted(teacher, spec, aligned["layers"][str(share)], None)
            long_pass(run, student, mechanism=name, share=share)
            del student
    if run.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    others = ("softmax", "linear", "window + sinks")
    for name in (*others, "hybrid"):  # which gets the rest of the time
        model = teacher
        if name != "softmax":
            model = converted(teacher, sizes.mechanisms()[name], [], None)
            if student_file(run, name, 0.0).exists():
                model.load_state_dict(torch.load(student_file(run, name, 0.0), map_location=run.device))
        rest = left(run.limit) - 5
        allowed = min(sizes.generate_share * run.limit, rest) if name in others else rest
        long_answer(run, model, allowed, mechanism=name, share=1.0 if name == "softmax" else 0.0)


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/hf_convert"))
    parser.add_argument("--out", type=Path, help="write the result here instead of into results/hf_convert.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", nargs="+", choices=list(Sizes().mechanisms()), help="long answers of these alone, untrained")
    options = parser.parse_args(arguments)
    limit = math.inf if options.answers else float(os.environ.get("LIMIT", "400"))
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    sizes = replace(TINY if options.tiny else Sizes(), seed=options.seed)
    run = Run(options.folder, sizes, device, limit)
    if options.answers:
        if device.type == "cpu":
            torch.set_num_threads(1)  # whose seconds are those of the processor, whatever else the machine does
        untrained_answers(run, options.answers)
        named = {name: sizes.mechanisms()[name] for name in options.answers}
        return written("hf_answers", options.out, {**asdict(sizes), "mechanisms": named, "tiny": options.tiny}, run.rows)
    train_text, test_text = read_texts(options.tiny)
    say(f"{len(train_text):,} bytes of train, {len(test_text):,} of test")
    train = ByteWindows(train_text, sizes, device)
    test = ByteWindows(test_text, sizes, device).spread(sizes.test_windows)
    teacher = get_teacher(run, train, test)
    for name in sizes.mechanisms():
        align_all(run, teacher, name, train)
    for share in sizes.shares:
        for name in sizes.mechanisms():
            quality(run, teacher, name, share, train, test)
    measure_long(run, teacher)
    settings = {**asdict(sizes), "limit": limit, "mechanisms": sizes.mechanisms(), "tiny": options.tiny}
    return written("hf_convert", options.out, settings, run.rows)


def written(name: str, folder: Path | None, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write a result into a folder, or into results/."""
    if folder is None:
        return save(name, settings, rows)
    path = folder / f"{name}.json"
    write_record(path, {"benchmark": name, "settings": settings, "made_with": made_with(), "rows": rows})
    return path


if __name__ == "__main__":
    print(main(), RESULTS)
