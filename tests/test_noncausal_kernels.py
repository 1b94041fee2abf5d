"""Triton kernels of linear attention without an order in float32 against plain operations in float64: results and gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import DEVICE, compiled_passes
from regard import Dims, core, layer
from regard.mixers.base import Places
from regard.ops.linear import noncausal_op
from regard.ops.linear.exp_feature_op import ExpMap
from regard.ops.linear.noncausal_op import noncausal_attention, plain_noncausal
from regard.ops.triton_support import trial_configs

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

FEATURES = ("elu", "relu", "softmax", "random")
SMALL = {"chunk": 16, "num_warps": 4, "num_stages": 1}
# two tiles in a segment and several segments, more segments than a merge takes at once, several tiles of features
TILES = {
    **{(name, "single 16"): {**SMALL, "programs": 12} for name in ("noncausal_sums", "noncausal_query_grads")},
    **{(name, "single 16"): {**SMALL, "programs": 12} for name in ("noncausal_read", "noncausal_key_grads")},
    **{(f"noncausal_exp_{name}", "single 16"): {**SMALL, "features": 16, "programs": 24} for name in ("sums", "adjoint")},
    **{(f"noncausal_exp_{name}", "single 16"): {**SMALL, "features": 16} for name in ("read", "query_grads", "key_grads")},
    ("noncausal_merge", "single 16"): {"segments": 2, "num_warps": 4, "num_stages": 1},
}


def near(found: list[Tensor], exact: list[Tensor], far: float = 1e-5, least: float = 1e-30) -> None:
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.isfinite().all(), i
        distance = (a.double() - b).norm() / b.norm().clamp_min(least)
        assert distance < far, (i, distance.item())


def inputs(feature: str, b: int = 2, h: int = 4, g: int = 2, n: int = 70, m: int = 85, d: int = 6, e: int = 5) -> list:
    """Leaves q, k, v and log_norm in float64, padding and directions; random features are 21, not a multiple of a tile."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(b, heads, size, w, generator=draw).double() for heads, size, w in ((h, n, d), (g, m, d), (g, m, e)))
    valid = torch.rand(b, m, generator=draw) > 0.3
    by = (torch.randn(21, d, generator=draw), torch.tensor([0.1, 0.4][:g])) if feature == "random" else (None, None)
    return [x if x is None else x.to(DEVICE) for x in (q, k, v, valid, *by)]


def results(given: list, feature: str, plain: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Outputs and the gradients of all leaves."""
    q, k, v, valid, directions, log_norm = given
    dtype = torch.float64 if plain else dtype
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    bound = None if log_norm is None else log_norm.to(torch.float64 if plain else torch.float32).requires_grad_()
    leaves = [x for x in (q, k, v, bound) if x is not None]
    if plain:
        out = plain_noncausal(q, k, v, valid, None if directions is None else directions.double(), bound, feature)
    else:
        out = noncausal_attention(q, k, v, valid, feature, None if directions is None else ExpMap(directions, bound))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE, out.dtype)
    return [out, *torch.autograd.grad(out, leaves, weight)]


@pytest.mark.parametrize("feature", FEATURES)
def test_kernels_are_as_plain_operations(feature: str) -> None:
    """Padding, grouped heads, other lengths of keys, widths that are no powers of two, and many tiles of everything."""
    given = inputs(feature)
    with trial_configs(TILES) as trial:
        near(results(given, feature, plain=False), results(given, feature, plain=True))
    of_random = {"exp_sums", "exp_read", "exp_query_grads", "exp_adjoint", "exp_key_grads", "merge"}
    used = {name.removeprefix("noncausal_") for name, _ in trial.used}
    assert used == (of_random if feature == "random" else {"sums", "read", "query_grads", "key_grads", "merge"})


@pytest.fixture
def products_of_bfloat16(monkeypatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as integers: here as numbers."""
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *more: plain(self, wide(a), wide(b), *more))


@pytest.mark.usefixtures("products_of_bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", FEATURES)
def test_half_precision_is_near(feature: str, dtype: torch.dtype) -> None:
    given = inputs(feature, b=1, h=2, g=1, n=20, m=40)
    given[:3] = [x.to(dtype).double() for x in given[:3]]
    far = 2e-2 if dtype == torch.bfloat16 else 2e-3
    near(results(given, feature, False, dtype), results(given, feature, plain=True), far)


@pytest.mark.parametrize("feature", FEATURES)
def test_keys_that_nobody_sees_answer_zero(feature: str) -> None:
    """A row without keys, beside one with keys; padding holds what is no number."""
    given = inputs(feature, n=5, m=20)
    given[3][0] = False
    exact = results(given, feature, plain=True)
    given[1], given[2] = (torch.where(given[3][:, None, :, None], x, torch.nan) for x in given[1:3])
    found = results(given, feature, plain=False)
    assert not found[0][0].any() and not found[1][0].any()
    near(found, exact)


