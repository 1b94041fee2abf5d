"""Bad input gets a sentence: what was wrong, and what is allowed."""

import pytest
import torch

from conftest import data
from regard import Dims, Edges, Local, Spec, attend, core, layer
from regard.mixers.graph_attention import disjoint, edge_weights, on_graph

X = data(8, dtype=torch.float32)


def softmax(**options):
    return layer("softmax", width=32, heads=4, **options)


def qkv(n=6, m=6, dtype=torch.float32):
    return torch.randn(1, 4, n, 8, dtype=dtype), torch.randn(1, 4, m, 8), torch.randn(1, 4, m, 8)


def synthesizer(options):
    return core(f"synthesizer({options})", Dims(32, 4, max_len=16))


CASES = {
    "width not divisible": (lambda: Dims(30, 4), "width 30 is not divisible by 4 heads: use width 28"),
    "heads do not share": (lambda: Dims(32, 4, kv_heads=3), "cannot share 3 key-value heads evenly"),
    "no such width": (lambda: Dims(0, 4), "width must be an integer of at least 1, not 0"),
    "causal and cross": (lambda: Dims(32, 4, causal=True, cross=True), "either causal .* or reads a context"),
    "context without cross": (lambda: Dims(32, 4, context_width=8), "set cross=True"),
    "dropout": (lambda: Dims(32, 4, dropout=1.5), r"dropout must be in \[0, 1\)"),
    "unknown spec": (lambda: layer("sofmax", width=32, heads=4), "softmax"),
    "unknown option": (lambda: Spec("bigbird", windw=3), "window"),
    "unknown option in text": (lambda: layer("bigbird(windw=3)", width=32, heads=4), "window"),
    "ends of causal bigbird": (
        lambda: layer("bigbird(special='ends')", width=32, heads=4, causal=True),
        "use special='first' with causal=True",
    ),
    "one end of bigbird": (lambda: layer("bigbird(globals=1, special='ends')", width=32, heads=4), "1"),
    "odd ends of bigbird": (lambda: layer("bigbird(globals=3, special='ends')", width=32, heads=4), "odd number"),
    "external bigbird": (lambda: layer("bigbird(special='external')", width=32, heads=4), "'first' or 'ends'"),
    "two windows": (lambda: layer("longformer(window=4, attention_window=8)", width=32, heads=4), "give one of them"),
    "odd attention_window": (lambda: layer("longformer(attention_window=7)", width=32, heads=4), "odd number"),
    "ridge and iterations": (lambda: layer("nystrom(ridge=0.1, iterations=6)", width=32, heads=4), "leave one of them out"),
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
    "query_valid without a context": (lambda: softmax()(X, query_valid=X[..., 0] > 0), "the same tokens: give valid alone"),
    "shape of query_valid": (lambda: softmax(cross=True)(X, context=X, query_valid=X[:, :5, 0] > 0), r"has shape \(3, 5\)"),
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
        "6 queries are more than that",
    ),
    "query_valid in causal": (
        lambda: attend(*qkv(), core("softmax", Dims(32, 4)), causal=True, query_valid=torch.ones(1, 6, dtype=torch.bool)),
        "give valid alone",
    ),
    "a text is no core": (
        lambda: attend(*qkv(), "Local(4)"),
        r"not 'Local\(4\)': build one with regard.core, as in core\('Local\(4\)', Dims\(width=32, heads=4\)\)",
    ),
    "a pattern is no core": (lambda: attend(*qkv(), Local(4)), r"as in core\(Local\(4\), Dims\(width=32, heads=4\)\)"),
    "a Spec is no core": (lambda: attend(*qkv(), Spec("softmax")), r"as in core\(Spec\('softmax'\), Dims\("),
    "a class is no core": (lambda: attend(*qkv(), type(core("softmax", Dims(32, 4)))), r"as in core\(Softmax, Dims\("),
    "a layer is no core": (lambda: attend(*qkv(), softmax()), r"attend\(q, k, v, layer.core\)"),
    "nothing is no core": (lambda: attend(*qkv(), None), r"not None: build one .* core\('Local\(4\)', Dims\("),
    "grouped heads without a core": (
        lambda: attend(torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 5), "softmax"),
        r"core\('softmax', Dims\(width=32, heads=4, kv_heads=2, value_dim=5\)\)",
    ),
    "three dims": (lambda: attend(*(x[0] for x in qkv()), core("softmax", Dims(32, 4))), r"\(batch, heads, length, dim\)"),
    "identity asks for more": (lambda: attend(*qkv(7, 6), core("identity", Dims(32, 4))), "7 queries are more than that"),
    "dilation without heads": (lambda: layer("longformer(dilation=2)", width=32, heads=4), "say how many heads"),
    "no special tokens": (lambda: layer("longformer(first=0)", width=32, heads=4), "shared=True"),
    "rate of retention": (lambda: layer("retention(power=65)", width=32, heads=4), "power must be at most 64"),
    "norm of retention": (lambda: layer("retention(norm=1)", width=32, heads=4), "norm must be True or False, not 1"),
    "gate of gla": (lambda: layer("gla(gate='token')", width=32, heads=4), "gate must be 'feature' or 'head', not 'token'"),
    "activation of delta": (lambda: layer("delta(activation='relu')", width=32, heads=4), "must be 'silu' or 'none', not 'relu'"),
    "gate of delta": (lambda: layer("delta(gated=1)", width=32, heads=4), "gated must be True or False, not 1"),
    "far that is no kernel": (
        lambda: layer("hybrid(far='softmax')", width=32, heads=4),
        "nothing is called 'softmax': there is linear",
    ),
    "far that is no text": (lambda: layer("hybrid(far=3)", width=32, heads=4), "far must be the text of a kernel.*not 3"),
    "no sinks": (lambda: layer("sinks(first=0)", width=32, heads=4), "first must be an integer of at least 1, not 0"),
    "no longest distance": (lambda: layer("cosformer", width=32, heads=4), "cosformer .*max_len="),
    "keys without gates": (lambda: attend(*qkv(), core("gla", Dims(32, 4))), "8 gates stand behind each key"),
    "linformer without an end": (
        lambda: layer("linformer", width=32, heads=4),
        "linformer has weights for every position.*max_len",
    ),
    "linformer rank": (lambda: layer("linformer(rank=0)", width=32, heads=4, max_len=9), "rank must be an integer of at least 1"),
    "linformer share": (
        lambda: layer("linformer(share='all')", width=32, heads=4, max_len=9),
        "share must be one of 'none', 'head'",
    ),
    "linformer too long": (
        lambda: attend(*qkv(), core("linformer", Dims(32, 4, max_len=5))),
        "6 tokens, but linformer was built for max_len=5",
    ),
    "compressed rate": (lambda: layer("compressed(rate=0)", width=32, heads=4), "rate must be an integer of at least 1, not 0"),
    "compressed near": (lambda: layer("compressed(near=-1)", width=32, heads=4), "near must be an integer of at least 0"),
    "compressed kernel": (lambda: layer("compressed(kernel='mean')", width=32, heads=4), "kernel must be 'taps' or 'full'"),
    "compressed asked backwards": (
        lambda: attend(*qkv(), core("compressed", Dims(32, 4, causal=True))),
        "built with causal=True: it reads one token at a time",
    ),
    "pooled rate": (lambda: layer("pooled_queries(rate=0)", width=32, heads=4), "rate must be an integer of at least 1"),
    "pooled causal": (lambda: layer("pooled_queries", width=32, heads=4, causal=True), "cannot do causal"),
    "nystrom landmarks": (lambda: layer("nystrom(landmarks=0)", width=32, heads=4), "landmarks must be an integer of at least 1"),
    "nystrom ridge": (lambda: layer("nystrom(ridge=0)", width=32, heads=4), "ridge must be a positive number, not 0"),
    "nystrom conv": (lambda: layer("nystrom(conv=4)", width=32, heads=4), "conv is as wide to the left .* 4 is an even number"),
    "nystrom stream": (lambda: layer("nystrom", width=32, heads=4, cross=True).start(context=X), "cannot do stream"),
}

