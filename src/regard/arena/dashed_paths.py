"""Draw dashed paths that do not cross, in many images at a time: they grow on a grid of occupied cells."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ANGLES = 64  # of stamps
TURNS = 16  # tried for each dash
TAKEN_BACK = 4  # dashes, where no turn is free
PASSES = 10  # attempts for each dash of a path, before an image is given up
STARTS = 8  # places tried for each distractor


class PathStyle(NamedTuple):
    """Hold sizes in pixels, and how bright lines are where a dot is 1."""

    size: int  # of the image, each way
    dash: float
    thickness: float
    margin: float  # to other dashes; two of it are between the dashes of a path
    turn: float  # a path turns by less than pi / (2 turn) between dashes
    seeds: float  # distance between the beginnings of the two long paths
    dot: float  # radius
    bright: float
    cells: int  # of the grid, for each pixel
    padding: float = 1.0


class Dashes(NamedTuple):
    """Hold one dash of each image: where it begins, its angle, and whether there is one."""

    tail: np.ndarray  # (b, 2), float32
    angle: np.ndarray  # (b,)
    alive: np.ndarray  # (b,)

    def some(self, rows: np.ndarray) -> Dashes:
        """Return the dashes of some images."""
        return Dashes(self.tail[rows], self.angle[rows], self.alive[rows])


def direction(angle: np.ndarray) -> np.ndarray:
    """Return unit vectors, in a new last dimension."""
    return np.stack([np.sin(angle), np.cos(angle)], -1)


class Canvas:
    """Grow paths in a batch of images; `dashes` lists what is to be drawn."""

    def __init__(self, generator: np.random.Generator, style: PathStyle, batch: int) -> None:
        self.generator, self.style = generator, style
        self.reach = int(np.ceil((style.margin + style.thickness / 2 + style.dash / 2) * style.cells))
        self.side = style.size * style.cells + 2 * self.reach  # with a border, so that no stamp ends outside
        self.occupied = np.zeros((batch, self.side * self.side), np.uint8)  # how many dashes are near a cell
        self.stamps = _stamps(style, self.reach)
        across = np.arange(2 * self.reach + 1)
        self.offsets = (across[:, None] * self.side + across).ravel()  # of the cells of a stamp
        self.dashes: list[Dashes] = []

    def random(self, *shape: int) -> np.ndarray:
        """Draw numbers from 0 to 1."""
        return self.generator.random(shape, dtype=np.float32)

    def random_angles(self, *shape: int) -> np.ndarray:
        """Draw angles from 0 to 2 pi."""
        return self.random(*shape) * np.float32(2 * np.pi)

    def random_places(self, *shape: int) -> np.ndarray:
        """Draw points inside of the padding."""
        style = self.style
        return style.padding + self.random(*shape, 2) * np.float32(style.size - 2 * style.padding)

    def head(self, dash: Dashes) -> np.ndarray:
        """Return where dashes end."""
        return dash.tail + np.float32(self.style.dash) * direction(dash.angle)

    def first_free(self, rows: np.ndarray, tails: np.ndarray, angles: np.ndarray) -> Dashes:
        """Choose the first of several dashes (rows, k) that lies inside and on free cells."""
        style = self.style
        steps = np.linspace(0, style.dash, 1 + round(style.dash * style.cells), dtype=np.float32)
        points = tails[:, :, None] + steps[:, None] * direction(angles)[:, :, None]
        inside = ((points >= style.padding) & (points <= style.size - style.padding)).all((2, 3))
        cell = np.clip(points, 0, style.size - 1 / style.cells)
        cell = (cell * style.cells).astype(np.intp) + self.reach
        place = (rows * self.occupied.shape[1])[:, None, None] + cell[..., 0] * self.side + cell[..., 1]
        hit = self.occupied.ravel()[place].any(2)
        free = inside & ~hit
        best = free.argmax(1)
        each = np.arange(len(rows))
        return Dashes(tails[each, best], angles[each, best], free.any(1))

    def next_dash(self, rows: np.ndarray, last: Dashes) -> Dashes:
        """Find a dash that continues a path, after a turn of density cos(turn * angle); the last one may be near."""
        margin = np.float32(self.style.margin)
        pivot = self.head(last) + margin * direction(last.angle)
        turns = np.arcsin(2 * self.random(len(rows), TURNS) - 1) / np.float32(self.style.turn)
        angles = last.angle[:, None] + turns
        self.occupy(rows, last, -1)
        found = self.first_free(rows, pivot[:, None] + margin * direction(angles), angles)
        self.occupy(rows, last)
        return found

    def occupy(self, rows: np.ndarray, dash: Dashes, count: int = 1) -> None:
        """Mark the cells near dashes, up to the margin; with a count of -1, take the marks back."""
        style = self.style
        middle = dash.tail + np.float32(style.dash / 2) * direction(dash.angle)
        cell = (middle * style.cells).astype(np.intp)
        first = rows * self.occupied.shape[1] + cell[:, 0] * self.side + cell[:, 1]
        angle = np.rint(dash.angle * np.float32(ANGLES / np.pi)).astype(np.intp) % ANGLES
        marks = self.stamps[angle]
        self.occupied.ravel()[first[:, None] + self.offsets] += marks if count > 0 else -marks

    def long_paths(self, count: int) -> np.ndarray:
        """Grow two paths of so many dashes, keep the images where both fit, and return their ends (images, path, end, 2)."""
        growth = _TwoPaths(self, count)
        done = growth.grow()
        self.occupied = self.occupied[done]
        tails, angles = growth.tails[done], growth.angles[done]
        there = np.ones(len(done), bool)
        self.dashes += [Dashes(tails[:, path, i], angles[:, path, i], there) for i in range(count) for path in (0, 1)]
        heads = [self.head(dash) for dash in self.dashes[-2:]]
        return np.stack([tails[:, :, 0], np.stack(heads, 1)], 2)

    def distractors(self, count: int, length: int, rounds: int) -> np.ndarray:
        """Grow short paths, at most `count` in each image; return how many fit. Those that end early are not drawn."""
        done = np.zeros(len(self.occupied), np.int64)
        for _ in range(rounds):
            rows = np.flatnonzero(done < count)
            if not len(rows):
                break
            found = self.first_free(rows, self.random_places(len(rows), STARTS), self.random_angles(len(rows), STARTS))
            rows, last = self._placed(rows, found)
            path = [_spread(last, rows, len(done))]
            for _ in range(length - 1):
                rows, last = self._placed(rows, self.next_dash(rows, last))
                path.append(_spread(last, rows, len(done)))
            self.dashes += [dash._replace(alive=path[-1].alive) for dash in path]
            done[rows] += 1
        return done

    def _placed(self, rows: np.ndarray, found: Dashes) -> tuple[np.ndarray, Dashes]:
        """Mark the dashes that fit; return their images and them."""
        there = found.alive
        self.occupy(rows[there], found.some(there))
        return rows[there], found.some(there)

    def draw(self, dots: np.ndarray) -> np.ndarray:
        """Return images of all dashes and of two dots (b, 2, 2): uint8, a dot is 255."""
        style = self.style
        images = np.zeros((len(dots), style.size, style.size), np.float32)
        for dash in self.dashes:
            rows = np.flatnonzero(dash.alive)
            near, cell = _window(style.dash, dash.some(dash.alive), style.thickness / 2 + 0.5, 1)
            cover = np.clip(np.minimum(style.thickness, style.thickness / 2 + 0.5 - near), 0, 1)
            _brighten(images, rows, cell, np.minimum(cover * np.float32(style.bright), 1))
        for dot in (dots[:, 0], dots[:, 1]):
            cell = _cells_around(dot, style.dot + 0.5, 1)
            near = np.linalg.norm(cell + np.float32(0.5) - dot[:, None], axis=-1)
            _brighten(images, np.arange(len(dots)), cell, np.clip(style.dot + 0.5 - near, 0, 1))
        return (images * 255).round().astype(np.uint8)


def _brighten(images: np.ndarray, rows: np.ndarray, cell: np.ndarray, value: np.ndarray) -> None:
    """Raise pixels to values; what lies outside is left out. No cell occurs twice in a row."""
    inside = (cell >= 0).all(-1) & (cell < images.shape[1]).all(-1) & (value > 0)
    image = np.broadcast_to(rows[:, None], inside.shape)[inside]
    place = image, cell[..., 0][inside], cell[..., 1][inside]
    images[place] = np.maximum(images[place], value[inside])


def _cells_around(middle: np.ndarray, reach: float, cells: int) -> np.ndarray:
    """Return the cells of a square around points (b, 2), as (b, cells of it, 2)."""
    half = int(np.ceil(reach * cells))
    offsets = np.stack(np.meshgrid(*[np.arange(-half, half + 1)] * 2, indexing="ij"), -1).reshape(-1, 2)
    return np.floor(middle * cells).astype(np.intp)[:, None] + offsets


def _window(length: float, dash: Dashes, reach: float, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance to each dash of the cells around it, in pixels, and the indices of the cells."""
    half = np.float32(length / 2)
    along = direction(dash.angle)
    middle = dash.tail + half * along
    cell = _cells_around(middle, reach + length / 2, cells)
    offset = ((cell + np.float32(0.5)) / np.float32(cells)).astype(np.float32) - middle[:, None]
    forward = offset[..., 0] * along[:, None, 0] + offset[..., 1] * along[:, None, 1]
    across = offset[..., 0] * along[:, None, 1] - offset[..., 1] * along[:, None, 0]
    beyond = np.maximum(np.abs(forward) - half, 0)
    return np.sqrt(beyond * beyond + across * across), cell


