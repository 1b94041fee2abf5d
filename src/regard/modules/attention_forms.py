"""The forms of a mechanism inside a module that learns in every call whether it is causal: bidirectional, causal, or both."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from regard.mixers.base import Can, Core, Dims, need_claims
from regard.spec import Spec, core

BIDIRECTIONAL, CAUSAL = "bidirectional", "causal"


class AttentionForms(NamedTuple):
    """Hold a mechanism for given queries, keys and values, in one form or two."""

    spec: Spec
    cores: dict[str, Core]  # by form
    missing: dict[str, str]  # by form: why there is none

    @staticmethod
    def of(spec: Spec, dims: Dims, causal: bool | None = None) -> AttentionForms:
        """Build a form, or with causal=None all that can be: both, where the mechanism has no state that they would share."""
        if causal is not None:
            form, other = (CAUSAL, BIDIRECTIONAL) if causal else (BIDIRECTIONAL, CAUSAL)
            why = f"{spec} was built with causal={causal}, but this call is {other}"
            return AttentionForms(spec, {form: _plain_core(spec, dims, causal)}, {other: why})
        both = _plain_core(spec, dims, causal=False)
        if next(chain(both.parameters(), both.buffers()), None) is not None:
            why = f"{spec} has parameters or tables for one form: build it with causal=True for causal calls"
            return AttentionForms(spec, {BIDIRECTIONAL: both}, {CAUSAL: why})
        try:
            return AttentionForms(spec, {BIDIRECTIONAL: both, CAUSAL: _plain_core(spec, dims, causal=True)}, {})
        except ValueError as error:
            return AttentionForms(spec, {BIDIRECTIONAL: both}, {CAUSAL: str(error)})

    @property
    def full(self) -> bool:
        """Whether this is the softmax of torch, over all pairs and with its scale."""
        return self.spec.name == "softmax" and self.spec.options.get("scale") is None


def _plain_core(spec: Spec, dims: Dims, causal: bool) -> Core:
    """Build a core that is content with one query, one key and one value for each head and token, and answers each query."""
    made = core(spec, replace(dims, causal=causal))
    need_claims(made.name, made.can, Can.CAUSAL if causal else Can.NOTHING)
    lacking = {
        "more than one query, key and value for each token": made.streams > 1,
        "gates beside its keys": made.gates > 0,
        "keys that are its queries": made.shared_qk,
        "fewer outputs than tokens": made.rate > 1,
    }
    for what, needed in lacking.items():
        if needed:
            form = "causal " if causal else ""
            raise ValueError(f"{form}{spec} has {what}, unlike MultiheadAttention: use layer({str(spec)!r}, ...)")
    return made
