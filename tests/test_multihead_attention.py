"""`regard.MultiheadAttention` and `replace_attention`: equal to torch's own modules, in training and on the fast path."""

from __future__ import annotations

import copy
import doctest
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import CATALOGUE, Core, Local, MultiheadAttention, Spec, layer, replace_attention
from regard.catalogue_row import Example

WIDTH, HEADS, N, M = 16, 4, 7, 9
PAST = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def twins(mixer: object = "softmax", **options: object) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Torch's module and ours, on one state_dict with biases that are not zero."""
    torchs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for p in torchs.parameters():
        nn.init.normal_(p, std=0.3)
    ours = MultiheadAttention(WIDTH, HEADS, mixer=mixer, **options)
    ours.load_state_dict(torchs.state_dict())
    return torchs, ours


def padded(b: int, m: int) -> Tensor:
    """True at padding, (b m): rows of different length, the first one whole."""
    lengths = torch.tensor([m, m - 3, 2])[:b]
    return torch.arange(m) >= lengths[:, None]


def assert_equal_calls(torchs: nn.Module, ours: nn.Module, inputs: list[Tensor], call: object) -> None:
    """Outputs, weights, and gradients of inputs and parameters are the same."""
    found = []
    for module in (torchs, ours):
        own = [x.clone().requires_grad_() for x in inputs]
        y, weights = call(module, *own)
        y.square().sum().backward()
        found.append([y, *([] if weights is None else [weights]), *(x.grad for x in own), *(p.grad for p in module.parameters())])
        module.zero_grad()
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


