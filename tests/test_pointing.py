"""Answers that are positions: exact hulls and orders, floors, and a pointer that learns them and answers lines."""

import pytest
from scipy.spatial import ConvexHull

from regard.data.point_sets import extremes, hull_order, pointed_sets, polygon_area, sorted_order
from regard.tasks import config, make_task
from regard.tasks.pointing import PointedSet
from regard.training.fit import fit

TINY = {"width": 16, "heads": 2, "depth": 1, "decoder_depth": 1, "ffn": 32, "steps": 2, "validate_every": 2, "save_every": 2}


def small(name, **changes):
    made = make_task(config(name).replace({"examples": 60, **TINY, **changes}))
    made.read()
    made.splits = {split: rows[:60] for split, rows in made.splits.items()}
    return made


def test_hulls_are_those_of_scipy_and_sets_are_in_one_split():
    parts = pointed_sets(hull_order, 2, least=5, most=30, train=100, val=20, test=20)
    for x in (x for part in parts for x in part):
        found = ConvexHull(x.points)
        assert set(x.answer) == set(found.vertices.tolist()) and len(set(x.points)) == len(x.points)
        corners = [x.points[i] for i in x.answer]
        assert corners[0] == min(x.points) and polygon_area(corners) == pytest.approx(found.volume)
        at = found.vertices.tolist().index(x.answer[0])  # scipy's are counter-clockwise too
        assert list(x.answer) == [*found.vertices[at:], *found.vertices[:at]]
    keys = [frozenset(x.points) for part in parts for x in part]
    assert len(set(keys)) == len(keys) == 140


def test_a_point_on_an_edge_is_no_corner():
    assert hull_order([(0, 0), (4, 0), (2, 0), (4, 4), (0, 4), (2, 2)]) == (0, 1, 3, 4)
    assert hull_order([(3, 3), (1, 1), (2, 2)]) == (1, 0)
    assert extremes([(0, 5), (5, 0), (9, 5), (5, 9), (5, 5)]) == (0, 1, 2, 3)
    assert sorted_order([(3,), (1,), (2,)]) == (1, 2, 0)


def test_a_polygon_that_crosses_itself_covers_nothing():
    square = [(0, 0), (2, 0), (2, 2), (0, 2)]
    assert polygon_area(square) == 4 and polygon_area([square[i] for i in (0, 2, 1, 3)]) == 0 == polygon_area(square[:2])


def test_scores_are_shares_of_right_answers_and_a_hull_may_begin_anywhere():
    made = small("hull")
    x = PointedSet(((0, 0), (2, 0), (2, 2), (0, 2), (1, 1)), (0, 1, 2, 3))
    scores = made._scores([x, x, x, x], [[1, 2, 3, 0], [0, 1, 2], [0, 2, 1, 3], [3, 2, 1, 0]])
    assert scores == {"exact": 25, "places": 100 * (4 + 3 + 2 + 2) / 16, "area": 100 * (1 + 0.5 + 0 + 1) / 4}
    floor = made.score(made.model(), "test")["floor"]
    right = [x for x in made.splits["test"] if set(extremes(x.points)) == set(x.answer)]
    assert floor == pytest.approx(100 * len(right) / 60)


@pytest.mark.parametrize("name", ["sorting", "hull"])
def test_a_run_answers_with_the_points_of_a_line(name, tmp_path):
    made = small(name)
    fit(made, tmp_path, accelerator="cpu", quiet=True)
    model = made.model()
    line = made.sample
    answer = made.predict(model, [line])[0].split()
    assert set(answer) <= set(line.split()) and len(set(answer)) == len(answer) > 0
    with pytest.raises(ValueError, match="line 1 has 'x', which is not a"):
        made.predict(model, ["x"])
    wide = make_task(made.config.replace({"beam": 3}))
    wide.splits = made.splits
    assert wide.score(model, "val").keys() == made.score(model, "val").keys()
