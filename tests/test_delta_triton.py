"""The Triton kernels of the delta rule against the recurrence in float64, gradients included; on a CPU in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import DEVICE
from regard import layer
from regard.ops.backend import choose_backend
from regard.ops.delta import delta_launch
from regard.ops.delta.delta_op import DeltaCall, delta_rule, delta_write
from regard.ops.delta.triton import TritonDelta, _delta_operator
from regard.ops.delta.unit_features import unit_features

pytest.importorskip("triton")
SIZES = [  # b h g n f e, decays
    (1, 2, 1, 40, 20, 3, True),
    (2, 1, 1, 20, 16, 16, False),
    (1, 1, 1, 100, 5, 20, True),
    (1, 1, 1, 128, 4, 4, False),
]


def call_of(b: int, h: int, g: int, n: int, f: int, e: int, decays: bool) -> DeltaCall:
    """A call whose heads lie side by side in memory, as those of a layer do."""

    def tokens(heads: int, width: int) -> Tensor:
        return torch.randn(b, n, heads, width, device=DEVICE).transpose(1, 2)

    k = F.normalize(tokens(g, f), dim=-1)
    beta = torch.rand(b, g, n, 1, device=DEVICE)
    decay = -0.2 * torch.rand(b, g, n, 1, device=DEVICE) if decays else None
    return DeltaCall(tokens(h, f), k, tokens(g, e), beta, torch.randn(b, g, f, e, device=DEVICE), decay)


def leaves(call: DeltaCall, dtype: torch.dtype) -> DeltaCall:
    return DeltaCall(*(None if x is None else x.detach().to(dtype, copy=True).requires_grad_() for x in call))


def gradients(results: tuple[Tensor, ...], call: DeltaCall) -> list[Tensor]:
    inputs = [x for x in call if x is not None]
    loss = sum(x.double().sin().sum() for x in results)
    return list(torch.autograd.grad(loss, inputs, materialize_grads=True))


def near(found: list[Tensor], exact: list[Tensor], bound: float = 3e-6) -> None:
    for x, y in zip(found, exact, strict=True):
        assert torch.isfinite(x).all()
        assert (x - y).norm() <= bound * y.norm() + 1e-30


def read(call: DeltaCall, backend: str) -> tuple[Tensor, Tensor]:
    return delta_rule(*call[:5], log_decay=call.log_decay, backend=backend)


def written(call: DeltaCall, backend: str) -> tuple[Tensor]:
    return (delta_write(*call[1:5], log_decay=call.log_decay, backend=backend),)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_states_and_gradients_are_those_of_the_recurrence(size) -> None:
    call = call_of(*size)
    own, exact = leaves(call, torch.float32), leaves(call, torch.float64)
    for compute in (read, written) if size is SIZES[0] else (read,):
        fast, slow = compute(own, "triton"), compute(exact, "reference")
        near([*fast, *gradients(fast, own)], [*slow, *gradients(slow, exact)])


def test_half_precision_errs_as_its_type_does() -> None:
    """Sums are float32: the errors are those of rounded inputs and results."""
    call = DeltaCall(*(None if x is None else x.half() for x in call_of(1, 2, 1, 40, 8, 8, True)))
    own, exact = leaves(call, torch.float16), leaves(call, torch.float64)
    fast, slow = read(own, "triton"), read(exact, "reference")
    near([*fast, *gradients(fast, own)], [*slow, *gradients(slow, exact)], bound=2e-3)


def test_many_chunks_go_in_segments(monkeypatch) -> None:
    """The states between segments are found first, and are those of one long walk."""
    call = call_of(1, 1, 1, 100, 4, 4, True)
    counts = []
    steps = delta_launch._steps
    monkeypatch.setattr(delta_launch, "_steps", lambda *args: counts.append(steps(*args)) or counts[-1])
    apart = read(call, "triton")
    monkeypatch.setattr(delta_launch, "_steps", lambda sizes, *_: sizes.chunks)
    near([*read(call, "triton")], [*apart])
    chunks = -(-100 // delta_launch.chunk_tokens(call.k))
    assert 1 < counts[0] < chunks or DEVICE.type == "cuda"


def test_keys_that_are_all_alike_overwrite_each_other() -> None:
    """The triangle is full of ones, where sums of its powers would lose all digits."""
    call = call_of(1, 1, 1, 64, 4, 4, False)
    call = call._replace(k=call.k[:, :, :1].expand_as(call.k), beta=torch.ones_like(call.beta))
    exact = DeltaCall(*(None if x is None else x.double() for x in call))
    near([*read(call, "triton")], [*read(exact, "reference")])


@pytest.mark.parametrize("decays", [False, True])
def test_a_single_token_is_the_recurrence(decays: bool) -> None:
    call = call_of(2, 4, 2, 1, 6, 5, decays)
    exact = DeltaCall(*(None if x is None else x.double() for x in call))
    near([*read(call, "triton"), *written(call, "triton")], [*read(exact, "reference"), *written(exact, "reference")])
    own, exact = leaves(call, torch.float32), leaves(exact, torch.float64)
    fast, slow = read(own, "triton"), read(exact, "reference")
    near(gradients(fast, own), gradients(slow, exact))


def test_second_derivatives_and_transforms_use_the_plain_formulas() -> None:
    call = leaves(call_of(1, 1, 1, 9, 3, 2, True), torch.float32)
    found = []
    for backend in ("triton", "torch"):
        out, state = read(call, backend)
        (grad,) = torch.autograd.grad(out.sin().sum() + state.sin().sum(), call.k, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [call.k, call.v]))
        q, *rest = (x.detach() for x in call)
        found[-1] += (torch.func.grad(lambda q, rest=rest, backend=backend: read(DeltaCall(q, *rest), backend)[0].sum())(q),)
    near(*found)


def test_the_operator_under_a_compiler_is_registered_in_full() -> None:
    call = leaves(call_of(1, 1, 1, 9, 4, 3, True), torch.float32)
    torch.library.opcheck(_delta_operator, tuple(call))
    torch.library.opcheck(_delta_operator, (None, *(x.detach() for x in call[1:])), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("silu", [False, True])
def test_vectors_of_length_one_are_those_of_plain_operations(silu: bool) -> None:
    x = torch.randn(2, 70, 3, 6, device=DEVICE).transpose(1, 2)
    x[0, 0, 0], x[0, 1, 3] = 0, 1e-8  # shorter than the least length
    x.requires_grad_()
    found = []
    for fused in (True, False):
        y = unit_features(x, silu=silu, fused=fused)
        (once,) = torch.autograd.grad(y.sin().sum(), x)
        some = x[1:]  # plain operations have no second derivative at 0
        (grad,) = torch.autograd.grad(unit_features(some, silu=silu, fused=fused).sin().sum(), some, create_graph=True)
        (twice,) = torch.autograd.grad(grad.square().sum(), some)
        found.append([y, once, grad, twice, unit_features(x.half(), silu=silu, fused=fused).float()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if a is found[0][-1] else 1e-5, atol=1e-5)
    assert "UnitFunction" in unit_features(x, silu=silu, fused=True).grad_fn.name()


@pytest.mark.parametrize("spec", ["delta", "delta(gated=True)"])
def test_a_layer_by_kernels_is_the_layer(spec: str) -> None:
    x, found = torch.randn(1, 40, 16, device=DEVICE), []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        made = layer(spec, width=16, heads=2, kv_heads=1, causal=True, backend=backend).to(DEVICE)
        valid = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
        valid[:, 5:9] = False
        y = made(x, valid=valid)
        found.append([y, *torch.autograd.grad(y.sin().sum(), made.parameters())])
    near(*found, bound=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_half_precision_layer_keeps_its_gates_and_states_in_float32(causal: bool) -> None:
    """Tokens go to the kernels as they are, with gates and states in float32; a stream continues them token by token."""
    made, x = layer("delta(gated=True)", width=16, heads=2, causal=causal, backend="triton").to(DEVICE), torch.randn(1, 20, 16)
    x = x.to(DEVICE)
    exact = made(x)
    half = made.half()
    y = half(x.half())
    assert y.dtype == torch.float16 and (y - exact).norm() < 5e-3 * exact.norm()
    if causal:
        with torch.no_grad():
            first, state = half.extend(half.start(1), x[:, :19].half())
            last, state = half.extend(state, x[:, 19:].half())
        assert state.memory.s.dtype == torch.float32
        assert (torch.cat([first, last], 1) - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda call: DeltaCall(*(x.double() for x in call)), "float16, bfloat16 and float32, not float64"),
        (lambda call: call._replace(k=call.k.half()), "queries, keys and values of one type"),
        (lambda call: call._replace(k=call.k[..., :1].expand(-1, -1, -1, 129)), "at most 128 columns of this type, not 129"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_in_a_sentence(change, why: str) -> None:
    call = change(call_of(1, 1, 1, 5, 4, 3, True))
    with pytest.raises(ValueError, match=why):
        choose_backend("delta", "triton", call)
    assert TritonDelta().refuses(call)


def test_auto_takes_the_kernels_on_their_devices_alone() -> None:
    chosen = choose_backend("delta", "auto", call_of(1, 1, 1, 5, 4, 3, True))
    assert chosen.name == ("triton" if DEVICE.type == "cuda" else "torch")
