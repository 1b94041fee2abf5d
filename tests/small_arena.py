"""Tasks that train in milliseconds, and mechanisms that fail in every way: `regard compare` gets them by this module's name."""

import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaModel, ArenaTask, Examples
from regard.compare import cell_costs
from regard.compare.cell_store import CellStore
from regard.compare.grid_plan import GridSettings, plan_grid
from regard.compare.grid_run import GridRun
from regard.compare.worker_pool import SameProcess
from regard.mixers.softmax import Softmax

FILES = (__file__,)
COUNTS = {"train": 64, "val": 24, "test": 32}


@dataclass(frozen=True)
class FirstToken(ArenaTask):
    """The label of a sequence is its first token."""

    name = "first_token"
    slice_names = {"first": ("none", "one", "two", "three", "four", "five")}  # noqa: RUF012
    title = "Which token is the first?"
    tokens: int = 8
    steps: int = 6

    length = property(lambda self: self.tokens)
    vocab = classes = 6

    def examples(self, part):
        generator = torch.Generator().manual_seed(["train", "val", "test"].index(part))
        x = torch.randint(1, 6, (COUNTS[part], self.tokens), generator=generator)
        return Examples(x.to(torch.uint8), x[:, 0], slices={"first": x[:, 0]})

    def floors(self):
        return {"chance": 0.2}

    def model(self):
        return ArenaModel(width=16, depth=1, heads=2, ffn=16)

    def budget(self):
        return ArenaBudget(steps=self.steps, batch=8, rates=(1e-3, 1e-2), evaluations=2)


@dataclass(frozen=True)
class Echo(FirstToken):
    """The label of some tokens is the token before; the others have none."""

    name = "echo"
    form = "token"
    causal = True
    every: int = 4

    def examples(self, part):
        tokens = super().examples(part).tokens
        targets = tokens.roll(1, 1).long()
        targets[:, torch.arange(self.tokens) % self.every != self.every - 1] = IGNORED
        return Examples(tokens, targets, slices={"place": torch.arange(self.tokens).expand(tokens.shape)})


@dataclass(frozen=True)
class NextOne(Echo):
    """Count the bits of the next token."""

    name = "next_one"
    form = "next"
    metric = "bits per token"
    every: int = 1


@dataclass(frozen=True)
class Pairs(FirstToken):
    """Two sequences of different lengths: do they begin alike?"""

    name = "pairs"
    form = "pair"

    def examples(self, part):
        x = super().examples(part).tokens
        both = torch.stack([x, x.roll(1, 0)], 1)
        lengths = torch.randint(2, self.tokens + 1, both.shape[:2], generator=torch.Generator().manual_seed(0))
        return Examples(both, (both[:, 0, 0] == both[:, 1, 0]).long(), lengths)


@dataclass(frozen=True)
class Absent(FirstToken):
    """A task whose data is not on this machine."""

    name = "absent"
    needs = "imdb"


class Raising(Softmax):
    def answer(self, *_, **__):
        raise RuntimeError("it fell\nover")


class Narrowing(Softmax):
    """Answer the first query alone: a residual connection would add that to all tokens."""

    def answer(self, *args, **options):
        return super().answer(*args, **options)[:, :, :1]


class Diverging(Softmax):
    def answer(self, *args, **options):
        return super().answer(*args, **options) * torch.nan


class Forgetful(Softmax):
    """In evaluation the last tokens of all have no answer, as with a table that is too short."""

    def answer(self, *args, **options):
        y = super().answer(*args, **options)
        if not self.training:
            y = y.index_fill(2, torch.arange(3, y.shape[2]), torch.nan)
        return y


class Complaining(Softmax):
    def answer(self, *args, **options):
        warnings.warn("this is slow", stacklevel=1)
        return super().answer(*args, **options)


class Dying(Softmax):
    def answer(self, *_, **__):
        os.kill(os.getpid(), signal.SIGKILL)


def settings(*tasks, mixers=("softmax",), **more):
    return GridSettings(tasks or ("first_token",), tuple(mixers), files=FILES, **more)


def run_grid(folder, grid, pool=None):
    store = CellStore(Path(folder))
    store.begin({"settings": grid.to_json()})
    pool = pool or SameProcess()
    try:
        return GridRun(plan_grid(grid), store, pool).run()
    finally:
        pool.close()


def grid_in_a_process(folder, grid):
    torch.set_num_threads(1)
    cell_costs.TIMED = 0.002
    run_grid(folder, grid)
