"""What regard can read: for every architecture how its model is built, and what its tensors are called.

All differences between families are data. A name of ours is that of a module or of a parameter, and {i} stands for the number of
a layer on both sides.
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
from regard.pretrained.checkpoint_files import Take
from regard.pretrained.family import Family, HFConfig, TensorNames, conv, layers, sinusoidal_table


def body(width: int, heads: int, depth: int, ffn: Callable[[], nn.Module], *, eps: float = 1e-5, **options: Any) -> Stack:
    return Stack.of(
        "softmax", width=width, heads=heads, depth=depth, ffn=ffn, norm_class=partial(nn.LayerNorm, eps=eps), **options
    )


# GPT-2: a causal decoder with its norms in front.


def gpt2(told: HFConfig) -> LanguageModel:
    width, vocab = told.size("n_embd"), told.size("vocab_size")
    where = Learned(Dims(width, 1, max_len=told.size("n_positions")))
    embed = Tokens(vocab, width, positions=where, scale=False, dropout=told.get("embd_pdrop", 0.1))
    channel = partial(
        FeedForward, width, told.size("n_inner", 4 * width), activation=told.activation("activation_function", "gelu_new")
    )
    stack = body(
        width,
        told.size("n_head"),
        told.size("n_layer"),
        channel,
        eps=told.get("layer_norm_epsilon", 1e-5),
        causal=True,
        dropout=told.get("resid_pdrop", 0.1),
        weight_dropout=told.get("attn_pdrop", 0.1),
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


# BERT: an encoder with its norms behind, and one behind the embeddings.


def bert(told: HFConfig) -> Encoder:
    width, eps, drop = told.size("hidden_size"), told.get("layer_norm_eps", 1e-12), told.get("hidden_dropout_prob", 0.1)
    embed = Tokens(
        told.size("vocab_size"),
        width,
        positions=Learned(Dims(width, 1, max_len=told.size("max_position_embeddings"))),
        segments=told.size("type_vocab_size", 2),
        scale=False,
        norm=nn.LayerNorm(width, eps=eps),
        dropout=drop,
    )
    channel = partial(FeedForward, width, told.size("intermediate_size"), activation=told.activation("hidden_act", "gelu"))
    stack = body(
        width,
        told.size("num_attention_heads"),
        told.size("num_hidden_layers"),
        channel,
        eps=eps,
        norm="post",
        dropout=drop,
        weight_dropout=told.get("attention_probs_dropout_prob", 0.1),
    )
    return Encoder(embed, stack)


def masked(told: HFConfig) -> Reader:
    encoder, act, eps = bert(told), told.activation("hidden_act", "gelu"), told.get("layer_norm_eps", 1e-12)
    table: nn.Embedding = encoder.embed.table  # type: ignore[assignment]
    return Reader(encoder, MaskedToken(encoder.width, len(table.weight), table=table, activation=act, eps=eps))


def labelling(told: HFConfig, head: Callable[..., nn.Module]) -> Reader:
    encoder, drop = bert(told), told.get("classifier_dropout", told.get("hidden_dropout_prob", 0.1))
    return Reader(encoder, head(encoder.width, told.labels, dropout=drop))


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
READ: TensorNames = {f"encoder.{own}": name for own, name in BERT.items()}
MASKED: TensorNames = {
    **READ,
    "head.change": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.next.map.bias": Take(("cls.predictions.bias", "cls.predictions.decoder.bias")),
}
LABELS: TensorNames = {**READ, "head.change": "pooler.dense", "head.map": "classifier"}


# BART and Marian: the Transformer of the paper, norms behind. BART learns positions, Marian has waves.


def seq2seq(told: HFConfig, *, normed: bool) -> Translator:
    """`normed`: with a norm behind the embeddings."""
    vocab, shared = told.size("vocab_size"), told.get("share_encoder_decoder_embeddings", True)
    source, reader = _side(told, "encoder", vocab, normed)
    target, writer = _side(told, "decoder", vocab if shared else told.size("decoder_vocab_size", vocab), normed)
    if shared:
        target.table = source.table
    head = NextToken(target.width, target.vocab, table=target.table, bias=True)
    return Translator(Encoder(source, reader), target, writer, head)


def _side(told: HFConfig, side: str, vocab: int, normed: bool) -> tuple[Tokens, Stack]:
    width, drop, writes = told.size("d_model"), told.get("dropout", 0.1), side == "decoder"
    embed = Tokens(
        vocab,
        width,
        positions=Learned(Dims(width, 1, max_len=told.size("max_position_embeddings"))),
        scale=told.get("scale_embedding", False),
        norm=nn.LayerNorm(width) if normed else None,
        dropout=drop,
    )
    channel = partial(
        FeedForward,
        width,
        told.size(f"{side}_ffn_dim"),
        activation=told.activation("activation_function", "gelu"),
        dropout=told.get("activation_dropout", 0.0),
    )
    stack = body(
        width,
        told.size(f"{side}_attention_heads"),
        told.size(f"{side}_layers"),
        channel,
        norm="post",
        causal=writes,
        cross="softmax" if writes else None,
        dropout=drop,
        weight_dropout=told.get("attention_dropout", 0.0),
    )
    return embed, stack


def seq2seq_names(told: HFConfig, places: Callable[[str], Take]) -> TensorNames:
    own = {"mixer.q": "self_attn.q_proj", "mixer.k": "self_attn.k_proj", "mixer.v": "self_attn.v_proj"}
    own |= {"mixer.out": "self_attn.out_proj", "mixer_norm": "self_attn_layer_norm"}
    own |= {"channel.up": "fc1", "channel.down": "fc2", "channel_norm": "final_layer_norm"}
    reads = {name.replace("mixer", "cross"): theirs.replace("self_attn", "encoder_attn") for name, theirs in own.items()}
    writes = own | {name: theirs for name, theirs in reads.items() if name.startswith("cross")}
    tables = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if told.get("share_encoder_decoder_embeddings", True):
        table = {"encoder.embed.table.weight": Take(("shared.weight", *tables, "lm_head.weight"))}
    else:
        table = {
            "encoder.embed.table.weight": Take((tables[0], "shared.weight")),
            "embed.table.weight": Take((tables[1], "lm_head.weight")),
        }
    return {
        **table,
        "encoder.embed.positions.vectors": places("encoder"),
        "embed.positions.vectors": places("decoder"),
        "encoder.embed.norm": "encoder.layernorm_embedding",
        "embed.norm": "decoder.layernorm_embedding",
        **layers("encoder.stack", "encoder.layers", own),
        **layers("decoder", "decoder.layers", writes),
        "head.map.bias": Take(("final_logits_bias",), lambda x: x[0], torch.zeros, fixed=True),
    }


def bart_names(told: HFConfig) -> TensorNames:
    return seq2seq_names(told, lambda side: Take((f"{side}.embed_positions.weight",), lambda x: x[2:]))  # 2 are never used


def marian_names(told: HFConfig) -> TensorNames:
    return seq2seq_names(told, lambda side: Take((f"{side}.embed_positions.weight",), otherwise=sinusoidal_table, fixed=True))


def _berts(build: Callable[[HFConfig], nn.Module], names: TensorNames, *unneeded: str) -> Family:
    only = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "pruned_heads": {},
    }
    old = [(r"^bert\.", ""), (r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")]
    tied = {"tie_word_embeddings": True} if names is MASKED else {}
    return Family(build, lambda _: names, {**only, **tied}, old, (r"embeddings\.position_ids", *unneeded))


_PAPER = {  # what older configurations say of both
    "tie_word_embeddings": True,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "encoder_layerdrop": 0,
    "decoder_layerdrop": 0,
}

_MASKED = _berts(masked, MASKED, r"pooler\..*", r"cls\.seq_relationship\..*")
_BART = Family(
    partial(seq2seq, normed=True),
    bart_names,
    {**_PAPER, "normalize_embedding": True, "static_position_embeddings": False},
    [(r"^model\.", "")],
    [r"(en|de)coder\.version"],
)

FAMILIES: dict[str, Family] = {
    "BertModel": _berts(bert, BERT, r"pooler\..*"),
    "BertForMaskedLM": _MASKED,
    "BertForPreTraining": _MASKED,  # without its second head, which says whether two sentences follow each other
    "BertForSequenceClassification": _berts(partial(labelling, head=partial(PerSequence, pool="token", deep=True)), LABELS),
    "BertForTokenClassification": _berts(partial(labelling, head=PerVector), LABELS, r"pooler\..*"),
    "GPT2LMHeadModel": Family(
        gpt2,
        lambda _: GPT2,
        {
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        [(r"^transformer\.", "")],
        [r"h\.\d+\.attn\.(masked_)?bias"],  # masks
    ),
    "BartForConditionalGeneration": _BART,
    "BartModel": _BART,  # its output layer is its table of embeddings, so nothing is missing
    "MarianMTModel": Family(
        partial(seq2seq, normed=False),
        marian_names,
        {**_PAPER, "normalize_embedding": False, "static_position_embeddings": True},
        [(r"^model\.", "")],
    ),
}
