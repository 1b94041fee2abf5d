"""Representative keys: formulas written out, the limits where each is softmax, how good the estimates are, what they hold."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as exact

import regard.mixers.attention as attention
import regard.mixers.low_rank as low_rank
from conftest import DEVICE, close, data, some
from regard import Core, Dims, Places, Spec, attend, core, layer
from regard.mixers.base import pool_tokens
from regard.mixers.low_rank import tie_linformer
from regard.ops.mix_tokens import mix_tokens
from regard.ops.pseudo_inverse import newton_schulz
from test_limits import Largest, check_same, qkv

BOTH = pytest.mark.parametrize("causal", [False, True])


def made(spec, causal=False, **dims):
    torch.manual_seed(0)
    return core(spec, Dims(32, 4, causal=causal, **{"max_len": 128, **dims})).to(DEVICE, torch.float64)


def shaken(spec, causal=False, **dims):
    """A core whose own weights are nothing special."""
    mechanism = made(spec, causal, **dims)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in mechanism.parameters():
            p += torch.randn(p.shape, generator=g, dtype=torch.float64).to(p) / p.shape[-1] ** 0.5
    return mechanism


def check_padding(mechanism, causal, n=61):
    """A row with holes is the row without them, outputs and gradients; what stands in the holes does not matter."""
    q, k, v = qkv(n, b=3)
    valid = some(3, n)
    valid[1] = False
    spoiled = [torch.where(valid[:, None, :, None], x, 1e3) for x in (q, k, v)]
    out = attend(*spoiled, mechanism, causal=causal, valid=valid, query_valid=None if causal else valid)
    up = torch.randn_like(out)
    found = torch.autograd.grad((out * up).sum(), (q, k, v))
    for row in (0, 2):
        here = valid[row]
        alone = [x[row : row + 1, :, here].detach().requires_grad_() for x in (q, k, v)]
        y = attend(*alone, mechanism, causal=causal)
        close(out[row, :, : y.shape[2]] if mechanism.rate > 1 else out[row : row + 1, :, here][0], y[0])
        there = up[row : row + 1, :, : y.shape[2]] if mechanism.rate > 1 else up[row : row + 1, :, here]
        for a, b in zip(found, torch.autograd.grad((y * there).sum(), alone), strict=True):
            close(a[row : row + 1, :, here], b)
    assert (out[1] == 0).all()
    assert all((x[1] == 0).all() and x.isfinite().all() for x in found)


def check_loop(mechanism, n=45, before=0):
    """The scan is the loop, gradients of its own weights included."""
    q, k, v = qkv(n + before)
    valid = some(2, n + before)

    def run(scan):
        places, memory = Places.of(k[:, 0], valid), mechanism.empty(k, v)
        if before:
            memory = mechanism.push(memory, k[:, :, :before], v[:, :, :before], places.part(0, before))
        y, _ = scan(memory, *(x[:, :, before:] for x in (q, k, v)), places.part(before, n + before))
        y = y * valid[:, None, before:, None]
        up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype).to(y)
        return [y, *torch.autograd.grad((y * up).sum(), (q, k, v, *mechanism.parameters()), materialize_grads=True)]

    for a, b in zip(run(mechanism.scan), run(partial(Core.scan, mechanism)), strict=True):
        close(a, b)


def smooth(n, seed, size=1.5):
    """Queries or keys that change slowly along the sequence."""
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 6.283, n, dtype=torch.float64)[:, None]
    height, phase = (torch.randn(4, 4, 1, 8, generator=g, dtype=torch.float64) for _ in range(2))
    return size * sum(height[f] * torch.sin((f + 1) * t + 3 * phase[f]) / (f + 1) for f in range(4))[None].to(DEVICE)


@torch.no_grad()
def errors(mechanisms, n):
    """How far each is from softmax on slow data, and how far equal weights are."""
    q, k, v = smooth(n, 1), smooth(n, 2), torch.eye(n, dtype=torch.float64, device=DEVICE).expand(1, 4, n, n)
    a = exact(q, k, v)
    return [float((attend(q, k, v, m) - a).norm() / a.norm()) for m in mechanisms], float((1 / n - a).norm() / a.norm())


# linformer


def with_weights(e, f, causal=False, share="none"):
    """A linformer with E and F (positions, rank)."""
    mechanism = made(Spec("linformer", rank=e.shape[1], share=share), causal, max_len=len(e))
    with torch.no_grad():
        for p, w in ((mechanism.project_k, e), (mechanism.project_v, f)):
            if p is not None:
                p.copy_(w)
    return mechanism


@BOTH
@pytest.mark.parametrize("share", ["none", "head", "kv", "layer"])
@pytest.mark.parametrize("n", [90, 33, 1])
def test_linformer_with_the_identity_is_softmax(causal, share, n):
    mechanism = with_weights(torch.eye(90), torch.eye(90), causal, share)
    check_same(lambda *x: attend(*x, mechanism, causal=causal), partial(exact, is_causal=causal), qkv(n))


@BOTH
def test_linformer_begins_as_softmax_while_tokens_are_few(causal):
    mechanism = made("linformer(rank=40)", causal)
    check_same(lambda *x: attend(*x, mechanism, causal=causal), partial(exact, is_causal=causal), qkv(40))
    more_slots = made("linformer(rank=200)", causal)  # than positions
    check_same(lambda *x: attend(*x, more_slots, causal=causal), partial(exact, is_causal=causal), qkv(90))


def test_linformer_starts_with_scores_of_the_same_size_at_any_length():
    mechanism = made("linformer(rank=8)", max_len=4096)
    for n in (8, 64, 512, 4096):
        k = torch.randn(1, 4, n, 8, dtype=torch.float64, device=DEVICE)
        slots = mechanism.push(mechanism.empty(k, k), k, k, Places.of(k[:, 0]))
        assert 0.7 < slots.k.std() < 1.5


@BOTH
@pytest.mark.parametrize("share", ["none", "head", "kv"])
def test_linformer_is_its_formula(causal, share):
    mechanism = shaken(f"linformer(rank=6, share={share!r})", causal, kv_heads=2)
    q, k, v = qkv(50)
    k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))

    def formula(q, k, v):
        weights = mechanism.project_k, mechanism.project_k if share == "kv" else mechanism.project_v
        e, f = (w[:, :50].expand(2, -1, -1) for w in weights)
        if causal:  # the slots at every time
            slots = (torch.einsum("gnr,bgnx->bgnrx", w, x).cumsum(2).repeat_interleave(2, 1) for w, x in ((e, k), (f, v)))
        else:
            slots = (torch.einsum("gnr,bgnx->bgrx", w, x)[:, :, None].repeat_interleave(2, 1) for w, x in ((e, k), (f, v)))
        keys, values = slots
        a = (q[:, :, :, None] * keys).sum(-1).mul(8**-0.5).softmax(-1)
        return (a[..., None] * values).sum(3)

    check_same(lambda *x: attend(*x, mechanism, causal=causal), formula, [q, k, v])


@BOTH
@pytest.mark.parametrize("n", [61, 5])
def test_linformer_padding_and_loop_with_any_weights(causal, n, set_limits):
    set_limits(features=1)  # a run for each chunk
    for mechanism in (shaken("linformer(rank=5)", causal), shaken("linformer(rank=5, share='kv')", causal)):
        check_padding(mechanism, causal, n)
        if causal:
            check_loop(mechanism, 150 if n > 5 else n, before=0)
            check_loop(mechanism, 70 if n > 5 else n, before=21)


def test_linformer_cannot_see_the_future_with_any_weights():
    mechanism, (q, k, v) = shaken("linformer(rank=6)", True), qkv(60)
    out = attend(q, k, v, mechanism, causal=True)
    later = [torch.cat([x[:, :, :40], 1e4 * x[:, :, 40:]], 2) for x in (q, k, v)]
    close(attend(*later, mechanism, causal=True)[:, :, :40], out[:, :, :40])


def test_a_slot_nobody_wrote_into_is_not_seen():
    e = torch.zeros(20, 3, dtype=torch.float64)
    e[4:, 0], e[9:, 1] = 1.0, 0.5  # the last slot is never written, nothing before token 4
    mechanism, (q, k, v) = with_weights(e, e, True), qkv(20)
    out = attend(q, k, v, mechanism, causal=True)
    assert (out[:, :, :4] == 0).all()
    close(out[:, :, 4:9], v.cumsum(2)[:, :, 4:9] - v.cumsum(2)[:, :, 3:4])  # one slot only: its value
    grads = torch.autograd.grad(out[:, :, :4].sum(), (q, k, v, *mechanism.parameters()), materialize_grads=True)
    assert all((x == 0).all() for x in grads)
    check_loop(mechanism, 20)


def test_linformer_has_an_end():
    x = data(10)
    short = layer("linformer(rank=4)", width=32, heads=4, max_len=9).to(DEVICE, torch.float64)
    with pytest.raises(ValueError, match="10 tokens, but this layer was built for max_len=9"):
        short(x)
    with pytest.raises(ValueError, match="10 tokens, but linformer was built for max_len=9"):
        attend(*qkv(10), made("linformer(rank=4)", max_len=9))
    with pytest.raises(ValueError, match="linformer has weights for every position: say how many with max_len"):
        core("linformer", Dims(32, 4))
    valid = torch.arange(10, device=DEVICE).expand(3, -1) > 0  # nine real tokens, and padding beyond max_len
    close(short(x, valid=valid)[:, 1:], short(x[:, 1:]))
    close(short(x.flip(1), valid=valid.flip(1))[:, :-1], short(x.flip(1)[:, :-1]))
    cross = layer("linformer(rank=4)", width=32, heads=4, max_len=9, cross=True).to(DEVICE, torch.float64)
    assert cross(x, context=x[:, :9]).shape == x.shape  # the end is that of the context


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_sharing_counts_its_weights_once():
    own = 4 * (32 * 32 + 32)
    specs = {share: Spec("linformer", rank=5, share=share) for share in low_rank.SHARES}
    sizes = {share: count(layer(spec, width=32, heads=4, max_len=20)) - own for share, spec in specs.items()}
    assert sizes == {"none": 2 * 4 * 100, "head": 2 * 100, "kv": 100, "layer": 100}


def stack(layers=3, rank=5):
    spec = Spec("linformer", rank=rank, share="layer")
    return nn.Sequential(*(layer(spec, width=32, heads=4, max_len=20) for _ in range(layers))).to(DEVICE, torch.float64)


def test_tied_layers_share_one_matrix(tmp_path):
    model, x = stack(), data(20)
    before = count(model)
    assert tie_linformer(model) is model
    assert before - count(model) == 2 * 100
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().sum().backward()
    optimiser.step()
    again = copy.deepcopy(model).float().double()
    assert len({id(part.core.project_k) for part in again}) == 1 == len({id(part.core.project_k) for part in model})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    for other in (tie_linformer(stack()), stack()):  # tied or not, it repeats the saved model
        other.load_state_dict(state)
        assert torch.equal(other(x), model(x))
    with pytest.raises(ValueError, match="nothing to tie"):
        tie_linformer(layer("linformer", width=32, heads=4, max_len=20))
    with pytest.raises(ValueError, match="one rank and max_len"):
        tie_linformer(nn.ModuleList([stack(1), stack(1, rank=6)]))


def test_segments_make_a_linformer_that_is_better_with_more_slots():
    n = 128

    def segments(rank):
        own = (torch.arange(n)[:, None] * rank // n == torch.arange(rank)).double()
        return with_weights(own * rank / n, own * rank / n)

    found, uniform = errors([segments(rank) for rank in (4, 16, 64, 128)], n)
    assert uniform > 0.5
    assert found[0] < uniform
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.2 * found[0]
    assert found[3] < 1e-12


# compressed


@BOTH
@pytest.mark.parametrize("options", ["", ", near=1", ", near=3", ", kernel='full'"])
@pytest.mark.parametrize("n", [90, 17, 1])
def test_compressed_by_one_is_softmax(causal, options, n):
    mechanism = made(f"compressed(rate=1{options})", causal)
    check_same(lambda *x: attend(*x, mechanism, causal=causal), partial(exact, is_causal=causal), qkv(n))


def strided(mechanism, k, v):
    """Keys and values of all strides, the last one over the tokens that exist."""
    rate, slots = mechanism.stride, []
    for x, kernel in ((k, mechanism.kernel_k), (v, mechanism.kernel_v)):
        parts = []
        for part in x.split(rate, 2):
            w = kernel[:, : part.shape[2]]
            form = "gu,bgud->bgd" if kernel.dim() == 2 else "gudx,bgud->bgx"
            parts.append(torch.einsum(form, w, part) * rate / part.shape[2])
        slots.append(torch.stack(parts, 2))
    return slots


def visible(n, rate, near):
    """Which slots and which tokens each token sees: every token of its past once."""
    i, j, s = torch.arange(n)[:, None], torch.arange(n), torch.arange(-(-n // rate))
    return torch.cat([s < i // rate - near, (j <= i) & (j // rate >= i // rate - near)], 1).to(DEVICE)


@BOTH
@pytest.mark.parametrize("options", ["rate=4", "rate=5, near=2", "rate=3, near=1, kernel='full'", "rate=200"])
@pytest.mark.parametrize("n", [90, 47, 5, 1])
def test_compressed_is_its_formula(causal, options, n):
    mechanism = shaken(f"compressed({options})", causal)
    sees = visible(n, mechanism.stride, mechanism.near)

    def formula(q, k, v):
        keys, values = strided(mechanism, k, v)
        if not causal:
            return exact(q, keys, values)
        return exact(q, torch.cat([keys, k], 2), torch.cat([values, v], 2), attn_mask=sees)

    inputs = qkv(n)
    check_same(lambda *x: attend(*x, mechanism, causal=causal), formula, inputs)
    weights = tuple(mechanism.parameters())
    both = partial(attend, core=mechanism, causal=causal), formula
    ours, theirs = (torch.autograd.grad(f(*inputs).square().sum(), weights) for f in both)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


@BOTH
@pytest.mark.parametrize("n", [61, 5])
def test_compressed_padding_and_loop_with_any_weights(causal, n, set_limits):
    set_limits(strip=1 << 8)  # many strips
    for mechanism in (shaken("compressed(rate=4)", causal), shaken("compressed(rate=3, near=2, kernel='full')", causal)):
        check_padding(mechanism, causal, n)
        if causal:
            check_loop(mechanism, n)
            check_loop(mechanism, n, before=23)


def test_compressed_keeps_strides_and_few_tokens():
    mixer = layer("compressed(rate=4, near=1)", width=32, heads=4, causal=True).to(DEVICE, torch.float64)
    x, valid = data(200), torch.arange(200, device=DEVICE) < torch.tensor([200, 77, 131], device=DEVICE)[:, None]
    with torch.no_grad():
        _, state = mixer.extend(mixer.start(3), x)
        assert state.memory.slots.size == 49
        assert state.memory.raw.k.shape[2] == state.memory.raw.size == 4
        assert state.memory.raw.k.untyped_storage().nbytes() < 10_000  # nothing holds the prompt alive
        _, state = mixer.extend(mixer.start(3), x, valid)
        for i in range(100):
            _, state = mixer.extend(state, x[:, i : i + 1])
            assert state.memory.raw.size <= 12
        real = state.memory.slots.valid[:, : state.memory.slots.size].sum(1)
        assert (real >= torch.tensor([300 // 4, 177 // 4, 231 // 4], device=DEVICE) - 3).all()
        assert state.memory.slots.size < 1.5 * int(real.max())


def test_compressed_reads_a_context_in_pieces():
    mechanism, (q, k, v) = shaken("compressed(rate=4)"), qkv(30, 41)
    places, memory = Places.of(k[:, 0]), mechanism.empty(k, v)
    for low, high in ((0, 3), (3, 4), (4, 29), (29, 41)):
        memory = mechanism.push(memory, k[:, :, low:high], v[:, :, low:high], places.part(low, high))
    close(mechanism.read(memory, q, Places.of(q[:, 0])), attend(q, k, v, mechanism))


# pooled queries


def test_pooled_queries_by_one_are_softmax():
    valid = some(2, 90)
    check_same(lambda *x: attend(*x, made("pooled_queries(rate=1)")), exact, qkv())
    ours = partial(attend, core=made("pooled_queries(rate=1)"), valid=valid, query_valid=valid)  # positions stay where they are
    check_same(ours, lambda *x: attend(*x, made("softmax"), valid=valid, query_valid=valid), qkv())


@pytest.mark.parametrize(("n", "rate"), [(90, 3), (91, 4), (5, 8), (1, 2)])
def test_pooled_queries_are_means(n, rate):
    def formula(q, k, v):
        return exact(torch.stack([x.mean(2) for x in q.split(rate, 2)], 2), k, v)

    check_same(partial(attend, core=made(f"pooled_queries(rate={rate})")), formula, qkv(n))


def test_pooled_queries_padding():
    check_padding(made("pooled_queries(rate=3)"), causal=False)
    check_padding(made("pooled_queries(rate=50)"), causal=False)


@pytest.mark.parametrize("padded", [False, True])
def test_a_residual_connection_around_pooled_queries(padded):
    """The tokens it stands beside are the means of those that asked: it is cross attention from the shortened sequence."""
    x, valid = data(41), some(3, 41) if padded else None
    pooled = layer("pooled_queries(rate=3)", width=32, heads=4).to(DEVICE, torch.float64)
    cross = layer("softmax", width=32, heads=4, cross=True).to(DEVICE, torch.float64)
    cross.load_state_dict(pooled.state_dict())
    few, real = pool_tokens(x, valid, 3)
    y = pooled(x, valid=valid)
    assert y.shape == few.shape == (3, 14, 32)
    there = torch.ones(3, 14, dtype=torch.bool, device=DEVICE) if real is None else real
    close((few + y)[there], (few + cross(few, context=x, valid=valid))[there])
    assert (y[~there] == 0).all()
    assert (few[~there] == 0).all()


# nystrom


def segment(x, count):
    """Means of segments as equal as can be: token p of n belongs to number p count // n."""
    n = x.shape[2]
    number = torch.arange(n) * min(count, n) // n
    assert number.unique().numel() == min(count, n)
    assert number.bincount().max() - number.bincount().min() <= 1
    return torch.stack([x[:, :, number == s].mean(2) for s in range(min(count, n))], 2)


