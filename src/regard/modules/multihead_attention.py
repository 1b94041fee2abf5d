"""nn.MultiheadAttention with any mechanism: the same constructor, weights, call and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward

from regard.checks import check_flag, check_tokens
from regard.mixers.attend import attend
from regard.mixers.base import Can, Core, Dims, mask_padding, need_claims
from regard.modules.attention_forms import BIDIRECTIONAL, CAUSAL, AttentionForms
from regard.modules.attention_masks import is_causal_mask, real_keys
from regard.spec import Named, Spec


class MultiheadAttention(nn.MultiheadAttention):
    """Attend by any mechanism or pattern, in the place of `torch.nn.MultiheadAttention`: the same arguments, weights and results.

    >>> import torch, regard
    >>> attention = regard.MultiheadAttention(64, 4, batch_first=True, mixer="Local(8)")
    >>> x = torch.randn(2, 100, 64)
    >>> y, _ = attention(x, x, x, need_weights=False, is_causal=True)

    `embed_dim`, `num_heads`, `dropout`, `bias`, `add_bias_kv`, `add_zero_attn`, `kdim`, `vdim`, `batch_first`, `device` and
    `dtype` are those of torch. `mixer` is a Spec, its text, a pattern or a class. Its weights are those of torch
    (`in_proj_weight` and so on), so that a state_dict loads both ways; parameters of the mechanism itself are under `forms`.
    With mixer="softmax" all results are torch's own.
    `causal=None` builds the bidirectional and the causal form, and every call chooses; a mechanism with parameters has one form,
    the bidirectional one unless causal=True. `max_len` and `backend` are those of `layer`. Weights cost n x m numbers a head:
    `weights=False` gives None for them in every call, whatever it asks for.

    Differences from torch, other than with softmax:
    - attn_mask may be the causal one alone, which is recognised; is_causal=True needs no attn_mask. A float key_padding_mask may
      hold 0 and -inf. All else that a mechanism cannot do is refused: weights it has not, dropout, cross attention.
    - With positions (patterns) query i is the token of key i, so that there are as many of both.
    - Positions count real tokens, and outputs of self-attention at padding are zero, as in `layer`.
    Nested tensors and TorchScript are not supported. Under torch.compile an attn_mask cannot be read: give is_causal=True.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        mixer: Named = "softmax",
        causal: bool | None = None,
        max_len: int | None = None,
        backend: str = "auto",
        weights: bool = True,
    ) -> None:
        dims = Dims(embed_dim, num_heads, max_len=max_len, dropout=dropout, backend=backend)
        if causal is not None:
            check_flag("causal", causal)
        forms = AttentionForms.of(Spec.of(mixer), dims, causal)
        super().__init__(
            *(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        )
        self.take(forms, weights)

    def take(self, forms: AttentionForms, weights: bool) -> None:
        """Attend by these forms of a mechanism from now on, on the device and in the type of the weights."""
        check_flag("weights", weights)
        check_extra_keys(self, forms)
        self.mixer, self.full, self.weights, self.missing = str(forms.spec), forms.full, weights, forms.missing
        self.has_weights = forms.spec.row.weights
        self.forms = nn.ModuleDict(forms.cores).to(self.out_proj.weight).train(self.training)
        self._qkv_same_embed_dim = False  # where it is True, torch's encoder layers compute attention without calling the module

    def extra_repr(self) -> str:
        return f"{self.mixer}, embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs in the shape of query, and the weights (b n m), or (b h n m) with average_attn_weights=False, or None.

        query (n b w), key (m b kdim), value (m b vdim); (b n w) and so on with batch_first; (n w) for one sequence.
        key_padding_mask (b m) is True or -inf at padding, attn_mask (n m) or (b h, n, m) at pairs that are hidden.
        """
        batched = isinstance(query, Tensor) and query.dim() == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        tokens = self._batch_first(query, key, value, batched)
        need_weights = need_weights and self.weights
        if self.full and self._needs_torch(tokens, key_padding_mask, need_weights, attn_mask, is_causal):
            y, weights = self._by_torch(tokens, key_padding_mask, need_weights, attn_mask, is_causal)
        else:
            n, m = tokens[0].shape[1], tokens[1].shape[1]
            causal = is_causal or is_causal_mask(attn_mask, n, m)
            y, weights = self._by_core(tokens, real_keys(key_padding_mask, len(tokens[1]), m), need_weights, causal)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y if self.batch_first else y.transpose(0, 1), weights

    def _batch_first(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return checked tokens (b n w), (b m kdim), (b m vdim); those that are one tensor stay one."""
        made: dict[int, Tensor] = {}
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if id(x) not in made:
                y = x
                if isinstance(x, Tensor) and not x.is_nested and x.dim() == (3 if batched else 2):
                    y = x[None] if not batched else x if self.batch_first else x.transpose(0, 1)
                made[id(x)] = y
            check_tokens(made[id(x)], name, width, self.out_proj.weight)
        q, k, v = made[id(query)], made[id(key)], made[id(value)]
        if k.shape[:2] != v.shape[:2] or len(q) != len(k):
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"query, key and value disagree in batch or length: (batch, length, width) are {shapes}")
        return q, k, v

    def _needs_torch(
        self, tokens: tuple[Tensor, ...], padding: Tensor | None, need_weights: bool, attn_mask: Tensor | None, is_causal: bool
    ) -> bool:
        """Return whether softmax has weights to return, masks or further keys that the core does not take."""
        if need_weights or self.bias_k is not None or self.add_zero_attn:
            return True
        if is_causal:
            return padding is not None or tokens[0].shape[1] != tokens[1].shape[1] or CAUSAL not in self.forms
        return attn_mask is not None or BIDIRECTIONAL not in self.forms or (padding is not None and padding.dtype != torch.bool)

    def _by_torch(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        padding: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute softmax by torch's own function, which takes any mask; weights are (b h n m)."""
        q, k, v = (x.transpose(0, 1) for x in tokens)
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
            if padding is not None and padding.is_floating_point():
                attn_mask = torch.zeros_like(attn_mask, dtype=padding.dtype).masked_fill(attn_mask, -torch.inf)
        y, weights = multi_head_attention_forward(
            *(q, k, v, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k, self.bias_v),
            *(self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias, self.training),
            key_padding_mask=padding,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=self.in_proj_weight is None,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=False,
            is_causal=is_causal,
        )
        return y.transpose(0, 1), weights

    def _by_core(
        self, tokens: tuple[Tensor, Tensor, Tensor], valid: Tensor | None, need_weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention by the mechanism; weights are (b h n m)."""
        form = CAUSAL if causal else BIDIRECTIONAL
        if form not in self.forms:
            raise ValueError(self.missing[form])
        core: Core = self.forms[form]  # type: ignore[assignment]
        query, key, value = tokens
        self._check_lengths(core, query.shape[1], key.shape[1], causal)
        beside = query is key or core.positional or causal  # queries are the tokens of the keys
        asking = valid if beside and not self.full else None
        if valid is not None and not self.full:
            masked = {id(x): mask_padding(x, valid) for x in (key, value)}
            same = asking is not None and id(query) in masked
            query = masked[id(query)] if same else mask_padding(query, asking)
            key, value = masked[id(key)], masked[id(value)]
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(query, key, value))
        padding = {"valid": valid} if causal else {"valid": valid, "query_valid": asking, "offset": 0}
        weights = None
        if need_weights:
            self._check_weights()
            one = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)  # A one = A
            weights = attend(q, k, one, core, causal=causal, **padding).to(v.dtype)
            y = weights @ v
        else:
            y = attend(q, k, v, core, causal=causal, **padding)
        y = self.out_proj(y.to(v.dtype).transpose(1, 2).flatten(2))
        return mask_padding(y, asking), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (b n w) of tokens, by one product where all are the same tokens."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return linear(query, weight, bias).chunk(3, -1)
        each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(linear(x, one, b) for x, one, b in zip((query, key, value), each, biases, strict=True))

    def _check_lengths(self, core: Core, n: int, m: int, causal: bool) -> None:
        longest = core.dims.max_len
        if longest is not None and max(n, m) > longest:
            raise ValueError(f"{self.mixer} was built for at most {longest} tokens, not for {max(n, m)}: give a larger max_len")
        if n == m:
            return
        need_claims(core.name, core.can, Can.CROSS)
        if causal or core.positional:
            raise ValueError(
                f"{'causal ' * causal}{self.mixer} depends on which of the {m} keys each of the {n} queries belongs to: "
                "give a query for each key"
            )

    def _check_weights(self) -> None:
        if not self.has_weights:
            raise ValueError(
                f"{self.mixer} has no attention weights to return: give need_weights=False, or build it with weights=False"
            )


def check_extra_keys(module: nn.MultiheadAttention, forms: AttentionForms) -> None:
    """Refuse the further keys that torch adds to a sequence on demand, where they are not among the tokens of a mechanism."""
    if not forms.full and (module.bias_k is not None or module.add_zero_attn):
        raise ValueError(f"add_bias_kv and add_zero_attn add keys that are no tokens, which {forms.spec} has no place for")
