"""Training steps captured in a CUDA graph compute what plain steps compute."""

from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.data.batch import Batch, padded
from regard.models.build import translator
from regard.models.nat import nat_translator
from regard.runtime.cuda_graph import ExternalReads, capture_graph
from regard.tasks.translation_config import _small
from regard.training import learner
from regard.training.decoder_modes import teacher_forcing
from regard.training.fit import fit
from regard.training.graphed_step import GraphedStep, _batch_shape
from regard.training.nat_loss import glancing
from regard.training.nat_loss import nat_loss as loss_at_once
from small_task import Small, small

AT_ONCE = ["ctc", "length", "length(copy='uniform')", "length(copy='none')", "masked"]

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

    passes, losses = GraphedStep(loss, wanted, 10.0), []
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
def test_what_a_captured_pass_reads_stays_where_it_was_when_the_model_replaces_it():
    """A longer batch makes a longer table of positions; the memory of the old one is then given to others."""
    torch.manual_seed(3)
    model = translator(_small("reverse", "words"), 30).cuda()
    passes = GraphedStep(lambda batch: teacher_forcing(model, batch, behind=True), list(model.parameters()), 10.0)
    short, long = (Batch(x, None, x, None).to("cuda") for x in (torch.full((6, 8), 7), torch.full((6, 200), 7)))
    with passes.on_stream():
        before = [passes(short).total for _ in range(3)]
        passes(long)
        rubbish = [torch.full((n,), torch.nan, device="cuda") for n in (512, 2048, 8192, 32768) for _ in range(64)]
        after = passes(short).total
    assert len(passes.known) == 1 and len(rubbish) == 256
    torch.testing.assert_close(after, before[-1], rtol=1e-5, atol=1e-5)


def test_memory_that_a_pass_reads_and_does_not_make_is_noted():
    model = translator(_small("reverse", "words"), 30)
    x = torch.full((2, 8), 7)
    with ExternalReads() as outside:
        loss = teacher_forcing(model, Batch(x, None, x, None), behind=True).total
        loss.backward()
    table = model.embed.positions._kept[1]
    known = {y.untyped_storage().data_ptr() for y in (x, *model.parameters())}
    assert known <= outside.read.keys()
    assert table.untyped_storage().data_ptr() in outside.made | outside.read.keys()
    with ExternalReads() as again:
        teacher_forcing(model, Batch(x, None, x, None), behind=True).total.backward()
    assert table.untyped_storage().data_ptr() in again.read and loss.untyped_storage().data_ptr() not in again.read
    assert len(again.read) < 2 * len(known) + 5  # weights and gradients, and hardly more


def test_a_capture_is_warmed_up_twice_and_keeps_what_it_reads(monkeypatch):
    for name in ("device", "stream", "graph", "Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    weight, done = torch.ones(3), []

    def run():
        done.append("run")
        return torch.zeros(3) + weight

    once = capture_graph(run, torch.device("cuda"), pool="pool")
    assert torch.equal(once.out, weight) and [x.data_ptr() for x in once.read] == [weight.data_ptr()]
    assert done == ["run"] * 3 and torch.cuda.graph.call_args.kwargs["pool"] == "pool"
    capture_graph(run, torch.device("cuda"), warm=lambda: done.append("warm"))
    assert done[3:] == ["warm", "warm", "run"] and torch.cuda.graph.call_args.args == (torch.cuda.CUDAGraph(),)


class Unseen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        assert all(x.is_meta for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)), func
        return out


class Unsent(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor), func
        return func(*args, **(kwargs or {}))


@contextmanager
def blind():
    """A device that no word comes back from and that nothing is sent to: a captured pass must not need more.

    Nobody can ask for the numbers of a meta tensor, nor for shapes that depend on them; what is left are tensors of the host.
    """
    with Unseen(), Unsent():
        yield


def at_once(kind, device, *, padding=True, rdrop=0.0, **changes):
    """A pass of a model that says all at once, from a step on the device: what it loses."""
    torch.manual_seed(3)
    model = nat_translator(_small("reverse", "words").replace(changes), 30, kind=kind).to(device)
    step = torch.full((), 50, device=device)

    def loss(batch):
        batch = batch if padding else batch._replace(source_valid=None, target_valid=None)
        share = 0.0 if kind == "masked" else glancing(step, 100)
        return loss_at_once(model, batch, smoothing=0.1, glance=share, rdrop=rdrop)

    return loss, list(model.parameters())


