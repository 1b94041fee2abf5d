"""Readers that keep their place: weights are what their definitions say, steps equal the whole pass, and they learn to follow."""

import itertools
import math

import pytest
import torch

from conftest import DEVICE, close
from regard.blocks.block import Block
from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.config import Config
from regard.data.batch import shifted
from regard.decoding import Constraints, beam
from regard.mixers.base import Dims
from regard.models.build import translator
from regard.models.guided import (
    ALIGNERS,
    LocationAligner,
    MonotonicAligner,
    SoftmaxAligner,
    guided,
    guided_translator,
    record_alignments,
)
from regard.spec import Spec
from regard.training.guided_loss import guided_attention_loss
from regard.training.losses import cross_entropy

WIDTH, HEADS, B, N, M = 16, 2, 2, 6, 5
DIMS = Dims(WIDTH, HEADS, cross=True, max_len=32)
MAKE = {
    "plain": SoftmaxAligner,
    "monotonic": lambda dims: MonotonicAligner(dims, hard=False),
    "monotonic, not kept": lambda dims: MonotonicAligner(dims, hard=False, keep=False),
    "monotonic, hard": MonotonicAligner,
    "monotonic, additive": lambda dims: MonotonicAligner(dims, hard=False, energy="additive", lean=-0.3),
    "location": lambda dims: LocationAligner(dims, window=3),
}
every = pytest.mark.parametrize("kind", MAKE)


def made(kind, seed=0):
    torch.manual_seed(seed)
    reader = MAKE[kind](DIMS).to(DEVICE, torch.float64).eval()
    with torch.no_grad():
        reader.q.weight.mul_(2)
        reader.k.weight.mul_(2)
        if isinstance(reader, LocationAligner):
            reader.near.weight.mul_(8)
    return reader


def tokens(n, seed):
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(B, n, WIDTH, generator=dice, dtype=torch.float64).to(DEVICE)


def masks():
    valid = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 0, 0]], dtype=torch.bool, device=DEVICE)
    asked = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 0, 1]], dtype=torch.bool, device=DEVICE)
    return valid, asked


def scores(reader, x, context):
    """q.k / sqrt(d) by loops over nothing but heads: (b h m n)."""
    d = WIDTH // HEADS
    q, k = reader.q(x), reader.k(context)
    return torch.stack([q[..., h * d : h * d + d] @ k[..., h * d : h * d + d].mT / math.sqrt(d) for h in range(HEADS)], 1)


def walks(stop):
    """All walks that stop at t_1 <= t_2 <= ... (m n probabilities), each with its chance: the weights they give on average."""
    m, n = stop.shape
    weights = [[0.0] * n for _ in range(m)]
    for walk in itertools.combinations_with_replacement([*range(n), n], m):  # n: off the end, where a walk stays
        chance, at = 1.0, 0
        for i, place in enumerate(walk):
            for j in range(at, min(place, n)):
                chance = chance * (1 - stop[i, j])
            chance = chance * (stop[i, place] if place < n else 1.0)
            at = place
        for i, place in enumerate(walk):
            if place < n:
                weights[i][place] = weights[i][place] + chance
    return torch.stack([torch.stack([torch.as_tensor(w, dtype=stop.dtype, device=DEVICE) for w in row]) for row in weights])


@pytest.mark.parametrize("keep", [False, True])
def test_soft_monotonic_weights_are_the_mean_over_all_walks_and_so_are_gradients(keep):
    reader = made("monotonic" if keep else "monotonic, not kept")
    x, context = tokens(4, 1), tokens(5, 2).requires_grad_()
    stop = torch.sigmoid(scores(reader, x, context) + reader.lean[:, None, None])
    if keep:
        stop = torch.cat([stop[..., :-1], torch.ones_like(stop[..., -1:])], -1)
    slow = torch.stack([torch.stack([walks(stop[b, h]) for h in range(HEADS)]) for b in range(B)])
    fast = reader.weights(x, context)
    close(fast, slow)
    wanted = torch.randn_like(slow)
    parts = [reader.q.weight, reader.k.weight, reader.lean, context]
    for a, b in zip(
        torch.autograd.grad((fast * wanted).sum(), parts), torch.autograd.grad((slow * wanted).sum(), parts), strict=True
    ):
        close(a, b)
    if keep:
        close(fast.sum(-1), torch.ones(B, HEADS, 4, dtype=torch.float64, device=DEVICE))


