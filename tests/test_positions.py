"""Positions: their formulas, what they promise, and that streaming, padding and cross attention see the same ones."""

import copy
import math

import pytest
import torch

import regard.positions as kinds
from conftest import CASES, DEVICE, close, data, some
from regard import Can, Dims, Places, attend, core, layer
from regard.analysis.position_properties import PositionProperties, position_properties, positions_table
from regard.blocks import ReversibleStack, Stack
from regard.blocks.block import Block
from regard.config import Config
from regard.models import language_model
from regard.models.embedding import Tokens
from regard.ops import score_bias
from regard.patterns import Local, Pattern
from regard.positions import POSITIONS, positions
from test_limits import Largest

ADDED = [name for name in POSITIONS if positions(name, Dims(32, 4, max_len=8)).needs == Can.NOTHING]
INSIDE = [name for name in POSITIONS if name not in ADDED]


def build(name, **dims):
    torch.manual_seed(0)
    return positions(name, Dims(**{"width": 32, "heads": 4, "max_len": 128, **dims})).to(DEVICE, torch.float64)


def nothing(n, b=1, width=32):
    return torch.zeros(b, n, width, dtype=torch.float64, device=DEVICE)


def table(name, n):
    x = nothing(n)
    return build(name).add(x, Places.of(x))[0]


