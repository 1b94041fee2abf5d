"""Networks that read a board of Go: convolutions without pooling or with it, attention between them, or attention alone.

Letters: b boards, p points, m remembered moves, f planes, w width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.blocks.conv_block import ConvBlock
from regard.config import Config
from regard.data.go_board import POINT_KINDS
from regard.data.go_games import REMEMBERED, symmetries
from regard.mixers.places import Places
from regard.models.build import added, encoder, glorot, stack
from regard.models.embedding import Vectors
from regard.models.grid_patterns import check_grid
from regard.options import check_choice

PLANES = POINT_KINDS + REMEMBERED + 1
GO_NETS = ("conv", "pooled", "hybrid", "attention")


def go_planes(kinds: Tensor, recent: Tensor) -> Tensor:
    """Make planes (b p f) of 0 and 1: the kind of every point (b p), the last moves (b m; p is none), and ones.

    Convolutions pad with zeros, so that the plane of ones marks the edge of the board.
    """
    points = kinds.shape[1]
    one_hot = functional.one_hot(kinds.long(), POINT_KINDS)
    marks = one_hot.new_zeros(len(kinds), points + 1, recent.shape[1]).scatter_(1, recent.long()[:, None], 1)[:, :points]
    return torch.cat([one_hot, marks, one_hot.new_ones(len(kinds), points, 1)], -1).float()


class BoardTurns(nn.Module):
    """Turn boards by one of the eight symmetries of a square each, with their moves."""

    views: Tensor
    moves: Tensor

    def __init__(self, side: int) -> None:
        super().__init__()
        table = torch.from_numpy(symmetries(side).copy())
        back = torch.cat([table.argsort(1), torch.full((8, 1), side * side)], 1)  # no move stays none
        self.register_buffer("views", table, persistent=False)
        self.register_buffer("moves", back, persistent=False)

    def forward(self, which: Tensor, kinds: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
        """Return the turned kinds (b p) and moves (b m) of boards, by the number (b) of a symmetry for each."""
        return kinds.gather(1, self.views[which]), self.moves[which].gather(1, moves.long())

    def back(self, which: Tensor, scores: Tensor) -> Tensor:
        """Return scores (b p) of turned boards as those of the boards themselves."""
        return scores.gather(1, self.moves[which][:, :-1])


class GridTokens(nn.Module):
    """Apply a block over tokens to the cells of a grid, (b w h h), row by row."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        return self.block(tokens).mT.unflatten(2, x.shape[2:])


class GoNet(nn.Module):
    """Score every point of a board: kinds (b p) and recent moves (b m) -> (b p), -inf where a stone is not allowed.

    conv: residual blocks of two 3 x 3 convolutions at the full size of the board. pooled: the same with the maximum of 2 x 2
    points between the halves, so that the second half sees a quarter of the points, and every four points share what they know.
    hybrid: every `every`-th block is one of attention. attention: those alone, on the planes of each point, without convolutions.
    """

    def __init__(self, config: Config, *, net: str, side: int = 19, every: int = 4) -> None:
        super().__init__()
        self.net, self.side = check_choice("net", net, GO_NETS), side
        if net in ("hybrid", "attention"):
            check_grid(config.mixer, side)
        self.turns = BoardTurns(side)
        self.head = nn.Linear(config.width, 1)
        self.reader = encoder(config, Vectors(PLANES, config.width, positions=added(config))) if net == "attention" else None
        if self.reader is None:
            self._build(config, every)

    def _build(self, config: Config, every: int) -> None:
        block = partial(ConvBlock, norm="batch")
        self.stem = block(PLANES, config.width, kernel=5, layers=1, residual=False)
        self.positions = added(config) if self.net == "hybrid" else None
        places = [number for number in range(config.depth) if self.net == "hybrid" and (number + 1) % every == 0]
        attention = iter(glorot(stack(config, depth=len(places))) if places else ())
        self.blocks = nn.ModuleList(
            GridTokens(next(attention)) if number in places else block(config.width, config.width)
            for number in range(config.depth)
        )

    def forward(self, kinds: Tensor, recent: Tensor) -> Tensor:
        planes = go_planes(kinds, recent)
        tokens = self._convolved(planes) if self.reader is None else self.reader(planes).x
        return self.head(tokens)[..., 0].masked_fill(kinds != 0, -torch.inf)

    def _convolved(self, planes: Tensor) -> Tensor:
        """Compute vectors (b p w) of all points."""
        x = self.stem(planes.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2))
        if self.positions is not None:
            tokens = x.flatten(2).mT
            x = self.positions.add(tokens, Places.of(tokens)).mT.unflatten(2, x.shape[2:])
        for number, block in enumerate(self.blocks):
            if self.net == "pooled" and number == len(self.blocks) // 2:
                x = functional.max_pool2d(x, 2, ceil_mode=True)
            x = block(x)
        if self.net == "pooled":
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)[..., : self.side, : self.side]
        return x.flatten(2).mT
