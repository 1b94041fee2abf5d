"""Do the laws bite? Break the library in one place at a time, the way real libraries have been broken, and see who notices.

make mutants                      all of them, into results/mutants.json; exits 1 if one survives
python tests/mutants.py WORD      those whose name contains the word

Those of mixers and kernels stand here and face the laws; those of the other files name their tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutants_arena import ARENA
from mutants_bench import BENCH
from mutants_compare import COMPARE
from mutants_compiled import COMPILED
from mutants_launches import LAUNCHES
from mutants_laws import CHECKED
from mutants_models import MODELS
from mutants_report import REPORT
from mutants_training import TRAINING
from regard.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "results" / "mutants.json"
SUITE = (
    "laws limits patterns backends precision linear_attention gated random_features errors positions blocks reversible "
    "cluster cluster_statistics low_rank sinkhorn synthesizer attention_free baselines graph_attention edge_list "
    "equivalents attend graph_layer padding states wrong_calls"
)
FEW = "softmax or linear or sparse or sinkhorn"  # rows of different families: what breaks all of them breaks these
WORDS = {  # by a part of the path: what the names of the tests contain that run first, before the whole suite
    "ops/tile": "sparse or longformer or backend or bigbird",
    "patterns/": "pattern or sparse or longformer or bigbird or backend",
    "ops/linear": "linear or retention or gla or performer",
    "ops/delta": "delta",
    "ops/bucket": "reformer or routing",
    "ops/pair": "additive or relu or synthesizer",
    "ops/balance": "sinkhorn",
    "ops/mixed_blocks": "sinkhorn",
    "ops/edge": "gat or edge or graph",
    "ops/dropout_hash": "dropout or drops",
    "positions/": "position or alibi or rotary or relative",
    "blocks/": "block or stack or reversible",
}
R = "src/regard/"

MUTANTS: dict[str, tuple[str, str, str]] = {
    # masks accepted and ignored
    "softmax drops the padding mask": (
        R + "mixers/softmax.py",
        "valid=mask, dropout=drop",
        "valid=None, dropout=drop",
    ),
    "tiles drop the padding mask": (R + "ops/tile/torch.py", "        if x.gaps is not None:\n", "        if False:\n"),
    "a decoding step drops the padding mask": (
        R + "mixers/pattern_attention.py",
        "        if there.valid is not None:\n",
        "        if False:\n",
    ),
    "a layer trusts what padding holds": (R + "mixers/attention.py", "x = mask_padding(x, real)", "x = x"),
    "a context is trusted at its padding": (
        R + "mixers/attention.py",
        "            context = mask_padding(context, valid)\n            y = ",
        "            y = ",
    ),
    "a prompt is trusted at its padding": (R + "mixers/attention.py", "        x = mask_padding(x, valid)\n", ""),
    "a stack trusts what padding holds": (
        R + "blocks/stack.py",
        "        return mask_padding(x, valid), Places.of(x, valid, t, start)\n",
        "        return x, Places.of(x, valid, t, start)\n",
    ),
    "a state of another batch is taken": (R + "mixers/state.py", "    if held != given:\n", "    if False:\n"),
    "a state of another layer is taken": (R + "mixers/base.py", "state.maker.layer != own.layer", "False"),
    "a state of another type is taken": (
        R + "mixers/base.py",
        "        if state.maker == own:\n",
        "        if state.maker is not None and state.maker.layer == own.layer:\n",
    ),
    "a recurrent network reads beyond its state": (
        R + "ops/rnn.py",
        "    if any(h.shape[1] != x.shape[0] for h in state):",
        "    if False:",
    ),
    "rows that are not there are selected": (R + "checks.py", "    if low < 0 or high >= batch:\n", "    if False:\n"),
    "queries of attend begin where the keys do": (
        R + "mixers/attend.py",
        "Places.of_heads(q, query_valid, first)",
        "Places.of_heads(q, query_valid)",
    ),
    "an ambiguous attend guesses": (R + "mixers/attend.py", "(causal or core.positional):", "causal:"),
    "padded keys before the first query count": (
        R + "mixers/attend.py",
        "valid[:, :first].sum(1)",
        "first + 0 * valid[:, :first].sum(1)",
    ),
    "the last graph layer adds its heads": (R + "mixers/graph_layer.py", "else y.mean(1)", "else y.sum(1)"),
    "padding takes a position": (
        R + "mixers/places.py",
        "    return count.cumsum(1) - count\n",
        "    return count.cumsum(1) * 0 + torch.arange(count.shape[1], device=count.device)\n",
    ),
    "outputs at padding are not silenced": (
        R + "mixers/attention.py",
        "return mask_padding(y, pooled_valid(real, self.rate))",
        "return y",
    ),
    "padding counts in the normaliser of a kernel": (
        R + "ops/linear/linear_op.py",
        "        k = k.masked_fill(~call.valid[:, None, :, None], 0)\n",
        "        pass\n",
    ),
    "relu counts padding among the visible keys": (
        R + "ops/pair/torch.py",
        "seen.sum(-1, keepdim=True).to(s.dtype)",
        "torch.full_like(seen.sum(-1, keepdim=True), seen.shape[-1]).to(s.dtype)",
    ),
    # causal asked, something else done
    "tiles ignore causal": (R + "ops/tile/tile_op.py", "p & Causal() if causal else p", "p"),
    "a decoding step ignores causal": (
        R + "mixers/pattern_attention.py",
        "            seen = seen & (i >= j)\n",
        "            pass\n",
    ),
    "strips ignore causal": (
        R + "ops/pair/torch.py",
        "    if not call.causal:\n        return seen\n",
        "    if True:\n        return seen\n",
    ),
    "a kernel scan sees one token ahead": (R + "ops/linear/torch.py", ".triu(1)", ".triu(2)"),
    "a kernel scan forgets the newest token": (R + "ops/linear/torch.py", ".triu(1)", ".triu(0)"),
    "a running maximum looks ahead": (
        R + "mixers/exp_features.py",
        "        top = cumulative_max(tops, memory.top)\n",
        "        top = torch.maximum(tops.amax(2, keepdim=True), memory.top.unsqueeze(2)).expand_as(tops)\n",
    ),
    "claims are not checked": (R + "mixers/dims.py", "    if asked._value_ & ~can._value_:", "    if False:"),
    # windows that mean something else
    "Local is off by one": (
        R + "patterns/relative.py",
        "return self.size - 1, self.size - 1, 1",
        "return self.size, self.size, 1",
    ),
    "Truncated swaps back and ahead": (
        R + "patterns/relative.py",
        "return self.back, self.ahead, 1",
        "return self.ahead, self.back, 1",
    ),
    "Dilated loses its step": (R + "patterns/relative.py", "return reach, reach, self.step", "return reach, reach, 1"),
    "Global is seen but does not see": (
        R + "patterns/fixed.py",
        "for half in (Rows, Columns))",
        "for half in (Columns,))",
    ),
    "the last tokens are one too few": (
        R + "patterns/fixed.py",
        "return max(self.length - self.last, 0)",
        "return max(self.length - self.last + 1, 0)",
    ),
    "a promised future is dropped": (
        R + "patterns/relative.py",
        "return self if self.ahead else None",
        "return None",
    ),
    "any part of an | takes the future from all": (
        R + "patterns/algebra.py",
        "return all(p.backward for p in self.parts)",
        "return any(p.backward for p in self.parts)",
    ),
    "a size is not bounded": (R + "checks.py", "    if value > most:\n", "    if False:\n"),
    "a block for ten tokens takes the room of a million": (
        R + "patterns/fixed.py",
        "size = max(min(self.size, end), 1)",
        "size = self.size",
    ),
    "a vmapped index is looked at": (
        R + "patterns/algebra.py",
        "    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(x):\n",
        "    while False:\n",
    ),
    "cells forget the step of a band": (
        R + "patterns/density.py",
        "steps = (high - i).div(band.step,",
        "steps = (high - i).div(1,",
    ),
    "alibi's further heads repeat the first ones": (R + "positions/bias.py", "* (-4 / power)", "* (-8 / power)"),
    "the iteration of nystrom loses a step": (
        R + "mixers/landmarks.py",
        "for _ in range(iterations):",
        "for _ in range(iterations - 1):",
    ),
    "And takes the longer reach": (
        R + "patterns/relative.py",
        "return min((x for x in bounds if x is not None), default=None)",
        "return max((x for x in bounds if x is not None), default=None)",
    ),
    # sparse that is dense, or counts twice
    "a pair in two parts counts twice": (
        R + "patterns/condition.py",
        "            found = found & ~_all_hold(atoms, i, j)\n",
        "            pass\n",
    ),
    "tiles cover every key": (
        R + "patterns/lowering.py",
        "        high = top // r\n",
        "        low, high = low * 0, torch.full((many,), count - 1)\n",
    ),
    "an alternative inside another is kept in its place": (
        R + "patterns/plan.py",
        "        if not any(_inside(atoms, other) for other in kept):\n",
        "        if not any(_inside(other, atoms) for other in kept):\n",
    ),
    "the heads of PerHead are shifted": (
        R + "patterns/algebra.py",
        "return self.parts[h * len(self.parts) // heads]",
        "return self.parts[(h + 1) % heads * len(self.parts) // heads]",
    ),
    "merging forgets the smaller part": (R + "ops/tile/torch.py", ".add_(out * (lse - both).exp()[..., None])", ""),
    # backward passes
    "the gradient of keys skips the last block of a window": (
        R + "ops/tile/torch.py",
        "for x in range(batch.slides, batch.slides + p):",
        "for x in range(batch.slides, batch.slides + max(1, p - 1)):",
    ),
    "the softmax backward forgets its row term": (
        R + "ops/tile/torch.py",
        "            ds.sub_(own[..., :1] * share).mul_(weights)\n",
        "            ds.mul_(weights)\n",
    ),
    "dropout differs between forward and backward": (
        R + "ops/tile/torch.py",
        "kept = None if x.dropout_keys is None else self._kept(weights, batch, x.dropout_keys)",
        "kept = None if x.dropout_keys is None else self._kept(weights, batch, [y + 1 for y in x.dropout_keys])",
    ),
    "all heads drop the same pairs": (R + "ops/dropout_hash.py", "return every[:, chosen]", "return every[:, chosen] * 0"),
    "dropout is not rescaled": (
        R + "ops/tile/torch.py",
        "            out = out * (1 / (1 - self.call.dropout))\n",
        "            pass\n",
    ),
    "a tile takes the whole row for its own": (
        R + "ops/tile/torch.py",
        "            share = (here - own[..., 1]).exp()[..., None]\n",
        "            share = torch.ones_like(here)[..., None]\n",
    ),
    "dropout counts positions inside a tile": (
        R + "ops/tile/torch.py",
        "seed, (i, j) = self.call.seed, part.positions(self.device)",
        "seed, (i, j) = self.call.seed, [x * 0 + torch.arange(x.shape[1]) for x in part.positions(self.device)]",
    ),
    "query heads of a group get the keys of other groups": (
        R + "ops/tile/head_pieces.py",
        "by_key.setdefault(head // share, [])",
        "by_key.setdefault(head % (len(heads) // share or 1), [])",
    ),
    "a key head in two pieces gets the gradient of one": (
        R + "ops/tile/torch.py",
        "total[:, heads] + grad if shared else grad",
        "grad",
    ),
    "a tile without a mask is called full": (
        R + "patterns/tiles.py",
        ".unflatten(-1, (p, self.keys.size)).all(-1).all(1)",
        ".unflatten(-1, (p, self.keys.size)).any(-1).all(1)",
    ),
    "a kernel reads the wrong end of a band": (
        R + "patterns/condition.py",
        "(UNBOUNDED if back is None else back, UNBOUNDED if ahead is None else ahead, step)",
        "(UNBOUNDED if ahead is None else ahead, UNBOUNDED if back is None else back, step)",
    ),
    "a request for a backend is ignored": (
        R + "ops/tile/tile_op.py",
        'chosen = choose_backend("tile", backend, call, plans)\n    prepare',
        'chosen = choose_backend("tile", AUTO, call, plans)\n    prepare',
    ),
    # memories
    "a key is forgotten one step too early": (
        R + "patterns/relative.py",
        "return j >= now - self.back",
        "return j > now - self.back",
    ),
    "special tokens are forgotten": (
        R + "patterns/fixed.py",
        "return kept & torch.ones_like(now, dtype=torch.bool)",
        "return kept & torch.zeros_like(now, dtype=torch.bool)",
    ),
    "nothing is ever forgotten": (
        R + "mixers/attention.py",
        "memory=self.core.forget(memory, state.t)",
        "memory=memory",
    ),
    "an older state is overwritten": (R + "mixers/kv_cache.py", " or self.newest.used != self.size", ""),
    "positions start anew with every chunk": (
        R + "mixers/attention.py",
        "self.extend_at(state, x, Places.of(x, valid, state.t, state.start))",
        "self.extend_at(state, x, Places.of(x, valid))",
    ),
    "padded prompts all end at the longest": (
        R + "mixers/base.py",
        "t=places.after(state.t), start=start",
        "t=state.t + places.at.shape[1], start=start",
    ),
    "a state is never reordered": (
        R + "mixers/state.py",
        "        return value.index_select(0, rows)\n",
        "        return value[: len(rows)]\n",
    ),
    # heads, numbers
    "grouped heads are dealt out in turn": (
        R + "mixers/pattern_attention.py",
        "return k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)",
        "return k.repeat(1, share, 1, 1), v.repeat(1, share, 1, 1)",
    ),
    "a row that sees nothing takes the mean": (
        R + "ops/tile/torch.py",
        "            out.masked_fill_(empty[..., None], 0)\n",
        "            pass\n",
    ),
    "sums are kept in half precision": (
        R + "mixers/feature_math.py",
        "    return x.to(torch.promote_types(x.dtype, torch.float32))\n",
        "    return x\n",
    ),
    "scores without their scale": (R + "mixers/softmax.py", "        return d**-0.5\n", "        return 1.0\n"),
    "random features are drawn anew in every pass": (
        R + "mixers/exp_features.py",
        "        return exponents(x, self._rows(), self._most(x))\n",
        "        self.redraw(int(torch.randint(1000, ())))\n        return exponents(x, self._rows(), self._most(x))\n",
    ),
    "long queries and keys keep their length": (
        R + "mixers/exp_features.py",
        "return exponents(x, self._rows(), self._most(x))",
        "return exponents(x, self._rows(), None)",
    ),
    "a sum of waves may be as small as it likes": (
        R + "mixers/linear_attention.py",
        "math.exp(-2 * min(scale, 1))",
        "math.exp(-2 * scale)",
    ),
    "what a sum of waves lacks is given to nobody": (
        R + "mixers/linear_attention.py",
        "torch.addcmul(upcast(out), safe_ratio(lack, mass), values)",
        "upcast(out)",
    ),
    "a poor estimate is passed over": (
        R + "mixers/estimation.py",
        "        if error > max(",
        "        if False and error > max(",
    ),
    "random features are not orthogonal": (
        R + "mixers/feature_math.py",
        "    directions = basis.mT.flatten(0, 1)[:rows]",
        "    directions = drawn[:rows] / drawn[:rows].norm(dim=-1, keepdim=True)",
    ),
    # clusters, sorted blocks and summaries that look ahead, or count what is not there
    "causal reformer cuts the sorted order into chunks": (
        R + "ops/bucket/torch.py",
        "        stretch = newest_per_bucket if call.causal else chunk_stretch\n",
        "        stretch = chunk_stretch\n",
    ),
    "a pair counts in every round that holds it": (
        R + "ops/bucket/torch.py",
        "        hidden -= _outside(at[:, r - 1, None], middle[:, r], half[:, r] + 1).clamp_max_(0)\n",
        "        pass\n",
    ),
    "routing learns from padding": (
        R + "mixers/cluster.py",
        "near = near * valid[:, None, :, None]",
        "pass",
    ),
    "routing learns in evaluation": (
        R + "mixers/cluster.py",
        "        if self.training:\n            near_q, near_k",
        "        if True:\n            near_q, near_k",
    ),
    "a block is sorted by all of its keys": (
        R + "mixers/sinkhorn.py",
        "            rows = unit_features(before + cut.k[:, :, :, 0], silu=False, fused=sums.is_cuda)\n",
        "            rows = unit_features(before + sums, silu=False, fused=sums.is_cuda)\n",
    ),
    "a block's share is balanced against later ones": (
        R + "ops/balance.py",
        "        taken = pad(shares.cumsum(-2), (0, 0, 1, 0))[..., : shares.shape[-2], :]\n",
        "        taken = shares.sum(-2, keepdim=True) - shares\n",
    ),
    "the gradient of a mixture forgets its weights": (
        R + "ops/mixed_blocks.py",
        "                total[at].flatten(1).addmm_(weights[at].mT, rows)\n",
        "                total[at].flatten(1).add_(rows[: len(total[at])])\n",
    ),
    "slots that nothing was written into are seen": (
        R + "mixers/low_rank.py",
        "seen = memory.seen | _any_writes(to_k, to_v)",
        "seen = torch.ones_like(memory.seen | _any_writes(to_k, to_v))",
    ),
    "a stride is seen before it is finished": (
        R + "mixers/compressed.py",
        "number[:, None, None] < behind",
        "number[:, None, None] <= behind",
    ),
    "landmarks count padding": (
        R + "mixers/landmarks.py",
        "        x, count = real_first(x, places)\n",
        "        x, count = real_first(x, Places.of(x[:, 0]))\n",
    ),
    "padding enters the Fourier transform": (
        R + "mixers/attention_free.py",
        "        if places.valid is None:\n            return fourier_mix(x, self.norm)",
        "        if True:\n            return fourier_mix(x, self.norm)",
    ),
    "a padding token overwrites": (
        R + "mixers/gated.py",
        "beta = where_valid(gate[..., :1].sigmoid(), places.valid, 0)",
        "beta = gate[..., :1].sigmoid()",
    ),
    # positions
    "relative positions look the other way": (
        R + "ops/score_bias.py",
        "    return distance.clamp(-clip, clip) + clip\n",
        "    return (-distance).clamp(-clip, clip) + clip\n",
    ),
    "tiles forget the gradient of relative keys": (
        R + "ops/tile/torch.py",
        "                d_bias[:, batch.at] = self.bias.sums(self._by_tile(ds), distance)\n",
        "                pass\n",
    ),
    "distance is free": (
        R + "ops/score_bias.py",
        "            s.addcmul_(self.slopes, distance.abs().to(self.acc), value=-1)\n",
        "            pass\n",
    ),
    "queries are turned by their place in the chunk": (
        R + "mixers/attention.py",
        "        q = self._turned(q, self.dims.heads, places)\n        return",
        "        q = self._turned(q, self.dims.heads, Places.of(x))\n        return",
    ),
    # around the mixer
    "dropout falls otherwise when a block is run again": (
        R + "blocks/reversible.py",
        "            if self.dice:\n",
        "            if False:\n",
    ),
    "cross attention of a block forgets which queries are padding": (
        R + "blocks/block.py",
        "self._dropped(mix_at(self.cross, y, places, **read))",
        "self._dropped(mix_at(self.cross, y, Places.of(y), **read))",
    ),
}


def all_of_them() -> dict[str, tuple[str, str, str, str]]:
    """By name: a file, what stands there, what shall stand there, and the tests that must notice."""
    others = {
        **MODELS,
        **TRAINING,
        **COMPILED,
        **LAUNCHES,
        **CHECKED,
        **BENCH,
        **COMPARE,
        **ARENA,
        **REPORT,
    }
    return {**others, **{name: (*mutant, SUITE) for name, mutant in MUTANTS.items()}}


def killed_by(name: str, mutant: tuple[str, str, str, str], known: str) -> str:
    """The test that fails, or '' if none does; the one that failed last time is tried first."""
    path, old, new, tests = mutant
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, copy / part)
        text = (copy / path).read_text()
        if old not in text:
            raise SystemExit(f"{path} does not hold\n{old}")
        (copy / path).write_text(text.replace(old, new))
        files = [f"tests/test_{file}.py" for file in tests.split()]
        failed = first_failure(copy, [known]) if known else ""
        if not failed and tests == SUITE:
            failed = first_failure(copy, ["-k", likely_words(path), *files])
        return failed or first_failure(copy, files, name)


def likely_words(path: str) -> str:
    """Return an expression for pytest's -k: the tests that a defect in this file most likely breaks."""
    module = path.removeprefix(R).removesuffix(".py")
    own = [words for part, words in WORDS.items() if part in module]
    made_here = [row.name for row in CATALOGUE.values() if row.make.__module__ == "regard." + module.replace("/", ".")]
    return " or ".join(own or made_here) or FEW