def test_sinusoidal_is_the_formula():
    found = table("sinusoidal", 100)
    for p, f in ((0, 0), (1, 0), (7, 5), (99, 15), (50, 1)):
        angle = p / 10_000 ** (2 * f / 32)
        close(found[p, 2 * f], torch.tensor(math.sin(angle), dtype=torch.float64, device=DEVICE))
        close(found[p, 2 * f + 1], torch.tensor(math.cos(angle), dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("shift", [1, 10, 77])
def test_a_shift_of_sinusoidal_is_one_linear_map(shift):
    """PE(p + k) = M_k PE(p) with the same M_k, a rotation in every plane, for all p."""
    turns = [shift / 10_000 ** (2 * f / 32) for f in range(16)]
    blocks = [torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float64) for a in turns]
    move, found = torch.block_diag(*blocks).to(DEVICE), table("sinusoidal", 128)
    close(found[:-shift] @ move, found[shift:])


@pytest.mark.parametrize("name", ADDED)
def test_added_positions_stream_and_skip_padding(name):
    made, x = build(name), data(60)
    whole = made.add(x, Places.of(x))
    parts, t = [], 0
    with torch.no_grad():
        for part in x.split([17, 1, 1, 21, 20], 1):
            parts.append(made.add(part, Places.of(part, start=t)))
            t += part.shape[1]
    close(torch.cat(parts, 1), whole)
    valid = some(3, 60)
    padded = made.add(x, Places.of(x, valid))
    for row in range(3):
        own = x[row][valid[row]][None]
        close(padded[row][valid[row]], made.add(own, Places.of(own))[0])
    ragged = torch.tensor([3, 0, 40], device=DEVICE)
    close(
        made.add(x[:, :5], Places.of(x[:, :5], t=ragged, start=None))[2], made.add(x[2:, :5], Places.of(x[2:, :5], start=40))[0]
    )


@pytest.mark.parametrize("name", [name for name in ADDED if list(build(name).parameters())])
@pytest.mark.parametrize("captured", [False, True])
def test_a_table_follows_weights_that_a_fused_optimiser_changes(name, captured):
    """Such an optimiser leaves the version of a weight as it is; a pass that is captured changes weights without Python."""
    made, x = build(name), nothing(20)
    kept = torch.optim.AdamW(made.parameters(), lr=0.1, fused=True)
    places = Places.of(x)
    made.eval()
    with torch.no_grad():
        before = made.add(x, places)
    if captured:
        made.train()
        for p in made.parameters():
            p.grad = torch.ones_like(p)
        kept.step()
        made.eval()
    else:  # a user may learn without a switch of modes
        made.add(x, places).square().sum().backward()
        kept.step()
    with torch.no_grad():
        after = made.add(x, places)
        fresh = build(name)
        fresh.load_state_dict(made.state_dict())
        close(after, fresh.add(x, places))
    assert not torch.equal(before, after)


def test_recurrent_positions_keep_what_gradients_need_outside_of_training_too(monkeypatch):
    """cuDNN has a backward pass only of a call that asked for one, whatever the mode of the module."""
    asked, real = [], torch.gru
    monkeypatch.setattr(torch, "gru", lambda *given: asked.append(given[6]) or real(*given))
    made = build("rnn").eval()
    made.add(nothing(20), Places.of(nothing(20)))
    with torch.no_grad():
        build("rnn").eval().add(nothing(20), Places.of(nothing(20)))
    assert asked == [True, False]


@pytest.mark.parametrize("name", ["learned", "floater", "rnn"])
def test_what_is_learned_is_not_remembered_too_long(name):
    made = build(name)
    with torch.no_grad():
        before = made.add(nothing(20), Places.of(nothing(20)))
        for p in made.parameters():
            p.add_(0.1)
        after = made.add(nothing(20), Places.of(nothing(20)))
    assert not torch.allclose(before, after)
    made.add(nothing(20), Places.of(nothing(20))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in made.parameters() if p.dim() > 1)


def test_floater_solves_its_equation():
    """Ten times finer steps find the same path."""
    coarse = build("floater")
    fine = positions("floater(every=1)", Dims(32, 4)).double().to(DEVICE)
    fine.load_state_dict(coarse.state_dict())
    found, exact = (one.add(nothing(80), Places.of(nothing(80)))[0] for one in (coarse, fine))
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()
    slope = (exact[2:] - exact[:-2]) / (2 * fine.step)
    times = torch.arange(80, dtype=torch.float64, device=DEVICE) * fine.step
    flow = torch.stack([fine._slope(t, p) for t, p in zip(times, exact, strict=True)])
    assert (slope - flow[1:-1]).abs().max() < 1e-2 * flow.abs().max()


def bucket(distance, half, longest):
    """The paper's bucket of i - j, with as many for later tokens as for earlier ones."""
    exact, far = half // 2, abs(distance)
    within = far if far < exact else exact + int(math.log(far / exact) / math.log(longest / exact) * (half - exact))
    return min(within, half - 1) + (half if distance < 0 else 0)


def dense(q, k, v, where, seen, scale, at=None, keys_at=None):
    """The formulas of the papers with all their n x n x d tensors."""
    i = torch.arange(q.shape[2], device=DEVICE) if at is None else at
    j = torch.arange(k.shape[2], device=DEVICE) if keys_at is None else keys_at
    apart = i[:, None] - j
    s = q @ k.mT * scale
    v = v[:, :, None].expand(-1, -1, q.shape[2], -1, -1)
    if isinstance(where, kinds.Alibi):
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / 4) for h in range(4)], dtype=torch.float64, device=DEVICE)
        s = s - slopes[:, None, None] * apart.abs()
    elif isinstance(where, kinds.Buckets):
        of = [[bucket(distance, where.buckets // 2, where.longest) for distance in row] for row in apart.tolist()]
        s = s + where.table[torch.tensor(of, device=DEVICE)].permute(2, 0, 1)
    else:
        by_distance = apart.clamp(-where.clip, where.clip) + where.clip
        s = s + torch.einsum("bhnd,nmd->bhnm", q, where.keys[by_distance]) * scale
        if where.values is not None:
            v = v + where.values[by_distance]
    s = s.masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), s.softmax(-1), 0)
    return torch.einsum("bhnm,bhnme->bhne", weights, v)


@pytest.mark.parametrize(
    "pattern", ["Everything()", "Local(9) | Global(first=2)", "PerHead([Stride(5), Blocks(16), Dilated(4, 3), Local(20)])"]
)
@pytest.mark.parametrize(
    "where", ["alibi", "relative(clip=4)", "relative(clip=40, values=False)", "relative(clip=0)", "buckets(buckets=8, longest=9)"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_positions_in_scores_are_the_formula(pattern, where, causal):
    n, reach = 70, Pattern.parse(pattern)
    made = core(f"sparse(pattern={pattern})" if pattern != "Everything()" else "softmax", Dims(32, 4, causal=causal)).to(DEVICE)
    where = build(where)
    made.honour(where)
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 4, n, 8, dtype=torch.float64, generator=g).to(DEVICE).requires_grad_() for _ in range(3)]
    i = torch.arange(n, device=DEVICE)
    seen = torch.stack([reach.for_head(h, 4)(0, i[:, None], i) for h in range(4)])
    seen = seen & (i[:, None] >= i) if causal else seen
    up = torch.randn(2, 4, n, 8, dtype=torch.float64, generator=g).to(DEVICE)
    learned = [p for p in where.parameters()]
    found, exact = attend(*inputs, made, causal=causal), dense(*inputs, where, seen, 8**-0.5)
    close(found, exact)
    for a, b in zip(*(torch.autograd.grad((y * up).sum(), [*inputs, *learned]) for y in (found, exact)), strict=True):
        close(a, b)


@pytest.mark.parametrize("where", INSIDE)
def test_cross_attention_counts_from_both_starts(where):
    m = layer("softmax", width=32, heads=4, cross=True, positions=build(where)).to(DEVICE, torch.float64)
    x, c = data(20), data(30, seed=3)
    y = m(x, context=c)
    state, out = m.start(context=c), []
    for part in x.split([1, 12, 7], 1):
        z, state = m.extend(state, part)
        out.append(z)
    close(torch.cat(out, 1), y)
    assert not torch.allclose(y[:, :1], m(x, context=c.flip(1))[:, :1])  # the order of the context counts


ROTARY = [c for c in CASES if c.positions is None and c.can(Can.ROTARY)]


@pytest.mark.parametrize("case", ROTARY, ids=repr)
def test_rotary_feels_distance_alone(case):
    """Turned by positions that all stand 1,000 further, every score stays what it was."""
    made, turn = case.build().core, build("rotary")
    g = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, 4, 40, size, dtype=torch.float64, generator=g).to(DEVICE)
        for size in (made.dims.d * made.streams, *made.sizes)
    )

    def turned(x, start):
        parts = x.split([8] * made.streams + [x.shape[-1] - 8 * made.streams], -1)
        return torch.cat([*(turn.turn(part, Places.of(part[:, 0], start=start)) for part in parts[:-1]), parts[-1]], -1)

    near, far = (attend(turned(q, start), turned(k, start), v, made) for start in (0, 1000))
    close(near, far)
    assert not torch.allclose(near, attend(q, k, v, made))


