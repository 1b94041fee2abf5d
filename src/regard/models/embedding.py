"""Embeddings: tokens or vectors become vectors of one width, with positions added.

Letters: b batch, n tokens, w width, v vocabulary, f features of a vector.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import check_fraction
from regard.checks import check_dense, check_valid, need
from regard.mixers.dims import Can, Dims
from regard.mixers.places import PaddingMask, Places, mask_padding
from regard.mixers.position_interface import Positions
from regard.mixers.state import State, check_state
from regard.ops.dropout import Dropout
from regard.positions import positions as make_positions

WHOLE = (torch.long, torch.int)


def add_positions(spec: str, dims: Dims) -> tuple[Positions | None, str | None]:
    """Split positions by where they act: those added to tokens, and the text of those that act in every mixer or block."""
    made = make_positions(spec, dims)
    if made.needs != Can.NOTHING or made.every_block:
        return None, spec
    if made.name == "none":
        return None, None
    return made, None


class Embedding(nn.Module):
    """Map (b n ...) to (b n w): the vector of each token plus that of its position, if `positions` are of the kind that is added.

    A `norm` may follow their sum, as in BERT.

    `width` is that of a token, `dropout` that of the sum. A subclass writes `vectors`.

    >>> from regard.models import Embedding, Patches, Spelled, Tokens, Vectors
    >>> all(issubclass(kind, Embedding) for kind in (Patches, Spelled, Tokens, Vectors))
    True
    """

    def __init__(
        self, width: int, *, positions: Positions | None = None, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if positions is not None and (positions.needs != Can.NOTHING or positions.every_block):
            where = "enter every block" if positions.every_block else "act inside the mixers"
            raise ValueError(f"{positions.name} positions {where}: give them to the stack, not to the embedding")
        self.width = need("width", width)
        self.positions = positions
        self.norm = norm
        dropout = check_fraction("dropout", dropout)
        self.drop = Dropout(dropout)

    def vectors(self, x: Tensor) -> Tensor:
        """Return the vectors of tokens x, without positions."""
        raise NotImplementedError

    def places(self, x: Tensor, valid: Tensor | None = None, after: State | None = None, *, packed: bool = False) -> Places:
        """Make the places of checked tokens x (b n ...), which a model gives to the embedding and to its layers.

        `after` is the state of a model that has read tokens already: positions go on from there. `packed` promises that all
        padding lies behind the real tokens: on a GPU, where that cannot be seen without waiting, tokens are then not moved.
        """
        check_dense(x, "tokens")
        if x.dim() < 2:
            self.vectors(x)  # which refuses it
        check_valid(valid, x.shape[0], x.shape[1], "the tokens")
        if after is None:
            return Places.of(x, valid, packed=packed)
        check_state(after, x)
        return Places.of(x, valid, after.t, after.start)

    def forward(self, x: Tensor, valid: PaddingMask = None, after: State | None = None) -> Tensor:
        """Return the vectors of tokens x (b n ...), with zeros at padding. `valid` is a mask (b n), or the `places` of x."""
        places = valid if isinstance(valid, Places) else self.places(x, valid, after)
        x = self.unpadded(x, places.valid)
        y = self.vectors(x)
        if self.positions is not None:
            y = self.positions.add(y, places)
        if self.norm is not None:
            y = self.norm(y)
        y = self.drop(y)
        return mask_padding(y, places.valid)

    @staticmethod
    def unpadded(x: Tensor, valid: Tensor | None) -> Tensor:
        """Set padding of x (b n ...) to zero. It may hold anything: NaN, or a token that is in no vocabulary."""
        if valid is None:
            return x
        inner = [1] * (x.dim() - 2)
        padding = ~valid.view(*valid.shape, *inner)
        return x.masked_fill(padding, 0)


class Tokens(Embedding):
    """A learned vector for every token of a vocabulary, (b n) -> (b n w).

    The factor sqrt(w), as in the paper, allows vectors small enough for a shared output layer that still weigh as much as their
    positions. With `segments` every token belongs to one of them, as in BERT's pairs of sentences, and x may be (b n 2):
    the token, then its segment; (b n) is all in segment 0.

    `positions` are of the kind that is added to tokens, `dropout` is that of the sums, `norm` follows them; `vocab` and `width`
    are the sizes of the table, and scale=False leaves the factor out.

    >>> import torch
    >>> from regard.models import Tokens
    >>> tuple(Tokens(20, 16)(torch.randint(20, (2, 5))).shape)
    (2, 5, 16)
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        positions: Positions | None = None,
        segments: int = 0,
        scale: bool = True,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(width, positions=positions, norm=norm, dropout=dropout)
        self.vocab = need("vocab", vocab)
        self.scale = math.sqrt(width) if scale else 1.0
        self.table = nn.Embedding(vocab, width)
        segments = need("segments", segments, 0)
        self.segments = nn.Embedding(segments, width) if segments else None
        std = width**-0.5
        nn.init.normal_(self.table.weight, std=std)
        if self.segments is not None:
            nn.init.normal_(self.segments.weight, std=0.02)

    def vectors(self, x: Tensor) -> Tensor:
        """Embed tokens (b n) or (b n 2); vectors (b n w), as returned here or by `mixed`, are returned unchanged."""
        wide = x.dim() == 3
        if x.is_floating_point() and wide and x.shape[-1] == self.width:
            return x
        paired = self.segments is not None and wide and x.shape[-1] == 2
        shaped = x.dim() == 2 or paired
        if not shaped or x.dtype not in WHOLE:
            needed = "(batch, length)"
            if self.segments is not None:
                needed += " or (batch, length, 2)"
            raise ValueError(f"tokens are whole numbers of shape {needed}, not {x.dtype} of shape {tuple(x.shape)}")
        ids = x[..., 0] if paired else x
        y = self.table(ids) * self.scale
        if self.segments is None:
            return y
        segment = self.segments(x[..., 1]) if paired else self.segments.weight[0]
        return y + segment

    def mixed(self, weights: Tensor) -> Tensor:
        """Average the vectors of tokens by weights over the vocabulary, (b n v) -> (b n w)."""
        weights = weights.to(self.table.weight.dtype)
        y = weights @ self.table.weight * self.scale
        if self.segments is None:
            return y
        return y + self.segments.weight[0]


