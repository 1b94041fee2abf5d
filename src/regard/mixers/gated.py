"""Gated linear attention: sums that decay, at a fixed rate or by gates of the tokens, and the delta rule, which overwrites.

    S_i = fade_i S_{i-1} + what token i writes,   out_i = q_i S_i

All of them write in an order even where they are not causal: the tokens are written one after the other, and every query reads
what is left at the end. None divides by a sum of weights: in the papers a norm over each head follows, and mostly a swish gate.
These are parts of the layer, by the options `output_norm` and `output_gate` of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.checks import need
from regard.mixers.base import Can, Dims, Places
from regard.mixers.feature_math import empty_sums, per_query_head, read_state, unwritten_sums, upcast, where_valid
from regard.mixers.linear_attention import Kernel
from regard.ops.backend import AUTO
from regard.ops.delta.delta_op import DeltaCall, RawGates, delta_rule, delta_write, raw_delta_step, takes_halves
from regard.ops.delta.unit_features import unit_features, unit_keys
from regard.ops.kernel_launch import SharedConstants, may_keep
from regard.ops.linear.feature_maps import log_gate, safe_ratio
from regard.ops.linear.linear_op import LinearCall, counted_step, fuses_features, linear_attention, linear_read, linear_write
from regard.ops.split_features import split_features
from regard.transforms import transformed

GATE_ROOT = 16  # of a gate: half open, it keeps 0.958, so that memories begin with about 23 tokens


class Matrix(NamedTuple):
    s: Tensor  # (b g d e)


class CountedMatrix(NamedTuple):
    s: Tensor
    tokens: Tensor  # (b) how many were written


class _Fading(Kernel):
    """S_i = exp(decay_i) S_{i-1} + k_i v_i^T, read with q_i / sqrt(d); the decay is one number a token, or one a feature."""

    fusable = True
    gate_root = 0.0  # above 0: `_written` gives gates, the root of whose sigmoid is the decay

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.f = dims.d

    def empty(self, k: Tensor, v: Tensor) -> Any:
        return Matrix(empty_sums(k, v, self.f)[0])

    def unwritten(self, k: Tensor, v: Tensor) -> Any:
        return self._without_tokens(unwritten_sums(k, v, self.f)[0])

    def _without_tokens(self, s: Tensor) -> Any:
        return Matrix(s)

    def _written(self, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Keys (b g m d), whatever padding holds, and log decays (b g m 1 or d) in the type of sums, 0 at padding, or gates."""
        raise NotImplementedError

    def _push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        keys, decay = self._written(k, places)
        s = linear_write(
            keys, v, memory.s, log_decay=decay, valid=places.valid, gate_root=self.gate_root, backend=self.dims.backend
        )
        return memory._replace(s=s)

    def _read(self, memory: Any, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - the same at every position
        return linear_read(q, memory.s, scale=self.dims.d**-0.5, backend=self.dims.backend)

    def _scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        return self._weighed_scan(memory, q, k, v, places, None)

    def _weighed_scan(
        self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places, gain: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Scan with a constant factor (b g n 1) of every output."""
        keys, decay = self._written(k, places)
        scale, backend = self.dims.d**-0.5, self.dims.backend
        out, s = linear_attention(
            q,
            keys,
            v,
            memory.s,
            log_decay=decay,
            valid=places.valid,
            scale=scale,
            gain=gain,
            gate_root=self.gate_root,
            backend=backend,
        )
        return out, memory._replace(s=s)


def _set_readout(core: Kernel, output_norm: bool, output_gate: bool) -> None:
    """Note what the layer of a core has behind its heads."""
    for name, value in (("output_norm", output_norm), ("output_gate", output_gate)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")
    core.output_norm, core.output_gate = output_norm, output_gate


class Retention(_Fading):
    """Retention: every head forgets at a rate of its own, the same for all tokens.

    S_i = gamma_h S_{i-1} + k_i v_i^T,  out_i = q_i S_i / sqrt(d),  gamma_h = 1 - 2^(-power - h) for the key-value heads
    h = 0, 1, ...; norm=True divides by the root of the sum of gamma_h^(i - j) over the tokens seen, the paper's way to keep
    the size of long sums. Time n d e, memory d e at any length. Sun et al. 2023, arXiv:2307.08621, where the layer also turns
    q and k by their positions (xPos), and has both output_norm, over each head, and output_gate, a swish of the token.
    """

    can = Kernel.can | Can.ROTARY
    powers: Tensor

    def __init__(
        self, dims: Dims, *, power: int = 5, norm: bool = True, output_norm: bool = False, output_gate: bool = False
    ) -> None:
        super().__init__(dims)
        _set_readout(self, output_norm, output_gate)
        if need("power", power, most=2**63) > 64:
            raise ValueError(f"power must be at most 64, where gamma is as good as 1, not {power}")
        if not isinstance(norm, bool):
            raise ValueError(f"norm must be True or False, not {norm!r}")
        self.norm = norm
        self.register_buffer("powers", torch.arange(power, power + dims.g))  # integers: no dtype rounds gamma up to 1
        self._powers_read: tuple[Tensor, int, tuple[int, ...]] | None = None  # their buffer, its version, they

    def empty(self, k: Tensor, v: Tensor) -> CountedMatrix:
        return self._without_tokens(empty_sums(k, v, self.f)[0])

    def _without_tokens(self, s: Tensor) -> CountedMatrix:
        return CountedMatrix(s, torch.zeros(s.shape[0], dtype=torch.long, device=s.device))

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        first = unwritten_sums(k, v, self.f)[0]
        plain = places.valid is None and k.shape[2] > 1
        constants = self._constants(k) if plain and fuses_features(q, first, self.dims.backend) else None
        if constants is None:
            return super().scan_all(q, k, v, places)
        rate, gain = constants.read()
        decay = rate.expand(k.shape[0], -1, k.shape[2], 1)
        options = {"scale": self.dims.d**-0.5, "gain": gain if self.norm else None, "backend": self.dims.backend}
        return linear_attention(q, k, v, first, log_decay=decay, **options)[0].to(v.dtype)

    def _constants(self, k: Tensor) -> SharedConstants | None:
        """What all passes over sequences of this length share; None where tensors made now cannot be kept."""
        if torch.compiler.is_compiling() or transformed():
            return None
        key = (self._host_powers(), k.shape[0], k.shape[2], torch.promote_types(k.dtype, torch.float32), k.device)
        if may_keep(k):
            return _retention_constants(key, self)
        return _retention_constants.kept.get(key)  # type: ignore[attr-defined]

    def _host_powers(self) -> tuple[int, ...]:
        """The powers on the host; they are read from the device again when the buffer was loaded, moved or written to."""
        read, powers = self._powers_read, self.powers
        if read is None or read[0] is not powers or read[1] != powers._version:
            read = self._powers_read = powers, powers._version, tuple(powers.tolist())
        return read[2]

    def _written(self, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        decay = self._rate(k).expand(k.shape[0], -1, k.shape[2], 1)
        return k, where_valid(decay, places.valid, 0)

    def _push(self, memory: CountedMatrix, k: Tensor, v: Tensor, places: Places) -> CountedMatrix:
        matrix = super()._push(memory, k, v, places)
        tokens = self._counts(memory, places)[:, -1]
        return matrix._replace(tokens=tokens)

    def _read(self, memory: CountedMatrix, q: Tensor, places: Places) -> Tensor:
        out = super()._read(memory, q, places)
        if not self.norm:
            return out
        return out * per_query_head(self._gain(q, memory.tokens[:, None]), out)

    def _scan(self, memory: CountedMatrix, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, CountedMatrix]:
        done = self._step(memory, q, k, v, places)
        if done is not None:
            return done
        counts = self._counts(memory, places)
        gain = self._gain(v, counts[:, 1:]) if self.norm else None
        out, after = self._weighed_scan(memory, q, k, v, places, gain)
        return out, after._replace(tokens=counts[:, -1])

    def _step(
        self, memory: CountedMatrix, q: Tensor, k: Tensor, v: Tensor, places: Places
    ) -> tuple[Tensor, CountedMatrix] | None:
        """Compute one token of every row by one kernel; None: there is none for this call."""
        if k.shape[2] != 1 or places.valid is not None or not fuses_features(q, memory.s, self.dims.backend):
            return None
        constants = self._constants(k)
        if constants is None:
            return None
        decay = constants.read()[0].expand(k.shape[0], -1, 1, 1)
        call = LinearCall(q, k, v, memory.s, decay, scale=self.dims.d**-0.5)
        done = counted_step(call, memory.tokens, self.norm, self.dims.backend)
        return None if done is None else (done[0], CountedMatrix(*done[1:]))

    def _rate(self, like: Tensor) -> Tensor:
        """log gamma (g 1 1)."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        share = torch.exp2(-self.powers.to(dtype))
        return torch.log1p(-share)[:, None, None]

    @staticmethod
    def _counts(memory: CountedMatrix, places: Places) -> Tensor:
        """Tokens written before the first of these, and after each (b 1 + n)."""
        new = torch.ones_like(places.at) if places.valid is None else places.valid.long()
        return torch.cat([memory.tokens[:, None], new], 1).cumsum(1)

    def _gain(self, like: Tensor, count: Tensor) -> Tensor:
        """One by the root of the weight of `count` (b n) tokens, 1 + gamma + gamma^2 + ...: (b g n 1), 0 for no tokens."""
        rate = self._rate(like)
        tokens = count[:, None, :, None]
        weight = torch.expm1(tokens * rate) / torch.expm1(rate)
        return safe_ratio(torch.ones_like(weight), weight.sqrt())


@signature_cache
def _retention_constants(key: tuple, core: Retention) -> SharedConstants:
    """Log gamma (g 1 1), and the gain (b g n 1) of sequences from their beginning: for all layers and passes."""
    _, b, n, dtype, device = key
    like = torch.empty(0, dtype=dtype, device=device)
    count = torch.arange(1, n + 1, device=device).expand(b, n)
    return SharedConstants(core._rate(like), core._gain(like, count).contiguous())


class GLA(_Fading):
    """Gated linear attention: a gate of every token decides how much of each feature of the memory is kept.

    S_i = diag(alpha_i) S_{i-1} + k_i v_i^T,  out_i = q_i S_i / sqrt(d),  alpha_i = sigmoid(gate_i)^(1/16): one gate a feature,
    or one a key-value head (gate="head"), linear maps of the layer's input that come behind the key (the paper's has a rank
    of 16). Time n d e, memory d e at any length. Yang et al. 2023, arXiv:2312.06635, where the layer has output_norm, over each
    head, and output_gate, a swish of the token.
    """

    gate_root = GATE_ROOT

    def __init__(self, dims: Dims, *, gate: str = "feature", output_norm: bool = False, output_gate: bool = False) -> None:
        super().__init__(dims)
        _set_readout(self, output_norm, output_gate)
        if gate not in ("feature", "head"):
            raise ValueError(f"gate must be 'feature' or 'head', not {gate!r}")
        self.gates = dims.d if gate == "feature" else 1
        if gate == "head":
            self.can = self.can | Can.ROTARY  # features that fade alike can be turned into each other

    def _written(self, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - padding is the operation's own
        return split_features(k, self.dims.d)


class Delta(Kernel):
    """The delta rule: a token first reads what is stored under its key, and writes only the difference.

    S_i = S_{i-1} - beta_i k_i (k_i^T S_{i-1} - v_i^T),  out_i = q_i S_i, with beta_i = sigmoid of a gate behind the key, and
    q, k of length 1 after silu (activation="none": as they are); so a key that comes again replaces its value.
    gated: S_{i-1} fades first, by alpha_i = sigmoid(second gate)^(1/16).
    Time n d e, memory d e at any length. Schlag et al. 2021, arXiv:2102.11174; in chunks, Yang et al. 2024, arXiv:2406.06484;
    gated, Yang et al. 2024, arXiv:2412.06464. Their layers have short convolutions in front and output_norm, over each head; the
    gated one output_gate too, a swish of the token.
    """

    operations = ("delta",)

    def __init__(
        self,
        dims: Dims,
        *,
        gated: bool = False,
        activation: str = "silu",
        output_norm: bool = False,
        output_gate: bool = False,
    ) -> None:
        super().__init__(dims)
        _set_readout(self, output_norm, output_gate)
        if not isinstance(gated, bool):
            raise ValueError(f"gated must be True or False, not {gated!r}")
        if activation not in ("silu", "none"):
            raise ValueError(f"activation must be 'silu' or 'none', not {activation!r}")
        self.f, self.gates, self.activation = dims.d, 2 if gated else 1, activation
        if activation == "none":
            self.can = self.can | Can.ROTARY

    def empty(self, k: Tensor, v: Tensor) -> Matrix:
        return Matrix(empty_sums(k, v, self.f)[0])

    def _fused(self, memory: Matrix, x: Tensor, places: Places) -> bool:  # noqa: ARG002 - the same at every position
        return takes_halves(x[..., : self.f], memory.s, self.dims.backend)

    def _push(self, memory: Matrix, k: Tensor, v: Tensor, places: Places) -> Matrix:
        if k.shape[2] == 0:
            return memory
        keys, beta, decay = self._written(k, places)
        return Matrix(delta_write(keys, v, beta, memory.s, log_decay=decay, backend=self.dims.backend))

    def _read(self, memory: Matrix, q: Tensor, places: Places) -> Tensor:
        queries = upcast(self._queries(q, places))
        return read_state(queries, memory.s)

    def _scan(self, memory: Matrix, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Matrix]:
        done = self._step(memory, q, k, v) if k.shape[2] == 1 and places.valid is None else None
        if done is not None:
            return done
        keys, beta, decay = self._written(k, places)
        queries = self._queries(q, places)
        out, s = delta_rule(queries, keys, v, beta, memory.s, log_decay=decay, backend=self.dims.backend)
        return out, Matrix(s)

    def _step(self, memory: Matrix, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Matrix] | None:
        """Compute one token of every row by one kernel; None: there is none for this call."""
        k, *gates = k.split([self.dims.d] + [1] * self.gates, -1)
        call = DeltaCall(q, k, v, gates[0], memory.s, *gates[1:])
        done = raw_delta_step(call, RawGates(self.activation == "silu", GATE_ROOT), self.dims.backend)
        return None if done is None else (done[0], Matrix(done[1]))

    def _written(self, k: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys (b g m d), how strongly they write (b g m 1), 0 for padding, and log alpha (b g m 1) where there is one."""
        keys, gate = unit_keys(k, self.dims.d, silu=self.activation == "silu", fused=self._has_kernels(k))
        gate = upcast(gate)
        beta = where_valid(gate[..., :1].sigmoid(), places.valid, 0)
        alpha = log_gate(gate[..., 1:], places.valid, GATE_ROOT) if self.gates == 2 else None
        return keys, beta, alpha

    def _queries(self, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - the same at every position
        return unit_features(q, silu=self.activation == "silu", fused=self._has_kernels(q))

    def _has_kernels(self, x: Tensor) -> bool:
        return self.dims.backend == "triton" or (self.dims.backend == AUTO and x.is_cuda)