@pytest.mark.parametrize(("n", "landmarks"), [(90, 90), (90, 128), (7, 64), (1, 1)])
def test_nystrom_with_a_landmark_for_every_token_is_softmax(n, landmarks):
    check_same(partial(attend, core=made(f"nystrom(landmarks={landmarks})")), exact, qkv(n))
    q, k, v = qkv(n)
    check_same(partial(attend, core=made(f"nystrom(landmarks={landmarks})")), exact, [100 * q.detach().requires_grad_(), k, v])


@pytest.mark.parametrize(("n", "m"), [(90, 90), (88, 88), (91, 50), (5, 90), (90, 17)])
def test_nystrom_is_its_formula(n, m):
    mechanism = made("nystrom(landmarks=16, ridge=0.0003)")

    def formula(q, k, v):
        few_q, few_k = segment(q, 16), segment(k, 16)
        a, s, b = ((x @ y.mT * 8**-0.5).softmax(-1) for x, y in ((q, few_k), (few_q, few_k), (few_q, k)))
        inverse = torch.linalg.inv(s.mT @ s + mechanism.ridge * torch.eye(16, dtype=s.dtype, device=s.device)) @ s.mT
        return a @ (inverse @ (b @ v))

    check_same(partial(attend, core=mechanism), formula, qkv(n, m))


