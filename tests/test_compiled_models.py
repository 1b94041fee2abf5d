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


def requested(*lengths):
    mixers = (Spec.parse("linear"), Spec.parse("sinkhorn"))
    return ModelRequest(mixers=mixers, lengths=lengths, kinds=(ENCODER_MODEL,), compiled=(True,), device="cpu")


def test_a_million_tokens_come_last_and_those_without_room_are_measured_by_one_process(compiled_models, monkeypatch):
    asked, saved = [], []

    def measured_by(processes, work, *_):
        for series in [*work]:
            asked.append((processes, str(series.job.spec), series.lengths, series.compiled_at))
            for n in series.lengths:
                full = processes > 1 and n == 2**20
                yield series, series.row(n) | ({"reason": "out of memory"} if full else {"ms": 1.0, "first_seconds": 1.0})

    monkeypatch.setattr(compiled_models, "measured_by", measured_by)
    compiled_models.measure_compiled([requested(1024, 2**18, 2**20)], 4, 60.0, lambda record: saved.append([*record["rows"]]))
    assert asked == [
        (4, "linear", (1024, 2**18), None),
        (4, "sinkhorn", (1024,), None),
        (4, "linear", (2**20,), compiled_models.COMPILED_AT),
        (4, "sinkhorn", (2**18,), None),  # which compiles a large pass: nobody waits for that
        (4, "sinkhorn", (2**20,), None),
        (1, "linear", (2**20,), compiled_models.COMPILED_AT),
        (1, "sinkhorn", (2**20,), None),
    ]
    assert len(saved) == 8 and len(saved[-1]) == 6 and all("ms" in row for row in saved[-1])


def test_rows_come_from_processes_until_the_time_is_up(compiled_models):
    series = compiled_models.all_series(requested(64))[0]
    small = compiled_models.replace(series.request, tokens=64, depth=1, width=16, heads=2, ffn=16, seconds=0.01)
    series = compiled_models.Series(small, series.job, (64,), dynamic=True)
    found = list(compiled_models.measured_by(1, [series], (), compiled_models.time.monotonic() + 120))
    assert [(own is series, row["n"], "ms" in row) for own, row in found] == [(True, 64, True)], found
    assert list(compiled_models.measured_by(1, [series], (), compiled_models.time.monotonic())) == []


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