MASKS = {
    "nothing": {},
    "padding": {"key_padding_mask": padded(3, N)},
    "float padding": {"key_padding_mask": torch.zeros(3, N, dtype=torch.float64).masked_fill(padded(3, N), -torch.inf)},
    "causal": {"attn_mask": PAST},
    "hint": {"attn_mask": PAST, "is_causal": True},
    "padding hint": {"attn_mask": PAST.isinf(), "is_causal": True, "key_padding_mask": padded(3, N)},
    "causal padding": {"attn_mask": PAST.isinf(), "key_padding_mask": padded(3, N)},
    "any mask": {"attn_mask": torch.eye(N).roll(1, 0).bool()},
    "mask per head": {"attn_mask": torch.randn(3 * HEADS, N, N, dtype=torch.float64)},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_softmax_of_own_tokens_is_torchs(masks, need_weights):
    for batch_first in (True, False):
        x = torch.randn(3, N, WIDTH) if batch_first else torch.randn(N, 3, WIDTH)
        options = masks | {"need_weights": need_weights, "average_attn_weights": batch_first}
        assert_equal_calls(*twins(batch_first=batch_first), [x], lambda module, x, o=options: module(x, x, x, **o))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 6}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_softmax_of_a_context_is_torchs(options):
    torchs, ours = twins(batch_first=True, **options)
    inputs = [torch.randn(3, N, WIDTH), torch.randn(3, M, torchs.kdim), torch.randn(3, M, torchs.vdim)]
    for masks in ({}, {"key_padding_mask": padded(3, M)}, {"attn_mask": torch.randn(N, M)}):
        assert_equal_calls(torchs, ours, inputs, lambda module, *x, o=masks: module(*x, need_weights=False, **o))
    one = [x[0] for x in inputs]
    assert_equal_calls(torchs, ours, one, lambda module, *x: module(*x, key_padding_mask=padded(2, M)[1]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_pattern_is_torchs_attention_with_its_mask(causal, need_weights):
    i = torch.arange(N)
    hidden = ~Local(3)(0, i[:, None], i)
    if causal:
        hidden |= PAST.isinf()
    torchs, ours = twins("Local(3)", batch_first=True)
    x = torch.randn(3, N, WIDTH)

    def call(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = hidden if module is torchs else PAST if causal else None
        return module(x, x, x, attn_mask=mask, need_weights=need_weights)

    assert_equal_calls(torchs, ours, [x], call)


def fitting(causal: bool) -> list[str]:
    """Names of the catalogue with a core that the module can hold."""
    other = {"longformer", "gla", "delta", "reformer", "pooled_queries"} | ({"routing", "nystrom"} if causal else set())
    return [name for name, row in CATALOGUE.items() if issubclass(row.make, Core) and name not in other]


@pytest.mark.parametrize(("mixer", "causal"), [(name, causal) for causal in (False, True) for name in fitting(causal)])
def test_every_mechanism_is_its_layer_and_its_weights_make_the_outputs(mixer, causal):
    """Whatever padding holds, and with gradients."""
    spec = Spec(mixer, **CATALOGUE[mixer].examples[0].options)
    attention = MultiheadAttention(WIDTH, HEADS, batch_first=True, mixer=spec, causal=causal, max_len=32).eval()
    same = layer(spec, width=WIDTH, heads=HEADS, causal=causal, max_len=32).eval()
    same.core.load_state_dict(attention.forms["causal" if causal else "bidirectional"].state_dict())
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    for one, weight, bias in zip((same.q, same.k, same.v), weights, biases, strict=True):
        if isinstance(one, nn.Linear):
            one.load_state_dict({"weight": weight, "bias": bias})
    same.out.load_state_dict(attention.out_proj.state_dict())
    hidden = padded(3, 20)
    holds = 0.0 if mixer == "softmax" else torch.nan  # softmax is torch's, which reads padding
    x = torch.randn(3, 20, WIDTH).masked_fill(hidden[..., None], holds)
    y, _ = attention(x, x, x, key_padding_mask=hidden, need_weights=False, is_causal=causal)
    torch.testing.assert_close(y[~hidden], same(x, valid=~hidden)[~hidden])
    torch.testing.assert_close(attention(x, x, x, key_padding_mask=hidden, is_causal=causal)[0], y)
    y.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


def test_weights_make_the_outputs_also_with_dropout():
    attention = MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True, mixer="Local(3)")
    x = torch.randn(2, N, WIDTH)
    y, weights = attention(x, x, x, average_attn_weights=False)
    v = (x @ attention.in_proj_weight[-WIDTH:].T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    torch.testing.assert_close(attention.out_proj((weights @ v).transpose(1, 2).flatten(2)), y)
    assert (weights == 0).any() and not torch.equal(attention(x, x, x)[0], y)
    assert torch.equal(attention.eval()(x, x, x)[0], attention(x, x, x)[0])
    assert MultiheadAttention(WIDTH, HEADS, mixer="Local(3)", weights=False)(x, x, x)[1] is None


def test_weights_that_a_mechanism_has_not_are_refused(monkeypatch):
    row = CATALOGUE["linear"]
    monkeypatch.setitem(CATALOGUE, "linear", replace(row, examples=(Example(weights=False),)))
    with pytest.raises(ValueError, match="linear has no attention weights to return: give need_weights=False"):
        MultiheadAttention(WIDTH, HEADS, mixer="linear", batch_first=True)(X, X, X)


def test_a_mechanism_with_parameters_has_one_form():
    x = torch.randn(2, N, WIDTH)
    options = {"batch_first": True, "mixer": "linformer(rank=3)", "max_len": N, "weights": False}
    past = MultiheadAttention(WIDTH, HEADS, causal=True, **options)
    y, _ = past(x, x, x, attn_mask=PAST)
    torch.testing.assert_close(past(x[:, :4], x[:, :4], x[:, :4], is_causal=True)[0], y[:, :4])
    with pytest.raises(ValueError, match="causal=True, but this call is bidirectional"):
        past(x, x, x)
    both = MultiheadAttention(WIDTH, HEADS, **options)
    with pytest.raises(ValueError, match="build it with causal=True"):
        both(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="at most 7 tokens"):
        both(x, x.repeat(1, 2, 1), x.repeat(1, 2, 1))


X = torch.randn(2, N, WIDTH, dtype=torch.float64)
Y = torch.randn(2, M, WIDTH, dtype=torch.float64)
WRONG = {
    "only softmax takes any attn_mask": ("linear", X, {"attn_mask": torch.eye(N).bool()}),
    "only softmax takes": ("linear", X, {"attn_mask": PAST + 1}),
    "adds numbers to scores": ("linear", X, {"key_padding_mask": torch.randn(2, N)}),
    "give a query for each key": ("Local(3)", Y, {}),
    "cannot do cross": ("sinks(window=2)", Y, {}),
    "cannot do causal": ("nystrom(landmarks=2)", X, {"is_causal": True}),
    "key_padding_mask has shape": ("Local(3)", X, {"key_padding_mask": padded(2, M)}),
    "must be bool or floating": ("Local(3)", X, {"key_padding_mask": torch.zeros(2, N).long()}),
    "nested": ("Local(3)", torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), {}),
    "disagree in batch": ("Local(3)", X[:1], {}),
}


@pytest.mark.parametrize("reason", WRONG)
def test_calls_that_a_mechanism_cannot_answer_are_refused(reason):
    mixer, key, options = WRONG[reason]
    attention = MultiheadAttention(WIDTH, HEADS, batch_first=True, mixer=mixer)
    query = key if key.is_nested else X
    with pytest.raises((ValueError, TypeError), match=reason):
        attention(query, X if options else key, X if options else key, **{"need_weights": False} | options)


@pytest.mark.parametrize(
    ("mixer", "options", "reason"),
    [
        ("fnet", {}, "use layer"),
        ("longformer", {}, "more than one query"),
        ("gla", {}, "gates"),
        ("reformer", {}, "keys that are its queries"),
        ("pooled_queries(rate=2)", {}, "fewer outputs"),
        ("linear", {"dropout": 0.1}, "use dropout=0"),
        ("linear", {"add_zero_attn": True}, "no place"),
        ("linformer", {}, "max_len"),
        ("softmax", {"num_heads": 3}, "not divisible"),
    ],
)
def test_mechanisms_that_do_not_fit_are_refused(mixer, options, reason):
    with pytest.raises(ValueError, match=reason):
        MultiheadAttention(WIDTH, **{"num_heads": HEADS} | options, mixer=mixer)


def transformer(batch_first: bool = True, **options: object) -> nn.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Transformer(WIDTH, HEADS, 2, 1, 32, batch_first=batch_first, dropout=0.0, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_with_softmax_is_the_same_model(training, norm_first):
    model = transformer(norm_first=norm_first).train(training)
    ours = copy.deepcopy(model)
    names = replace_attention(ours, "softmax", only="*")
    assert names == [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert ours.state_dict().keys() == model.state_dict().keys()
    source, target, hidden = torch.randn(3, M, WIDTH), torch.randn(3, N, WIDTH), padded(3, M)
    masks = {"tgt_mask": PAST, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y, same = (one(source, target, **masks) for one in (model, ours))
        torch.testing.assert_close(same, y)
        if grad:
            y.sum().backward()
            same.sum().backward()
            for p, own in zip(model.parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(own.grad, p.grad)


def test_cross_attention_stays_softmax_unless_it_is_chosen():
    """Source and target have other lengths, and every query still sees the last token of the source."""
    model = transformer().eval()
    assert "decoder.layers.0.multihead_attn" not in replace_attention(model, "Local(2)")
    source, target = torch.randn(1, M, WIDTH), torch.randn(1, N, WIDTH)
    memory = model.encoder(source).detach().requires_grad_()
    first = model.decoder(target, memory)[0, 0, 0]
    assert torch.autograd.grad(first, memory)[0][:, -1].any()
    assert replace_attention(model, "linear", only="*.multihead_attn") == ["decoder.layers.0.multihead_attn"]
    assert model(source, target).shape == target.shape


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_with_a_window_is_torchs_with_its_mask(batch_first):
    """Also where torch would compute attention itself, or make nested tensors: in evaluation without gradients."""
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first, dropout=0.2)
    torchs = nn.TransformerEncoder(made, 2, enable_nested_tensor=batch_first)
    ours = copy.deepcopy(torchs)
    assert replace_attention(ours, "Local(3)") == ["layers.0.self_attn", "layers.1.self_attn"]
    x, i, hidden = torch.randn(3, N, WIDTH), torch.arange(N), padded(3, N)
    window = ~Local(3)(0, i[:, None], i)
    tokens = x if batch_first else x.transpose(0, 1)
    ours, torchs = ours.eval(), torchs.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), torchs(tokens, mask=window))
        torch.testing.assert_close(ours(tokens, mask=PAST), torchs(tokens, mask=window | PAST.isinf()))
        y = ours(tokens, src_key_padding_mask=hidden)
        for row, m in enumerate((~hidden).sum(1)):
            one, found = (part[row, :m] if batch_first else part[:m, row] for part in (tokens, y))
            torch.testing.assert_close(found, torchs(one, mask=window[:m, :m]))
    assert ours.layers[0].self_attn.forms.causal.drop == 0
    assert ours.train().layers[0].self_attn.forms.causal.drop == 0.2


def test_modules_and_parameters_stay_the_same_and_can_be_replaced_again():
    model = transformer()
    parts, parameters, calls = list(model.modules()), list(model.parameters()), []
    hook = model.encoder.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    replace_attention(model, "linear", only="*", weights=False)
    attention = [part for part in parts if isinstance(part, nn.MultiheadAttention)]
    assert all(type(part) is MultiheadAttention and part.mixer == "linear" for part in attention)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    chosen = replace_attention(model, regard.Local(2), only=["encoder.*", "decoder.*.self_attn"])
    assert chosen == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "decoder.layers.0.self_attn"]
    assert [part.mixer for part in attention] == ["sparse(pattern=Local(2))"] * 3 + ["linear"]
    x = torch.randn(2, N, WIDTH)
    y = model(x, x[:, :4])
    assert calls == [1]
    hook.remove()
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x, x[:, :4]), y)
    assert replace_attention(model, "softmax", only=lambda name, _: "encoder" in name) == chosen[:2]