@pytest.mark.parametrize(
    "options", ["landmarks=8", "landmarks=8, iterations=6", "landmarks=32", "landmarks=50, conv=5", "landmarks=7, conv=3"]
)
def test_nystrom_padding(options):
    check_padding(shaken(f"nystrom({options})"), causal=False)  # rows below and above the number of landmarks
    check_padding(shaken(f"nystrom({options})"), causal=False, n=64)


@pytest.mark.parametrize(("n", "m"), [(64, 64), (91, 50), (5, 90)])
def test_nystrom_by_the_published_iteration(n, m):
    """Its formula, written out: outputs and gradients."""
    mechanism = made("nystrom(landmarks=16, iterations=6)")

    def formula(q, k, v):
        few_q, few_k = segment(q, 16), segment(k, 16)
        first, s, last = ((a @ b.mT * 8**-0.5).softmax(-1) for a, b in ((q, few_k), (few_q, few_k), (few_q, k)))
        z, one = s.mT / s.sum(-2).amax(-1)[..., None, None], torch.eye(s.shape[-2]).to(s)
        for _ in range(6):
            z = 0.25 * z @ (13 * one - s @ z @ (15 * one - s @ z @ (7 * one - s @ z)))
        return first @ z @ last @ v

    check_same(partial(attend, core=mechanism), formula, qkv(n, m))


