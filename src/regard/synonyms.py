"""Other names of mechanisms, patterns, positions, tasks and settings, for error messages alone: each thing has one name.

An unknown word that is listed here is answered with the right one, where that is allowed, or with where it belongs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MECHANISMS = {"softmax", "Local"}  # one of them is allowed wherever a mechanism or a pattern is read
POSITION_NAMES = ("rotary", "relative", "sinusoidal", "learned", "alibi", "buckets", "floater")

# What to write: words that mean it. A word may stand in several rows; the first row that is allowed counts.
SYNONYMS: dict[str, str] = {
    # mechanisms and patterns
    "softmax": "full vanilla sdpa dot dot_product scaled_dot_product mha multihead multi_head flash flash_2 flash_3 standard "
    "dense eager exact quadratic luong self attention transformer xformers",
    "Local(256)": "sliding_window sliding window windowed swa banded band neighborhood mistral",
    "Everything()": "all full dense",
    "Blocks(64)": "block block_local block_diagonal chunk chunked swin",
    "Dilated(8, 4)": "atrous",
    "Stride(16)": "strided every_nth",
    "Global(first=1)": "cls global_token global_tokens special_tokens",
    "additive": "bahdanau concat mlp_score",
    "identity": "none noop no_op skip no_attention nothing",
    "longformer": "led",
    "bigbird": "bigbird_pegasus bigbird_roberta",
    "sinks": "streaming streaming_llm attention_sink sink",
    "linear": "elu kernel kernelized katharopoulos lin",
    "rfa": "random_feature random_fourier random_fourier_features",
    "performer": "favor favor+ favor_plus random_features prf",
    "cosformer": "cos cosine",
    "hedgehog": "learned_features lolcats",
    "retention": "retnet multi_scale_retention",
    "gla": "gated_linear",
    "delta": "deltanet delta_net delta_rule fast_weight fast_weights",
    "delta(gated=True)": "gated_delta gated_deltanet gated_delta_net gdn",
    "hybrid": "infini infini_former",
    "fnet": "fourier fft",
    "gmlp": "spatial_gating sgu",
    "mlp_mixer": "mixer mlp",
    "conv": "convolution cnn conv1d tcn depthwise lightconv",
    "rnn": "gru recurrent",
    "rnn(cell='lstm')": "lstm bilstm",
    "sinkhorn": "sortcut",
    "gat": "graph gnn gatv2",
    "reformer": "lsh hashing",
    "routing": "kmeans k_means cluster clustered",
    "linformer": "low_rank",
    "compressed": "memory_compressed mca dmca",
    "pooled_queries": "funnel pooled pooling",
    "nystrom": "nystromformer landmark landmarks",
    # positions
    "rotary": "rope rotary_embedding rotary_embeddings roformer xpos yarn",
    "relative": "relative_bias relative_position relative_positions rpe shaw",
    "sinusoidal": "sine sin sincos sinusoid fixed fourier",
    "learned": "absolute ape embedding embeddings trainable",
    "alibi": "linear_bias linear_biases",
    "buckets": "t5 relative_buckets bucketed",
    "floater": "ode neural_ode",
    "none": "nope no off",
    # tasks
    "multi30k": "translate translation mt nmt en_de wmt",
    "ewt": "tag tagging pos pos_tagging ud conllu",
    "imdb": "sentiment classify classification reviews",
    "shakespeare": "lm language_model language_modeling text char_lm tiny_shakespeare",
    "acl_titles": "summarize summarization titles",
    "wikisql": "sql text_to_sql",
    "tox21": "toxicity molecules smiles moleculenet",
    "cora": "planetoid citation citations node_classification",
    "go": "baduk weiqi board_game",
    "detect": "detection object_detection detr boxes",
    "gum": "parse parsing parser constituency treebank trees",
    "an4": "asr speech speech_recognition recognition",
    "fsdd": "spoken_digits digits audio",
    "tts": "speech_synthesis synthesis text_to_speech tacotron ljspeech lj_speech espeak speak",
    "fsdd_speaker": "speaker speaker_id speaker_verification verification",
    "recall": "mqar associative_recall",
    "text": "imdb_bytes byte_classification",
    "image": "cifar cifar10 scifar",
    # settings and options
    "width": "d_model hidden_size embed_dim model_dim n_embd dim",
    "heads": "num_heads n_heads n_head nhead num_attention_heads",
    "depth": "layers num_layers n_layers n_layer num_hidden_layers",
    "decoder_depth": "decoder_layers num_decoder_layers",
    "ffn": "d_ff dim_feedforward intermediate_size ffn_dim",
    "lr": "learning_rate rate",
    "steps": "max_steps updates iterations epochs",
    "batch_tokens": "batch batch_size max_tokens",
    "accumulate": "gradient_accumulation_steps grad_accum accumulation",
    "clip": "grad_clip max_grad_norm gradient_clip_val",
    "decay": "weight_decay",
    "smoothing": "label_smoothing",
    "weight_dropout": "attention_dropout attn_dropout attention_probs_dropout_prob",
    "warmup": "warmup_steps",
    "beam": "num_beams beam_size beam_width",
    "features": "nb_features num_features",
    "rounds": "n_hashes num_hashes hashes",
    "window": "window_size sliding_window reach",
    "block": "block_size bucket_size",
    "first": "num_global global_tokens num_sinks",
    "rank": "proj_k projected_size",
}

_SSM = "there is no state space model here: gla, a decay per feature that every token computes, is the nearest mechanism"
_POSITIONS = "positions are no mechanism, they go with one: positions='{}'"
_KV_HEADS = "grouped heads are an argument that mechanisms with queries and keys share: layer('softmax', ..., kv_heads={})"
_CAUSAL = "causal is an argument of every layer: layer('softmax', ..., causal=True)"

# Words that are asked for as a mechanism and are something else: what that is, and where it is found.
OTHER_KINDS: dict[str, str] = {
    "mamba mamba2 ssm s4 s5 s6 ssd rwkv hgrn xlstm mlstm": _SSM,
    "hyena": "there is no long convolution here: conv, with a kernel of a few tokens, is the nearest mechanism",
    "mqa multi_query": _KV_HEADS.format(1),
    "gqa grouped_query": _KV_HEADS.format(2),
    "cross": "cross is an argument: layer('softmax', ..., cross=True)",
    "masked gpt": _CAUSAL,
    **{f"{name} {SYNONYMS[name]}": _POSITIONS.format(name) for name in POSITION_NAMES},
}


def right_word(word: str, allowed: Iterable[str]) -> str | None:
    """Return what to write for another name of something allowed: its name, perhaps with options."""
    names, plain = list(allowed), _plain(word)
    for right in _RIGHT.get(plain, ()):
        if right.partition("(")[0] in names:
            return right
    return next((name for name in names if _plain(name) == plain), None)


def elsewhere(word: str, allowed: Iterable[str]) -> str | None:
    """Return a sentence about a word that is no mechanism, where mechanisms or patterns are allowed."""
    return _OTHER_KIND.get(_plain(word)) if not MECHANISMS.isdisjoint(allowed) else None


def _plain(word: str) -> str:
    """Leave out signs and words that add nothing to a name: linear_attention is linear, Big-Bird is bigbird."""
    bare = re.sub(r"[\W_]", "", word.lower())
    return re.sub("attention|attn|transformer|mechanism", "", bare) or bare


_RIGHT: dict[str, list[str]] = {}
for _right, _words in SYNONYMS.items():
    for _word in _words.split():
        _RIGHT.setdefault(_plain(_word), []).append(_right)
_OTHER_KIND = {_plain(word): sentence for words, sentence in OTHER_KINDS.items() for word in words.split()}
