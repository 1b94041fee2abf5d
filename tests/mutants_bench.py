"""Defects for `mutants.py`: what `regard bench` measures and compares. Each names the tests that must notice it."""

from __future__ import annotations

B = "src/regard/bench/"

BENCH: dict[str, tuple[str, str, str, str]] = {
    "a backward pass costs nothing": (B + "floors.py", "flops * (1 + backward))", "flops)", "bench"),
    "keys and values are not read again": (
        B + "floors.py",
        "    read_again = sum(moved) + weights",
        "    read_again = moved[-1] + weights",
        "bench",
    ),
    "a causal floor counts all pairs": (
        B + "floors.py",
        "setting.n, setting.causal, setting.heads)",
        "setting.n, False, setting.heads)",
        "bench",
    ),
    "ratios are upside down": (B + "summary.py", "return other / own if", "return own / other if", "bench"),
    "a graph time is compared with a plain one": (
        B + "summary.py",
        'bool(ours.get("graph_ms") and theirs.get("graph_ms"))',
        'bool(ours.get("graph_ms"))',
        "bench",
    ),
    "a peer of another mechanism is compared": (B + "summary.py", 'row["spec"] == other["spec"] or ', "True or ", "bench"),
    "a crossover takes the first win": (B + "summary.py", "low = max((i", "low = min((i", "bench"),
    "a forward pass builds a graph of gradients": (
        B + "workload.py",
        "    @torch.no_grad()\n    def forward",
        "    def forward",
        "bench",
    ),
    "views are launches": (B + "timing.py", "if not (func.is_view or nothing", "if not (nothing", "bench"),
    "the slow go on": (B + "speed.py", "            if job.n > longest:\n", "            if False:\n", "bench"),
    "a step reads one token less": (B + "token_step.py", "        self.k[:, :, self.t :].copy_(k)\n", "", "bench"),
    "special tokens of a peer are ordinary": (
        B + "peers_huggingface.py",
        "            special[:, : core.rows.first] = True\n",
        "            pass\n",
        "peers",
    ),
    "a mask of a peer forgets the future": (
        B + "peers_kernels.py",
        "        if setting.causal:\n            seen = seen & Causal()\n",
        "",
        "peers",
    ),
    "a wrong candidate is taken": (
        B + "tune.py",
        "right = [trial for trial in others if not trial.problem]",
        "right = [trial for trial in others if trial.seconds]",
        "tune",
    ),
    "NaN is a right result": (
        B + "tune.py",
        "if not error <= BOUNDS[self.shape.dtype]:",
        "if error > BOUNDS[self.shape.dtype]:",
        "tune",
    ),
    "any gain is taken": (B + "tune.py", "LEAST_GAIN = 1.02", "LEAST_GAIN = 1.0", "tune"),
    "candidates are compared with the card's own": (
        B + "tune.py",
        "with trial_configs(self.defaults):",
        "with trial_configs({}):",
        "tune",
    ),
    "a lucky measurement counts": (B + "tune.py", "        best = choose_trial(again[0], again[1:])\n", "", "tune"),
    "REGARD_TUNED replaces the shipped table": (
        "src/regard/ops/tuned_table.py",
        "return merge_tables(shipped, read_table(Path(own), shipped)) if own",
        "return read_table(Path(own), shipped) if own",
        "tuned_table",
    ),
    "a new table forgets other cards": (
        B + "tune.py",
        "if path.exists() else TunedTable()",
        "if False else TunedTable()",
        "tuned_table",
    ),
}
