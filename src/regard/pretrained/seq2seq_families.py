"""Architectures with an encoder and a decoder: BART, Marian and T5."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.mixers.base import Dims
from regard.models.embedding import Tokens
from regard.models.encoder import Encoder
from regard.models.heads import NextToken, ScaledNextToken
from regard.models.translator import Translator
from regard.positions import Buckets, Learned
from regard.pretrained.checkpoint_files import Joined, Take, TensorLayout
from regard.pretrained.family import Family, HFConfig, TensorNames, body, layers, sinusoidal_table
from regard.spec import Spec

# BART and Marian: the Transformer of the paper, post-norm. BART learns positions, those of Marian are sinusoidal.


def seq2seq(config: HFConfig, *, normed: bool) -> Translator:
    """Build an encoder and decoder; `normed`: with a norm after the embeddings."""
    vocab = config.size("vocab_size")
    shared = config.get("share_encoder_decoder_embeddings", True)
    target_vocab = vocab if shared else config.size("decoder_vocab_size", vocab)
    source, encoder = _side(config, "encoder", vocab, normed)
    target, decoder = _side(config, "decoder", target_vocab, normed)
    if shared:
        target.table = source.table
    head = NextToken(target.width, target.vocab, table=target.table, bias=True)
    return Translator(Encoder(source, encoder), target, decoder, head)


def _side(config: HFConfig, side: str, vocab: int, normed: bool) -> tuple[Tokens, Stack]:
    """Build the embedding and the stack of one side, "encoder" or "decoder"."""
    width, drop = config.size("d_model"), config.get("dropout", 0.1)
    decodes = side == "decoder"
    embed = Tokens(
        vocab,
        width,
        positions=Learned(Dims(width, 1, max_len=config.size("max_position_embeddings"))),
        scale=config.get("scale_embedding", False),
        norm=nn.LayerNorm(width) if normed else None,
        dropout=drop,
    )
    channel = partial(
        FeedForward,
        width,
        config.size(f"{side}_ffn_dim"),
        activation=config.activation("activation_function", "gelu"),
        dropout=config.get("activation_dropout", 0.0),
    )
    stack = body(
        width,
        config.size(f"{side}_attention_heads"),
        config.size(f"{side}_layers"),
        channel,
        norm="post",
        causal=decodes,
        cross="softmax" if decodes else None,
        dropout=drop,
        weight_dropout=config.get("attention_dropout", 0.0),
    )
    return embed, stack


def seq2seq_names(config: HFConfig, positions: Callable[[str], Take]) -> TensorNames:
    own = {"mixer.q": "self_attn.q_proj", "mixer.k": "self_attn.k_proj", "mixer.v": "self_attn.v_proj"}
    own |= {"mixer.out": "self_attn.out_proj", "mixer_norm": "self_attn_layer_norm"}
    own |= {"channel.up": "fc1", "channel.down": "fc2", "channel_norm": "final_layer_norm"}
    mixer = {name: theirs for name, theirs in own.items() if name.startswith("mixer")}
    cross = {name.replace("mixer", "cross"): theirs.replace("self_attn", "encoder_attn") for name, theirs in mixer.items()}
    tables = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if config.get("share_encoder_decoder_embeddings", True):
        table = {"encoder.embed.table.weight": Take(("shared.weight", *tables, "lm_head.weight"))}
    else:
        table = {
            "encoder.embed.table.weight": Take((tables[0], "shared.weight")),
            "embed.table.weight": Take((tables[1], "lm_head.weight")),
        }
    return {
        **table,
        "encoder.embed.positions.vectors": positions("encoder"),
        "embed.positions.vectors": positions("decoder"),
        "encoder.embed.norm": "encoder.layernorm_embedding",
        "embed.norm": "decoder.layernorm_embedding",
        **layers("encoder.stack", "encoder.layers", own),
        **layers("decoder", "decoder.layers", own | cross),
        "head.map.bias": Take(("final_logits_bias",), TensorLayout(ones=(0,)), torch.zeros, frozen=True),
    }


def bart_names(config: HFConfig) -> TensorNames:
    return seq2seq_names(config, lambda side: Take((f"{side}.embed_positions.weight",), TensorLayout(skip=2)))  # 2 are never used


def marian_names(config: HFConfig) -> TensorNames:
    def positions(side: str) -> Take:
        return Take((f"{side}.embed_positions.weight",), default=sinusoidal_table, frozen=True, written=False)

    return seq2seq_names(config, positions)


# T5: pre-norm, RMSNorm, no biases, scores that are not scaled, one table of buckets of distances for all layers of a side.


def t5(config: HFConfig) -> Translator:
    encoder = t5_encoder(config)
    table: nn.Embedding = encoder.embed.table  # type: ignore[assignment]
    vocab, width = table.weight.shape
    embed = Tokens(vocab, width, scale=False, dropout=config.get("dropout_rate", 0.1))
    embed.table = table
    decoder = _t5_stack(config, config.size("num_decoder_layers", config.size("num_layers")), causal=True)
    head = ScaledNextToken(width, vocab, table=table) if _t5_shares(config) else NextToken(width, vocab)
    return Translator(encoder, embed, decoder, head)


def t5_encoder(config: HFConfig) -> Encoder:
    embed = Tokens(config.size("vocab_size"), config.size("d_model"), scale=False, dropout=config.get("dropout_rate", 0.1))
    return Encoder(embed, _t5_stack(config, config.size("num_layers"), causal=False))


def _t5_shares(config: HFConfig) -> bool:
    """Return whether the output layer is the table of embeddings, scaled; newer configurations say it by another name."""
    return config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))


def _t5_stack(config: HFConfig, depth: int, *, causal: bool) -> Stack:
    width, heads, d = config.size("d_model"), config.size("num_heads"), config.size("d_kv")
    drop, eps = config.get("dropout_rate", 0.1), config.get("layer_norm_epsilon", 1e-6)
    dims = Dims(width, heads, key_dim=d, value_dim=d, causal=causal)
    buckets, longest = config.size("relative_attention_num_buckets", 32), config.size("relative_attention_max_distance", 128)
    gated, name = _t5_channel(config)
    spec = Spec("softmax", scale=1.0)
    return Stack.of(
        spec,
        width=width,
        heads=heads,
        head_dim=d,
        depth=depth,
        causal=causal,
        bias=False,
        positions=Buckets(dims, buckets=buckets, longest=longest),
        cross=spec if causal else None,
        ffn=partial(FeedForward, width, config.size("d_ff"), activation=name, gated=gated, dropout=drop, bias=False),
        norm_class=partial(nn.RMSNorm, eps=eps),
        dropout=drop,
        weight_dropout=drop,
    )


def _t5_channel(config: HFConfig) -> tuple[bool, str]:
    """Return whether feed-forward layers are gated, and their activation: "relu", "gated-gelu", which is GPT-2's gelu, ..."""
    kind = str(config.get("feed_forward_proj", "relu"))
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    return kind.startswith("gated-"), HFConfig({"feed_forward_proj": name}).activation("feed_forward_proj", "relu")


