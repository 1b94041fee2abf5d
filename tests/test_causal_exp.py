"""Triton kernels of causal attention by exponential random features against plain operations in float64."""

import pytest
import torch
from torch import Tensor

from conftest import DEVICE, compiled_passes
from regard import layer
from regard.ops.linear import causal_exp_launch
from regard.ops.linear.causal_exp_op import causal_exp_attention, plain_causal_exp
from regard.ops.linear.exp_feature_op import ExpMap

pytest.importorskip("triton")


def near(found: list[Tensor], exact: list[Tensor], far: float = 1e-5, least: float = 1e-30) -> None:
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.isfinite().all(), i
        distance = (a.double() - b).norm() / b.norm().clamp_min(least)
        assert distance < far, (i, distance.item())


def inputs(b: int = 2, h: int = 4, g: int = 2, n: int = 117, d: int = 6, e: int = 5, f: int = 21) -> list:
    """Leaves q, k, v, a bound, and a state in float64, padding and directions; several runs of tiles, all sizes odd."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(b, heads, n, w, generator=draw).double() for heads, w in ((h, d), (g, d), (g, e)))
    valid = torch.rand(b, n, generator=draw) > 0.3
    state = torch.randn(b, g, f, e, generator=draw).double(), torch.rand(b, g, f, generator=draw).double()
    top = torch.randn(b, g, 1, generator=draw).double()
    bound = torch.tensor([0.1, 0.4][:g]).double()
    return [x.to(DEVICE) for x in (q, k, v, valid, torch.randn(f, d, generator=draw).double(), bound, *state, top)]


def results(given: list, plain: bool, dtype: torch.dtype = torch.float32, after: bool = True) -> list[Tensor]:
    """Outputs, the state behind, and the gradients of all leaves; after: also by the state behind."""
    wide = torch.float64 if plain else torch.float32
    tokens = torch.float64 if plain else dtype
    types = (tokens, tokens, tokens, torch.bool, wide, wide, wide, wide, wide)
    q, k, v, valid, directions, bound, s, z, top = (None if x is None else x.to(t) for x, t in zip(given, types, strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v, bound, s, z) if x is not None]
    if plain:
        found = plain_causal_exp(q, k, v, valid, directions, bound, s, z, top)
    else:
        found = causal_exp_attention(q, k, v, valid, ExpMap(directions, bound), s, z, top)
    draw = torch.Generator().manual_seed(2)
    weights = [torch.randn(y.shape, generator=draw, dtype=torch.float64).to(DEVICE, y.dtype) for y in found[:3]]
    count = 3 if after else 1
    grads = torch.autograd.grad(found[:count], leaves, weights[:count])
    return [*(y.detach() for y in found), *grads]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_kernels_are_as_plain_operations(heads: tuple[int, int], after: bool) -> None:
    """Padding, grouped heads, a state before the first token, widths that are no powers of two, many tiles and runs."""
    given = inputs(h=heads[0], g=heads[1])
    near(results(given, plain=False, after=after), results(given, plain=True, after=after))


def test_without_padding_bounds_and_a_state() -> None:
    given = inputs(b=1, n=64)
    given[3] = given[5] = None
    for i in (6, 7):
        given[i] = torch.zeros_like(given[i])
    given[8] = torch.full_like(given[8], -torch.inf)
    near(results(given, plain=False)[:7], results(given, plain=True)[:7])


def test_a_later_token_changes_nothing_before_it() -> None:
    """Not a bit: units of a token depend on no later one, though that one is much larger."""
    given = inputs(b=1, n=50)
    given[5] = None
    first = results(given, plain=False)[0]
    given[1][:, :, 40:] *= 40
    given[2][:, :, 40:] *= 40
    second = results(given, plain=False)[0]
    assert torch.equal(first[:, :, :40], second[:, :, :40])
    assert not torch.equal(first[:, :, 40:], second[:, :, 40:])


def test_large_tokens_overflow_nothing() -> None:
    given = inputs(b=1, h=1, g=1, n=40)
    given[5] = None
    given[0], given[1] = given[0] * 30, given[1] * 30
    found = results(given, plain=False)
    assert all(x.isfinite().all() for x in found)
    near(found[:1], results(given, plain=True)[:1], 1e-3, least=1.0)


def test_rows_that_see_nothing_answer_zero() -> None:
    """Keys that are not valid hold what is no number."""
    given = inputs(n=40)
    given[3][0] = False
    for i in (6, 7):
        given[i] = torch.zeros_like(given[i])
    given[8] = torch.full_like(given[8], -torch.inf)
    exact = results(given, plain=True)
    given[1], given[2] = (torch.where(given[3][:, None, :, None], x, torch.nan) for x in given[1:3])
    found = results(given, plain=False)
    assert not found[0][0].any() and not found[4][0].any() and (found[3][0] == -torch.inf).all()
    near([found[0], *found[4:8]], [exact[0], *exact[4:8]])


def test_gradients_of_gradients_are_those_of_plain_operations() -> None:
    found = []
    for plain in (False, True):
        dtype = torch.float64 if plain else torch.float32
        q, k, v, valid, directions, bound, *state = (x if x.dtype == torch.bool else x.to(dtype) for x in inputs(b=1, n=5))
        q.requires_grad_()
        if plain:
            out = plain_causal_exp(q, k, v, valid, directions, bound, *state)[0]
        else:
            out = causal_exp_attention(q, k, v, valid, ExpMap(directions, bound), *state)[0]
        (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q))
    near(*map(list, found), 1e-4)


@pytest.mark.parametrize("bare", [False, True])
def test_the_operator_is_one_for_torch(bare: bool) -> None:
    from regard.ops.linear.causal_exp_compiled import causal_exp_operator

    q, k, v, valid, directions, bound, *state = inputs(b=1, h=2, g=1, n=19)
    tokens = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    others = [x.float() for x in (directions, bound, *state)]
    if bare:
        torch.library.opcheck(causal_exp_operator, (*tokens, None, others[0], None, *others[2:]))
    else:
        given = [others[0], *(x.requires_grad_() for x in others[1:4]), others[4]]
        torch.library.opcheck(causal_exp_operator, (*tokens, valid, *given))


def test_a_compiled_layer_is_the_layer_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = layer("performer(features=16)", width=8, heads=2, causal=True, backend="triton").to(DEVICE)
    launch, calls = causal_exp_launch.launch_causal_exp, []
    monkeypatch.setattr(causal_exp_launch, "launch_causal_exp", lambda *given: calls.append(1) or launch(*given))
    for found, expected in compiled_passes(mixer, (5, 35)):
        near(found, [t.double() for t in expected])
    assert len(calls) == 4
