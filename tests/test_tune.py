"""`regard tune`: checks of candidates, the choice among them, runs, and the command. Tables: see test_tuned_table.py."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from typer.testing import CliRunner

from conftest import DEVICE
from regard.bench import tune_workloads
from regard.bench.tune import CudaLab, Trial, TuneRequest, TuneRun, choose_trial, relative_error, table_writer, tune_kernel
from regard.bench.tune_compile import compile_candidate, compile_jobs, run_short
from regard.bench.tune_trials import trials_record
from regard.bench.tune_workloads import TUNE_CASES, TuneCase, TunePass, TuneShape
from regard.cli import app, tune_command
from regard.cli.tune_command import print_tuned, table_path
from regard.ops import triton_support
from regard.ops.triton_support import has_triton, kernel_config, read_tables_again, trial_configs
from regard.ops.tuned_table import (
    DEFAULT_CARD,
    OWN_TABLE,
    TUNED,
    find_config,
)
from test_tuned_table import CPU, ENTRY, GOOD, SHIPPED

pytestmark = pytest.mark.usefixtures("shipped_tables")
SMALL = TuneShape(16, "fp32", "cpu", tokens=16, length=16, heads=1)


# The choice


def trial(number, *seconds, problem=""):
    return Trial({ENTRY: {"BM": number}}, seconds, problem)


def test_the_fastest_is_taken_beyond_two_percent():
    current = trial(0, 1.0)
    assert choose_trial(current, []) is current
    assert choose_trial(current, [trial(1, 0.985)]) is current
    best = trial(2, 0.9)
    assert choose_trial(current, [trial(1, 0.95), best, trial(3, 0.97)]) is best
    assert choose_trial(current, [trial(1, 1.5)]) is current


def test_a_wrong_candidate_is_never_taken():
    current, wrong = trial(0, 1.0), trial(1, 0.1, problem="results differ")
    assert choose_trial(current, [wrong]) is current
    right = trial(2, 0.9)
    assert choose_trial(current, [wrong, right]) is right
    broken = trial(0, problem="results differ")
    slow = trial(3, 5.0)
    assert choose_trial(broken, [wrong, slow, trial(4, 6.0)]) is slow
    assert choose_trial(broken, [wrong]) is broken


def test_all_passes_count_alike():
    current = trial(0, 1.0, 100.0)
    assert choose_trial(current, [trial(1, 2.0, 90.0)]) is current
    assert choose_trial(current, [best := trial(2, 0.5, 101.0)]) is best
    assert current.slower_than(trial(1, 0.5, 50.0)) == pytest.approx(2)


class FakeLab:
    """Times by BM: a list, one for every measurement, its last for all others; a text is a problem."""

    def __init__(self, times, entries=(ENTRY,)):
        self.times = {number: list(each) if isinstance(each, list) else [each] for number, each in times.items()}
        self.entries, self.kept, self.tried = entries, {}, []
        self.shipped = {"BM": 64, "BN": 32}

    def settings(self, kernel):
        return {entry: self.kept.get(entry, {"BM": 64, "BN": 32}) for entry in self.entries if entry[0] == kernel}

    def default(self, kernel):
        return {entry: dict(self.shipped) for entry in self.entries if entry[0] == kernel}

    def attempt(self, settings):
        number = next(iter(settings.values()))["BM"]
        self.tried.append(number)
        found = self.times[number].pop(0) if len(self.times[number]) > 1 else self.times[number][0]
        return Trial(settings, problem=found) if isinstance(found, str) else Trial(settings, (found,))

    def keep(self, settings):
        self.kept |= settings


CANDIDATES = ({"BM": 16}, {"BM": 64}, {"BM": 128})


def always():
    return True


def test_a_better_candidate_is_measured_twice_and_kept():
    lab = FakeLab({64: 1.0, 16: 1.1, 128: 0.8})
    found = tune_kernel(lab, "tile_forward", CANDIDATES, always)
    assert lab.tried == [64, 16, 128, 64, 128]
    assert found.after.settings == {ENTRY: {"BM": 128, "BN": 32}} == lab.kept
    assert found.changed and found.refused == ()
    lucky = FakeLab({64: 1.0, 16: 1.1, 128: [0.8, 1.0]})
    found = tune_kernel(lucky, "tile_forward", CANDIDATES, always)
    assert not found.changed and lucky.kept == {ENTRY: {"BM": 64, "BN": 32}}


def test_refused_candidates_are_listed_and_time_ends_a_search():
    lab = FakeLab({64: 1.0, 16: "results differ", 128: 0.5})
    found = tune_kernel(lab, "tile_forward", CANDIDATES, always)
    assert [each.problem for each in found.refused] == ["results differ"]
    assert found.after.settings[ENTRY]["BM"] == 128
    left = [True, False]
    stopped = tune_kernel(FakeLab({64: 1.0, 16: 0.5, 128: 0.1}), "tile_forward", CANDIDATES, lambda: left.pop(0))
    assert stopped.after.settings[ENTRY]["BM"] == 16


def test_the_default_is_a_candidate_too():
    lab = FakeLab({64: "results differ", 32: 1.0, 16: "results differ", 128: "out of resource"})
    lab.shipped["BM"] = 32
    assert tune_kernel(lab, "tile_forward", CANDIDATES, always).after.settings[ENTRY]["BM"] == 32


# Candidates on a device


def fake_case(answer):
    """A case whose result is a function of the configuration."""

    def forward():
        return [torch.ones(1), answer(kernel_config(*ENTRY, CPU)["BM"])]

    return TuneCase("tile", "fake", {"tile_forward": CANDIDATES}, lambda _shape: [TunePass(forward)])


def fake_lab(answer, monkeypatch):
    monkeypatch.setattr(CudaLab, "_time", lambda _self, f: float(f()[0].sum() * 0 + kernel_config(*ENTRY, CPU)["BM"]))
    return CudaLab(fake_case(answer), SMALL)


def test_candidates_are_compared_with_the_default(monkeypatch):
    default = find_config(SHIPPED, DEFAULT_CARD, *ENTRY)["BM"]
    calls = iter(range(1000))

    def answer(number):
        if number == 1:
            raise RuntimeError("out of resource: shared memory\nmore")
        wrong = {2: 1e-2, 3: 1e-6, 4: float("nan")}.get(number, 0.0)
        again = 1e-7 * next(calls) if number == 5 else 0.0
        return torch.ones(3, dtype=torch.float64) + wrong + again

    lab = fake_lab(answer, monkeypatch)
    assert lab.settings("tile_forward").keys() == {ENTRY} and lab.settings("delta") == {}
    assert torch.equal(lab.expected[1], answer(default))

    def found(number):
        return lab.attempt({ENTRY: {**GOOD, "BM": number}})

    assert found(1).problem == "RuntimeError: out of resource: shared memory"
    assert found(2).problem == "results differ from those of the default by 1.0e-02"
    assert found(3).problem == "" and found(3).seconds == (3.0,)
    assert found(4).problem == "results differ from those of the default by nan"
    assert found(5).problem == "results differ from call to call"
    assert found(2).seconds == found(5).seconds == ()


def test_the_result_to_compare_with_is_that_of_the_default_not_of_the_card(tmp_path, monkeypatch):
    table_writer(tmp_path / "own.json", "interpreter")({ENTRY: {**GOOD, "BM": 7}})
    monkeypatch.setenv(OWN_TABLE, str(tmp_path / "own.json"))
    read_tables_again()
    lab = fake_lab(lambda number: torch.ones(3) * (2 if number == 7 else 1), monkeypatch)
    assert lab.settings("tile_forward")[ENTRY]["BM"] == 7
    found = tune_kernel(lab, "tile_forward", CANDIDATES, always)
    assert found.before.problem and found.after.settings[ENTRY]["BM"] == 16


def test_kept_configurations_stay_while_others_are_tried(monkeypatch):
    lab = fake_lab(lambda _number: torch.ones(3), monkeypatch)
    lab.keep({ENTRY: {**GOOD, "BM": 32}})
    assert lab.settings("tile_forward")[ENTRY]["BM"] == 32
    assert lab.attempt({}).seconds == ()
    with trial_configs({}) as seen:
        lab.attempt({("delta", "half"): {"chunk": 32}})
    assert seen.used == {}  # the inner trial counts


def test_errors_are_relative_and_not_a_number_is_none():
    assert relative_error(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])) == pytest.approx(0.02, rel=1e-4)
    assert not relative_error(torch.tensor([torch.nan]), torch.ones(1)) <= 1
    assert not relative_error(torch.tensor([torch.inf]), torch.ones(1)) <= 1
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


@pytest.mark.skipif(not has_triton() or DEVICE.type == "cuda", reason="needs the package triton, in its interpreter")
@pytest.mark.parametrize("number", range(len(TUNE_CASES)), ids=lambda i: f"{TUNE_CASES[i].family}, {TUNE_CASES[i].name}")
def test_workloads_use_the_kernels_that_they_tune(number, monkeypatch):
    monkeypatch.setattr(tune_workloads, "STEP_BATCHES", (1,))
    shapes = {"linear": (SMALL, replace(SMALL, width=128)), "few": (replace(SMALL, dtype="fp16"),)}
    shapes = shapes.get(TUNE_CASES[number].family, (SMALL,))
    used = {kernel for shape in shapes for kernel, _ in run_short(number, shape)[1]}
    assert set(TUNE_CASES[number].candidates) <= used


def test_candidates_are_compiled_on_short_sequences(monkeypatch):
    seen = []
    case = fake_case(lambda number: seen.append(number) or torch.ones(1))
    monkeypatch.setattr("regard.bench.tune_compile.TUNE_CASES", (case,))
    jobs = compile_jobs(case, SMALL, "tile_forward")
    assert [job.changes for job in jobs] == list(CANDIDATES)
    compile_candidate(jobs[2])
    assert seen[-1] == 128
    compile_candidate(jobs[0]._replace(case=5))  # fails, which the measurement reports


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: REGARD_DEVICE=cuda")
@pytest.mark.parametrize("case", TUNE_CASES, ids=lambda case: f"{case.family}, {case.name}")
def test_kernels_are_timed_on_a_device(case):
    lab = CudaLab(case, replace(TuneShape(), tokens=1024, length=512))
    for kernel in case.candidates:
        found = lab.attempt(lab.settings(kernel))
        assert found.problem == "" and all(0 < seconds < 1 for seconds in found.seconds) and found.seconds


# Runs


def run_of(times, monkeypatch, *, widths=(64,), minutes=1.0, clock=lambda: 0.0, entries=(ENTRY,), fails=False, record=len):
    monkeypatch.setattr("regard.bench.tune.TUNE_CASES", (fake_case(torch.ones),))
    saved, reports = [], []

    def make(_case, _shape):
        if fails:
            raise RuntimeError("out of resource\nmore")
        return FakeLab(times, entries)

    request = TuneRequest(("tile",), widths, minutes=minutes)
    run = TuneRun(request, saved.append, lambda *x: reports.append(x), make, clock, record)
    return run.rows(), saved, reports


def test_a_run_saves_what_is_better(monkeypatch):
    rows, saved, reports = run_of({64: 1.0, 16: 0.9, 128: 0.8}, monkeypatch)
    assert saved == [{ENTRY: {"BM": 128, "BN": 32}}]
    assert [row.planned.what for row in rows] == ["tile, fake, 64"]
    assert reports[0] == (0, 3, "tile, fake, 64: tile_forward") and reports[-1][:2] == (3, 3)
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)
    rows, saved, _ = run_of({64: 1.0, 16: 0.99, 128: 1.2}, monkeypatch)
    assert saved == [] and not rows[0].tuned.changed


def test_an_entry_is_tuned_once(monkeypatch):
    rows, saved, reports = run_of({64: 1.0, 16: 0.9, 128: 0.8}, monkeypatch, widths=(64, 128))
    assert len(saved) == 1 and rows[1].tuned is None
    assert rows[1].note == "tuned before: this head size has the same entry"
    assert reports[-1][:2] == (6, 6)


def test_a_run_leaves_out_what_it_cannot_do(monkeypatch):
    rows, saved, reports = run_of({}, monkeypatch, fails=True)
    assert rows[0].note == "the default configuration fails: out of resource" and saved == []
    assert reports == [(3, 3, "")]
    rows, _, _ = run_of({}, monkeypatch, entries=())
    assert rows[0].note == "not used at this size and type"
    times = iter((0.0, 61.0))
    rows, _, _ = run_of({}, monkeypatch, clock=lambda: next(times))
    assert rows[0].note == "no time left"


def test_the_record_has_what_was_tried(monkeypatch):
    """What is recorded of a candidate that was measured twice is the second measurement."""
    seen = []

    def record(rows):
        seen.append(trials_record(rows))

    run_of({64: [1.0, 2.0], 16: "results differ", 128: [0.8, 1.6]}, monkeypatch, record=record, widths=(64, 128))
    assert len(seen) == 3 and len(seen[0]["rows"]) == 1  # after every kernel, and at the end
    (row,) = seen[-1]["rows"]
    assert row == {
        **{"family": "tile", "case": "fake", "width": 64, "kernel": "tile_forward", "keys": ["half 64"]},
        **{"candidates": 3, "tried": 2, "ratio": 2.0 / 1.6, "taken": True},
        "refused": [{"configuration": {"half 64": {"BM": 16, "BN": 32}}, "reason": "results differ"}],
        "before": {"configuration": {"half 64": {"BM": 64, "BN": 32}}, "seconds": [2.0]},
        "best": {"configuration": {"half 64": {"BM": 128, "BN": 32}}, "seconds": [1.6]},
    }
    (left,) = seen[-1]["left_out"]
    assert left["width"] == 128 and left["reason"] == "tuned before: this head size has the same entry"


def test_the_record_has_the_best_that_is_not_taken(monkeypatch):
    records = []
    run_of({64: 1.0, 16: 1.25, 128: 0.99}, monkeypatch, record=lambda rows: records.append(trials_record(rows)))
    (row,) = records[-1]["rows"]
    assert row["best"]["seconds"] == [0.99] and row["ratio"] == pytest.approx(1 / 0.99) and not row["taken"]
    run_of({64: 1.0, 16: "a", 128: "b"}, monkeypatch, record=lambda rows: records.append(trials_record(rows)))
    (row,) = records[-1]["rows"]
    assert row["best"] is row["ratio"] is None and [each["reason"] for each in row["refused"]] == ["a", "b"]
    times = iter((0.0, 61.0))
    run_of({}, monkeypatch, record=lambda rows: records.append(trials_record(rows)), clock=lambda: next(times))
    assert records[-1]["rows"] == [] and records[-1]["left_out"][0]["reason"] == "no time left"


# The command


def invoke(*words, code=2):
    result = CliRunner().invoke(app, ["tune", *words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a CUDA device")
def test_without_a_device_the_command_refuses():
    assert "there is none here: --dry lists what it would try" in invoke()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--kernels", "tile,tiles"), "kernels must be one of tile, linear, delta, bucket, pair, step, few, sort, not 'tiles'"),
        (("--kernels", " , "), "--kernels names nothing: write for example --kernels tile,linear"),
        (("--width", "63"), "width must be one of 16, 32, 64, 128, 256, not '63'"),
        (("--dtype", "fp64"), "dtype must be one of bf16, fp16, fp32, not 'fp64'"),
        (("--processes", "2"), "leave out one of --dry and --processes"),
        (("--trials", "x.json"), "leave out one of --dry and --trials"),
        (("--cases", " ; "), "--cases names nothing: write for example --cases 'bands; prefix sums'"),
        (
            ("--kernels", "tile,delta", "--cases", "bands; prefix"),
            "no case of tile, delta has 'prefix' in its name; cases are bands; lists of tiles; delta rule; vectors of length 1",
        ),
    ],
)
def test_wrong_options_are_refused(words, sentence):
    assert sentence in " ".join(invoke("--dry", *words).split())


def test_dry_lists_what_would_be_tried(tmp_path):
    out = invoke("--dry", "--kernels", "step,tile", "--width", "64,128", "--out", str(tmp_path / "x"), code=0)
    assert "window_step" in out and "BM 32 64 128 256 512, num_warps 4 8 16" in out
    assert "tile, bands, 128" in out and "linear_sums" not in out
    request = TuneRequest(("tile", "step"), (64, 128))
    count = sum(len(planned.candidates) for planned in request.plan())
    assert f"{count} candidates of 26 kernels, bf16, 30 minutes at most" in out
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("no order, random", {"no order, random features"}),
        ("no order", {"no order"}),  # a whole name, which another one begins with
        ("random features; prefix ;", {"random features", "prefix sums"}),
        ("order; causal", {"no order", "no order, random features", "causal random features"}),
    ],
)
def test_some_cases_are_tuned_alone(words, names):
    out = invoke("--dry", "--kernels", "linear", "--cases", words, code=0)
    chosen = [case for case in TUNE_CASES if case.family == "linear" and case.name in names]
    request = TuneRequest(("linear",), cases=tuple(word.strip() for word in words.split(";") if word.strip()))
    assert request.chosen() == chosen and len(chosen) == len(names)
    assert f"of {sum(len(case.candidates) for case in chosen)} kernels" in out


def test_the_table_is_the_given_one_the_named_one_or_the_shipped_one(tmp_path, monkeypatch):
    assert table_path(None) == TUNED
    monkeypatch.setenv(OWN_TABLE, "own.json")
    assert table_path(None) == Path("own.json")
    assert table_path(tmp_path) == tmp_path


@pytest.fixture
def card(monkeypatch):
    """A card whose times are known."""
    lab = FakeLab({64: 1e-3, 16: 5e-4, 128: 9e-4})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "A card")
    monkeypatch.setattr("regard.cli.tune_command._check_device", lambda: None)
    monkeypatch.setattr(triton_support, "card_name", lambda _device: "A card")
    monkeypatch.setattr("regard.bench.tune.TUNE_CASES", (fake_case(torch.ones),))
    monkeypatch.setattr("regard.bench.tune.CudaLab.__new__", lambda *_: lab)
    return lab


@pytest.mark.usefixtures("card")
def test_the_command_writes_a_table(tmp_path):
    out = tmp_path / "own.json"
    text = " ".join(invoke("--kernels", "tile", "--out", str(out), "--processes", "0", code=0).split())
    assert json.loads(out.read_text()) == {"A card": {"tile_forward": {"half 64": {"BM": 16, "BN": 32}}}}
    assert "1000.0 500.0 2.00 BM 16, BN 32" in text
    assert f"1 kernels have new configurations in {out}. Next: REGARD_TUNED={out} makes regard read it" in text


@pytest.mark.usefixtures("card")
def test_the_command_writes_what_it_tried(tmp_path):
    out, trials = tmp_path / "own.json", tmp_path / "trials.json"
    invoke("--kernels", "tile", "--out", str(out), "--trials", str(trials), "--processes", "0", code=0)
    record = json.loads(trials.read_text())
    assert record["benchmark"] == "tune" and record["settings"]["families"] == ["tile"]
    assert record["made_with"]["device"] == "A card"
    (row,) = record["rows"]
    assert (row["tried"], row["ratio"], row["taken"]) == (2, pytest.approx(2), True)
    assert set(tmp_path.iterdir()) == {out, trials}


@pytest.mark.usefixtures("card")
def test_trials_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path, card):
    out = str(tmp_path / "own.json")
    assert "there is no folder" in invoke("--out", out, "--trials", str(tmp_path / "no" / "x.json"))
    assert "it is a folder" in invoke("--out", out, "--trials", str(tmp_path))
    assert "are the same file" in invoke("--out", out, "--trials", out)
    assert card.tried == []


@pytest.mark.usefixtures("card")
def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, card, monkeypatch):
    assert "there is no folder" in invoke("--out", str(tmp_path / "no" / "x.json"))
    assert "it is a folder" in invoke("--out", str(tmp_path))
    (tmp_path / "bad.json").write_text('{"card": {"tile_forward": {"any": {"BM": 0, "BN": 1}}}}')
    assert "'card' / 'tile_forward' / 'any' has BM = 0" in " ".join(invoke("--out", str(tmp_path / "bad.json")).split())
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused = " ".join(invoke("--out", str(tmp_path / "x.json")).split())
    assert "its folder is read-only; write another file by --out FILE, and set REGARD_TUNED=FILE to use it" in refused
    monkeypatch.setenv(OWN_TABLE, str(tmp_path / "bad.json"))
    assert "has BM = 0" in " ".join(invoke("--dry").split())
    assert card.tried == []


def test_rows_without_a_result_print_their_reason(monkeypatch, capsys):
    rows, _, _ = run_of({}, monkeypatch, fails=True)
    print_tuned(rows, TUNED)
    out = " ".join(capsys.readouterr().out.split())
    assert "the default configuration fails: out of resource" in out
    assert "Nothing is faster by 2 %: the table stays as it is." in out


def test_candidates_with_wrong_results_are_printed(monkeypatch, capsys):
    rows, _, _ = run_of({64: 1.0, 16: "results differ from call to call", 128: "RuntimeError: x"}, monkeypatch)
    print_tuned(rows, TUNED)
    out = capsys.readouterr().out
    assert "tile_forward, BM 16, BN 32: results differ from call to call" in out
    assert "RuntimeError" not in out


def test_help_needs_no_torch():
    code = "import sys; from typer.testing import CliRunner; from regard.cli import app; "
    code += "print(CliRunner().invoke(app, ['tune', '--help']).output); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "--minutes" in done.stdout


def test_help_names_every_family_of_kernels():
    parameter = inspect.signature(tune_command.tune).parameters["kernels"]
    (option,) = get_type_hints(tune_command.tune, include_extras=True)["kernels"].__metadata__
    assert parameter.default == ",".join(tune_command.KERNEL_FAMILIES)
    assert all(name in option.help for name in tune_command.KERNEL_FAMILIES)
