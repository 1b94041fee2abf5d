"""Go: known positions, and the fast board against the rules as they are written."""

import os
import random

import numpy as np
import pytest

from regard.data.go_board import BLACK_STONE, FORBIDDEN, NO_STONE, Board, name_of, neighbours
from regard.data.go_games import letters_of, point_of, position_now, positions_of, read_go, read_sgf, symmetries, write_sgf
from regard.data.locate import find
from regard.data.text_files import DataError


class Rules:
    """The definition: a tuple of colours, groups by flood fill, and a set of all positions."""

    def __init__(self, size):
        self.size, self.stones, self.player = size, (NO_STONE,) * size**2, BLACK_STONE
        self.seen = {self.stones}

    def group(self, stones, point):
        found, left = {point}, [point]
        while left:
            new = {x for x in neighbours(self.size)[left.pop()] if stones[x] == stones[point]} - found
            found |= new
            left += new
        return found

    def liberties(self, stones, point):
        beside = {x for stone in self.group(stones, point) for x in neighbours(self.size)[stone]}
        return {x for x in beside if stones[x] == NO_STONE}

    def after(self, point):
        """The position after a move; None if it is not allowed."""
        if self.stones[point] != NO_STONE:
            return None
        stones = list(self.stones)
        stones[point] = self.player
        dead = [x for x in neighbours(self.size)[point] if stones[x] == 3 - self.player and not self.liberties(stones, x)]
        for x in {y for z in dead for y in self.group(stones, z)}:
            stones[x] = NO_STONE
        stones = tuple(stones)
        return stones if self.liberties(stones, point) and stones not in self.seen else None

    def play(self, point):
        if point is not None:
            self.stones = self.after(point)
            self.seen.add(self.stones)
        self.player = 3 - self.player


@pytest.mark.parametrize(("size", "games", "moves"), [(2, 20, 30), (3, 20, 60), (5, 6, 120), (9, 1, 120)])
def test_the_board_is_the_rules_in_random_games(size, games, moves):
    dice = random.Random(size)
    for _ in range(games):
        board, rules = Board(size), Rules(size)
        for _ in range(moves):
            allowed = [point for point in range(size**2) if rules.after(point) is not None]
            assert board.legal() == allowed
            assert board.illegal() == {x for x in range(size**2) if rules.stones[x] == NO_STONE} - set(allowed)
            for point, stone in enumerate(rules.stones):
                liberties = min(len(rules.liberties(rules.stones, point)), 4) if stone else 0
                assert board.colour(point) == stone
                assert board.kinds[point] == (liberties + 4 * (stone - 1) if stone else 0)
            move = dice.choice(allowed) if allowed and dice.random() < 0.97 else None
            board.play(move)
            rules.play(move)


def played(size, *moves):
    """Moves by names, black first; "-" passes."""
    board = Board(size)
    names = {name_of(point, size): point for point in range(size**2)}
    for move in " ".join(moves).split():
        board.play(None if move == "-" else names[move])
    return board


def drawn(board):
    return str(board).replace(" ", "").split("\n")


def test_a_stone_without_liberties_is_captured():
    board = played(5, "B3 C3 D3 - C4 - C2")
    assert drawn(board) == [".....", "..X..", ".X.X.", "..X..", "....."]


def set_up(*rows):
    """A board with these stones, black to move."""
    board, size = Board(len(rows)), len(rows)
    black, white = ([r * size + c for r in range(size) for c in range(size) if rows[r][c] == stone] for stone in "XO")
    for i in range(max(len(black), len(white))):
        board.play(black[i] if i < len(black) else None)
        board.play(white[i] if i < len(white) else None)
    assert drawn(board) == list(rows)
    return board