def first_failure(copy: Path, tests: list[str], name: str = "") -> str:
    """The first of these tests that fails in this copy of the repository. With a name: it is an error if they cannot run."""
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR tests"))]
    if name and not failed and done.returncode not in (0, 1):
        raise SystemExit(f"{name}: the tests did not run\n{done.stdout}\n{done.stderr}")
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed and done.returncode == 1 else ""


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = {name: mutant for name, mutant in all_of_them().items() if word in name}
    known = json.loads(RESULT.read_text())["caught_by"] if RESULT.exists() else {}
    start, found = time.perf_counter(), {}
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        jobs = {pool.submit(killed_by, name, mutant, known.get(name, "")): name for name, mutant in chosen.items()}
        for number, job in enumerate(as_completed(jobs), 1):
            found[jobs[job]] = job.result()
            report(number, jobs[job], job.result(), len(chosen), start)
            if not word:
                keep(found, known, time.perf_counter() - start)
    survivors = sorted(name for name, test in found.items() if not test)
    lines = [f"{len(chosen) - len(survivors)} of {len(chosen)} caught", *(f"survived: {name}" for name in survivors)]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(survivors)


def report(number: int, name: str, test: str, total: int, start: float) -> None:
    left = (time.perf_counter() - start) / number * (total - number) / 60
    what = "caught  " if test else "SURVIVED"
    sys.stdout.write(f"[{number}/{total}] {what} {name:58s} {test}   ({left:.0f} min left)\n")
    sys.stdout.flush()


def keep(found: dict[str, str], known: dict[str, str], seconds: float) -> None:
    """Write which test caught which mutant: the next run begins with it, also after a run that was stopped."""
    survivors = sorted(name for name, test in found.items() if not test)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    made = {"commit": head.stdout.strip(), "mutants": len(found), "survivors": survivors, "seconds": round(seconds)}
    text = json.dumps({**made, "processes": os.cpu_count(), "caught_by": dict(sorted({**known, **found}.items()))}, indent=1)
    RESULT.with_suffix(".writing").write_text(text + "\n")
    RESULT.with_suffix(".writing").replace(RESULT)


if __name__ == "__main__":
    sys.exit(main())
