"""`regard advise`: parts of models, composed predictions, the words that follow from them, the command."""

import json
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from regard.bench import advice, step_time
from regard.bench.advice import (
    advice_record,
    attention_from,
    checked_models,
    measured_frame,
    measured_whole,
    predicted_total,
    share_row,
)
from regard.bench.advice_text import advice_lines, shares_of
from regard.bench.advised_model import AdviceRequest, factory_model, own_model, with_substitutes
from regard.bench.model_parts import ATTENTION, EMBEDDING, FEEDFORWARD, HEAD, kinds_of, part_call, recorded_parts, saved_bytes
from regard.bench.step_time import StepTime, deeper, least_time
from regard.bench.timing import launches
from regard.bench.whole_models import DECODER_MODEL, ModelRequest
from regard.cli import app
from regard.plots.share_plot import share_plot
from regard.spec import Spec

CPU = torch.device("cpu")
SMALL = {"tokens": 32, "depth": 5, "width": 16, "heads": 2, "ffn": 32, "seconds": 0.001}


def request(*mixers, lengths=(16,), **changes):
    specs = tuple(Spec.parse(text) for text in mixers or ("softmax", "linear"))
    return AdviceRequest(ModelRequest(mixers=specs, lengths=lengths, **SMALL), Spec("softmax"), **changes)


def counted(f, device, _budget):
    """A clock without noise: the operations of a call, which add up over the parts of a model."""
    f()
    return StepTime(0.0, float(launches(f, device)))


@pytest.fixture
def operations(monkeypatch):
    monkeypatch.setattr(advice, "step_time", counted)
    monkeypatch.setattr(advice, "times_in_turns", lambda fs, *more: [counted(f, *more) for f in fs])
    monkeypatch.setattr(advice, "real_time", lambda *args: counted(*args).total)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 16)

    def forward(self, x):
        y, _ = self.self_attn(x, x, x, need_weights=False)
        x = self.norm(x + y)
        return x + self.fc2(self.fc1(x).relu())


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.lm_head = nn.Linear(16, 256)

    def forward(self, x):
        x = self.wte(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@pytest.fixture
def foreign(monkeypatch):
    """The text of a factory in a module of its own."""
    module = ModuleType("their_models")
    module.make = Foreign
    module.broken = lambda: 3
    monkeypatch.setitem(sys.modules, "their_models", module)
    return "their_models:make"


# Clocks


def test_both_clocks_add_up_and_the_longer_one_counts():
    one, many = StepTime(3.0, 10.0), StepTime(7.0, 14.0)
    whole = deeper(one, many, 3, 12)  # a layer: 2 of the host, 2 of the device
    assert whole == StepTime(25.0, 32.0) and whole.total == 32.0 and not whole.host_bound
    assert deeper(one, many, 1, 1) == one
    slower_host = whole.plus(StepTime(1.0, 0.0), 12)
    assert slower_host.host_bound and slower_host.total == 37.0 and slower_host.of_bound(False) == 32.0
    assert StepTime(1.0, 1.0).plus(StepTime(2.0, 0.5), -1) == StepTime(0.0, 0.5)


def test_the_time_of_a_cpu_is_that_of_its_fastest_call():
    pauses = iter([0.03, 0.001, 0.03, *[0.03] * 100])
    from time import sleep

    assert 0.0005 < least_time(lambda: sleep(next(pauses)), 0.02) < 0.02


def test_calls_that_are_subtracted_take_turns_and_say_how_much_these_differ(monkeypatch):
    clock = {"one": iter([5.0, 3.0, 4.0]), "many": iter([9.0, 9.0, 8.0])}
    order = []
    monkeypatch.setattr(step_time, "real_time", lambda f, *_: order.append(f) or next(clock[f]))
    one, many = step_time.times_in_turns(["one", "many"], CPU, 0.3)
    assert order == ["one", "many"] * 3 and one == StepTime(0.0, 3.0, 1.0) and many == StepTime(0.0, 8.0, 1.0)
    assert many.minus(one).spread == pytest.approx(2**0.5) and one.plus(many, -3).spread == pytest.approx(10**0.5)


def test_the_host_is_timed_by_its_fastest_call(monkeypatch):
    times = iter([0.0, 3.0, 3.0, 4.0, 4.0, 9.0, 9.0, 11.0, 11.0, 13.0])
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: next(times))
    assert step_time.host_time(lambda: None, CPU) == 1.0