def test_ko_is_taken_back_only_after_another_move():
    board = set_up(".XO..", "XO.O.", ".XO..", ".....", ".....")
    board.play(7)
    assert drawn(board) == [".XO..", "X.XO.", ".XO..", ".....", "....."]
    assert board.illegal() == {0, 6}  # a point without liberties, and the ko
    with pytest.raises(ValueError, match="white cannot play B4: it would repeat an earlier position"):
        board.play(6)
    board.play(20)
    board.play(24)
    board.play(6)
    assert drawn(board) == [".XO..", "XO.O.", ".XO..", ".....", "O...X"]


def test_a_snapback_takes_more_stones_than_it_gave():
    board = set_up("O..X.", "OOOX.", "XXX..", ".....", ".....")
    board.play(1)
    board.play(2)  # white captures one stone, and has one liberty left, where that was
    assert drawn(board) == ["O.OX.", "OOOX.", "XXX..", ".....", "....."]
    board.play(1)
    assert drawn(board) == [".X.X.", "...X.", "XXX..", ".....", "....."]


def test_several_groups_are_captured_by_one_stone():
    board = set_up(".XOX.", "XO.OX", ".X.X.", ".....", ".....")
    board.play(7)
    assert drawn(board) == [".X.X.", "X.X.X", ".X.X.", ".....", "....."]
    assert board.illegal() == {0, 2, 4, 6, 8} and board.kinds[7] == 4


def test_a_long_cycle_is_forbidden_too():
    """Sending two, returning one: the position of three moves ago, which plain ko would allow."""
    dice, longest = random.Random(0), 0
    for _ in range(60):
        board, keys, stones = Board(2), [0], 0
        for _ in range(40):
            repeats = [x for x in range(4) if board.why_not(x) == "it would repeat an earlier position"]
            for point in repeats:
                key, _ = board._after(point, board._captured(point))
                longest = max(longest, len(keys) - keys.index(key))
            moves = board.legal()
            if not moves and stones:
                break
            stones = not moves
            board.play(dice.choice(moves) if moves else None)
            keys.append(board.hash)
    assert longest > 2


def test_suicide_occupied_points_and_other_boards_are_refused():
    board = played(3, "B3 C2 A2")
    assert board.why_not(0) == "its group would have no liberty" and 0 in board.illegal()
    with pytest.raises(ValueError, match="white cannot play B3: there is a stone already"):
        board.play(1)
    with pytest.raises(ValueError, match="there is no point 9 on a board of 3 x 3"):
        board.play(9)
    with pytest.raises(ValueError, match="a side of 1 to 25 points, not 26"):
        Board(26)


def test_area_counts_stones_and_what_they_enclose_and_eyes_are_kept():
    board = played(5, " ".join(f"B{i} D{i}" for i in range(1, 6)))
    assert board.area() == (10, 10)
    assert board.own_eye(point_of("aa", 5)) is False
    eye = played(3, "B3 C1 A2 C2 B2")
    eye.play(None)
    assert eye.own_eye(0) and not eye.own_eye(2)


def test_games_are_written_and_read_again():
    board = played(9, "C3 G7 G3 C7 - E5")
    text = write_sgf(board, RE="B+R", C="(a) \\] remark")
    again = read_sgf(text)
    assert again.moves == board.moves and again.size == 9 and str(again) == str(board)
    assert text.startswith("(;GM[1]FF[4]CA[UTF-8]SZ[9]RE[B+R]")
    assert read_sgf("(;SZ[9]\n;B[cc](;W[dd];B[ee])(;W[ff]))").moves == [20, 30, 40]  # the first branch is the main line
    assert [point_of(letters_of(x, 19), 19) for x in (0, 18, 360, None)] == [0, 18, 360, None]
    old = read_sgf("(;GaMe[1]FileFormat[3]SiZe[9];Black[cc];White[dd])")  # lower-case letters mean nothing
    assert old.size == 9 and old.moves == [20, 30]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("B[aa]", "begins with"),
        ("(;SZ[9];W[aa])", "move 1 is by W"),
        ("(;SZ[9];B[zz])", "'zz' is no point of a board of 9 x 9"),
        ("(;SZ[9];B[aa];W[aa])", "white cannot play A9"),
        ("(;SZ[9]AB[aa][bb])", "AB sets up stones"),
        ("(;SiZe[9]AddBlack[aa][bb];White[cc])", "AB sets up stones"),
        ("(;SZ[9:13])", "no size of a square board"),
        ("(;SZ[\u00b2])", "no size of a square board"),
        ("(;GM[3]SZ[9])", "another game than Go"),
        ("(;", r"cut off: it ends without a \)"),
        ("(;SZ[9];B[aa]", r"cut off: it ends without a \)"),
        ("(;SZ[9];B[aa];W[b", r"cut off: it ends without a \]"),
        ("(;SZ[9];B[aa];W[bb)", r"cut off: it ends without a \]"),
    ],
)
def test_what_is_no_game_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_sgf(text)


