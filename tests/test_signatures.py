"""What passes keep for a signature: calls that differ in anything but values get launches and constants of their own."""

from itertools import product

import pytest
import torch

import regard
from conftest import DEVICE
from regard.mixers.places import Places
from regard.ops import kernel_launch
from regard.ops.kernel_launch import SharedConstants
from regard.ops.linear.linear_op import divided_linear_attention, linear_attention
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.tile_op import HeadPatterns, tile_attention
from regard.ops.triton_support import has_triton
from regard.patterns import Pattern
from regard.patterns.tiles import Span

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
N, SPAN = 40, Span(0, 40, 0, 40)


def laid_out(x, tokens_first):
    """The same numbers (b h n d) with the heads of a token side by side, or the tokens of a head."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x.contiguous()


def tile_results(backend, x, up, *, text="Local(9)", causal=True, **options):
    q, k, v = (y.detach().requires_grad_() for y in x)
    patterns = HeadPatterns.of(Pattern.parse(text), 2)
    torch.manual_seed(1)
    out, lse = tile_attention(q, k, v, patterns, SPAN, causal=causal, backend=backend, **options)
    loss = (lse * (lse > -1e29)).sum() if up is None else 0
    grads = torch.autograd.grad(loss, [q, k]) if up is None else torch.autograd.grad(out, [q, k, v], up)
    return [out, *grads]


def test_tile_passes_of_other_signatures_are_not_confused():
    """All calls have the same shapes; each differs from one before it in one thing."""
    x = [torch.randn(1, 2, N, 16, device=DEVICE) for _ in range(3)]
    up = torch.randn(1, 2, N, 16, device=DEVICE)
    valid = torch.arange(N, device=DEVICE)[None] < 30
    slopes = ScoreBias(torch.tensor([0.5, 0.1], device=DEVICE))
    calls = [
        {"scale": 0.5},
        {"scale": 0.2},
        {"scale": 0.5, "causal": False},
        {"scale": 0.5, "text": "Local(5)"},
        {"scale": 0.5, "valid": valid},
        {"scale": 0.5, "bias": slopes},
        {"scale": 0.5, "dropout": 0.3},
    ]
    for options, lies in [*product(calls, [(True, True)]), *product(calls[:1], [(True, False), (False, True), (False, False)])]:
        given = [laid_out(y, lies[0]) for y in x]
        upstream = laid_out(up, lies[1])
        expected = tile_results("reference", [y.double() for y in x], up.double(), **options)
        for _ in range(2):  # the second call takes what the first one prepared
            for a, b in zip(tile_results("triton", given, upstream, **options), expected, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_a_tile_pass_serves_gradients_of_the_log_sum_exp_too():
    x = [torch.randn(1, 2, N, 16, device=DEVICE) for _ in range(3)]
    for up in (torch.ones(1, 2, N, 16, device=DEVICE), None):
        found = tile_results("triton", x, up, scale=0.5)
        expected = tile_results("reference", [y.double() for y in x], None if up is None else up.double(), scale=0.5)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def linear_results(backend, x, up, state, scale, feature):
    q, k, v = (y.detach().requires_grad_() for y in x)
    if feature is None:
        out = linear_attention(q, k, v, state, scale=scale, backend=backend)[0]
    else:
        out = divided_linear_attention(q, k, v, state, state[..., 0], feature=feature, backend=backend)[0]
    return [out, *torch.autograd.grad(out, [q, k, v], up)]


def test_linear_launches_of_other_signatures_are_not_confused():
    x = [torch.rand(1, 1, 12, 16, device=DEVICE) for _ in range(3)]
    up = torch.randn(1, 1, 12, 16, device=DEVICE)
    x, up = ([torch.cat([y, y.flip(2)], 1) for y in x], torch.cat([up, up.flip(2)], 1))
    first = torch.rand(1, 2, 16, 16, device=DEVICE)
    cases = [(1.0, None, True, True), (0.3, None, True, True), (1.0, "elu", True, True), (1.0, "elu", False, True)]
    for scale, feature, *lies in [*cases, (1.0, "elu", True, False), cases[0]]:
        given = [laid_out(y, lies[0]) for y in x]
        wide = [y.double() for y in x]
        expected = linear_results("reference", wide, up.double(), first.double(), scale, feature)
        for a, b in zip(linear_results("triton", given, laid_out(up, lies[1]), first, scale, feature), expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spec", ["Local(7)", "linear", "retention", "gla"])
def test_a_pass_from_nothing_is_a_scan_of_an_empty_memory(spec):
    layer = regard.layer(spec, width=16, heads=1, causal=True, backend="triton").to(DEVICE)
    for n in (17, 20):
        x = torch.randn(1, n, 16, device=DEVICE)
        places = Places.of(x)
        q, k, v = layer.heads(x, places)
        expected = layer.core.scan(layer.core.empty(k[:, :, :0], v[:, :, :0]), q, k, v, places)[0]
        torch.testing.assert_close(layer.core.scan_all(q, k, v, places), expected, rtol=1e-5, atol=1e-5)


def test_the_constants_of_retention_follow_its_buffer():
    """Layers share them by value: other powers, loaded later, have others."""
    slow, fast = (
        regard.layer(f"retention(power={p})", width=16, heads=1, causal=True, backend="triton").to(DEVICE) for p in (5, 1)
    )
    x = torch.randn(1, 12, 16, device=DEVICE)
    fast.load_state_dict({name: y for name, y in slow.state_dict().items() if name != "core.powers"}, strict=False)
    before = slow(x)
    assert not torch.allclose(before, fast(x), atol=1e-3)
    fast.load_state_dict(slow.state_dict())
    assert torch.equal(fast(x), before)
    fast.core.powers = slow.core.powers - 4
    assert not torch.allclose(before, fast(x), atol=1e-3)


class FakeCuda:
    """A tensor and the streams of a device that this machine does not have."""

    is_cuda, device = True, "cuda:0"

    def __init__(self):
        self.used = []

    def numel(self):
        return 3

    def get_device(self):
        return 0

    def record_stream(self, stream):
        self.used.append(stream)


class FakeStream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


def test_constants_wait_on_other_streams_and_stay_for_graphs(monkeypatch):
    class Event:
        def record(self, stream):
            self.stream = stream

    streams = {7: FakeStream(), 8: FakeStream()}
    now = {"stream": 7, "captured": False}
    monkeypatch.setattr(kernel_launch, "_current_stream", lambda _: now["stream"])
    monkeypatch.setattr(kernel_launch, "_in_graphs", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[now["stream"]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captured"])
    x = FakeCuda()
    made = SharedConstants(x)
    assert made.made.stream is streams[7] and made.size == 3
    assert made.read() == (x,) and not streams[7].waited and not x.used
    now["stream"] = 8
    assert made.read() == (x,) and streams[8].waited == [made.made] and x.used == [streams[8]]
    assert not kernel_launch._in_graphs
    now["captured"] = True
    assert made.read() == (x,) and len(streams[8].waited) == 1 and list(kernel_launch._in_graphs.values()) == [made]
    assert not kernel_launch.may_keep(x)