def test_one_call_that_makes_the_device_wait_puts_all_into_graphs(monkeypatch):
    monkeypatch.setattr(step_time, "warm_up", lambda *_: None)
    monkeypatch.setattr(step_time, "plain_time", lambda *_: 10.0)
    monkeypatch.setattr(step_time, "graph_time", lambda f, *_: {"short": 4.0, "long": 8.0}[f])
    monkeypatch.setattr(step_time, "host_time", lambda f, _: {"short": 9.0, "long": 2.0}[f])
    gpu = torch.device("cuda")
    assert step_time.times_in_turns(["short", "long"], gpu, 0.1) == [StepTime(9.0, 4.0), StepTime(2.0, 8.0)]
    assert step_time.times_in_turns(["long"], gpu, 0.1) == [StepTime(2.0, 10.0)]


def test_a_device_that_waits_for_its_host_is_timed_inside_a_graph(monkeypatch):
    gpu = torch.device("cuda")
    for name, value in {"warm_up": None, "plain_time": 10.0, "graph_time": 4.0}.items():
        monkeypatch.setattr(step_time, name, lambda *_, value=value: value)
    for host, device in ((2.0, 10.0), (9.0, 4.0)):
        monkeypatch.setattr(step_time, "host_time", lambda *_, host=host: host)
        assert step_time.step_time(lambda: None, gpu, 0.1) == StepTime(host, device)


# Parts


def test_parts_of_our_models_are_found_by_class():
    made = own_model(request(kind=DECODER_MODEL), Spec("softmax"), 16, 2)
    kinds = {name: kind for kind, name in kinds_of(made.model).values()}
    assert kinds == {
        "embed": EMBEDDING,
        "stack.blocks.0.mixer": ATTENTION,
        "stack.blocks.0.channel": FEEDFORWARD,
        "stack.blocks.1.mixer": ATTENTION,
        "stack.blocks.1.channel": FEEDFORWARD,
        "head": HEAD,
    }
    parts = recorded_parts(made.model, made.loss)
    counts = {part.kind: part.count for part in parts}
    assert counts == {EMBEDDING: 1, ATTENTION: 2, FEEDFORWARD: 2, HEAD: 1}
    attention = next(part for part in parts if part.kind == ATTENTION)
    assert attention.tokens.shape == (2, 16, 16) and attention.tokens.is_leaf


def test_parts_of_other_models_are_found_by_name(foreign):
    made = factory_model(request(factory=foreign), 16)
    parts = recorded_parts(made.model, made.loss)
    assert sorted((part.kind, part.count) for part in parts) == [
        (ATTENTION, 3),
        (EMBEDDING, 1),
        (FEEDFORWARD, 3),
        (FEEDFORWARD, 3),
        (HEAD, 1),
    ]
    plain = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"no attention was found .* --attention, one of Linear"):
        recorded_parts(plain, lambda: plain(torch.zeros(1, 4)))
    assert ATTENTION in {kind for kind, _ in kinds_of(plain, ("Linear",)).values()}


def test_a_part_alone_runs_backward():
    made = own_model(request(), Spec("softmax"), 16, 1)
    part = next(part for part in recorded_parts(made.model, made.loss) if part.kind == ATTENTION)
    both = launches(part_call(part.module, part.args, part.kwargs, request().precision, True), CPU)
    forward = launches(part_call(part.module, part.args, part.kwargs, request().precision, False), CPU)
    assert both > 1.5 * forward


def test_saved_bytes_are_those_of_the_graph():
    first, second = nn.Linear(8, 32), nn.Linear(32, 8)
    both = nn.Sequential(first, nn.ReLU(), second)
    x = torch.randn(10, 8)
    assert saved_bytes(lambda: both(x), both) == 4 * (10 * 8 + 10 * 32)  # the input, and the output of relu, used twice


# Predictions


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_composed_parts_predict_whole_models(kind):
    asked = request("softmax", "linear", "Local(4)", "linformer(rank=4)", kind=kind, batch=2)
    frame = measured_frame(asked, 16)
    for spec in asked.models.mixers:
        predicted = predicted_total(asked, frame, spec, 16).total
        measured = measured_whole(asked, spec, 16)
        assert predicted == pytest.approx(measured, rel=0.01), spec