def test_rotary_is_precise_far_away_in_half_precision():
    turn = positions("rotary", Dims(32, 4)).to(DEVICE, torch.bfloat16)
    x = torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    far = Places.of(x[:, 0], start=1_000_003)
    close(turn.turn(x, far).double(), turn.turn(x.double(), far), 2**-7)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12, 20, 112])
def test_alibi_has_the_slopes_of_bloom(heads):
    """A number of heads that is no power of two is where implementations differ."""
    bloom = pytest.importorskip(
        "transformers.models.bloom.modeling_bloom", reason="pip install transformers, to compare with BLOOM"
    )
    theirs = bloom.build_alibi_tensor(torch.ones(1, 9), heads, torch.float64).view(heads, 9)  # slope times position of the key
    slopes = build("alibi").term(torch.zeros(1, heads, 9, 4), 1.0, torch.arange(9)[None]).slopes
    close(slopes[:, None] * torch.arange(9).double(), theirs, 1e-6)  # their slopes are in float32


@pytest.mark.parametrize(("count", "longest"), [(32, 128), (8, 20), (4, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_t5(count, longest, causal):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="pip install transformers, to compare with T5")
    made = build(f"buckets(buckets={count}, longest={longest})", causal=causal)
    apart = torch.arange(-2 * longest, 2 * longest + 1)
    theirs = t5.T5Attention._relative_position_bucket(-apart, not causal, count, longest)
    ours = torch.tensor(made.classes)[apart.clamp(-made.clip, made.clip) + made.clip]
    assert made.clip < longest and torch.equal(ours, theirs)


def test_scaled_rotary_frequencies_are_those_of_llama():
    """Short waves stay, long ones are stretched by the factor, those between by a share; without a length all of them are."""
    plain, linear = build("rotary", width=128), build("rotary(factor=8)", width=128)
    scaled = build("rotary(factor=8, trained=100, low=1, high=4)", width=128)
    before, after = (one.frequencies(32, torch.device("cpu")) for one in (plain, scaled))
    waves = 2 * math.pi / before
    close(after[waves < 25], before[waves < 25])
    close(after[waves > 100], before[waves > 100] / 8)
    between = (waves > 25) & (waves < 100)
    share = (100 / waves[between] - 1) / 3
    close(after[between], (1 - share) * before[between] / 8 + share * before[between])
    assert between.any()
    close(linear.frequencies(32, torch.device("cpu")), before / 8)


def test_alibi_prefers_neighbours_and_rotary_needs_pairs():
    q = torch.zeros(1, 4, 50, 8, device=DEVICE)
    made = core("softmax", Dims(32, 4)).to(DEVICE)
    made.honour(build("alibi"))
    eye = torch.eye(50, device=DEVICE).expand(1, 4, 50, 50)
    weights = attend(q, q, eye, made)[0, 0, 25]
    assert weights.argmax() == 25 and (weights[25:].diff() < 0).all() and (weights[:26].diff() > 0).all()
    with pytest.raises(ValueError, match="3 per head is an odd number"):
        positions("rotary", Dims(12, 4))


@pytest.mark.parametrize("clip", [0, 1, 5, 40])
def test_sums_by_distance_in_any_order_are_sums(clip):
    """The way without atomics, which a GPU takes, is the plain one, gradients too; pairs that do not exist have weight 0."""
    g = torch.Generator().manual_seed(2)
    apart = torch.arange(30)[:, None] - torch.arange(33)
    x = (torch.randn(2, 4, 30, 33, dtype=torch.float64, generator=g) * (torch.rand(2, 4, 30, 33, generator=g) > 0.3)).to(DEVICE)
    x, apart = x.requires_grad_(), apart.to(DEVICE)
    plain = torch.zeros(2, 4, 30, 2 * clip + 1, dtype=torch.float64, device=DEVICE)
    plain = plain.scatter_add(-1, (apart.clamp(-clip, clip) + clip).expand(x.shape), x)
    found, up = (
        score_bias.sum_by_class_ordered(x, apart, clip),
        torch.randn(plain.shape, dtype=torch.float64, generator=g).to(DEVICE),
    )
    close(found, plain)
    grads = [torch.autograd.grad((y * up).sum(), x)[0] for y in (found, plain)]
    close(*(grad * (x != 0) for grad in grads))  # a weight of 0 moves nothing behind it


def test_relative_positions_make_no_quadratic_tensor():
    n, m = 4096, layer(Local(16), width=32, heads=4, positions="relative(clip=8)")
    with Largest() as watch:
        m(torch.randn(1, n, 32)).sum().backward()
    assert watch.most < n * n / 4


LECTURE = {
    "sinusoidal": PositionProperties(True, False, True),
    "learned": PositionProperties(False, True, False),
    "relative": PositionProperties(False, True, True),
    "floater": PositionProperties(True, True, True),
    "rnn": PositionProperties(True, True, True),
    "rotary": PositionProperties(True, False, True),
    "alibi": PositionProperties(True, False, True),
    "buckets": PositionProperties(False, True, True),
    "sinusoidal_2d": PositionProperties(True, False, True),
    "learned_2d": PositionProperties(False, True, False),
    "rotary_2d": PositionProperties(True, False, True),
    "relative_2d": PositionProperties(False, True, True),
    "none": PositionProperties(False, False, True),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_traits_are_those_of_the_lecture(name):
    assert position_properties(name) == LECTURE[name]


def test_the_table_names_all_positions():
    assert [line.split("`")[1] for line in positions_table().splitlines()[2:]] == list(POSITIONS)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: layer("linear", width=32, heads=4, positions="rotary"), "linear cannot do rotary.*add positions to the tokens"),
        (lambda: layer("linear", width=32, heads=4, positions="alibi"), "linear cannot do relative"),
        (lambda: layer("softmax", width=32, heads=4, positions="sinusoidal"), "sinusoidal positions are added to tokens"),
        (lambda: layer("softmax", width=32, heads=4, positions="rotray"), "rotary"),
        (lambda: layer("softmax", width=32, heads=4, positions="relative(clp=3)"), "clip"),
        (lambda: layer("softmax", width=32, heads=4, positions="relative(clip=-1)"), "clip"),
        (lambda: layer("softmax", width=32, heads=4, positions="3"), "."),
        (lambda: positions("learned", Dims(32, 4)), "max_len"),
        (lambda: build("learned").add(nothing(129), Places.of(nothing(129))), "129 tokens, but only 128 positions were learned"),
        (lambda: build("sinusoidal").add(nothing(5, width=16), Places.of(nothing(5))), "tokens of width 32, not 16"),
        (lambda: positions("rotary(base=0)", Dims(32, 4)), "base must be a number above 1"),
        (lambda: positions("rotary(factor=0)", Dims(32, 4)), "factor, low and high are positive numbers"),
        (lambda: positions("rotary(factor=2, low=4, high=1)", Dims(32, 4)), "low below high"),
        (lambda: positions("rotary(trained=0)", Dims(32, 4)), "trained"),
        (lambda: positions("buckets(buckets=7)", Dims(32, 4)), "even number where both sides count"),
        (lambda: positions("buckets(longest=8)", Dims(32, 4)), "longest is above 8, not 8"),
    ],
)
def test_bad_positions_get_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_floater_without_its_solver_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchdiffeq", None)
    with pytest.raises(ModuleNotFoundError, match=r"regard\[floater\]"):
        build("floater")


