"""A board of Go: captures, suicide, ko and the whole history, by groups with their liberties.

Rules are those of Tromp and Taylor without suicide: a stone may not be placed where its group would have no liberty once captured
stones are gone, nor where it would repeat any earlier position of the whole board, no matter whose turn it was (positional
superko, which contains ko). Points are numbered row by row, from the upper left corner.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

NO_STONE, BLACK_STONE, WHITE_STONE = range(3)
LIBERTIES = 4  # so many or more are one class
POINT_KINDS = 2 * LIBERTIES + 2  # of a point: empty, stones of either player by liberties, empty and forbidden
FORBIDDEN = POINT_KINDS - 1


@lru_cache(maxsize=8)
def neighbours(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the points beside each point."""
    found = []
    for point in range(size * size):
        row, column = divmod(point, size)
        beside = [(row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)]
        found.append(tuple(r * size + c for r, c in beside if 0 <= r < size and 0 <= c < size))
    return tuple(found)


@lru_cache(maxsize=8)
def _keys(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a number for a stone of each colour on each point: a position is the exclusive or of its stones. Zobrist 1970."""
    dice = random.Random(size)
    black, white = (tuple(dice.getrandbits(64) for _ in range(size * size)) for _ in range(2))
    return black, white


@lru_cache(maxsize=8)
def _points_by_key(size: int) -> tuple[dict[int, int], dict[int, int]]:
    black, white = ({key: point for point, key in enumerate(keys)} for keys in _keys(size))
    return black, white


class _Group:
    """Connected stones of a colour."""

    __slots__ = ("colour", "liberties", "stones")

    def __init__(self, colour: int, stones: list[int], liberties: set[int]) -> None:
        self.colour, self.stones, self.liberties = colour, stones, liberties


class Board:
    """A position and all before it. `play` places a stone of the player to move, `legal` and `illegal` tell where it may be."""

    def __init__(self, size: int = 19) -> None:
        if not 1 <= size <= 25:
            raise ValueError(f"a board of Go has a side of 1 to 25 points, not {size}")
        self.size, self.player, self.moves = size, BLACK_STONE, list[int | None]()
        self.kinds = bytearray(size * size)  # of every point: 0, or 1 to 4 black, 5 to 8 white, by liberties
        self.hash = 0
        self._groups: list[_Group | None] = [None] * (size * size)
        self._around = neighbours(size)
        self._room = [len(beside) for beside in self._around]  # empty points beside each point
        self._full = {point for point, room in enumerate(self._room) if not room}  # points without an empty one beside them
        self._stones = 0
        self._seen: dict[int, set[int]] = {0: {0}}  # positions so far, by number of stones

    def colour(self, point: int) -> int:
        """Return the colour of a point: NO_STONE, BLACK_STONE or WHITE_STONE."""
        group = self._groups[point]
        return NO_STONE if group is None else group.colour

    def _captured(self, point: int) -> list[_Group]:
        """List the groups that a stone of the player on an empty point would capture."""
        found: list[_Group] = []
        for beside in self._around[point]:
            group = self._groups[beside]
            if group is not None and group.colour != self.player and len(group.liberties) == 1 and group not in found:
                found.append(group)
        return found

    def _after(self, point: int, captured: list[_Group]) -> tuple[int, int]:
        """Return the hash and the number of stones after a move."""
        keys = _keys(self.size)
        own, other = keys[self.player - 1], keys[2 - self.player]
        key, count = self.hash ^ own[point], self._stones + 1
        for group in captured:
            for stone in group.stones:
                key ^= other[stone]
            count -= len(group.stones)
        return key, count

    def why_not(self, point: int) -> str | None:
        """Explain why the player may not place a stone on a point; None if it may."""
        if self._groups[point] is not None:
            return "there is a stone already"
        captured = self._captured(point)
        if not captured and not self._breathes(point):
            return "its group would have no liberty"
        key, count = self._after(point, captured)
        return "it would repeat an earlier position" if key in self._seen.get(count, ()) else None

    def _breathes(self, point: int) -> bool:
        """Tell whether a stone of the player on an empty point has a liberty without capturing."""
        if self._room[point]:
            return True
        groups = (self._groups[beside] for beside in self._around[point])
        return any(x is not None and x.colour == self.player and len(x.liberties) > 1 for x in groups)

    def legal(self) -> list[int]:
        """List the points where the player may place a stone."""
        forbidden = self.illegal()
        return [point for point, group in enumerate(self._groups) if group is None and point not in forbidden]

    def illegal(self) -> set[int]:
        """Find the empty points where the player may not place a stone.

        Without trying all: suicide needs a point without an empty one beside it, a repetition without a capture an earlier
        position with one stone more, and a capture a group with one liberty.
        """
        found: set[int] = set()
        by_key = _points_by_key(self.size)[self.player - 1]
        for key in self._seen.get(self._stones + 1, ()):
            point = by_key.get(key ^ self.hash)
            if point is not None and self._groups[point] is None and not self._captured(point):
                found.add(point)
        for point in self._full:
            if self._groups[point] is None and self.why_not(point) is not None:
                found.add(point)
        for point in self._targets():
            if point not in self._full and self.why_not(point) is not None:
                found.add(point)
        return found

    def _targets(self) -> Iterator[int]:
        """Yield the last liberties of the opponent's groups, which are few."""
        least = 1 + LIBERTIES * (2 - self.player)  # the kind of a stone of the opponent with one liberty
        at = self.kinds.find(least)
        while at >= 0:
            group = self._groups[at]
            assert group is not None
            yield next(iter(group.liberties))
            at = self.kinds.find(least, at + 1)

    def play(self, point: int | None) -> None:
        """Place a stone of the player, or pass with None; raise ValueError where that is not allowed."""
        if point is not None:
            if not 0 <= point < len(self._groups):
                raise ValueError(f"there is no point {point} on a board of {self.size} x {self.size}")
            if why := self.why_not(point):
                raise ValueError(
                    f"{'black' if self.player == BLACK_STONE else 'white'} cannot play {name_of(point, self.size)}: {why}"
                )
            self._place(point)
        self.moves.append(point)
        self.player = 3 - self.player

    def _place(self, point: int) -> None:
        captured = self._captured(point)
        self.hash, self._stones = self._after(point, captured)
        self._seen.setdefault(self._stones, set()).add(self.hash)
        stones, liberties, changed = [point], set[int](), list[_Group]()
        for beside in self._around[point]:
            self._crowd(beside, -1)
            group = self._groups[beside]
            if group is None:
                liberties.add(beside)
                continue
            if group in changed:
                continue
            group.liberties.discard(point)
            changed.append(group)
            if group.colour == self.player:
                stones += group.stones
                liberties |= group.liberties
        own = _Group(self.player, stones, liberties)
        for stone in stones:
            self._groups[stone] = own
        changed = [group for group in changed if group.colour != self.player and group.liberties]
        for group in captured:
            self._remove(group, changed)
        for group in (own, *changed):
            self._write(group)

    def _remove(self, group: _Group, changed: list[_Group]) -> None:
        """Take a group from the board: its points become liberties of the groups beside them."""
        for stone in group.stones:
            self._groups[stone] = None
            self.kinds[stone] = NO_STONE
        for stone in group.stones:
            for beside in self._around[stone]:
                self._crowd(beside, 1)
                other = self._groups[beside]
                if other is not None:
                    other.liberties.add(stone)
                    if other not in changed:
                        changed.append(other)

    def _crowd(self, point: int, more: int) -> None:
        """Count the empty points beside a point."""
        self._room[point] += more
        if not self._room[point]:
            self._full.add(point)
        elif self._room[point] == more:
            self._full.discard(point)

    def _write(self, group: _Group) -> None:
        """Write the kind of all stones of a group, if it has changed."""
        kind = min(len(group.liberties), LIBERTIES) + LIBERTIES * (group.colour - 1)
        stones = group.stones
        if self.kinds[stones[0]] != kind:  # all stones of a group have one kind, and a new one comes first
            for stone in stones:
                self.kinds[stone] = kind

    def area(self) -> tuple[int, int]:
        """Count the area of black and of white: stones, all of them alive, and empty regions that touch one colour alone."""
        counts, seen = [0, 0, 0], set[int]()
        for point in range(len(self._groups)):
            if self._groups[point] is not None:
                counts[self.colour(point)] += 1
            elif point not in seen:
                region, colours = self._region(point)
                seen |= region
                if len(colours) == 1:
                    counts[colours.pop()] += len(region)
        return counts[BLACK_STONE], counts[WHITE_STONE]

    def _region(self, point: int) -> tuple[set[int], set[int]]:
        """Find the empty points connected to one of them, and the colours beside them."""
        region, colours, left = {point}, set[int](), [point]
        while left:
            for beside in self._around[left.pop()]:
                group = self._groups[beside]
                if group is not None:
                    colours.add(group.colour)
                elif beside not in region:
                    region.add(beside)
                    left.append(beside)
        return region, colours

    def own_eye(self, point: int) -> bool:
        """Tell whether an empty point is an eye of the player: own stones beside it, and on its diagonals all but one, or all at
        the edge. Filling it would only lose.
        """
        if any(self.colour(beside) != self.player for beside in self._around[point]):
            return False
        row, column = divmod(point, self.size)
        corners = [(row + down, column + right) for down in (-1, 1) for right in (-1, 1)]
        inside = [r * self.size + c for r, c in corners if 0 <= r < self.size and 0 <= c < self.size]
        foreign = sum(self.colour(corner) == 3 - self.player for corner in inside)
        return foreign < (2 if len(inside) == 4 else 1)

    def __str__(self) -> str:
        """Draw the board: X black, O white."""
        rows = [" ".join(".XO"[self.colour(r * self.size + c)] for c in range(self.size)) for r in range(self.size)]
        return "\n".join(rows)


_COLUMN_LETTERS = "ABCDEFGHJKLMNOPQRSTUVWXYZ"  # without I


def name_of(point: int, size: int) -> str:
    """Name a point as players do: columns by letters without I, rows by numbers from below. 3 of a board of 19 is D19."""
    row, column = divmod(point, size)
    return f"{_COLUMN_LETTERS[column]}{size - row}"
