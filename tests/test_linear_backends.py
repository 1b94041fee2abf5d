"""Linear attention and the delta rule: every backend against the recurrence, which backend a call gets, and what is refused."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from conftest import CASES, DEVICE, close, data, some
from regard import CATALOGUE, Dims, attend, core, layer
from regard.mixers.base import Core, Places
from regard.mixers.hybrid import far_kernels
from regard.mixers.linear_attention import Kernel
from regard.ops import backend as registry
from regard.ops.backend import backends, choose_backend, register_backend
from regard.ops.delta.delta_op import DeltaCall, delta_rule, delta_write
from regard.ops.delta.torch import TorchDelta
from regard.ops.linear.linear_op import (
    LinearCall,
    decayed_prefix_sum,
    linear_attention,
    linear_write,
    normalized_linear_attention,
)
from regard.ops.linear.torch import TorchLinear

B, H, G, D, E = 2, 4, 2, 6, 3
OPERATIONS = ("linear", "delta")
EXACT = ["torch"]  # backends that compute in float64
SPECS = [
    "linear",
    "cosformer",
    "hedgehog",
    "efficient",
    "performer(features=16)",
    "rfa(features=8)",
    "rfa(features=8, scale=2.0, gated=True)",
    "retention",
    "gla",
    "gla(gate='head')",
    "delta",
    "delta(gated=True)",
    "hybrid(pattern=Local(7), far='gla')",
    "hybrid(pattern=Local(7), far='delta')",
    "linformer(rank=5)",
]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def leaves(*inputs: Tensor | None) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs if x is not None]


def gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    loss = sum(x.sin().sum() for x in results)
    return list(torch.autograd.grad(loss, inputs, materialize_grads=True))


def same(fast: tuple[Tensor, ...], slow: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    """Compare results and all gradients."""
    found = [*fast, *gradients(fast, inputs)]
    for a, b in zip(found, [*slow, *gradients(slow, inputs)], strict=True):
        close(a, b)


# The operations: every backend is the reference, and the reference is the formula.


def log_decays(n: int, size: int) -> Tensor | None:
    return -torch.rand(B, G, n, size, dtype=torch.float64, device=DEVICE) if size else None


@pytest.mark.parametrize("size", [0, 1, D])
@pytest.mark.parametrize("n", [1, 5, 64, 150])
@pytest.mark.parametrize("backend", EXACT)
def test_linear_attention_is_the_reference(backend: str, n: int, size: int) -> None:
    q, k, v, decay = numbers(B, H, n, D), numbers(B, G, n, D), numbers(B, G, n, E), log_decays(n, size)
    state, norm_state = numbers(B, G, D, E), numbers(B, G, D)
    inputs = leaves(q, k, v, state, norm_state, decay)
    both = [linear_attention(q, k, v, state, log_decay=decay, backend=name) for name in (backend, "reference")]
    same(*both, inputs)
    both = [
        normalized_linear_attention(q, k, v, state, norm_state, log_decay=decay, backend=name) for name in (backend, "reference")
    ]
    same(*both, inputs)
    both = [(linear_write(k, v, state, log_decay=decay, backend=name),) for name in (backend, "reference")]
    same(*both, inputs)
    both = [(decayed_prefix_sum(k, norm_state, log_decay=decay, backend=name),) for name in (backend, "reference")]
    same(*both, inputs)


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("n", [1, 5, 64, 150])
@pytest.mark.parametrize("backend", [name for name in backends("delta") if name not in ("reference", "triton")])
def test_delta_rule_is_the_reference(backend: str, n: int, decayed: bool) -> None:
    q, v, state, decay = numbers(B, H, n, D), numbers(B, G, n, E), numbers(B, G, D, E), log_decays(n, int(decayed))
    k = torch.nn.functional.normalize(numbers(B, G, n, D), dim=-1)
    beta = torch.rand(B, G, n, 1, dtype=torch.float64, device=DEVICE)
    inputs = leaves(q, k, v, beta, state, decay)
    both = [delta_rule(q, k, v, beta, state, log_decay=decay, backend=name) for name in (backend, "reference")]
    same(*both, inputs)
    both = [(delta_write(k, v, beta, state, log_decay=decay, backend=name),) for name in (backend, "reference")]
    same(*both, inputs)


@pytest.mark.parametrize("size", [0, 1, D])
def test_the_reference_is_the_sum_over_the_past(size: int) -> None:
    """out_i = sum_{j <= i} (q_i exp(L_i - L_j) . k_j) v_j + q_i exp(L_i) S, and norm_i with values of 1."""
    n = 20
    q, k, v, decay = numbers(B, H, n, D), numbers(B, G, n, D), numbers(B, G, n, E), log_decays(n, size)
    state, norm_state = numbers(B, G, D, E), numbers(B, G, D)
    level = torch.zeros(B, G, n, D, dtype=torch.float64, device=DEVICE) if decay is None else decay.cumsum(2).expand(B, G, n, D)
    wide = [x.repeat_interleave(H // G, 1) for x in (k, v, state, norm_state, level)]
    keys, values, first, first_norm, sums = wide
    scores = torch.einsum("bhif,bhijf,bhjf->bhij", q, (sums[:, :, :, None] - sums[:, :, None]).exp(), keys).tril()
    faded = q * sums.exp()
    out, norm, _, _ = normalized_linear_attention(q, k, v, state, norm_state, log_decay=decay, backend="reference")
    close(out, scores @ values + faded @ first)
    close(norm, scores.sum(-1, keepdim=True) + faded @ first_norm.unsqueeze(-1))


# The mechanisms: outputs, states and gradients do not depend on the backend.


def build(spec: str, backend: str, causal: bool = False) -> Core:
    torch.manual_seed(0)
    dims = Dims(H * D, H, kv_heads=G, key_dim=D, value_dim=E, max_len=256, causal=causal, backend=backend)
    return core(spec, dims).to(DEVICE, torch.float64)


def tokens(made: Core, n: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = (H, n, D), (G, n, D + made.gates), (G, n, E)
    return [torch.randn(B, *size, dtype=torch.float64, generator=g).to(DEVICE).requires_grad_() for size in sizes]


def scanned(spec: str, backend: str, cuts: list[int], begun: bool, padded: bool) -> list[Tensor]:
    """Outputs, the last state and all gradients of a causal pass in these cuts."""
    made, n = build(spec, backend, causal=True), sum(cuts)
    low = 5 if begun else 0
    q, k, v = tokens(made, n + low)
    places = Places.of(k[:, 0], some(B, n + low) if padded else None)
    memory, outs = made.empty(k, v), []
    if begun:
        memory = made.push(memory, k[:, :, :low], v[:, :, :low], places.part(0, low))
    for size in cuts:
        part = slice(low, low + size)
        out, memory = made.scan(memory, q[:, :, part], k[:, :, part], v[:, :, part], places.part(low, low + size))
        outs.append(out)
        low += size
    state = [x for x in tree_leaves(getattr(memory, "far", memory)) if isinstance(x, Tensor) and x.is_floating_point()]
    out = torch.cat(outs, 2)
    if places.valid is not None:  # what a padding token reads is arbitrary
        out = out.masked_fill(~places.valid[:, None, -n:, None], 0)
    results = (out, *(x.clamp(min=-1e4) for x in state))  # a maximum over no token is -inf
    return [*results, *gradients(results, [q, k, v, *made.parameters()])]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_a_causal_pass_does_not_depend_on_the_backend(spec: str, begun: bool, padded: bool, set_limits) -> None:
    slow = scanned(spec, "reference", [131], begun, padded)
    for name in EXACT:
        for cuts in ([131], [1, 70, 2, 58]):
            for a, b in zip(scanned(spec, name, cuts, begun, padded), slow, strict=True):
                close(a, b)
    set_limits(features=1)  # a run for each chunk
    for a, b in zip(scanned(spec, "reference", [3, 128], begun, padded), slow, strict=True):
        close(a, b)


@pytest.mark.parametrize("spec", SPECS)
def test_a_bidirectional_pass_does_not_depend_on_the_backend(spec: str) -> None:
    found = []
    for name in (*EXACT, "reference"):
        made = build(spec, name)
        q, k, v = tokens(made, 70)
        valid = some(B, 70)
        out = attend(q, k, v, made, valid=valid, query_valid=valid)
        found.append([out, *gradients((out,), [q, k, v, *made.parameters()])])
    for fast in found[:-1]:
        for a, b in zip(fast, found[-1], strict=True):
            close(a, b)


@pytest.mark.parametrize("spec", SPECS)
def test_torch_is_what_auto_takes_on_this_machine(spec: str) -> None:
    """The last one of a list of backends is never taken by itself."""
    assert backends("linear")[-1] == backends("delta")[-1] == "reference"
    x = data(70)
    outs = []
    for name in ("auto", "torch"):
        torch.manual_seed(0)
        outs.append(layer(spec, width=32, heads=4, causal=True, max_len=128, backend=name).double().to(DEVICE)(x))
    assert torch.equal(*outs) or DEVICE.type != "cpu"


# Which backend a call gets.


class CountingLinear(TorchLinear):
    """A backend that counts its calls, and refuses if it has a reason."""

    name = "counting"

    def __init__(self, reason: str | None = None) -> None:
        self.reason, self.heads = reason, []

    def refuses(self, call):  # noqa: ARG002
        return self.reason

    def forward(self, call: LinearCall):
        self.heads.append(call.k.shape[1])
        return super().forward(call)

    def write(self, call: LinearCall):
        self.heads.append(call.k.shape[1])
        return super().write(call)


class CountingDelta(TorchDelta):
    name = "counting"

    def __init__(self, reason: str | None = None) -> None:
        self.reason, self.heads = reason, []

    def refuses(self, call):  # noqa: ARG002
        return self.reason

    def forward(self, call: DeltaCall):
        self.heads.append(call.k.shape[1])
        return super().forward(call)

    def write(self, call: DeltaCall):
        self.heads.append(call.k.shape[1])
        return super().write(call)


@pytest.fixture
def added(monkeypatch):
    """Register counting backends for the operations, in one test."""

    def add(*, first: bool = False, reason: str | None = None):
        made = {"linear": CountingLinear(reason), "delta": CountingDelta(reason)}
        for operation, own in made.items():
            monkeypatch.setitem(registry._BACKENDS, operation, registry._BACKENDS[operation])
            register_backend(operation, own, first=first)
        return made

    return add


KERNELS = [spec for spec in SPECS if not spec.startswith("hybrid")]


@pytest.mark.parametrize("spec", KERNELS)
def test_a_named_backend_is_used_and_grouped_heads_are_not_widened(spec: str, added) -> None:
    made = added()
    mixer = layer(spec, width=32, heads=4, kv_heads=2, causal=True, max_len=128, backend="counting").to(DEVICE)
    with torch.no_grad():
        mixer(data(70).float())
    (operation,) = mixer.core.operations
    heads = made[operation].heads
    assert heads and set(heads) == {2}
    other = layer(spec, width=32, heads=4, kv_heads=2, causal=True, max_len=128).to(DEVICE)
    with torch.no_grad():
        other(data(70).float())
    assert len(made[operation].heads) == len(heads), "auto takes those that were there before"


@pytest.mark.parametrize("spec", ["gla", "delta"])
def test_auto_takes_the_first_that_does_not_refuse(spec: str, added) -> None:
    made = added(first=True)[spec if spec == "delta" else "linear"]
    mixer, x = layer(spec, width=32, heads=4, causal=True).to(DEVICE), data(20).float()
    mixer(x)
    assert len(made.heads) == 1
    made.reason = "it is tired"
    mixer(x)
    assert len(made.heads) == 1


@pytest.mark.parametrize(("spec", "operation"), [("gla", "linear"), ("delta(gated=True)", "delta")])
def test_a_backend_that_refuses_is_an_error_with_its_sentence(spec: str, operation: str, added) -> None:
    added(reason="it needs a width of 64")
    mixer = layer(spec, width=32, heads=4, causal=True, backend="counting").to(DEVICE)
    with pytest.raises(ValueError, match=f"'counting' cannot compute this {operation} attention: it needs a width of 64"):
        mixer(data(20).float())


def test_a_call_that_all_refuse_names_every_reason(monkeypatch) -> None:
    monkeypatch.setitem(registry._BACKENDS, "linear", {"counting": CountingLinear("it is float64")})
    with pytest.raises(ValueError, match="no backend can compute this linear attention: counting: it is float64"):
        layer("linear", width=32, heads=4).double().to(DEVICE)(data(5))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*, not 'cuda'"):
        layer("gla", width=32, heads=4, backend="cuda")
    x = numbers(1, 1, 2, 3)
    with pytest.raises(ValueError, match="linear attention has no backend 'cuda': there is triton, torch, reference"):
        linear_attention(x, x, x, numbers(1, 1, 3, 3), backend="cuda")


def test_a_backend_of_another_operation_is_refused_when_a_layer_is_made(monkeypatch) -> None:
    monkeypatch.setitem(registry._BACKENDS, "delta", registry._BACKENDS["delta"])
    register_backend("delta", CountingDelta())
    assert layer("delta", width=32, heads=4, backend="counting")
    for spec in ("gla", "hybrid(far='gla')"):
        with pytest.raises(ValueError, match=r"has no backend 'counting': there is (triton, )?torch"):
            layer(spec, width=32, heads=4, backend="counting")


# Every mechanism: an explicit request is met, or refused when the layer is made.


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_mechanism_without_operations_refuses_a_backend(case) -> None:
    operations = getattr(case.build(max_len=128), "core", None)
    operations = () if operations is None else operations.operations
    assert case.build(backend="torch").dims.backend == "torch"
    if operations:
        assert case.build(backend="reference").dims.backend == "reference"
        return
    with pytest.raises(ValueError, match=f"{case.row.name} has one implementation: leave out backend='reference'"):
        case.build(backend="reference")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_operations_are_declared(case, monkeypatch) -> None:
    """What a core computes by a registry is what its class declares, whether it is causal or not."""
    used: set[str] = set()

    def choose(operation, name, *call):
        used.add(operation)
        return choose_backend(operation, name, *call)

    for module in ("regard.ops.linear.linear_op", "regard.ops.delta.delta_op"):
        monkeypatch.setattr(f"{module}.choose_backend", choose)
    for causal in (False, True):
        try:
            made = case.build(causal=causal)
        except ValueError:
            continue
        with torch.no_grad():
            made(data(40))
    declared = set(made.core.operations) if hasattr(made, "core") else set()
    assert used == declared & set(OPERATIONS)


def test_hybrid_takes_every_kernel_of_the_catalogue() -> None:
    rows = {row.name: row.make for row in CATALOGUE.values() if issubclass(row.make, Kernel)}
    assert rows.items() <= far_kernels().items()
    assert all(issubclass(kernel, Kernel) and not name.startswith("_") for name, kernel in far_kernels().items())


def test_the_log_names_the_backend_that_auto_takes_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(registry, "_logged", set())
    monkeypatch.setenv("REGARD_LOG", "kernels")
    mixer = layer("gla", width=32, heads=4, causal=True).to(DEVICE)
    for _ in range(2):
        mixer(data(20).float())
    chosen = "triton" if DEVICE.type == "cuda" else "torch"
    assert capsys.readouterr().err.count(f"regard: linear attention by backend '{chosen}'") == 1
    layer("gla", width=32, heads=4, causal=True, backend="reference").to(DEVICE)(data(20).float())
    assert capsys.readouterr().err == "", "a request is no choice"
