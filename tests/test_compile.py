"""torch.compile(fullgraph=True): a compiled layer is the layer, padded or not, and one graph serves all lengths but the first.

Every example, causal and not, padded and not, at ten lengths, is measured by benchmarks/compiled.py. Here every row and every
kind of positions is compiled: padded, the first example of every row causally if it can be, the others by turns.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from conftest import CASES, PATHS, WIDTH, Case, case_of, close, data, modes, some
from regard import layer
from regard.config import Config
from regard.models import language_model
from regard.ops import ragged

LENGTHS = (45, 64, 130)  # within one chunk, whole in chunks and blocks, more than two chunks
FEWER = {"sinkhorn": {"iterations": 1}, "reformer": {"rounds": 1}}  # rounds of a loop that a graph unrolls
COMPILED = [case for case in PATHS if case.row.compiles]
# The backward pass is traced too (which is slow) for one example of every way in which answers are computed.
AHEAD = ("softmax", "sparse", "bigbird", "delta", "gat", "fnet", "sinkhorn", "conv")


@pytest.fixture(autouse=True)
def _quick_traces():
    """Trace without the cache of fake tensors, whose entries take longer to make than operations with symbolic lengths, and
    without a search for garbage behind every graph."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False, run_gc_after_compile=False):
        yield


def turn(case: Case) -> dict:
    """Causal first, then by turns with the examples of the row."""
    number = [c for c in CASES if c.row is case.row].index(case)
    return modes(case)[::-1][number % len(modes(case))]


def smaller(case: Case) -> Case:
    """The case with fewer rounds of the same computation."""
    options = {**case.example.options, **FEWER.get(case.row.name, {})}
    return case_of(case.row, replace(case.example, options=options), case.positions)


def answers(run, made, x, valid=None):
    """Output and gradients, by the tokens and by every weight."""
    y = run(x.requires_grad_()) if valid is None else run(x.requires_grad_(), valid=valid)
    up = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    grads = torch.autograd.grad((y * up).sum(), [x, *made.parameters()], allow_unused=True)
    return [y, *(g for g in grads if g is not None)]


def check_same(compiled, made, x, valid=None):
    for a, b in zip(answers(compiled, made, x, valid), answers(made, made, x, valid), strict=True):
        close(a, b)


def of_any_length(n: int, width: int = WIDTH):
    """Padded tokens whose length is not to be written into a graph."""
    x, valid = data(n, b=2, width=width), some(2, n)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    torch._dynamo.maybe_mark_dynamic(valid, 1)
    return x, valid


@pytest.mark.parametrize("case", COMPILED, ids=repr)
def test_compiled_is_eager_padded_at_all_lengths_in_one_graph(case, set_limits):
    set_limits(compiled_chunks=4)  # a graph with room for three chunks, not for seven
    torch._dynamo.reset()
    counters.clear()
    made, first = smaller(case).build(max_len=300, **turn(case)), case.example is case.row.examples[0] and not case.positions
    backend = "aot_eager" if first and case.row.name in AHEAD else "eager"
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for n in LENGTHS:
        check_same(compiled, made, *of_any_length(n))
    assert counters["stats"]["unique_graphs"] == 1


def test_every_row_is_compiled():
    assert {case.row.name for case in COMPILED} == {case.row.name for case in CASES if case.row.compiles}


@pytest.mark.parametrize("spec", ["softmax", "linear", "sinkhorn(block=8, iterations=1)", "gat(pattern=Local(4))"])
def test_without_a_word_about_lengths_the_second_graph_serves_all(spec):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    made = layer(spec, width=8, heads=2, causal=True).double().eval()
    backend = "aot_eager" if spec == "linear" else "eager"  # the others are traced ahead of time above
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    with torch.no_grad():
        for n in (33, 45, 64, 65, 100, 127, 128, 200, 257, 300):
            close(compiled(data(n, b=1, width=8)), made(data(n, b=1, width=8)))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("text", ["Random(2, 4, per_head=True) | Local(3)", "PerHead([Random(1, 4), Local(5)]) & Causal()"])
def test_drawn_patterns_in_cross_attention_count_real_tokens_on_both_sides(text):
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = layer(f"sparse(pattern={text})", width=32, heads=4, cross=True).double().eval()
    compiled = torch.compile(made, fullgraph=True, backend="eager")  # the graph is what matters: no gradients here
    for n, m in ((40, 50), (21, 64)):
        x, context, asking, valid = data(n, b=2), data(m, b=2, seed=5), some(2, n, seed=6), some(2, m)
        close(
            compiled(x, context=context, valid=valid, query_valid=asking),
            made(x, context=context, valid=valid, query_valid=asking),
        )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("term", [False, True])
