"""Pathfinder: dashes that form paths, paths that keep away from each other, dots at the ends that the label tells."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from regard.arena import dashed_paths, pathfinder
from regard.arena.arena_catalogue import arena_task
from regard.arena.dashed_paths import Canvas, Dashes, direction

SMALL = "pathfinder(contour=6, train=40, val=20, test=20)"


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch):
    monkeypatch.setattr(pathfinder, "BATCHES", {32: 64, 128: 24})


@pytest.fixture(scope="module", params=[32, 128])
def grown(request):
    """A canvas with two long paths in each image, the ends of these, and distractors."""
    style = pathfinder.STYLES[request.param]
    canvas = Canvas(np.random.default_rng(0), style, 64)
    ends = canvas.long_paths(9)
    return canvas, ends, canvas.distractors(4, 3, 8)


def heads(canvas, dash):
    return dash.tail + canvas.style.dash * direction(dash.angle)


def test_dashes_follow_one_another(grown):
    """A gap of at most two margins, a bounded turn, and nothing outside of the padding."""
    canvas, ends, _ = grown
    style, long = canvas.style, canvas.dashes[:18]
    assert len(ends) > 20
    for path in (0, 1):
        own = long[path::2]
        assert np.allclose(own[0].tail, ends[:, path, 0]) and np.allclose(heads(canvas, own[-1]), ends[:, path, 1])
        for last, dash in pairwise(own):
            gap = np.linalg.norm(dash.tail - heads(canvas, last), axis=-1)
            assert (gap <= 2 * style.margin + 1e-4).all() and (gap >= 2 * style.margin * np.cos(np.pi / 4) - 1e-4).all()
            assert (np.abs(dash.angle - last.angle) <= np.pi / 2 / style.turn + 1e-4).all()
    for dash in canvas.dashes:
        for points in (dash.tail[dash.alive], heads(canvas, dash)[dash.alive]):
            assert (points >= style.padding - 1e-4).all() and (points <= style.size - style.padding + 1e-4).all()
    seeds = np.linalg.norm(ends[:, 0, 0] - ends[:, 1, 0], axis=-1)
    assert np.allclose(seeds, style.seeds, atol=1e-3)


def test_paths_keep_away_from_each_other(grown):
    """Dashes of different paths, and of one path unless they are neighbours, up to the rounding of cells."""
    canvas, _, count = grown
    style = canvas.style
    steps = np.linspace(0, style.dash, 9)[:, None]
    points = np.stack([dash.tail[:, None] + steps * direction(dash.angle)[:, None] for dash in canvas.dashes], 1)
    alive = np.stack([dash.alive for dash in canvas.dashes], 1)
    path = [i % 2 for i in range(18)] + [2 + i // 3 for i in range(len(canvas.dashes) - 18)]
    place = [i // 2 for i in range(18)] + [i % 3 for i in range(len(canvas.dashes) - 18)]
    assert (alive[:, 18:].sum(1) == 3 * count).all() and count.max() == 4
    least = style.margin + style.thickness / 2 - 1.5 / style.cells
    for i in range(len(path)):
        for j in range(i):
            if path[i] != path[j] or abs(place[i] - place[j]) > 1:
                both = alive[:, i] & alive[:, j]
                near = np.linalg.norm(points[both, i, :, None] - points[both, j, None], axis=-1)
                assert not both.any() or near.min() > least, (i, j, near.min())


def test_marks_are_taken_back_exactly(grown):
    """What is occupied is what the dashes of the long paths occupy: those taken back left nothing."""
    canvas, _, _ = grown
    again = Canvas(np.random.default_rng(0), canvas.style, 64)
    again.long_paths(9)
    fresh = Canvas(np.random.default_rng(0), canvas.style, len(again.occupied))
    for dash in again.dashes:
        fresh.occupy(np.arange(len(fresh.occupied)), dash)
    assert np.array_equal(fresh.occupied, again.occupied)
    for dash in again.dashes:
        fresh.occupy(np.arange(len(fresh.occupied)), dash, -1)
    assert not fresh.occupied.any()


def test_a_dash_and_dots_are_drawn_where_they_are():
    style = pathfinder.STYLES[128]
    canvas = Canvas(np.random.default_rng(0), style, 1)
    canvas.dashes.append(Dashes(np.array([[20.5, 30.5]], np.float32), np.zeros(1, np.float32), np.ones(1, bool)))
    image = canvas.draw(np.array([[[60.5, 60.5], [0.5, 90.5]]], np.float32))[0]
    assert (image[20, 30:36] == round(0.9 * 255)).all() and image[20, 37] == 0 and image[18, 33] == 0
    assert 0 < image[19, 33] < 0.9 * 255
    assert image[60, 60] == 255 and image[60, 57] > 0 and image[60, 56] == 0 and image[0, 90] == 255
    total = image[50:71, 50:71].sum() / 255
    assert total == pytest.approx(np.pi * style.dot**2, rel=0.05)


@pytest.mark.parametrize(
    "text", [SMALL, "pathfinder(contour=9, train=9, val=9, test=9)", "pathfinder(size=128, train=4, val=2, test=6)"]
)
def test_dots_are_at_two_ends_of_one_path_or_of_both(text, monkeypatch):
    """The first dot begins the first path; the second ends it where the label is 1, and ends the other path where it is 0."""
    seen = {}
    paths, draw = Canvas.long_paths, Canvas.draw

    def long_paths(self, count):
        seen["ends"] = paths(self, count)
        return seen["ends"]

    def drawn(self, dots):
        seen["dots"] = dots
        return draw(self, dots)

    monkeypatch.setattr(Canvas, "long_paths", long_paths)
    monkeypatch.setattr(Canvas, "draw", drawn)
    task = arena_task(text)
    found = next(task.draws(np.random.default_rng(3)))
    ends, dots, joined = seen["ends"], seen["dots"], found.targets.numpy() == 1
    assert 0 < joined.sum() < len(joined)
    assert np.array_equal(dots[:, 0], ends[:, 0, 0])
    assert np.array_equal(dots[joined, 1], ends[joined, 0, 1]) and np.array_equal(dots[~joined, 1], ends[~joined, 1, 1])
    far = np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1)
    bucket = task.size // 8
    assert found.slices["distance"].tolist() == [int(x // bucket) * bucket for x in far]
    wanted = pathfinder.DISTRACTING_DASHES[task.size] // (task.contour // 3)
    assert found.slices["distractors"].max() == wanted
    assert found.tokens.shape[1] == task.length == task.size**2 and found.tokens.dtype == torch.uint8 and found.lengths is None
    assert found.tokens.max() == 255 and (found.tokens > 0).float().mean() < 0.5


def test_splits_and_floors_of_pathfinder():
    task = arena_task(SMALL)
    parts = {part: task.examples(part) for part in ("train", "val", "test")}
    rows = [{row.numpy().tobytes() for row in found.tokens} for found in parts.values()]
    assert [len(x) for x in rows] == [40, 20, 20] and len(set.union(*rows)) == 80
    assert torch.equal(task.examples("val").tokens, parts["val"].tokens)
    floors = task.floors()
    assert set(floors) == {
        "most frequent label",
        "distance of the dots",
        "nearest mean",
        "averaged pixels, ridge regression",
    } and all(0 <= value <= 1 for value in floors.values())
    budget = task.budget()
    assert (budget.steps, budget.batch, task.model().width) == (62000, 256, 64)


def test_turns_have_the_density_of_a_cosine():
    canvas = Canvas(np.random.default_rng(0), pathfinder.STYLES[128], 3000)
    middle = Dashes(np.full((3000, 2), 64, np.float32), np.zeros(3000, np.float32), np.ones(3000, bool))
    turns = canvas.next_dash(np.arange(3000), middle).angle * 1.8
    assert np.abs(np.sin(turns).mean()) < 0.04 and np.sin(turns).var() == pytest.approx(1 / 3, rel=0.06)
    assert dashed_paths.TURNS >= 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pathfinder(size=64)", "size must be one of 32, 128, not 64"),
        ("pathfinder(contour=2)", "contour must be from 3 to 20 dashes, not 2"),
    ],
)
def test_images_that_do_not_fit_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        arena_task(text)