def test_positions_are_those_of_the_player_to_move():
    found = positions_of([[0, 1, 5, 3], [2, 2, 1]], size=3)
    assert found.move.tolist() == [0, 1, 5, 3, 2] and found.number.tolist() == [0, 1, 2, 3, 0] and found.cut == 2
    assert found.kinds[1].tolist() == [6, 0, 0, 0, 0, 0, 0, 0, 0]  # white sees a stone of the opponent with two liberties
    assert found.kinds[2].tolist() == [1, 6, 0, 0, 0, 0, 0, 0, 0]
    assert found.recent[3, :4].tolist() == [5, 1, 0, 9] and len(set(found.key[:4].tolist())) == 4
    board = Board(3)
    for move in (0, 1, 5, 3):  # white captures the corner
        board.play(move)
    now = position_now(board)
    assert now.kinds[0].tolist() == [FORBIDDEN, 7, 0, 7, 0, 3, 0, 0, 0]
    assert now.recent[0, :4].tolist() == [3, 5, 1, 0]


def test_there_are_eight_symmetries_and_a_game_may_be_turned_by_any():
    table = symmetries(5)
    assert len({tuple(row) for row in table.tolist()}) == 8 and (table[0] == np.arange(25)).all()
    game = [6, 7, 12, 3, 8, 2, 13, 21]
    plain = positions_of([game], size=5)
    for row in table:
        back = np.argsort(row)
        turned = positions_of([back[game].tolist()], size=5)
        assert (turned.kinds == plain.kinds[:, row]).all()


def test_a_file_that_is_no_table_of_games_is_named(tmp_path):
    head = "id\tdate\tblack_rank\twhite_rank\tkomi\tresult\tmoves\n"
    for part in ("train", "val", "test"):
        (tmp_path / f"{part}.tsv").write_text(head + "1\t2\t3\t4\t5\t6\taabb\n")
    assert read_go(tmp_path).train == [[0, 20]]
    for text, sentence in (
        ("1\t2\n", "2 columns"),
        ("1\t2\t3\t4\t5\t6\taazz\n", "'zz' is no point"),
        ("1\t2\t3\t4\t5\t6\tt", "no point"),
    ):
        (tmp_path / "val.tsv").write_text(head + text)
        with pytest.raises(DataError, match=rf"val\.tsv, line 2: .*{sentence}"):
            read_go(tmp_path)
    for text in ("", head):
        (tmp_path / "val.tsv").write_text(text)
        with pytest.raises(DataError, match=r"val\.tsv has no games"):
            read_go(tmp_path)
    (tmp_path / "val.tsv").write_text("id\tmoves\n")
    with pytest.raises(DataError, match="the columns are id, moves"):
        read_go(tmp_path)


def test_professional_games_are_played_by_the_rules():
    if not os.environ.get("REGARD_DATA"):
        pytest.skip("go_fox_pro is not here: REGARD_DATA is not set")
    try:
        games = read_go(find("go_fox_pro")).test[:5]
    except DataError as error:
        pytest.skip(str(error))
    found = positions_of(games)
    assert found.cut == 0 and (found.kinds[np.arange(len(found.move)), found.move] == 0).all()
