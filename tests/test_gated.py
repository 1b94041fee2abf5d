"""Memories that fade or overwrite, against the recurrences of their papers; their limits; and windows beside them."""

import math

import pytest
import torch
from torch import Tensor

from conftest import DEVICE, close, data, some
from regard import Dims, attend, core, layer
from regard.mixers.base import Core, Places
from regard.ops.delta.delta_op import DeltaCall, delta_write
from regard.ops.delta.reference import ReferenceDelta

B, H, G, D, E = 2, 4, 2, 6, 3
SPECS = [
    "retention",
    "retention(norm=False)",
    "gla",
    "gla(gate='head')",
    "delta",
    "delta(gated=True)",
    "delta(activation='none')",
]


def build(spec: str, g: int = G, **options) -> Core:
    return core(spec, Dims(H * D, H, kv_heads=g, key_dim=D, value_dim=E, **options)).to(DEVICE, torch.float64)


def tokens(made: Core, n: int, m: int | None = None) -> list[Tensor]:
    m = n if m is None else m
    sizes = (H, n, D), (made.dims.g, m, D + made.gates), (made.dims.g, m, E)
    return [torch.randn(B, *size, dtype=torch.float64, device=DEVICE).requires_grad_() for size in sizes]


# The definitions, a token at a time, as the papers write them. q (d), k (d), gates, v (e), one head, one sequence of real tokens.


def retention_by_hand(made, q, k, v, head):
    gamma, s, out = 1 - 2.0 ** -(5 + head), torch.zeros(D, E, dtype=q.dtype, device=q.device), []
    for i in range(len(q)):
        s = gamma * s + torch.outer(k[i], v[i])
        weight = sum(gamma**j for j in range(i + 1)) if made.norm else 1.0
        out.append(q[i] @ s / math.sqrt(D * weight))
    return torch.stack(out)


def gla_by_hand(made, q, k, v, head):  # noqa: ARG001
    s, out = torch.zeros(D, E, dtype=q.dtype, device=q.device), []
    for i in range(len(q)):
        alpha = torch.sigmoid(k[i, D:]) ** (1 / 16)
        s = alpha[:, None] * s + torch.outer(k[i, :D], v[i])
        out.append(q[i] @ s / math.sqrt(D))
    return torch.stack(out)


def delta_by_hand(made, q, k, v, head):  # noqa: ARG001
    s, out = torch.zeros(D, E, dtype=q.dtype, device=q.device), []
    shape = torch.nn.functional.silu if made.activation == "silu" else lambda x: x
    for i in range(len(q)):
        key, query = (shape(x) / shape(x).norm() for x in (k[i, :D], q[i]))
        beta = torch.sigmoid(k[i, D])
        s = s if made.gates == 1 else torch.sigmoid(k[i, D + 1]) ** (1 / 16) * s
        s = s - beta * torch.outer(key, key @ s - v[i])
        out.append(query @ s)
    return torch.stack(out)


BY_HAND = {"retention": retention_by_hand, "gla": gla_by_hand, "delta": delta_by_hand}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_is_the_recurrence_of_its_paper(spec, causal):
    """Chunks cross 64; padding leaves no trace; where it is not causal, all queries read what is left at the end."""
    made, n = build(spec), 83
    (q, k, v), valid = tokens(made, n), some(B, n)
    out = attend(q, k, v, made, causal=causal, valid=valid, query_valid=None if causal else valid)
    expected = torch.zeros_like(out)
    for b in range(B):
        for h in range(H):
            g, real = h * G // H, valid[b]
            keys, values, queries = k[b, g, real], v[b, g, real], q[b, h, real]
            if causal:
                expected[b, h, real] = BY_HAND[made.name](made, queries, keys, values, g)
            else:  # the last answer for each query, asked by all in turn: what is written does not depend on who asks
                again = [BY_HAND[made.name](made, x.expand(len(keys), -1), keys, values, g)[-1] for x in queries[:3]]
                expected[b, h, real.nonzero()[:3, 0]] = torch.stack(again)
    if not causal:
        first = valid.long().cumsum(1) <= 3
        out, expected = (x * (first & valid)[:, None, :, None] for x in (out, expected))
    close(out, expected)
    up = torch.randn_like(out)
    grads = [torch.autograd.grad((y * up).sum(), (q, k, v), retain_graph=True) for y in (out, expected)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 193])