# floater in every block


def entered(**options):
    torch.manual_seed(0)
    given = {"width": 32, "heads": 4, "depth": 3, "positions": "floater(every_block=True)", **options}
    return Stack.of("softmax", **given).to(DEVICE, torch.float64).eval()


def test_floater_enters_every_block():
    """The paper's form: x + p_b(t) in front of block b, each path from a start of its own, all by the same flow."""
    body, x = entered(), data(9)
    names = [name for name, _ in body.named_parameters() if "positions" in name]
    assert all(name.startswith("blocks.0.positions.") for name in names) and len(names) == 5
    floater = body.blocks[0].positions
    y = x
    for number, block in enumerate(body):
        alone = build("floater")
        alone.load_state_dict({**floater.state_dict(), "first": floater.first[number]})
        y = Block.forward(block, alone.add(y, Places.of(y)))
    close(body(x), body.final_norm(y))
    first = torch.autograd.grad(body(x).square().sum(), floater.first)[0]
    assert (first.abs().amax(1) > 0).all()  # every block has a path of its own, and it is felt


def test_floater_in_every_block_streams_and_pads():
    body, x = entered(causal=True), data(20)
    whole = body(x)
    state, parts = body.start(3), []
    for piece in x.split([7, 1, 12], 1):
        y, state = body.extend(state, piece)
        parts.append(y)
    close(torch.cat(parts, 1), whole)
    valid = some(3, 20)
    padded = body(x, valid)
    for row in range(3):
        close(padded[row, valid[row]][None], body(x[row : row + 1, valid[row]]))
    same = copy.deepcopy(body)
    same.load_state_dict(body.state_dict())
    close(same(x), whole)


