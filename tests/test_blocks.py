"""What stands around a mixer: formulas by hand, streams equal to forward, padding as if absent."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import DEVICE, HEADS, PATHS, WIDTH, claiming, close, data, some
from regard.blocks import Block, FeedForward, ReversibleStack, Stack
from regard.mixers.base import Can, Dims, Free, pool_tokens, pooled_valid, select
from regard.spec import layer

CONTEXT = 24


def stack(specs="softmax", kind=Stack, **options):
    torch.manual_seed(0)
    options = {"width": WIDTH, "heads": HEADS, "ffn": 48, "max_len": 128, **options}
    made = kind.of(specs, **options).to(DEVICE, torch.float64).eval()
    for name, p in made.named_parameters():  # a norm that does nothing yet would hide where it stands
        if "norm" in name:
            nn.init.normal_(p, 1.0, 0.3)
    return made


class Halves(Free):
    """Two tokens become their mean."""

    can = Can.PADDING
    rate = 2

    def forward(self, x, *, context=None, valid=None):
        self.no_context(context)
        return 3 * pool_tokens(x, valid, 2)[0]


# feed-forward


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_feedforward_is_its_formula(activation):
    x, act = data(7), getattr(F, activation)
    plain = FeedForward(WIDTH, 20, activation=activation).to(DEVICE, torch.float64)
    close(plain(x), plain.down(act(plain.up(x))))
    gated = FeedForward(WIDTH, 20, activation=activation, gated=True, bias=False).to(DEVICE, torch.float64)
    one, two = gated.up.weight.split(20)
    close(gated(x), (act(x @ one.T) * (x @ two.T)) @ gated.down.weight.T)
    assert sum(p.numel() for p in gated.parameters()) == 3 * 20 * WIDTH
    dropped = FeedForward(WIDTH, 20, dropout=0.5).to(DEVICE, torch.float64)
    assert not torch.equal(dropped(x), dropped(x)) and torch.equal(dropped.eval()(x), dropped(x))


# blocks


@pytest.mark.parametrize("norm_class", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_is_its_formula(norm, norm_class):
    made = stack(norm=norm, norm_class=norm_class, cross="linear", context_width=CONTEXT)
    (block,), x, c = made.blocks, data(9), data(5, seed=2, width=CONTEXT)
    y = x
    parts = (
        (block.mixer_norm, block.mixer),
        (block.cross_norm, lambda z: block.cross(z, context=c)),
        (block.channel_norm, block.channel),
    )
    for normed, part in parts:
        assert isinstance(normed, norm_class)
        y = y + part(normed(y)) if norm == "pre" else normed(y + part(y))
    close(block(x, context=c), y)
    assert (made.final_norm is None) == (norm == "post")
    close(made(x, context=c), y if norm == "post" else made.final_norm(y))


def test_dropout_falls_on_what_is_added():
    block = stack(dropout=0.5).train().blocks[0]
    block.channel = nn.Identity()
    kept = torch.stack([block(data(9))[0] for _ in range(300)])
    block.eval()
    error = (kept.mean(0) - block(data(9))[0]).abs() / (kept.std(0) / 300**0.5)
    assert kept.std(0).min() > 1e-3 and error.square().mean().sqrt() < 3


@claiming(Can.STREAM, cases=PATHS, causal=True)
def test_a_stack_streams_as_it_is(case):
    for norm in ("pre", "post") if case.example is case.row.examples[0] else ("pre",):
        made, x = stack(case.spec, depth=2, causal=True, norm=norm), data(40)
        with torch.no_grad():
            state, out = made.start(3), []
            for part in x.split([17, 1, 0, 1, 21], 1):
                y, state = made.extend(state, part)
                out.append(y)
        close(torch.cat(out, 1), made(x))
        assert state.t.tolist() == [40] * 3 and state.start == 40


@claiming(Can.STREAM | Can.PADDING, cases=PATHS, causal=True)
def test_padding_in_a_stack_is_as_if_absent(case):
    made, x, valid = stack([case.spec, "softmax"], causal=True), data(30), some(3, 30)
    z = torch.where(valid[..., None], x, 1e3).requires_grad_()
    y = made(z, valid)
    y.square().sum().backward()
    assert (y[~valid] == 0).all() and (z.grad[~valid] == 0).all()
    with torch.no_grad():
        first, state = made.extend(made.start(3), z[:, :19], valid[:, :19])
        second, state = made.extend(state, z[:, 19:], valid[:, 19:])
    close(torch.cat([first, second], 1), y)
    assert state.t.tolist() == valid.sum(1).tolist()
    for row in range(3):
        close(y[row][valid[row]], made(x[row][valid[row]][None])[0])


def test_states_of_a_stack_are_values_and_beams_are_rows_of_them():
    made, x, pick = stack(["softmax", "linear", "Local(4)"], causal=True), data(24), torch.tensor([2, 0, 0, 1], device=DEVICE)
    with torch.no_grad():
        _, state = made.extend(made.start(3), x[:, :10])
        one, later = made.extend(state, x[:, 10:12])
        two, _ = made.extend(state, x[:, 12:14])
        close(one, made(x[:, :12])[:, 10:])
        close(two, made(torch.cat([x[:, :10], x[:, 12:14]], 1))[:, 10:])
        for beams in (later.select(pick), select(later, pick)):
            close(made.extend(beams, x[pick, 12:])[0], made(x[pick])[:, 12:])
    assert later.nbytes >= sum(own.nbytes for block in later.memory for own in block.memory[:1])


@claiming(Can.CROSS | Can.PADDING, cases=PATHS, cross=True)
def test_padding_is_as_if_absent_where_a_context_is_read(case):
    if case.build().rate > 1:
        with pytest.raises(ValueError, match="with an answer for every token"):
            stack(cross=case.spec)
        return
    made = stack("softmax", causal=True, cross=case.spec, context_width=CONTEXT, context_len=64)
    x, c, valid, real = data(20), data(17, 5, width=CONTEXT), some(3, 20), some(3, 17, seed=6)
    z = torch.where(valid[..., None], x, 1e3)
    y = made(z, valid, context=c, context_valid=real)
    for row in range(3):
        close(y[row][valid[row]], made(x[row][valid[row]][None], context=c[row][real[row]][None])[0])
    if Can.STREAM in made.blocks[0].cross.can:
        first, state = made.extend(made.start(context=c, context_valid=real), z[:, :9], valid[:, :9])
        close(torch.cat([first, made.extend(state, z[:, 9:], valid[:, 9:])[0]], 1), y)


def test_a_decoder_reads_a_context_and_streams():
    made, x, c = (
        stack(["linear", "softmax"], causal=True, cross="softmax", context_width=CONTEXT),
        data(20),
        data(9, 5, width=CONTEXT),
    )
    valid, real = some(3, 20), some(3, 9, seed=6)
    y = made(x, valid, context=c, context_valid=real)
    for row in range(3):
        alone = made(x[row][valid[row]][None], context=c[row][real[row]][None])[0]
        close(y[row][valid[row]], alone)
    with torch.no_grad():
        state, out = made.start(context=c, context_valid=real), []
        assert made.start(3, context=c).t.tolist() == [0, 0, 0]
        for part, which in zip(x.split([11, 1, 8], 1), valid.split([11, 1, 8], 1), strict=True):
            o, state = made.extend(state, part, which)
            out.append(o)
        pick = torch.tensor([1, 1, 0], device=DEVICE)
        beams, _ = made.extend(state.select(pick), x[:, :2])
        again = made(
            torch.cat([x[pick], x[:, :2]], 1),
            torch.cat([valid[pick], torch.ones_like(valid[:, :2])], 1),
            context=c[pick],
            context_valid=real[pick],
        )
    close(torch.cat(out, 1), y)
    close(beams, again[:, 20:])


def test_some_blocks_may_read_and_others_not():
    read = layer("softmax", width=WIDTH, heads=HEADS, cross=True)
    blocks = [
        Block(layer("softmax", width=WIDTH, heads=HEADS, causal=True), FeedForward(WIDTH, 8), cross=c) for c in (None, read)
    ]
    made, x = Stack(blocks).to(DEVICE, torch.float64), data(6)
    with torch.no_grad():
        close(made.extend(made.start(context=data(4)), x)[0], made(x, context=data(4)))


def test_shorter_answers_go_on_with_fewer_tokens():
    def two():
        dims = Dims(WIDTH, HEADS)
        torch.manual_seed(0)
        blocks = [
            Block(Halves(dims), FeedForward(WIDTH, 8)),
            Block(layer("softmax", width=WIDTH, heads=HEADS), FeedForward(WIDTH, 8)),
        ]
        return Stack([*blocks, Block(Halves(dims), FeedForward(WIDTH, 8))], nn.LayerNorm(WIDTH)).to(DEVICE, torch.float64)

    made, x, valid = two(), data(13), some(3, 13)
    valid[1] = False
    y, real = made(x, valid), made.valid(valid)
    assert made.rate == 4 and y.shape == (3, 4, WIDTH) and made(x).shape == (3, 4, WIDTH) and made.valid(None) is None
    assert (y[~real] == 0).all() and real.sum(1).tolist() == (-(-valid.sum(1) // 4)).tolist()
    for row in (0, 2):
        close(y[row][real[row]], made(x[row][valid[row]][None])[0])
    for rate in (1, 2, 3, 20):
        means, real = pool_tokens(valid[..., None].to(x.dtype), valid, rate)
        assert torch.equal(real, means[..., 0] > 0)  # a group is real where there is something to take the mean of
        assert torch.equal(pooled_valid(valid, rate), real)


def test_a_list_is_a_hybrid_that_takes_turns():
    made = Stack.of(
        ["linear", "softmax", "Local(3)"], width=WIDTH, heads=HEADS, depth=4, ffn=lambda: FeedForward(WIDTH, 5, gated=True)
    )
    assert [block.mixer.name for block in made] == ["linear", "softmax", "sparse", "linear"]
    assert len({id(p) for p in made.parameters()}) == len(list(made.parameters())) and made.blocks[3].channel.gated
    assert len(list(Stack.of(["linear", "softmax"], width=WIDTH, heads=HEADS))) == 2
    assert Stack.of("softmax", width=WIDTH, heads=HEADS).blocks[0].channel.up.out_features == 4 * WIDTH


@pytest.mark.parametrize("kind", [Stack, ReversibleStack])
def test_nothing_and_nobody(kind):
    made = stack(["softmax", "linear"], kind, causal=True)
    for x in (data(0), data(4)[:0], data(1)):
        z = x.clone().requires_grad_()
        made(z).sum().backward()
        assert made(x).shape == x.shape and z.grad.isfinite().all()
        assert made.extend(made.start(len(x)), x)[0].shape == x.shape


def test_a_stack_compiles_without_a_graph_break():
    torch._dynamo.reset()
    made, x = stack(["softmax", "linear"], causal=True), data(20).requires_grad_()
    y = torch.compile(made, fullgraph=True, backend="aot_eager", dynamic=False)(x)
    close(torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(made(x).square().sum(), x)[0])


# sentences

OWN, READS = (layer("softmax", width=WIDTH, heads=HEADS, causal=True), layer("softmax", width=WIDTH, heads=HEADS, cross=True))
X = data(5, dtype=torch.float32)
CASES = {
    "activation": (lambda: FeedForward(8, 16, activation="tanh"), "one of relu, gelu, gelu_tanh, silu, not 'tanh'"),
    "hidden": (lambda: FeedForward(8, 0), "hidden must be an integer of at least 1, not 0"),
    "dropout": (lambda: FeedForward(8, 16, dropout=1.0), r"dropout must be in \[0, 1\), not 1.0"),
    "dropout of a block": (lambda: Block(OWN, nn.Identity(), dropout=-1), r"dropout must be in \[0, 1\), not -1"),
    "norm": (lambda: Block(OWN, nn.Identity(), norm="sandwich"), "'pre' or 'post', not 'sandwich'"),
    "a reader as mixer": (lambda: Block(READS, nn.Identity()), "as cross="),
    "a mixer as reader": (lambda: Block(OWN, nn.Identity(), cross=OWN), "built with cross=True"),
    "no context": (lambda: Block(OWN, nn.Identity(), cross=READS)(X), "cross=... and pass a context, or neither"),
    "a context nobody reads": (lambda: Stack.of("softmax", width=WIDTH, heads=HEADS)(X, context=X), "or neither"),
    "context_valid alone": (lambda: Stack([Block(OWN, nn.Identity())]).start(3, context_valid=X[..., 0] > 0), "or neither"),
    "two batches": (lambda: Block(OWN, nn.Identity(), cross=READS).start(2, context=X), "3 sequences, not 2"),
    "start of nothing": (lambda: Stack([Block(OWN, nn.Identity())]).start(), r"start\(batch\)"),
    "stream of what cannot": (lambda: Stack.of("softmax", width=WIDTH, heads=HEADS).start(2), "causal=True or cross=True"),
    "no blocks": (lambda: Stack([]), "blocks of one width"),
    "no depth": (lambda: Stack.of("softmax", width=WIDTH, heads=HEADS, depth=0), "depth must be an integer of at least 1"),
    "no specs": (lambda: Stack.of([], width=WIDTH, heads=HEADS), "depth must be an integer of at least 1, not 0"),
    "context_width alone": (lambda: Stack.of("softmax", width=8, heads=1, context_width=8), "say how with cross="),
    "two widths": (lambda: Stack([Block(layer("softmax", width=w, heads=1), nn.Identity()) for w in (8, 4)]), r"not of \[4, 8\]"),
    "reversible post": (lambda: ReversibleStack([Block(OWN, nn.Identity(), norm="post")]), "norm='pre'"),
    "reversible reader": (lambda: ReversibleStack([Block(OWN, nn.Identity(), cross=READS)]), "no cross attention"),
    "reversible context": (lambda: ReversibleStack([Block(OWN, nn.Identity())])(X, context=X), "cannot read a context"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sentence(name):
    make, message = CASES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()