def test_the_additive_energy_is_the_published_one():
    """g v.tanh(W s + V h + b) / |v| + r, pair by pair; the noise of training is added to it before the sigmoid."""
    reader, x, context = made("monotonic, additive"), tokens(3, 1), tokens(4, 2)
    reader.keep = False
    q, k = (part.unflatten(-1, (HEADS, -1)) for part in (reader.q(x), reader.k(context)))
    energy = torch.zeros(B, HEADS, 3, 4, dtype=torch.float64, device=DEVICE)
    for b, h, i, j in itertools.product(range(B), range(HEADS), range(3), range(4)):
        v = reader.u[h]
        energy[b, h, i, j] = reader.gain[h] * (v @ torch.tanh(q[b, i, h] + k[b, j, h])) / v.norm() + reader.lean[h]
    assert reader.gain[0].item() == pytest.approx(DIMS.d**-0.5)

    def weighed(scores):
        stop = scores.sigmoid()
        return torch.stack([torch.stack([walks(stop[b, h]) for h in range(HEADS)]) for b in range(B)])

    fast, slow = reader.weights(x, context), weighed(energy)
    close(fast, slow)
    parts = [reader.q.weight, reader.q.bias, reader.k.weight, reader.u, reader.gain, reader.lean]
    both = [torch.autograd.grad(y.square().sum(), parts) for y in (fast, slow)]
    for a, b in zip(*both, strict=True):
        close(a, b)
    torch.manual_seed(3)
    noisy = reader.train().weights(x, context)
    torch.manual_seed(3)
    close(noisy, weighed(energy + torch.randn_like(energy)))


@pytest.mark.parametrize("keep", [False, True])
def test_hard_monotonic_walks_on_to_the_first_stop_and_equals_soft_where_it_is_certain(keep):
    reader = made("monotonic")
    reader.keep = keep
    with torch.no_grad():
        reader.q.weight.mul_(1e4)
        reader.q.bias.mul_(1e4)
    x, context = tokens(4, 1), tokens(N, 2)
    soft = reader.weights(x, context)
    reader.hard = True
    hard = reader.weights(x, context)
    close(hard, soft)
    stops = scores(reader, x, context) + reader.lean[:, None, None] > 0
    for b, h in itertools.product(range(B), range(HEADS)):
        at = 0
        for i in range(4):
            while at < N and not stops[b, h, i, at] and not (keep and at == N - 1):
                at += 1
            assert hard[b, h, i].tolist() == [float(j == at) for j in range(N)]


def test_saturated_or_long_walks_have_finite_gradients_in_float32():
    reader = MonotonicAligner(DIMS, hard=False).to(DEVICE)
    with torch.no_grad():
        reader.q.weight.mul_(1e4)
    x, context = tokens(9, 1).float(), tokens(32, 2).float()
    reader(x, context=context).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in reader.parameters())


def test_location_weights_are_their_definition_step_by_step():
    reader = made("location")
    x, context, d = tokens(M, 1), tokens(N, 2), WIDTH // HEADS
    q, k, fast = reader.q(x), reader.k(context), reader.weights(x, context)
    for b, h in itertools.product(range(B), range(HEADS)):
        own, before = slice(h * d, h * d + d), [0.0] * N
        for i in range(M):
            energies = []
            for j in range(N):
                near = torch.zeros(d, dtype=torch.float64, device=DEVICE)
                for s in range(3):
                    if 0 <= j + s - 1 < N:
                        near = near + reader.near.weight[own, 0, s] * before[j + s - 1]
                energies.append((reader.u[h] * torch.tanh(q[b, i, own] + k[b, j, own] + near)).sum())
            before = torch.stack(energies).softmax(0)
            close(fast[b, h, i], before)


@every
def test_outputs_are_weights_times_values_and_steps_equal_the_whole_pass(kind):
    reader, x, context = made(kind), tokens(M, 1), tokens(N, 2)
    y, weights = reader(x, context=context), reader.weights(x, context)
    v = reader.v(context).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    close(y, reader.out((weights @ v).transpose(1, 2).flatten(2)))
    for cuts in ([1] * M, [2, 0, 3]):
        state, parts = reader.start(context=context), []
        for part in x.split(cuts, 1):
            step, state = reader.extend(state, part)
            parts.append(step)
        close(torch.cat(parts, 1), y)


