"""States that are mixed up: of another batch, type, device or layer. Each is refused with a sentence."""

import pytest
import torch

from conftest import CASES, DEVICE, HEADS, WIDTH, claiming, close, data
from regard import layer
from regard.blocks import Stack
from regard.config import Config
from regard.mixers.base import Can, State
from regard.models import language_model
from regard.ops.rnn import rnn_scan
from wrong_calls import refused, wrong_streams

STREAMS = [c for c in CASES if c.can(Can.STREAM, causal=True)]


@claiming(Can.STREAM, causal=True)
def test_wrong_states_and_rows_are_refused(case):
    if DEVICE.type != "cpu":
        pytest.skip("the content of rows is checked on a CPU alone: run it with REGARD_DEVICE=cpu")
    found = {what: refused(call) for what, call in wrong_streams(case.build(dtype=torch.float32, causal=True))}
    assert {what: why for what, why in found.items() if why} == {}
    assert len(found) > 60


def test_no_layer_takes_the_state_of_another():
    """Every streaming example of the catalogue is given the states of all others."""
    layers = [c.build(causal=True) for c in STREAMS]
    states = [m.extend(m.start(2), data(3, b=2))[1] for m in layers]
    taken = []
    for i, m in enumerate(layers):
        for j, state in enumerate(states):
            why = refused(lambda m=m, state=state: m.extend(state, data(1, b=2)))
            if (why is None) == (i == j):
                taken.append((repr(STREAMS[i]), repr(STREAMS[j]), why))
    assert taken == [] and len(layers) > 40


@claiming(Can.STREAM, causal=True)
def test_the_type_of_the_weights_may_not_change_under_a_state(case):
    m = case.build(causal=True)
    state = m.extend(m.start(2), data(3, b=2))[1]
    m = m.float()
    with pytest.raises(TypeError, match=r"made with weights in torch.float64, but they are torch.float32 now: start anew"):
        m.extend(state, data(1, b=2, dtype=torch.float32))
    m.double()
    m.extend(state, data(1, b=2))


def test_a_state_of_a_cross_layer_is_not_one_of_a_causal_layer():
    cross = layer("softmax", width=WIDTH, heads=HEADS, cross=True).double().to(DEVICE)
    causal = layer("softmax", width=WIDTH, heads=HEADS, causal=True).double().to(DEVICE)
    read = cross.start(context=data(5))
    with pytest.raises(ValueError, match=r"of a layer \(cross softmax.*but this layer is causal softmax"):
        causal.extend(read, data(1))
    with pytest.raises(ValueError, match="this layer is cross softmax"):
        cross.extend(causal.start(3), data(1))
    with pytest.raises(ValueError, match="holds 3 sequences but x has 2"):
        cross.extend(read, data(1, b=2))


def test_equal_layers_share_states():
    """A state is a value: a copy of a layer, loaded from its weights, goes on where the layer was."""
    one, other = (layer("Local(4)", width=WIDTH, heads=HEADS, causal=True).double().to(DEVICE) for _ in range(2))
    other.load_state_dict(one.state_dict())
    state = one.extend(one.start(3), data(9))[1]
    close(other.extend(state, data(1))[0], one.extend(state, data(1))[0])


def test_stacks_and_models_refuse_states_of_another_shape():
    two, three = (Stack.of("gla", width=WIDTH, heads=HEADS, depth=n, causal=True).double().to(DEVICE) for n in (2, 3))
    with pytest.raises(ValueError, match="belongs to another kind of module than this stack"):
        three.extend(two.start(3), data(1))
    with pytest.raises(ValueError, match="holds 3 sequences but x has 2"):
        two.extend(two.start(3), data(1, b=2))
    with pytest.raises(ValueError, match="belongs to another kind of module than this block"):
        two.blocks[0].extend(two.blocks[0].mixer.start(3), data(1))
    with pytest.raises(TypeError, match="a state comes from start or from extend"):
        two.extend(None, data(1))
    model = language_model(Config(mixer="softmax", width=WIDTH, heads=HEADS, depth=2), vocab=20).to(DEVICE).eval()
    tokens = torch.zeros(2, 1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="holds 3 sequences but x has 2"):
        model.extend(model.start(3), tokens)
    with pytest.raises(ValueError, match="rows must be from 0 to 2"):
        model.cpu().start(3).select(torch.tensor([3]))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("batches", [(2, 4), (4, 2), (1, 3)])
