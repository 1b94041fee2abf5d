"""Limits: at these settings a mechanism is another one exactly. And outside oracles: PyTorch's own attention, dense formulas."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import DEVICE, close, some
from regard import Dims, Edges, Places, attend, core, layer
from regard.ops import dense
from regard.ops.pair import torch as pair_torch
from regard.patterns import Causal, Pattern

D = Dims(32, 4)


def qkv(n=90, m=None, streams=1, b=2):
    g = torch.Generator().manual_seed(3)
    m = n if m is None else m
    shapes = ((n, 8 * streams), (m, 8 * streams), (m, 8 * streams))
    return [torch.randn(b, 4, x, y, dtype=torch.float64, generator=g).to(DEVICE).requires_grad_() for x, y in shapes]


def check_same(f, g, inputs):
    """Outputs and gradients agree to rounding."""
    a, b = f(*inputs), g(*inputs)
    close(a, b)
    up = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for x, y in zip(*(torch.autograd.grad((z * up).sum(), inputs, materialize_grads=True) for z in (a, b)), strict=True):
        close(x, y)


def ask(spec, causal=False, **options):
    made = core(spec, Dims(32, 4, causal=causal)).to(DEVICE, torch.float64)
    return lambda *x: attend(*x, made, causal=causal, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_softmax_is_torch_attention(causal, scale):
    spec = "softmax" if scale is None else f"softmax(scale={scale})"
    check_same(ask(spec, causal), lambda *x: scaled_dot_product_attention(*x, is_causal=causal, scale=scale), qkv())


def test_padded_softmax_is_masked_torch_attention():
    valid = some(2, 90)
    check_same(ask("softmax", valid=valid), lambda *x: scaled_dot_product_attention(*x, attn_mask=valid[:, None, None]), qkv())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec", ["Local(90)", "Stride(1)", "Blocks(100)", "Everything()", "Blocks(10, around=9)", "Truncated(89, 89)"]
)
def test_patterns_that_hold_every_pair_are_softmax(spec, causal):
    spec = spec.replace("89, 89", "89, 0") if causal else spec
    check_same(ask(spec, causal), ask("softmax", causal), qkv())


@pytest.mark.parametrize("causal", [False, True])
def test_bigbird_that_picks_all_blocks_is_softmax(causal):
    check_same(ask("bigbird(block=16, random=6)", causal), ask("softmax", causal), qkv())
    check_same(ask("bigbird(block=16, window=11, random=0, globals=0)", causal), ask("softmax", causal), qkv())


@pytest.mark.parametrize("n", [96, 90])
def test_bigbird_with_both_ends_is_the_published_mask(n):
    """Own and neighbouring blocks, the first block, the last tokens: as masked attention, of each row's own length."""
    q, k, v = qkv(n)
    valid = torch.arange(n, device=DEVICE) < torch.tensor([[n], [n - 23]], device=DEVICE)
    at = torch.arange(n, device=DEVICE)
    near = (at[:, None] // 16 - at // 16).abs() <= 1
    ends = torch.stack([(at < 16) | ((at >= length - 16) & (at < length)) for length in (n, n - 23)])
    seen = (near | ends[:, :, None] | ends[:, None]) & valid[:, None]
    out = attend(q, k, v, core("bigbird(block=16, random=0, special='ends')", D), valid=valid, query_valid=valid)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
    close(out.masked_fill(~valid[:, None, :, None], 0), expected.masked_fill(~valid[:, None, :, None], 0))


def test_a_change_reaches_every_token_through_the_ends_of_bigbird():
    torch.manual_seed(0)
    layers = [layer("bigbird(block=4, random=0, special='ends')", width=16, heads=2).double() for _ in range(2)]

    def run(x):
        for mix in layers:
            x = x + mix(x)
        return x

    x = torch.randn(1, 80, 16, dtype=torch.float64)
    y = x.clone()
    y[0, 40] += 1
    assert ((run(x) - run(y)).abs().amax(-1) > 0).all()


def test_the_window_of_longformer_as_hugging_face_counts_it():
    """transformers' config says attention_window=8: four tokens on either side, and the token itself."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers, to compare with its Longformer")
    config = transformers.LongformerConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    theirs = transformers.models.longformer.modeling_longformer.LongformerSelfAttention(config, 0).double().eval()
    ours = layer("longformer(attention_window=8, first=0, shared=True)", width=32, heads=4).double()
    for mine, other in (("q", "query"), ("k", "key"), ("v", "value")):
        getattr(ours, mine).load_state_dict(getattr(theirs, other).state_dict())
    with torch.no_grad():
        ours.out.weight.copy_(torch.eye(32))
        ours.out.bias.zero_()
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    nothing = torch.zeros(2, 40, dtype=torch.bool)
    found = theirs(x, torch.zeros(2, 40).double(), is_index_masked=nothing, is_index_global_attn=nothing, is_global_attn=False)
    close(ours(x), found[0], 1e-6)  # their softmax is in float32


@pytest.mark.parametrize("causal", [False, True])
def test_longformer_with_shared_projections_is_a_pattern(causal):
    pattern = "PerHead([Local(8), Local(8), Dilated(8, 3), Dilated(8, 3)]) | Global(first=2, at=[40])"
    spec = "longformer(window=8, dilation=3, dilated_heads=2, first=2, at=[40], shared=True)"
    check_same(ask(spec, causal), ask(pattern, causal), qkv())


def test_longformer_projects_its_special_tokens_apart():
    q, k, v = qkv(streams=2)
    made = core("longformer(window=8, first=2)", D).to(DEVICE, torch.float64)
    out = attend(q, k, v, made)
    near, far = (x.chunk(2, -1) for x in (k, v)), None
    (k1, k2), (v1, v2) = near
    q1, q2 = q.chunk(2, -1)
    far = scaled_dot_product_attention(q2, k2, v2)
    close(out[:, :, :2], far[:, :, :2])
    ordinary = ask("Local(8) | Columns(first=2)")(q1, k1, v1)
    close(out[:, :, 2:], ordinary[:, :, 2:])


@pytest.mark.parametrize("form", ["strided", "fixed"])
def test_sparse_transformer_is_its_two_patterns(form):
    near, far = {"strided": ("Local(8)", "Stride(8)"), "fixed": ("Blocks(8)", "Tail(8, 3)")}[form]
    spec = f"sparse_transformer(stride=8, form={form!r}, summary=3)"
    check_same(ask(spec, True), ask(f"PerHead([{near}, {far}])", True), qkv())


@pytest.mark.parametrize(
    "text", ["Local(9) | Global(first=2)", "Dilated(4, 3) | Stride(16)", "Random(2, 8) | Blocks(8)", "Tail(8, 2) | Local(3)"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_sparse_is_masked_torch_attention(text, causal):
    pattern = Pattern.parse(text).bound(90, 90)
    pattern = pattern & Causal() if causal else pattern
    seen = pattern(0, torch.arange(90)[:, None], torch.arange(90)).to(DEVICE)
    assert seen.any(1).all()
    check_same(ask(text, causal), lambda *x: scaled_dot_product_attention(*x, attn_mask=seen), qkv())


@pytest.mark.parametrize("causal", [False, True])
def test_additive_is_its_formula(causal, set_limits):
    set_limits(softmax_strip=1 << 14)  # many strips
    made = core("additive(hidden=5)", D).to(DEVICE, torch.float64)

    def formula(q, k, v):
        made_of = torch.tanh((q @ made.wq)[:, :, :, None] + (k @ made.wk)[:, :, None])
        s = (made_of * made.w[:, None, None]).sum(-1)
        future = torch.ones(90, 90, dtype=torch.bool, device=DEVICE).triu(1)
        return s.masked_fill(future & causal, -torch.inf).softmax(-1) @ v

    check_same(lambda *x: attend(*x, made, causal=causal), formula, qkv())


@pytest.mark.parametrize("norm", ["count", "sum"])
@pytest.mark.parametrize("causal", [False, True])
def test_relu_is_its_formula(norm, causal, set_limits):
    set_limits(softmax_strip=1 << 14)

    def formula(q, k, v):
        a = (q @ k.mT * 8**-0.5).relu()
        a = a.tril() if causal else a
        seen = (
            torch.arange(1, 91, device=DEVICE, dtype=a.dtype)[:, None]
            if causal
            else torch.tensor(90.0, dtype=a.dtype, device=DEVICE)
        )
        total = seen if norm == "count" else a.sum(-1, keepdim=True)
        return torch.where(total > 0, a / total.clamp_min(1e-300), 0) @ v

    check_same(ask(f"relu(norm={norm!r})", causal), formula, qkv())
    q, k, v = qkv()
    out = ask("relu(norm='sum')")(q.abs(), -k.abs(), v)  # no positive score anywhere
    assert (out == 0).all()


def test_identity_is_identity():
    check_same(ask("identity", True), lambda _q, _k, v: v, qkv())


def test_shared_queries_and_keys():
    made = layer("softmax", width=32, heads=4, shared_qk=True)
    assert made.k is made.q and sum(p.numel() for p in made.parameters()) == 3 * (32 * 32 + 32)
    x = torch.randn(2, 5, 32)
    q, k, _ = made.heads(x, Places.of(x))
    assert torch.equal(q, k)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything makes."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        view = any(x in str(func) for x in ("expand", "view", "slice", "as_strided", "select.int", "unsqueeze"))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and not view)])
        return out


def largest(spec, n, causal):
    made = core(spec, Dims(16, 2, causal=causal))
    q, k, v = (torch.randn(1, 2, n, 8 * made.streams, requires_grad=True) for _ in range(3))
    with Largest() as watch:
        attend(q, k, v, made, causal=causal).sum().backward()
    return watch.most


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        *("Local(32)", "Local(32) | Global(first=2)", "Dilated(16, 8)", "Stride(64)", "Stride(64) | Local(8)", "Everything()"),
        *("bigbird(block=16)", "longformer(window=32)", "sparse_transformer(stride=64)", "relu", "additive(hidden=4)"),
        *("linear", "efficient", "rfa(features=32)", "performer(features=32)"),
    ],
)
def test_nothing_quadratic_is_ever_held(spec, causal, set_limits):
    """Neither in the forward nor in the backward pass, not even a mask."""
    set_limits(softmax_strip=1 << 16, tile_scores=1 << 16)
    n = {"relu": 1024, "additive(hidden=4)": 1024}.get(spec, 4096)  # these make tensors of every pair, a strip at a time
    most = largest(spec, n, causal)
    assert most <= 2.2 * largest(spec, n // 2, causal), spec
    assert most < n**2 / 8


def test_edges_cost_what_the_edges_cost():
    nodes = 4096
    chain = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
    made = core(Edges(chain, nodes=nodes, loops=True), Dims(16, 2))
    q, k, v = (torch.randn(1, 2, nodes, 8, requires_grad=True) for _ in range(3))
    with Largest() as watch:
        out = attend(q, k, v, made)
        out.sum().backward()
    assert watch.most <= 4 * nodes * 2 * 8
    assert out.isfinite().all()


def test_no_transform_makes_all_pairs_of_a_long_sequence():
    """Where the fused kernel cannot go, scores of all pairs are one tensor: refused beyond 8,192 tokens, in one sentence."""
    m = core("softmax", Dims(8, 1))
    q, k, v = (torch.randn(1, 1, 8193, 8, device=DEVICE) for _ in range(3))
    with pytest.raises(ValueError, match=r"8,193 queries and 8,193 keys would be one tensor, and more than 8,192 tokens"):
        torch.func.jvp(lambda x: attend(x, k, v, m), (q,), (q,))
    found = torch.func.jvp(lambda x: attend(x, k[:, :, :9], v[:, :, :9], m), (q,), (q,))[0]  # few keys are no limit
    assert found.shape == q.shape


def test_groups_of_heads_that_no_kernel_takes_are_repeated():
    """On a GPU float32 and masks have a kernel without groups; half precision without a mask has one with them."""
    with FakeTensorMode():
        for device, dtype, masked, repeated in (
            ("cuda", torch.float32, False, True),
            ("cuda", torch.bfloat16, True, True),
            ("cuda", torch.bfloat16, False, False),
            ("cpu", torch.float32, True, False),
        ):
            q, k = (torch.empty(1, h, 16, 8, device=device, dtype=dtype) for h in (4, 2))
            mask = torch.empty(1, 1, 1, 16, device=device, dtype=dtype) if masked else None
            assert dense.repeats_heads(q, k, mask) is repeated
            assert not dense.repeats_heads(q, q, mask)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_with_a_mask_are_repeated_heads(causal, monkeypatch):
    monkeypatch.setattr(dense, "repeats_heads", lambda q, k, _: q.shape[1] != k.shape[1])
    made = core("softmax", Dims(32, 4, kv_heads=2, causal=causal)).to(DEVICE, torch.float64)
    q, k, v = (torch.randn(2, h, 9, 8, dtype=torch.float64, device=DEVICE, requires_grad=True) for h in (4, 2, 2))
    valid = some(2, 9)
    found = attend(q, k, v, made, causal=causal, valid=valid, query_valid=None if causal else valid)
    monkeypatch.undo()
    close(found, attend(q, k, v, made, causal=causal, valid=valid, query_valid=None if causal else valid))


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_makes_no_scores_of_all_pairs_of_a_long_sequence(causal, monkeypatch):
    """PyTorch's kernels for CPUs have no dropout: beyond the limit the scores are computed a tile at a time."""
    monkeypatch.setattr(dense, "DENSE_LIMIT", 256)
    n, made = 300, core("softmax", Dims(8, 1, causal=causal, dropout=0.5)).to(DEVICE).train()
    q, k, v = (torch.randn(1, 1, n, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    asked = []
    plain = dense.scaled_dot_product_attention
    monkeypatch.setattr(dense, "scaled_dot_product_attention", lambda *x, **y: asked.append(x) or plain(*x, **y))
    many = torch.stack([attend(q, k, v, made, causal=causal).detach() for _ in range(200)])
    assert DEVICE.type == "cuda" or not asked
    exact = attend(q, k, v, made.eval(), causal=causal).detach()
    assert float((many.mean(0) - exact).norm() / exact.norm()) < 0.2  # weights are kept in the mean
    assert not torch.equal(many[0], many[1])
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match=r"dropout on a CPU has no fused kernel: the scores of 300 queries and 300 keys"):
            dense.sdpa(q, k, v, scale=1.0, dropout=0.5)


@pytest.mark.parametrize("spec", ["Local(4)", "relu", "reformer"])
def test_definitions_take_no_long_sequence(spec):
    """The backend "reference" makes all scores at once."""
    made = core(spec, Dims(8, 1, backend="reference"))
    q, k, v = (torch.randn(1, 1, 8193, 8) for _ in range(3))
    with pytest.raises(ValueError, match=r"backend 'reference' cannot compute this .* 8,193 keys at once, and takes up to 8,192"):
        attend(q, k, v, made)


@pytest.mark.parametrize("spec", ["relu", "additive(hidden=2)"])
def test_a_strip_of_queries_scores_no_key_behind_its_last(spec, set_limits, monkeypatch):
    """Half of the pairs of a causal pass lie in the future: strips end with their last query."""
    n, scored = 512, []
    set_limits(softmax_strip=16 * n * (2 if "additive" in spec else 1))
    made = core(spec, Dims(8, 1, causal=True, backend="torch")).to(DEVICE)
    plain = pair_torch._weights
    monkeypatch.setattr(pair_torch, "_weights", lambda s, *rest: scored.append(s.shape[2] * s.shape[3]) or plain(s, *rest))
    q, k, v = (torch.randn(1, 1, n, 8, device=DEVICE) for _ in range(3))
    attend(q, k, v, made, causal=True)
    assert len(scored) == 32 and sum(scored) <= 0.55 * n * n