def _t5_side(config: HFConfig, ours: str, side: str, parts: dict[str, str]) -> dict[str, str | Take | Joined]:
    """Name the tensors of one side; `parts` are our attention parts and theirs, in the order of the sublayers."""
    own: dict[str, str | Take | Joined] = {}
    for number, (part, theirs) in enumerate(parts.items()):
        own[f"{part}_norm"] = f"layer.{number}.layer_norm"
        own |= {f"{part}.{map_}": f"layer.{number}.{theirs}.{map_}" for map_ in "qkv"}
        own[f"{part}.out"] = f"layer.{number}.{theirs}.o"
    channel = f"layer.{len(parts)}.DenseReluDense"
    up = Take((f"{channel}.wi",))
    gated = Joined((Take((f"{channel}.wi_0",)), Take((f"{channel}.wi_1",))))
    own["channel.up"] = gated if _t5_channel(config)[0] else up
    own |= {"channel.down": f"{channel}.wo", "channel_norm": f"layer.{len(parts)}.layer_norm"}
    table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"  # that of the first layer serves all
    return {
        f"{ours}.blocks.{{i}}.mixer.core.positions.table": table,
        f"{ours}.final_norm": f"{side}.final_layer_norm",
        **layers(ours, f"{side}.block", own),
    }


def t5_encoder_names(config: HFConfig) -> TensorNames:
    names = ("shared.weight", "encoder.embed_tokens.weight")
    return {"embed.table.weight": Take(names), **_t5_side(config, "stack", "encoder", {"mixer": "SelfAttention"})}


def t5_names(config: HFConfig) -> TensorNames:
    names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if _t5_shares(config):
        names.append("lm_head.weight")
    return {
        "encoder.embed.table.weight": Take(tuple(names)),
        "head.map.weight": Take(("lm_head.weight",), otherwise="shared.weight"),  # transformers 5 writes equal ones once
        **_t5_side(config, "encoder.stack", "encoder", {"mixer": "SelfAttention"}),
        **_t5_side(config, "decoder", "decoder", {"mixer": "SelfAttention", "cross": "EncDecAttention"}),
    }


_PAPER = {  # settings of older configurations of both
    "tie_word_embeddings": True,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "encoder_layerdrop": 0,
    "decoder_layerdrop": 0,
}

_BART = Family(
    partial(seq2seq, normed=True),
    bart_names,
    {**_PAPER, "normalize_embedding": True, "static_position_embeddings": False},
    "model.",
    "final_logits_bias",
    unneeded=[r"(en|de)coder\.version"],
    title="BART",
)

SEQ2SEQ_FAMILIES: dict[str, Family] = {
    "BartForConditionalGeneration": _BART,
    "BartModel": _BART._replace(saved_as="BartForConditionalGeneration"),  # its output layer is its table of embeddings
    "MarianMTModel": Family(
        partial(seq2seq, normed=False),
        marian_names,
        {**_PAPER, "normalize_embedding": False, "static_position_embeddings": True},
        "model.",
        "final_logits_bias",
        title="Marian",
    ),
    "T5ForConditionalGeneration": Family(
        t5,
        t5_names,
        {},
        unneeded=[r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"],
        title="T5",
        note="Both forms: T5, and T5 1.1 with gated layers and an output layer of its own.",
    ),
    "T5EncoderModel": Family(t5_encoder, t5_encoder_names, {}, title="T5"),
}
