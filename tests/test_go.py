"""Go as a task: networks that play by the rules, symmetries, games that go on."""

import re

import numpy as np
import pytest
import torch

from regard.cli.inputs import input_lines
from regard.data.go_games import position_now, positions_of, read_sgf
from regard.data.move_floors import MoveOffsets, drawn_move_scores
from regard.models.go_net import GO_NETS, PLANES, BoardTurns, go_planes
from regard.tasks import config, make_task
from regard.training.checkpoints import load_run
from regard.training.fit import fit

TINY = {
    "width": 8, "heads": 2, "depth": 2, "every": 2, "ffn": 8, "batch_tokens": 361 * 4, "warmup": 1, "steps": 4, "precision": "32",
    "validate_every": 2, "save_every": 2, "schedule": "constant",
}  # fmt: skip


@pytest.fixture
def games(tmp_path):
    head = "id\tdate\tblack_rank\twhite_rank\tkomi\tresult\tmoves\n"
    for part in ("train", "val", "test"):
        (tmp_path / f"{part}.tsv").write_text(head + "1\t2\t3\t4\t5\t6\tpddpppdd\n2\t2\t3\t4\t5\t6\tpddpaaaa\n")
    return tmp_path


def tiny(folder=None, **changes):
    made = make_task(config("go").replace({**TINY, **changes}))
    if folder is not None:
        made.read(folder)
    return made


@pytest.mark.parametrize("net", ["hybrid", "attention"])
def test_a_neighbourhood_of_another_board_is_refused(net):
    tiny(net=net, mixer="Neighbourhood(19, 2)").model()
    with pytest.raises(ValueError, match="Neighbourhood\\(9, 2\\) is for a grid of 9 columns, and this one has 19"):
        tiny(net=net, mixer="Neighbourhood(9, 2)").model()


def test_planes_are_kinds_moves_and_ones():
    kinds, recent = torch.tensor([[0, 1, 9, 5]]), torch.tensor([[3, 4]])
    found = go_planes(kinds, recent)
    assert found.shape == (1, 4, 13) and PLANES == 19
    assert [row.nonzero().flatten().tolist() for row in found[0]] == [[0, 12], [1, 12], [9, 12], [5, 10, 12]]


@pytest.mark.parametrize("net", GO_NETS)
def test_only_allowed_points_have_a_probability(net):
    torch.manual_seed(0)
    made = tiny(net=net)
    board = read_sgf("(;SZ[19];B[pd];W[dp];B[pp])")
    now = position_now(board)
    logs = made._points(made.model().eval(), board)
    assert torch.isfinite(logs).tolist() == (now.kinds[0] == 0).tolist() and int((logs > -torch.inf).sum()) == 358
    torch.testing.assert_close(logs.exp().sum(), torch.tensor(1.0))


def test_pooling_has_the_parameters_of_none():
    counts = {net: sum(x.numel() for x in tiny(net=net).model().parameters()) for net in GO_NETS}
    assert counts["conv"] == counts["pooled"]


def test_turned_boards_have_turned_moves_and_scores_come_back():
    turns, game = BoardTurns(5), [6, 7, 12, 3, 8]
    found = positions_of([game], size=5)
    kinds, move = torch.from_numpy(found.kinds.astype(np.int64)), torch.from_numpy(found.move.astype(np.int64))
    for which in range(8):
        every = torch.full((5,), which)
        turned, moves = turns(every, kinds, torch.stack([move, torch.full((5,), 25)], 1))
        again = positions_of([moves[:, 0].tolist()], size=5)
        assert (again.kinds == turned.numpy()).all() and (moves[:, 1] == 25).all()
        assert torch.equal(turns.back(every, turned), kinds)


def test_the_mean_over_all_symmetries_does_not_depend_on_how_a_board_is_turned():
    torch.manual_seed(0)
    made = tiny(views=8)
    model = made.model().eval()
    found = made._points(model, read_sgf("(;SZ[19];B[pd];W[dp])"))
    mirrored = made._points(model, read_sgf("(;SZ[19];B[dd];W[pp])"))
    torch.testing.assert_close(found.unflatten(0, (19, 19)).flip(1).flatten(), mirrored)


def test_a_run_is_trained_goes_on_exactly_and_scores(games, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    made = tiny(games)
    assert made.splits["train"] == range(7) and "3 moves" in made.describe_data()[0]  # one of each split
    fit(made, whole, accelerator="cpu", quiet=True)
    fit(tiny(games, steps=2), parts, accelerator="cpu", quiet=True)
    fit(tiny(games), parts, accelerator="cpu", quiet=True)
    one, other = load_run(whole), load_run(parts)
    assert all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())
    scores = made.score(made.model(), "test")
    assert scores["positions"] == 7 and scores["new"] == 0 and scores["top5"] >= scores["top1"] >= 0