class Vectors(Embedding):
    """Vectors of any width f, such as frames of speech or pixels, through a linear map: (b n f) -> (b n w).

    `positions` are of the kind that is added to tokens, `dropout` is that of the sums, `features` is f and `width` w.

    >>> import torch
    >>> from regard.models import Vectors
    >>> tuple(Vectors(3, 16)(torch.randn(2, 5, 3)).shape)
    (2, 5, 16)
    """

    def __init__(self, features: int, width: int, *, positions: Positions | None = None, dropout: float = 0.0) -> None:
        super().__init__(width, positions=positions, dropout=dropout)
        features = need("features", features)
        self.map = nn.Linear(features, width)

    def vectors(self, x: Tensor) -> Tensor:
        shaped = x.dim() == 3 and x.shape[-1] == self.map.in_features
        if not shaped or not x.is_floating_point():
            needed = f"(batch, length, {self.map.in_features})"
            raise ValueError(f"vectors are numbers of shape {needed}, not {x.dtype} of shape {tuple(x.shape)}")
        return self.map(x)


class Spelled(Embedding):
    """Embed words and their spelling: a word's own vector, and the maximum over a convolution of its letters.

    Takes words and letters in one tensor (b n 1 + c): the word, then its letters, PAD = 0 behind them. Windows of 3 letters.
    Ma & Hovy 2016, arXiv:1603.01354. In training a share `forget` of the words is hidden behind the unknown word, so that
    spelling is learned.

    `positions` are of the kind that is added to tokens, `dropout` is that of the sums; `vocab` counts words, `letters` the signs
    they are spelled with, `width` is w, `spelling` the number of features of a spelling, and `unknown` the id of the unknown
    word.

    >>> import torch
    >>> from regard.models import Spelled
    >>> words = torch.tensor([[[7, 1, 2, 3], [1, 4, 5, 0]]])  # the second word is unknown, and spelled with two letters
    >>> tuple(Spelled(20, 10, 16)(words).shape)
    (1, 2, 16)
    """

    def __init__(
        self,
        vocab: int,
        letters: int,
        width: int,
        *,
        spelling: int = 128,
        positions: Positions | None = None,
        dropout: float = 0.0,
        forget: float = 0.0,
        unknown: int = 1,
    ) -> None:
        super().__init__(width, positions=positions, dropout=dropout)
        self.words = nn.Embedding(vocab, width)
        self.letters = nn.Embedding(letters, 64, padding_idx=0)
        nn.init.normal_(self.words.weight, std=0.1)
        self.window = nn.Conv1d(64, spelling, 3, padding=1)
        self.map = nn.Linear(width + spelling, width)
        self.forget = check_fraction("forget", forget)
        self.unknown = unknown

    def vectors(self, x: Tensor) -> Tensor:
        shaped = x.dim() == 3 and x.shape[-1] >= 2
        if not shaped or x.dtype not in WHOLE:
            needed = "(batch, length, 1 + letters)"
            raise ValueError(f"spelled words are whole numbers of shape {needed}, not {x.dtype} of shape {tuple(x.shape)}")
        words = x[..., 0]
        letters = x[..., 1:].flatten(0, 1)
        if self.training and self.forget:
            draws = torch.rand(words.shape, device=words.device)
            words = words.masked_fill(draws < self.forget, self.unknown)
        spelt = self._spelling(letters).unflatten(0, words.shape)
        own = self.words(words)
        return self.map(torch.cat([own, spelt], -1))

    def _spelling(self, letters: Tensor) -> Tensor:
        """Encode the letters (b n, c) of each word as one vector (b n, spelling)."""
        x = self.drop(self.letters(letters))
        y = self.window(x.mT).relu()  # (b n, spelling, letters): never below 0
        padding = (letters == 0)[:, None]
        return y.masked_fill(padding, 0).amax(-1)