def test_the_iteration_of_nystrom_is_that_of_transformers():
    name = "transformers.models.nystromformer.modeling_nystromformer"
    theirs = pytest.importorskip(
        name, reason="pip install transformers, to compare with its Nystromformer"
    ).NystromformerSelfAttention
    s = torch.randn(2, 4, 16, 16, dtype=torch.float64).softmax(-1)
    asked = SimpleNamespace(init_option="exact")  # one scale for each matrix
    close(newton_schulz(s, 6), theirs.iterative_inv(asked, s, n_iter=6))
    true = torch.linalg.pinv(s)
    assert (newton_schulz(s, 30) - true).norm() < 1e-3 * true.norm() < (newton_schulz(s, 2) - true).norm()


def test_nystrom_is_better_with_more_landmarks():
    found, uniform = errors([made(f"nystrom(landmarks={x})") for x in (8, 16, 32, 64, 128)], 128)
    assert uniform > 0.8
    assert found == sorted(found, reverse=True)
    assert found[0] < 0.3
    assert found[2] < 0.03
    assert found[4] < 1e-12
    (coarse, fine), _ = errors([made(f"nystrom(landmarks=32, ridge={x})") for x in (1e-2, 1e-4)], 128)
    assert fine < 0.5 * found[2] < 0.5 * coarse