def test_noise_of_slow_attention_is_not_in_the_prediction_of_a_fast_one(monkeypatch):
    """A hundred milliseconds of softmax, measured 10 % wrong, would be ten of a model that takes ten."""
    times = {("softmax", 1): 10.0, ("softmax", 3): 29.0, ("linear", 1): 2.0, ("linear", 3): 4.0}
    monkeypatch.setattr(advice, "own_model", lambda _, spec, _n, depth: (spec.name, depth))
    monkeypatch.setattr(advice, "_step_times", lambda _, *made: [StepTime(0.0, times[x]) for x in made])
    frame = advice.Frame(StepTime(0.0, 1e6), StepTime(0.0, 0.0), {}, {}, [], 0)
    assert predicted_total(request(), frame, Spec("linear"), 16) == StepTime(0.0, 6.0)  # 2, and four layers of 1
    assert predicted_total(request(), frame, Spec("softmax"), 16) == frame.whole


@pytest.mark.usefixtures("operations")
def test_other_models_are_predicted_and_checked_with_the_mechanism_inside(foreign):
    asked = request("linear", factory=foreign, optimiser=False)
    frame = measured_frame(asked, 16)
    predicted = predicted_total(asked, frame, Spec("linear"), 16).total
    assert predicted == pytest.approx(measured_whole(asked, Spec("linear"), 16), rel=0.05)
    made = factory_model(asked, 16)
    inside = with_substitutes(asked, made, recorded_parts(made.model, made.loss), Spec("linear"), 16).model
    assert [layer.self_attn.mixer.spec for layer in inside.layers] == ["linear"] * 3
    assert made.loss().isfinite()


@pytest.mark.usefixtures("operations")
def test_models_are_given_tokens_that_they_have_and_lengths_they_refuse_are_rows(foreign, monkeypatch):
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.segments, self.places = nn.Embedding(7, 16), nn.Embedding(2, 16), nn.Embedding(16, 16)
            self.layer = Layer()

        def forward(self, x):
            return self.layer(self.words(x) + self.segments(x * 0) + self.places(torch.arange(x.shape[1])))

    monkeypatch.setattr(sys.modules["their_models"], "make", Short)
    asked = request("linear", factory=foreign, lengths=(16, 32), checks=0)
    record = advice_record(asked, lambda *_: None, lambda _: None)
    assert "ms" in record["shares"][0] and "gain" in record["predictions"][0] and len(record["predictions"]) == 1
    assert "cannot be called with a tensor of shape (1, 32) (IndexError: index out of range" in record["shares"][1]["reason"]


def test_a_prediction_within_its_spread_is_none(monkeypatch):
    frame = measured_frame(request(), 16)
    monkeypatch.setattr(advice, "predicted_total", lambda *_: StepTime(0.0, 1.0, 1.0))
    assert "times differ too much" in advice._prediction(request(), frame, Spec("linear"), 16)["reason"]


@pytest.mark.usefixtures("operations")
def test_shares_add_up_to_the_step():
    row = share_row(measured_frame(request(), 16))
    assert sum(row["parts_ms"].values()) == pytest.approx(row["ms"])
    assert row["parts_ms"]["optimiser"] > 0 and row["parts_bytes"]["feed-forward"] == 5 * 2 * 16 * 4 * (16 + 32)
    assert sum(shares_of(row["parts_bytes"]).values()) == pytest.approx(1)


def test_attention_dominates_from_where_it_exceeds_the_others():
    rows = [{"n": n, "ms": 1.0, "parts_ms": {"attention": n / 1000, "feed-forward": 1.0, "rest": 1.0}} for n in (500, 1000, 4000)]
    found = attention_from(rows)
    assert found["largest"] == pytest.approx(1000) and found["half"] == pytest.approx(2000)
    assert attention_from(rows[:2]) == {"largest": None, "half": None}


# Words


def record_of(bound="device", gain=1.5, error=0.02):
    parts = {"attention": 6.0, "feed-forward": 3.0, "rest": 1.0}
    shares = [{"n": 4096, "batch": 8, "ms": 10.0, "bound": bound, "parts_ms": parts, "parts_bytes": parts}]
    predictions = [{"spec": "linear", "n": 4096, "ms": 10 / gain, "gain": gain}, {"spec": "gat", "n": 4096, "reason": "no"}]
    checks = [{"spec": "linear", "n": 4096, "predicted_ms": 1.0, "measured_ms": 1.0, "error": error}]
    found = {"shares": shares, "predictions": predictions, "checks": checks, "error": abs(error)}
    settings = {"model": {"depth": 2, "width": 8, "dtype": "fp32"}, "factory": "", "base": "softmax"}
    return found | {"attention_from": {"half": 4096.0}, "settings": settings, "made_with": {"device": "a machine"}}


