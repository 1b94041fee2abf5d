"""Function transforms, forward-mode AD, second derivatives and export: each equals what plain autograd says, for every row."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.func import functional_call, grad, jvp, vmap

from conftest import CASES, DEVICE, PATHS, Case, claiming, close, data, each_path, modes, some
from regard import layer
from regard.mixers.base import Can
from regard.ops.tile.tile_op import HeadPatterns, tile_attention
from regard.patterns import Local, Pattern
from regard.patterns.tiles import Span

# Rows whose pattern or transform is another one for every number of real tokens: vmap over padding cannot read that number.
COUNTS_TOKENS = {"bigbird", "fnet"}  # bigbird where it draws blocks from all tokens: not causal, random > 0
N = 34


def _loss(m, weights, x, valid=None):
    y = functional_call(m, weights, (x,), {} if valid is None else {"valid": valid})
    return (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype, device=y.device)).sin().sum()


def _built(case: Case, **mode):
    m = case.build(**mode)
    return m, dict(m.named_parameters())


def _zeros_for_none(found, like):
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, like, strict=True)]


def _per_row(m, weights, x, valid):
    """The gradients of all weights for each row alone, by plain autograd."""
    rows = []
    for r in range(len(x)):
        one = _loss(m, weights, x[r : r + 1], None if valid is None else valid[r : r + 1])
        rows.append(_zeros_for_none(torch.autograd.grad(one, [*weights.values()], allow_unused=True), weights.values()))
    return [torch.stack(found) for found in zip(*rows, strict=True)]


def _by_vmap(m, weights, x, valid):
    def one(weights, x, valid):
        return _loss(m, weights, x[None], None if valid is None else valid[None])

    fixed = {name: w.detach() for name, w in weights.items()}
    return [*vmap(grad(one), in_dims=(None, 0, None if valid is None else 0))(fixed, x, valid).values()]


@each_path
def test_func_grad_is_autograd(case):
    for mode in modes(case):
        (m, weights), x = _built(case, **mode), data(N)
        asked = [*weights.values(), x.requires_grad_()]
        want = _zeros_for_none(torch.autograd.grad(_loss(m, weights, x), asked, allow_unused=True), asked)
        by_weight, by_token = grad(partial(_loss, m), argnums=(0, 1))(weights, x)
        for a, b in zip([*by_weight.values(), by_token], want, strict=True):
            close(a, b)


@each_path
def test_per_sample_gradients_are_those_of_a_loop(case):
    for mode in modes(case):
        (m, weights), x = _built(case, **mode), data(N, b=2)
        if weights:
            want = _per_row(m, weights, x, None)
            for a, b in zip(_by_vmap(m, weights, x, None), want, strict=True):
                close(a, b)


@claiming(Can.PADDING, cases=PATHS)
def test_per_sample_gradients_with_padding(case):
    for mode in modes(case):
        (m, weights), x, valid = _built(case, **mode), data(N, b=2), some(2, N)
        draws = case.example.options.get("random", 1) != 0 and not mode["causal"]
        if case.row.name in COUNTS_TOKENS and draws:
            with pytest.raises(NotImplementedError, match="depends on the number of real tokens of every row, which vmap"):
                vmap(lambda x, v, m=m: m(x[None], valid=v[None]))(x, valid)
        elif weights:
            want = _per_row(m, weights, x, valid)
            for a, b in zip(_by_vmap(m, weights, x, valid), want, strict=True):
                close(a, b)


def lengths(case: Case):
    """Few tokens for the first example of a row, and more for all: fewer than a block, a chunk, a window, and more."""
    return (9, N) if case.example is case.row.examples[0] else (N,)


@each_path
def test_forward_mode_is_two_backward_modes(case):
    """t -> J t is the gradient of u -> <J^T u, t>: both by different code, and finite differences for the first row."""
    for mode, n in product(modes(case), lengths(case)):
        m, x, t = case.build(**mode), data(n), data(n, seed=7)
        y, got = jvp(m, (x,), (t,))
        close(y, m(x))
        u = torch.zeros_like(y, requires_grad=True)
        x.requires_grad_()
        with torch.backends.cudnn.flags(enabled=False):  # whose recurrent networks have no second derivative
            (pulled,) = torch.autograd.grad(m(x), x, u, create_graph=True)
        (want,) = torch.autograd.grad(pulled, u, t)
        close(got, want)
        assert got.abs().max() > 1e-3


@each_path
def test_second_derivatives_are_differences_of_first_ones(case):
    step = 1e-6
    for mode, n in product(modes(case), lengths(case)):
        m, t = case.build(**mode), data(n, seed=8)

        def first(x, m=m, **how):
            return torch.autograd.grad(_loss(m, {}, x), x, **how)[0]

        x = data(n).requires_grad_()
        with torch.backends.cudnn.flags(enabled=False):  # whose recurrent networks have no second derivative
            slope = first(x, create_graph=True)
        close(slope, first(x))
        (got,) = torch.autograd.grad(slope, x, t) if slope.requires_grad else (torch.zeros_like(x),)
        up, down = (first((data(n) + s * t).requires_grad_()) for s in (step, -step))
        torch.testing.assert_close(got, (up - down) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["gat(pattern=Local(4))", "Local(8)", "softmax", "linear", "rnn", "reformer(chunk=4)"])
def test_forward_ad_without_func(text):
    m = layer(text, width=16, heads=2, causal=True).to(DEVICE, torch.float64)
    x, t = data(40, width=16), data(40, seed=3, width=16)
    with fwAD.dual_level():
        got = fwAD.unpack_dual(m(fwAD.make_dual(x, t))).tangent
    want = (m(x + 1e-6 * t) - m(x - 1e-6 * t)) / 2e-6
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("text", ["Local(6) | Global(first=1)", "gat(pattern=Local(4))"])
def test_a_second_backward_pass_drops_the_same_weights(text):
    m = layer(text, width=16, heads=2, causal=True, dropout=0.4).to(DEVICE, torch.float64).train()
    x = data(40, width=16).requires_grad_()

    def first(**how):
        torch.manual_seed(5)
        return torch.autograd.grad(m(x).sin().sum(), x, **how)[0]

    close(first(create_graph=True), first())


@pytest.mark.parametrize("text", ["Local(8)", "Local(8) | Global(first=2)", "Blocks(16)", "Dilated(4, 3)"])
def test_plain_forms_make_no_square(text):
    """The largest tensor of a transformed pass follows the pairs, not n x n."""
    reach, n = HeadPatterns.of(Pattern.parse(text), 1), 2048
    q = torch.randn(1, 1, n, 4, device=DEVICE)

    def f(q):
        return tile_attention(q, q, q, reach, Span(0, n, 0, n), scale=0.5, causal=True)[0]

    largest = _Largest()
    with largest:
        jvp(f, (q,), (q,))
    assert largest.numbers < n * n / 8


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_plans_made_inside_a_transform_serve_outside():
    pattern = Local(5) | Pattern.parse("Columns(3)")
    x = data(61, width=16).requires_grad_()
    for text in (str(pattern), f"gat(pattern={pattern})"):
        m = layer(text, width=16, heads=2).to(DEVICE, torch.float64)
        inside = grad(lambda x, m=m: m(x).square().sum())(x)
        (want,) = torch.autograd.grad(m(x).square().sum(), x)
        close(inside, want)


def test_second_derivatives_where_keys_are_the_queries():
    """One tensor in two places counts as two variables in the backward pass, and as one outside."""
    reach, q = HeadPatterns.of(Local(4), 2), torch.randn(1, 2, 40, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def f(q):
        return tile_attention(q, q, q, reach, Span(0, 40, 0, 40), scale=0.5)[0].sum(2)

    close(*(torch.autograd.grad(f(q).sin().sum(), q, create_graph=graph)[0] for graph in (True, False)))
    assert torch.autograd.gradgradcheck(f, (q,), fast_mode=True)


def test_the_rows_that_refuse_are_in_the_catalogue():
    assert {case.row.name for case in CASES} >= COUNTS_TOKENS


@each_path
def test_functional_call_leaves_the_layer_as_it_was(case):
    for mode in modes(case):
        (m, weights), x = _built(case, **mode), data(9)
        want = m(x)
        functional_call(m, {name: 2 * w.detach() for name, w in weights.items()}, (x,))
        assert all(w is weights[name] for name, w in m.named_parameters())
        close(m(x), want)


def test_weights_saved_under_two_names_load():
    m = layer("reformer(chunk=4)", width=16, heads=2).to(DEVICE)
    weights = m.state_dict()
    assert "k.weight" not in weights
    m.load_state_dict({**weights, "k.weight": weights["q.weight"], "k.bias": weights["q.bias"]})


def _exported(m, x, length=None):
    with torch.no_grad():
        return torch.export.export(m, (x,), dynamic_shapes={"x": {0: torch.export.Dim("b", max=64), 1: length}})


@pytest.mark.parametrize(
    "text", ["softmax", "additive", "cosformer", "linear", "gat(pattern=Local(4))", "PerHead([Local(4), Dilated(4, 3)])"]
)
def test_exported_programs_are_for_any_batch(text):
    """And hold nothing but PyTorch's own operators, so that other exporters can go on from there."""
    m = layer(text, width=16, heads=2, causal=True, max_len=64).to(DEVICE, torch.float64).eval()
    program = _exported(m, data(40, width=16))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called and not [name for name in called if "regard" in name]
    for b in (1, 5):
        x = data(40, b=b, width=16)
        close(program.module()(x), m(x))