def test_a_drawn_move_is_one_of_the_allowed_points():
    found = positions_of([[0, 1, 2]], size=2)  # four points allowed, then three, and of the last two one is suicide
    allowed = (found.kinds == 0).sum(1)
    assert allowed.tolist()[:2] == [4, 3] and 1 <= allowed[2] < 3
    assert drawn_move_scores(found, 2) == pytest.approx(
        (100 * (1 / allowed).mean(), 100 * (np.minimum(2, allowed) / allowed).mean())
    )


def test_offsets_are_those_from_the_last_move_and_points_that_are_not_allowed_are_left_out():
    side, none = 5, 25
    train = MoveOffsets(np.array([none, 0, 6, 12, 12]), np.array([12, 1, 7, 13, 17]), side)  # centre; right, three times; down
    found = positions_of([[6, 7, 8, 13]], size=side)  # no last move; right; right; down
    assert train.ranks(found).above.tolist() == [3, 0, 0, 1]  # up and left of the centre is never played, three others were
    assert train.ranks(found).equal.tolist() == [22, 1, 1, 1], "and so are all other points but those three"
    assert train.scores(found, top=2) == (50.0, 75.0)
    assert train.scores(found, top=4) == pytest.approx((50.0, 75 + 25 / 22)), "one of 22 points is drawn"
    taken = positions_of([[7, 0, 6, 5]], size=side)  # right of 6 is a stone, left of it was never played
    assert train.ranks(taken).above[3] == 1, "down from 6 alone is more frequent: right of it is not allowed"


def test_scores_have_their_floors_beside_them_and_they_are_printed(games):
    made = tiny(games)
    scores = made.score(made.model(), "test")
    assert {name: scores[name] for name in made.floors("test")} == made.floors("test")
    assert scores["floor"] > scores["floor_drawn"] > 0 and scores["floor_top5"] >= scores["floor"]
    drawn, offset = made.describe_data()[1:]
    assert drawn.endswith(" is right for 0.3 % of val and 0.3 % of test")
    assert offset.endswith(f" is right for {scores['floor']:.1f} % of val and {scores['floor']:.1f} % of test")


def test_likeliest_moves_and_whole_games_are_written(tmp_path):
    torch.manual_seed(0)
    made = tiny()
    model = made.model()
    game = "(;GM[1]SZ[19]\nC[a (remark)];B[pd];W[dp]\n;B[pp])"
    (tmp_path / "game.sgf").write_text(game)
    _, lines = input_lines(str(tmp_path / "game.sgf"))
    (line,) = lines
    assert re.fullmatch(r"([A-HJ-T]\d+ \d+\.\d %(, )?){5}", made.predict(model, [line.text])[0])
    played = tiny(play=30, temperature=1.0).predict(model, [line.text])[0]
    board = read_sgf(played)
    assert len(board.moves) == 33 and board.moves[:3] == [72, 288, 300] and re.search(r"RE\[[BW]\+\d+\.5\]", played)
    assert tiny(play=30, temperature=1.0).predict(model, [line.text]) == [played]
    with pytest.raises(ValueError, match="reads boards of 19 x 19, and this one has 9 x 9"):
        made.predict(model, ["(;SZ[9])"])
    with pytest.raises(ValueError, match="there is no file"):
        input_lines("nowhere.sgf")
    (tmp_path / "empty.sgf").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.sgf is empty"):
        input_lines(str(tmp_path / "empty.sgf"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"net": "cnn"}, "net cannot be 'cnn'"),
        ({"views": 2}, "views must be 1, or 8"),
        ({"temperature": -1.0}, "temperature must not be below 0"),
        ({"smoothing": 0.1}, "a forbidden one has not"),
        ({"net": "hybrid", "every": 3}, "has no attention"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny(**changes)


def test_points_of_equal_probability_share_what_is_right(games):
    """A network with pooling gives four points one score: it must not be right whichever of them was played."""
    made = tiny(games, net="pooled")
    rows = np.asarray(made.splits["test"])
    model = made.model()

    def alike(model, batch, views):  # noqa: ARG001
        return torch.where(batch.source == 0, 0.0, -torch.inf)

    made._logs = alike
    allowed = (made.positions.at(rows).kinds == 0).sum(1)
    scores = made.score(model, "test")
    assert scores["top1"] == pytest.approx(100 * (1 / allowed).mean())
    assert scores["top5"] == pytest.approx(100 * (np.minimum(5, allowed) / allowed).mean())
    assert (scores["top1"], scores["top5"]) == pytest.approx((scores["floor_drawn"], scores["floor_drawn_top5"]))
