"""Positions, padding and the masks derived from them: made once a pass, shared by all layers."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import DEVICE, close
from regard import layer
from regard.blocks import Block, FeedForward, Stack
from regard.config import Config
from regard.mixers import attention
from regard.mixers import places as places_module
from regard.mixers.base import Can, Dims, Mixer, Places, State
from regard.models import language_model, translator
from regard.models.translator import WIRINGS
from regard.ops import dense, joined_linear

WIDTH, HEADS = 16, 2


class Names(TorchDispatchMode):
    """Operations by name."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def tokens(n=9, b=3):
    return torch.randn(b, n, WIDTH, device=DEVICE, dtype=torch.float64)


def some(b=3, n=9):
    valid = torch.rand(b, n, device=DEVICE) < 0.6
    valid[:, 2] = True
    return valid


def made(**more):
    return Stack.of("softmax", width=WIDTH, heads=HEADS, ffn=8, **more).to(DEVICE, torch.float64)


@pytest.mark.parametrize("learns", [True, False])
def test_all_layers_share_masks_and_positions(learns):
    found = []
    for depth in (1, 4):
        stack = made(depth=depth, causal=True, cross="softmax")
        with Names() as names, torch.set_grad_enabled(learns):
            stack(tokens(), context=tokens(7), context_valid=some(n=7))
        found.append([names.seen[name] for name in ("any", "cumsum", "arange", "bitwise_or")])
    assert found[0] == found[1] == [1, 1, 0, 1]  # no positions are made that nothing reads


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_is_silenced_behind_the_last_block_and_by_every_block_that_is_asked_alone(norm):
    stack, x, valid = made(depth=2, norm=norm), tokens(), some()
    y = stack(x, valid)
    assert (y[~valid] == 0).all()
    places = Places.of(x, valid)
    x = x.masked_fill(~valid[..., None], 0)
    for block in stack:
        loud, x = block(x, places), block(x, valid)
        assert (x[~valid] == 0).all() and (loud[~valid] != 0).any()
        close(loud[valid], x[valid])
    close(y[valid], (x if stack.final_norm is None else stack.final_norm(x))[valid])


def test_a_row_that_sees_nothing_says_nothing_and_learns_nothing():
    x, c, real = tokens().requires_grad_(), tokens(7).requires_grad_(), some(n=7)
    real[1] = False
    for mixer, more in (
        (layer("softmax", width=WIDTH, heads=HEADS, cross=True), {"context": c, "valid": real}),
        (layer("softmax", width=WIDTH, heads=HEADS), {"valid": torch.cat([real, real[:, :2]], 1)}),
    ):
        nn.init.zeros_(mixer.out.bias)  # what it says is what it has seen
        y = mixer.to(DEVICE, torch.float64)(x, **more)
        grads = torch.autograd.grad(y.square().sum(), (x, c), allow_unused=True)
        assert (y[1] == 0).all() and y[0].any()
        assert all(grad is None or ((grad[1] == 0).all() and grad.isfinite().all()) for grad in grads)


def test_three_maps_in_one_product_are_the_three_maps():
    x, maps = tokens().requires_grad_(), [nn.Linear(WIDTH, size).to(DEVICE, torch.float64) for size in (16, 8, 8)]
    given = (x, *(p for one in maps for p in one.parameters()))
    with Names() as names:
        joint = attention.fused_linear(x, *maps)
    assert names.seen["addmm"] == 1
    alone = [one(x) for one in maps]
    found = [torch.autograd.grad(sum(y.square().sum() for y in ys), given) for ys in (joint, alone)]
    for mine, theirs in zip((*joint, *found[0]), (*alone, *found[1]), strict=True):
        close(mine, theirs)


