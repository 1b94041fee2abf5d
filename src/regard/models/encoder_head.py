"""Models that read: an encoder and a head."""

from __future__ import annotations

from torch import Tensor, nn

from regard.models.encoder import Encoder
from regard.models.heads import Matching


class Reader(nn.Module):
    """Predict a label per vector, a label per sequence, or the token at each mask, by the head on top of an encoder.

    `encoder` makes vectors, `head` scores of them.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> from regard.models import Encoder, PerSequence, Reader, Tokens
    >>> encoder = Encoder(Tokens(20, 16), Stack.of("Local(4)", width=16, heads=2, depth=1))
    >>> tuple(Reader(encoder, PerSequence(16, 3))(torch.randint(20, (2, 5))).shape)
    (2, 3)
    """

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        read = self.encoder(x, valid)
        return self.head(read.x, read.valid)


class Matcher(nn.Module):
    """Encode two sequences by one encoder, and classify the pair.

    `encoder` makes vectors of both, `head` scores of the pair.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> from regard.models import Encoder, Matcher, Matching, Tokens
    >>> encoder = Encoder(Tokens(20, 16), Stack.of("linear", width=16, heads=2, depth=1))
    >>> tuple(Matcher(encoder, Matching(16, 3))(torch.randint(20, (2, 5)), torch.randint(20, (2, 7))).shape)
    (2, 3)
    """

    def __init__(self, encoder: Encoder, head: Matching) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor, y: Tensor, valid: Tensor | None = None, y_valid: Tensor | None = None) -> Tensor:
        one, two = self.encoder(x, valid), self.encoder(y, y_valid)
        return self.head(one.x, one.valid, two.x, two.valid)
