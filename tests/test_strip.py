"""Strip mining: results, gradients and what is kept for the backward pass; and the budget that sets the size of a strip."""

import pytest
import torch

from conftest import DEVICE, close
from regard.ops.budget import DEFAULT, DEVICES, budget, set_budget
from regard.ops.strip import in_strips, token_runs


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE, requires_grad=True)


@pytest.mark.parametrize("room", [1, 50, 1 << 20])
def test_strips_are_the_whole(room: int) -> None:
    """Tensors that are cut in dimensions of their own, one that is passed whole, one of size 1, and one that is missing."""
    x, y, whole, single = tensor(2, 13, 3), tensor(13, 5), tensor(3, 5), tensor(2, 1, 5)
    lengths = []

    def f(x, y, whole, single, missing):
        assert missing is None and whole.shape == (3, 5) and single.shape == (2, 1, 5)
        lengths.append(x.shape[1])
        z = (x @ whole) * y + single
        return z.sin(), z.sum(-1)

    cut = in_strips(f, (x, y, whole, single, None), 1, 10, dims=(1, 0, None, 1, None), room=room)
    assert sum(lengths) == 13 and max(lengths) == min(13, max(1, room // 10))
    expected = f(x, y, whole, single, None)
    for a, b in zip(cut, expected, strict=True):
        close(a, b)
    grads = [torch.autograd.grad(sum(z.square().sum() for z in out), (x, y, whole, single)) for out in (cut, expected)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_a_strip_is_given_its_end() -> None:
    ends = []

    def f(end, x):
        ends.append((end, x.shape[0]))
        return (x,)

    x = tensor(11).detach()
    assert torch.equal(in_strips(f, (x,), 0, 1, room=4, ends=True)[0], x)
    assert torch.equal(in_strips(f, (x,), 0, 1, room=11, ends=True)[0], x)
    assert [size for _, size in ends] == [4, 4, 3, 11]
    assert [end for end, _ in ends][:2] == [4, 8]
    assert all(end >= 11 for end, _ in ends[2:])


def test_the_room_is_that_of_the_device(set_limits) -> None:
    sizes = []

    def f(x):
        sizes.append(len(x))
        return (x,)

    set_limits(strip=30)
    in_strips(f, (tensor(10),), 0, 10)
    assert sizes == [3, 3, 3, 1]


def test_a_strip_keeps_nothing_that_it_makes() -> None:
    x, whole, kept = tensor(64, 4), tensor(4, 512), []

    def f(x, whole):
        return ((x @ whole).exp().sum(-1),)

    def keep(saved):
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        (out,) = in_strips(f, (x, whole), 0, 512, dims=(0, None), room=8 * 512)
    assert sum(kept) <= 2 * x.numel(), "neither the scores, nor the whole tensor once for each strip"
    assert torch.autograd.grad(out.sum(), whole)[0].isfinite().all()


@pytest.mark.parametrize("n", [1, 64, 65, 200])
def test_runs_are_whole_chunks(n: int, set_limits) -> None:
    x, y = tensor(2, 3, n, 4), tensor(2, 1, n, 5)
    set_limits(features=1)
    runs = token_runs((x, y), 24)
    assert [run[0].shape[2] for run in runs] == [64] * (n // 64) + [n % 64] * (n % 64 > 0)
    assert torch.equal(torch.cat([run[1] for run in runs], 2), y)
    set_limits(features=24 * 130)
    assert token_runs((x, y), 24)[0][0].shape[2] == min(n, 128)


def test_a_budget_can_be_changed(monkeypatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["cpu"])
    before = set_budget("cpu", strip=7)
    assert budget(torch.device("cpu")).strip == 7 != before.strip
    assert budget(torch.device("meta")) == DEFAULT
    set_budget("cpu", strip=before.strip)
    assert budget(torch.device("cpu")) == before
    with pytest.raises(TypeError, match="strips"):
        set_budget("cpu", strips=7)
