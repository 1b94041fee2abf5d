"""Architectures with an encoder and a decoder: BART and Marian."""

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
from regard.models.heads import NextToken
from regard.models.translator import Translator
from regard.positions import Learned
from regard.pretrained.checkpoint_files import Take, TensorLayout
from regard.pretrained.family import Family, HFConfig, TensorNames, body, layers, sinusoidal_table

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
    ),
}
