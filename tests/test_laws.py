"""Laws: what every mechanism in the catalogue is asked, for free. REGARD_DEVICE=cuda asks the same of a GPU."""

import math
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import conftest
from conftest import CASES, DEVICE, DOUBLES, HEADS, LAW_CASES, WIDTH, close, data, modes, seed, some
from regard import core as make_core
from regard.analysis.probe import attention_matrix, has_weights
from regard.blocks import Stack
from regard.mixers.attend import attend
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Places, pool_tokens, select

LENGTHS = (4096, 16384)  # that the growth of cost is measured between: four times as long; half of both where cost is linear
DENSE = ("softmax", "additive", "relu")  # which score all pairs at every length: a quarter
STEPWISE = ("compressed",)  # whose buffers are a third too large at some lengths: growth is seen over more of them
UNCOUNTED = {"identity", "fnet"}  # no product of matrices: a copy, and a Fourier transform that no counter counts
SILENT = {"identity": ("q.", "k.")}  # the control row has queries and keys like all others, and ignores them

claiming = partial(conftest.claiming, cases=LAW_CASES)
every = conftest.asked(lambda _: True, LAW_CASES)
every_core = claiming(Can.NOTHING, core=True)


def test_what_covers_another_case_is_no_double_itself():
    names = {repr(case) for case in CASES}
    assert DOUBLES.keys() | set(DOUBLES.values()) <= names and not DOUBLES.keys() & set(DOUBLES.values())