def test_a_recurrent_network_never_reads_beyond_its_state(cell, batches):
    """Even where a state was put together by hand: native code would take the missing rows from other memory."""
    m = layer(f"rnn(cell='{cell}')", width=WIDTH, heads=HEADS, causal=True).to(DEVICE)
    few, many = m.start(batches[0]), m.start(batches[1])
    mixed = State(few.memory, many.t, 0, many.maker)
    with pytest.raises(ValueError, match=f"holds {batches[0]} sequences but x has {batches[1]}"):
        m.extend(mixed, torch.randn(batches[1], 5, WIDTH, device=DEVICE))
    weights = [w for direction in m.cell.all_weights for w in direction]
    with pytest.raises(ValueError, match="start anew with that many"):
        rnn_scan(
            torch.randn(batches[1], 5, WIDTH, device=DEVICE), [part[None] for part in few.memory if part is not None], weights
        )


@pytest.mark.parametrize("spec", ["cosformer", "softmax"])
def test_queries_of_a_cross_layer_end_where_its_positions_end_however_they_come(spec):
    within = None if spec == "cosformer" else "relative_2d(columns=4, clip=2)"
    made = layer(spec, width=WIDTH, heads=HEADS, cross=True, max_len=12, positions=within).to(DEVICE).eval()
    context, x = data(8, b=2, dtype=torch.float32), data(30, b=2, dtype=torch.float32)
    valid = torch.ones(2, 4, dtype=torch.bool, device=DEVICE)
    valid[0, 3] = False
    for first in (None, valid):  # equal rows, and rows of different length
        _, state = made.extend(made.start(context=context), x[:, :4], first)
        with pytest.raises(ValueError, match="max_len=12"):
            for i in range(4, 30):
                _, state = made.extend(state, x[:, i : i + 1])
        assert int(state.t.max()) == 12


FROZEN = ["softmax", "Local(4)", "additive", "longformer(window=3)", "synthesizer"]


@pytest.mark.parametrize("spec", FROZEN)
def test_a_stream_whose_keys_and_values_are_frozen_has_the_gradients_of_the_whole_pass(spec):
    """As with adapters of the queries: the cache is written in place, and autograd holds views of it."""
    made = layer(spec, width=WIDTH, heads=HEADS, causal=True, max_len=16).double().to(DEVICE)
    for name, weight in made.named_parameters():
        if name.startswith(("k.", "v.")):
            weight.requires_grad_(False)
    free = [weight for weight in made.parameters() if weight.requires_grad]
    x, up = data(6, b=2), data(6, b=2)
    state, parts = made.start(2), []
    for token in x.split(1, 1):
        y, state = made.extend(state, token)
        parts.append(y)
    streamed = torch.autograd.grad((torch.cat(parts, 1) * up).sum(), free, allow_unused=True)
    whole = torch.autograd.grad((made(x) * up).sum(), free, allow_unused=True)
    for one, other in zip(streamed, whole, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)


@claiming(Can.STREAM, causal=True)
def test_a_state_goes_on_under_autocast(case):
    made = case.build(dtype=torch.float32, causal=True)
    x = data(6, dtype=torch.float32)
    _, state = made.extend(made.start(len(x)), x[:, :5])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y, state = made.extend(state, x[:, 5:])
    assert y.isfinite().all()
    assert made.extend(state, x[:, :1])[0].isfinite().all()