def test_maps_of_a_sequence_that_kernels_would_not_reach_are_several_products(monkeypatch):
    """Offsets of 32 bits: six maps of width 512 of a million tokens, side by side, have more elements."""
    x, maps = tokens().requires_grad_(), [nn.Linear(WIDTH, size).to(DEVICE, torch.float64) for size in (16, 8, 8)]
    monkeypatch.setattr(attention, "FURTHEST", x.shape[1] * 32)
    with Names() as names:
        joint = attention.fused_linear(x, *maps)
    assert names.seen["addmm"] == 2
    assert max(y.shape[1] * y.stride(1) for y in joint) < attention.FURTHEST
    for mine, one in zip(joint, maps, strict=True):
        close(mine, one(x))
    q, k, v = (torch.randn(1, 4, 6, 2) for _ in range(3))
    beside = joined_linear.gradient_buffers(q, k, v)
    assert len({y.untyped_storage().data_ptr() for y in beside}) == 1
    monkeypatch.setattr(joined_linear, "FURTHEST", 6 * 12 * 2)
    apart = joined_linear.gradient_buffers(q, k, v)
    assert len({y.untyped_storage().data_ptr() for y in apart}) == 3
    assert [y.shape for y in apart] == [y.shape for y in beside] and all(y.stride() == (48, 2, 8, 1) for y in apart)


def test_gradients_by_head_are_copied_once():
    """The gradient of queries, keys and values comes by heads, and goes into one tensor by tokens: without a copy of each."""
    x = tokens().requires_grad_()
    made = layer("efficient", width=WIDTH, heads=HEADS).to(DEVICE, torch.float64)
    y = made(x)
    with Names() as names:
        y.backward(torch.ones_like(y))
    assert names.seen["clone"] == 1  # of the gradient of the outputs
    assert names.seen["cat"] == 1


def test_maps_that_are_fewer_than_the_tokens_or_watched_or_of_another_kind_are_called():
    x, maps = tokens(), [nn.Linear(WIDTH, WIDTH).to(DEVICE, torch.float64) for _ in range(2)]
    few, heard = x[:1, :3], []
    with Names() as names, torch.no_grad():
        attention.fused_linear(x, *maps)  # nobody learns: weights are not worth copying
    assert names.seen["addmm"] == 2
    for given, parts in (
        (few, maps),
        (x, [maps[0], nn.Linear(WIDTH, WIDTH, bias=False).to(DEVICE, torch.float64)]),
        (x, [maps[0], attention.UnmadeProjection(4)]),
    ):
        for mine, one in zip(attention.fused_linear(given, *parts), parts, strict=True):
            close(mine, one(given))
    maps[1].register_forward_hook(lambda *_: heard.append(1))
    attention.fused_linear(x, *maps)
    assert heard == [1]


def test_a_block_streams_loudly_as_well():
    block = Block(layer("softmax", width=WIDTH, heads=HEADS, causal=True), FeedForward(WIDTH, 8)).to(DEVICE, torch.float64)
    x, valid = tokens(), some()
    (loud, _), (y, _) = (block.extend(block.start(3), x, given) for given in (Places.of(x, valid), valid))
    assert (y[~valid] == 0).all()
    close(loud[valid], y[valid])


# one value for every sequence of a pass


@contextmanager
def counted(monkeypatch):
    """Places that are made inside of it, and calls that make a mask for the fused kernel."""
    made, masks, plain, mask = [], [], Places.__init__, places_module.sdpa_mask

    def init(self, *given, **more):
        made.append(self)
        plain(self, *given, **more)

    def masking(*given):
        masks.append(given)
        return mask(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Places, "__init__", init)
        patch.setattr(places_module, "sdpa_mask", masking)
        patch.setattr(dense, "sdpa_mask", masking)
        yield made, masks


def speaker(depth=6, **changes):
    torch.manual_seed(0)
    config = Config(**{"width": WIDTH, "heads": HEADS, "depth": depth, "ffn": 8, "dropout": 0.0, **changes})
    return translator(config, vocab=20).to(DEVICE).eval()


