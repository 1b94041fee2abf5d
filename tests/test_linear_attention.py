"""The kernel family against its dense definitions, in float64: what it computes, how well it estimates, what it survives."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from conftest import DEVICE
from regard.mixers.attend import attend
from regard.mixers.base import Core, Dims, Places
from regard.mixers.exp_features import Efficient, Performer
from regard.mixers.hedgehog import Hedgehog
from regard.mixers.linear_attention import RFA, Cosformer, Kernel, Linear
from regard.ops.linear.exp_feature_op import exponents, plain_exponents
from regard.ops.linear.feature_maps import EluPlusOne, divided_by_last, safe_ratio
from regard.ops.linear.linear_op import linear_attention, normalized_linear_attention
from regard.ops.linear.prefix import cumulative_max

B, H, G, D, E = 2, 4, 2, 5, 3
NAMES = ["linear", "cosformer", "hedgehog", "efficient", "performer", "favor", "rfa", "sharp", "gated"]
LONGEST = 300


def dims(g: int = G, longest: int = LONGEST) -> Dims:
    return Dims(width=H * D, heads=H, kv_heads=g, key_dim=D, value_dim=E, max_len=longest)


def build(name: str, g: int = G, longest: int = LONGEST) -> Kernel:
    given = dims(g, longest)
    made = {
        "linear": lambda: Linear(given),
        "cosformer": lambda: Cosformer(given),
        "hedgehog": lambda: Hedgehog(given, features=4),
        "efficient": lambda: Efficient(given),
        "performer": lambda: Performer(given, features=12),
        "favor": lambda: Performer(given, features=13, kind="hyperbolic", max_norm=None),  # pairs, and one without its other half
        "sharp": lambda: RFA(given, features=9, scale=6.0, orthogonal=True),  # most of its sums of waves are too small
        "rfa": lambda: RFA(given, features=9),
        "gated": lambda: RFA(given, features=9, gated=True),
    }[name]().to(DEVICE, torch.float64)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def tokens(name: str, n: int, m: int | None = None, scale: float = 1.0) -> list[Tensor]:
    m = n if m is None else m
    sizes = (H, n, D), (G, m, D + (name == "gated")), (G, m, E)
    q, k, v = (torch.randn(B, *size, dtype=torch.float64, device=DEVICE) for size in sizes)
    return [(q * scale).requires_grad_(), (k * scale).requires_grad_(), v.requires_grad_()]


def some_valid(n: int) -> Tensor:
    valid = torch.rand(B, n, device=DEVICE) < 0.7
    valid[0, :3] = False
    return valid


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and torch.isfinite(a).all()
    return float(((a - b).abs() / (1 + b.abs())).detach().max()) if a.numel() else 0.0


# The dense definitions: A (b h n m) from q and k (b h m d) of every query head; seen (b 1 n m) is True where i may see j.


def normalised(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0, weights / torch.where(total == 0, 1, total))


def dense_linear(_: Linear, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    return normalised(phi_q @ phi_k.mT * seen)


def dense_cosformer(_: Cosformer, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Positions count real tokens: of a query, and of a key, as many as are seen before it in the last row."""
    j = (seen[..., -1, :].long().cumsum(-1) - 1)[:, :, None]  # (b 1 1 m)
    i = torch.arange(q.shape[2], device=DEVICE)[:, None] if q.shape[2] < k.shape[2] else j.mT
    cosine = torch.cos(math.pi / 2 * (i - j).double() / LONGEST)
    assert (cosine[seen] > 0).all()
    return normalised(q.relu() @ k.relu().mT * cosine * seen)


