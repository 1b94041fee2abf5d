"""An architecture that reads images: ViT."""

from __future__ import annotations

from functools import partial

from regard.blocks.feedforward import FeedForward
from regard.mixers.base import Dims
from regard.models.encoder import Encoder
from regard.models.encoder_head import Reader
from regard.models.heads import PerSequence
from regard.models.image_embedding import Patches
from regard.positions import Learned
from regard.pretrained.checkpoint_files import CheckpointError, Take, TensorLayout
from regard.pretrained.family import Family, HFConfig, TensorNames, body, layers, under


def vit(config: HFConfig) -> Encoder:
    """Build an encoder of patches behind a class token, pre-norm."""
    width, drop = config.size("hidden_size"), config.get("hidden_dropout_prob", 0.0)
    image, side = config.get("image_size", 224), config.size("patch_size", 16)
    sizes = [image, image] if isinstance(image, int) else image
    if not isinstance(sizes, list) or any(not isinstance(size, int) or size % side for size in sizes):
        raise CheckpointError(f"image_size in config.json must be divisible by patch_size={side}, not {image!r}")
    rows, columns = (size // side for size in sizes)
    embed = Patches(
        config.size("num_channels", 3),
        side,
        width,
        positions=Learned(Dims(width, 1, max_len=rows * columns + 1)),
        front=1,
        dropout=drop,
    )
    activation = config.activation("hidden_act", "gelu")
    stack = body(
        width,
        config.size("num_attention_heads"),
        config.size("num_hidden_layers"),
        partial(FeedForward, width, config.size("intermediate_size"), activation=activation),
        eps=config.get("layer_norm_eps", 1e-12),
        bias=config.get("qkv_bias", True),
        out_bias=True,
        dropout=drop,
        weight_dropout=config.get("attention_probs_dropout_prob", 0.0),
    )
    return Encoder(embed, stack)


def vit_reader(config: HFConfig) -> Reader:
    encoder = vit(config)
    return Reader(encoder, PerSequence(encoder.width, config.labels, pool="token"))


VIT: TensorNames = {
    "embed.front": Take(("embeddings.cls_token",), TensorLayout(ones=(0,))),
    "embed.map": "embeddings.patch_embeddings.projection",
    "embed.positions.vectors": Take(("embeddings.position_embeddings",), TensorLayout(ones=(0,))),
    **layers(
        "stack",
        "encoder.layer",
        {
            "mixer_norm": "layernorm_before",
            "mixer.q": "attention.attention.query",
            "mixer.k": "attention.attention.key",
            "mixer.v": "attention.attention.value",
            "mixer.out": "attention.output.dense",
            "channel_norm": "layernorm_after",
            "channel.up": "intermediate.dense",
            "channel.down": "output.dense",
        },
    ),
    "stack.final_norm": "layernorm",
}
_VIT = Family(
    vit, lambda _: VIT, {}, "vit.", ".*", unneeded=[r"pooler\..*"], title="ViT", note="Images of the size in the configuration."
)

IMAGE_FAMILIES: dict[str, Family] = {
    "ViTModel": _VIT,
    "ViTForImageClassification": _VIT._replace(
        build=vit_reader, names=lambda _: {**under("encoder", VIT), "head.map": "classifier"}, outside="classifier"
    ),
}
