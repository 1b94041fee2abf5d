"""Models that several processes compile: the one that measures is alone meanwhile."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock

import pytest

from regard.bench.whole_models import ENCODER_MODEL, ModelRequest
from regard.spec import Spec

COUNTING = "import sys\nfor i in range(10**9):\n    open(sys.argv[1], 'r+').write(f'{i:9}')"


@pytest.fixture
def compiled_models(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parents[1] / "benchmarks"), *sys.path])
    return importlib.import_module("compiled_models")


def test_long_sequences_without_room_are_measured_again_by_one_process(compiled_models, monkeypatch):
    lengths = (1024, 2**18, 2**20)
    request = ModelRequest(
        mixers=(Spec.parse("linear"),), lengths=lengths, kinds=(ENCODER_MODEL,), compiled=(True,), device="cpu"
    )
    asked, saved = [], []

    def measured_by(processes, work, *_):
        for series in work:
            asked.append((processes, series.lengths, series.compiled_at))
            full = processes > 1
            yield (
                series,
                [series.row(n) | ({"reason": "out of memory"} if full and n > 1024 else {"ms": 1.0}) for n in series.lengths],
            )

    monkeypatch.setattr(compiled_models, "measured_by", measured_by)
    monkeypatch.setattr(compiled_models, "_line", str)
    compiled_models.measure_compiled([request], 4, 60.0, lambda record: saved.append([*record["rows"]]))
    assert asked == [(4, lengths, None), (1, lengths[1:], compiled_models.COMPILED_AT)]
    assert [row["n"] for row in saved[0] if "reason" in row] == [2**18, 2**20]
    assert sorted(row["n"] for row in saved[-1]) == list(lengths) and not any("reason" in row for row in saved[-1])


def test_other_processes_stand_still_while_one_measures(tmp_path, compiled_models):
    alone = compiled_models.alone
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
