"""Peers of one mechanism each: local-attention, performer-pytorch, reformer-pytorch, routing-transformer, sinkhorn-transformer,
linformer, nystrom-attention and linear-attention-transformer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.peer import (
    Muted,
    NativeInputs,
    OperationPeer,
    Peer,
    bidirectional,
    flat_heads,
    for_names,
    never,
    option,
)
from regard.bench.workload import LAYER, OPERATION, Setting
from regard.mixers.attention import Attention
from regard.patterns import Local
from regard.spec import Spec


class LocalPackage(OperationPeer):
    """A sliding window. The package sees `window` keys behind the query beside itself, Local(w) sees w - 1.

    So Local(w) is a window of w - 1 where that divides the length, and one of w keys, one more than asked for, elsewhere.
    """

    def __init__(self, core: Any, setting: Setting) -> None:
        super().__init__()
        wanted = core.pattern.size
        exact = wanted > 1 and setting.n % (wanted - 1) == 0
        window = wanted - 1 if exact else wanted
        make = import_module("local_attention").LocalAttention
        self.attention = make(window, causal=setting.causal, exact_windowsize=True, use_rotary_pos_emb=False)

    def run(self, *inputs: Tensor) -> Tensor:
        return self.attention(*inputs)


def _local(spec: Spec, _causal: bool) -> bool:
    return spec.name == "sparse" and isinstance(spec.options["pattern"], Local)


class PerformerPackage(OperationPeer):
    """FAVOR+ with the directions of the core. The package adds 1e-4 to every feature."""

    def __init__(self, core: Any, setting: Setting) -> None:
        super().__init__()
        with Muted():
            make = import_module("performer_pytorch").FastAttention
            self.attention = make(core.dims.d, nb_features=core.f, causal=setting.causal)
        self.attention.projection_matrix = core.directions.detach().clone()

    def run(self, *inputs: Tensor) -> Tensor:
        return self.attention(*inputs)


class ReformerPackage(OperationPeer):
    """LSH attention with as many rounds; buckets of `chunk` tokens, as many as fit the length."""

    def __init__(self, core: Any, setting: Setting) -> None:
        super().__init__()
        self.core_dims, self.heads = core, setting.heads
        make = import_module("reformer_pytorch").LSHAttention
        self.attention = make(bucket_size=core.chunk, n_hashes=core.rounds, causal=setting.causal)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> NativeInputs:  # noqa: ARG002 - keys are the queries
        return flat_heads(self.core_dims, q), flat_heads(self.core_dims, v)

    def run(self, *inputs: Tensor) -> Tensor:
        return self.attention(*inputs)[0]

    def finish(self, out: Tensor) -> Tensor:
        return out.unflatten(0, (-1, self.heads))


class RoutingPackage(OperationPeer):
    """Attention inside clusters of a k-means, which the package updates in training."""

    def __init__(self, core: Any, setting: Setting) -> None:
        super().__init__()
        make = import_module("routing_transformer.routing_transformer").KmeansAttention
        clusters = max(1, setting.n // core.window)
        self.attention = make(clusters, core.window, setting.heads, setting.dim, causal=setting.causal)

    def run(self, *inputs: Tensor) -> Tensor:
        return self.attention(*inputs)[0]


class SinkhornPackage(OperationPeer):
    """Sorted blocks by the package's sort network, balanced as often; its causal form sorts by a softmax."""

    def __init__(self, core: Any, setting: Setting) -> None:
        super().__init__()
        package = import_module("sinkhorn_transformer.sinkhorn_transformer")
        block, dim, heads = core.block, setting.dim, setting.heads
        if setting.causal:
            self.attention = package.SinkhornCausalAttention(block, setting.width, dim, heads, setting.n)
        else:
            options = {"non_permutative": False, "sinkhorn_iter": core.iterations, "temperature": core.temperature}
            self.attention = package.SinkhornAttention(block, setting.width, dim, heads, setting.n, **options)

    def run(self, *inputs: Tensor) -> Tensor:
        return self.attention(*inputs)