def test_nystrom_skips_by_a_convolution():
    mechanism = shaken("nystrom(landmarks=8, conv=3)")
    plain = made("nystrom(landmarks=8)")

    def formula(q, k, v):
        w = mechanism.conv[:, :, None, None]
        shifted = torch.nn.functional.pad(v, (0, 0, 1, 1))
        return attend(q, k, v, plain) + sum(w[:, u] * shifted[:, :, u : u + 50] for u in range(3))

    check_same(partial(attend, core=mechanism), formula, qkv(50))
    with pytest.raises(ValueError, match="50 queries are more than that"):
        attend(*qkv(50, 40), mechanism)
    with pytest.raises(ValueError, match="cannot do cross"):
        layer("nystrom(conv=3)", width=32, heads=4, cross=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nystrom_stays_finite_where_landmarks_are_alike(dtype):
    mechanism = core("nystrom(landmarks=16)", Dims(32, 4)).to(DEVICE)
    for size in (0, 1, 100):
        q, k, v = ((size * x).to(dtype).detach().requires_grad_() for x in qkv(90))
        out = attend(q.expand_as(q), k[:, :, :1].expand_as(k), v, mechanism)  # all keys equal: every matrix is singular
        out.float().sum().backward()
        assert out.dtype == dtype
        assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))