LEARNED = {"positions": "learned", "dropout": 0.1}
PASSES = [*((kind, {}) for kind in AT_ONCE), ("length", {"positions": "rotary"}), ("length", LEARNED), ("ctc", LEARNED)]


@pytest.mark.parametrize(("kind", "changes"), PASSES, ids=str)  # positions and dropout are the same code for every kind
def test_a_pass_that_says_all_at_once_asks_the_device_for_nothing(kind, changes):
    for padding, rdrop in ((True, 0.0), (False, 0.0), (True, 2.0)):
        loss, _ = at_once(kind, "meta", padding=padding, rdrop=rdrop, depth=1, **changes)
        batch = next(iter(batches("meta")))
        loss(batch)  # whatever is made only once is made now
        with blind():
            loss(batch).total.backward()


def test_who_asks_the_device_or_sends_to_it_is_found():
    batch = next(iter(batches("meta")))
    with pytest.raises(RuntimeError, match="meta"):
        at_once("fixed(count=3)", "meta")[0](batch)  # are targets too long?
    x = torch.zeros(3, device="meta")
    for asks in (x.tolist, x.cpu, x.nonzero, lambda: x[x > 0], lambda: bool(x.any()), lambda: torch.equal(x, x)):
        with pytest.raises((RuntimeError, NotImplementedError)), blind():
            asks()
    for sends in (lambda: torch.tensor([1.0], device="meta"), lambda: x + torch.ones(3).to("meta"), lambda: torch.rand(3)):
        with pytest.raises(AssertionError), blind():
            sends()


@needs_cuda
@pytest.mark.parametrize("kind", AT_ONCE)
def test_captured_passes_that_say_all_at_once_lose_what_plain_ones_lose(kind, monkeypatch):
    """But for what is drawn by chance: here the same slots are shown every time."""
    monkeypatch.setattr("regard.training.nat_loss.random_slots", lambda real, count: real & (real.cumsum(1) <= count[:, None]))
    monkeypatch.setattr("torch.rand", lambda shape, device: torch.full(shape, 0.5, device=device))
    found = []
    for graphs in (True, False):
        loss, wanted = at_once(kind, "cuda", dropout=0.0, rdrop=2.0)
        passes, losses = GraphedStep(loss, wanted, 10.0), []
        for p in wanted:
            p.grad = torch.zeros_like(p)
        with passes.on_stream():
            for batch in batches("cuda"):
                losses.append((passes(batch) if graphs else passes._run(batch)).total)
        assert len(passes.known) >= graphs
        found.append((torch.stack(losses), torch.cat([p.grad.flatten() for p in wanted])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@needs_cuda
def test_dropout_falls_anew_in_every_replay():
    _, _, passes = trained(True, dropout=0.5)
    batch = next(iter(batches("cuda")))
    with passes.on_stream():
        found = torch.stack([passes(batch).total for _ in range(4)])
    assert len(found.unique()) == 4


def test_batches_of_one_shape_are_known_by_it():
    first, second, *_ = batches("cpu")
    assert _batch_shape(first) == _batch_shape(first._replace(source=first.source + 1))
    assert _batch_shape(first) != _batch_shape(first._replace(source_valid=None))
    assert _batch_shape(first) != _batch_shape(first._replace(source=first.source[:, :1]))
    assert second.source.shape[1] % 8 == 0 and second.source_valid is not None


class Plain(GraphedStep):
    """On a CPU, where nothing can be captured: the same passes, one kernel after another."""

    def __init__(self, forward, wanted, unit):
        self.forward, self.wanted, self.unit = forward, wanted, unit

    def on_stream(self):
        return nullcontext()

    def __call__(self, batch):
        return self._run(batch)


@pytest.mark.parametrize("passes", [1, 3])
def test_an_update_of_captured_passes_is_the_update(monkeypatch, passes):
    monkeypatch.setattr(learner, "GraphedStep", Plain)
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        task = Small(small(graphs=graphs, dropout=0.0))

        def loss(model, batch, step, of=task.loss):
            lost = of(model, batch, step)
            return lost._replace(total=step * lost.total)  # another one at every update

        made = learner.Learner(task.model().double(), loss, task.config, "cpu")
        made.begin()
        rows = task.splits["train"]
        for update in range(5):
            first = 30 * update
            made.update([task.batch(rows[first + 10 * i : first + 10 * i + 4 + i]) for i in range(passes)])
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