def test_the_operators_that_count_tokens_are_well_made(dropout, term):
    q, k, v = (torch.randn(2, 2, 20, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    more = (torch.randn(2, 2, 20, 7, dtype=torch.float64, requires_grad=True), torch.rand(2)) if term else (None, None)
    counts, seed = torch.tensor([[20, 13], [0, 20]]), torch.tensor(5) if dropout else None
    rest = (3, term, 0.3, dropout, "Random(1, 4) | Local(2)", False, "auto")
    torch.library.opcheck(ragged._ragged_tiles, (q, k, v, *more, counts, seed, *rest))
    q, k, v = (torch.randn(24, 2, x, dtype=torch.float64, requires_grad=True) for x in (3, 3, 4))
    a, real = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), some(2, 12)
    torch.library.opcheck(ragged._ragged_edge, (q, k, v, a, real, real, seed, "Random(1, 4) | Local(2)", True, 0.2, dropout))
    x = torch.randn(3, 12, 6, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(ragged.opaque_fourier, (x, torch.tensor([12, 0, 7]), "ortho"))


def test_dropout_throws_the_same_dice_forwards_and_backwards():
    """With the dice fixed, out is linear in v, so <up, out> = <dv, v>; rows have dice of their own."""
    q, k, v, up = (torch.randn(1, 2, 30, 4, dtype=torch.float64).repeat(2, 1, 1, 1) for _ in range(4))
    v.requires_grad_()
    rest = (torch.tensor([[30, 30], [30, 30]]), torch.tensor(5), 0, False, 0.5, 0.4, "Random(2, 4) | Local(9)", True, "auto")
    out, _ = ragged._ragged_tiles(q, k, v, None, None, *rest)
    (dv,) = torch.autograd.grad((out * up).sum(), v)
    close((out * up).sum(), (dv * v).sum())
    assert not torch.allclose(out[0], out[1])


@pytest.mark.parametrize("spec", ["relu", "synthesizer(form='random')", "reformer(rounds=1, buckets=4, chunk=6)"])
def test_work_in_several_pieces_compiles_once_for_many_lengths(spec, set_limits):
    set_limits(softmax_strip=1 << 11, strip=1 << 10)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    made = layer(spec, width=8, heads=2, causal=True, max_len=100).double().eval()
    backend = "aot_eager" if spec == "relu" else "eager"  # a backward pass of pieces is the same for all of them
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for n in (46, 47, 48):
        check_same(compiled, made, *of_any_length(n, width=8))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("spec", ["linear", "efficient", "delta"])
def test_long_sequences_compile_too(spec, set_limits):
    """More chunks than the shortest graph has steps for (which is made short here); twice as many need a second graph."""
    set_limits(prefix_steps=4, compiled_chunks=2)
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = layer(spec, width=8, heads=2, causal=True).double().eval()
    compiled = torch.compile(made, fullgraph=True, backend="eager", dynamic=True)
    for n in (300,) if spec == "efficient" else (300, 600):  # whose graphs take six seconds each
        close(compiled(data(n, b=1, width=8)), made(data(n, b=1, width=8)))


def test_more_places_than_max_len_are_refused_in_one_graph_and_counted_otherwise():
    torch._dynamo.reset()
    made = layer("linear", width=32, heads=4, causal=True, max_len=40).double().eval()
    x, valid = data(45, b=2), torch.arange(45) < torch.tensor([[40], [20]])
    with pytest.raises(RuntimeError, match=r"max_len|Observed exception"):
        torch.compile(made, fullgraph=True, backend="eager")(x, valid=valid)
    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(made, backend="eager")(x, valid=valid), made(x, valid=valid))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_a_whole_model_is_one_graph(positions):
    """The table of positions, which eager calls remember, is computed inside the graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Config(mixer="Local(4)", width=8, heads=2, depth=1, ffn=8, max_len=16, positions=positions, dropout=0.0)
    model = language_model(config, 11).eval()
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(tokens)
        close(found, model(tokens))


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_tiles_have_the_strides_that_a_compiler_is_promised(backend, by_token):
    """Of the output and of the gradients, for heads of a token side by side and for tokens of a head."""
    q, k, v = (torch.randn(2, 20, 2, 16) if by_token else torch.randn(2, 2, 20, 16) for _ in range(3))
    given = [x.transpose(1, 2) if by_token else x for x in (q, k, v)]
    rest = (None, None, None, None, 0, False, 0.3, 0.0, "Local(4)", [0, 20, 0, 20], True, backend)

    def strides(q, k, v):
        out, lse = torch.ops.regard.tile_attention(q, k, v, *rest)
        grads = torch.ops.regard.tile_attention_backward(out, lse, q, k, v, *rest[:4], out, lse, *rest[4:])
        return [x.stride() for x in (out, lse, *grads)]

    found = strides(*given)
    with FakeTensorMode() as mode:
        assert strides(*(mode.from_tensor(x) for x in given)) == found
    assert found[0] == given[0].stride()
