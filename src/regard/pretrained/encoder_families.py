"""Architectures that read text: BERT, RoBERTa, DistilBERT, FNet, Longformer, BigBird and Nystromformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from regard.blocks.feedforward import FeedForward
from regard.mixers.base import Dims
from regard.models.embedding import Tokens
from regard.models.encoder import Encoder
from regard.models.encoder_head import Reader
from regard.models.heads import MaskedToken, PerSequence, PerVector
from regard.positions import Learned
from regard.pretrained.checkpoint_files import CheckpointError, Joined, Take, TensorLayout
from regard.pretrained.family import Family, HFConfig, TensorNames, body, layers, under
from regard.spec import Named, Spec

EXACT_LENGTH = 4096  # the most landmarks of a Nystrom layer
_NONE: Mapping[str, Any] = {}


class Dialect(NamedTuple):
    """Describe how an architecture differs from BERT: its mechanism, its positions, its names."""

    prefix: str
    specs: Callable[[HFConfig], Named | Sequence[Named]] = lambda _: "softmax"
    skip: Callable[[HFConfig], int] = lambda _: 0  # rows of the table of positions that no position uses
    more_rows: int = 0  # rows of the table beyond max_position_embeddings
    activation: str = "gelu"
    head_activation: str | None = "tanh"  # of the classifier; None: that of the layers
    lm_activation: str | None = None  # of the head for masked tokens; None: that of the layers
    renamed: Mapping[str, str] = _NONE  # BERT's name of a setting: theirs
    segments: bool = True
    projected: bool = False  # a linear map follows the norm of the embeddings
    mixer: Callable[[HFConfig], TensorNames] = lambda _: BERT_ATTENTION
    mixer_norm: str = "attention.output.LayerNorm"
    layer: Mapping[str, str] = _NONE  # names of the other parts of a layer, where they are not BERT's
    layers_at: str = "encoder.layer"
    lm_head: tuple[str, str, str, str] = (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    )
    classifier: tuple[str, str] = ("classifier.dense", "classifier.out_proj")  # of a sequence
    only: Mapping[str, Any] = _NONE
    note: str = ""

    def settings(self, config: HFConfig) -> HFConfig:
        """Return settings by BERT's names."""
        given = {ours: config.get(theirs) for ours, theirs in self.renamed.items()}
        return HFConfig({"hidden_act": self.activation, **config.settings, **given})


BERT_ATTENTION: TensorNames = {
    "mixer.q": "attention.self.query",
    "mixer.k": "attention.self.key",
    "mixer.v": "attention.self.value",
    "mixer.out": "attention.output.dense",
}


def text_encoder(config: HFConfig, dialect: Dialect) -> Encoder:
    """Build an encoder, post-norm, with a norm behind the embeddings."""
    specs, skip = dialect.specs(config), dialect.skip(config)
    config = dialect.settings(config)
    width, eps, drop = config.size("hidden_size"), config.get("layer_norm_eps", 1e-12), config.get("hidden_dropout_prob", 0.1)
    longest = config.size("max_position_embeddings") + dialect.more_rows - skip
    norm: nn.Module = nn.LayerNorm(width, eps=eps)
    embed = Tokens(
        config.size("vocab_size"),
        width,
        positions=Learned(Dims(width, 1, max_len=longest)),
        segments=config.size("type_vocab_size", 2) if dialect.segments else 0,
        scale=config.get("rescale_embeddings", False),
        norm=nn.Sequential(norm, nn.Linear(width, width)) if dialect.projected else norm,
        dropout=drop,
    )
    activation = config.activation("hidden_act", "gelu")
    heads = config.size("num_attention_heads", 1)
    stack = body(
        width,
        heads,
        config.size("num_hidden_layers"),
        partial(FeedForward, width, config.size("intermediate_size"), activation=activation),
        specs=specs,
        eps=eps,
        norm="post",
        dropout=drop,
        weight_dropout=config.get("attention_probs_dropout_prob", 0.1) if specs == "softmax" else 0.0,
    )
    return Encoder(embed, stack)


def masked_reader(config: HFConfig, dialect: Dialect) -> Reader:
    encoder = text_encoder(config, dialect)
    config = dialect.settings(config)
    activation = dialect.lm_activation or config.activation("hidden_act", "gelu")
    eps = config.get("layer_norm_eps", 1e-12)
    table: nn.Embedding = encoder.embed.table  # type: ignore[assignment]
    return Reader(encoder, MaskedToken(encoder.width, len(table.weight), table=table, activation=activation, eps=eps))