def test_words_follow_the_numbers():
    text = " ".join(advice_lines(record_of()))
    assert "attention takes 60 % of a step of 10 ms. Faster end to end, by prediction: linear 1.50 x." in text
    assert "at every length" in text and "linear at 4,096: +2.0 %" in text
    assert "None at n" not in text and "None at n = 4,096" in " ".join(
        advice_lines(record_of() | {"checks": [{"spec": "linear", "n": 8, "error": 0.1}]})
    )
    unsure = record_of()
    unsure["predictions"][0]["spread_ms"] = 5.0
    assert "no mechanism makes it" in " ".join(advice_lines(unsure))
    assert "the host limits it" in " ".join(advice_lines(record_of(bound="host")))
    assert "no mechanism makes it more than 10 % faster" in " ".join(advice_lines(record_of(gain=1.05)))
    assert "no mechanism makes it more than 80 % faster" in " ".join(advice_lines(record_of(gain=1.5, error=-0.8)))


def test_the_picture_has_a_bar_for_every_part_and_length(tmp_path):
    figure = share_plot(record_of())
    assert [len(axes.patches) for axes in figure.axes] == [3, 3]
    figure.savefig(tmp_path / "shares.png")


# The command


def run(*args):
    return CliRunner().invoke(app, ["advise", *args])


@pytest.mark.usefixtures("operations")  # times that are counted: those of a busy machine differ too much
def test_the_command_measures_writes_and_explains(tmp_path):
    sizes = ["--width", "16", "--heads", "2", "--depth", "2", "--tokens", "32", "--seconds", "0.001", "--device", "cpu"]
    path = tmp_path / "advice.json"
    done = run(*sizes, "--mixers", "linear; Local(4)", "--lengths", "8,16", "--json", str(path), "--checks", "1")
    assert done.exit_code == 0, done.output
    record = json.loads(path.read_text())
    assert [row["n"] for row in record["shares"]] == [8, 16] and len(record["predictions"]) == 4 and len(record["checks"]) == 1
    assert record["error"] == abs(record["checks"][0]["error"])
    assert "share of one step" in done.output and "Predictions against whole models" in done.output


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "regard.plots.share_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.setattr("regard.cli.advise_command._advice", lambda *_: pytest.fail("it was measured"))
    done = run("--device", "cpu", "--out", str(tmp_path / "shares.png"))
    assert done.exit_code == 2 and "pip install 'regard[draw]'" in done.output


@pytest.mark.usefixtures("operations")
def test_a_mechanism_that_is_refused_has_a_reason():
    record = advice_record(request("fnet", kind=DECODER_MODEL, checks=0), lambda *_: None, lambda _: None)
    assert "causal" in record["predictions"][0]["reason"] and record["error"] is None


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "nothing"], "package.module:factory"),
        (["--model", "no_such_module_here:f"], "cannot import"),
        (["--model", "their_models:missing"], "has no function"),
        (["--model", "their_models:broken"], "return a torch.nn.Module"),
        (["--model", "their_models:make", "--depth", "3"], "--depth is for a model of regard"),
        (["--attention", "Foo"], "--attention is for a model of your own"),
        (["--mixer", "softmx"], "softmax"),
    ],
)
def test_mistakes_end_in_a_sentence(args, words):
    done = run(*args, "--device", "cpu", "--lengths", "16", "--tokens", "16")
    assert done.exit_code == 2 and words in done.output


def test_the_longest_and_the_shortest_length_are_checked_first():
    ms = {"softmax": (2.0, 5.0, 9.0), "linear": (3.0, 4.0, 4.5), "fnet": (1.0, 4.2, 4.4)}
    rows = [{"spec": spec, "n": n, "ms": t} for spec, own in ms.items() for n, t in zip((16, 64, 256), own, strict=True)]
    rows.append({"spec": "relu", "n": 256, "reason": "out of memory"})
    found = checked_models(request(checks=99), rows)
    assert [(str(spec), n) for spec, n in found[:5]] == [
        ("fnet", 256),
        ("fnet", 16),
        ("linear", 64),
        ("softmax", 256),
        ("softmax", 16),
    ]
    assert len(set(found)) == len(found) and checked_models(request(checks=2), rows) == found[:2]
    assert checked_models(request(checks=2), []) == []
