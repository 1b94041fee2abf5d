"""Techniques of training that tasks offer: hidden tokens, changed images, pooling, padded lengths. Each is an option."""

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

from regard.arena import image_changes
from regard.arena.arena_catalogue import ARENA, arena_task
from regard.arena.arena_task import IGNORED
from regard.arena.hidden_tokens import hide_tokens
from regard.arena.listops import CLOSE, DIGIT, OPERATOR, _operator_value, subtree_values
from regard.compare.compared_model import build_model
from regard.compare.device_split import DeviceSplit
from regard.compare.training_step import TrainingStep
from regard.models.heads import pooled

MASK = 256


def seeded():
    return torch.Generator().manual_seed(0)


def squares(count=200, side=32):
    """Images with one bright pixel off the middle."""
    images = torch.zeros(count, side, side)
    images[:, 10, 20] = 255
    return images


def test_hidden_tokens_are_asked_for_and_padding_never_is():
    tokens = torch.randint(1, 256, (100, 300), generator=seeded())
    valid = torch.arange(300) < torch.randint(100, 301, (100, 1), generator=seeded())
    found = hide_tokens(tokens, valid, 0.3, MASK, seeded())
    asked = found.targets != IGNORED
    assert torch.equal(found.targets[asked], tokens[asked]) and torch.equal(found.tokens[~asked], tokens[~asked])
    assert not (asked & ~valid).any()
    assert asked.sum() / valid.sum() == pytest.approx(0.3, abs=0.01)
    assert (found.tokens[asked] == MASK).float().mean() == pytest.approx(2 / 3, abs=0.02)
    others = found.tokens[asked & (found.tokens != MASK)]
    assert others.min() >= 1 and others.max() <= 255 and len(others.unique()) > 200


@pytest.mark.parametrize("form", ["text", "retrieval"])
def test_the_loss_of_hidden_bytes_is_added_on_the_same_pass(form):
    """The step's loss is that of the label, on changed bytes, plus the cross entropy of what was hidden, computed apart."""
    task = arena_task(f"{form}(length=32, masked=0.3)")
    plain = arena_task(f"{form}(length=32)")
    assert (plain.vocab, task.vocab) == (256, 257) and build_model(plain, "softmax", plain.model()).side_head is None
    torch.manual_seed(0)
    model = build_model(task, "softmax", task.model())
    shape = (4, 2, 32) if form == "retrieval" else (4, 32)
    tokens = torch.randint(1, 256, shape, generator=seeded())
    split = DeviceSplit(tokens.to(torch.uint8), torch.tensor([0, 1, 1, 0]), torch.full(shape[:-1], 20), None)
    step = TrainingStep(model, task, split, task.budget())
    step.index = torch.arange(4)
    torch.manual_seed(1)
    loss = step._loss(None).detach()
    torch.manual_seed(1)
    valid = (torch.arange(32) < 20).expand(shape)
    hidden = hide_tokens(tokens, valid, 0.3, MASK)
    seen = hidden.tokens.reshape(-1, 32)
    places = model.embed.places(seen, valid.reshape(-1, 32))
    y = model.stack(model.embed(seen, places), places)
    label = F.cross_entropy(model(hidden.tokens, valid), split.targets)
    asked = hidden.targets.reshape(-1, 32)
    token = F.cross_entropy(model.side_head(y)[asked != IGNORED], asked[asked != IGNORED])
    assert asked[:, 20:].eq(IGNORED).all() and torch.allclose(loss, label + token)
    step(torch.arange(4), 1e-3)
    assert model.side_head.map.weight.grad.abs().sum() > 0


def test_a_mechanism_with_fewer_answers_cannot_name_hidden_tokens():
    task = arena_task("text(length=32, masked=0.3)")
    with pytest.raises(ValueError, match="fewer answers than it has tokens, and text needs one for each"):
        build_model(task, "pooled_queries(rate=2)", task.model())
    with pytest.raises(ValueError, match=r"masked must be from 0 to below 1, not 1\.0"):
        arena_task("text(masked=1)")