def _stamps(style: PathStyle, reach: int) -> np.ndarray:
    """Return the cells within the margin of a dash, for each angle: (angles, cells of a square around its middle)."""
    angle = np.arange(ANGLES, dtype=np.float32) * np.float32(np.pi / ANGLES)
    middle = (reach + np.float32(0.5)) / style.cells
    tail = middle - np.float32(style.dash / 2) * direction(angle)
    near, cell = _window(style.dash, Dashes(tail, angle, angle >= 0), style.margin + style.thickness / 2, style.cells)
    stamps = np.zeros((ANGLES, 2 * reach + 1, 2 * reach + 1), np.uint8)
    kept = near <= style.margin + style.thickness / 2
    each = np.broadcast_to(np.arange(ANGLES)[:, None], kept.shape)
    stamps[each[kept], cell[..., 0][kept], cell[..., 1][kept]] = 1
    return stamps.reshape(ANGLES, -1)


def _spread(dash: Dashes, rows: np.ndarray, batch: int) -> Dashes:
    """Place the dashes of some images in a batch of all."""
    wide = Dashes(np.zeros((batch, 2), np.float32), np.zeros(batch, np.float32), np.zeros(batch, bool))
    for whole, some in zip(wide, dash, strict=True):
        whole[rows] = some
    return wide


