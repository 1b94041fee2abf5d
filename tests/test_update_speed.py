"""Tokens a second and peak memory of a run: counted without validation and saving, written down, the same after going on."""

import json

import pytest
import torch

from regard.blocks import Stack
from regard.config import Config
from regard.data.batch import Batch
from regard.models.build import translator
from regard.training.fit import fit
from regard.training.metrics_log import read_metrics
from regard.training.update_speed import UpdateSpeed, peak_memory, run_cost, tokens_read
from small_task import Small, small

SOURCE, TARGET = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
VALID = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
CPU = torch.device("cpu")


def test_tokens_are_those_that_a_model_reads():
    assert tokens_read(Batch(SOURCE, VALID, TARGET), decodes=False) == 7
    assert tokens_read(Batch(SOURCE, None, TARGET), decodes=True) == 10 + 6
    assert tokens_read(Batch(SOURCE, VALID, TARGET, VALID[:, :3]), decodes=True) == 7 + 5
    assert tokens_read(Batch(torch.ones(2, 5, 7)), decodes=True) == 10  # vectors, and no target
    for shape in ((2, 3, 8, 8), (2, 8, 8)):  # images in colours and in levels of gray
        assert tokens_read(Batch(torch.zeros(shape, dtype=torch.uint8), None, TARGET[:, 0]), decodes=False) == 2
    assert UpdateSpeed(translator(Config(width=8, heads=2, depth=1, ffn=8), 9), CPU).decodes
    assert not UpdateSpeed(Stack.of("softmax", width=8, heads=2), CPU).decodes


def test_time_outside_of_updates_is_left_out():
    now = [0.0]
    speed = UpdateSpeed(torch.nn.Linear(1, 1), CPU, clock=lambda: now[0])
    assert "tokens_per_second" not in speed.measured()
    batches = speed.counted([[Batch(SOURCE)], [Batch(SOURCE), Batch(SOURCE)]])
    next(batches)
    now[0] = 2.0
    assert speed.measured()["tokens_per_second"] == 5
    now[0] = 100.0  # a validation
    speed.restart()
    next(batches)
    now[0] = 101.0
    assert speed.measured()["tokens_per_second"] == 20


def test_memory_of_a_process_only_grows():
    before = peak_memory(CPU)
    kept = torch.ones(1 << 24)
    assert before > 1 << 24 and peak_memory(CPU) >= before and len(kept)


def test_the_cost_of_a_run_is_the_median_speed_and_the_most_memory():
    lines = [{"step": 1}, {"tokens_per_second": 1.0, "peak_memory": 9}, {"tokens_per_second": 8.0, "peak_memory": 5}]
    assert run_cost([*lines, {"tokens_per_second": 3.0}]) == {"tokens_per_second": 3.0, "peak_memory": 9}
    assert run_cost([{"step": 1}]) == {"tokens_per_second": None, "peak_memory": None}


@pytest.mark.parametrize("parts", [(12,), (6, 12)])
def test_a_run_writes_its_cost(parts, tmp_path):
    for steps in parts:
        result = fit(Small(small(steps=steps, schedule="constant", warmup=0)), tmp_path, accelerator="cpu", quiet=True)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert all(line["tokens_per_second"] > 0 and line["peak_memory"] > 1 << 24 for line in lines)
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept["tokens_per_second"] == result.tokens_per_second > 0
    assert kept["peak_memory"] == result.peak_memory == max(line["peak_memory"] for line in lines)
