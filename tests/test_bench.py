"""`regard bench` and what is behind it: clocks, counts, floors, ratios, crossovers, records, tables and pictures."""

import gc
import json
import math
import os
from time import sleep

import pytest
import torch
from typer.testing import CliRunner

from conftest import DEVICE
from regard import layer
from regard.bench import floors, summary, token_step, whole_models
from regard.bench.backend_log import backends_of
from regard.bench.floors import FORWARD, TRAINING, floor_of
from regard.bench.machine import Rates, measured_rates
from regard.bench.record import model_record, speed_record
from regard.bench.speed import OURS, Request, Session, count_launches, jobs_of
from regard.bench.timing import NotCaptured, graph_time, launches, light_collections, peak_bytes, plain_time
from regard.bench.workload import LAYER, OPERATION, Setting, build_mixer, operation_inputs, own_workload, spec_text
from regard.cli import app
from regard.cli.bench_command import draw_record, parsed_length
from regard.spec import Spec

RATES = Rates(1e9, 1e12)
CPU = torch.device("cpu")
SMALL = {"tokens": 256, "heads": 2, "dim": 16, "seconds": 0.002, "device": "cpu", "dtype": "fp32"}


def specs(*texts):
    return tuple(Spec.parse(text) for text in texts)


def ignore(*_):
    pass


# Clocks and counts


def test_times_follow_the_work():
    x = torch.randn(400, 400)
    once = plain_time(lambda: x @ x, CPU, 0.05)
    often = plain_time(lambda: [x @ x for _ in range(20)], CPU, 0.05)
    assert 4 * once < often < 100 * once


def test_launches_count_what_moves_numbers():
    x = torch.randn(4, 8)
    assert launches(lambda: x.view(8, 4).t(), CPU) == 0
    assert launches(lambda: (x + 1).exp() @ x.t(), CPU) == 3


def test_what_no_profiler_sees_is_not_counted_as_nothing(monkeypatch):
    assert count_launches(lambda: None, CPU) == {"launches_reason": "the profiler saw no kernel"}
    monkeypatch.setattr("regard.bench.speed.launches", broken)
    assert count_launches(lambda: None, CPU) == {"launches_reason": "no profiler here"}


def broken(*_):
    raise RuntimeError("no profiler here\nat all")


def test_the_backends_of_a_call(monkeypatch, capsys):
    monkeypatch.setenv("REGARD_LOG", "other")
    where = Setting(32, 2, 2, 16, True)
    mixer = build_mixer(Spec.parse("linear"), where)
    work = own_workload(mixer, where, OPERATION, operation_inputs(mixer.core, where))
    (found,) = backends_of(work.forward)
    assert found.startswith("linear: ")
    assert backends_of(lambda: None) == []
    assert os.environ["REGARD_LOG"] == "other"
    assert capsys.readouterr().err == ""


def test_the_backend_of_a_prepared_call_is_found_again():
    made = layer("Local(4)", width=16, heads=2, causal=True)
    x = torch.randn(1, 20, 16)
    assert backends_of(lambda: made(x)) == backends_of(lambda: made(x)) != []


def test_what_was_frozen_before_a_measurement_stays_frozen():
    """Else every collection behind it searches all modules and tests: conftest.py has frozen them."""
    before = gc.get_freeze_count()
    with light_collections():
        assert gc.get_freeze_count() >= before > 0
    assert gc.get_freeze_count() >= before


def test_peak_memory_is_what_a_call_adds():
    held = peak_bytes(lambda: torch.ones(1 << 24), CPU)
    assert 0.9 * (1 << 26) < held < 1.5 * (1 << 26)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: REGARD_DEVICE=cuda")
def test_graphs_hold_device_time_alone_and_refuse_what_waits():
    x = torch.randn(64, 64, device=DEVICE)
    call = lambda: [torch.relu(x) for _ in range(50)]  # noqa: E731
    plain = plain_time(call, DEVICE, 0.05)
    assert graph_time(call, DEVICE, 0.05, plain) < plain
    with pytest.raises(NotCaptured):
        graph_time(lambda: x.sum().item(), DEVICE, 0.05, plain)
    assert launches(call, DEVICE) == 50


def test_rates_are_of_this_machine():
    found = measured_rates(CPU, torch.float32)
    assert 1e8 < found.bytes < 1e13
    assert 1e8 < found.flops < 1e15


# Floors


