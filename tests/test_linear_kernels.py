"""Triton kernels of linear attention in float32 against the recurrence in float64: results, all gradients, mechanisms."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from conftest import DEVICE, compiled_passes
from regard import Dims, attend, core, layer
from regard.cache import forget_signatures
from regard.mixers.base import Core, Places
from regard.ops.backend import choose_backend
from regard.ops.linear.linear_op import (
    LinearCall,
    ReadCall,
    decayed_prefix_sum,
    linear_attention,
    normalized_linear_write,
)

triton = pytest.importorskip("triton")

FAR = 1e-5  # |a - b| / |b| in float32


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, device=DEVICE)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def near(found: list[Tensor], exact: list[Tensor], far: float = FAR) -> None:
    for i, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.isfinite().all()
        distance = (a.double() - b).norm() / b.norm().clamp_min(1e-30)
        assert distance < far, (i, distance.item())


def call_of(
    b: int, h: int, g: int, n: int, f: int, e: int, decay: int, norm: bool, **options: object
) -> tuple[list[Tensor | None], dict[str, object]]:
    """Tensors of a call in float64, and its options."""
    log_decay = -torch.rand(b, g, n, decay, dtype=torch.float64, device=DEVICE) if decay else None
    norm_state = numbers(b, g, f).abs() if norm else None
    tensors = [numbers(b, h, n, f), numbers(b, g, n, f), numbers(b, g, n, e), numbers(b, g, f, e), log_decay, norm_state]
    valid = torch.rand(b, n, device=DEVICE) > 0.3 if options.pop("padded", False) else None
    gain = torch.rand(b, g, n, 1, device=DEVICE) if options.pop("gain", False) else None
    gate_root = options.pop("gate_root", 0.0)
    return tensors, {"valid": valid, **options, "gain": gain, "gate_root": gate_root}


def computed(kind: str, tensors: list[Tensor | None], options: dict, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and leaves that they depend on, of reading, writing or both."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, k, v, state, log_decay, norm_state = (None if x is None else x.to(dtype).requires_grad_() for x in tensors)
    if kind == "read":
        call = ReadCall(q, state, norm_state, options["feature"], options["scale"], options["normalize"])
        return [choose_backend("linear", backend, call).read(call)], [q, state, norm_state]
    call = LinearCall(q if kind == "both" else None, k, v, state, log_decay, norm_state, **options)
    chosen = choose_backend("linear", backend, call)
    results = chosen.forward(call) if kind == "both" else chosen.write(call)
    leaves = [x for x in call if isinstance(x, Tensor) and x.requires_grad]
    return [y for y in results if y is not None], leaves


def passes(kind: str, tensors: list[Tensor | None], options: dict, backend: str) -> list[Tensor]:
    results, leaves = computed(kind, tensors, options, backend)
    loss = sum(y.sin().sum() for y in results)
    return [*results, *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


CALLS = {
    "sums": (1, 2, 1, 37, 6, 3, 0, False),
    "one token": (2, 2, 2, 1, 4, 5, 1, True),
    "a norm": (1, 4, 2, 9, 6, 3, 0, True),
    "elu, divided, padded": (2, 1, 1, 37, 6, 3, 0, True),
    "relu, divided": (1, 1, 1, 9, 17, 3, 0, True),
    "a decay": (1, 2, 1, 37, 6, 3, 1, True),
    "elu, divided, a decay, padded": (1, 1, 1, 20, 5, 18, 1, True),
    "a decay, gain": (1, 4, 2, 9, 6, 3, 1, False),
    "a gate, padded": (1, 2, 1, 20, 6, 3, 1, False),
    "a gate per feature, padded": (1, 1, 1, 9, 6, 3, 6, False),
    "a decay per feature": (1, 2, 1, 33, 6, 3, 6, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pass_is_the_recurrence(name: str) -> None:
    compare_pass(name)


@pytest.mark.parametrize("name", ["sums", "elu, divided, a decay, padded", "a decay per feature"])
def test_a_pass_over_tiles_is_the_recurrence(name: str, monkeypatch) -> None:
    """Where a state is too wide to be carried along a segment."""
    monkeypatch.setattr("regard.ops.linear.triton_launch.WIDEST_WALK", 1)
    forget_signatures()
    compare_pass(name)
    forget_signatures()


def compare_pass(name: str) -> None:
    words = name.split(", ")
    feature = next((word for word in words if word in ("elu", "relu")), "identity")
    more = {"normalize": "divided" in words, "padded": "padded" in words, "gain": "gain" in words}
    more["gate_root"] = 3.0 if "gate" in name else 0.0
    tensors, options = call_of(*CALLS[name], feature=feature, scale=0.7, **more)
    near(passes("both", tensors, options, "triton"), passes("both", tensors, options, "reference"))


@pytest.mark.parametrize("decay", [0, 1, 6])
def test_a_write_is_the_recurrence(decay: int) -> None:
    tensors, options = call_of(1, 1, 1, 37, 6, 3, decay, True, feature="elu", padded=True)
    near(passes("write", tensors, options, "triton"), passes("write", tensors, options, "reference"))


@pytest.mark.parametrize("normalize", [False, True])
def test_a_read_is_the_product(normalize: bool) -> None:
    tensors, options = call_of(1, 4, 2, 37, 6, 3, 0, True, feature="elu", scale=0.7, normalize=normalize)
    if not normalize:
        tensors[-1] = None
    near(passes("read", tensors, options, "triton"), passes("read", tensors, options, "reference"))


def test_more_segments_than_a_scan_loads_at_once() -> None:
    for decay in (0, 1):
        tensors, options = call_of(1, 1, 1, 550, 3, 2, decay, True, feature="elu")
        with torch.no_grad():
            found, exact = (computed("write", tensors, options, backend)[0] for backend in ("triton", "reference"))
        near(found, exact)


@pytest.mark.parametrize("size", [0, 1, 6])
def test_a_prefix_sum_is_the_recurrence(size: int) -> None:
    """Sums, gradients, and gradients of gradients."""
    x, first = numbers(1, 2, 37, 6), numbers(1, 2, 6)
    decay = -torch.rand(1, 2, 37, size, dtype=torch.float64, device=DEVICE) if size else None
    each = []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (x, first, decay)]
        y = decayed_prefix_sum(leaves[0], leaves[1], log_decay=leaves[2], backend=name)
        own = [t for t in leaves if t is not None]
        grads = torch.autograd.grad(y.sin().sum(), own, create_graph=True)
        each.append([y, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), own)])
    near(*each)


def test_strong_decays_overflow_nothing() -> None:
    """A log decay of -100 at every third token leaves nothing of what was before, in float32 too."""
    for size in (1, 6):
        tensors, options = call_of(1, 1, 1, 16, 6, 3, size, False)
        tensors[4][:, :, ::3] = -100
        found, exact = (passes("both", tensors, options, backend) for backend in ("triton", "reference"))
        near(found, exact, 1e-4)  # sums of logarithms around -500 have that many digits


def test_no_result_depends_on_a_later_token() -> None:
    tensors, options = call_of(1, 1, 1, 40, 6, 3, 1, True, feature="elu", normalize=True)
    with torch.no_grad():
        before = computed("both", tensors, options, "triton")[0][0]
        for x in tensors[:3]:
            x[:, :, 21:] = 1e4
        after = computed("both", tensors, options, "triton")[0][0]
    assert torch.equal(before[:, :, :21], after[:, :, :21])


def test_gradients_of_gradients_are_those_of_the_torch_backend() -> None:
    tensors, options = call_of(1, 2, 1, 9, 4, 3, 1, True, feature="elu", normalize=True)
    each = []
    for name in ("triton", "reference"):
        results, leaves = computed("both", tensors, options, name)
        loss = sum(y.sin().sum() for y in results)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        each.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)])
    near(*each)


def test_zeros_that_share_one_element_are_zeros() -> None:
    """Kernels see that such states are zeros, in results, states and gradients."""
    from regard.ops.linear.zero_state import is_zero_state, zero_state

    for n in (9, 70):  # one segment, and several
        tensors, options = call_of(1, 2, 1, n, 6, 3, 0, True, feature="elu", normalize=True)
        zeros_of = [torch.zeros_like(x) for x in (tensors[3], tensors[5])]
        each = []
        for shared in (True, False):
            q, k, v = (x.float().requires_grad_() for x in tensors[:3])
            s, z = (zero_state(q, *x.shape, dtype=torch.float32) if shared else x.float() for x in zeros_of)
            assert is_zero_state(s) == shared
            call = LinearCall(q, k, v, s, None, z, **options)
            found = choose_backend("linear", "triton", call).forward(call)
            each.append([found.out, found.state, *torch.autograd.grad(found.out.sin().sum(), (q, k, v))])
        near(each[0], [x.double() for x in each[1]])


def test_function_transforms_work() -> None:
    q, k, v, state = (x.float() for x in (numbers(1, 2, 9, 4), numbers(1, 1, 9, 4), numbers(1, 1, 9, 3), numbers(1, 1, 4, 3)))

    def f(q: Tensor, name: str) -> Tensor:
        return linear_attention(q, k, v, state, backend=name)[0].sin().sum()

    found, exact = (torch.func.grad(lambda q, name=name: f(q, name))(q) for name in ("triton", "torch"))
    near([found], [exact.double()])


def test_wide_states_are_cut_into_parts(monkeypatch) -> None:
    """More features and values than one program holds."""
    from regard.ops.linear import triton_launch

    monkeypatch.setattr(triton_launch, "WIDEST_WALK", 16)
    monkeypatch.setattr(triton_launch, "STATE_TILE", 512)
    tensors, options = call_of(1, 1, 1, 9, 18, 19, 1, True, feature="elu", normalize=True)
    near(passes("both", tensors, options, "triton"), passes("both", tensors, options, "reference"))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (LinearCall(None, *(zeros(1, 1, 2, 3).double(),) * 3), "float16, bfloat16 and float32, not float64"),
        (ReadCall(zeros(1, 1, 2, 300), zeros(1, 1, 300, 4)), "up to 256 features .* not 300"),
    ],
)
def test_what_kernels_cannot_compute_is_refused(call, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_backend("linear", "triton", call)


# Mechanisms.

H, G, D, E = 2, 1, 4, 3
SPECS = [
    "linear",
    "cosformer",
    "hedgehog",
    "efficient",
    "performer(features=8)",
    "rfa(features=4)",
    "rfa(features=4, scale=2.0, gated=True)",
    "retention",
    "gla",
    "gla(gate='head')",
    "linformer(rank=5)",
]


def build(spec: str, backend: str, causal: bool) -> Core:
    torch.manual_seed(0)
    dims = Dims(H * D, H, kv_heads=G, key_dim=D, value_dim=E, max_len=64, causal=causal, backend=backend)
    dtype = torch.float32 if backend == "triton" else torch.float64
    return core(spec, dims).to(DEVICE, dtype)


def tokens(made: Core, n: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = (H, n, D), (G, n, D + made.gates), (G, n, E)
    return [torch.randn(1, *size, generator=g).to(DEVICE, dtype).requires_grad_() for size in sizes]


def mechanism(spec: str, backend: str, causal: bool) -> list[Tensor]:
    """Outputs, the last state and gradients: a pass in two cuts if causal, else all at once; the third token is padding."""
    made, n = build(spec, backend, causal), 9
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, k, v = tokens(made, n, dtype)
    valid = torch.ones(1, n, dtype=torch.bool, device=DEVICE)
    valid[:, 2] = False
    if causal:
        places = Places.of(k[:, 0], valid)
        memory, outs = made.empty(k, v), []
        for low, high in ((0, 1), (1, n)):
            part = slice(low, high)
            y, memory = made.scan(memory, q[:, :, part], k[:, :, part], v[:, :, part], places.part(low, high))
            outs.append(y)
        out = torch.cat(outs, 2).masked_fill(~valid[:, None, :, None], 0)
        state = [x for x in tree_leaves(memory) if isinstance(x, Tensor) and x.is_floating_point()]
    else:
        out, state = attend(q, k, v, made, valid=valid, query_valid=valid), []
    results = [out, *state]
    loss = sum(x.sin().sum() for x in results)
    return [*results, *torch.autograd.grad(loss, [q, k, v, *made.parameters()], materialize_grads=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_a_mechanism_does_not_depend_on_the_backend(spec: str, causal: bool) -> None:
    if spec.startswith("linformer") and not causal:
        pytest.skip("it has no sums over tokens in an order")
    near(mechanism(spec, "triton", causal), mechanism(spec, "reference", causal))


def test_a_layer_takes_the_kernels_and_grouped_heads() -> None:
    x = torch.randn(2, 5, 16, device=DEVICE)
    outs = []
    for name in ("triton", "torch"):
        torch.manual_seed(0)
        mixer = layer("gla", width=16, heads=4, kv_heads=2, causal=True, backend=name).to(DEVICE)
        outs.append(mixer(x).detach().double())
    near(outs[:1], outs[1:])


def test_a_write_of_no_tokens_changes_nothing() -> None:
    state, norm = torch.randn(1, 1, 4, 3, device=DEVICE), torch.randn(1, 1, 4, device=DEVICE)
    empty = zeros(1, 1, 0, 4)
    found = normalized_linear_write(empty, empty[..., :3], state, norm, backend="triton")
    assert torch.equal(found[0], state) and torch.equal(found[1], norm)


# torch.compile.


def test_the_operator_is_one_for_torch() -> None:
    from regard.ops.linear.triton_compiled import linear_operator

    tensors, options = call_of(1, 2, 1, 3, 4, 3, 1, True, feature="elu", scale=0.5, normalize=True, padded=True)
    leaves = [x.float().requires_grad_() for x in tensors]
    torch.library.opcheck(linear_operator, (*leaves, *options.values()))
    q, _, _, state, _, _ = leaves
    torch.library.opcheck(linear_operator, (q, None, None, state, None, None, None, "identity", 1.0, False, None, 0.0))


def test_the_backward_operator_returns_nothing_that_it_was_given() -> None:
    from regard.ops.linear.triton_compiled import linear_operator_backward

    k, v, state = torch.randn(1, 2, 5, 4, device=DEVICE), torch.randn(1, 2, 5, 3, device=DEVICE), zeros(1, 2, 4, 3)
    none = torch.empty(0, device=DEVICE)
    given = ([none, none, torch.randn_like(state), none], none, none, None, k, v, state, None, None, None)
    options = ("identity", 1.0, False, None, 0.0)
    torch.library.opcheck(linear_operator_backward, (*given, *options), test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_layer_is_the_layer_at_every_length() -> None:
    mixer = layer("linear", width=8, heads=2, causal=True, backend="triton").to(DEVICE)
    for found, expected in compiled_passes(mixer, (5, 9)):
        near(found, [t.double() for t in expected])
