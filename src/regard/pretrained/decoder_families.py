"""Causal architectures: GPT-2 with learned positions, Llama, Mistral and Qwen2 with rotary ones, BLOOM with ALiBi."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.mixers.base import Dims
from regard.models.causal_lm import LanguageModel
from regard.models.embedding import Tokens
from regard.models.heads import NextToken
from regard.patterns import Local
from regard.positions import Learned, Rotary
from regard.pretrained.checkpoint_files import CheckpointError, Joined, Take, TensorLayout
from regard.pretrained.family import Family, HFConfig, TensorNames, body, conv, layers
from regard.spec import Spec

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


# Llama, Mistral, Qwen2: pre-norm, RMSNorm, rotary positions, grouped heads, gated feed-forward layers.


def llama(config: HFConfig, *, biases: tuple[bool, bool] | None = None) -> LanguageModel:
    """Build a model; `biases`: of q, k and v, and of the output, where the configuration does not name them."""
    width, heads, vocab = config.size("hidden_size"), config.size("num_attention_heads"), config.size("vocab_size")
    head_dim = config.size("head_dim", width // heads)
    embed = Tokens(vocab, width, scale=False)
    ffn = partial(
        FeedForward,
        width,
        config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        gated=True,
        bias=config.get("mlp_bias", False),
    )
    bias, out_bias = biases or (config.get("attention_bias", False),) * 2
    stack = Stack.of(
        window_specs(config),
        width=width,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_dim=head_dim,
        depth=config.size("num_hidden_layers"),
        causal=True,
        bias=bias,
        out_bias=out_bias,
        positions=rotary(config, Dims(width, heads, key_dim=head_dim, value_dim=head_dim)),
        ffn=ffn,
        norm_class=partial(nn.RMSNorm, eps=config.get("rms_norm_eps", 1e-6)),
        weight_dropout=config.get("attention_dropout", 0.0),
    )
    table = embed.table if config.get("tie_word_embeddings", False) else None
    return LanguageModel(embed, stack, NextToken(width, vocab, table=table))


def window_specs(config: HFConfig) -> list[Spec]:
    """Return the mechanism of every layer: all pairs, or a window of the newest tokens."""
    depth, window = config.size("num_hidden_layers"), config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if config.get("model_type") == "mistral" else config.get("max_window_layers", 0)
        used = window is not None and config.get("use_sliding_window", config.get("model_type") == "mistral")
        kinds = ["sliding_attention" if used and i >= first else "full_attention" for i in range(depth)]
    if len(kinds) != depth or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"layer_types in config.json must name full_attention or sliding_attention {depth} times, not {kinds}"
        )
    return [Spec.of(Local(config.size("sliding_window"))) if kind == "sliding_attention" else Spec("softmax") for kind in kinds]


def rotary(config: HFConfig, dims: Dims) -> Rotary:
    """Build the rotary positions of a configuration: rope_parameters, in older ones rope_theta and rope_scaling."""
    given = {"rope_theta": config.get("rope_theta"), **config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    rope = HFConfig(given)
    kind = rope.get("rope_type", rope.get("type", "default"))
    options: dict[str, Any] = {"base": rope.number("rope_theta", 10_000.0)}
    if kind in ("linear", "llama3"):
        options["factor"] = rope.number("factor")
    if kind == "llama3":
        options["trained"] = rope.size("original_max_position_embeddings")
        options |= {"low": rope.number("low_freq_factor"), "high": rope.number("high_freq_factor")}
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope_type={kind!r} is not supported: regard has default, linear and llama3")
    return Rotary(dims, **options)


def llama_names(config: HFConfig) -> TensorNames:
    tied = config.get("tie_word_embeddings", False)
    table: TensorNames = {"embed.table.weight": Take(("embed_tokens.weight", "lm_head.weight"))}
    if not tied:
        table = {"embed.table.weight": "embed_tokens.weight", "head.map.weight": "lm_head.weight"}
    own: TensorNames = {
        "mixer_norm": "input_layernorm",
        "mixer.q": "self_attn.q_proj",
        "mixer.k": "self_attn.k_proj",
        "mixer.v": "self_attn.v_proj",
        "mixer.out": "self_attn.o_proj",
        "channel_norm": "post_attention_layernorm",
        "channel.up": Joined((Take(("mlp.gate_proj",)), Take(("mlp.up_proj",)))),
        "channel.down": "mlp.down_proj",
    }
    return {**table, "stack.final_norm": "norm", **layers("stack", "layers", own)}


# BLOOM: pre-norm, ALiBi, a norm behind the embeddings, q, k and v of every head side by side.


def bloom(config: HFConfig) -> LanguageModel:
    width, vocab = config.first_size("hidden_size", "n_embed"), config.size("vocab_size")
    norm = partial(nn.LayerNorm, eps=config.get("layer_norm_epsilon", 1e-5))
    embed = Tokens(vocab, width, scale=False, norm=norm(width))
    drop = config.get("hidden_dropout", 0.0)
    stack = Stack.of(
        "softmax",
        width=width,
        heads=config.first_size("n_head", "num_attention_heads"),
        depth=config.first_size("n_layer", "num_hidden_layers"),
        causal=True,
        positions="alibi",
        ffn=partial(FeedForward, width, 4 * width, activation="gelu_tanh"),
        norm_class=norm,
        dropout=drop,
        weight_dropout=config.get("attention_dropout", 0.0),
    )
    return LanguageModel(embed, stack, NextToken(width, vocab, table=embed.table))


def bloom_names(config: HFConfig) -> TensorNames:
    heads = config.first_size("n_head", "num_attention_heads")

    def part(number: int) -> Take:
        return Take(("self_attention.query_key_value",), TensorLayout(number, 3, heads))

    own: TensorNames = {
        "mixer_norm": "input_layernorm",
        "mixer.q": part(0),
        "mixer.k": part(1),
        "mixer.v": part(2),
        "mixer.out": "self_attention.dense",
        "channel_norm": "post_attention_layernorm",
        "channel.up": "mlp.dense_h_to_4h",
        "channel.down": "mlp.dense_4h_to_h",
    }
    return {
        "embed.table.weight": Take(("word_embeddings.weight", "lm_head.weight")),
        "embed.norm": "word_embeddings_layernorm",
        "stack.final_norm": "ln_f",
        **layers("stack", "h", own),
    }


_ROTARY = Family(
    llama,
    llama_names,
    {},
    "model.",
    r"lm_head\.",
    unneeded=[r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"],
    title="Llama",
    note="`rope_type` default, linear or llama3.",
)
_WINDOWS = "Sliding windows are `Local(n)`. "

DECODER_FAMILIES: dict[str, Family] = {
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
        title="GPT-2",
    ),
    "LlamaForCausalLM": _ROTARY,
    "MistralForCausalLM": _ROTARY._replace(
        build=partial(llama, biases=(False, False)), title="Mistral", note=_WINDOWS + _ROTARY.note
    ),
    "Qwen2ForCausalLM": _ROTARY._replace(build=partial(llama, biases=(True, False)), title="Qwen2", note=_WINDOWS + _ROTARY.note),
    "BloomForCausalLM": Family(
        bloom,
        bloom_names,
        {"tie_word_embeddings": True, "apply_residual_connection_post_layernorm": False},
        "transformer.",
        r"lm_head\.",
        title="BLOOM",
    ),
}
