"""Games of Go: the reader of professional games, SGF to moves and back, and positions as arrays.

Letters: n positions, p points of the board, m moves before a position that are remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.datasets import Splits
from regard.data.go_board import BLACK_STONE, FORBIDDEN, LIBERTIES, WHITE_STONE, Board
from regard.data.locate import file
from regard.data.text_files import DataError, read_lines

GO_COLUMNS = ("id", "date", "black_rank", "white_rank", "komi", "result", "moves")
REMEMBERED = 8  # moves before a position that are marked
# a property, a value, one without its end, an end of a branch
_SGF = re.compile(r"[A-Za-z]+|\[(?:\\.|[^\]\\])*\]|\[|\)", re.DOTALL)
_SWAPPED = np.array([0, *range(1 + LIBERTIES, FORBIDDEN), *range(1, 1 + LIBERTIES), FORBIDDEN], np.uint8)


class GoPositions(NamedTuple):
    """GoPositions of games, each from the view of the player to move."""

    kinds: np.ndarray  # (n p) uint8: 0 empty, 1 to 4 own stones by liberties, 5 to 8 the opponent's, 9 empty and forbidden
    recent: np.ndarray  # (n m) int16: the last moves, the newest first; p where there was none
    move: np.ndarray  # (n) int16: what was played
    number: np.ndarray  # (n) int16: moves played before
    key: np.ndarray  # (n) uint64: a hash of the stones
    cut: int = 0  # moves that were left out, from the first of a game that is not allowed

    def at(self, rows: np.ndarray) -> GoPositions:
        """Select positions by their numbers."""
        return GoPositions(self.kinds[rows], self.recent[rows], self.move[rows], self.number[rows], self.key[rows])


def point_of(letters: str, size: int) -> int | None:
    """Read a point of SGF: column and row by letters, from the upper left corner; None for a pass."""
    if letters == "" or (letters == "tt" and size <= 19):
        return None
    column, row = (ord(letter) - ord("a") for letter in letters) if len(letters) == 2 else (-1, -1)
    if not (0 <= column < size and 0 <= row < size):
        raise ValueError(f"{letters!r} is no point of a board of {size} x {size}")
    return row * size + column


def letters_of(point: int | None, size: int) -> str:
    """Write a point as SGF does: the inverse of `point_of`."""
    if point is None:
        return ""
    row, column = divmod(point, size)
    return chr(ord("a") + column) + chr(ord("a") + row)


def read_sgf(text: str) -> Board:
    """Play the main line of a game in SGF; raise ValueError where it is not one, is cut off, or has a move that is not allowed.

    Stones that are set up (handicap) are refused: what was played before is not known.
    """
    if not re.match(r"\s*\(\s*;", text):
        raise ValueError("this is no game in SGF, which begins with (;")
    board: Board | None = None
    for name, value in sgf_properties(text):
        if name == "GM" and value != "1":
            raise ValueError(f"GM[{value}] is another game than Go, which is GM[1]")
        if name == "SZ" and board is None:
            if not re.fullmatch("[0-9]{1,9}", value):
                raise ValueError(f"SZ[{value}] is no size of a square board")
            board = Board(int(value))
        elif name in ("AB", "AW", "AE"):
            raise ValueError(f"{name} sets up stones, and games are read from an empty board")
        elif name in ("B", "W"):
            board = Board() if board is None else board
            if board.player != (BLACK_STONE if name == "B" else WHITE_STONE):
                raise ValueError(f"move {len(board.moves) + 1} is by {name}, which is not to move")
            board.play(point_of(value, board.size))
    return Board() if board is None else board


def sgf_properties(text: str) -> Iterator[tuple[str, str]]:
    """Yield the properties of the main line of a game, up to the end of its first branch, each with its first value.

    Names may have lower-case letters, which mean nothing, up to FF[3]: GaMe is GM.
    """
    name = token = ""
    for token in _SGF.findall(text):
        if token == ")":
            return
        if token == "[":
            break
        if token[0] != "[":
            name = re.sub("[a-z]", "", token)
        elif name:
            yield name, token[1:-1].strip()
            name = ""
    raise ValueError(f"this game is cut off: it ends without a {']' if token == '[' else ')'}")


def write_sgf(board: Board, **properties: str) -> str:
    """Write a game as SGF on one line, with properties such as RE="B+3.5"."""
    head = {"GM": "1", "FF": "4", "CA": "UTF-8", "SZ": str(board.size), **properties}
    start = "".join(f"{name}[{value}]" for name, value in head.items())
    moves = "".join(f";{'BW'[i % 2]}[{letters_of(move, board.size)}]" for i, move in enumerate(board.moves))
    return f"(;{start}{moves})"


def read_go(folder: Path, games: int = 0) -> Splits[list[list[int]]]:
    """Read games with a professional, 2,678 / 500 / 500, as lists of points; `games` limits the training split, 0: all."""
    parts = [_games(file(folder, f"{part}.tsv")) for part in ("train", "val", "test")]
    return Splits(parts[0][:games] if games else parts[0], *parts[1:])


def _games(path: Path) -> list[list[int]]:
    found = []
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if number == 1:
            if tuple(columns) != GO_COLUMNS:
                raise DataError(f"{path}, line 1: the columns are {', '.join(columns)} instead of {', '.join(GO_COLUMNS)}")
            continue
        if len(columns) != len(GO_COLUMNS):
            raise DataError(f"{path}, line {number}: {len(columns)} columns instead of {len(GO_COLUMNS)}")
        letters = columns[-1]
        try:
            points = [point_of(letters[i : i + 2], 19) for i in range(0, len(letters), 2)]
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if None in points:
            raise DataError(f"{path}, line {number}: move {points.index(None) + 1} is a pass, and games have none")
        found.append([point for point in points if point is not None])
    if not found:
        raise DataError(f"{path} has no games")
    return found


def positions_of(games: Iterable[Sequence[int]], size: int = 19) -> GoPositions:
    """Play games and list the position before every move.

    A game ends before the first move that the rules do not allow, as records without their passes have some; `cut` counts
    the moves from there on.
    """
    kinds, recent, moves, numbers, keys = bytearray(), list[list[int]](), list[int](), list[int](), list[int]()
    none, players, cut = [size * size] * REMEMBERED, list[int](), 0
    for game in games:
        board, last = Board(size), none
        for move in game:
            if board.why_not(move) is not None:
                cut += len(game) - len(board.moves)
                break
            kinds += position_row(board)
            recent.append(last)
            moves.append(move)
            players.append(board.player)
            numbers.append(len(board.moves))
            keys.append(board.hash)
            board.play(move)
            last = [move, *last[:-1]]
    found = np.frombuffer(bytes(kinds), np.uint8).reshape(len(moves), size * size).copy()
    white = np.array(players, np.uint8) == WHITE_STONE
    found[white] = _SWAPPED[found[white]]
    shaped = np.array(recent, np.int16).reshape(len(moves), REMEMBERED)
    numbered = np.array(moves, np.int16), np.array(numbers, np.int16)
    return GoPositions(found, shaped, *numbered, np.array(keys, np.uint64), cut)


def joined_positions(parts: Sequence[GoPositions]) -> GoPositions:
    """Put positions one behind the other."""
    kinds, recent, move, number, key = (np.concatenate([part[column] for part in parts]) for column in range(5))
    return GoPositions(kinds, recent, move, number, key, sum(part.cut for part in parts))


def position_row(board: Board) -> bytearray:
    """Copy the kinds of all points, with those that are forbidden to the player; stones are black and white, not own."""
    row = bytearray(board.kinds)
    for point in board.illegal():
        row[point] = FORBIDDEN
    return row


def position_now(board: Board) -> GoPositions:
    """Make the one position that a board shows."""
    kinds = np.frombuffer(bytes(position_row(board)), np.uint8)[None]
    last = [move for move in board.moves[::-1] if move is not None][:REMEMBERED]
    recent = [*last, *[board.size**2] * (REMEMBERED - len(last))]
    return GoPositions(
        _SWAPPED[kinds] if board.player == WHITE_STONE else kinds,
        np.array([recent], np.int16),
        np.zeros(1, np.int16),
        np.array([len(board.moves)], np.int16),
        np.array([board.hash], np.uint64),
    )


def symmetries(size: int) -> np.ndarray:
    """Return the eight symmetries of a square (8 p): point i of a turned board is point table[k, i] of the board."""
    board = np.arange(size * size).reshape(size, size)
    turned = [np.rot90(board, k) for k in range(4)]
    return np.stack([x.reshape(-1) for y in turned for x in (y, y.T)])