def words(n, b=3):
    return torch.randint(5, 20, (b, n), device=DEVICE)


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "none"])
def test_a_translator_makes_the_places_of_source_and_target_once(monkeypatch, wiring, positions):
    model, source, target = speaker(wiring=wiring, positions=positions), words(9), words(7)
    for valid, target_valid in ((None, None), (some(), some(n=7))):
        with counted(monkeypatch) as (made, masks):
            model(source, valid, target, target_valid)
        assert len(made) == 2
        assert len(masks) == (0 if valid is None else 1)  # for 6 encoder layers and 6 cross attentions alike
        with counted(monkeypatch) as (made, masks):
            state = model.start(source, valid)
        assert len(made) == 1
        mask = len(masks)
        for many, step in ((1, state), (4, state.fan(4))):  # a mask over the source is made once for it, not in every step
            with counted(monkeypatch) as (made, masks):
                _, step = model.extend(step, words(3, 3 * many))
            assert len(made) == 1 and len(masks) == (0 if valid is None or many == 1 else 1)
            for _ in range(2):
                with counted(monkeypatch) as (made, masks):
                    _, step = model.extend(step, words(1, 3 * many))
                assert len(made) == 2 and masks == []  # of the new token, and of all that the caches hold
        assert mask == (0 if valid is None else 1)


def test_a_padded_prompt_is_masked_once_a_step_for_all_layers(monkeypatch):
    model, valid = language_model(Config(width=WIDTH, heads=HEADS, depth=5, ffn=8), vocab=20).to(DEVICE).eval(), some()
    state = model.start(3)
    for tokens, given in ((words(9), valid), (words(1), None), (words(1), None)):
        with counted(monkeypatch) as (made, masks):
            _, state = model.extend(state, tokens, given)
        assert len(made) <= 2 and len(masks) == (tokens.shape[1] == 1)
    with torch.no_grad():
        state = state.fan(2).select(torch.arange(6, device=DEVICE).flip(0), within=True)
        with counted(monkeypatch) as (made, masks):
            model.extend(state, words(1, 6))
    assert len(made) == 2 and len(masks) == 1


def test_unpadding_is_ordered_once_for_all_layers(monkeypatch):
    stack, orders = made(depth=4, causal=True), []
    plain = places_module.unpad_order
    monkeypatch.setattr(places_module, "unpad_order", lambda valid: orders.append(1) or plain(valid))
    stack(tokens(), some())
    assert orders == [1]


def test_what_is_made_in_inference_mode_is_made_again_for_training():
    layer_, c, valid = layer("softmax", width=WIDTH, heads=HEADS, cross=True).to(DEVICE, torch.float64), tokens(7), some(n=7)
    state = layer_.start(context=c, valid=valid)
    with torch.inference_mode():
        layer_.extend(state, tokens(1))
    layer_.extend(state, tokens(1).requires_grad_())[0].sum().backward()
    assert layer_.q.weight.grad.isfinite().all()


def test_derived_values_are_those_of_the_tokens():
    x, valid = tokens(), some()
    t = torch.tensor([3, 0, 5], device=DEVICE)
    places = Places.of(x, valid, t, None)
    assert torch.equal(places.count, valid.sum(1)) and torch.equal(places.after(t), t + valid.sum(1))
    assert places.longest == int((t + valid.sum(1)).max())
    assert places.sdpa_mask(torch.float32) is places.sdpa_mask(torch.float32)
    assert places.sdpa_mask(torch.float64).bias.dtype == torch.float64
    order, front = places.unpad_order, places.front(9)
    real = x.gather(1, order.there[..., None].expand_as(x))
    for row in range(3):
        many = int(valid[row].sum())
        assert torch.equal(real[row, :many], x[row, valid[row]])
        assert torch.equal(front.at[row, :many], places.at[row, valid[row]])
        assert torch.equal(front.valid[row], torch.arange(9, device=DEVICE) < many)
    rows = torch.tensor([2, 0, 0], device=DEVICE)
    assert torch.equal(places.select(rows).at, places.at[rows]) and torch.equal(places.select(rows).valid, valid[rows])
    plain = Places.of(x, start=4)
    assert plain.count == 9 and plain.longest == 13 and plain.unpad_order is None and plain.sdpa_mask(x.dtype) is None
    assert plain.pooled(2).at.shape == (3, 5) and plain.pooled(2) is plain.pooled(2) and plain.pooled(1) is plain