class _TwoPaths:
    """Grow two paths, dash by dash in turn. Where no dash fits, some are taken back and tried again."""

    def __init__(self, canvas: Canvas, count: int) -> None:
        self.canvas, self.count = canvas, count
        batch = len(canvas.occupied)
        self.tails = np.zeros((batch, 2, count, 2), np.float32)
        self.angles = canvas.random_angles(batch, 2, count)
        self.tails[:, 0, 0], self.tails[:, 1, 0] = self._seeds(batch)
        self.step = np.full(batch, 2)  # dashes that are there; even ones belong to the first path
        self.back = np.zeros(batch, np.int64)  # dashes to take back

    def _seeds(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw two points inside of the padding, at their distance: the first of several tries."""
        style, each = self.canvas.style, np.arange(batch)
        first = self.canvas.random_places(batch, STARTS)
        second = first + np.float32(style.seeds) * direction(self.canvas.random_angles(batch, STARTS))
        inside = ((second >= style.padding) & (second <= style.size - style.padding)).all(-1).argmax(1)
        return first[each, inside], second[each, inside]

    def grow(self) -> np.ndarray:
        """Return the images where both paths have all of their dashes."""
        every = np.arange(len(self.step))
        seeds = [self.canvas.first_free(every, self.tails[:, path, :1], self.angles[:, path, :1]).alive for path in (0, 1)]
        going = np.flatnonzero(seeds[0] & seeds[1])
        for path in (0, 1):
            self.canvas.occupy(going, self._dash(going, np.full(len(going), path)))
        done = []
        for _ in range(PASSES * self.count):
            forward = self.back[going] == 0
            self._push(going[forward])
            self._pop(going[~forward])
            ended = self.step[going] == 2 * self.count
            done.append(going[ended])
            going = going[~ended]
        return np.sort(np.concatenate(done))

    def _dash(self, rows: np.ndarray, number: np.ndarray) -> Dashes:
        place = rows, number % 2, number // 2
        return Dashes(self.tails[place], self.angles[place], np.ones(len(rows), bool))

    def _push(self, rows: np.ndarray) -> None:
        step = self.step[rows]
        last = self._dash(rows, step - 2)
        found = self.canvas.next_dash(rows, last)
        fits = found.alive
        kept, number = rows[fits], step[fits]
        self.tails[kept, number % 2, number // 2] = found.tail[fits]
        self.angles[kept, number % 2, number // 2] = found.angle[fits]
        self.canvas.occupy(kept, found.some(fits))
        self.step[kept] += 1
        self.back[rows[~fits]] = np.minimum(TAKEN_BACK, step[~fits] - 2)

    def _pop(self, rows: np.ndarray) -> None:
        self.step[rows] -= 1
        self.back[rows] -= 1
        self.canvas.occupy(rows, self._dash(rows, self.step[rows]), -1)