class EfficientPackage(OperationPeer):
    """Softmax over features and positions; the package scales by 1/sqrt(d). Its causal form is blind to the own block of 64."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.causal, self.scale = setting.causal, setting.dim**0.5

    def run(self, *inputs: Tensor) -> Tensor:
        package = import_module("linear_attention_transformer.linear_attention_transformer")
        if self.causal:
            return package.causal_linear_attn(*inputs, bucket_size=64)
        return package.linear_attn(*inputs)

    def finish(self, out: Tensor) -> Tensor:
        return out * self.scale


class LinformerPackage(nn.Module):
    """Keys and values projected along the sequence; one projection for all heads."""

    def __init__(self, layer: Attention, setting: Setting) -> None:
        super().__init__()
        core: Any = layer.core
        make = import_module("linformer").LinformerSelfAttention
        self.attention = make(setting.width, setting.n, k=core.rank, heads=setting.heads)
        if core.share == "head":
            copy_projections(self.attention, layer)
            with torch.no_grad():
                self.attention.proj_k.copy_(core.project_k[0])
                self.attention.proj_v.copy_(core.project_v[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


class NystromPackage(nn.Module):
    """Landmarks and the iterated pseudo-inverse, in the package's own mixed precision: its iteration needs float32."""

    def __init__(self, layer: Attention, setting: Setting) -> None:
        super().__init__()
        core: Any = layer.core
        make = import_module("nystrom_attention").NystromAttention
        iterations = core.iterations or 6
        residual = core.conv is not None
        options = {"num_landmarks": core.landmarks, "pinv_iterations": iterations, "residual": residual}
        self.attention = make(setting.width, dim_head=setting.dim, heads=setting.heads, **options)
        with torch.no_grad():
            self.attention.to_qkv.weight.copy_(torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]))  # type: ignore[list-item]
            self.attention.to_out[0].load_state_dict(layer.out.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return self.attention(x)
        with torch.autocast(x.device.type, x.dtype):
            return self.attention(x)


def copy_projections(theirs: Any, layer: Attention) -> None:
    """Give a module with to_q, to_k, to_v (without biases) and to_out the weights of a layer."""
    with torch.no_grad():
        for name in ("q", "k", "v"):
            getattr(theirs, f"to_{name}").weight.copy_(getattr(layer, name).weight)
        theirs.to_out.load_state_dict(layer.out.state_dict())


def _plain_performer(spec: Spec, _causal: bool) -> bool:
    return option(spec, "kind", "regularized") != "hyperbolic" and option(spec, "max_norm", "learned") is None


def _one_projection(spec: Spec, _causal: bool) -> bool:
    return option(spec, "share", "none") == "head"


def _performer(spec: Spec, _causal: bool) -> bool:
    return spec.name == "performer" and option(spec, "kind", "regularized") != "hyperbolic"


PACKAGE_PEERS = (
    Peer(
        "local-attention",
        "local_attention",
        "local-attention",
        OPERATION,
        _local,
        LocalPackage,
        lambda spec, _causal: spec.options["pattern"].size % 2 == 1,  # type: ignore[union-attr]
        note="one key more on a side, unless the window less one divides n",
    ),
    Peer(
        "performer-pytorch",
        "performer_pytorch",
        "performer-pytorch",
        OPERATION,
        _performer,
        PerformerPackage,
        _plain_performer,
        note="adds 1e-4 to every feature",
    ),
    Peer("reformer-pytorch", "reformer_pytorch", "reformer-pytorch", OPERATION, for_names("reformer"), ReformerPackage, never),
    Peer(
        "routing-transformer",
        "routing_transformer",
        "routing-transformer",
        OPERATION,
        for_names("routing"),
        RoutingPackage,
        never,
    ),
    Peer(
        "sinkhorn-transformer",
        "sinkhorn_transformer",
        "sinkhorn-transformer",
        OPERATION,
        for_names("sinkhorn"),
        SinkhornPackage,
        never,
    ),
    Peer(
        "linear-attention-transformer",
        "linear_attention_transformer",
        "linear-attention-transformer",
        OPERATION,
        for_names("efficient"),
        lambda _core, setting: EfficientPackage(setting),
        bidirectional("efficient"),
    ),
    Peer("linformer", "linformer", "linformer", LAYER, bidirectional("linformer"), LinformerPackage, _one_projection),
    Peer(
        "nystrom-attention",
        "nystrom_attention",
        "nystrom-attention",
        LAYER,
        bidirectional("nystrom"),
        NystromPackage,
        lambda spec, _causal: option(spec, "iterations", 0) > 0 and option(spec, "conv", 0) == 0,
        note="one scale of the pseudo-inverse for all heads and rows",
    ),
)