@pytest.mark.parametrize("text", ["softmax", "Local(4) | Global(first=1)"])
def test_exported_programs_are_for_any_length(text):
    m = layer(text, width=16, heads=2, causal=True).to(DEVICE, torch.float64).eval()
    program = _exported(m, data(40, width=16), torch.export.Dim("n", min=2, max=99)).module()
    for b, n in ((1, 9), (4, 57)):
        x = data(n, b=b, width=16)
        close(program(x), m(x))


def test_a_drawn_pattern_is_exported_with_its_length():
    m = layer("bigbird(block=4, globals=1, random=1)", width=16, heads=2).to(DEVICE, torch.float64).eval()
    x = data(40, width=16)
    close(_exported(m, x).module()(x[:2]), m(x[:2]))
    with pytest.raises(NotImplementedError, match="drawn for one length: export it with a fixed one"):
        _exported(m, x, torch.export.Dim("n", min=2, max=99))


@pytest.mark.parametrize("text", ["linear", "gla", "delta"])
def test_a_kernel_in_chunks_refuses_to_be_exported_for_any_length(text):
    m, x = layer(text, width=16, heads=2, causal=True).eval(), torch.randn(3, 40, 16)
    batch, length = torch.export.Dim("b", min=2, max=64), torch.export.Dim("n", min=2, max=500)
    with pytest.raises(NotImplementedError, match="exported for one length: leave the length out of dynamic_shapes"):
        torch.export.export(m, (x,), dynamic_shapes={"x": {0: batch, 1: length}}, strict=False)
