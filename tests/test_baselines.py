"""What attention is compared with: windows are their formulas, recurrent networks are PyTorch's, and all of them stream."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv1d, linear, pad
from torch.utils.flop_counter import FlopCounterMode

from conftest import DEVICE, close, data, some
from regard import layer
from regard.analysis.probe import influence
from test_attention_free import both_ways, build, check_same
from test_limits import Largest

STREAMS = [
    *(
        "conv(kernel=4)",
        "conv(kernel=3, dilation=5)",
        "conv(kernel=2, depthwise=False)",
        "window_fc(window=1)",
        "window_fc(window=6)",
    ),
    *("rnn", "rnn(cell='lstm', hidden=8)", "gmlp(expand=1)", "gmlp(expand=2, tiny=6)"),
]


def taps(i, kernel, dilation, causal):
    """The positions that output i looks at, the oldest first."""
    first = i - (kernel - 1) * dilation if causal else i - (kernel - 1) // 2 * dilation
    return [first + t * dilation for t in range(kernel)]


@pytest.mark.parametrize("depthwise", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dilation", "causal"), [(1, 1, False), (5, 1, False), (3, 4, False), (3, 4, True), (4, 1, True)]
)
def test_conv_is_its_formula(kernel, dilation, causal, depthwise):
    made = build(f"conv(kernel={kernel}, dilation={dilation}, depthwise={depthwise})", causal=causal)

    def by_hand(x):
        h, out = made.into(x), []
        for i in range(x.shape[1]):
            seen = [(t, j) for t, j in enumerate(taps(i, kernel, dilation, causal)) if 0 <= j < x.shape[1]]
            one = made.filter[:, 0] if depthwise else made.filter
            out.append(sum(h[:, j] * one[:, t] if depthwise else linear(h[:, j], one[..., t]) for t, j in seen))
        return made.out(torch.stack(out, 1))

    check_same(made, by_hand, data(13), made)


@pytest.mark.parametrize(("window", "causal"), [(1, False), (5, False), (5, True), (4, True), (31, False)])
def test_window_fc_is_one_layer_over_neighbours(window, causal):
    made = build(f"window_fc(window={window})", causal=causal)

    def by_hand(x):
        n, out = x.shape[1], []
        for i in range(n):
            near = [x[:, j] if 0 <= j < n else torch.zeros_like(x[:, 0]) for j in taps(i, window, 1, causal)]
            out.append(linear(torch.cat(near, -1), made.filter.flatten(1), made.bias))
        return torch.stack(out, 1)

    check_same(made, by_hand, data(13), made)


@pytest.mark.parametrize("causal", [False, True])
def test_window_fc_is_a_full_convolution(causal):
    window, conv = build("window_fc(window=5)", causal=causal), build("conv(kernel=5, depthwise=False)", causal=causal)
    with torch.no_grad():
        window.bias.normal_()
        for part in (conv.into, conv.out):
            part.weight.copy_(torch.eye(32))
            part.bias.zero_()
        conv.out.bias.copy_(window.bias)
        conv.filter.copy_(window.filter.mT)
    x = data(21)
    close(window(x), conv(x))
    sides = (4, 0) if causal else (2, 2)
    close(window(x), conv1d(pad(x.mT, sides), window.filter.mT, window.bias).mT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec", ["conv(kernel=5)", "conv(kernel=3, dilation=4)", "conv(kernel=3, depthwise=False)", "window_fc(window=7)"]
)
def test_the_receptive_field_is_what_gradients_say(spec, causal):
    made, n = build(spec, causal=causal), 24
    moved = influence(made, data(n)[0]) > 0
    reach, step = made.receptive_field - 1, getattr(made, "dilation", 1)
    i, j = torch.arange(n, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
    near = (i - j >= 0) & (i - j <= reach) if causal else (i - j).abs() <= reach // 2
    assert torch.equal(moved, near & ((i - j) % step == 0))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("mode", [{"causal": True}, {}, {"both": False}])
def test_rnn_is_the_one_of_torch(cell, mode):
    causal, both = mode.get("causal", False), not mode
    made = build(f"rnn(cell={cell!r}, hidden=12{', both=False' if 'both' in mode else ''})", causal=causal)
    theirs = (nn.GRU if cell == "gru" else nn.LSTM)(32, 12, batch_first=True, bidirectional=both).to(DEVICE, torch.float64)
    for name, weight in made.cell.named_parameters():  # the same tensors, so that gradients meet in one place
        setattr(theirs, name, weight)
    assert (made.out.in_features == 24) == both
    check_same(made, lambda x: made.out(theirs(x)[0]), data(30), made)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_rnn_counts_its_products_without_content_as_with_it(cell):
    counts = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            made, x = layer(f"rnn(cell={cell!r}, hidden=12)", width=8, heads=1).double(), torch.ones(2, 9, 8, dtype=torch.float64)
        with FlopCounterMode(display=False) as counter:
            made(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own, of what crosses a break
@pytest.mark.parametrize("causal", [False, True])
def test_rnn_runs_under_torch_compile_with_a_break(causal):
    torch._dynamo.reset()
    made, x = build("rnn", causal=causal), data(12).requires_grad_()
    y = torch.compile(made, backend="aot_eager")(x)
    close(y, made(x))
    close(*(torch.autograd.grad(z.square().sum(), x)[0] for z in (y, made(x))))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_does_not_pile_up_in_a_recurrence(cell, dtype):
    made, x = build(f"rnn(cell={cell!r})", causal=True, dtype=dtype, max_len=None), data(500, dtype=dtype)
    truth = build(f"rnn(cell={cell!r})", causal=True, max_len=None)
    truth.load_state_dict(made.state_dict())
    assert (made(x).double() - truth(x.double())).abs().max() < 4 * torch.finfo(dtype).eps * truth(x.double()).abs().max()
    assert made.start(1).memory.h.dtype == torch.float32


@pytest.mark.parametrize("spec", STREAMS)
def test_every_chunk_may_have_holes(spec):
    """Rows that grow at different speeds, with padding in every chunk, are what each row is alone."""
    made, x = build(spec, causal=True, max_len=80), data(70)
    valid = some(3, 70, share=0.6)
    valid[0, :30], valid[1, 20:45], valid[2, 33:36] = True, False, False
    tokens = torch.where(valid[..., None], x, torch.nan)  # nothing of padding is ever touched
    with torch.no_grad():
        state, out = made.start(3), []
        for part, real in zip(*(t.split([20, 1, 14, 1, 1, 33], 1) for t in (tokens, valid)), strict=True):
            y, state = made.extend(state, part, real)
            out.append(y)
        found, whole = torch.cat(out, 1), made(tokens, valid=valid)
        for row in range(3):
            alone = made(x[row][valid[row]][None])[0]
            close(found[row][valid[row]], alone)
            close(whole[row][valid[row]], alone)
    assert (found[~valid] == 0).all() and state.t.tolist() == valid.sum(1).tolist()


@pytest.mark.parametrize("spec", STREAMS)
def test_streams_under_autocast(spec):
    made, x = build(spec, causal=True, dtype=torch.float32), data(40, dtype=torch.float32)
    valid = some(3, 20)
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y, state = made.extend(made.start(3), x[:, :20], valid)
        out = [y]
        for part in x[:, 20:].split([1, 18, 1], 1):
            y, state = made.extend(state, part)
            out.append(y)
    whole = torch.cat([valid, torch.ones_like(valid)], 1)
    truth = made(x, valid=whole)
    assert (torch.cat(out, 1) - truth).abs().max() < 0.05 * truth.abs().max()


@pytest.mark.parametrize("spec", STREAMS[:7])
def test_a_state_keeps_nothing_but_itself_alive(spec):
    made = build(spec, causal=True)
    with torch.no_grad():
        _, state = made.extend(made.start(3), data(50))
    held = sum(part.untyped_storage().nbytes() for part in state.memory if part is not None)
    assert held == state.nbytes == made.start(3).nbytes


@pytest.mark.parametrize(
    ("spec", "causal"), both_ways(["conv", "window_fc", "rnn", "rnn(cell='lstm')", "fnet", "mlp_mixer(hidden=16)"])
)
def test_what_is_held_grows_with_the_length(spec, causal):

    def most(n):
        made, x = build(spec, causal=causal, max_len=n, dtype=torch.float32), data(n, b=1, dtype=torch.float32)
        with Largest() as watch:
            made(x.requires_grad_()).sum().backward()
        return watch.most

    assert most(512) <= 2.2 * most(256)


REFUSED = {
    "context": (lambda: build("conv")(data(8), context=data(8)), "conv mixes its own tokens and cannot read a context"),
    "context of fnet": (lambda: build("fnet")(data(8), context=data(8)), "fnet mixes its own tokens"),
    "cross": (lambda: layer("rnn", width=32, heads=4, cross=True), "rnn cannot do cross: it can do causal, padding, stream"),
    "kv_heads": (
        lambda: layer("gmlp", width=32, heads=4, kv_heads=2, max_len=8),
        "gmlp has no queries and keys: leave out kv_heads",
    ),
    "shared_qk": (lambda: layer("window_fc", width=32, heads=4, shared_qk=True), "projections of its own"),
    "causal waves": (lambda: layer("fnet", width=32, heads=4, causal=True), "fnet cannot do causal: it can do padding"),
    "causal mixer": (lambda: layer("mlp_mixer", width=32, heads=4, causal=True, max_len=8), "mlp_mixer cannot do causal"),
    "no length": (
        lambda: layer("mlp_mixer", width=32, heads=4),
        "mlp_mixer has weights for every position: say how many with max_len",
    ),
    "no length of gmlp": (lambda: layer("gmlp", width=32, heads=4), "say how many with max_len"),
    "too long": (lambda: build("gmlp", max_len=7)(data(8)), "8 tokens, but this layer was built for max_len=7"),
    "even kernel": (lambda: build("conv(kernel=4)"), "kernel counts tokens, the own one in the middle: 4 is an even number"),
    "even window": (
        lambda: build("window_fc(window=2)"),
        "window counts tokens, .* 2 is an even number, which needs causal=True",
    ),
    "no kernel": (lambda: build("conv(kernel=0)"), "kernel must be an integer of at least 1, not 0"),
    "dilation": (lambda: build("conv(dilation=0)"), "dilation must be an integer of at least 1"),
    "depthwise": (lambda: build("conv(depthwise=3)"), "depthwise must be True or False, not 3"),
    "cell": (lambda: build("rnn(cell='elman')"), "cell must be 'gru' or 'lstm', not 'elman'"),
    "both": (lambda: build("rnn(both=1)"), "both must be True or False, or left out, not 1"),
    "both and causal": (lambda: build("rnn(both=True)", causal=True), "a causal rnn reads in one direction: leave out both"),
    "norm": (lambda: build("fnet(norm='forward')"), "norm must be 'ortho' or 'none', not 'forward'"),
    "odd channels": (lambda: build("gmlp(expand=3)", width=5), r"two halves: expand \* width = 15 is an odd number"),
    "tiny": (lambda: build("gmlp(tiny=-1)"), "tiny must be an integer of at least 0, not -1"),
    "hidden": (lambda: build("mlp_mixer(hidden=0)"), "hidden must be an integer of at least 1"),
    "not causal": (lambda: build("rnn").start(3), "only a causal rnn can stream: build it with causal=True"),
    "extend what is not causal": (lambda: build("rnn").extend(build("rnn", causal=True).start(3), data(2)), "only a causal rnn"),
    "no batch": (lambda: build("rnn", causal=True).start(), r"a causal rnn starts from nothing: start\(batch\)"),
    "no stream": (lambda: build("fnet").start(3), "fnet cannot do stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sentence(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["window_fc(window=5)", "conv(kernel=3, dilation=4, depthwise=False)"])
def test_a_long_line_is_convolved_in_pieces(spec, causal, set_limits):
    made, x = build(spec, causal=causal), data(61).requires_grad_()
    found = []
    for piece in (8, 1024):
        set_limits(conv_tokens=piece)
        y = made(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])])
    for a, b in zip(*found, strict=True):
        close(a, b)
