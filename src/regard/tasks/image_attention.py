"""Attention of a trained model on an image: the weights of every layer and head over the cells that its stem makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from regard.data.colour_images import read_image
from regard.models.encoder_head import Reader
from regard.models.image_embedding import ImageEmbedding, Patches
from regard.tasks.support import evaluating
from regard.tasks.text_attention import LayerAttention, StackTokens, TextAttention, text_attention

PICTURE_SIDE = 384  # pixels of the picture below the maps


@dataclass(frozen=True, repr=False, kw_only=True)
class ImageAttention(TextAttention):
    """Hold the attention of all layers on one image, whose path is `text`. Tokens are cells of a grid, row by row."""

    rows: int  # of cells
    columns: int
    front: int  # tokens before the cells, such as a class token
    covered: tuple[float, float]  # of the height and width; above 1 where patches reach beyond the image
    picture: np.ndarray  # uint8, the square of the file that is read, (side side 3)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "grid": [self.rows, self.columns], "front": self.front}

    @property
    def on_grid(self) -> list[LayerAttention]:
        """List the layers whose keys are the cells; those behind pooled queries have fewer."""
        return [layer for layer in self.layers if len(layer.keys) == self.front + self.rows * self.columns]

    def received(self, layer: LayerAttention) -> Tensor:
        """Return how much each cell receives in each head (h rows columns), the mean over queries, as a multiple of its share.

        1 is what every token would receive if all received the same.
        """
        return self._maps(layer, layer.weights.mean(1))

    def given(self, layer: LayerAttention, query: int) -> Tensor:
        """Return how much one query gives to each cell in each head (h rows columns), as a multiple of its share."""
        return self._maps(layer, layer.weights[:, query])

    def query_of(self, row: int, column: int) -> int:
        """Return the token of a cell; rows and columns are counted from 1."""
        if not (1 <= row <= self.rows and 1 <= column <= self.columns):
            raise ValueError(f"there is no patch {row},{column}: they go from 1,1 to {self.rows},{self.columns} (row, column)")
        return self.front + (row - 1) * self.columns + column - 1

    def _maps(self, layer: LayerAttention, weights: Tensor) -> Tensor:
        """Return the weights (h m) of the cells as a grid."""
        return (weights[:, self.front :] * len(layer.keys)).unflatten(-1, (self.rows, self.columns))


def image_attention(model: nn.Module, forward: Callable[[], object], path: str, answer: str, side: int) -> ImageAttention:
    """Run a pass of a model over one image of `side` pixels, and collect the weights of its layers."""
    assert isinstance(model, Reader)
    embed = model.encoder.embed
    assert isinstance(embed, ImageEmbedding)
    rows, columns = embed.grid(side, side)
    front = 0 if embed.front is None else len(embed.front)
    cells = [f"{row},{column}" for row in range(1, rows + 1) for column in range(1, columns + 1)]
    tokens = StackTokens([*("class token" for _ in range(front)), *cells])
    with evaluating(model):
        found = text_attention(model, forward, [tokens], path, answer)
    high, wide = embed.sides if isinstance(embed, Patches) else (side / rows, side / columns)
    return ImageAttention(
        found.text,
        found.answer,
        found.layers,
        found.missing,
        rows=rows,
        columns=columns,
        front=front,
        covered=(rows * high / side, columns * wide / side),
        picture=read_image(path, PICTURE_SIDE, False).transpose(1, 2, 0),
    )