def dense_hedgehog(core: Hedgehog, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    maps = core.query_map, core.key_map.repeat_interleave(q.shape[1] // len(core.key_map), 0)
    phi_q, phi_k = (torch.cat([x @ w, -(x @ w)], -1).softmax(-1) for x, w in zip((q, k), maps, strict=True))
    return normalised(phi_q @ phi_k.mT * seen)


def dense_efficient(_: Efficient, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    maps = k.exp()[:, :, None] * seen[..., None]  # (b h n m f)
    maps = normalised(maps.transpose(3, 4)).transpose(3, 4)
    return (torch.softmax(q, -1)[:, :, :, None] * maps).sum(-1)


def dense_performer(core: Performer, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    q, k = q / D**0.25, k / D**0.25
    if core.log_norm is not None:
        most = core.log_norm.exp().repeat_interleave(q.shape[1] // len(core.log_norm))[:, None, None]
        q, k = (torch.where(x.norm(dim=-1, keepdim=True) > most, most * x / x.norm(dim=-1, keepdim=True), x) for x in (q, k))
    w = torch.cat([core.directions, -core.directions])[: core.f] if core.kind == "hyperbolic" else core.directions
    phi_q, phi_k = ((x @ w.mT - (x * x).sum(-1, keepdim=True) / 2).exp() for x in (q, k))
    return normalised(phi_q @ phi_k.mT * seen)


def cosines_of_waves(core: RFA, q: Tensor, k: Tensor) -> Tensor:
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return ((q[:, :, :, None] - k[:, :, None]) @ core.directions.mT).cos().mean(-1)


def lifted(weights: Tensor, mass: Tensor, scale: float) -> Tensor:
    """A row's sum is lifted to the least; above scale 1 by weights that are equal but for the mass of their token."""
    total, whole = weights.sum(-1, keepdim=True), mass.sum(-1, keepdim=True)
    lack = torch.relu(math.exp(-2 * min(scale, 1)) - total / torch.where(whole == 0, 1, whole))
    spread, total = lack * mass * (scale > 1), total + lack * whole
    return torch.where(total == 0, 0, (weights + spread) / torch.where(total == 0, 1, total))


def dense_rfa(core: RFA, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    return lifted(cosines_of_waves(core, q, k) * seen, seen.double(), core.scale)


def dense_gated(core: RFA, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """A token's weight is (1 - g_j) times the gates of the tokens after it that the query sees."""
    k, gate = k[..., :-1], k[..., -1]
    bias = core.gate_bias.repeat_interleave(q.shape[1] // len(core.gate_bias), 0)
    gate = torch.sigmoid(gate + bias[:, None])[:, :, None]  # (b h 1 m)
    passed = torch.where(seen, gate, 1).flip(-1).cumprod(-1).flip(-1)
    later = torch.cat([passed[..., 1:], torch.ones_like(passed[..., :1])], -1)
    mass = (1 - gate) * later * seen
    return lifted(cosines_of_waves(core, q, k) * mass, mass, core.scale)


DENSE = {
    "linear": dense_linear,
    "cosformer": dense_cosformer,
    "hedgehog": dense_hedgehog,
    "efficient": dense_efficient,
    "performer": dense_performer,
    "favor": dense_performer,
    "rfa": dense_rfa,
    "sharp": dense_rfa,
    "gated": dense_gated,
}


def dense(name: str, core: Core, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return DENSE[name](core, q, k, seen) @ v


@pytest.mark.parametrize("name", NAMES)
def test_reading_everything_is_the_dense_form(name: str) -> None:
    core, (q, k, v), valid = build(name), tokens(name, 7, 40), some_valid(40)
    expected = dense(name, core, q, k, v, valid[:, None, None].expand(B, 1, 7, 40))
    assert_same(attend(q, k, v, core, valid=valid, offset=0), expected, [q, k, v, *core.parameters()])


@pytest.mark.parametrize("n", [2, 40, 97])
@pytest.mark.parametrize("name", NAMES)
def test_causal_is_the_masked_dense_form(name: str, n: int) -> None:
    core, (q, k, v), valid = build(name), tokens(name, n), some_valid(n)
    seen = torch.ones(n, n, device=DEVICE).tril().bool() & valid[:, None, None]
    expected = dense(name, core, q, k, v, seen).masked_fill(~valid[:, None, :, None], 0)
    assert_same(attend(q, k, v, core, causal=True, valid=valid), expected, [q, k, v, *core.parameters()])


def assert_same(out: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and gradients."""
    assert distance(out, expected) < 1e-12
    for x, y in zip(*(torch.autograd.grad(z.sin().sum(), inputs) for z in (out, expected)), strict=True):
        assert distance(x, y) < 1e-10


def scanned(scan, core: Core, qkv: list[Tensor], valid: Tensor | None, begun: bool) -> list[Tensor]:
    """Outputs, the memory's sums and all gradients of a scan, from nothing or from a memory that holds something."""
    q, k, v = qkv
    memory = core.empty(k, v)
    if begun:
        memory = core.push(memory, k[:, :, :5].flip(2) / 2, v[:, :, :5], Places.of(k[:, 0, :5]))
    out, memory = scan(memory, q, k, v, Places.of(k[:, 0], valid))
    loss = (out * torch.linspace(-1, 1, max(out.numel(), 1), dtype=out.dtype, device=DEVICE)[: out.numel()].view_as(out)).sum()
    loss = loss + memory.s.square().sum() + memory.z.sum() + 0 * sum(x.sum() for x in qkv)  # no tokens: still a graph
    gradients = torch.autograd.grad(loss, [q, k, v, *core.parameters()], allow_unused=True, materialize_grads=True)
    return [out, memory.s, memory.z, *gradients]


@pytest.fixture
def short_runs(set_limits) -> None:
    """Runs of one chunk, so that a few hundred tokens cross runs, chunks and blocks."""
    set_limits(features=1)


@pytest.mark.parametrize(("n", "scale"), [(0, 1), (1, 1), (7, 100), (130, 1), (130, 100)])  # 130: two chunks and a bit
@pytest.mark.parametrize("name", NAMES)
def test_scan_is_the_loop(name: str, n: int, scale: float) -> None:
    """At scale 100 the scores are 10,000 times larger; no exponential may care."""
    core, qkv, valid = build(name), tokens(name, n, scale=scale), some_valid(n)
    for begun, mask in ((False, valid), (True, valid), (True, None)):
        fast = scanned(core.scan, core, qkv, mask, begun)
        slow = scanned(lambda *x: Core.scan(core, *x), core, qkv, mask, begun)
        assert max(map(distance, fast, slow)) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_runs_change_nothing(name: str, request: pytest.FixtureRequest) -> None:
    core, qkv, valid = build(name), tokens(name, 193), some_valid(193)
    whole = scanned(core.scan, core, qkv, valid, True), attend(*qkv, core, valid=valid)
    request.getfixturevalue("short_runs")
    parts = scanned(core.scan, core, qkv, valid, True), attend(*qkv, core, valid=valid)
    assert max(map(distance, parts[0], whole[0])) < 1e-9
    assert distance(parts[1], whole[1]) < 1e-9


@pytest.mark.parametrize("factor", [1e2, 1e4])
@pytest.mark.parametrize("name", NAMES)
def test_the_future_does_not_even_round(name: str, factor: float) -> None:
    core, (q, k, v) = build(name), tokens(name, 150)
    for cut in (1, 63, 70, 149):
        louder = [torch.cat([x[:, :, :cut], x[:, :, cut:] * factor], 2) for x in (q, k, v)]
        before, after = (attend(*x, core, causal=True)[:, :, :cut] for x in ((q, k, v), louder))
        assert distance(after, before) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_see_is_zero_with_zero_gradient(name: str, causal: bool) -> None:
    core, (q, k, v) = build(name), tokens(name, 70)
    valid = torch.zeros(B, 70, dtype=torch.bool, device=DEVICE)
    valid[1, 66:] = True
    memory = core.empty(k, v)
    places = Places.of(k[:, 0], valid)
    out = core.scan(memory, q, k, v, places)[0] if causal else core.read(core.push(memory, k, v, places), q, places)
    assert (out[0] == 0).all() and (out[1, :, 66:] != 0).any()
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert torch.isfinite(gradient).all() and (gradient[0] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_grouped_heads_are_repeated_heads(name: str) -> None:
    core, (q, k, v) = build(name), tokens(name, 70)
    every = build(name, g=H)
    with torch.no_grad():
        for full, shared in zip(every.parameters(), core.parameters(), strict=True):
            full.copy_(shared.repeat_interleave(len(full) // len(shared), 0))
    repeated = [x.repeat_interleave(H // G, 1) for x in (k, v)]
    for causal in (False, True):
        assert distance(attend(q, k, v, core, causal=causal), attend(q, *repeated, every, causal=causal)) < 1e-12
    assert core.empty(k, v).s.shape[:2] == (B, G)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_kept_in_float32(name: str, dtype: torch.dtype) -> None:
    core, qkv = build(name).float(), [x.detach().to(dtype) for x in tokens(name, 300)]
    golden = attend(*(x.double() for x in qkv), core.double(), causal=True)
    out, memory = core.float().scan(core.empty(*qkv[1:]), *qkv, Places.of(qkv[1][:, 0]))
    assert out.dtype == dtype and {x.dtype for x in memory} == {torch.float32}
    assert distance(out.double(), golden) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_attend_compiles_whole(name: str) -> None:
    """Layers of every row are compiled in test_compile.py."""
    core, (q, k, v) = build(name), tokens(name, 130)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, core, causal=True), fullgraph=True, backend="eager")
    assert distance(compiled(q, k, v), attend(q, k, v, core, causal=True)) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_no_device_in_linear_time(name: str) -> None:
    core, (q, k, v) = build(name, longest=4096), tokens(name, 1)
    flops = []
    for n in (1024, 4096):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            attend(*(x.to("meta")[:, :, :1].expand(-1, -1, n, -1) for x in (q, k, v)), core.to("meta"), causal=True)
        flops.append(counter.get_total_flops())
    assert 3.9 < flops[1] / flops[0] < 4.1


# What is special about each.


def test_slope_of_the_positive_features() -> None:
    x = torch.randn(50, dtype=torch.float64).mul(3).requires_grad_()
    assert torch.autograd.gradcheck(EluPlusOne.apply, x) and torch.autograd.gradgradcheck(EluPlusOne.apply, x)
    assert distance(EluPlusOne.apply(x), torch.nn.functional.elu(x) + 1) < 1e-15
    far = torch.tensor([-300.0], dtype=torch.float64)
    assert EluPlusOne.apply(far) == far.exp()


def test_efficient_with_equal_keys_is_the_mean_so_far() -> None:
    core, (q, k, v) = build("efficient"), tokens("efficient", 100)
    mean = v.cumsum(2) / torch.arange(1, 101, device=DEVICE)[:, None]
    out = attend(q, k[:, :, :1].expand_as(k), v, core, causal=True)
    assert distance(out, mean.repeat_interleave(H // G, 1)) < 1e-12


def test_gates_that_never_close_are_no_gates_and_closed_ones_forget() -> None:
    core, (q, k, v) = build("gated"), tokens("gated", 100)
    bare, plain = k[..., :D], build("rfa")
    with torch.no_grad():
        k[..., D:].zero_()
        core.gate_bias.fill_(30)
    for causal in (False, True):
        assert distance(attend(q, k, v, core, causal=causal), attend(q, bare, v, plain, causal=causal)) < 1e-9
    with torch.no_grad():
        k[..., D:].fill_(-90)
    last = dense("rfa", plain, q, bare, v, torch.eye(100, dtype=torch.bool, device=DEVICE).expand(B, 1, 100, 100))
    assert distance(attend(q, k, v, core, causal=True), last) < 1e-9


def test_cosformer_without_a_positive_feature_in_common_gives_zero() -> None:
    core, (q, k, v) = build("cosformer"), tokens("cosformer", 70)
    with torch.no_grad():
        q[:, :2] = -q[:, :2].abs()  # these heads ask for nothing
        k[:, :, :5] = -k[:, :, :5].abs()  # and there is nothing to find at first
    out = attend(q, k, v, core, causal=True)
    assert (out[:, :2] == 0).all() and (out[:, :, :5] == 0).all() and (out[:, 2:, 5:] != 0).any()
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_cosformer_refuses_what_lies_beyond_its_length() -> None:
    core = Cosformer(dims(longest=8)).to(DEVICE, torch.float64)
    q, k, v = tokens("cosformer", 9)
    few = torch.arange(9, device=DEVICE) < torch.tensor([8, 3], device=DEVICE)[:, None]
    assert attend(q, k, v, core, causal=True, valid=few).isfinite().all()  # padding is no token
    for cut, causal in ((k, True), (k[:, :, :5], False)):  # too many keys, too many queries
        with pytest.raises(ValueError, match="9 tokens, but cosformer was built for max_len=8"):
            attend(q, cut, v[:, :, : cut.shape[2]], core, causal=causal, offset=0)
    with pytest.raises(ValueError, match="say how many with max_len"):
        Cosformer(Dims(8, 1))


# The scans themselves, for decays that other mechanisms bring.


@pytest.mark.parametrize("size", [0, 1, 6])
@pytest.mark.parametrize("n", [1, 5, 64, 150])
def test_chunks_are_the_recurrence(n: int, size: int) -> None:
    """No decay, one for each token, one for each feature; gradients to everything, the decay too."""
    q, k, v = (torch.randn(B, *x, dtype=torch.float64, device=DEVICE) for x in ((H, n, 6), (G, n, 6), (G, n, E)))
    decay = -torch.rand(B, G, n, size, dtype=torch.float64, device=DEVICE).exp() if size else None
    s, z = (torch.randn(B, G, *x, dtype=torch.float64, device=DEVICE) for x in ((6, E), (6,)))
    inputs = [x.requires_grad_() for x in (q, k, v, s, z, decay) if x is not None]
    fast = normalized_linear_attention(q, k, v, s, z, log_decay=decay)
    slow = recurrence(q, k, v, s, z, decay)
    assert max(map(distance, fast, slow)) < 1e-12
    assert max(map(distance, linear_attention(q, k, v, s, log_decay=decay), (slow[0], slow[2]))) < 1e-12
    gradients = (torch.autograd.grad(sum(x.sin().sum() for x in y), inputs) for y in (fast, slow))
    assert all(distance(x, y) < 1e-11 for x, y in zip(*gradients, strict=True))


def recurrence(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, decay: Tensor | None) -> tuple[Tensor, ...]:
    out, norm = [], []
    for i in range(q.shape[2]):
        keep = torch.ones_like(z) if decay is None else decay[:, :, i].exp().expand_as(z)
        s = keep[..., None] * s + k[:, :, i, :, None] * v[:, :, i, None]
        z = keep * z + k[:, :, i]
        full_s, full_z = (x.repeat_interleave(H // G, 1) for x in (s, z))
        out.append(torch.einsum("bhf,bhfe->bhe", q[:, :, i], full_s))
        norm.append((q[:, :, i] * full_z).sum(-1, keepdim=True))
    return torch.stack(out, 2), torch.stack(norm, 2), s, z


@pytest.mark.parametrize("n", [1, 16, 17, 300])
def test_running_maximum(n: int) -> None:
    x, first = torch.randn(B, G, n, 3, device=DEVICE), torch.randn(B, G, 3, device=DEVICE)
    assert torch.equal(cumulative_max(x, first), torch.maximum(x.cummax(2).values, first[:, :, None]))


@pytest.mark.parametrize("bound", ["none", "number", "heads"])
def test_exponents_with_few_passes_are_those_of_plain_operations(bound):
    torch.manual_seed(0)
    x, directions = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 5, 8), (6, 8)))
    most = {"none": None, "number": torch.tensor(2.0), "heads": torch.tensor([2.0, 3.0, 4.0])[:, None, None]}[bound]
    most = None if most is None else most.double().requires_grad_()
    wanted = [given for given in (x, directions, most) if given is not None]
    check_same_gradients(exponents(x, directions, most), plain_exponents(x, directions, most), wanted)


def test_a_ratio_with_one_gradient_is_the_safe_ratio():
    torch.manual_seed(0)
    x = torch.rand(2, 3, 4, 6, dtype=torch.float64) + 0.1
    x[0, 0, 0, -1] = 0  # a query that sees nothing
    x.requires_grad_()
    check_same_gradients(divided_by_last(x), safe_ratio(x[..., :-1], x[..., -1:]), [x])


def check_same_gradients(fast, slow, wanted):
    """Outputs, gradients, and gradients of those with respect to the first input."""
    torch.testing.assert_close(fast, slow)
    up = torch.randn_like(slow)
    found = [torch.autograd.grad(y, wanted, up, retain_graph=True) for y in (fast, slow)]
    torch.testing.assert_close(*found)
    again = [torch.autograd.grad(y, wanted[0], up, create_graph=True)[0].square().sum() for y in (fast, slow)]
    torch.testing.assert_close(*[torch.autograd.grad(y, wanted[0])[0] for y in again])
