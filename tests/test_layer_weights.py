"""Attention weights of layers: weights, values and the output projection are the layer, for every row that has them."""

import pytest
import torch

import conftest
from conftest import CASES, DEVICE, close, data, modes, some
from regard import Core, Dims, layer
from regard.mixers.attention import Attention
from regard.mixers.base import Can, pooled_valid

every = conftest.asked(lambda _: True, CASES)


def expected(m: Attention, weights: torch.Tensor, values: torch.Tensor, added: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the layer gives tokens x (b n w) if its answers are these weights times values of tokens (b m w), and a constant."""
    v = m.v(values).unflatten(-1, (m.dims.g, -1)).transpose(1, 2)[..., : m.dims.e]
    y = weights @ v.repeat_interleave(m.dims.heads // m.dims.g, 1) + added
    y = y.transpose(1, 2)
    return m.out(y.flatten(2) if m.readout is None else m.readout(y, x))


def built(case: conftest.Case, **mode) -> Attention:
    """A layer whose streams have equal values: which of them a query reads is not in its weights."""
    m = case.build(**mode)
    if m.core.streams > 1:
        with torch.no_grad():
            for p in (m.v.weight, m.v.bias):
                whole = p.unflatten(0, (m.dims.g, m.core.streams, m.dims.e))
                whole.copy_(whole[:, :1].expand_as(whole).clone())
    return m


def relative_part(m: Attention, *args, **given) -> torch.Tensor | float:
    """What relative positions add to the answers: those of values that are zero."""
    if getattr(m.core.positions, "values", None) is None:
        return 0.0
    with torch.no_grad():
        kept = [p.clone() for p in m.v.parameters()]
        [p.zero_() for p in m.v.parameters()]
        out, m.out = m.out, torch.nn.Identity()
        y = m(*args, **given)
        m.out = out
        [p.copy_(old) for p, old in zip(m.v.parameters(), kept, strict=True)]
    return y.unflatten(-1, (m.dims.heads, -1)).transpose(1, 2)


@every
def test_weights_times_values_are_the_layer(case):
    for mode in modes(case):
        m, x = case.build(**mode), data(19, b=2)
        if not case.row.weights:
            with pytest.raises(ValueError, match=f"{m.name} has no attention weights"):
                m.weights(x)
            continue
        m = built(case, **mode)
        a = m.weights(x)
        assert a.shape == (2, m.dims.heads, -(-19 // m.rate), 19)
        close(expected(m, a, x, relative_part(m, x), x), m(x))
        assert not mode["causal"] or a.triu(1).abs().max() == 0


@conftest.claiming(Can.CROSS, cross=True, cases=CASES)
def test_weights_of_cross_attention(case):
    m, x, context, valid = built(case, cross=True), data(9, b=2), data(14, b=2, seed=4), some(2, 14)
    if not case.row.weights:
        pytest.skip("it has none")
    for given in ({}, {"valid": valid}) if Can.PADDING in m.can else ({},):
        a = m.weights(x, context, **given)
        close(expected(m, a, context, relative_part(m, x, context=context, **given), x), m(x, context=context, **given))
        assert not given or a.transpose(-1, -2)[~valid[:, None].expand(2, m.dims.heads, 14)].abs().max() == 0


@conftest.claiming(Can.PADDING, core=True, cases=CASES)
def test_padding_has_no_weight(case):
    for mode in modes(case):
        m, x, valid = built(case, **mode), data(17, b=2), some(2, 17)
        a = m.weights(torch.where(valid[..., None], x, torch.nan), valid=valid)
        kept = pooled_valid(valid, m.rate)
        assert a[:, 0][~kept].abs().sum() == 0 and a[:, 0].transpose(1, 2)[~valid].abs().sum() == 0
        y = expected(m, a, x, relative_part(m, x, valid=valid), x)
        close(y[kept], m(x, valid=valid)[kept])


def test_weights_are_without_dropout_and_leave_the_mode_as_it_is():
    m, x = layer("softmax", width=32, heads=4, dropout=0.5).to(DEVICE), data(12, dtype=torch.float32)
    trained = m.train().weights(x)
    assert torch.equal(trained, m.eval().weights(x)) and not m.core.training
    assert m.train().weights(x) is not None and m.core.training
    close(trained.sum(-1), torch.ones_like(trained[..., 0]), 1e-5)


def test_weights_take_few_heads_for_keys_and_give_gradients():
    m = layer("Local(3)", width=32, heads=4, kv_heads=2).double().to(DEVICE)
    x = data(12)
    a = m.weights(x)
    close(expected(m, a, x, 0.0, x), m(x))
    a.square().sum().backward()
    assert m.q.weight.grad.abs().sum() > 0 and not m.v.weight.grad.any()


class Normed(Core):
    """Unit vectors of sums: no weighted sums."""

    def empty(self, k, v):  # noqa: ARG002
        return v[:, :, :0]

    def push(self, memory, k, v, places):  # noqa: ARG002
        return torch.cat([memory, v], 2)

    def read(self, memory, q, places):  # noqa: ARG002
        y = memory.sum(2, keepdim=True).expand(*q.shape[:3], -1)
        return y / (1e-6 + y.norm(dim=-1, keepdim=True))


def test_answers_that_are_no_sums_are_refused():
    m = Attention(Dims(width=32, heads=4), Normed(Dims(width=32, heads=4))).to(DEVICE)
    with pytest.raises(ValueError, match="normed has no attention weights: its answers are no sums of values"):
        m.weights(data(8, dtype=torch.float32))


def test_wrong_calls_of_weights_get_the_sentences_of_the_layer():
    m, reader = layer("softmax", width=32, heads=4), layer("softmax", width=32, heads=4, cross=True)
    x = torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match="build it with cross=True and pass a context, or neither"):
        m.weights(x, x)
    with pytest.raises(ValueError, match="build it with cross=True and pass a context, or neither"):
        reader.weights(x)
    with pytest.raises(ValueError, match=r"32\) is needed"):
        m.weights(x[..., :7])
    with pytest.raises(ValueError, match="max_len=4"):
        layer("softmax", width=32, heads=4, max_len=4).weights(x)
