"""Questions whose answer is a list of positions of the input: numbers to sort, points and their convex hull."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from regard.data.datasets import Splits

SIDE_UNITS = 10_000  # coordinates are integers below it
Point = tuple[int, ...]


class PointedSet(NamedTuple):
    """Points of one or two coordinates, and the positions that answer the question, in their order."""

    points: tuple[Point, ...]
    answer: tuple[int, ...]


def sorted_order(points: Sequence[Point]) -> tuple[int, ...]:
    """Return the positions of points from the smallest to the largest."""
    return tuple(sorted(range(len(points)), key=points.__getitem__))


def hull_order(points: Sequence[Point]) -> tuple[int, ...]:
    """Return the positions of the corners of the convex hull, counter-clockwise from the leftmost point (the lowest of equals).

    A point on an edge is no corner. The monotone chain of Andrew 1979, in integers.
    """
    order = sorted_order(points)
    halves = [_chain(points, order), _chain(points, order[::-1])]
    return tuple(position for half in halves for position in half[:-1]) or order[:1]


def _chain(points: Sequence[Point], order: Sequence[int]) -> list[int]:
    chain: list[int] = []
    for position in order:
        while len(chain) > 1 and turn(points[chain[-2]], points[chain[-1]], points[position]) <= 0:
            chain.pop()
        chain.append(position)
    return chain


def turn(a: Point, b: Point, c: Point) -> int:
    """Return twice the area of the triangle: above 0 for a turn to the left, 0 for points on one line."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def extremes(points: Sequence[Point]) -> tuple[int, ...]:
    """Guess a hull: its leftmost, lowest, rightmost and highest point, counter-clockwise."""
    every = range(len(points))
    found = (
        min(every, key=lambda i: points[i]),
        min(every, key=lambda i: points[i][::-1]),
        max(every, key=lambda i: points[i]),
        max(every, key=lambda i: points[i][::-1]),
    )
    return tuple(dict.fromkeys(found))


def polygon_area(corners: Sequence[Point]) -> float:
    """Return the area of a polygon whose edges do not cross or touch; else 0."""
    edges = [*pairwise(corners), (corners[-1], corners[0])] if len(corners) > 2 else []
    for i, (a, b) in enumerate(edges):
        for c, d in edges[i + 2 : len(edges) - (i == 0)]:
            if turn(a, b, c) * turn(a, b, d) <= 0 and turn(c, d, a) * turn(c, d, b) <= 0:
                return 0.0
    return abs(sum(a[0] * b[1] - a[1] * b[0] for a, b in edges)) / 2


def pointed_sets(
    order: Callable[[Sequence[Point]], tuple[int, ...]],
    dims: int,
    *,
    least: int,
    most: int,
    train: int = 20_000,
    val: int = 500,
    test: int = 500,
    seed: int = 1,
) -> Splits[list[PointedSet]]:
    """Draw sets of `least` to `most` different points, uniform on a grid; none is in two splits."""
    dice, seen = Random(seed), set[frozenset[Point]]()
    found: list[PointedSet] = []
    while len(found) < train + val + test:
        count, points = dice.randint(least, most), dict[Point, None]()
        while len(points) < count:
            points[tuple(dice.randrange(SIDE_UNITS) for _ in range(dims))] = None
        if frozenset(points) not in seen:
            seen.add(frozenset(points))
            found.append(PointedSet(tuple(points), order(tuple(points))))
    return Splits(found[:train], found[train : train + val], found[train + val :])