class Own(nn.MultiheadAttention):
    """A subclass, whose code another one would take away."""


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (lambda: nn.Linear(2, 2), {}, "holds no nn.MultiheadAttention"),
        (transformer, {"only": "head.*"}, "chooses none"),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2), Own(8, 2)), {}, "because 1 cannot be: Own is a class of its own"),
        (lambda: nn.MultiheadAttention(8, 2, dropout=0.1), {}, "because the model itself cannot be: linear cannot do dropout"),
        (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), {}, "no place"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_is(model, options, reason):
    model = model()
    with pytest.raises(ValueError, match=reason):
        replace_attention(model, "linear", **options)
    assert not any(isinstance(part, MultiheadAttention) for part in model.modules())


def test_dropout_can_be_left_out_for_a_mechanism_without_weights():
    model = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1)
    assert replace_attention(model, "linear", dropout=0.0) == [""]
    assert model.dropout == 0


@pytest.mark.parametrize("part", [MultiheadAttention, replace_attention], ids=lambda part: part.__name__)
def test_examples_of_docstrings_run(part):
    tests = doctest.DocTestFinder(recurse=False).find(part, part.__name__, globs={})
    assert [doctest.DocTestRunner().run(test).failed for test in tests] == [0]


def test_an_encoder_that_was_compiled_is_traced_again_to_one_graph(monkeypatch):
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, dropout=0.0)
    hidden = padded(2, N)
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    compiled(X, src_key_padding_mask=hidden)
    replace_attention(made, "Local(3)")
    torch.testing.assert_close(compiled(X, src_key_padding_mask=hidden), made(X, src_key_padding_mask=hidden))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="values of attn_mask cannot be read"):
        made.self_attn(X, X, X, attn_mask=PAST)