def test_steps_of_several_lengths_are_those_of_padded_batches():
    """A batch cut to its longest example has the same gradient as the padded one: padding is as if absent."""
    task = arena_task("text(length=32)")
    tokens = torch.randint(1, 256, (4, 32), generator=seeded()).to(torch.uint8)
    split = DeviceSplit(tokens, torch.tensor([0, 1, 1, 0]), torch.tensor([9, 3, 16, 12]), None)
    found = []
    for length in (None, 16):
        torch.manual_seed(0)
        step = TrainingStep(build_model(task, "Local(4)", task.model()), task, split, task.budget())
        step(torch.arange(4), 1e-3, length)
        found.append([p.grad for p in step.model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_smooth_maximum():
    """Between the mean and the maximum; the maximum of sharp channels; padding is as if absent, also where all is padding."""
    x = torch.randn(3, 7, 5, dtype=torch.float64, generator=seeded())
    y = pooled(x, None, "smooth")
    assert torch.allclose(y, (x.softmax(1) * x).sum(1)) and (y > x.mean(1)).all() and (y < x.amax(1)).all()
    assert torch.allclose(pooled(x * 1e4, None, "smooth"), pooled(x * 1e4, None, "max"))
    valid = torch.arange(7) < torch.tensor([[7], [4], [0]])
    masked = pooled(x, valid, "smooth")
    assert torch.allclose(masked[:2], torch.stack([y[0], pooled(x[1:2, :4], None, "smooth")[0]])) and not masked[2].any()


def test_flips_and_turns_move_pixels_and_no_more():
    images = squares()
    flipped = image_changes.flip(images, seeded())
    ahead = flipped[:, 10, 20] == 255
    assert 60 < ahead.sum() < 140 and (flipped[~ahead][:, 10, 11] == 255).all()
    turned = image_changes.quarter_turns(images, seeded())
    assert torch.equal(turned.sum((1, 2)), images.sum((1, 2)))
    spots = {tuple(spot) for spot in turned.nonzero()[:, 1:].tolist()}
    assert spots == {(10, 20), (11, 10), (21, 11), (20, 21)}


def test_an_affine_change_is_small_and_the_identity_changes_nothing():
    images = squares()
    same = image_changes.affine(images, None, degrees=0, shift=0, scales=(1, 1))
    assert torch.equal(same, images)
    wide = torch.zeros(300, 32, 32)
    wide[:, 14:18, 14:18] = 255
    moved = image_changes.affine(wide, seeded(), degrees=0, shift=0.1, scales=(1, 1))
    middle = moved.nonzero()[:, 1:].double()
    assert middle.min() >= 14 - 4 and middle.max() <= 17 + 4 and middle.min() <= 11 and middle.max() >= 20
    smaller = image_changes.affine(wide, seeded(), degrees=0, shift=0, scales=(0.5, 0.5))
    assert smaller.sum() == wide.sum() / 4


@pytest.mark.parametrize("change", image_changes.GRAY_CHANGES)
def test_changes_of_gray_levels_have_a_neutral_strength(change):
    images = torch.rand(20, 8, 8, generator=seeded()) * 255
    none, full = (change(images, torch.full((20, 1, 1), x)) for x in (0.0, 1.0))
    if change is image_changes.full_range:
        assert full.amin() == 0 and full.amax((1, 2)).allclose(torch.tensor(255.0))
    elif change is image_changes.posterize:
        assert (none - images).abs().max() < 2 and (full % 16 == 0).all()
    else:
        assert torch.allclose(none, images, atol=1e-3) and not torch.allclose(full, images, atol=1)
    if change is image_changes.solarize:
        assert torch.allclose(full, 255 - images)


@pytest.mark.parametrize("text", ["image(augmented=True)", "pathfinder(augmented=True)"])
def test_augmented_images_stay_images(text):
    task = arena_task(text)
    tokens = torch.randint(0, 256, (64, 1024), generator=seeded())
    targets = torch.arange(64)
    found, same = task.augment(tokens, targets, seeded())
    assert found.shape == tokens.shape and found.dtype == tokens.dtype and torch.equal(same, targets)
    assert found.min() >= 0 and found.max() <= 255
    assert ((found != tokens).float().mean(1) > 0.3).float().mean() > 0.7
    assert arena_task(text.partition("(")[0]).augment(tokens, targets, None)[0] is tokens


def values_at_brackets(row):
    """The value of every operator of one tree at its bracket, by a stack."""
    found, stack = [IGNORED] * len(row), []
    for place, token in enumerate(row):
        if token == CLOSE:
            operator, digits = stack.pop()
            found[place] = _operator_value(operator, digits)
            if stack:
                stack[-1][1].append(found[place])
        elif token >= OPERATOR:
            stack.append((token - OPERATOR, []))
        elif token >= DIGIT:
            stack[-1][1].append(token - DIGIT)
    return found


@pytest.mark.parametrize("length, depth", [(40, 3), (300, 10)])
def test_every_operator_has_its_value_at_its_bracket(length, depth):
    task = arena_task(f"listops(length={length}, depth={depth}, subtrees=True, shuffled=True)")
    made = task.first_examples("test", 200)
    tokens, _ = task.augment(made.tokens.long(), made.targets, seeded())
    found = subtree_values(tokens, depth - 1)
    assert found.tolist() == [values_at_brackets(row) for row in tokens.tolist()]
    last = (made.lengths.long() - 1)[:, None]
    assert torch.equal(found.gather(1, last)[:, 0], made.targets)  # that of the root is the label
    assert torch.equal(subtree_values(made.tokens, depth - 1).gather(1, last)[:, 0], made.targets)  # of bytes too


def test_the_loss_of_subtrees_is_added_on_the_same_pass():
    task = arena_task("listops(length=40, depth=4, subtrees=True)")
    plain = arena_task("listops(length=40, depth=4)")
    assert build_model(plain, "softmax", plain.model()).side_head is None
    made = task.first_examples("test", 8)
    torch.manual_seed(0)
    model = build_model(task, "softmax", task.model())
    split = DeviceSplit(made.tokens, made.targets, made.lengths, None)
    step = TrainingStep(model, task, split, task.budget())
    step.index = torch.arange(8)
    valid = torch.arange(40) < made.lengths[:, None]
    scores, values = model.with_side_scores(made.tokens.long(), valid)
    asked = torch.tensor([values_at_brackets(row) for row in made.tokens.tolist()])
    expected = F.cross_entropy(scores, made.targets) + F.cross_entropy(
        values.flatten(0, 1), asked.flatten(), ignore_index=IGNORED
    )
    assert torch.allclose(step._loss(None), expected)
    assert torch.equal(scores, model(made.tokens.long(), valid))  # what is scored knows nothing of it


@pytest.mark.parametrize("text", ["image(augmented=True)", "pathfinder(augmented=True)", "listops(shuffled=True)"])
def test_no_change_reads_data_on_the_host(text):
    """On the meta device there is nothing to read: shapes are constant, and a step can be captured."""
    task = arena_task(text)
    tokens = torch.zeros(4, task.length, dtype=torch.long, device="meta")
    found, _ = task.augment(tokens, tokens[:, 0], None)
    assert found.shape == tokens.shape
    hidden = hide_tokens(tokens, tokens > 0, 0.3, MASK)
    assert hidden.tokens.shape == hidden.targets.shape == tokens.shape
    assert subtree_values(tokens, 9).shape == tokens.shape


def test_a_cut_square_is_gray():
    images = torch.zeros(400, 32, 32)
    found = image_changes.cut_out(images, seeded(), 10)
    gray = (found == image_changes.GRAY).sum((1, 2))
    assert 150 < (gray > 0).sum() < 250 and gray.max() == 100 and ((found == 0) | (found == image_changes.GRAY)).all()


@pytest.mark.parametrize("name", ARENA)
def test_techniques_are_options_of_training_alone(name):
    """They are off unless asked for, and without them a task is the one whose splits and floors are kept."""
    task = arena_task(name)
    assert task.plain() == task and set(task.techniques) <= {field.name for field in fields(task)}
    assert not any(f"{technique}=" in str(task) for technique in task.techniques)  # new ones leave records of older cells valid
    assert arena_task(str(task)) == task
    for technique in task.techniques:
        changed = replace(task, **{technique: 0.3 if technique == "masked" else True})
        assert changed != task and changed.plain() == task and arena_task(str(changed)) == changed
