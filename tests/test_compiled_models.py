"""Models that several processes compile: the one that measures is alone meanwhile."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock

COUNTING = "import sys\nfor i in range(10**9):\n    open(sys.argv[1], 'r+').write(f'{i:9}')"


def test_other_processes_stand_still_while_one_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parents[1] / "benchmarks"), *sys.path])
    alone = importlib.import_module("compiled_models").alone
    counter = tmp_path / "count"
    counter.write_text(" " * 9)
    with subprocess.Popen([sys.executable, "-c", COUNTING, str(counter)]) as other:
        try:
            began = wait_for_more(counter, "")
            with alone(Lock(), [0, os.getpid(), other.pid]):
                before = counter.read_text()
                time.sleep(0.1)
                assert counter.read_text() == before
            assert wait_for_more(counter, before) > began
        finally:
            other.kill()
    with alone(Lock(), [other.pid]):  # one that has ended disturbs nothing
        pass


def wait_for_more(counter, before):
    """The number in a file when it is another one."""
    end = time.monotonic() + 20
    while not counter.read_text().strip() or counter.read_text() == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(counter.read_text())
