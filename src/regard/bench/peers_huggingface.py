"""Layers of Hugging Face's transformers: Longformer, BigBird, Reformer, FNet, each with an output map behind it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.peer import Muted, Peer, bidirectional, for_names, never, option
from regard.bench.workload import LAYER, Setting
from regard.mixers.attention import Attention
from regard.mixers.base import Mixer
from regard.spec import Spec

SPECIAL_MARK = 10_000.0  # Longformer's mark of a token that sees all and is seen by all


def _modeling(name: str, short: str) -> Any:
    with Muted():
        return import_module(f"transformers.models.{name}.modeling_{short}")


def _config(name: str, **options: Any) -> Any:
    with Muted():
        return getattr(import_module("transformers"), name)(**options)


class LongformerHF(nn.Module):
    """A window on both sides and special tokens with projections of their own."""

    def __init__(self, layer: Attention, setting: Setting) -> None:
        super().__init__()
        core: Any = layer.core
        side = core.local.pattern.size if core.rows is None else core.local.pattern.parts[0].size
        window = 2 * (side - 1)
        config = _config(
            "LongformerConfig",
            hidden_size=setting.width,
            num_attention_heads=setting.heads,
            num_hidden_layers=1,
            attention_window=[window],
            attention_probs_dropout_prob=0.0,
        )
        self.attention = _modeling("longformer", "longformer").LongformerSelfAttention(config, 0)
        self.out = nn.Linear(setting.width, setting.width)
        special = torch.zeros(setting.batch, setting.n, dtype=torch.bool)
        if core.rows is not None:
            special[:, : core.rows.first] = True
            special[:, list(core.rows.at)] = True
        self.register_buffer("special", special, persistent=False)
        self.any = core.rows is not None
        self._copy(layer, core.streams)

    @torch.no_grad()
    def _copy(self, layer: Attention, streams: int) -> None:
        """Queries, keys and values of a head lie behind each other: the ordinary ones, then those of special tokens."""
        heads = layer.dims.heads
        for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
            source = getattr(layer, ours)
            for number, suffix in enumerate(("", "_global")):
                target = getattr(self.attention, theirs + suffix)
                part = number if streams == 2 else 0
                for to, given in ((target.weight, source.weight), (target.bias, source.bias)):
                    split = given.unflatten(0, (heads, streams, -1))
                    to.copy_(split[:, part].flatten(0, 1))
        self.out.load_state_dict(layer.out.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        marks = self.special.to(x.dtype) * SPECIAL_MARK  # type: ignore[operator]
        nothing = torch.zeros_like(self.special)  # type: ignore[arg-type]
        found = self.attention(x, marks, is_index_masked=nothing, is_index_global_attn=self.special, is_global_attn=self.any)
        return self.out(found[0])


class BigBirdHF(nn.Module):
    """Blocks of a window, one global block at each end, random blocks drawn in every call."""

    def __init__(self, layer: Attention, setting: Setting) -> None:
        super().__init__()
        spec = Spec.of(str(layer.spec))
        self.block = option(spec, "block", 64)
        config = _config(
            "BigBirdConfig",
            hidden_size=setting.width,
            num_attention_heads=setting.heads,
            num_hidden_layers=1,
            block_size=self.block,
            num_random_blocks=option(spec, "random", 3),
            max_position_embeddings=setting.n,
            use_bias=True,
        )
        package = _modeling("big_bird", "big_bird")
        self.attention = package.BigBirdBlockSparseAttention(config)
        self.masks = package.BigBirdModel.create_masks_for_block_sparse_attn
        self.out = nn.Linear(setting.width, setting.width)

    def forward(self, x: Tensor) -> Tensor:
        blocked, band, rows, columns = self.masks(torch.ones(x.shape[:2], dtype=x.dtype, device=x.device), self.block)
        found = self.attention(
            x, band_mask=band, from_mask=rows, to_mask=columns, from_blocked_mask=blocked, to_blocked_mask=blocked
        )
        return self.out(found[0])


class ReformerHF(nn.Module):
    """LSH attention with as many rounds and chunks of the same size."""

    def __init__(self, layer: Attention, setting: Setting) -> None:
        super().__init__()
        core: Any = layer.core
        config = _config(
            "ReformerConfig",
            hidden_size=setting.width,
            num_attention_heads=setting.heads,
            attention_head_size=setting.dim,
            attn_layers=["lsh"],
            lsh_attn_chunk_length=core.chunk,
            num_hashes=core.rounds,
            is_decoder=setting.causal,
            max_position_embeddings=setting.n,
            lsh_attention_probs_dropout_prob=0.0,
        )
        self.attention = _modeling("reformer", "reformer").LSHSelfAttention(config)
        self.out = nn.Linear(setting.width, setting.width)

    def forward(self, x: Tensor) -> Tensor:
        with Muted():
            found = self.attention(x)
        return self.out(found.hidden_states)


class FNetHF(nn.Module):
    """The Fourier transform over sequence and channels, in float32 for half precision, which torch.fft does not have."""

    def __init__(self, layer: Mixer, setting: Setting) -> None:
        super().__init__()
        config = _config("FNetConfig", hidden_size=setting.width, use_tpu_fourier_optimizations=False)
        self.transform = _modeling("fnet", "fnet").FNetBasicFourierTransform(config)
        ortho = layer.norm == "ortho"
        self.scale = (setting.n * setting.width) ** -0.5 if ortho else 1.0

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (self.transform(wide)[0] * self.scale).to(x.dtype)


def _longformer(spec: Spec, causal: bool) -> bool:
    return spec.name == "longformer" and not causal and option(spec, "dilated_heads", 0) == 0


TRANSFORMERS = ("transformers", "transformers", LAYER)

HUGGINGFACE_PEERS = (
    Peer(
        "transformers Longformer",
        *TRANSFORMERS,
        _longformer,
        LongformerHF,
        lambda _spec, _causal: True,
    ),
    Peer("transformers BigBird", *TRANSFORMERS, bidirectional("bigbird"), BigBirdHF, never),
    Peer("transformers Reformer", *TRANSFORMERS, for_names("reformer"), ReformerHF, never),
    Peer("transformers FNet", *TRANSFORMERS, for_names("fnet"), FNetHF, lambda _spec, _causal: True),
)
