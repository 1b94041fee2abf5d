"""Masked tokens: which of a batch are predicted, and what is read in their place. Devlin et al. 2018, arXiv:1810.04805.

Letters: b batch, n tokens, k predicted places, v vocabulary, c letters of a spelled word.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.data.batch import MASK, NO_LABEL
from regard.data.vocabulary import FIRST_TEXT_ID


class Masking(NamedTuple):
    """Shares of masking: of all tokens those that are predicted; of these the masked and the random ones. The rest is kept."""

    predicted: float = 0.15
    masked: float = 0.8
    random: float = 0.1


class MaskedTokens(NamedTuple):
    """Tokens of which some are replaced, and those that are predicted."""

    inputs: Tensor  # as the tokens, (b n) or (b n 1 + c)
    places: Tensor  # (b k)
    targets: Tensor  # (b k): the token that was there; NO_LABEL where a row has fewer than k


def mask_tokens(
    tokens: Tensor, valid: Tensor | None, masking: Masking, forms: Tensor, generator: torch.Generator | None = None
) -> MaskedTokens:
    """Draw the places that are predicted, and replace most of their tokens.

    Of every row the share `predicted` of its text tokens, rounded, and at least one; special tokens and padding never. Each of
    them is by itself replaced by MASK, by a random token of text, or kept. `tokens` are ids (b n), or spelled words
    (b n 1 + c) with the id in front. `forms` (v) or (v, 1 + c) is the input of each token alone. Shapes depend on n alone.
    """
    ids = tokens if tokens.dim() == 2 else tokens[..., 0]
    text = ids >= FIRST_TEXT_ID
    places, real = draw_places(text if valid is None else text & valid, masking.predicted, generator)
    there = ids.gather(1, places)
    index = places if tokens.dim() == 2 else places[..., None].expand(-1, -1, tokens.shape[2])
    draws = torch.rand(places.shape, generator=generator, device=ids.device)
    others = torch.randint(FIRST_TEXT_ID, len(forms), places.shape, generator=generator, device=ids.device)
    shown = there.new_full((), MASK).where(draws < masking.masked, others)
    kept = ~real | (draws >= masking.masked + masking.random)
    if tokens.dim() == 3:
        kept = kept[..., None]
    replaced = tokens.gather(1, index).where(kept, forms[shown])
    return MaskedTokens(tokens.scatter(1, index, replaced), places, there.masked_fill(~real, NO_LABEL))


def draw_places(can: Tensor, share: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw a share of the places where `can` (b n) is True: places (b k), and which of them are real (b k)."""
    count = can.sum(1)
    wanted = (share * count).round().long().clamp_min(1).minimum(count)
    most = max(1, math.ceil(share * can.shape[1]))
    draws = torch.rand(can.shape, generator=generator, device=can.device).masked_fill(~can, 2.0)
    places = draws.topk(most, largest=False).indices  # in the order of their draws
    return places, torch.arange(most, device=can.device) < wanted[:, None]