# what they hold


def largest(spec, n, causal):
    mechanism = core(spec, Dims(16, 2, causal=causal, max_len=n)).to(DEVICE)
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True, device=DEVICE) for _ in range(3))
    with Largest() as watch:
        attend(q, k, v, mechanism, causal=causal).sum().backward()
    return watch.most


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        *(("linformer(rank=16)", c) for c in (False, True)),
        *(("compressed(rate=4)", c) for c in (False, True)),
        ("nystrom(landmarks=16)", False),
        ("nystrom(landmarks=16, conv=5)", False),
        ("pooled_queries(rate=4)", False),
    ],
)
def test_nothing_quadratic_is_ever_held(spec, causal, set_limits):
    set_limits(tile_scores=1 << 16)
    n = 8192
    assert largest(spec, n, causal) <= 2.2 * largest(spec, n // 2, causal)
    assert largest(spec, n, causal) < n**2 / 8


def test_a_long_chunk_behind_a_memory_is_seen_in_strips(set_limits):
    set_limits(tile_scores=1 << 16, strip=1 << 16)
    mechanism = core("compressed(rate=4)", Dims(16, 2, causal=True)).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 2048, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    places = Places.of(k[:, 0])
    memory = mechanism.push(mechanism.empty(k, v), k[:, :, :1001], v[:, :, :1001], places.part(0, 1001))
    with Largest() as watch:
        y, _ = mechanism.scan(memory, *(x[:, :, 1001:] for x in (q, k, v)), places.part(1001, 2048))
        y.sum().backward()
    assert watch.most <= 2048 * 2 * 8 * 4


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 4), (3, 4), (3, 1)], ids=str)
def test_tokens_are_mixed_by_one_product_of_whatever_shares_weights(rows, heads):
    weights = torch.randn(rows, heads, 20, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    x = torch.randn(3, 20, 4, 6, dtype=torch.float64, device=DEVICE).transpose(1, 2).requires_grad_()  # as a layer has it
    mixed, formula = mix_tokens(weights, x), weights.mT @ x
    close(mixed, formula)
    for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), (weights, x)) for y in (mixed, formula)), strict=True):
        close(mine, theirs)
    assert torch.autograd.gradgradcheck(mix_tokens, (weights[:, :, :3, :2], x[:, :, :3, :2]))
    assert mix_tokens(weights[:, :, :0], x[:, :, :0]).eq(0).all()