def test_floater_in_every_block_of_a_language_model():
    config = Config(mixer="softmax", positions="floater(every_block=True)", width=32, heads=4, depth=2, ffn=32, max_len=64)
    model = language_model(config, vocab=20).to(DEVICE, torch.float64).eval()
    tokens = torch.randint(5, 20, (2, 11), device=DEVICE)
    state, parts = model.start(2), []
    for piece in tokens.split([4, 1, 6], 1):
        y, state = model.extend(state, piece)
        parts.append(y)
    close(torch.cat(parts, 1), model(tokens))
    assert not model(tokens)[:, 1:].allclose(model(tokens.roll(1, 1))[:, 1:].roll(-1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("floater(every_block=True)").add(nothing(3), Places.of(nothing(3))), "Stack.of"),
        (lambda: build("floater(every_block=3)"), "True or False"),
        (lambda: Tokens(9, 32, positions=build("floater(every_block=True)")), "enter every block: give them to the stack"),
        (lambda: layer("softmax", width=32, heads=4, positions="floater(every_block=True)"), "floater"),
        (lambda: ReversibleStack.of("softmax", width=32, heads=4, depth=2, positions="floater(every_block=True)"), "recomputed"),
    ],
)
def test_floater_in_every_block_is_for_stacks(make, message):
    with pytest.raises(ValueError, match=message):
        make()
