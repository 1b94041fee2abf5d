"""Captured passes do what passes do."""

from contextlib import nullcontext

import pytest
import torch

from regard.data.batch import Batch, padded
from regard.models.build import translator
from regard.tasks.translation import _small
from regard.training import learner
from regard.training.fit import fit
from regard.training.graphs import Graphs, _shape
from regard.training.modes import teacher_forcing
from small_task import Small, small

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device: run `make test-gpu` on one"
)


def batches(device):
    dice = torch.Generator().manual_seed(1)
    for _ in range(9):
        rows = [torch.randint(5, 30, (int(n),), generator=dice).tolist() for n in torch.randint(3, 16, (6,), generator=dice)]
        source, valid = padded(rows, multiple=8)
        yield Batch(source, valid, source.flip(1).contiguous(), valid).to(device)


def trained(graphs, *, dropout=0.0, mixer="softmax"):
    """Weights after a few updates, by captured passes or by plain ones."""
    torch.manual_seed(3)
    config = _small("reverse", "words").replace({"dropout": dropout, "mixer": mixer})
    model = translator(config, 30).cuda()
    wanted = list(model.parameters())
    optimizer = torch.optim.SGD(wanted, 0.1)

    def loss(batch):
        return teacher_forcing(model, batch, behind=True)

    passes, losses = Graphs(loss, wanted, 10.0), []
    with passes.on_stream():
        for batch in batches("cuda"):
            found = passes(batch) if graphs else passes._run(batch)
            losses.append(found.total)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not graphs)
    return torch.stack(losses), [p.detach().clone() for p in wanted], passes


@needs_cuda
@pytest.mark.parametrize("mixer", ["softmax", "linear", "Local(4)"])
def test_captured_passes_train_as_plain_ones_do(mixer):
    fast, slow = trained(True, mixer=mixer), trained(False, mixer=mixer)
    assert len(fast[2].known) >= 1
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(fast[1], slow[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_cuda
def test_dropout_falls_anew_in_every_replay():
    _, _, passes = trained(True, dropout=0.5)
    batch = next(iter(batches("cuda")))
    with passes.on_stream():
        found = torch.stack([passes(batch).total for _ in range(4)])
    assert len(found.unique()) == 4


def test_batches_of_one_shape_are_known_by_it():
    first, second, *_ = batches("cpu")
    assert _shape(first) == _shape(first._replace(source=first.source + 1))
    assert _shape(first) != _shape(first._replace(source_valid=None))
    assert _shape(first) != _shape(first._replace(source=first.source[:, :1]))
    assert second.source.shape[1] % 8 == 0 and second.source_valid is not None


class Plain(Graphs):
    """On a CPU, where nothing can be captured: the same passes, one kernel after another."""

    def __init__(self, forward, wanted, unit):
        self.forward, self.wanted, self.unit = forward, wanted, unit

    def on_stream(self):
        return nullcontext()

    def __call__(self, batch):
        return self._run(batch)


@pytest.mark.parametrize("passes", [1, 3])
def test_an_update_of_captured_passes_is_the_update(monkeypatch, passes):
    monkeypatch.setattr(learner, "Graphs", Plain)
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        task = Small(small(graphs=graphs, dropout=0.0))
        made = learner.Learner(task.model().double(), task.loss, task.config, "cpu")
        made.configure_optimizers()
        rows = task.splits["train"]
        for update in range(5):
            first = 30 * update
            made.training_step([task.batch(rows[first + 10 * i : first + 10 * i + 4 + i]) for i in range(passes)], update)
        found.append((made.measured(lambda: ""), [p.detach() for p in made.model.parameters()]))
    (plain, slow), (captured, fast) = found
    assert captured == pytest.approx(plain, rel=1e-9) and made.step == 5
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_graphs_are_refused_where_they_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="changes from update to update"):
        fit(Small(small(graphs=True)), tmp_path, accelerator="cpu", quiet=True)
    task = Small(small(graphs=True))
    task.steady = True
    with pytest.raises(ValueError, match="is for a CUDA device, but this run is on the cpu"):
        fit(task, tmp_path, accelerator="cpu", quiet=True)