def test_large_tokens_overflow_nothing() -> None:
    """Exponents of hundreds, of both signs: without a bound of norms, and with scores of one token far above all others."""
    given = inputs("random", b=1, h=1, g=1, n=9, m=40)
    given[5] = None
    given[0], given[1] = given[0] * 30, given[1] * 30
    near(results(given, "random", plain=False), results(given, "random", plain=True), 1e-3, least=1.0)
    soft = inputs("softmax", b=1, h=1, g=1, n=9, m=40)
    soft[0], soft[1] = soft[0] * 100, soft[1] * 100
    near(results(soft, "softmax", plain=False), results(soft, "softmax", plain=True), 1e-4, least=1.0)


@pytest.mark.parametrize("feature", ["elu", "random"])
def test_gradients_of_gradients_are_those_of_plain_operations(feature: str) -> None:
    given = inputs(feature, b=1, h=1, g=1, n=4, m=5)
    found = []
    for plain in (False, True):
        q, k, v, valid, directions, log_norm = given
        q = q.to(torch.float64 if plain else torch.float32).requires_grad_()
        k, v, directions = (None if x is None else x.to(q.dtype) for x in (k, v, directions))
        if plain:
            out = plain_noncausal(q, k, v, valid, directions, log_norm, feature)
        else:
            out = noncausal_attention(q, k, v, valid, feature, None if directions is None else ExpMap(directions, log_norm))
        (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q))
    near(*map(list, found), 1e-4)


@pytest.mark.parametrize("feature", ["elu", "random"])
def test_a_launch_is_for_tensors_that_lie_alike(feature: str) -> None:
    """The heads of a token side by side, or the tokens of a head; also in the gradients that come."""
    given = inputs(feature, b=1, h=4, g=2, n=6, m=7)
    outs, found = [], []
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:3]]
    for tensors in (given[:3], [turned[0], *given[1:3]], [given[0], *turned[1:]]):
        leaves = [x.float().requires_grad_() for x in tensors]
        out = noncausal_attention(*leaves, given[3], feature, ExpMap(*given[4:]) if feature == "random" else None)
        for up in (out.detach().contiguous(), out.detach()):
            found.append(torch.autograd.grad(out, leaves, up, retain_graph=True))
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


HYPERBOLIC = "performer(features=9, max_norm=2.0, kind='hyperbolic')"


@pytest.mark.parametrize("spec", ["linear", "efficient", "performer(features=20)", HYPERBOLIC])
def test_a_mechanism_takes_the_kernels(spec: str, monkeypatch) -> None:
    """Cross attention with grouped heads; a memory that is written first is read by the other kernels."""
    taken = []
    plain = noncausal_op.noncausal_attention
    monkeypatch.setattr("regard.mixers.linear_attention.noncausal_attention", lambda *x: taken.append(x[4]) or plain(*x))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, w, generator=draw).to(DEVICE) for heads, n, w in ((4, 7, 6), (2, 9, 6), (2, 9, 5)))
    outs = []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        made = core(spec, Dims(24, 4, kv_heads=2, key_dim=6, value_dim=5, causal=False, backend=backend)).to(DEVICE)
        places = Places.of(k[:, 0], None)
        outs.append(made.read_all(q, k, v, places, Places.of(q[:, 0], None)).detach())
        if backend == "triton":
            assert len(taken) == 1
            outs.append(made.read(made.push(made.empty(k, v), k, v, places), q, Places.of(q[:, 0], None)).detach())
    assert len(taken) == 1
    near(outs[:2], [outs[2].double()] * 2)


@pytest.mark.parametrize("change", ["wide", "wide half", "types", "double", "no keys"])
def test_what_the_kernels_do_not_take_goes_another_way(change: str) -> None:
    """Shared memory holds states of 128 x 128 in bfloat16, and of 64 x 64 in float32."""
    q = k = torch.randn(1, 2, 3, 8, device=DEVICE)
    v = torch.randn(1, 2, 3, {"wide": 65, "wide half": 129}.get(change, 8), device=DEVICE)
    assert noncausal_op.takes_noncausal(q, k, k)
    if change == "wide half":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        assert noncausal_op.takes_noncausal(q, k, v[..., :128])
    if change == "types":
        v = v.bfloat16()
    if change == "double":
        q, k, v = q.double(), k.double(), v.double()
    if change == "no keys":
        k, v = k[:, :, :0], v[:, :, :0]
    assert not noncausal_op.takes_noncausal(q, k, v)


def test_the_operator_is_one_for_torch() -> None:
    from regard.ops.linear.noncausal_compiled import noncausal_operator

    q, k, v, valid, directions, log_norm = inputs("random", b=1, h=2, g=1, n=3, m=4)
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(noncausal_operator, (*leaves, valid, directions, log_norm.requires_grad_(), "random"))


def test_a_compiled_layer_is_the_layer_at_every_length() -> None:
    mixer = layer("performer(features=16)", width=8, heads=2, causal=False, backend="triton").to(DEVICE)
    for found, expected in compiled_passes(mixer, (5, 9)):
        near(found, [t.double() for t in expected])