@every
def test_padding_of_source_and_target_is_as_if_absent(kind):
    reader, x, context = made(kind), tokens(M, 1), tokens(N, 2)
    valid, asked = masks()
    y = reader(x, context=context, valid=valid, query_valid=asked)
    weights = reader.weights(x, context, valid=valid, query_valid=asked)
    garbled = context.masked_fill(~valid[..., None], 1e3)
    close(reader(x, context=garbled, valid=valid, query_valid=asked), y)
    assert (y[~asked] == 0).all()
    for b in range(B):
        close(y[b : b + 1, asked[b]], reader(x[b : b + 1, asked[b]], context=context[b : b + 1, valid[b]]))
        alone = reader.weights(x[b : b + 1, asked[b]], context[b : b + 1, valid[b]])[0]
        close(weights[b][:, asked[b]][..., valid[b]], alone)
        assert (weights[b][..., ~valid[b]] == 0).all() and (weights[b][:, ~asked[b]] == 0).all()
    state, parts = reader.start(context=context, valid=valid), []
    for i in range(M):
        step, state = reader.extend(state, x[:, i : i + 1], asked[:, i : i + 1])
        parts.append(step)
    close(torch.cat(parts, 1), y)


@every
def test_rows_of_a_state_can_be_reordered_and_a_source_of_padding_alone_says_nothing(kind):
    reader, x, context = made(kind), tokens(M, 1), tokens(N, 2)
    valid, _ = masks()
    rows = torch.tensor([1, 0, 1], device=DEVICE)
    _, state = reader.extend(reader.start(context=context, valid=valid), x[:, :2])
    ahead, _ = reader.extend(state, x[:, 2:])
    turned, _ = reader.extend(state.select(rows), x[rows, 2:])
    close(turned, ahead[rows])
    valid[0] = False
    assert (reader.weights(x, context, valid=valid)[0] == 0).all()
    assert reader(x, context=context, valid=valid).isfinite().all()


def small(kind, **changes):
    torch.manual_seed(0)
    config = Config(width=32, heads=2, depth=1, decoder_depth=2, ffn=32, dropout=0.0, max_len=32)
    return guided_translator(config.replace(changes), 12, kind).to(DEVICE, torch.float64).eval()


@pytest.mark.parametrize("kind", ALIGNERS)
def test_a_translator_with_such_readers_streams_and_searches_with_beams(kind):
    model = small(kind)
    source = torch.randint(5, 12, (3, 7), device=DEVICE)
    told = torch.randint(5, 12, (3, 4), device=DEVICE)
    whole, state = model(source, None, told), model.start(source)
    for t in range(4):
        step, state = model.extend(state, told[:, t : t + 1])
        close(step[:, 0], whole[:, t])
    begin = torch.full((3, 1), 2, device=DEVICE)
    found = beam(model, model.start(source), begin, constraints=Constraints(eos=3, max_new_tokens=5), width=3)
    for b in range(3):
        said = found.tokens[b, 0, : found.lengths[b, 0]].tolist()
        scores = model(source[b : b + 1], None, torch.tensor([[2, *said[:-1]]], device=DEVICE)).log_softmax(-1)[0]
        total = sum(scores[t, word].item() for t, word in enumerate(said))
        assert total / len(said) == pytest.approx(found.scores[b, 0].item(), abs=1e-9)


def test_watched_weights_are_those_of_the_pass_and_gradients_go_through_them():
    model = small("location").train()
    source, told = torch.randint(5, 12, (3, 7), device=DEVICE), torch.randint(5, 12, (3, 4), device=DEVICE)
    with record_alignments(model) as weights:
        model(source, None, told)
    assert [tuple(w.shape) for w in weights] == [(3, 2, 4, 7)] * 2
    sum(guided_attention_loss(w).total for w in weights).backward()
    assert all(block.cross.near.weight.grad.abs().sum() > 0 for block in model.decoder)
    model(source, None, told)
    assert len(weights) == 2  # nobody watches any more
    with pytest.raises(ValueError, match="guided_translator"), record_alignments(torch.nn.Linear(1, 1)):
        pass


def test_only_the_last_block_can_be_guided_and_a_reader_stands_in_any_block():
    model = guided_translator(Config(width=16, heads=2, depth=2, ffn=16), 9, "monotonic", blocks="last")
    assert [isinstance(block.cross, MonotonicAligner) for block in model.decoder] == [False, True]
    own = Spec("softmax").build(Dims(WIDTH, HEADS, causal=True))
    stack = Stack([Block(own, FeedForward(WIDTH, 16), cross=LocationAligner(DIMS))]).to(DEVICE, torch.float64)
    assert stack(tokens(M, 1), context=tokens(N, 2)).shape == (B, M, WIDTH)


