"""The way in: tokens, vectors or patches of an image become vectors of one width that know where they stand.

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
from regard.positions import positions as make_positions

WHOLE = (torch.long, torch.int)


def add_positions(spec: str, dims: Dims) -> tuple[Positions | None, str | None]:
    """Where positions belong: those that are added to tokens, and the text of those that act in every mixer or block."""
    made = make_positions(spec, dims)
    if made.needs != Can.NOTHING or made.every_block:
        return None, spec
    return (None if made.name == "none" else made), None


class Embedding(nn.Module):
    """(b n ...) -> (b n w): what each token is, and where it stands, if `positions` are of the kind that is added.

    A `norm` may stand behind their sum, as BERT's does.
    """

    def __init__(
        self, width: int, *, positions: Positions | None = None, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if positions is not None and (positions.needs != Can.NOTHING or positions.every_block):
            where = "enter every block" if positions.every_block else "act inside the mixers"
            raise ValueError(f"{positions.name} positions {where}: give them to the stack, not to the embedding")
        self.width, self.positions, self.norm = need("width", width), positions, norm
        self.drop = nn.Dropout(check_fraction("dropout", dropout))

    def vectors(self, x: Tensor) -> Tensor:
        """What each token is."""
        raise NotImplementedError

    def places(self, x: Tensor, valid: Tensor | None = None, after: State | None = None) -> Places:
        """Make the places of checked tokens x (b n ...), which a model gives to the embedding and to its layers.

        `after` is the state of a model that has read tokens already: positions go on from there.
        """
        check_dense(x, "tokens")
        if x.dim() < 2:
            self.vectors(x)  # which refuses it
        check_valid(valid, x.shape[0], x.shape[1], "the tokens")
        if after is None:
            return Places.of(x, valid)
        check_state(after, x)
        return Places.of(x, valid, after.t, after.start)

    def forward(self, x: Tensor, valid: PaddingMask = None, after: State | None = None) -> Tensor:
        """Return the vectors of tokens x (b n ...), with zeros at padding. `valid` is a mask (b n), or the `places` of x."""
        places = valid if isinstance(valid, Places) else self.places(x, valid, after)
        y = self.vectors(self.unpadded(x, places.valid))
        if self.positions is not None:
            y = self.positions.add(y, places)
        return mask_padding(self.drop(y if self.norm is None else self.norm(y)), places.valid)

    @staticmethod
    def unpadded(x: Tensor, valid: Tensor | None) -> Tensor:
        """Set padding of x (b n ...) to zero. It may hold anything: NaN, or a token that is in no vocabulary."""
        if valid is None:
            return x
        return x.masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)


class Tokens(Embedding):
    """A learned vector for every token of a vocabulary, (b n) -> (b n w).

    Scaled by sqrt(w), as in the paper, the vectors can be small enough to be an output layer as well, and yet be heard beside
    their positions. With `segments` every token belongs to one of them, as in BERT's pairs of sentences, and x may be (b n 2):
    the token, then its segment; (b n) is all in segment 0.
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
        self.vocab, self.scale = need("vocab", vocab), math.sqrt(width) if scale else 1.0
        self.table = nn.Embedding(vocab, width)
        self.segments = nn.Embedding(segments, width) if need("segments", segments, 0) else None
        nn.init.normal_(self.table.weight, std=width**-0.5)
        if self.segments is not None:
            nn.init.normal_(self.segments.weight, std=0.02)

    def vectors(self, x: Tensor) -> Tensor:
        """Vectors (b n w), as they come from here or from `mixed`, stay what they are."""
        if x.is_floating_point() and x.dim() == 3 and x.shape[-1] == self.width:
            return x
        paired = self.segments is not None and x.dim() == 3 and x.shape[-1] == 2
        if not (x.dim() == 2 or paired) or x.dtype not in WHOLE:
            wanted = "(batch, length)" + (" or (batch, length, 2)" if self.segments is not None else "")
            raise ValueError(f"tokens are whole numbers of shape {wanted}, not {x.dtype} of shape {tuple(x.shape)}")
        y = self.table(x[..., 0] if paired else x) * self.scale
        if self.segments is None:
            return y
        return y + (self.segments(x[..., 1]) if paired else self.segments.weight[0])

    def mixed(self, weights: Tensor) -> Tensor:
        """Something between tokens: their vectors by weights over the vocabulary, (b n v) -> (b n w)."""
        y = weights.to(self.table.weight.dtype) @ self.table.weight * self.scale
        return y if self.segments is None else y + self.segments.weight[0]


