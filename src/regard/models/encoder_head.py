"""Models that read: an encoder and a head."""

from __future__ import annotations

from torch import Tensor, nn

from regard.models.encoder import Encoder
from regard.models.heads import Matching


class Reader(nn.Module):
    """Predict a label per vector, a label per sequence, or the token at each mask, by the head on top of an encoder."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        read = self.encoder(x, valid)
        return self.head(read.x, read.valid)


class Matcher(nn.Module):
    """Encode two sequences by one encoder, and classify the pair."""

    def __init__(self, encoder: Encoder, head: Matching) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor, y: Tensor, valid: Tensor | None = None, y_valid: Tensor | None = None) -> Tensor:
        one, two = self.encoder(x, valid), self.encoder(y, y_valid)
        return self.head(one.x, one.valid, two.x, two.valid)