def test_the_guided_attention_loss_is_its_formula_counted_over_real_tokens():
    weights = torch.rand(B, HEADS, M, N, dtype=torch.float64, device=DEVICE)
    valid, asked = masks()
    total = 0.0
    for b in range(B):
        rows, columns = asked[b].nonzero()[:, 0].tolist(), valid[b].nonzero()[:, 0].tolist()
        for h, (i, row), (j, column) in itertools.product(range(HEADS), enumerate(rows), enumerate(columns)):
            far = j / len(columns) - i / len(rows)
            total += weights[b, h, row, column] * (1 - math.exp(-(far**2) / (2 * 0.3**2))) / HEADS
    loss = guided_attention_loss(weights, valid, asked, sharpness=0.3)
    close(loss.total, total)
    assert loss.over.item() == asked.sum().item()
    straight = torch.eye(8, device=DEVICE)[None, None]
    assert guided_attention_loss(straight).total.item() == 0.0 < guided_attention_loss(straight.flip(-1)).total.item()


def spelled(b, n=5):
    """n different symbols of 5 .. 13, each said 1 to 3 times, by its number: source, target with its END, and the truth."""
    source = torch.stack([torch.randperm(9)[:n] + 5 for _ in range(b)])
    often = (1 + source % 3).tolist()
    truth = [[j for j, times in enumerate(row) for _ in range(times)] for row in often]
    target = [[*row[marks].tolist(), 3] for row, marks in zip(source, truth, strict=True)]
    m = max(map(len, target))
    target, truth = (torch.tensor([row + [fill] * (m - len(row)) for row in rows]) for rows, fill in ((target, 0), (truth, -1)))
    return source.to(DEVICE), target.to(DEVICE), truth.to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "guide", "steps", "lr"), [("monotonic", 0.0, 200, 1.2e-2), ("location", 0.0, 130, 1e-2), ("plain", 1.0, 130, 1e-2)]
)
def test_an_aligned_task_is_learned_with_alignments_that_move_forwards(kind, guide, steps, lr):
    torch.manual_seed(0)
    model = guided_translator(Config(width=32, heads=1, depth=1, ffn=64, dropout=0.0, max_len=32), 14, kind).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)

    def passed(b):
        source, target, truth = spelled(b)
        with record_alignments(model) as weights:
            scores = model(source, None, shifted(target), target > 0)
        return scores, target, truth, weights[0]

    for _ in range(steps):
        scores, target, _, weights = passed(32)
        loss = cross_entropy(scores, target, target > 0).mean + guide * guided_attention_loss(weights, None, target > 0).mean
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        scores, target, truth, weights = passed(200)
    at, inside = weights[:, 0].argmax(-1), truth >= 0
    assert (at[:, 1:] >= at[:, :-1])[inside[:, 1:]].double().mean() > 0.95
    assert ((at - truth).abs() <= 1)[inside].double().mean() > 0.95
    assert (scores.argmax(-1) == target)[target > 0].double().mean() > 0.95


def test_bad_options_get_a_sentence():
    for make, sentence in [
        (lambda: guided_translator(Config(), 9, "monotone"), "did you mean 'monotonic'"),
        (lambda: guided_translator(Config(), 9, blocks="first"), "blocks cannot be"),
        (lambda: LocationAligner(DIMS, window=4), "window must be odd"),
        (lambda: MonotonicAligner(Dims(WIDTH, HEADS)), "cross=True"),
        (lambda: MonotonicAligner(DIMS, noise=-1), "at least 0"),
        (lambda: MonotonicAligner(DIMS, energy="tanh"), "energy cannot be 'tanh'"),
        (lambda: guided_attention_loss(torch.zeros(1, 1, 2, 2), sharpness=0), "above 0"),
        (lambda: SoftmaxAligner(DIMS).start(3), "starts from what it reads"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            make()


@pytest.mark.parametrize("training", [True, False])
def test_a_reader_put_into_a_model_learns_or_rests_as_the_model_does(training):
    model = translator(Config(width=WIDTH, heads=HEADS, depth=2, ffn=16), 11).train(training)
    assert {part.training for part in guided(model, MonotonicAligner, blocks="last").modules()} == {training}


def test_a_cross_attention_that_nobody_would_hear_of_is_refused():
    config = Config(width=WIDTH, heads=HEADS, depth=2, ffn=16, cross="linear")
    with pytest.raises(ValueError, match="cross='linear'"):
        guided_translator(config, 11)
    guided_translator(config, 11, blocks="last")  # there the first block reads by it


def test_the_diagonal_is_summed_in_full_precision_under_autocast():
    weights = torch.rand(4, 8, 60, 50, device=DEVICE).softmax(-1)
    whole = guided_attention_loss(weights).total
    with torch.autocast(DEVICE.type, torch.bfloat16):
        half = guided_attention_loss(weights).total
    assert half.dtype == torch.float32 and half.item() == pytest.approx(whole.item(), rel=1e-6)