class Vectors(Embedding):
    """Vectors of any width f, such as frames of speech or pixels, through a linear map: (b n f) -> (b n w)."""

    def __init__(self, features: int, width: int, *, positions: Positions | None = None, dropout: float = 0.0) -> None:
        super().__init__(width, positions=positions, dropout=dropout)
        self.map = nn.Linear(need("features", features), width)

    def vectors(self, x: Tensor) -> Tensor:
        if x.dim() != 3 or x.shape[-1] != self.map.in_features or not x.is_floating_point():
            wanted = f"(batch, length, {self.map.in_features})"
            raise ValueError(f"vectors are numbers of shape {wanted}, not {x.dtype} of shape {tuple(x.shape)}")
        return self.map(x)


class Patches(Embedding):
    """An image (b c height width) cut into squares, each a token, row by row: (b n w), n = (height / side) (width / side).

    Dosovitskiy et al. 2020, arXiv:2010.11929.
    """

    def __init__(self, channels: int, side: int, width: int, *, positions: Positions | None = None, dropout: float = 0.0) -> None:
        super().__init__(width, positions=positions, dropout=dropout)
        self.side = need("side", side)
        self.map = nn.Conv2d(need("channels", channels), width, side, stride=side)

    def vectors(self, x: Tensor) -> Tensor:
        return self.map(x).flatten(2).mT

    def places(self, x: Tensor, valid: Tensor | None = None, after: State | None = None) -> Places:
        """Make the places of the patches of an image."""
        wrong = x.dim() != 4 or x.shape[1] != self.map.in_channels or x.shape[2] % self.side or x.shape[3] % self.side
        if wrong or not x.is_floating_point():
            wanted = f"(batch, {self.map.in_channels}, height, width), both divisible by {self.side}"
            raise ValueError(f"an image has numbers of shape {wanted}, not {x.dtype} of shape {tuple(x.shape)}")
        if valid is not None or after is not None:
            raise ValueError("an image is read whole: it has no padding and nothing before it")
        patches = x.shape[2] // self.side * (x.shape[3] // self.side)
        return Places.of(x.new_empty(x.shape[0], patches))

    def forward(self, x: Tensor, valid: PaddingMask = None, after: State | None = None) -> Tensor:
        places = valid if isinstance(valid, Places) else self.places(x, valid, after)
        y = self.vectors(x)
        return self.drop(y if self.positions is None else self.positions.add(y, places))


class Spelled(Embedding):
    """Words by what they are and how they are spelt: a word's own vector beside the maximum over a convolution of its letters.

    Takes words and letters in one tensor (b n 1 + c): the word, then its letters, PAD = 0 behind them. Windows of 3 letters.
    Ma & Hovy 2016, arXiv:1603.01354. In training a share `forget` of the words is hidden behind the unknown word, so that
    spelling is learned.
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
        self.words, self.letters = nn.Embedding(vocab, width), nn.Embedding(letters, 64, padding_idx=0)
        nn.init.normal_(self.words.weight, std=0.1)
        self.window = nn.Conv1d(64, spelling, 3, padding=1)
        self.map = nn.Linear(width + spelling, width)
        self.forget, self.unknown = check_fraction("forget", forget), unknown

    def vectors(self, x: Tensor) -> Tensor:
        if x.dim() != 3 or x.shape[-1] < 2 or x.dtype not in WHOLE:
            wanted = "(batch, length, 1 + letters)"
            raise ValueError(f"spelled words are whole numbers of shape {wanted}, not {x.dtype} of shape {tuple(x.shape)}")
        words, letters = x[..., 0], x[..., 1:]
        if self.training and self.forget:
            hidden = torch.rand(words.shape, device=words.device) < self.forget
            words = words.masked_fill(hidden, self.unknown)
        letters = letters.flatten(0, 1)
        spelt = self.window(self.drop(self.letters(letters)).mT).relu()  # (b n, spelling, letters): never below 0
        spelt = spelt.masked_fill((letters == 0)[:, None], 0).amax(-1).unflatten(0, words.shape)
        return self.map(torch.cat([self.words(words), spelt], -1))