@pytest.mark.parametrize("spec", SPECS)
def test_scan_is_the_loop_in_runs_too(spec, n, set_limits):
    made = build(spec)
    (q, k, v), valid = tokens(made, n), torch.rand(B, n, device=DEVICE) < 0.7

    def both(scan, begun):
        memory = made.empty(k, v)
        if begun:
            memory = made.push(memory, k[:, :, :5].flip(2), v[:, :, :5], Places.of(k[:, 0, :5]))
        out, memory = scan(memory, q, k, v, Places.of(k[:, 0], valid))
        loss = out.sin().sum() + memory.s.square().sum() + 0 * (q.sum() + k.sum() + v.sum())
        return [out, memory.s, *torch.autograd.grad(loss, (q, k, v))]

    for begun in (False, True):
        slow = both(lambda *x: Core.scan(made, *x), begun)
        for room in (1 << 20, 1):  # one run, or a run for every chunk
            set_limits(features=room)
            for a, b in zip(both(made.scan, begun), slow, strict=True):
                close(a, b)


@pytest.mark.parametrize("factor", [1e2, 1e4])
@pytest.mark.parametrize("spec", SPECS)
def test_the_future_does_not_even_round(spec, factor):
    made = build(spec)
    q, k, v = tokens(made, 150)
    for cut in (1, 63, 70, 149):
        louder = [torch.cat([x[:, :, :cut], x[:, :, cut:] * factor], 2) for x in (q, k, v)]
        close(*(attend(*x, made, causal=True)[:, :, :cut] for x in (louder, (q, k, v))), tol=1e-12)


def kept_for_backward(spec: str, n: int) -> int:
    """Numbers that a causal pass keeps until its backward pass."""
    made, kept = core(spec, Dims(32, 2, causal=True, max_len=8192)).to(DEVICE), {}
    q, k, v = (torch.randn(1, 2, n, x, device=DEVICE, requires_grad=True) for x in (16, *made.sizes))

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(q, k, v, made, causal=True)
    out.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("spec", [*SPECS, "cosformer", "hybrid", "hybrid(far='delta')"])
def test_what_a_pass_keeps_grows_with_the_tokens(spec, set_limits):
    set_limits(features=1 << 14)  # several runs
    assert kept_for_backward(spec, 8192) <= 4.2 * kept_for_backward(spec, 2048)


# Limits.