def labelling_reader(config: HFConfig, dialect: Dialect, *, whole: bool) -> Reader:
    """Build a classifier: of whole sequences, by their first token, or of every token."""
    encoder, labels = text_encoder(config, dialect), config.labels
    config = dialect.settings(config)
    drop = config.get("classifier_dropout", config.get("hidden_dropout_prob", 0.1))
    if not whole:
        return Reader(encoder, PerVector(encoder.width, labels, dropout=drop))
    activation = dialect.head_activation or config.activation("hidden_act", "gelu")
    head = PerSequence(encoder.width, labels, pool="token", deep=True, activation=activation, dropout=drop)
    return Reader(encoder, head)


def encoder_names(config: HFConfig, dialect: Dialect) -> TensorNames:
    skip = TensorLayout(skip=dialect.skip(config))
    norms = {"embed.norm": "embeddings.LayerNorm"}
    if dialect.projected:
        norms = {"embed.norm.0": "embeddings.LayerNorm", "embed.norm.1": "embeddings.projection"}
    channel = {"channel.up": "intermediate.dense", "channel.down": "output.dense", "channel_norm": "output.LayerNorm"}
    layer: TensorNames = {**dialect.mixer(config), "mixer_norm": dialect.mixer_norm, **channel, **dialect.layer}
    return {
        "embed.table.weight": Take(("embeddings.word_embeddings.weight", f"{dialect.lm_head[3]}.weight")),
        "embed.segments.weight": "embeddings.token_type_embeddings.weight",
        "embed.positions.vectors": Take(("embeddings.position_embeddings.weight",), skip),
        **norms,
        **layers("stack", dialect.layers_at, layer),
    }


def reader_names(config: HFConfig, dialect: Dialect) -> TensorNames:
    """Name the tensors of an encoder with any head: one table serves all of them."""
    change, norm, bias, decoder = dialect.lm_head
    return {
        **under("encoder", encoder_names(config, dialect)),
        "head.norm": norm,
        "head.next.map.bias": Take((bias, f"{decoder}.bias")),
        "head.change": change,
    }


def label_names(config: HFConfig, dialect: Dialect, *, whole: bool) -> TensorNames:
    change, out = dialect.classifier
    return {**reader_names(config, dialect), "head.change": change, "head.map": out if whole else "classifier"}


