"""Go: predict the move of a professional, name the likeliest moves of a game, or play it to its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from regard.checks import need
from regard.data.batch import Batch
from regard.data.go_board import Board, name_of
from regard.data.go_games import GoPositions, joined_positions, position_now, positions_of, read_go, read_sgf, write_sgf
from regard.data.locate import find
from regard.data.move_floors import MoveOffsets, MoveRanks, drawn_move_scores
from regard.models.go_net import GO_NETS, GoNet
from regard.models.grid_patterns import check_grid
from regard.options import check_choice
from regard.tasks.go_config import Go
from regard.tasks.support import device_under, evaluating, learned
from regard.tasks.task import ENCODER, Task
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy

BOARD_SIDE = 19
WATCHED_POSITIONS = 8192  # positions of a validation, spread over the split
SCORED_AT_ONCE = 1024  # positions of a batch when nothing is kept for a backward pass
NAMED_MOVES = 5  # likeliest moves
PHASES = {"moves_1_50": (0, 50), "moves_51_150": (50, 150), "moves_151_on": (150, 1000)}
KOMI = 7.5
OF_ATTENTION = ("mixer", "heads", "ffn", "gated", "norm", "positions", "weight_dropout", "dropout", "activation")


class GoTask(Task):
    """The next move of a game; scored by how often the professional's is the likeliest, or among the five likeliest.

    An example is the number of a position. Points where a stone is not allowed (occupied, suicide, superko) are never likely.
    Floors are a point drawn among the allowed ones, and the allowed point whose offset from the last move train has most often.
    """

    best = ("top1", "max")
    steady = True
    answering = ("views", "play", "temperature")
    config: Go

    def __init__(self, config: Go) -> None:
        super().__init__(config)
        check_choice("net", config.net, GO_NETS)
        need("every", config.every)
        for name in ("games", "play"):
            need(name, getattr(config, name), 0)
        if config.views not in (1, 8):
            raise ValueError(f"views must be 1, or 8 for all symmetries, not {config.views!r}")
        if config.temperature < 0:
            raise ValueError(f"temperature must not be below 0, but it is {config.temperature!r}")
        if config.smoothing:
            raise ValueError("smoothing gives some probability to every point, which a forbidden one has not: use smoothing=0")
        if config.net == "hybrid" and config.every > config.depth:
            raise ValueError(
                f"net=hybrid with every={config.every} of depth={config.depth} has no attention: use a smaller every"
            )
        self.bodies = ENCODER if config.net in ("hybrid", "attention") else ()
        self.positions: GoPositions | None = None

    def unused(self) -> dict[str, str]:
        found = super().unused() | dict.fromkeys(("share", "smoothing"), "tokens")
        if not self.bodies:
            found |= dict.fromkeys((*OF_ATTENTION, "max_len"), "net=hybrid and net=attention")
        return found if self.config.net == "hybrid" else found | {"every": "net=hybrid"}

    def read(self, folder: Path | None = None) -> None:
        parts = [positions_of(games) for games in read_go(find("go_fox_pro", folder), self.config.games)]
        self.positions = joined_positions(parts)
        ends = np.cumsum([0, *(len(part.move) for part in parts)]).tolist()
        names = ("train", "val", "test")
        self.splits = {name: range(a, b) for name, a, b in zip(names, ends, ends[1:], strict=False)}
        self.sample = "(;GM[1]SZ[19];B[pd];W[dp])"

    def describe_data(self) -> list[str]:
        counts = ", ".join(f"{len(part):,} {name}" for name, part in self.splits.items())
        left_out = f"{learned(self.positions).cut:,} moves behind one that the rules do not allow are left out"
        floors = {name: self.floors(name) for name in ("val", "test")}
        drawn, offset = (" and ".join(f"{x[k]:.1f} % of {name}" for name, x in floors.items()) for k in ("floor_drawn", "floor"))
        return [
            f"positions: {counts}; {left_out}",
            f"floor: a point drawn among the allowed ones is right for {drawn}",
            f"floor: the most frequent offset from the last move is right for {offset}",
        ]

    def floors(self, split: str) -> dict[str, float]:
        """Score moves without a network: `floor` by offsets from the last move in train, `floor_drawn` by chance."""
        found, train = learned(self.positions), np.asarray(self.splits["train"])
        offsets = MoveOffsets(found.recent[train, 0], found.move[train], BOARD_SIDE)
        positions = found.at(np.asarray(self.splits[split]))
        near, drawn = offsets.scores(positions, NAMED_MOVES), drawn_move_scores(positions, NAMED_MOVES)
        return {"floor": near[0], "floor_top5": near[1], "floor_drawn": drawn[0], "floor_drawn_top5": drawn[1]}

    def size(self, example: int) -> int:  # noqa: ARG002 - all boards have one size
        return BOARD_SIDE * BOARD_SIDE

    def batch(self, examples: Sequence[int]) -> Batch:
        found, rows = learned(self.positions), np.asarray(examples)
        return _batch_of(found.at(rows))

    def check_mixers(self) -> None:
        if self.bodies:
            check_grid(self.config.mixer, BOARD_SIDE)

    def model(self) -> nn.Module:
        return GoNet(self.config, net=self.config.net, side=BOARD_SIDE, every=self.config.every)

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None and isinstance(model, GoNet)
        kinds, recent, target = batch.source, batch.extra["recent"], batch.target
        if self.config.symmetric and model.training:
            which = torch.randint(8, (len(kinds),), device=kinds.device)
            kinds, moves = model.turns(which, kinds, torch.cat([recent, target[:, None]], 1))
            recent, target = moves[:, :-1], moves[:, -1]
        return cross_entropy(model(kinds, recent).float(), target)

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Score a part of the validation split, without turning boards."""
        apart = max(1, len(self.splits["val"]) // WATCHED_POSITIONS)
        return self._scored(model, self.splits["val"][::apart], views=1)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return {**self._scored(model, self.splits[split], views=self.config.views), **self.floors(split)}

    def _scored(self, model: nn.Module, examples: Sequence[int], views: int) -> dict[str, float]:
        found, rows = learned(self.positions), np.asarray(examples)
        ranks, nll = self._ranks(model, rows, views)
        first = ranks.within(1)
        scores = {"top1": _percent(first), "top5": _percent(ranks.within(NAMED_MOVES)), "loss": float(nll.mean())}
        number = found.number[rows]
        for name, (start, end) in PHASES.items():
            scores[f"top1_{name}"] = _percent(first[(number >= start) & (number < end)])
        known = np.unique(found.key[np.asarray(self.splits["train"])])
        new = ~np.isin(found.key[rows], known)
        return {**scores, "top1_new": _percent(first[new]), "new": float(new.sum()), "positions": float(len(rows))}

    def _ranks(self, model: nn.Module, rows: np.ndarray, views: int) -> tuple[MoveRanks, np.ndarray]:
        """Return the ranks of the moves that were played, and minus their log-probabilities."""
        above, equal, losses = [], [], []
        with evaluating(model):
            for start in range(0, len(rows), SCORED_AT_ONCE):
                batch = self.batch(rows[start : start + SCORED_AT_ONCE].tolist()).to(device_under(model))
                logs = self._logs(model, batch, views)
                assert batch.target is not None
                own = logs.gather(1, batch.target[:, None])
                above.append((logs > own).sum(1).cpu())
                equal.append((logs == own).sum(1).cpu())
                losses.append(-own[:, 0].cpu())
        return MoveRanks(*(torch.cat(x).numpy() for x in (above, equal))), torch.cat(losses).numpy()

    def _logs(self, model: nn.Module, batch: Batch, views: int) -> Tensor:
        """Compute log-probabilities of points (b p), the mean of probabilities over symmetries."""
        assert isinstance(model, GoNet)
        kinds, recent = batch.source, batch.extra["recent"]
        total = None
        for view in range(views):
            which = torch.full((len(kinds),), view, device=kinds.device)
            turned = model.turns(which, kinds, recent) if view else (kinds, recent)
            probability = model(*turned).float().softmax(1)
            probability = model.turns.back(which, probability) if view else probability
            total = probability if total is None else total + probability
        assert total is not None
        return (total / views).log()

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Answer every game in SGF: with its likeliest next moves, or with the game after `play` more moves."""
        boards = [read_sgf(line) for line in lines]
        for board in boards:
            if board.size != BOARD_SIDE:
                raise ValueError(
                    f"the network reads boards of {BOARD_SIDE} x {BOARD_SIDE}, and this one has {board.size} x {board.size}"
                )
        with evaluating(model):
            return [self._played(model, board) if self.config.play else self._named(model, board) for board in boards]

    def _points(self, model: nn.Module, board: Board) -> Tensor:
        """Compute log-probabilities (p) of the next move."""
        batch = _batch_of(position_now(board)).to(device_under(model))
        return self._logs(model, batch, self.config.views)[0].cpu()

    def _named(self, model: nn.Module, board: Board) -> str:
        if not board.legal():
            return "pass"
        best = self._points(model, board).topk(NAMED_MOVES)
        pairs = zip(best.values.exp().tolist(), best.indices.tolist(), strict=True)
        return ", ".join(f"{name_of(point, BOARD_SIDE)} {100 * share:.1f} %" for share, point in pairs if share > 0)

    def _played(self, model: nn.Module, board: Board) -> str:
        """Play on, and count the area: a player passes where all allowed points are own eyes, and two passes end a game."""
        dice = torch.Generator().manual_seed(self.config.seed)
        for _ in range(self.config.play):
            if board.moves[-2:] == [None, None]:
                break
            useful = [point for point in board.legal() if not board.own_eye(point)]
            board.play(self._chosen(self._points(model, board), useful, dice) if useful else None)
        black, white = board.area()
        ahead = black - white - KOMI
        result = f"{'B' if ahead > 0 else 'W'}+{abs(ahead)}"
        return write_sgf(board, KM=str(KOMI), RU="Tromp-Taylor", PB="regard", PW="regard", RE=result)

    def _chosen(self, logs: Tensor, points: list[int], dice: torch.Generator) -> int:
        among = logs[points]
        if not self.config.temperature:
            return points[int(among.argmax())]
        return points[int(torch.multinomial((among / self.config.temperature).softmax(0), 1, generator=dice))]


def _batch_of(found: GoPositions) -> Batch:
    kinds, recent, move = (torch.from_numpy(x.astype(np.int64)) for x in (found.kinds, found.recent, found.move))
    return Batch(kinds, None, move, None, {"recent": recent})


def _percent(right: np.ndarray) -> float:
    return 100 * float(right.mean()) if len(right) else 0.0
