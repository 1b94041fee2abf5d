"""Peers with kernels of their own: SDPA and FlexAttention of PyTorch, and flash-linear-attention."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.peer import NativeInputs, OperationPeer, Peer, TokenMajorPeer, for_names, option
from regard.bench.workload import OPERATION, Setting
from regard.mixers.base import Core
from regard.mixers.gated import GATE_ROOT
from regard.mixers.sparse import Longformer
from regard.patterns import Causal, Pattern
from regard.spec import Spec

FLA = "flash-linear-attention"
MASK_PAIRS = 1 << 29  # of a mask that is made without a compiler, by a tensor of all pairs


class ScaledDotProduct(OperationPeer):
    """PyTorch's own attention over all pairs."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def run(self, *inputs: Tensor) -> Tensor:
        q, k, v = inputs
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Flex(OperationPeer):
    """FlexAttention with the predicate of a pattern as its mask."""

    compiled = True

    def __init__(self, pattern: Pattern, setting: Setting, block: int = 128) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        n = setting.n
        seen = pattern.bound(n, n)
        if setting.causal:
            seen = seen & Causal()
        heads = {str(seen.for_head(h, setting.heads)) for h in range(setting.heads)}
        per_head = len(heads) > 1 or "per_head=True" in str(pattern)
        self.mask = create_block_mask(
            lambda _b, h, i, j: seen(h, i, j),
            None,
            setting.heads if per_head else None,
            n,
            n,
            device=setting.device,
            BLOCK_SIZE=block,
            _compile=setting.device == "cuda" and n * n * (setting.heads if per_head else 1) > MASK_PAIRS,
        )
        torch.compiler.reset()  # one graph for each mask: after eight of them torch would not compile any more
        self.attention: Any = torch.compile(flex_attention, dynamic=False)

    def run(self, *inputs: Tensor) -> Tensor:
        q, k, v = inputs
        return self.attention(q, k, v, block_mask=self.mask)


def make_flex(core: Any, setting: Setting) -> Flex:
    pattern = core.local.pattern if isinstance(core, Longformer) else core.pattern
    return Flex(pattern, setting)


def flex_fits(spec: Spec, _causal: bool) -> bool:
    """Any pattern; of longformer the form that projects all tokens alike."""
    patterned = spec.name in ("sparse", "bigbird", "sinks", "sparse_transformer")
    shared = spec.name == "longformer" and option(spec, "shared", False) and option(spec, "first", 1) > 0
    return patterned or shared


class LinearFla(TokenMajorPeer):
    """Linear attention with features elu(x) + 1 and the normaliser."""

    def run(self, *inputs: Tensor) -> Tensor:
        q, k, v = inputs
        attention = import_module("fla.ops.linear_attn").chunk_linear_attn
        return attention(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]


class RetentionFla(TokenMajorPeer):
    """Retention without the norm of its sums."""

    def run(self, *inputs: Tensor) -> Tensor:
        return import_module("fla.ops.retention").chunk_retention(*inputs)[0]


class GatedFla(TokenMajorPeer):
    """Gated linear attention with a gate for each feature; gates come behind the keys."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.d = core.dims.d

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> NativeInputs:
        keys, gates = k.split([self.d, k.shape[-1] - self.d], -1)
        return tuple(x.transpose(1, 2) for x in (q, keys, v, gates))

    def run(self, *inputs: Tensor) -> Tensor:
        q, k, v, gates = inputs
        return import_module("fla.ops.gla").chunk_gla(q, k, v, F.logsigmoid(gates) / GATE_ROOT)[0]


class DeltaFla(GatedFla):
    """The delta rule; the gate behind a key is its write strength."""

    def run(self, *inputs: Tensor) -> Tensor:
        q, k, v, gates = inputs
        q, k = (F.normalize(F.silu(x), dim=-1, eps=1e-6) for x in (q, k))
        beta = gates.squeeze(-1).sigmoid()
        return import_module("fla.ops.delta_rule").chunk_delta_rule(q, k, v, beta, scale=1.0)[0]


def _causal_default(name: str, **options: Any) -> Any:
    """Fits the causal form of a mechanism with these values of its options."""
    return lambda spec, causal: causal and spec.name == name and all(option(spec, x, y) == y for x, y in options.items())


KERNEL_PEERS = (
    Peer(
        "SDPA",
        "torch",
        "torch",
        OPERATION,
        for_names("softmax"),
        lambda _core, setting: ScaledDotProduct(setting.causal),
        lambda spec, _causal: option(spec, "scale", None) is None,
    ),
    Peer("FlexAttention", "torch", "torch", OPERATION, flex_fits, make_flex, lambda _spec, _causal: True),
    Peer(
        FLA,
        "fla",
        FLA,
        OPERATION,
        _causal_default("linear"),
        lambda _core, _setting: LinearFla(),
        lambda _spec, _causal: True,
        needs_gpu=True,
        note="features and normaliser included",
    ),
    Peer(
        FLA,
        "fla",
        FLA,
        OPERATION,
        _causal_default("retention", power=5),
        lambda _core, _setting: RetentionFla(),
        lambda spec, _causal: option(spec, "norm", True) is False,
        needs_gpu=True,
        note="without the norm of the sums",
    ),
    Peer(
        FLA,
        "fla",
        FLA,
        OPERATION,
        _causal_default("gla", gate="feature"),
        lambda core, _setting: GatedFla(core),
        lambda _spec, _causal: True,
        needs_gpu=True,
    ),
    Peer(
        FLA,
        "fla",
        FLA,
        OPERATION,
        _causal_default("delta", gated=False, activation="silu"),
        lambda core, _setting: DeltaFla(core),
        lambda _spec, _causal: True,
        needs_gpu=True,
    ),
)