def architectures(start: str, dialect: Dialect, title: str) -> dict[str, Family]:
    """Return the architectures of a family whose names begin so: without a head, and with each of three."""
    only = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False, "pruned_heads": {}}
    outside = r"cls\.|classifier|lm_head\.|vocab_|pre_classifier"
    older = [(r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")]
    without = [r"embeddings\.position_ids", r"pooler\..*", r"cls\.seq_relationship\..*"]
    base = Family(
        partial(text_encoder, dialect=dialect),
        partial(encoder_names, dialect=dialect),
        {**only, **dialect.only},
        dialect.prefix,
        outside,
        older,
        without,
        title=title,
        note=dialect.note,
    )
    masked = base._replace(
        build=partial(masked_reader, dialect=dialect),
        names=partial(reader_names, dialect=dialect),
        only={**base.only, "tie_word_embeddings": True},
    )
    found = {f"{start}Model": base._replace(outside=".*"), f"{start}ForMaskedLM": masked}
    for name, whole in (("SequenceClassification", True), ("TokenClassification", False)):
        build = partial(labelling_reader, dialect=dialect, whole=whole)
        found[f"{start}For{name}"] = base._replace(build=build, names=partial(label_names, dialect=dialect, whole=whole))
    return found


# The families: what is not said here is BERT's.

BERT = Dialect("bert.", classifier=("pooler.dense", "classifier"))

ROBERTA = Dialect(
    "roberta.",
    skip=lambda config: config.get("pad_token_id", 1) + 1,  # positions begin behind that of padding
    lm_activation="gelu",
    lm_head=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
)

DISTILBERT = Dialect(
    "distilbert.",
    renamed={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
    },
    segments=False,
    head_activation="relu",
    mixer=lambda _: {f"mixer.{own}": f"attention.{own}_lin" for own in ("q", "k", "v", "out")},
    mixer_norm="sa_layer_norm",
    layer={"channel.up": "ffn.lin1", "channel.down": "ffn.lin2", "channel_norm": "output_layer_norm"},
    layers_at="transformer.layer",
    lm_head=("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector"),
    classifier=("pre_classifier", "classifier"),
)

FNET = Dialect(
    "fnet.",
    specs=lambda _: Spec("fnet", norm="none"),
    activation="gelu_new",
    projected=True,
    mixer=lambda _: {},
    mixer_norm="fourier.output.LayerNorm",
    classifier=("pooler.dense", "classifier"),
    note="Without padding: transformers transforms it with the tokens, here it is absent.",
)


def _longformer_specs(config: HFConfig) -> list[Spec]:
    depth, windows = config.size("num_hidden_layers"), config.get("attention_window", 512)
    windows = [windows] * depth if isinstance(windows, int) else windows
    if not isinstance(windows, list) or len(windows) != depth:
        raise CheckpointError(f"attention_window in config.json must be a number, or {depth} of them, not {windows!r}")
    return [Spec("longformer", attention_window=window, first=1) for window in windows]


def _longformer_mixer(config: HFConfig) -> TensorNames:
    heads = config.size("num_attention_heads")

    def both(name: str) -> Joined:
        return Joined((Take((f"attention.self.{name}",)), Take((f"attention.self.{name}_global",))), heads)

    named = {"mixer.q": both("query"), "mixer.k": both("key"), "mixer.v": both("value")}
    return {**named, "mixer.out": "attention.output.dense"}


LONGFORMER = ROBERTA._replace(
    prefix="longformer.",
    specs=_longformer_specs,
    mixer=_longformer_mixer,
    note="Global attention on the first token alone: `global_attention_mask[:, 0] = 1` there.",
)


def _bigbird_specs(config: HFConfig) -> str:
    if config.get("attention_type", "block_sparse") != "original_full":
        raise CheckpointError(
            "attention_type='block_sparse' has no equal here: in evaluation transformers puts the first block in place of every "
            "random one and counts it again for each. Write attention_type='original_full' in config.json for exact attention "
            "to all tokens, and load with mixer='bigbird(special=\"ends\")' for the pattern of the paper"
        )
    return "softmax"


BIGBIRD = Dialect(
    "bert.",
    specs=_bigbird_specs,
    activation="gelu_new",
    head_activation=None,
    only={"use_bias": True},
    note='`attention_type="original_full"` alone: in evaluation transformers counts the first block again for every random one.',
)


def _nystromformer_specs(config: HFConfig) -> Spec:
    landmarks, tokens = config.size("num_landmarks", 64), config.size("segment_means_seq_len", 64)
    longest = config.size("max_position_embeddings")
    if landmarks != tokens or longest > EXACT_LENGTH:
        raise CheckpointError(
            f"num_landmarks={landmarks} with segment_means_seq_len={tokens} has no equal here: transformers begins its "
            "pseudo-inverse with a maximum over the whole batch, so that rows change each other. With both the same, its "
            f"default, attention is exact, and read up to max_position_embeddings={EXACT_LENGTH}"
        )
    return Spec("nystrom", landmarks=longest, conv=config.get("conv_kernel_size", 0))


NYSTROMFORMER = Dialect(
    "nystromformer.",
    specs=_nystromformer_specs,
    skip=lambda _: 2,
    more_rows=2,
    activation="gelu_new",
    head_activation=None,
    mixer=lambda _: {**BERT_ATTENTION, "mixer.core.conv": Take(("attention.self.conv.weight",), TensorLayout(ones=(1, 3)))},
    note="`num_landmarks` = `segment_means_seq_len` alone, transformers' default: all pairs, and a convolution. Without padding.",
)

_BERTS = architectures("Bert", BERT, "BERT")

ENCODER_FAMILIES: dict[str, Family] = {
    **_BERTS,
    "BertForPreTraining": _BERTS["BertForMaskedLM"]._replace(saved_as="BertForMaskedLM"),  # not for the next sentence
    **architectures("Roberta", ROBERTA, "RoBERTa"),
    **architectures("DistilBert", DISTILBERT, "DistilBERT"),
    **architectures("FNet", FNET, "FNet"),
    **architectures("Longformer", LONGFORMER, "Longformer"),
    **architectures("BigBird", BIGBIRD, "BigBird"),
    **architectures("Nystromformer", NYSTROMFORMER, "Nystromformer"),
}