def unnormalised(q, k, v, causal):
    scores = q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(D)
    return (scores.tril() if causal else scores) @ v.repeat_interleave(H // G, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["gla", "gla(gate='head')", "retention(power=50, norm=False)"])
def test_without_forgetting_it_is_linear_attention_without_a_norm(spec, causal):
    made = build(spec)
    q, k, v = tokens(made, 90)
    with torch.no_grad():
        k[..., D:] = 40.0
    close(attend(q, k, v, made, causal=causal), unnormalised(q, k[..., :D], v, causal))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_dtype_rounds_retention_up_to_no_forgetting(dtype):
    made = core("retention(norm=False)", Dims(16 * D, 16)).to(DEVICE, dtype)
    decay = made._rate(torch.zeros(1, dtype=torch.float64, device=DEVICE)).flatten()
    close(decay.exp(), 1 - 2.0 ** -torch.arange(5, 21, device=DEVICE).double(), tol=1e-15)


def test_retention_keeps_the_size_of_long_sums():
    """Of random tokens: by itself the answer would be as large as the root of what is remembered."""
    made = core("retention", Dims(256, 4)).to(DEVICE)
    q, k, v = (torch.randn(1, 4, 4096, 64, device=DEVICE) for _ in range(3))
    size = attend(q, k, v, made, causal=True).square().mean((0, 2, 3)).sqrt()
    assert (size > 0.5).all() and (size < 1.1).all()


def test_delta_stores_recalls_and_overwrites():
    made = build("delta(activation='none')")
    basis = torch.linalg.qr(torch.randn(B, G, D, D, dtype=torch.float64, device=DEVICE))[0]
    old, new = (torch.randn(B, G, D, E, dtype=torch.float64, device=DEVICE) for _ in range(2))
    keys = torch.nn.functional.pad(basis, (0, 1), value=40.0)  # beta = 1
    asked = basis.repeat_interleave(H // G, 1)
    close(attend(asked, keys, old, made), old.repeat_interleave(H // G, 1))
    twice = [torch.cat([keys, keys[:, :, :3]], 2), torch.cat([old, new[:, :, :3]], 2)]
    expected = torch.cat([new[:, :, :3], old[:, :, 3:]], 2)
    close(attend(asked, *twice, made), expected.repeat_interleave(H // G, 1))


def test_delta_survives_a_key_that_never_changes():
    """The worst triangle: all ones, where the powers of an expanded inverse reach 10^18. The answer is the last value."""
    made = core("delta", Dims(16, 1)).to(DEVICE)
    k = torch.nn.functional.pad(torch.ones(1, 1, 4096, 16, device=DEVICE), (0, 1), value=40.0)
    v = torch.randn(1, 1, 4096, 16, device=DEVICE)
    close(attend(k[..., :16], k, v, made, causal=True), v, tol=1e-5)


def test_delta_solves_for_what_is_written():
    """write is step after step, for the state that it leaves; gradients through the first state too."""
    k = torch.nn.functional.normalize(torch.randn(B, G, 150, D, dtype=torch.float64, device=DEVICE), dim=-1)
    v, s = (torch.randn(B, G, *x, dtype=torch.float64, device=DEVICE) for x in ((150, E), (D, E)))
    beta, decay = torch.rand(2, B, G, 150, 1, dtype=torch.float64, device=DEVICE)
    inputs = [x.requires_grad_() for x in (k, v, beta, s, decay)]
    for fade in (None, -decay):
        slow = s
        for i in range(150):
            one = slice(i, i + 1)
            own = None if fade is None else fade[:, :, one]
            slow = delta_write(k[:, :, one], v[:, :, one], beta[:, :, one], slow, log_decay=own)
        fast = delta_write(k, v, beta, s, log_decay=fade)
        close(fast, ReferenceDelta().write(DeltaCall(None, k, v, beta, s, fade)))
        close(fast, slow)
        for a, b in zip(*(torch.autograd.grad(x.sin().sum(), inputs, materialize_grads=True) for x in (fast, slow)), strict=True):
            close(a, b)


# A window beside a memory.


@pytest.mark.parametrize("far", ["linear", "gla", "delta", "retention", "rfa(features=8, gated=True)", "cosformer", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_hybrid_with_a_closed_gate_is_one_of_its_parts(far, causal):
    made = build(f"hybrid(pattern=Local(7), far={far!r})", max_len=64)
    (q, k, v), valid = tokens(made, 50), some(B, 50)
    options = {"causal": causal, "valid": valid, "query_valid": None if causal else valid}
    made.far.load_state_dict(build(far, max_len=64).state_dict())
    for gate, alone, keys in ((30.0, build(far, max_len=64), k), (-30.0, build("Local(7)"), k[..., :D])):
        with torch.no_grad():
            made.gate.fill_(gate)
        close(attend(q, k, v, made, **options), attend(q, keys, v, alone, **options))
    with torch.no_grad():
        made.gate.copy_(torch.tensor([0.0, -30.0, 30.0, 1.0]))
    far_out, near_out = attend(q, k, v, build(far, max_len=64), **options), attend(q, k[..., :D], v, build("Local(7)"), **options)
    share = made.gate.sigmoid()[:, None, None]
    close(attend(q, k, v, made, **options), share * far_out + (1 - share) * near_out)


def test_hybrid_begins_with_a_share_of_far():
    made = build("hybrid(share=0.1)")
    assert torch.allclose(made.gate.sigmoid(), torch.full_like(made.gate, 0.1))
    for share in (0, 1, "half"):
        with pytest.raises(ValueError, match="share must be a number between 0 and 1"):
            build(f"hybrid(share={share!r})")


def test_hybrid_claims_what_both_parts_can():
    assert str(build("hybrid").can) == "causal, cross, padding, stream"
    assert str(build("hybrid(pattern=Random(1, 8))").can) == "causal, cross, padding"
    with pytest.raises(ValueError, match="cannot do dropout"):
        build("hybrid", dropout=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_sinks_are_a_pattern(causal):
    made, same = build("sinks(window=5, first=3)"), build("Local(5) | Columns(first=3)")
    q, k, v = tokens(made, 60)
    close(attend(q, k, v, made, causal=causal), attend(q, k, v, same, causal=causal), tol=0)


def test_sinks_stream_for_ever_in_a_constant_memory():
    mixer, x, sizes = layer("sinks(window=16, first=4)", width=32, heads=4, causal=True).to(DEVICE), data(2000, b=1).float(), []
    with torch.no_grad():
        state, out = mixer.start(1), []
        for part in x.split(50, 1):
            y, state = mixer.extend(state, part)
            out.append(y)
            sizes.append(state.nbytes)
        assert max(sizes[20:]) == max(sizes[5:20])
        close(torch.cat(out, 1), mixer(x), tol=1e-5)
