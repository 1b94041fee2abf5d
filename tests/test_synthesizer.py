"""Synthesizers: every form is its formula, mixtures end at softmax, and tables stay what and where they should be."""

import pytest
import torch
from torch import nn

from conftest import DEVICE, close, data, some
from regard import Dims, attend, core, layer
from regard.mixers.synthesizer import SYNTHESIZER_FORMS, Synthesizer
from test_limits import Largest, check_same, qkv

N = 90


def made(form="dense", max_len=100, causal=False, **options) -> Synthesizer:
    torch.manual_seed(0)
    text = ", ".join(f"{name}={value!r}" for name, value in {"form": form, **options}.items())
    found = core(f"synthesizer({text})", Dims(32, 4, causal=causal, max_len=max_len)).to(DEVICE, torch.float64)
    assert isinstance(found, Synthesizer)
    for p in found.parameters():
        nn.init.normal_(p, std=0.7)  # biases and balances that matter
    return found


def logits(m, q, k):
    """S of plain sequences, as it is written down."""
    n = q.shape[2]
    hidden = None if m.form.startswith("random") else (torch.einsum("bhnd,hde->bhne", q, m.inner) + m.inner_bias).relu()
    if m.form == "dense":
        s = torch.einsum("bhne,hje->bhnj", hidden, m.outer) + m.outer_bias[..., 0][:, None]
    elif m.form == "random":
        s = m.table[None, :, :n]
    elif m.form == "random_factorised":
        s = torch.einsum("hir,hjr->hij", m.rows, m.columns)[None, :, :n]
    else:
        x, y = (torch.einsum("bhnd,hde->bhne", hidden, m.factors) + m.factors_bias).split([10, 10], -1)
        j = torch.arange(100, device=q.device)
        s = x[..., j // 10] * y[..., j % 10]
    s = s[..., :n].expand(len(q), -1, -1, -1)
    if m.mix is None:
        return s
    w = m.balance.softmax(-1)[:, 0, None, None] if m.mix == "learned" else m.mix
    return w * (q @ k.mT * q.shape[-1] ** -0.5) + (1 - w) * s


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mix", [None, "learned", 0.3])
@pytest.mark.parametrize("form", SYNTHESIZER_FORMS)
def test_a_form_is_its_formula(form, mix, causal, set_limits):
    set_limits(softmax_strip=1 << 13)  # many strips
    m = made(form, mix=mix)

    def formula(q, k, v, *_):
        future = torch.ones(N, N, dtype=torch.bool, device=DEVICE).triu(1) & causal
        return logits(m, q, k).masked_fill(future, -torch.inf).softmax(-1) @ v

    check_same(lambda q, k, v, *_: attend(q, k, v, m, causal=causal), formula, [*qkv(N), *m.parameters()])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", SYNTHESIZER_FORMS)
def test_all_weight_on_the_dot_product_is_softmax(form, causal):
    softmax = core("softmax", Dims(32, 4))
    check_same(lambda *x: attend(*x, made(form, mix=1), causal=causal), lambda *x: attend(*x, softmax, causal=causal), qkv(N))
    m = made(form, mix="learned")
    with torch.no_grad():
        m.balance.copy_(torch.tensor([1e3, 0.0]))
    close(attend(*qkv(N), m, causal=causal), attend(*qkv(N), softmax, causal=causal))


@pytest.mark.parametrize("form", SYNTHESIZER_FORMS)
def test_no_weight_on_the_dot_product_is_no_mixture(form):
    assert torch.equal(attend(*qkv(N), made(form, mix=0)), attend(*qkv(N), made(form)))


def test_parameters():
    d, n, h, rank = 8, 1000, 4, 5
    hidden = h * (d * d + d)
    counts = {
        "dense": hidden + h * n * (d + 1),
        "random": h * n * n,
        "dense_factorised": hidden + h * (32 + 32) * (d + 1),  # 32 * 32 >= 1000
        "random_factorised": 2 * h * n * rank,
    }
    for form, count in counts.items():
        options = {"rank": rank} if form == "random_factorised" else {}
        for mix, more in ((None, 0), (0.5, 0), ("learned", 2 * h)):
            m = made(form, max_len=n, mix=mix, **options)
            assert sum(p.numel() for p in m.parameters()) == count + more, form
    assert all((x * y >= n and (x - 1) * y < n) for n in range(1, 200) for x, y in [made("dense_factorised", n)._factors()])


def test_a_layer_makes_no_map_that_nobody_looks_at():
    names = {}
    for text in ("synthesizer", "synthesizer(form='random')", "synthesizer(form='random', mix=0.5)"):
        m = layer(text, width=32, heads=4, max_len=64, causal=True)
        names[text] = {name for name, _ in m.named_parameters() if name.endswith(".weight")}
        _, state = m.extend(m.start(2), torch.randn(2, 9, 32))
        assert state.memory.k.shape[-1] == (8 if "mix" in text else 0)  # nor remembers it
        m(torch.randn(2, 9, 32)).sum().backward()
        assert all(p.grad is not None for p in m.parameters())
    assert list(names.values()) == [
        {"q.weight", "v.weight", "out.weight"},
        {"v.weight", "out.weight"},
        {"q.weight", "k.weight", "v.weight", "out.weight"},
    ]


@pytest.mark.parametrize("form", ["random", "random_factorised"])
def test_a_frozen_table_is_drawn_saved_and_never_learned(form):
    def build(seed):
        torch.manual_seed(torch.seed())  # other dice do not matter
        return core(f"synthesizer(form={form!r}, frozen=True, seed={seed})", Dims(32, 4, max_len=64))

    one, same, other = build(1), build(1), build(2)
    assert not list(one.parameters())
    assert all(torch.equal(x, same.state_dict()[name]) for name, x in one.state_dict().items())
    assert not any(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())
    other.load_state_dict(one.state_dict())
    q, k, v = (x.float().cpu()[:, :, :60] for x in qkv(N))
    assert torch.equal(attend(q, k, v, one), attend(q, k, v, other))

    m, x = layer(f"synthesizer(form={form!r}, frozen=True)", width=32, heads=4, max_len=64), torch.randn(2, 9, 32)
    before = {name: t.clone() for name, t in m.core.state_dict().items()}
    optimiser = torch.optim.SGD(m.parameters(), lr=1.0)
    m(x).square().sum().backward()
    optimiser.step()
    assert before and all(torch.equal(t, before[name]) for name, t in m.core.state_dict().items())


@pytest.mark.parametrize("form", SYNTHESIZER_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_token_moves_no_earlier_output(form, dtype):
    m = layer(f"synthesizer(form={form!r}, mix='learned')", width=32, heads=4, max_len=512, causal=True).to(DEVICE, dtype)
    x = data(512, b=1, dtype=dtype)
    z = x.clone()
    z[:, -1] = 1e3 * data(1, b=1, seed=3, dtype=dtype)[:, 0]
    moved = (m(x) != m(z)).any(-1)[0]
    assert int(moved[:-1].sum()) == 0 and moved[-1]


@pytest.mark.parametrize("form", SYNTHESIZER_FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_takes_no_position(form, causal):
    m, valid = made(form, max_len=80, causal=causal), some(2, N)  # as long as what is real, not as what is there
    q, k, v = qkv(N)
    assert N > 80 >= int(valid.sum(1).max())
    out = attend(q, k, v, m, causal=causal, valid=valid, query_valid=None if causal else valid)
    for row in range(2):
        real = [x[row : row + 1, :, valid[row]] for x in (q, k, v)]
        close(out[row : row + 1, :, valid[row]], attend(*real, m, causal=causal))


@pytest.mark.parametrize("form", SYNTHESIZER_FORMS)
def test_too_long(form):
    for causal in (False, True):
        with pytest.raises(ValueError, match="90 tokens, but synthesizer was built for max_len=80: build it longer"):
            attend(*qkv(N), made(form, max_len=80), causal=causal)
        valid = torch.ones(2, N, dtype=torch.bool, device=DEVICE)
        valid[:, :5] = False
        with pytest.raises(ValueError, match="85 tokens, but synthesizer was built for max_len=80"):
            attend(*qkv(N), made(form, max_len=80), causal=causal, valid=valid)
    m = layer(f"synthesizer(form={form!r})", width=32, heads=4, max_len=10, causal=True)
    _, state = m.extend(m.start(1), torch.randn(1, 10, 32))
    with pytest.raises(ValueError, match="11 tokens, but this layer was built for max_len=10"):
        m.extend(state, torch.randn(1, 1, 32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", ["form='dense'", "form='dense_factorised', mix='learned'", "form='random_factorised'"])
def test_no_table_of_all_pairs(text, causal, set_limits):
    set_limits(softmax_strip=1 << 16)
    n = 2048
    m = core(f"synthesizer({text})", Dims(16, 2, causal=causal, max_len=n))
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
    with Largest() as watch:
        attend(q, k, v, m, causal=causal).sum().backward()
    assert watch.most < n * n / 8


@pytest.mark.parametrize("options", ["", ", frozen=True", ", mix='learned'"])
def test_a_random_table_is_the_only_one_kept(options, set_limits):
    set_limits(softmax_strip=1 << 16)
    n, kept = 1024, []
    m = core(f"synthesizer(form='random'{options})", Dims(16, 2, max_len=n))
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))

    def keep(x):
        if x.untyped_storage().data_ptr() != m.table.untyped_storage().data_ptr():
            kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(q, k, v, m)
    assert sum(kept) < n * n / 4
    out.sum().backward()
    assert v.grad.isfinite().all()
