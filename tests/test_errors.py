"""Bad input gets a sentence: what was wrong, and what is allowed."""

import pytest
import torch

from conftest import data
from regard import Dims, Edges, Local, Spec, attend, core, layer

X = data(8, dtype=torch.float32)


def softmax(**options):
    return layer("softmax", width=32, heads=4, **options)


def qkv(n=6, m=6, dtype=torch.float32):
    return torch.randn(1, 4, n, 8, dtype=dtype), torch.randn(1, 4, m, 8), torch.randn(1, 4, m, 8)


CASES = {
    "width not divisible": (lambda: Dims(30, 4), "width 30 is not divisible by 4 heads: use width 28"),
    "heads do not share": (lambda: Dims(32, 4, kv_heads=3), "cannot share 3 key-value heads evenly"),
    "no such width": (lambda: Dims(0, 4), "width must be a positive integer, not 0"),
    "causal and cross": (lambda: Dims(32, 4, causal=True, cross=True), "either causal .* or reads a context"),
    "context without cross": (lambda: Dims(32, 4, context_width=8), "set cross=True"),
    "dropout": (lambda: Dims(32, 4, dropout=1.5), r"dropout must be in \[0, 1\)"),
    "unknown spec": (lambda: layer("sofmax", width=32, heads=4), "softmax"),
    "unknown option": (lambda: Spec("bigbird", windw=3), "window"),
    "unknown option in text": (lambda: layer("bigbird(windw=3)", width=32, heads=4), "window"),
    "even window": (lambda: layer("bigbird(window=2)", width=32, heads=4), "an even number"),
    "odd heads": (lambda: layer("sparse_transformer", width=30, heads=3), "odd number"),
    "pattern": (lambda: layer("Local(8) | Globl(first=1)", width=32, heads=4), "Global(.|\n)*\\^"),
    "per head": (lambda: layer("PerHead([Local(2), Local(3), Local(4)])", width=32, heads=4), "shared evenly by 4 heads"),
    "edges on another length": (lambda: layer(Edges([[0], [1]], nodes=5), width=32, heads=4)(X), "a graph with 5 nodes"),
    "edges cannot stream": (
        lambda: layer(Edges([[0], [1]], nodes=5), width=32, heads=4, causal=True).start(1),
        "cannot do stream",
    ),
    "shape of valid": (
        lambda: softmax()(X, valid=torch.ones(3, 7, dtype=torch.bool)),
        r"valid has shape \(3, 7\), but .* \(3, 8\)",
    ),
    "dtype of valid": (lambda: softmax()(X, valid=torch.ones(3, 8)), "valid must be a bool tensor, True = real token"),
    "width of x": (lambda: softmax()(X[..., :5]), r"x has shape \(3, 8, 5\), but \(batch, length, 32\) is needed"),
    "no batch": (lambda: softmax()(X[0]), r"\(batch, length, 32\) is needed"),
    "dtype of x": (lambda: softmax()(X.double()), "x is torch.float64 but the layer is torch.float32"),
    "device of x": (lambda: softmax()(X.to("meta")), "x is on meta but the layer is on cpu"),
    "device of valid": (lambda: softmax()(X, valid=torch.ones(3, 8, dtype=torch.bool, device="meta")), "valid is on meta"),
    "context nobody reads": (lambda: softmax(causal=True)(X, context=X), "build it with cross=True"),
    "no context": (lambda: softmax(cross=True)(X), "pass a context"),
    "width of context": (
        lambda: softmax(cross=True, context_width=16)(X, context=X),
        r"context has shape .* \(batch, length, 16\)",
    ),
    "stream of what cannot": (lambda: softmax().start(2), "causal=True or cross=True"),
    "start without batch": (lambda: softmax(causal=True).start(), r"start\(batch\)"),
    "start cross without context": (lambda: softmax(cross=True).start(2), r"start\(context="),
    "too long": (lambda: softmax(max_len=7)(X), "8 tokens, but this layer was built for max_len=7"),
    "cross of longformer": (lambda: layer("longformer", width=32, heads=4, cross=True), "longformer cannot do cross: it can do"),
    "dropout of linear": (lambda: layer("linear", width=32, heads=4, dropout=0.1), "linear cannot do dropout.*use dropout=0"),
    "shared q-k in cross": (lambda: layer("softmax", width=32, heads=4, cross=True, shared_qk=True), "no cross"),
    "scale": (lambda: layer("softmax(scale=-1)", width=32, heads=4), "scale must be a positive number"),
    "norm": (lambda: layer("relu(norm='max')", width=32, heads=4), "norm must be 'count' or 'sum', not 'max'"),
    "q and k differ in dtype": (lambda: attend(*qkv(dtype=torch.float64), core("softmax", Dims(32, 4))), "they must agree"),
    "causal with other lengths": (
        lambda: attend(*qkv(6, 5), core("softmax", Dims(32, 4)), causal=True),
        "as many queries as keys",
    ),
    "query_valid in causal": (
        lambda: attend(*qkv(), core("softmax", Dims(32, 4)), causal=True, query_valid=torch.ones(1, 6, dtype=torch.bool)),
        "give valid alone",
    ),
    "three dims": (lambda: attend(*(x[0] for x in qkv()), core("softmax", Dims(32, 4))), r"\(batch, heads, length, dim\)"),
    "identity asks for more": (lambda: attend(*qkv(7, 6), core("identity", Dims(32, 4))), "answers a token with itself"),
    "dilation without heads": (lambda: layer("longformer(dilation=2)", width=32, heads=4), "say how many heads"),
    "no special tokens": (lambda: layer("longformer(first=0)", width=32, heads=4), "shared=True"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sentence(name):
    make, message = CASES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_too_long_is_found_while_streaming():
    mixer = softmax(causal=True, max_len=10)
    valid = torch.tensor([[True] * 8, [True] * 3 + [False] * 5, [False] * 8])
    _, state = mixer.extend(mixer.start(3), X, valid)
    _, state = mixer.extend(state, X[:, :2])
    with pytest.raises(ValueError, match="11 tokens, but this layer was built for max_len=10"):
        mixer.extend(state, X[:, :1])


def test_padding_does_not_count_towards_the_length():
    valid = torch.arange(8) < torch.tensor([7, 6, 2])[:, None]
    assert softmax(max_len=7)(X, valid=valid).shape == X.shape


def test_a_pattern_that_depends_on_the_length_cannot_go_on():
    mixer = layer("Random(1, 4) | Local(2)", width=32, heads=4, causal=True)
    assert mixer(X).shape == X.shape
    with pytest.raises(ValueError, match="cannot do stream"):
        mixer.start(3)
    assert layer(Local(2), width=32, heads=4, causal=True).start(3).nbytes == 0
