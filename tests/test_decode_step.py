"""One decoding step by one kernel: windows and sinks over KV caches, and linear states. On a CPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from conftest import DEVICE
from regard import layer
from regard.mixers.base import Places
from regard.mixers.kv_cache import KVCache, StaticCursor, StaticKVCache
from regard.mixers.pattern_attention import PatternAttention
from regard.ops.decode_step import StepCall, StepWindow, decoding_step, step_refuses, step_window
from regard.ops.kernel_launch import launch_kernel
from regard.ops.linear.linear_op import LinearCall, with_decays
from regard.ops.linear.reference import ReferenceLinear
from regard.ops.tile.tile_op import HeadPatterns
from regard.patterns import Pattern

pytest.importorskip("triton")
from regard.ops.delta import delta_step  # these import triton
from regard.ops.linear import triton_step
from regard.ops.linear.triton_step import linear_step

B, H, G, D, E = 2, 4, 2, 6, 5
WINDOWS = {
    "Local(7)": StepWindow(6, 1, 0, 0),
    "Local(5) | Global(first=2)": StepWindow(4, 1, 2, 2),
    "Local(5) | Columns(first=3)": StepWindow(4, 1, 3, 0),
    "Dilated(3, 2)": StepWindow(4, 2, 0, 0),
    "Stride(3) | Columns(first=1)": StepWindow(2**62, 3, 1, 0),
    "Local(9) & Stride(2)": StepWindow(8, 2, 0, 0),
    "Causal()": StepWindow(2**62, 1, 0, 0),
    "Columns(first=4)": StepWindow(-1, 1, 4, 0),
}
OTHERS = [
    "Blocks(4)",
    "Local(3) | Global(at=[7])",
    "Local(3) | Stride(5)",
    "PerHead([Local(3), Local(5)])",
    "Local(3) | Tail(4, 1)",
]


def tokens(heads: int, n: int, width: int) -> Tensor:
    """Numbers (b heads n width) that lie as those of a layer do."""
    return torch.randn(B, n, heads, width, device=DEVICE).transpose(1, 2)


def attention(pattern: str, backend: str) -> PatternAttention:
    return PatternAttention(HeadPatterns.of(Pattern.parse(pattern), H), 0.4, True, backend=backend)


def cache(size: int) -> tuple[KVCache, Places]:
    """A cache of `size` tokens, the first of one row padding, and the places of the next token."""
    valid = torch.ones(B, size, dtype=torch.bool, device=DEVICE)
    valid[1, 0] = False
    k, v = tokens(G, size, D), tokens(G, size, E)
    before = Places.of(k[:, 0], valid)
    log = KVCache.empty(k, v).append(k, v, before)
    return log, Places.of(k[:, 0, :1], None, valid.sum(1), None)


def static(log: KVCache, room: int) -> StaticKVCache:
    """The same tokens in a cache of fixed room, with NaN in free slots."""
    made = []
    for x, dim in zip(log[:4], (2, 2, 1, 1), strict=True):
        shape = list(x.shape)
        shape[dim] = room
        spare = torch.nan if x.is_floating_point() else 0
        made.append(torch.full(shape, spare, dtype=x.dtype, device=DEVICE))
        made[-1].narrow(dim, 0, log.size).copy_(x.narrow(dim, 0, log.size))
    k, v, at, valid = made
    cursor = StaticCursor(at, valid)
    cursor.slot.fill_(log.size)
    return StaticKVCache.of(k, v, cursor)


@pytest.mark.parametrize("pattern", WINDOWS)
def test_a_step_is_the_attention_of_one_query(pattern: str) -> None:
    slow, fast = attention(pattern, "torch"), attention(pattern, "triton")
    log, places = cache(20)
    q, k, v = tokens(H, 1, D), tokens(G, 1, D), tokens(G, 1, E)
    whole = log.append(k, v, places)
    expected, _ = slow(whole, q, places)
    out, after = fast.step(log, q, k, v, places)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert after.size == 21
    fixed = static(log, 27)
    out, same = fast.step(fixed, q, k, v, places)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert same is fixed and fixed.newest.written
    assert torch.equal(fixed.k[:, :, :21], whole.keys) and torch.equal(fixed.v[:, :, :21], whole.values)
    assert fixed.k[:, :, 21:].isnan().all() and torch.equal(fixed.at[:, :21], whole.at[:, :21])


def test_few_programs_load_keys_before_their_positions() -> None:
    """A single row is computed without waiting for positions, and free slots may hold NaN."""
    fixed = static(cache(20)[0], 27)
    places = torch.full((B, 1), 20, device=DEVICE)
    call = StepCall(tokens(H, 1, D), fixed.k, fixed.v, fixed.at, fixed.valid, places, StepWindow(6, 1, 2, 0), 0.4)
    row = StepCall(*(x[:1] for x in call[:6]), *call[6:])
    torch.testing.assert_close(decoding_step(row), decoding_step(call)[:1])


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    log, places = cache(20)
    call = StepCall(tokens(H, 1, D), log.keys, log.values, log.at, log.valid, places.at, StepWindow(-1, 1, 0, 0), 1.0)
    assert torch.equal(decoding_step(call), torch.zeros(B, H, 1, E, device=DEVICE))


@pytest.mark.parametrize("pattern", [*WINDOWS, *OTHERS])
def test_windows_are_found_in_patterns(pattern: str) -> None:
    """A window has the pairs of its pattern; other patterns have none."""
    parsed = Pattern.parse(pattern)
    found = step_window(tuple(parsed.for_head(h, H) for h in range(H)))
    assert found == WINDOWS.get(pattern)
    if found is not None:
        i, j = torch.arange(40)[:, None], torch.arange(40)
        gap = i - j
        near = (gap <= found.back) & (gap % found.step == 0)
        assert torch.equal((near | (j < found.first) | (i < found.rows)) & (gap >= 0), parsed(0, i, j) & (gap >= 0))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda call: call._replace(q=call.q.double()), "float16, bfloat16 and float32, not float64"),
        (lambda call: call._replace(q=call.q.requires_grad_()), "no gradients"),
        (lambda call: call._replace(q=tokens(H, 2, D)), "one query of every row, not 2"),
        (lambda call: call._replace(k=call.k[:, :, :1].expand(-1, -1, 5000, -1)), "up to 4096 slots, not 5000"),
        (lambda call: call._replace(k=call.k[..., :1].expand(-1, -1, -1, 257)), "up to 256 columns, not 257"),
    ],
)
def test_what_the_step_kernel_does_not_take_is_refused(change, why: str) -> None:
    log, places = cache(5)
    call = StepCall(tokens(H, 1, D), log.keys, log.values, log.at, log.valid, places.at, StepWindow(3, 1, 0, 0), 1.0)
    assert step_refuses(call) is None
    assert why in step_refuses(change(call))


def test_steps_with_a_bias_dropout_padding_or_another_backend_take_the_general_way() -> None:
    log, places = cache(5)
    q, k, v = tokens(H, 1, D), tokens(G, 1, D), tokens(G, 1, E)
    fast = attention("Local(3)", "triton")
    padded = Places.of(k[:, 0], torch.ones(B, 1, dtype=torch.bool, device=DEVICE), places.at[:, 0])
    assert fast.step(log, q, k, v, padded) is None
    for other in (fast._replace(dropout=0.1), fast._replace(positions=object()), fast._replace(backend="torch")):
        assert other.step(log, q, k, v, places) is None
    assert log.size == 5


@pytest.mark.parametrize("decay", [0, 1, D])
@pytest.mark.parametrize("norms", [False, True])
def test_a_linear_step_is_the_recurrence(decay: int, norms: bool) -> None:
    q, k, v = tokens(H, 1, D), tokens(G, 1, D).exp(), tokens(G, 1, E)
    state, norm_state = torch.randn(B, G, D, E, device=DEVICE), torch.rand(B, G, D, device=DEVICE) if norms else None
    log_decay = -torch.rand(B, G, 1, decay, device=DEVICE) if decay else None
    call = LinearCall(q, k, v, state, log_decay, norm_state)
    exact = ReferenceLinear().forward(LinearCall(*(None if x is None else x.double() for x in call[:6])))
    for x, y in zip(linear_step(call), exact, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gates", [1, D])
def test_a_linear_step_turns_gates_into_decays(gates: int) -> None:
    """As if the decays had been given; a state into which nothing is written does not fade."""
    k, v, state = tokens(G, 1, D), tokens(G, 1, E), torch.randn(B, G, D, E, device=DEVICE)
    valid = torch.tensor([[True], [False]], device=DEVICE)
    call = LinearCall(tokens(H, 1, D), k, v, state, tokens(G, 1, gates), valid=valid, gate_root=3.0)
    found, expected = linear_step(call), linear_step(with_decays(call))
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][1], state[1])


def test_a_linear_step_has_features_a_scale_a_norm_and_padding() -> None:
    q, k, v = tokens(H, 1, D), tokens(G, 1, D), tokens(G, 1, E)
    state, norm_state = torch.rand(B, G, D, E, device=DEVICE), torch.rand(B, G, D, device=DEVICE)
    valid = torch.tensor([[True], [False]], device=DEVICE)
    out, after, norm, sums = linear_step(LinearCall(q, k, v, state, None, norm_state, valid, "elu", 0.5, True))
    keys = (torch.nn.functional.elu(k) + 1) * valid[:, None, :, None]
    queries = (torch.nn.functional.elu(q) + 1).unflatten(1, (G, -1))
    expected = state + keys.mT @ v
    total = norm_state + keys.squeeze(2)
    ratio = queries.flatten(2, 3) @ expected / (queries.flatten(2, 3) @ total.unsqueeze(-1))
    assert norm is None
    torch.testing.assert_close(after, expected)
    torch.testing.assert_close(sums, total)
    torch.testing.assert_close(out, ratio.unflatten(2, (-1, 1)).flatten(1, 2), rtol=1e-5, atol=1e-6)
    written, last, _, _ = linear_step(LinearCall(None, k, v, state, None, norm_state, valid, "relu"))
    assert written.shape[1] == 0
    torch.testing.assert_close(last, state + (k.relu() * valid[:, None, :, None]).mT @ v)


def test_a_linear_step_refuses_more_than_a_token() -> None:
    two = tokens(G, 2, D)
    with pytest.raises(ValueError, match="one token of every row, not 2"):
        linear_step(LinearCall(two, two, two, torch.zeros(B, G, D, D, device=DEVICE)))
    with pytest.raises(ValueError, match="no norm to divide by"):
        linear_step(LinearCall(None, two[:, :, :1], two[:, :, :1], torch.zeros(B, G, D, D, device=DEVICE), normalize=True))


@pytest.mark.parametrize("prompt", [0, 4])
@pytest.mark.parametrize("spec", ["linear", "retention", "gla", "delta"])
def test_a_layer_decodes_by_the_step_kernels(spec: str, prompt: int, monkeypatch) -> None:
    """Steps without gradients are the kernels, and continue a stream as the torch backend does, after a prompt too."""
    launched = []

    def counted(kernel, *arguments) -> None:
        launched.append(kernel)
        launch_kernel(kernel, *arguments)

    for module in (triton_step, delta_step):
        monkeypatch.setattr(module, "launch_kernel", counted)
    x, found = torch.randn(3, prompt + 3, 16, device=DEVICE), []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        made = layer(spec, width=16, heads=2, kv_heads=1, causal=True, backend=backend).to(DEVICE)
        with torch.no_grad():
            state, outs = made.start(3), []
            if prompt:
                _, state = made.extend(state, x[:, :prompt])
            for i in range(prompt, prompt + 3):
                y, state = made.extend(state, x[:, i : i + 1])
                outs.append(y)
        found.append(torch.cat(outs, 1))
    assert len(launched) == 3
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