def test_half_precision_tokens_are_summed_in_float32():
    weights, x = (torch.full((1, 1, 4096, 1), y, dtype=torch.bfloat16, device=DEVICE) for y in (1.0, 1.5))
    found = mix_tokens(weights, x)
    assert found.dtype == torch.float32 and found.item() == 4096 * 1.5


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("share", ["head", "kv"])
def test_sums_of_tokens_are_projected_where_heads_share_weights(share, cross, monkeypatch):
    """A linear map of a sum is the sum of its maps: the same layer, with rank vectors to project in place of all tokens."""
    torch.manual_seed(0)
    made = layer(f"linformer(rank=6, share={share!r})", width=32, heads=4, kv_heads=2, max_len=50, cross=cross)
    made = made.to(DEVICE, torch.float64)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=0.2)
    x, more = data(20).requires_grad_(), data(50, seed=5).requires_grad_()
    read = more if cross else x
    valid = torch.rand(read.shape[:2], generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.7
    options = {"context": more, "valid": valid} if cross else {"valid": valid}
    inputs, sizes, found = [x, *([more] if cross else []), *made.parameters()], [], []
    for pools in (True, False):
        monkeypatch.setattr(made, "_pools", pools)
        monkeypatch.setattr(attention, "linear", lambda y, *rest: sizes.append(y.shape[1]) or nn.functional.linear(y, *rest))
        y = made(x, **options)
        monkeypatch.undo()
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert sizes[:2] == [6, 6] and sizes[2:] == [read.shape[1]]
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)