def test_hooks_of_a_mixer_and_of_a_block_are_called():
    stack, x, valid, seen = made(depth=2, cross="softmax", causal=True), tokens(), some(), []
    given = {"context": tokens(7), "context_valid": some(n=7)}
    wanted = stack(x, valid, **given)
    for part in (stack.blocks[0].mixer, stack.blocks[1].cross, stack.blocks[1]):
        part.register_forward_hook(lambda module, *_: seen.append(module))
    close(stack(x, valid, **given), wanted)
    assert seen == [stack.blocks[0].mixer, stack.blocks[1].cross, stack.blocks[1]]


class Mean(Mixer):
    """A mixer with the public calls alone."""

    can = Can.CAUSAL | Can.PADDING | Can.STREAM

    def forward(self, x, *, context=None, valid=None):  # noqa: ARG002
        return self.extend(self.start(len(x)), x, valid)[0]

    def start(self, batch=None, *, context=None, valid=None):  # noqa: ARG002
        zero = torch.zeros(batch, self.dims.width, dtype=torch.float64, device=DEVICE)
        return State((zero,), torch.zeros(batch, dtype=torch.long, device=DEVICE), 0, self.maker())

    def extend(self, state, x, valid=None):
        x = x if valid is None else x.masked_fill(~valid[..., None], 0)
        places = Places.of(x, valid, state.t, state.start)
        sums = state.memory[0][:, None] + x.cumsum(1)
        return sums / (places.at + 1)[..., None], self.later(state, (sums[:, -1],), places)


def test_a_mixer_with_the_public_calls_alone_is_a_part_of_a_stack():
    x, valid = tokens(), some()
    stack = Stack([Block(Mean(Dims(WIDTH, HEADS, causal=True)), FeedForward(WIDTH, 8)) for _ in range(2)]).to(
        DEVICE, torch.float64
    )
    y, state, parts = stack(x, valid), stack.start(3), []
    for piece, real in zip(x.split([4, 1, 4], 1), valid.split([4, 1, 4], 1), strict=True):
        part, state = stack.extend(state, piece, real)
        parts.append(part)
    close(torch.cat(parts, 1), y)
    for row in range(3):
        close(y[row, valid[row]][None], stack(x[row : row + 1, valid[row]]))


@pytest.mark.parametrize("mixer", ["Local(2)", "conv(kernel=3)", "softmax", "Local(2) | Global(first=1)"])
def test_padding_that_is_known_to_lie_behind_moves_no_token(mixer, monkeypatch):
    """On a GPU nobody can look where padding is: tokens are sorted, unless the maker of the places knows. The same outputs."""
    monkeypatch.setattr(places_module, "may_read_data", lambda *_: False)
    x = tokens(200)
    valid = torch.arange(200, device=DEVICE) < torch.tensor([[200], [90], [130]], device=DEVICE)
    made = layer(mixer, width=WIDTH, heads=HEADS).to(DEVICE, torch.float64)
    found = []
    for packed in (False, True):
        names = Names()
        with names:
            found.append(made.forward_at(x, Places.of(x, valid, packed=packed)))
        assert (names.seen["sort"] + names.seen["argsort"] == 0) == (packed or mixer == "softmax"), names.seen
    close(*found)
    front = Places.of(x, valid).front(6)
    assert front.packed and front.part(1, 3).packed and front.unpad_order is None


def test_angles_are_computed_once_for_all_layers():
    for valid in (None, some()):
        stack = made(depth=3, positions="rotary")
        with Names() as names:
            stack(tokens(), valid)
        assert names.seen["cos"] == names.seen["sin"] == 1
