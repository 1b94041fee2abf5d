"""Architectures of transformers: how each model is built, and the names of its tensors.

All differences between families are data. A key is the name of a module or of a parameter in regard, a value the name in the
checkpoint; {i} is the number of a layer in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.mixers.base import Dims
from regard.models.causal_lm import LanguageModel
from regard.models.embedding import Tokens
from regard.models.encoder import Encoder
from regard.models.encoder_head import Reader
from regard.models.heads import MaskedToken, NextToken, PerSequence, PerVector
from regard.models.translator import Translator
from regard.positions import Learned
from regard.pretrained.checkpoint_files import Take, TensorLayout
from regard.pretrained.decoder_families import DECODER_FAMILIES
from regard.pretrained.family import Family, HFConfig, TensorNames, conv, layers, sinusoidal_table, under


def body(width: int, heads: int, depth: int, ffn: Callable[[], nn.Module], *, eps: float = 1e-5, **options: Any) -> Stack:
    """Build a stack of softmax attention with layer norms of this epsilon."""
    norm = partial(nn.LayerNorm, eps=eps)
    return Stack.of("softmax", width=width, heads=heads, depth=depth, ffn=ffn, norm_class=norm, **options)


# GPT-2: a causal decoder, pre-norm.


def gpt2(config: HFConfig) -> LanguageModel:
    width, vocab = config.size("n_embd"), config.size("vocab_size")
    positions = Learned(Dims(width, 1, max_len=config.size("n_positions")))
    embed = Tokens(vocab, width, positions=positions, scale=False, dropout=config.get("embd_pdrop", 0.1))
    activation = config.activation("activation_function", "gelu_new")
    channel = partial(FeedForward, width, config.size("n_inner", 4 * width), activation=activation)
    stack = body(
        width,
        config.size("n_head"),
        config.size("n_layer"),
        channel,
        eps=config.get("layer_norm_epsilon", 1e-5),
        causal=True,
        dropout=config.get("resid_pdrop", 0.1),
        weight_dropout=config.get("attn_pdrop", 0.1),
    )
    return LanguageModel(embed, stack, NextToken(width, vocab, table=embed.table))


GPT2: TensorNames = {
    "embed.table.weight": Take(("wte.weight", "lm_head.weight")),
    "embed.positions.vectors": "wpe.weight",
    "stack.final_norm": "ln_f",
    **layers(
        "stack",
        "h",
        {
            "mixer_norm": "ln_1",
            "mixer.q": conv("attn.c_attn", 0, 3),
            "mixer.k": conv("attn.c_attn", 1, 3),
            "mixer.v": conv("attn.c_attn", 2, 3),
            "mixer.out": conv("attn.c_proj"),
            "channel_norm": "ln_2",
            "channel.up": conv("mlp.c_fc"),
            "channel.down": conv("mlp.c_proj"),
        },
    ),
}


# BERT: an encoder, post-norm, with a norm after the embeddings.


def bert(config: HFConfig) -> Encoder:
    width = config.size("hidden_size")
    eps = config.get("layer_norm_eps", 1e-12)
    drop = config.get("hidden_dropout_prob", 0.1)
    embed = Tokens(
        config.size("vocab_size"),
        width,
        positions=Learned(Dims(width, 1, max_len=config.size("max_position_embeddings"))),
        segments=config.size("type_vocab_size", 2),
        scale=False,
        norm=nn.LayerNorm(width, eps=eps),
        dropout=drop,
    )
    activation = config.activation("hidden_act", "gelu")
    channel = partial(FeedForward, width, config.size("intermediate_size"), activation=activation)
    stack = body(
        width,
        config.size("num_attention_heads"),
        config.size("num_hidden_layers"),
        channel,
        eps=eps,
        norm="post",
        dropout=drop,
        weight_dropout=config.get("attention_probs_dropout_prob", 0.1),
    )
    return Encoder(embed, stack)


def masked(config: HFConfig) -> Reader:
    encoder = bert(config)
    activation = config.activation("hidden_act", "gelu")
    eps = config.get("layer_norm_eps", 1e-12)
    table: nn.Embedding = encoder.embed.table  # type: ignore[assignment]
    return Reader(encoder, MaskedToken(encoder.width, len(table.weight), table=table, activation=activation, eps=eps))


def labelling(config: HFConfig, head: Callable[..., nn.Module]) -> Reader:
    encoder = bert(config)
    drop = config.get("classifier_dropout", config.get("hidden_dropout_prob", 0.1))
    return Reader(encoder, head(encoder.width, config.labels, dropout=drop))


BERT: TensorNames = {
    "embed.table.weight": Take(("embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")),
    "embed.segments.weight": "embeddings.token_type_embeddings.weight",
    "embed.positions.vectors": "embeddings.position_embeddings.weight",
    "embed.norm": "embeddings.LayerNorm",
    **layers(
        "stack",
        "encoder.layer",
        {
            "mixer.q": "attention.self.query",
            "mixer.k": "attention.self.key",
            "mixer.v": "attention.self.value",
            "mixer.out": "attention.output.dense",
            "mixer_norm": "attention.output.LayerNorm",
            "channel.up": "intermediate.dense",
            "channel.down": "output.dense",
            "channel_norm": "output.LayerNorm",
        },
    ),
}
READ: TensorNames = under("encoder", BERT)
MASKED: TensorNames = {
    **READ,
    "head.change": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.next.map.bias": Take(("cls.predictions.bias", "cls.predictions.decoder.bias")),
}
LABELS: TensorNames = {**READ, "head.change": "pooler.dense", "head.map": "classifier"}


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


def _berts(build: Callable[[HFConfig], nn.Module], names: TensorNames, *unneeded: str, saved_as: str | None = None) -> Family:
    only = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "pruned_heads": {},
    }
    older = [(r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")]
    tied = {"tie_word_embeddings": True} if names is MASKED else {}
    outside = r".*" if names is BERT else r"cls\.|classifier\."
    without = (r"embeddings\.position_ids", *unneeded)
    return Family(build, lambda _: names, {**only, **tied}, "bert.", outside, older, without, saved_as)


_PAPER = {  # settings of older configurations of both
    "tie_word_embeddings": True,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "encoder_layerdrop": 0,
    "decoder_layerdrop": 0,
}

_POOLER, _NEXT = r"pooler\..*", r"cls\.seq_relationship\..*"
_BART = Family(
    partial(seq2seq, normed=True),
    bart_names,
    {**_PAPER, "normalize_embedding": True, "static_position_embeddings": False},
    "model.",
    "final_logits_bias",
    unneeded=[r"(en|de)coder\.version"],
)

FAMILIES: dict[str, Family] = {
    "BertModel": _berts(bert, BERT, _POOLER),
    "BertForMaskedLM": _berts(masked, MASKED, _POOLER, _NEXT),
    "BertForPreTraining": _berts(masked, MASKED, _POOLER, _NEXT, saved_as="BertForMaskedLM"),  # not for the next sentence
    "BertForSequenceClassification": _berts(partial(labelling, head=partial(PerSequence, pool="token", deep=True)), LABELS),
    "BertForTokenClassification": _berts(partial(labelling, head=PerVector), LABELS, _POOLER),
    "GPT2LMHeadModel": Family(
        gpt2,
        lambda _: GPT2,
        {
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        "transformer.",
        unneeded=[r"h\.\d+\.attn\.(masked_)?bias"],  # masks
    ),
    "BartForConditionalGeneration": _BART,
    "BartModel": _BART._replace(saved_as="BartForConditionalGeneration"),  # its output layer is its table of embeddings
    "MarianMTModel": Family(
        partial(seq2seq, normed=False),
        marian_names,
        {**_PAPER, "normalize_embedding": False, "static_position_embeddings": True},
        "model.",
        "final_logits_bias",
    ),
    **DECODER_FAMILIES,
}

REFUSED: dict[str, str] = {  # architectures by the beginning of their names, and why regard has no equal model
    "Reformer": "its buckets are drawn anew in every pass, and tokens that meet in several rounds count several times; "
    "reformer(...) of regard keeps its buckets and counts every pair once, so that no weights would give equal outputs",
}
