"""Kernels of nystrom, sinkhorn and causal efficient attention under torch.compile: operators, in one graph for all lengths."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from conftest import DEVICE, compiled_passes
from regard import layer
from regard.mixers import landmarks, sinkhorn
from regard.ops import balance, few_keys, many_keys, spd_solve, two_blocks
from regard.ops.landmark_attention import LandmarkRule, landmark_attention, takes_landmarks
from regard.ops.linear.running_softmax import running_kernels_fit, running_softmax
from regard.ops.triton_support import has_triton
from regard.patterns.tiles import MASKED_SCORE

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton")
LENGTHS = (45, 64)  # the last block of eight tokens is full in one of them alone


def by_token(heads, n, width, dtype=torch.float32):
    return torch.randn(2, n, heads, width, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()


def check_operators(operator, inputs, eager, backward, given):
    """Check an operator with its gradients, and the shapes and strides of its backward operator, which is given its results.

    Results and gradients are those of the eager function of the same inputs.
    """
    torch.library.opcheck(operator, inputs)
    variables = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    found, expected = ([y for y in made if y.requires_grad] for made in (operator(*inputs), eager(*inputs)))
    for make in (found, expected):
        make += torch.autograd.grad(sum(y.float().sin().sum() for y in make), variables)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        arguments = given(operator(*inputs))
        torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))


WITH_KERNELS = (  # small ones of every row that has a backend of kernels
    *("relu", "additive(hidden=4)", "Local(2) | Global(first=1)", "longformer(window=3)", "sparse_transformer(stride=3)"),
    *("linear", "efficient", "rfa(features=4)", "performer(features=4)", "cosformer", "hedgehog", "retention", "gla", "delta"),
    *("hybrid(pattern=Local(2))", "sinks(window=3, first=1)", "reformer(rounds=1, buckets=2, chunk=4)", "linformer(rank=4)"),
    *("compressed(rate=2)", "bigbird(block=2, random=1)"),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mixer", WITH_KERNELS)
def test_a_layer_of_kernels_is_one_graph_with_its_gradients(mixer, causal):
    """Operators must not return what they were given: torch looks at that in a compiled pass alone."""
    torch.compiler.reset()  # one function for all rows, which torch compiles a few times at most
    own = layer(mixer, width=8, heads=2, causal=causal, max_len=16, backend="triton").to(DEVICE)
    for found, expected in compiled_passes(own, (12,)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "m", "kv_heads", "iterations"), [(70, 70, 4, 0), (5, 90, 2, 6)])
def test_nystrom_attention_is_an_operator(n, m, kv_heads, iterations, monkeypatch):
    """Fewer queries than landmarks too, and query heads that share keys."""
    from regard.ops.landmark_compiled import landmark_operator, landmark_operator_backward

    monkeypatch.setattr(few_keys, "MOST_SEGMENTS", 6)
    q, k, v = (by_token(heads, size, 6, torch.float16) for heads, size in ((4, n), (kv_heads, m), (kv_heads, m)))
    rule = LandmarkRule(9, iterations, 1e-3, 0.3)
    check_operators(
        landmark_operator,
        (q, k, v, *rule),
        lambda q, k, v, *_: [landmark_attention(q, k, v, rule, None)],
        landmark_operator_backward,
        lambda found: (torch.randn_like(found[0]), found[1:], q, k, v, *rule),
    )


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_answers_of_landmarks_are_an_operator(kv_heads):
    from regard.ops.landmark_compiled import answers_operator, answers_operator_backward

    q, k, v = by_token(4, 5, 6), by_token(kv_heads, 70, 6, torch.float16), by_token(kv_heads, 70, 3, torch.float16)
    inputs = q, k, v, torch.rand(2, 70, device=DEVICE) < 0.7 if kv_heads == 2 else None, 0.3
    check_operators(
        answers_operator,
        inputs,
        lambda *x: [many_keys.many_keys_answers(*x, None)],
        answers_operator_backward,
        lambda found: (torch.randn_like(found[0]), *found, *inputs),
    )


def test_small_systems_are_an_operator():
    from regard.ops.landmark_compiled import solve_operator

    s = torch.rand(2, 5, 5, dtype=torch.float64, device=DEVICE)
    a = s.mT @ s + torch.eye(5, dtype=torch.float64, device=DEVICE)
    b = torch.randn(2, 3, 5, dtype=torch.float64, device=DEVICE).mT
    torch.library.opcheck(solve_operator, (a.requires_grad_(), b.requires_grad_()))
    found, expected = solve_operator(a, b), torch.linalg.solve(a, b)
    for x, y in zip(*(torch.autograd.grad(out.sin().sum(), (a, b)) for out in (found, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_time", [False, True])
def test_the_balance_of_a_sort_is_an_operator(in_time):
    from regard.ops.sinkhorn_compiled import balance_operator, balance_operator_backward

    seen = torch.ones(19, 19, dtype=torch.bool, device=DEVICE)
    logits = torch.randn(2, 2, 19, 19, device=DEVICE).mT.masked_fill(~(seen.tril(-1) if in_time else seen), MASKED_SCORE)
    check_operators(
        balance_operator,
        (logits.requires_grad_(), 3, in_time),
        lambda *x: [balance.balance_matrices(*x)],
        balance_operator_backward,
        lambda found: (torch.randn_like(found[0]).mT, logits, found[1], in_time),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_two_blocks_is_an_operator(causal):
    """Tokens with their heads side by side and mixed blocks in one piece, in half precision with a bias in float32 too."""
    from regard.ops.sinkhorn_compiled import two_blocks_operator, two_blocks_operator_backward

    dtype = torch.float16 if causal else torch.float32
    q, k, v = (by_token(2, 24, width, dtype).detach().unflatten(2, (3, 8)) for width in (6, 6, 5))
    k2, v2 = (torch.randn(2, 2, 3, 8, width, device=DEVICE).to(dtype) for width in (6, 5))
    blocks = [x.requires_grad_() for x in (q, k, v, k2, v2, torch.randn(2, 2, 3, 16, device=DEVICE))]
    check_operators(
        two_blocks_operator,
        (*blocks, causal),
        lambda *x: [two_blocks.two_blocks_attention(x[:6], causal, None)],
        two_blocks_operator_backward,
        lambda found: (torch.randn_like(found[0]), *found, *blocks, causal),
    )


@pytest.mark.parametrize("padded", [False, True])
def test_a_running_softmax_is_an_operator(padded):
    from regard.ops.linear.running_softmax_compiled import running_softmax_operator, running_softmax_operator_backward

    q, k, z, top = by_token(4, 37, 6), by_token(2, 37, 6), torch.rand(2, 2, 6, device=DEVICE), torch.randn(2, 2, 6, device=DEVICE)
    valid = torch.rand(2, 37, device=DEVICE) < 0.7 if padded else None
    inputs = q, k, z.requires_grad_(), top, valid
    check_operators(
        running_softmax_operator,
        inputs,
        running_softmax,
        running_softmax_operator_backward,
        lambda found: (torch.randn_like(found[0]), None, torch.randn_like(found[3]), *inputs, *found[:3]),
    )


def take_kernels(monkeypatch):
    """Take kernels on every device: those of nystrom and sinkhorn ask for a card, not for a backend."""
    monkeypatch.setattr(landmarks, "takes_landmarks", lambda *_: True)
    monkeypatch.setattr(landmarks, "takes_many_keys", lambda *_: True)
    monkeypatch.setattr(spd_solve, "takes_systems", lambda *_: True)
    monkeypatch.setattr(sinkhorn, "balances_in_one_launch", lambda *_: True)
    monkeypatch.setattr(sinkhorn, "takes_two_blocks", lambda *_: True)


def passes(run, made, x, valid):
    """Output and gradients, by the tokens and by every weight."""
    x = x.detach().requires_grad_()
    y = run(x) if valid is None else run(x, valid=valid)
    return [y, *torch.autograd.grad(y.float().sin().sum(), [x, *made.parameters()])]


SORT = {"balance_matrices", "two_blocks_attention"}


@pytest.mark.parametrize(
    ("spec", "causal", "padded", "names", "plain"),
    [
        ("nystrom(landmarks=9)", False, False, {"landmark_attention"}, "solve_ex"),
        ("nystrom(landmarks=9)", False, True, {"many_keys_answers", "spd_solve"}, "solve_ex"),
        ("sinkhorn(block=8, iterations=3)", False, False, SORT, "log_softmax"),
        ("sinkhorn(block=8, iterations=3)", True, True, SORT, "softmax"),
        ("efficient", True, True, {"running_softmax", "linear_attention"}, "cummax"),
    ],
)
def test_a_compiled_layer_takes_the_kernels_at_every_length(spec, causal, padded, names, plain, monkeypatch):
    """Its graph has the operators in the place of plain operations, and results are those of eager kernels."""
    torch._dynamo.reset()
    counters.clear()
    take_kernels(monkeypatch)
    nystrom = spec.startswith("nystrom")
    made = layer(spec, width=12, heads=2, causal=causal, backend="triton" if spec == "efficient" else "auto")
    made = made.eval().to(DEVICE, torch.float16 if nystrom else torch.float32)
    targets = []

    def recorded(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(made, fullgraph=True, backend=recorded, dynamic=True)
    for n in LENGTHS:
        x = torch.randn(2, n, 12, device=DEVICE).to(made.q.weight.dtype)
        valid = torch.arange(n, device=DEVICE) < torch.tensor([[n], [n - 20]], device=DEVICE) if padded else None
        for a, b in zip(passes(compiled, made, x, valid), passes(made, made, x, valid), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 + 1e-4 * float(b.detach().abs().max()))
    assert counters["stats"]["unique_graphs"] == 1
    assert {one.split(".")[1] for one in targets if one.startswith("regard.")} == names
    assert not any(plain in one for one in targets)
    torch._dynamo.reset()


def test_a_compiler_gets_the_kernels_of_a_card_at_every_length(monkeypatch):
    """By the kind of tensors alone: no length is asked for, which would be one more graph."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode():
        for n in (100, 4096):
            q, k, v = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
            few, system = (torch.empty(1, 2, 64, 64, dtype=kind, device="cuda") for kind in (torch.float32, torch.float64))
            blocks = (*(x.unflatten(2, (-1, 4)) for x in (q, k, v, k, v)), few)
            assert takes_landmarks(q, k, v, 64)
            assert many_keys.takes_many_keys(few, k, v)
            assert spd_solve.takes_systems(system)
            assert balance.balances_in_one_launch(few)
            assert two_blocks.takes_two_blocks(blocks)
            assert running_kernels_fit(q, k)
