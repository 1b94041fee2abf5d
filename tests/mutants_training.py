"""Defects for `mutants.py`: losses, updates, runs that go on, data, tasks, settings. Each names the tests that must notice it."""

from __future__ import annotations

T, D, S = "src/regard/training/", "src/regard/data/", "src/regard/"

TRAINING: dict[str, tuple[str, str, str, str]] = {
    # what a model loses
    "smoothing spares the truth in the gradient": (
        T + "losses.py",
        "(-s / max(1, scores.shape[1]))",
        "(-s / max(1, scores.shape[1] - 1))",
        "losses",
    ),
    "smoothing is spread over padding": (
        T + "losses.py",
        "real.to(acc) @ x.to(acc) / len(weight)",
        "x.to(acc).sum(0) / len(weight)",
        "losses",
    ),
    "a loss is divided by padded tokens": (
        T + "losses.py",
        "count = (target != NO_LABEL).sum()",
        "count = (target == target).sum()",
        "losses",
    ),
    "a surprise is divided by padded tokens": (
        T + "losses.py",
        "return Loss(total, (target != NO_LABEL).sum(),",
        "return Loss(total, (target == target).sum(),",
        "losses",
    ),
    "the gradient of slices is that of the last": (
        T + "losses.py",
        "dw.addmm_(p.mT, heard[part])",
        "torch.mm(p.mT, heard[part], out=dw)",
        "losses",
    ),
    "the begin is told a step late": (D + "batch.py", "BEGIN), target[:, :-1]], 1)", "BEGIN), target[:, 1:]], 1)", "modes"),
    "padding is told as if it were said": (
        T + "feeding.py",
        "torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)",
        "at.expand_as(last) - 1",
        "modes",
    ),
    "two passes need not agree": (T + "modes.py", "weight / 4 * far", "0 * far", "modes"),
    "only one pass must agree with the other": (
        T + "losses.py",
        "((p.exp() - q.exp()) * (p - q))",
        "(p.exp() * (p - q))",
        "modes",
    ),
    "two passes agree on padding": (T + "modes.py", "far.masked_fill(~valid.chunk(2)[0], 0)", "far", "modes"),
    "the share of the truth is inverted": (
        T + "scheduled.py",
        "generator=dice) < share",
        "generator=dice) >= share",
        "scheduled",
    ),
    "the truth is told less and less without end": (T + "scheduled.py", "min(1.0, step / steps)", "step / steps", "scheduled"),
    "the begin is drawn too": (T + "scheduled.py", "(kept | at_front(target, valid))", "kept", "scheduled"),
    "the baseline of a reward is added": (T + "reinforce.py", "-((got - base) * logs)", "-((got + base) * logs)", "reinforce"),
    "risks are not normalised": (
        T + "reinforce.py",
        ".index_put(at, alpha * logs).softmax(-1)",
        ".index_put(at, alpha * logs).exp()",
        "reinforce",
    ),
    "an answer that is cut off ends": (
        T + "reinforce.py",
        "if len(answer) < rules.most else answer",
        "if len(answer) <= rules.most else answer",
        "reinforce",
    ),
    "a glance is learned as well": (
        T + "parallel.py",
        "real if shown is None else real & ~shown",
        "real",
        "parallel_learning parallel",
    ),
    "a glance grows with what is right": (
        T + "parallel.py",
        "argmax(-1) != target) & real",
        "argmax(-1) == target) & real",
        "parallel_learning parallel",
    ),
    "two alike need no blank between them": (
        T + "parallel.py",
        "return length + again.sum(1)",
        "return length",
        "parallel_learning parallel",
    ),
    "the gradient of paths is torch's": (
        T + "parallel.py",
        "return lost - (p - p.detach())",
        "return lost",
        "parallel_learning parallel",
    ),
    # updates
    "passes of an update weigh the same": (
        T + "learner.py",
        "mean = loss.total / unit ",
        "mean = loss.total / loss.over.clamp_min(1) ",
        "updates",
    ),
    "parts of an update are those of its first pass": (
        T + "learner.py",
        "parts = {name: x + loss.parts[name] for name, x in parts.items()}",
        "pass",
        "updates",
    ),
    "the gradient is clipped behind the step": (
        T + "learner.py",
        "nn.utils.clip_grads_with_norm_(self.wanted, self.config.clip, norm)",
        "self.optimizer.register_step_post_hook(\n"
        "                lambda *_: nn.utils.clip_grads_with_norm_(self.wanted, self.config.clip, norm)\n            )",
        "updates",
    ),
    "the gradient is clipped while it is scaled": (
        T + "learner.py",
        "            self.scaler.unscale_(self.optimizer)\n",
        "            pass\n",
        "updates training",
    ),
    "embeddings decay": (T + "learner.py", "if whole or p.ndim < 2", "if p.ndim < 2", "updates"),
    "the warm-up is a step late": (T + "rates.py", "return step / config.warmup", "return (step - 1) / config.warmup", "updates"),
    "the way down begins with the first update": (
        T + "rates.py",
        "(step - config.warmup) / max(1, config.steps - config.warmup)",
        "step / max(1, config.steps)",
        "updates",
    ),
    "the rate is that of the update before": (
        T + "learner.py",
        "return self.config.lr * factor(self.config, self.step + 1)",
        "return self.config.lr * factor(self.config, max(1, self.step))",
        "updates",
    ),
    # runs that go on
    "a run that goes on skips a batch": (
        T + "feed.py",
        "pool.submit(make, update)",
        "pool.submit(make, update + (first > 0))",
        "faults",
    ),
    "a run that goes on repeats a batch": (
        T + "feed.py",
        "pool.submit(make, update)",
        "pool.submit(make, update - (first > 0))",
        "faults",
    ),
    "the optimiser starts anew": (
        T + "fit.py",
        "put_optimizer_state(learner.model, learner.optimizer, self.start.optimizer, where)",
        "pass",
        "faults",
    ),
    "the dice start anew": (T + "fit.py", '        dice.put_back(self.start.state["dice"])\n', "        pass\n", "faults"),
    "the scaler starts anew": (T + "fit.py", 'learner.scaler.load_state_dict(self.start.state["scaler"])', "pass", "faults"),
    "the dice of numpy are not kept": (T + "dice.py", "np.random.set_state((", "tuple((", "faults training"),
    "patience starts anew": (T + "fit.py", 'state["best"], state["waited"],', 'state["best"], 0,', "faults training"),
    "a checkpoint has its name before it is whole": (
        T + "store.py",
        "            files.write(writing / name, content)\n",
        "            os.rename(writing, final)\n"
        "            files.write(final / name, content)\n"
        "            os.rename(final, writing)\n",
        "store",
    ),
    "a file is written in place": (T + "files.py", 'torn = path.with_name(f".writing-{path.name}")', "torn = path", "store"),
    "a checkpoint may be torn": (T + "store.py", 'if files.digest(data) != state["sha256"].get(name):', "if False:", "store"),
    "the weights of a run may be torn": (T + "store.py", 'if files.digest(data) != result.get("sha256"):', "if False:", "store"),
    "the best checkpoint is removed": (T + "fit.py", "step, *self._best_step()})", "step})", "training"),
    "the oldest checkpoints are averaged": (
        T + "fit.py",
        "self._regular(last)[-self.config.average :]",
        "self._regular(last)[: self.config.average]",
        "training",
    ),
    "an average is the last of them": (
        T + "averaging.py",
        "sums[name] += _wide(x)",
        "sums[name] = _wide(x) * len(many)",
        "store",
    ),
    "patience is one validation longer": (
        T + "fit.py",
        "self.waited >= self.config.patience",
        "self.waited > self.config.patience",
        "training",
    ),
    "dropout falls in validation": (T + "fit.py", "        model.eval()\n        try:\n", "        try:\n", "training"),
    "dropout falls where a task rests": (T + "feeding.py", "    model.eval()\n    try:\n", "    try:\n", "reinforce tasks"),
    "dropout is off behind a validation": (
        T + "fit.py",
        "        finally:\n            model.train()\n",
        "        finally:\n            pass\n",
        "training faults",
    ),
    # data, tasks, scores, settings
    "the last batch is lost": (D + "bucket.py", "[*cuts, len(ascending)]", "cuts", "bucket"),
    "a batch comes twice": (
        D + "bucket.py",
        "for place in dice.permutation(len(batches))",
        "for place in dice.integers(0, len(batches), len(batches))",
        "bucket",
    ),
    "a batch holds one example too many": (
        D + "bucket.py",
        "(place + 1 - cuts[-1]) * size",
        "(place - cuts[-1]) * size",
        "bucket",
    ),
    "all epochs are alike": (D + "bucket.py", "default_rng([self.seed, number])", "default_rng([self.seed])", "bucket"),
    "new words of a source are counted one too far": (
        D + "copying.py",
        "len(vocab) + len(new))",
        "len(vocab) + len(new) + 1)",
        "vocabulary",
    ),
    "new words of a target are counted one too far": (
        D + "copying.py",
        "len(vocab) + place for",
        "len(vocab) + place + 1 for",
        "vocabulary",
    ),
    "answers come in the order of their sizes": (
        S + "tasks/support.py",
        "            found[i] = value\n",
        "            found[found.index(None)] = value\n",
        "tasks",
    ),
    "a long text is cut at its end": (S + "tasks/sentiment.py", "row[:half] + row[-half:]", "row[: 2 * half]", "tasks"),
    "BLEU is blind to case": (S + "scores.py", "metrics.BLEU(lowercase=lower,", "metrics.BLEU(lowercase=True,", "scores"),
    "ROUGE divides by the answer alone": (
        S + "scores.py",
        "/ (len(a) + len(b)) if a or b",
        "/ (2 * len(a) or 1) if a or b",
        "scores",
    ),
    "true is a text": (S + "config.py", '{"true": True, "false": False}.get(text.lower())', "bool(text)", "config"),
    "true is a number": (S + "config.py", "isinstance(value, bool) or not isinstance", "not isinstance", "config"),
    "a run that goes on forgets its settings": (
        S + "cli/settings.py",
        "    if begun is not None:\n",
        "    if False:\n",
        "cli_runs",
    ),
    "a setting may be given twice": (
        S + "cli/settings.py",
        "if keys.count(key) > 1), None)",
        "if False), None)",
        "cli cli_abuse cli_runs",
    ),
}