@every
@pytest.mark.parametrize("n", [1, 7, 40, 97])
def test_shape_and_every_weight_learns(case, n):
    for mode in modes(case):
        m, x = case.build(**mode), data(n).requires_grad_()
        y = m(x)
        y.square().sum().backward()
        assert y.shape == (3, -(-n // m.rate), WIDTH) and y.isfinite().all() and x.grad.isfinite().all()
        quiet = SILENT.get(case.row.name, ())
        weights = {name: p for name, p in m.named_parameters() if p.dim() > 1 and not name.startswith(quiet or "-")}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in weights.values())
        if n > 7:
            assert [name for name, p in weights.items() if p.grad.abs().max() < 1e-12] == []


@claiming(Can.CAUSAL, causal=True)
@pytest.mark.parametrize("t", [0, 23, 58])
def test_the_future_cannot_be_seen(case, t):
    m, x = case.build(causal=True), data(60)
    before = m(x)
    most = 4 * torch.finfo(x.dtype).eps * before[:, : t + 1].abs().max()  # rounding, and nothing else
    for factor in (1, 100, 1e4):
        z = x.clone()
        z[:, t + 1 :] = factor * data(60, seed=2)[:, t + 1 :]
        after = m(z)
        assert (before - after)[:, : t + 1].abs().max() <= most
    if case.row.name != "identity":
        assert not torch.allclose(before[:, t + 1 :], after[:, t + 1 :])  # and the test can fail


@claiming(Can.CAUSAL, causal=True)
@pytest.mark.parametrize("t", [0, 23, 58])
def test_no_gradient_comes_from_the_future(case, t):
    """Exactly none: what is rounded differently is still the same function of the same tokens."""
    m, x = case.build(causal=True), data(60).requires_grad_()
    (grad,) = torch.autograd.grad((m(x)[:, : t + 1] * data(60, seed=3)[:, : t + 1]).sum(), x)
    assert (grad[:, t + 1 :] == 0).all() and grad[:, : t + 1].abs().sum() > 0


@claiming(Can.PADDING)
@pytest.mark.parametrize("where", ["right", "left", "holes"])
def test_padding_is_as_if_absent(case, where):
    n, real = 50, 31
    order = torch.arange(n, device=DEVICE).expand(2, -1)
    valid = {"right": order < real, "left": order >= n - real, "holes": some(2, n)}[where]
    for mode in modes(case):
        m, x = case.build(**mode), data(n, b=2)
        z = torch.where(valid[..., None], x, 1e3).requires_grad_()
        y, real = m(z, valid=valid), pool_tokens(x, valid, m.rate)[1]
        close(y, m(x, valid=valid))  # the content of padding does not matter
        assert (y[~real] == 0).all()
        for row in range(2):  # nor does its presence
            close(y[row][real[row]], m(x[row][valid[row]][None])[0])
        y.square().sum().backward()
        assert (z.grad[~valid] == 0).all() and z.grad[valid].abs().sum() > 0
        if case.row.name != "identity" and not mode["causal"]:
            assert not torch.allclose(y[real], m(x)[real])  # without `valid` the same tokens would have counted


@claiming(Can.PADDING)
def test_rows_of_nothing_but_padding_are_zero(case):
    valid = some(3, 40)
    valid[1] = False
    for mode in modes(case):
        x = data(40).requires_grad_()
        y = case.build(**mode)(x, valid=valid)
        y.square().sum().backward()
        assert (y[1] == 0).all() and (x.grad[1] == 0).all() and y.isfinite().all() and x.grad.isfinite().all()


@claiming(Can.STREAM, causal=True)
def test_stream_is_forward(case):
    """With gradients, single tokens behind a prompt stand for all single tokens."""
    m, x = case.build(causal=True), data(60)
    whole = m(x)
    for cuts in ([1] * 60, [17, 1, 1, 21, 20], [60], [3, 50, 7], [0, 30, 0, 30]):
        for grad in (False, True) if len(cuts) < 60 else (False,):
            with torch.set_grad_enabled(grad):
                state, out = m.start(3), []
                for part in x.split(cuts, 1):
                    y, state = m.extend(state, part)
                    out.append(y)
            close(torch.cat(out, 1), whole)


@claiming(Can.STREAM | Can.PADDING, causal=True)
def test_prompts_of_different_length_stream_together(case):
    m, x, lengths = case.build(causal=True), data(70), [33, 20, 5]
    prompt = x[:, :40]
    valid = torch.arange(40, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    alone = [m(torch.cat([x[r, :n], x[r, 40:]])[None])[0] for r, n in enumerate(lengths)]
    with torch.no_grad():
        for side in (valid, valid.flip(1)):  # padded on the right, or on the left
            tokens = torch.where(side[..., None], prompt.gather(1, _spread(side)[..., None].expand_as(prompt)), 7.0)
            y, state = m.extend(m.start(3), tokens, side)
            steps = []
            for part in x[:, 40:].split([1, 1, 24, 1, 3], 1):
                z, state = m.extend(state, part)
                steps.append(z)
            for r, n in enumerate(lengths):
                close(torch.cat([y[r][side[r]], torch.cat(steps, 1)[r]]), alone[r])
                assert int(state.t[r]) == n + 30


def _spread(valid):
    """Which prompt token stands at each place, when real tokens keep their order."""
    return (valid.long().cumsum(1) - 1).clamp_min(0)


def _scans(core, scan, before):
    """Outputs and all gradients of a scan, from an empty memory or behind one."""
    g = torch.Generator().manual_seed(5)
    n = 45 + before
    shapes = ((HEADS, core.dims.d * core.streams), *((core.dims.g, size) for size in core.sizes))
    q, k, v = (torch.randn(2, h, n, x, dtype=torch.float64, generator=g).to(DEVICE).requires_grad_() for h, x in shapes)
    valid = some(2, n)
    places = Places.of(k[:, 0], valid)
    memory = core.empty(k, v)
    cut, rest = slice(0, before), slice(before, n)
    if before:
        memory = core.push(memory, k[:, :, cut], v[:, :, cut], places.part(0, before))
    y, memory = scan(
        memory, q[:, :, rest], k[:, :, rest], v[:, :, rest], Places(places.at[:, rest], valid[:, rest], None if before else 0)
    )
    y = y * valid[:, None, rest, None]  # what padding asks is nobody's business
    up = torch.randn(y.shape, dtype=torch.float64, generator=g).to(DEVICE)
    return [y, *torch.autograd.grad((y * up).sum(), (q, k, v, *core.parameters()), materialize_grads=True)]


@claiming(Can.STREAM | Can.CAUSAL, core=True, causal=True)
@pytest.mark.parametrize(("before", "kv_heads"), [(0, HEADS), (0, 2), (21, 2)])  # (21, HEADS) is half of each
def test_scan_is_the_loop(case, before, kv_heads):
    if case.build(causal=True).core.shared_qk:  # its layer refuses fewer key-value heads, `attend` does not
        core = make_core(case.spec, Dims(WIDTH, HEADS, kv_heads=kv_heads, causal=True)).to(DEVICE, torch.float64).eval()
    else:
        core = case.build(causal=True, kv_heads=kv_heads).core
    fast = _scans(core, core.scan, before)
    slow = _scans(core, lambda *args: Core.scan(core, *args), before)
    for a, b in zip(fast, slow, strict=True):
        close(a, b)


@claiming(Can.CROSS, cross=True)
def test_cross_attention_and_its_stream(case):
    m, x, c = case.build(cross=True, context_width=24), data(40), data(33, seed=3, width=24)
    valid = torch.arange(33, device=DEVICE) < torch.tensor([33, 20, 5], device=DEVICE)[:, None]
    y = m(x, context=c, valid=valid)
    close(y[2], m(x[2:], context=c[2:, :5])[0])
    if Can.STREAM in m.can:
        state, out = m.start(context=c, valid=valid), []
        for part in x.split([1, 20, 19], 1):
            o, state = m.extend(state, part)
            out.append(o)
        close(torch.cat(out, 1), y)


@claiming(Can.STREAM, causal=True)
def test_beams_can_be_reordered_and_states_are_values(case):
    m, x, pick = case.build(causal=True), data(64), torch.tensor([2, 0, 0, 1], device=DEVICE)
    with torch.no_grad():
        _, state = m.extend(m.start(3), x[:, :40])
        for _ in range(3):  # a few steps, so that the memory has room to write into
            _, state = m.extend(state, x[:, 40:41])
        past = torch.cat([x[:, :40], x[:, 40:41].expand(-1, 3, -1)], 1)
        futures = [data(21, seed=s, b=3) for s in (7, 8)]
        steps = [m.extend(state, future[:, :1]) for future in futures]  # the same state extended twice, before either goes on
        for future, (step, later) in zip(futures, steps, strict=True):
            rest, _ = m.extend(later, future[:, 1:])
            close(torch.cat([step, rest], 1), m(torch.cat([past, future], 1))[:, 43:])
        future = data(21, seed=9, b=4)
        close(m.extend(state.select(pick), future)[0], m(torch.cat([past[pick], future], 1))[:, 43:])
        close(m.extend(select(state, pick), future)[0], m(torch.cat([past[pick], future], 1))[:, 43:])


@every
def test_rows_do_not_meet_and_calls_repeat(case):
    for mode in modes(case):
        m, x = case.build(**mode), data(40)
        close(m(x)[1:2], m(x[1:2]))
        assert torch.equal(m(x), m(x))


@every
def test_inputs_need_not_be_contiguous(case):
    for mode in modes(case):
        m, x = case.build(**mode), data(40)
        close(m(x.transpose(0, 1).contiguous().transpose(0, 1)), m(x))
        close(m(data(80)[:, ::2]), m(data(80)[:, ::2].contiguous()))


@every
@pytest.mark.parametrize("n", [0, 1])
def test_nothing_and_one_token(case, n):
    for mode in modes(case):
        m = case.build(**mode)
        x = data(n).requires_grad_()
        y = m(x)
        y.sum().backward()
        assert y.shape == (3, n, WIDTH) and y.isfinite().all()
        empty = m(data(5)[:0])
        assert empty.shape == (0, -(-5 // m.rate), WIDTH)


@every
def test_huge_scores_stay_finite(case):
    for mode in modes(case):
        m, x = case.build(dtype=torch.float32, **mode), (100 * data(40, dtype=torch.float32)).requires_grad_()
        y = m(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()


@every_core
def test_different_widths_and_grouped_heads(case):
    for mode in modes(case):
        few = {} if case.build(**mode).core.shared_qk else {"kv_heads": 2}
        m, x = case.build(key_dim=6, value_dim=10, **few, **mode), data(40)
        assert m(x).shape == (3, -(-40 // m.rate), WIDTH)
        m(x).sum().backward()
        assert m.v.weight.shape[0] in (20, 40)


@every_core
def test_grouped_heads_are_repeated_heads(case):
    for mode in modes(case):
        if case.build(**mode).core.shared_qk:
            with pytest.raises(ValueError, match="no kv_heads"):
                case.build(kv_heads=2, **mode)
            continue
        few, many = case.build(kv_heads=2, **mode), case.build(**mode)
        state = few.state_dict()
        for name, full in many.state_dict().items():
            if state[name].shape != full.shape:  # what belongs to the two key-value heads: projections, gates, rates
                state[name] = state[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
        many.load_state_dict(state)
        close(few(data(40)), many(data(40)))


@conftest.every
def test_cost_grows_as_claimed(case):
    for mode in modes(case):
        with torch.device("meta"):
            m, cost = (
                case.spec.build(Dims(WIDTH, HEADS, max_len=max(LENGTHS), **mode), positions=case.positions).double().eval(),
                [],
            )
        shorter = 4 if case.row.name in DENSE or case.example.cost == 1 else 1
        for n in (n // shorter for n in LENGTHS):
            x = torch.empty(1, n, WIDTH, dtype=torch.float64, device="meta")
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
                m(x)
            around = m.named_parameters() if isinstance(m, Attention) else ()
            weights = sum(p.numel() for name, p in around if p.dim() == 2 and not name.startswith("core"))
            cost.append(counter.get_total_flops() - 2 * n * weights)
        if case.row.name in UNCOUNTED:
            assert cost == [0, 0]
        else:
            assert abs(math.log(cost[1] / cost[0], 4) - case.example.cost) < 0.2, cost


@conftest.claiming(Can.STREAM, causal=True)
def test_memory_grows_as_claimed(case):
    growing = 2048 if case.row.name in STEPWISE else 1024
    most = growing if case.example.memory else 512  # what does not grow is seen sooner
    m, x, size = case.build(causal=True, max_len=most), data(most, b=1), {}
    with torch.no_grad():
        state = m.start(1)
        for t in range(0, most, 64):
            for cut in [64] if t % 256 else [1] * 16 + [48]:
                _, state = m.extend(state, x[:, t : t + cut])
                t += cut
            size[t] = max(state.nbytes, 1)
    assert abs(math.log2(size[most] / size[256]) / math.log2(most / 256) - case.example.memory) < 0.15, size


@every_core
def test_identity_probe_reproduces_the_output(case):
    for mode in modes(case):
        core = case.build(**mode).core
        assert has_weights(core) == case.example.weights
        if not case.example.weights:
            continue
        g = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(2, HEADS, 37, x, dtype=torch.float64, generator=g).to(DEVICE) for x in _dims(core))
        a = attention_matrix(core, q, k, causal=mode["causal"])
        half = v[..., : core.dims.e]
        value = torch.cat([half] * core.streams, -1)
        close(a @ half, attend(q, k, value, core, causal=mode["causal"]))
        if mode["causal"]:
            assert a.triu(1).abs().max() == 0


def _dims(core):
    return core.dims.d * core.streams, *core.sizes


@every
def test_what_is_not_claimed_raises(case):
    can = case.build().can
    if Can.CROSS not in can:
        with pytest.raises(ValueError, match="cannot do cross"):
            case.build(cross=True)
    if Can.PADDING not in can:
        with pytest.raises(ValueError, match="cannot do padding"):
            case.build()(data(8), valid=torch.ones(3, 8, dtype=torch.bool, device=DEVICE))
    if Can.DROPOUT not in can:
        with pytest.raises(ValueError, match="cannot do dropout"):
            case.build(dropout=0.1)
    if not case.can(Can.CAUSAL, causal=True):
        with pytest.raises(ValueError, match="cannot do causal"):
            case.build(causal=True)
    elif not case.can(Can.STREAM, causal=True):
        with pytest.raises(ValueError, match="cannot do stream"):
            case.build(causal=True).start(2)
    with pytest.raises(ValueError, match="build it with causal=True"):
        (case if Can.STREAM in can else CASES[0]).build().start(2)


@claiming(Can.DROPOUT, dropout=0.5)
def test_dropout_is_for_training_and_keeps_the_mean(case):
    for mode in modes(case):
        m, x = case.build(dropout=0.25, **mode), data(24, b=1)
        close(m(x), case.build(**mode)(x))  # in evaluation, nothing is dropped
        m.train()
        drawn = torch.cat([m(x.expand(100, -1, -1)).detach() for _ in range(2)])
        assert not torch.equal(drawn[0], drawn[1])  # every row has its own
        assert not torch.equal(drawn[0], drawn[100])  # and every call
        error = (drawn.mean(0) - m.eval()(x)).abs() / (drawn.std(0) / math.sqrt(200) + 1e-12)
        assert error.square().mean().sqrt() < 1.3 and drawn.std(0).mean() > 1e-3


@every
def test_a_saved_mechanism_repeats_itself(case, tmp_path):
    for mode in modes(case):
        m, x = case.build(**mode), data(40)
        torch.save(m.state_dict(), tmp_path / "weights.pt")
        seed(99)
        other = (
            case.spec.build(Dims(WIDTH, HEADS, max_len=128, **mode), positions=case.positions).to(DEVICE, torch.float64).eval()
        )
        other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        assert torch.equal(m(x), other(x))


@conftest.each_path
def test_overfits_one_batch(case):
    """One block. All rows end in the same token with another target each: only the other tokens of a row tell them apart."""
    x, target = data(8, b=4, dtype=torch.float32), data(8, seed=8, b=4, dtype=torch.float32)
    x[:, -1] = x[0, -1]
    sizes = {"width": WIDTH, "heads": HEADS, "depth": 1, "ffn": 2 * WIDTH, "max_len": 128}
    control = case.row.name == "identity"
    for mode in modes(case):
        seed(0)
        made = Stack.of(case.spec, **sizes, positions=case.positions, **mode).to(DEVICE).train()
        optimiser = torch.optim.Adam(made.parameters(), lr=3e-2, betas=(0.8, 0.95), fused=True)
        for _ in range(50 if control else 100):
            error = (made(x) - target[:, : -(-8 // made.rate)]).square().mean(-1)
            optimiser.zero_grad()
            error.mean().backward()
            optimiser.step()
            if max(error.mean(), error[:, -1].mean()) < 0.1:  # of a variance of 1
                break
        else:
            assert control and error[:, -1].mean() > 0.5, float(error.mean())
