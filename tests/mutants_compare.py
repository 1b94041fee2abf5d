"""Defects for `mutants.py`: what `regard compare` trains, stores and measures. Each names the tests that must notice it."""

from __future__ import annotations

C = "src/regard/compare/"

COMPARE: dict[str, tuple[str, str, str, str]] = {
    "the worst learning rate is taken": (
        C + "cell_record.py",
        "return one < two if metric in LESS_IS_BETTER else one > two",
        "return one > two if metric in LESS_IS_BETTER else one < two",
        "compare",
    ),
    "parameters are left as they are": (C + "compared_model.py", "TOLERANCE * goal / 4:", "goal:", "compare"),
    "a token without a target is scored": (
        C + "split_score.py",
        "points.masked_fill(targets == IGNORED, torch.nan)",
        "points.masked_fill(targets == IGNORED, 0.0)",
        "compare",
    ),
    "an answer that is not a number is not scored": (
        C + "split_score.py",
        "losses.masked_fill(losses.isnan(), torch.inf)",
        "losses",
        "compare",
    ),
    "an infinite loss is a score": (
        C + "cell_run.py",
        "not math.isfinite(trained.val)",
        "trained.val != trained.val",
        "compare_faults",
    ),
    "without its data set a finished cell is lost": (
        C + "grid_run.py",
        "group.lacks_data and record.status not in TRIED_AGAIN",
        "False",
        "compare_faults",
    ),
    "slices forget where targets are": (
        C + "split_score.py",
        "values = values.gather(1, split.at.cpu().long())",
        "values = values[:, : split.at.shape[1]]",
        "compare",
    ),
    "an epoch repeats its first batch": (
        C + "batch_order.py",
        "return self.order[inside]",
        "return self.order[0]",
        "compare",
    ),
    "a long example is cut": (C + "batch_order.py", "end, right=True))", "end, right=True)) + 1", "compare"),
    "hidden bytes are asked for in padding": (
        "src/regard/arena/hidden_tokens.py",
        "        hidden = hidden & valid\n",
        "        pass\n",
        "arena_recipes",
    ),
    "the loss of hidden bytes is left out": (
        C + "training_step.py",
        "return mean_loss(scores, targets) + mean_loss(side_scores, side.targets)",
        "return mean_loss(scores, targets)",
        "arena_recipes",
    ),
    "brackets are shuffled too": ("src/regard/arena/argument_order.py", "torch.where(closes, 1.0, draws)", "draws", "arena_lra"),
    "the rate does not warm up": (C + "cell_training.py", "    if done < warmup:\n", "    if False:\n", "compare"),
    "a loss that is not finite goes on": (
        C + "cell_training.py",
        "if not math.isfinite(float(self.step.total_loss)):",
        "if False:",
        "compare_faults",
    ),
    "the last weights are kept, not the best": (
        C + "cell_training.py",
        "        if is_better(self.metric, score, found.val):\n",
        "        if True:\n",
        "compare",
    ),
    "every rate is tested": (
        C + "grid_run.py",
        'CellJob("train and test" if alone else "train", cell',
        'CellJob("train and test", cell',
        "compare",
    ),
    "a finished cell is run again": (
        C + "grid_run.py",
        "if record is not None and record.status not in TRIED_AGAIN:",
        "if False:",
        "compare",
    ),
    "a crash is for ever": (C + "grid_run.py", 'TRIED_AGAIN = ("crashed", "missing data")', "TRIED_AGAIN = ()", "compare_faults"),
    "a record of other settings stays": (
        C + "grid_run.py",
        "                self.store.set_aside(record)\n",
        "                pass\n",
        "compare",
    ),
    "a key forgets the budget": (
        C + "grid_plan.py",
        '"steps": self.grid.steps, "seconds": self.grid.seconds}',
        '"steps": 0}',
        "compare",
    ),
    "a key forgets your code": (C + "grid_plan.py", "self.grid.dtype, self.source]", "self.grid.dtype]", "compare"),
    "a record of another cell is believed": (C + "cell_store.py", "if record.key != path.stem:", "if False:", "compare_faults"),
    "a damaged record is not reported": (
        C + "cell_store.py",
        "                self.damaged.append(text)\n",
        "                pass\n",
        "compare_faults",
    ),
    "a slow cell holds up the others": (C + "worker_pool.py", "LEAD = 0.25", "LEAD = 1e9", "compare"),
    "outputs of any shape are added": (C + "compared_model.py", "if found != expected:", "if False:", "compare_faults"),
    "a dead process takes others with it": (
        C + "worker_pool.py",
        "            if several:\n",
        "            if False:\n",
        "compare",
    ),
    "memory is what was allocated in all": (
        C + "cell_costs.py",
        "        held += change\n",
        "        held += max(change, 0)\n",
        "compare",
    ),
    "a full disk is a crash": (
        C + "cell_run.py",
        "        except CannotStore:\n            raise\n",
        "",
        "compare_faults",
    ),
}
