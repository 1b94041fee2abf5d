"""The moving average of weights: its formula, what is validated and kept, and that a killed run goes on with it exactly."""

import signal

import pytest
import torch
from torch import nn

from regard.data.batch import Batch
from regard.training import checkpoints
from regard.training.checkpoints import load_checkpoint, put_weights, weights_of
from regard.training.fit import fit
from regard.training.learner import Learner
from regard.training.losses import Loss
from regard.training.metrics_log import read_metrics
from regard.training.moving_average import TRAINED_WEIGHT, MovingAverage
from small_task import Small, small
from test_faults import go_on, interrupted, remembered


class Normed(Small):
    """A model with means of a norm, and a count of its updates."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def loss(self, model, batch, step):  # noqa: ARG002
        scores = model(batch.source)
        return Loss(scores.square().sum(), torch.tensor(len(scores)), {"nll": scores.detach().sum()})


def test_it_is_its_formula_for_weights_and_buffers_and_the_model_keeps_its_own():
    torch.manual_seed(0)
    task = Normed(small())
    learner = Learner(task.model(), task.loss, small(ema=0.6, warmup=0), "cpu")
    learner.begin()
    mean = {name: x.clone().double() for name, x in weights_of(learner.model).items() if x.is_floating_point()}
    for step in range(1, 31):
        learner.update([Batch(torch.randn(8, 4), None, None)])
        keep = min(0.6, step / (9 + step))  # at the thirtieth it is 0.6
        for name, x in weights_of(learner.model).items():
            if name in mean:
                mean[name] = keep * mean[name] + (1 - keep) * x.double()
    own = {name: x.clone() for name, x in weights_of(learner.model).items()}
    with learner.evaluated():
        shown = {name: x.clone() for name, x in weights_of(learner.model).items()}
    for name, x in mean.items():
        torch.testing.assert_close(shown[name].double(), x, rtol=1e-5, atol=1e-6)
    assert (shown["0.weight"] - own["0.weight"]).abs().max() > 1e-3 and (shown["1.running_mean"] != own["1.running_mean"]).any()
    assert shown["1.num_batches_tracked"] == own["1.num_batches_tracked"] == 30
    assert all(torch.equal(x, own[name]) for name, x in weights_of(learner.model).items())


def test_the_models_own_weights_are_there_again_behind_an_error():
    model = nn.Linear(2, 2)
    average = MovingAverage(model, 0.9)
    nn.init.ones_(model.weight)
    with pytest.raises(RuntimeError, match="in between"), average.in_model():
        assert (model.weight != 1).all()
        raise RuntimeError("in between")
    assert (model.weight == 1).all()


def test_what_is_validated_and_kept_is_the_average(tmp_path):
    changes = {"ema": 0.95, "steps": 20, "average": 1}
    task = Small(small(**changes))
    fit(task, tmp_path, accelerator="cpu", quiet=True)
    last = load_checkpoint(checkpoints.at(tmp_path, 20))
    trained = {name: last.optimizer[f"{name}/{TRAINED_WEIGHT}"] for name in last.weights}
    lines = {line["step"]: line["val"]["accuracy"] for line in read_metrics(tmp_path / "metrics.jsonl") if "val" in line}
    model = task.model()
    scores = []
    for weights in (last.weights, trained):
        put_weights(model, weights, "here")
        scores.append(task.watch(model.eval())["accuracy"])
    assert scores[0] == lines[20] != scores[1]


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_a_run_that_is_killed_goes_on_exactly(tmp_path, precision):
    changes = {"ema": 0.9, "steps": 20, "dropout": 0.2, "precision": precision}
    fit(Small(small(**changes)), tmp_path / "whole", accelerator="cpu", quiet=True)
    interrupted(tmp_path / "parts", **changes)
    go_on(tmp_path / "parts", **changes)
    assert remembered(tmp_path / "parts") == remembered(tmp_path / "whole")


def test_a_finished_run_that_may_make_more_updates_goes_on_with_it(tmp_path):
    changes = {"ema": 0.9, "schedule": "inverse_sqrt"}
    fit(Small(small(steps=20, **changes)), tmp_path / "whole", accelerator="cpu", quiet=True)
    for steps in (10, 20):
        fit(Small(small(steps=steps, **changes)), tmp_path / "parts", accelerator="cpu", quiet=True)
    assert remembered(tmp_path / "parts") == remembered(tmp_path / "whole")


@pytest.mark.parametrize("put", [1, 2, 3])  # into the model for a validation, out of it, and in again
def test_control_c_while_weights_are_swapped_leaves_none_of_them_mixed(tmp_path, monkeypatch, put):
    changes = {"ema": 0.9, "steps": 20}
    fit(Small(small(**changes)), tmp_path / "whole", accelerator="cpu", quiet=True)
    plain, calls = MovingAverage._put, [0]

    def signalled(self, weights):
        calls[0] += 1
        half = {name: weights[name] if i < 3 else x for i, (name, x) in enumerate(self._trained.items())}
        plain(self, half)
        if calls[0] == put:
            signal.raise_signal(signal.SIGINT)
        plain(self, weights)

    monkeypatch.setattr(MovingAverage, "_put", signalled)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        fit(Small(small(**changes)), tmp_path / "parts", accelerator="cpu", quiet=True)
    signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    fit(Small(small(**changes)), tmp_path / "parts", accelerator="cpu", quiet=True)
    assert remembered(tmp_path / "parts") == remembered(tmp_path / "whole")


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_that_cannot_be_is_refused(tmp_path, decay):
    with pytest.raises(ValueError, match="ema must be from 0 to below 1"):
        fit(Small(small(ema=decay)), tmp_path / "run", accelerator="cpu", quiet=True)
