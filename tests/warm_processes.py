"""Processes for tests that kill them: they come from one that has imported what they need, so that a start costs nothing."""

import multiprocessing
import os
from multiprocessing import forkserver

from regard.compare.worker_pool import QUIET

START = multiprocessing.get_context("forkserver")
# The last three are what a first update and the journal of a run import: more than a second for every process.
IMPORTED = ["regard.compare.grid_run", "regard.training.fit", "numpy.random", "torch._dynamo", "torch.utils.tensorboard"]


def warm_start():
    """Start the process that all others come from, unless it is there, and return the context that asks it for them."""
    os.environ.update(QUIET)
    START.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return START
