"""The stem of an image model from its setting."""

from __future__ import annotations

import dataclasses

from regard.blocks.conv_block import conv_stages, conv_stem
from regard.models.image_embedding import ConvTokens, ImageEmbedding, Patches
from regard.options import Options
from regard.tasks.image_config import CnnStem, ConvStem, PatchStem


def image_stem(stem: Options, channels: int, width: int, *, front: int = 0, dropout: float = 0.0) -> ImageEmbedding:
    """Build what makes tokens (b n width) of an image (b channels h w), with `front` learned vectors before them."""
    if isinstance(stem, PatchStem):
        return Patches(channels, stem.side, width, fill=True, front=front, dropout=dropout)
    given = dataclasses.asdict(stem)
    if isinstance(stem, ConvStem):
        return ConvTokens(channels, conv_stem(channels, width, **given), width, front=front, dropout=dropout)
    assert isinstance(stem, CnnStem)
    net = conv_stages(channels, first=given.pop("channels"), **given)
    return ConvTokens(channels, net, width, front=front, dropout=dropout)