def floor(text, level=OPERATION, work=FORWARD, causal=False, n=64, **options):
    where = Setting(n, 3, 2, 16, causal, **options)
    mixer = build_mixer(Spec.parse(text), where)
    return floor_of(mixer, where, level, work, Spec.parse(text).row.examples[0].cost)


def test_floors_of_full_attention_are_pairs_and_tensors():
    tensor = 3 * 2 * 64 * 16 * 4
    found = floor("softmax")
    assert found.flops == 3 * 2 * 64 * 64 * 2 * (16 + 16)
    assert found.bytes == 4 * tensor
    both = floor("softmax", work=TRAINING)
    assert both.flops == 3.5 * found.flops
    assert both.bytes == 11 * tensor
    assert floor("softmax", causal=True).flops == found.flops * 65 / 128


def test_floors_follow_pairs_and_features():
    assert floor("Local(1)").flops == 3 * 2 * 64 * 2 * 32
    assert floor("longformer(window=1, first=1, shared=True)").flops == 3 * 2 * (64 + 63 + 63) * 2 * 32
    assert floor("linear").flops == 3 * 2 * 64 * 4 * 16 * 16
    assert floor("performer(features=8)").flops == 3 * 2 * 64 * (4 * 8 * 16 + 4 * 8 * 16)
    assert floor("gla").bytes == 3 * 2 * 64 * 4 * (16 + 32 + 16 + 16)


def test_a_layer_adds_its_projections():
    core, layer = floor("softmax"), floor("softmax", level=LAYER)
    assert layer.flops == core.flops + 3 * 64 * 4 * 2 * 32 * 32
    assert layer.bytes == 2 * 3 * 64 * 32 * 4 + 4 * (32 * 32 + 32) * 4


def test_other_mechanisms_are_counted():
    assert floor("nystrom(landmarks=8)").flops > 0
    assert floor("fnet", level=LAYER).flops == 0  # no product of matrices


def test_a_floor_is_the_longer_of_two_times():
    assert floors.Floor(1e9, 1e12).seconds(RATES) == 1
    assert floors.Floor(2e9, 1e12).bound_by(RATES) == "bytes"
    assert floors.Floor(1e9, 2e12).seconds(RATES) == 2
    assert floors.Floor(1e9, 2e12).bound_by(RATES) == "FLOPs"


# Workloads and jobs


def test_gradients_of_a_workload_are_returned_and_stored_nowhere():
    where = Setting(32, 2, 2, 16, True)
    mixer = build_mixer(Spec.parse("performer(features=8)"), where)
    inputs = operation_inputs(mixer.core, where)
    found = own_workload(mixer, where, OPERATION, inputs).both()
    assert len(found) == 3 + len(list(mixer.core.parameters()))
    assert all(x.grad is None for x in (*inputs, *mixer.parameters()))
    assert not own_workload(mixer, where, OPERATION, inputs).forward().requires_grad


def test_jobs_choose_forms_and_levels():
    request = Request(specs("Local(8)", "nystrom", "fnet"), (64, 128), (True, False), peers=("SDPA", "nystrom-attention"))
    jobs = jobs_of(request)
    own = [(spec_text(job.spec), job.causal, job.level) for job in jobs if job.own and job.n == 64]
    expected = [("Local(8)", True, OPERATION), ("Local(8)", False, OPERATION)]
    expected += [("nystrom", False, OPERATION), ("nystrom", False, LAYER), ("fnet", False, LAYER)]
    assert own == expected
    full = {(job.causal, job.level) for job in jobs if not job.own}
    assert full == {(True, OPERATION), (False, OPERATION), (False, LAYER)}
    assert not [job for job in jobs_of(Request(specs("softmax"), (64,), peers=("SDPA",))) if not job.own]
    assert {job.level for job in jobs_of(Request(specs("Local(8)"), (64,), level=LAYER))} == {LAYER}


def test_the_batch_keeps_the_number_of_tokens():
    request = Request(specs("softmax"), (64,), tokens=1000)
    assert [request.setting(n, True).batch for n in (10, 64, 2000)] == [100, 15, 1]


