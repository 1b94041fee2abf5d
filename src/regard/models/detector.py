"""Detectors: object queries that read an image by cross attention (DETR), and a head for every cell of a feature map.

Both give the same: for each of their n slots scores of c classes and of no object, and a box (x, y, width, height) from 0 to 1.
A box is that of an anchor, moved and scaled in the space of the logistic function's argument.

Letters: b images, n slots (queries or cells), w width, c classes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.conv_block import ConvBlock
from regard.blocks.stack import Stack
from regard.config import Config
from regard.mixers.places import Places
from regard.models.build import encoder, glorot, stack
from regard.models.grid_patterns import check_grid
from regard.models.image_embedding import ImageEmbedding
from regard.models.translator import CrossWiring

ANCHOR_SIZE = 0.3  # of a canvas: about that of an object


class Detected(NamedTuple):
    """Hold the answers of all slots."""

    scores: Tensor  # (b n c + 1): the last is that of no object
    boxes: Tensor  # (b n 4): x, y, width, height


class SlotHead(nn.Module):
    """Scores and boxes of slots (b n w), from their vectors and an anchor each."""

    def __init__(self, width: int, classes: int, anchors: Tensor, *, learned: bool) -> None:
        super().__init__()
        self.classes = nn.Linear(width, classes + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
        nn.init.zeros_(self.boxes[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.boxes[-1].bias)  # type: ignore[arg-type]
        self.anchors = nn.Parameter(anchors.logit(), requires_grad=learned)

    def forward(self, x: Tensor, anchors: Tensor | None = None) -> Detected:
        """Answer for slots (b n w), with boxes from their own anchors, or from these (b n 4), before the logistic function."""
        moved = (self.anchors if anchors is None else anchors) + self.boxes(x).to(self.anchors.dtype)
        return Detected(self.classes(x), moved.sigmoid())


def spread_anchors(count: int) -> Tensor:
    """Return anchors (count 4) in the cells of the smallest square grid that has so many."""
    return cell_anchors(*[math.isqrt(count - 1) + 1] * 2)[:count]


def cell_anchors(rows: int, columns: int) -> Tensor:
    """Return anchors (rows * columns 4) in the middle of every cell, row by row."""
    y, x = torch.meshgrid((torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns, indexing="ij")
    size = torch.full_like(x, ANCHOR_SIZE)
    return torch.stack([x, y, size, size], -1).flatten(0, 1)


class QueryDetector(nn.Module):
    """Detect a set of objects by queries that are learned: the decoder of an encoded image. Carion et al. 2020, arXiv:2005.12872.

    The queries are the decoder's tokens. They see each other, so that no two answer with the same object, and read the cells of
    the image. One head is behind every layer of the decoder. A query begins as the position of its anchor, where positions are
    added to tokens, so that it finds cells nearby. With `chosen` a head is behind the encoder too, and the decoder begins with
    the cells that most likely have an object and with their boxes, as the two stages of Zhu et al. 2020, arXiv:2010.04159.

    `config` has the sizes and mechanisms, with the positions of the grid and its cells as max_len; `embed` makes the `grid`
    (rows, columns) of tokens of an image.
    """

    def __init__(
        self,
        config: Config,
        embed: ImageEmbedding,
        *,
        classes: int,
        queries: int,
        grid: tuple[int, int],
        chosen: bool = False,
    ) -> None:
        super().__init__()
        check_grid(config.mixer, grid[1])
        self.encoder = encoder(config, embed)
        without = dataclasses.replace(config, positions="none", max_len=max(queries, config.max_len))
        self.decoder: Stack = glorot(stack(without, reads=True))
        anchors = spread_anchors(queries)
        self.queries = nn.Parameter(torch.randn(queries, config.width) + _waves(embed, anchors, grid))
        self.wiring = CrossWiring(config.wiring, self.encoder.stack, self.decoder, config.width)
        self.head = SlotHead(config.width, classes, anchors, learned=not chosen)
        self.cells = SlotHead(config.width, classes, cell_anchors(*grid), learned=False) if chosen else None

    def forward(self, images: Tensor) -> list[Detected]:
        """Return the answers behind every layer of the decoder, the last one at the end, and those of all cells before them."""
        read = self.encoder(images, layers=self.wiring.norms is not None)
        x, anchors, found = self.queries.to(read.x.dtype).expand(len(images), -1, -1), None, []
        if self.cells is not None:
            first = self.cells(read.x)
            near, anchors = likely_slots(first, read.x, x.shape[1])
            x, found = x + near, [first]
        layers = self.decoder.layers(x, context=self.wiring(read), context_valid=read.places)
        norm = self.decoder.final_norm or nn.Identity()
        return [*found, *(self.head(norm(y), anchors) for y in layers[:-2]), self.head(layers[-1], anchors)]


def likely_slots(found: Detected, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Choose the slots that most likely have an object: their vectors (b count w), and their boxes before the logistic function.

    The boxes have no gradient.
    """
    empty = found.scores.detach().float().softmax(-1)[..., -1]
    rows = empty.topk(count, largest=False).indices[..., None]
    boxes = found.boxes.detach().gather(1, rows.expand(-1, -1, 4))
    return x.gather(1, rows.expand(-1, -1, x.shape[-1])), boxes.clamp(1e-3, 1 - 1e-3).logit()


def _waves(embed: ImageEmbedding, anchors: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what the embedding adds to the cells (n w) that hold the middles of anchors."""
    if embed.positions is None:
        return torch.zeros(len(anchors), embed.width)
    rows, columns = grid
    cells = torch.zeros(1, rows * columns, embed.width)
    with torch.no_grad():
        added = embed.positions.add(cells, Places.of(cells))[0]
    return added[(anchors[:, 1] * rows).long() * columns + (anchors[:, 0] * columns).long()]


class DenseDetector(nn.Module):
    """Detect objects by the cells of a feature map, each for the object whose middle is nearest: convolutions, no attention.

    `convolutions` of 3 x 3 with residual connections are behind the embedding; `grid` are its rows and columns.
    """

    def __init__(self, embed: ImageEmbedding, *, classes: int, convolutions: int, grid: tuple[int, int], norm: str) -> None:
        super().__init__()
        self.embed = embed
        pairs, one = divmod(convolutions, 2)
        width = embed.width
        self.trunk = nn.Sequential(*(ConvBlock(width, width, layers=layers, norm=norm) for layers in [2] * pairs + [1] * one))
        self.head = SlotHead(width, classes, cell_anchors(*grid), learned=False)

    def forward(self, images: Tensor) -> list[Detected]:
        self.embed.check_image(images)
        cells = self.trunk(self.embed.drop(self.embed.features(images)))
        return [self.head(cells.flatten(2).mT)]


def equal_convolutions(config: Config) -> int:
    """Count the convolutions (w w 3 3) with as many weights as an encoder and a decoder of these sizes, at least one."""
    w, ffn = config.width, 2 * config.width * config.ffn
    decoder = config.depth if config.decoder_depth is None else config.decoder_depth
    weights = config.depth * (4 * w * w + ffn) + decoder * (8 * w * w + ffn)
    return max(1, round(weights / (9 * w * w)))