CASES |= {  # graphs
    "slope": (lambda: layer("gat(pattern=Local(2), slope=2)", width=32, heads=4), "slope must be a number from 0 to 1"),
    "v2": (lambda: layer("gat(pattern=Local(2), v2=1)", width=32, heads=4), "v2 must be True or False, not 1"),
    "gat without a pattern": (lambda: layer("gat", width=32, heads=4), "pattern"),
    "gat on another length": (lambda: layer("gat(pattern=Edges([[0], [1]], nodes=5))", width=32, heads=4)(X), "with 5 nodes"),
    "gat of a graph cannot stream": (
        lambda: layer("gat(pattern=Edges([[0], [1]]))", width=32, heads=4, causal=True).start(1),
        "gat cannot do stream",
    ),
    "edges as floats": (lambda: Edges([[0.0], [1.0]]), r"integers of shape \(2, edges\).* not torch.float32"),
    "edges as truths": (lambda: Edges([[True], [False]]), "not torch.bool"),
    "edges the other way": (lambda: Edges([[0, 1], [1, 2], [2, 0]]), r"not \(3, 2\): write edges.T"),
    "ragged edges": (lambda: Edges([[0, 1], [1]]), "sources over targets"),
    "edges of nothing": (lambda: Edges(None), "sources over targets"),
    "edges of text": (lambda: Edges("0-1"), "make it from its edges first"),
    "edges that are too far": (lambda: Edges([[-1], [0]]), "edges name nodes -1 to 0"),
    "too many nodes": (lambda: Edges([[0], [1]], nodes=2**32), "nodes must be at most 2,147,483,648"),
    "loops": (lambda: Edges([[0], [1]], loops=1), "loops must be True or False"),
    "no graphs": (lambda: disjoint([]), "a list of graphs"),
    "graphs that are not": (lambda: disjoint([Local(2)]), "a list of graphs"),
    "nodes of other graphs": (lambda: disjoint([Edges([[0], [1]])]).pack([X[0]]), r"have \[2\] nodes, not \[8\]"),
    "answers of other graphs": (lambda: disjoint([Edges([[0], [1]])]).unpack(X), r"\(1, 2, width\) is needed"),
    "over what takes no pattern": (lambda: on_graph(softmax(), Local(2)), "only `sparse` and `gat` do"),
    "weights of no graph": (lambda: edge_weights(softmax(), X), "edge_weights is for self-attention"),
    "weights of several": (lambda: edge_weights(layer(Local(2), width=32, heads=4), X), r"\(1, nodes, 32\), are needed"),
    "odd buckets": (lambda: layer("reformer(buckets=5)", width=32, heads=4), "come in pairs.*an even number or 1, not 5"),
    "no rounds": (lambda: layer("reformer(rounds=0)", width=32, heads=4), "rounds must be an integer of at least 1, not 0"),
    "no chunk": (lambda: layer("reformer(chunk=0)", width=32, heads=4), "chunk must be an integer of at least 1, not 0"),
    "reformer reads a context": (lambda: layer("reformer", width=32, heads=4, cross=True), "reformer cannot do cross"),
    "reformer shares heads": (lambda: layer("reformer", width=32, heads=4, kv_heads=2), "no kv_heads"),
    "no clusters": (lambda: layer("routing(clusters=0)", width=32, heads=4), "clusters must be an integer of at least 1"),
    "decay of centroids": (lambda: layer("routing(decay=1.5)", width=32, heads=4), "decay must be a number from 0 to 1"),
    "dropout of routing": (lambda: layer("routing", width=32, heads=4, dropout=0.1), "routing cannot do dropout"),
    "block of sinkhorn": (lambda: core("sinkhorn(block=0)", Dims(32, 4)), "block must be an integer of at least 1, not 0"),
    "iterations": (lambda: core("sinkhorn(iterations=0)", Dims(32, 4)), "iterations must be an integer of at least 1"),
    "temperature": (lambda: core("sinkhorn(temperature=0)", Dims(32, 4)), "temperature must be a positive number, not 0"),
    "form of sinkhorn": (lambda: core("sinkhorn(form='short')", Dims(32, 4)), "form must be 'full' or 'sortcut', not 'short'"),
    "top without sortcut": (lambda: core("sinkhorn(top=2)", Dims(32, 4)), "it belongs to form='sortcut'"),
    "causal sortcut": (lambda: layer("sinkhorn(form='sortcut')", width=32, heads=4, causal=True), "cannot do causal"),
    "sinkhorn asks for more": (lambda: attend(*qkv(7, 6), core("sinkhorn", Dims(32, 4))), "7 queries are more than that"),
    "synthesizer without length": (lambda: core("synthesizer", Dims(32, 4)), "say how many with max_len"),
    "form of synthesizer": (lambda: synthesizer("form='sparse'"), "form must be one of 'dense', 'random'"),
    "mix": (lambda: synthesizer("mix=1.5"), r"the weight of the dot product in \[0, 1\], not 1.5"),
    "mix by name": (lambda: synthesizer("mix='half'"), "mix must be None, 'learned'"),
    "frozen dense": (lambda: synthesizer("frozen=True"), "dense makes its weights from tokens: use form='random'"),
    "seed of a learned table": (lambda: synthesizer("form='random', seed=3"), "set frozen=True"),
    "rank of dense": (lambda: synthesizer("rank=3"), "it belongs to form='random_factorised'"),
    "rank": (lambda: synthesizer("form='random_factorised', rank=0"), "rank must be an integer of at least 1"),
    "synthesizer asks for more": (lambda: attend(*qkv(7, 6), synthesizer("")), "7 queries are more than that"),
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