def test_rows_hold_numbers_or_reasons():
    request = Request(specs("Local(8)"), (64,), peers=("SDPA", "flash-linear-attention"), **SMALL)
    session = Session(request, RATES)
    rows = [row for job in jobs_of(request) for row in session.rows(job)]
    assert {row["by"] for row in rows} == {"SDPA", OURS}
    for row in rows:
        assert row["ms"] > 0 and row["launches"] > 0 and row["peak_bytes"] >= 0
        assert row["fraction"] == pytest.approx(row["floor_ms"] / row["ms"])
    refused = Request(specs("fnet"), (64,), level=OPERATION, **SMALL)
    (row, _) = [row for job in jobs_of(refused) for row in Session(refused, RATES).rows(job)]
    assert row["reason"] == "fnet is a whole layer without a core: measure it with --level layer"
    if DEVICE.type == "cpu":
        absent = Request(specs("linear"), (64,), peers=("flash-linear-attention",), **SMALL)
        rows = [row for job in jobs_of(absent) for row in Session(absent, RATES).rows(job)]
        assert {"reason" in row for row in rows if row["by"] != OURS} == {True}


def test_a_failure_of_any_class_is_a_row_with_a_reason(monkeypatch):
    class CompilerError(Exception):
        """As of a compiler of kernels, which is no RuntimeError."""

    def fails(*_):
        raise CompilerError("no such instruction\nin line 3")

    monkeypatch.setattr("regard.bench.speed.measure_call", fails)
    request = Request(specs("softmax"), (32,), passes=(FORWARD,), **SMALL)
    (row,) = Session(request, RATES).rows(jobs_of(request)[0])
    assert row["reason"] == "no such instruction"


def test_what_is_slow_is_not_tried_with_longer_sequences(monkeypatch):
    monkeypatch.setattr("regard.bench.speed.SLOW", 0.0)
    request = Request(specs("linear"), (32, 64), passes=(FORWARD,), **SMALL)
    session = Session(request, RATES)
    first, second = (row for job in jobs_of(request) for row in session.rows(job))
    assert "ms" in first
    assert second["reason"].startswith("left out: 0.0 s at n = 32")


# Ratios and crossovers


def row(by, n, ms, spec="Local(8)", graph=None, **more):
    found = {"by": by, "spec": spec, "causal": True, "level": OPERATION, "pass": FORWARD, "n": n, "ms": ms}
    return found | ({"graph_ms": graph} if graph else {}) | more


def test_ratios_are_to_peers_of_the_same_work():
    rows = [row(OURS, 64, 2.0), row("SDPA", 64, 6.0, "softmax"), row("local-attention", 64, 3.0)]
    rows += [row("local-attention", 64, 9.0, "Local(9)"), row("SDPA", 128, 8.0, "softmax"), row("FlexAttention", 64, 0)]
    (found,) = summary.with_ratios(rows)
    assert found["ratios"] == {"SDPA": 3.0, "local-attention": 1.5}


def test_graph_times_are_compared_with_graph_times():
    assert summary.ratio(row(OURS, 64, 2.0, graph=1.0), row("SDPA", 64, 6.0, graph=0.5)) == 0.5
    assert summary.ratio(row(OURS, 64, 2.0, graph=1.0), row("SDPA", 64, 6.0)) == 3.0


def test_the_crossover_is_interpolated_in_logarithms():
    assert summary.crossing([(1024, 0.5), (4096, 2.0)]) == pytest.approx(2048)
    lost_twice = [(1024, 2.0), (2048, 0.25), (8192, 0.5), (32768, 4.0)]
    assert summary.crossing(lost_twice) == pytest.approx(8192 * 4 ** (1 / 3))
    assert summary.crossing([(1024, 1.5), (4096, 2.0)]) == 1024
    assert summary.crossing([(1024, 1.5), (4096, 0.9)]) is None


def test_crossovers_of_a_record():
    rows = [row("SDPA", n, ms, "softmax") for n, ms in ((1024, 1.0), (4096, 4.0))]
    rows += [row(OURS, n, 2.0) for n in (1024, 4096)]
    (found,) = summary.crossovers(rows)
    assert found["spec"] == "Local(8)"
    assert found["from"] == pytest.approx(2048)


# Decoding steps and whole models


def test_a_decoding_step_and_its_baseline():
    where = Setting(64, 2, 2, 16, True)
    ours = token_step.own_step_row(Spec.parse("Local(8)"), where, 64, RATES, 0.002, True)
    full = token_step.full_step_row(where, 64, RATES, 0.002, True)
    for found in (ours, full):
        assert found["ms"] > 0 and found["pass"] == token_step.STEP and "reason" not in found
    assert full["state_bytes"] == 2 * 2 * 2 * 65 * 16 * 4
    refused = token_step.own_step_row(Spec.parse("bigbird(special='ends')"), where, 64, RATES, 0.002, True)
    assert "cannot do causal" in refused["reason"]


