"""Streams that look ahead: outputs come later, and are exactly those of the whole pass."""

import pytest
import torch

from regard.blocks import Stack
from regard.blocks.conformer import conformer
from regard.blocks.look_ahead import LookAhead
from regard.catalogue import CATALOGUE
from regard.mixers.baselines import Conv
from regard.mixers.dims import Dims
from regard.spec import Spec, layer

CUTS = ([1] * 23, [7, 0, 1, 15], [23], [2, 3, 18])


def data(n=23, b=2, w=8):
    return torch.randn(b, n, w, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def streamed(mixer, x, sizes):
    """Feed parts, and check after each how many outputs are there."""
    state, found, t = mixer.start(len(x)), [], 0
    for part in x.split(sizes, 1):
        y, state = mixer.extend(state, part)
        found.append(y)
        t += part.shape[1]
        assert sum(y.shape[1] for y in found) == max(t - mixer.latency, 0)
    return torch.cat([*found, mixer.finish(state)], 1)


@pytest.mark.parametrize("positions", [None, "rotary", "relative(clip=4)", "alibi"])
@pytest.mark.parametrize(("pattern", "latency"), [("Truncated(5, 2)", 2), ("Truncated(3, 0)", 0), ("Local(4)", 3)])
def test_a_layer_answers_later_what_the_whole_pass_gives(pattern, latency, positions):
    torch.manual_seed(0)
    mixer, x = layer(pattern, width=8, heads=2, positions=positions).double(), data()
    assert mixer.latency == latency
    for sizes in CUTS:
        found = streamed(mixer, x, sizes)
        torch.testing.assert_close(found, mixer(x))
    alone = streamed(mixer, x[:1, :2], [1, 1])
    torch.testing.assert_close(alone, mixer(x[:1, :2]))  # shorter than it looks ahead


def test_unions_and_heads_look_as_far_as_the_farthest_and_others_do_not_stream():
    for pattern, latency in (("Truncated(2, 1) | Truncated(9, 3)", 3), ("PerHead([Local(2), Truncated(6, 4)])", 4),
                             ("Truncated(8, 3) & Blocks(4)", 3)):  # fmt: skip
        torch.manual_seed(0)
        mixer, x = layer(pattern, width=8, heads=2).double(), data()
        assert mixer.latency == latency
        torch.testing.assert_close(streamed(mixer, x, [4, 9, 10]), mixer(x))
    for spec in ("softmax", "Local(4) | Global(first=1)", "Stride(3)", "linear"):
        assert layer(spec, width=8, heads=2).latency is None
        with pytest.raises(ValueError, match="causal=True"):
            layer(spec, width=8, heads=2).start(1)
    assert layer("softmax", width=8, heads=2, causal=True).latency == 0


@pytest.mark.parametrize(
    "spec", [Spec(row.name, **example.options) for row in CATALOGUE.values() for example in row.examples], ids=str
)
def test_every_mechanism_with_a_latency_streams(spec):
    torch.manual_seed(0)
    mixer, x = spec.build(Dims(8, 4, max_len=32)).double().eval(), data()
    if mixer.latency is not None:
        torch.testing.assert_close(streamed(mixer, x, [2, 9, 12]), mixer(x))


def test_keys_are_forgotten_states_are_values_and_padding_is_refused():
    mixer = layer("Truncated(6, 2)", width=8, heads=2).double()
    state, x, sizes = mixer.start(1), data(400, 1), []
    for part in x.split(1, 1):
        _, state = mixer.extend(state, part)
        sizes.append(state.nbytes)
    assert max(sizes[200:]) == max(sizes[100:200])
    one, two = (mixer.extend(state, torch.full((1, 3, 8), value, dtype=torch.float64))[0] for value in (1.0, 2.0))
    assert not torch.equal(one, two)
    torch.testing.assert_close(mixer.extend(state, torch.ones(1, 3, 8, dtype=torch.float64))[0], one)
    both = mixer.extend(state.select(torch.tensor([0, 0])), torch.ones(2, 3, 8, dtype=torch.float64))[0]
    torch.testing.assert_close(both, one.expand(2, -1, -1))
    with pytest.raises(ValueError, match="without padding"):
        mixer.extend(state, x[:, :3], torch.tensor([[True, False, True]]))


def test_convolutions_look_half_of_their_kernel_ahead():
    torch.manual_seed(0)
    for options in ({"kernel": 7}, {"kernel": 3, "dilation": 2}, {"kernel": 1}):
        mixer, x = Conv(Dims(8, 1), **options).double(), data()
        assert mixer.latency == (options["kernel"] - 1) // 2 * options.get("dilation", 1)
        for sizes in CUTS:
            torch.testing.assert_close(streamed(mixer, x, sizes), mixer(x))


@pytest.mark.parametrize("norm", ["conformer", "pre", "post"])
def test_a_stack_looks_ahead_by_the_sum_of_its_layers(norm):
    torch.manual_seed(0)
    if norm == "conformer":
        stack = conformer("Truncated(4, 2)", width=8, heads=2, depth=2, ffn=12, kernel=5, positions="rotary")
    else:
        stack = Stack.of(["Truncated(4, 3)", "Truncated(6, 1)"], width=8, heads=2, ffn=12, norm=norm, positions="rotary")
    stack, x = stack.double().eval(), data(30)
    stream = LookAhead(stack)
    assert stream.latency == (8 if norm == "conformer" else 4)
    for sizes in ([1] * 30, [11, 0, 2, 17]):
        torch.testing.assert_close(streamed(stream, x, sizes), stack(x))
    with pytest.raises(ValueError, match=r"look_ahead|causal=True"):
        stack.start(1)


def test_stacks_that_cannot_stream_are_refused():
    with pytest.raises(ValueError, match="softmax sees any number of tokens ahead"):
        LookAhead(Stack.of("softmax", width=8, heads=2))
    with pytest.raises(ValueError, match="reads no context"):
        LookAhead(Stack.of("Truncated(2, 2)", width=8, heads=2, cross="softmax"))
    causal = Stack.of("softmax", width=8, heads=2, causal=True).double().eval()
    assert LookAhead(causal).latency == 0
    torch.testing.assert_close(streamed(LookAhead(causal), data(), [3, 20]), causal(data()))