def test_bytes_of_a_state_are_those_of_its_tokens():
    layer = build_mixer(Spec.parse("softmax"), Setting(64, 2, 2, 16, True))
    _, state = layer.extend(layer.start(2), torch.randn(2, 20, 32))
    cache = 2 * 2 * 2 * 20 * 16 * 4
    assert token_step.held_bytes(state.memory) == cache < state.nbytes
    assert token_step.moved_bytes(state.memory) == cache
    linear = build_mixer(Spec.parse("linear"), Setting(64, 2, 2, 16, True))
    memory = linear.extend(linear.start(2), torch.randn(2, 20, 32))[1].memory
    assert token_step.moved_bytes(memory) == 2 * token_step.held_bytes(memory) == 2 * 2 * 2 * (16 * 16 + 16) * 4


def test_the_baseline_of_a_step_is_attention_over_its_cache():
    where = Setting(16, 2, 2, 16, True)
    layer = token_step.CachedSDPA(where, 16)
    x = torch.randn(2, 1, 32)
    with torch.no_grad():
        out = layer(x)
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in layer.qkv(x).chunk(3, -1))
        torch.testing.assert_close(layer.k[:, :, -1:], k)
        weights = (q @ layer.k.mT / 4).softmax(-1)
        torch.testing.assert_close(out, layer.out((weights @ layer.v).transpose(1, 2).flatten(2)))
        torch.testing.assert_close(layer.v[:, :, -1:], v)


def test_whole_models():
    request = whole_models.ModelRequest(
        specs("softmax", "fnet"), (32,), tokens=64, depth=1, width=32, heads=2, ffn=32, seconds=0.002
    )
    record = model_record(request, ignore, ignore)
    names = [(x["spec"], x["model"]) for x in record["rows"]]
    assert names == [("softmax", "encoder"), ("softmax", "decoder"), ("fnet", "encoder")]
    for found in record["rows"]:
        assert found["tokens_per_second"] == pytest.approx(64 / found["ms"] * 1e3)


def test_longer_sequences_of_a_slow_model_are_left_out(monkeypatch):
    """What one request found to be slow is left out of the next one; a slow pass is its own measurement."""
    passes = []
    monkeypatch.setattr("regard.bench.whole_models.SLOW_PASS", 0.02)
    monkeypatch.setattr("regard.bench.whole_models.LONG_PASS", 0.02)
    monkeypatch.setattr("regard.bench.whole_models.training_pass", lambda _, job, __: lambda: passes.append(job.n) or sleep(0.03))
    slow = {}
    short = whole_models.ModelRequest(specs("softmax"), (32, 64), ("encoder",), tokens=64, seconds=0.001)
    rows = list(whole_models.model_rows(short, whole_models.model_jobs(short), slow))
    assert passes == [32, 32]  # the first, and the one under the clock
    assert rows[0]["ms"] >= 30 and rows[1]["reason"].startswith("left out: 0.0 s a pass at n = 32")
    long = whole_models.ModelRequest(specs("softmax"), (128,), ("encoder",), tokens=64)
    assert "ms" not in next(whole_models.model_rows(long, whole_models.model_jobs(long), slow))
    assert passes == [32, 32]
    shorter = whole_models.ModelRequest(specs("softmax"), (16,), ("encoder",), tokens=64, seconds=0.001)
    assert "ms" in next(whole_models.model_rows(shorter, whole_models.model_jobs(shorter), slow))  # may well be fast


def test_known_models_are_not_measured_again(monkeypatch):
    passes = []
    monkeypatch.setattr("regard.bench.whole_models.training_pass", lambda _, job, __: lambda: passes.append(job.n))
    request = whole_models.ModelRequest(specs("softmax"), (32, 64), ("encoder",), tokens=64, seconds=0.001)
    known = [{"spec": "softmax", "model": "encoder", "compiled": False, "n": 64, "ms": 5.0}]
    known.append(known[0] | {"model": "decoder", "n": 32})  # of another model
    record = model_record(request, ignore, ignore, known=known)
    assert [row["n"] for row in record["rows"]] == [32, 64]
    assert record["rows"][1] == known[0] and set(passes) == {32}


def test_a_model_without_memory_is_a_row_with_a_reason(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("regard.bench.whole_models.training_pass", full)
    request = whole_models.ModelRequest(specs("softmax"), (32,), ("encoder",), tokens=64)
    (found,) = model_record(request, ignore, ignore)["rows"]
    assert found["reason"] == "out of memory"


# Records, the command, its tables and its picture


def test_a_record_says_how_it_was_made():
    saved, shown = [], []
    request = Request(specs("Local(8)"), (32,), passes=(FORWARD, token_step.STEP), peers=("SDPA",), step_batch=2, **SMALL)
    record = speed_record(request, lambda *x: shown.append(x), saved.append)
    assert saved[-1] == record
    assert shown[0][:2] == (0, 4) and shown[-1][:2] == (4, 4)
    assert [x["by"] for x in record["rows"]] == ["SDPA", OURS, "SDPA", OURS]
    assert {"regard", "torch", "device", "commit"} <= set(record["made_with"])
    assert record["settings"]["seed"] == 0 and record["settings"]["mixers"] == ["Local(8)"]
    assert record["peers"]["SDPA"].startswith("torch ")
    json.dumps(record)


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)


def test_the_command(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib, to draw")
    numbers, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    short = ["--tokens", "64", "--heads", "2", "--dim", "16", "--seconds", "0.002", "--device", "cpu"]
    short += ["--against", "SDPA"]
    done = invoke("--mixers", "Local(8); linear", "--lengths", "32,64", *short, "--json", str(numbers), "--out", str(picture))
    assert done.exit_code == 0, done.output
    assert "Local(8)" in done.output and "faster than SDPA over all pairs" in done.output and "Next:" in done.output
    record = json.loads(numbers.read_text())
    assert {x["n"] for x in record["rows"]} == {32, 64}
    assert picture.stat().st_size > 10_000
    assert not list(tmp_path.glob(".*part"))


def test_the_command_for_models():
    done = invoke("--model", "--mixers", "identity", "--lengths", "16", "--tokens", "16", "--seconds", "0.001", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "tokens a second" in done.output and "identity" in done.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mixers", "Lokal(8)"], "nothing is called"),
        (["--mixers", ";"], "--mixers names no mechanism"),
        (["--lengths", "4x"], "a length is a number of tokens"),
        (["--lengths", "0"], "a length is a number of tokens"),
        (["--lengths", ","], "--lengths names no length"),
        (["--dtype", "int8"], "dtype must be one of bf16, fp16, fp32, fp64, not 'int8'"),
        (["--form", "x"], "form must be one of"),
        (["--level", "x"], "level must be one of"),
        (["--passes", "x"], "passes must be one of"),
        (["--passes", ""], "--passes names no pass"),
        (["--against", "x"], "there is no peer"),
        (["--backend", "x"], "backend must be one of"),
        (["--device", "tpu"], "the device is auto, cpu or cuda"),
        (["--out", "x.bmp"], "cannot draw into"),
        (["--json", "/nowhere/x.json"], "there is no folder"),
        (["--compile"], "--compile is for whole models"),
        (["--model", "--out", "x.png"], "--out is not for whole models"),
        (["--model", "--no-graphs"], "--graphs is not for whole models"),
        (["--batch", "4"], "--batch is for decoding steps"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence):
    done = invoke(*words)
    assert done.exit_code == 2
    assert sentence in done.output.replace("\n", " ")


def test_lengths():
    assert [parsed_length(text) for text in ("512", "4k", " 1M ", "64K")] == [512, 4096, 1 << 20, 65536]


def test_the_picture_has_a_line_for_each_curve():
    pytest.importorskip("matplotlib")
    from regard.plots.speed_plot import speed_plot

    rows = [row("SDPA", n, n / 64, "softmax") for n in (64, 128)] + [row(OURS, n, 1.0, graph=0.5) for n in (64, 128)]
    rows += [row("local-attention", n, 3.0) for n in (64, 128)] + [row("FlexAttention", 64, None)]
    (axes,) = speed_plot(rows, "title").axes
    assert len(axes.lines) == 3
    assert list(axes.lines[1].get_ydata()) == [0.5, 0.5]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("os.replace", _full_disk)
    record = {"settings": SMALL, "made_with": {"device": "x"}, "rows": [row(OURS, 64, 1.0)]}
    with pytest.raises(ValueError, match="no space"):
        draw_record(record, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def _full_disk(*_):
    raise OSError(28, "no space")


def test_infinite_and_missing_times_have_no_ratio():
    assert summary.ratio(row(OURS, 64, None), row("SDPA", 64, 1.0)) is None
    assert not math.isnan(summary.crossing([(64, 2.0)]))
