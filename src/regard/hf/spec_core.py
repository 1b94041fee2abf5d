"""Cores of Specs for the attention of other models: without parameters, cut to the model's own window, made once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeGuard

import torch

from regard.cache import register_cache
from regard.mixers.base import Can, Core, Dims, LengthNeeded, need_claims
from regard.mixers.softmax import Softmax
from regard.mixers.sparse import Sparse
from regard.patterns import Everything, Pattern, PerHead
from regard.spec import Spec, core


class CoreSizes(NamedTuple):
    """The sizes of one attention layer that its queries, keys and values have, and how it is used."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    causal: bool
    dropout: float
    max_len: int | None


def check_plain(spec: Spec) -> None:
    """Refuse a mechanism that needs more than the queries, keys and values of a model, as far as that depends on no sizes."""
    for causal in (False, True):
        try:
            made = core(spec, Dims(768, 12, causal=causal, max_len=512))
        except ValueError:
            if not causal and not _has_core(spec):
                raise
            continue  # it may fit other sizes, or one of both forms alone
        _need_plain(spec, made)


def _has_core(spec: Spec) -> bool:
    make = spec.row.make
    return isinstance(make, type) and issubclass(make, Core)


def _need_plain(spec: Spec, made: Core) -> None:
    lacking = {
        "parameters or tables of its own": next(chain(made.parameters(), made.buffers()), None) is not None,
        "more than one query, key and value for each token": made.streams > 1,
        "gates beside its keys": made.gates > 0,
        "keys that are its queries": made.shared_qk,
        "fewer outputs than tokens": made.rate > 1,
    }
    for what, needed in lacking.items():
        if needed:
            raise ValueError(f"{spec} has {what}, which the attention of a given model has no place for")


class _Cores:
    """Hold cores as attributes, which torch.compile finds when they are made while it traces; those of a dict it would not."""


_CORES = _Cores()
_NAMES: dict[tuple, str] = {}  # of attributes
_MOST_CORES = 256


def spec_core(text: str, sizes: tuple, within: str | None) -> Core:
    """Return the core of a Spec for `CoreSizes`, on the pairs of a further pattern alone; both are given as texts."""
    return getattr(_CORES, _core_name(text, sizes, within))


@torch.compiler.assume_constant_result
def _core_name(text: str, sizes: tuple, within: str | None) -> str:
    """Return the name of a core, which is made if it is not there yet."""
    key = (text, sizes, within)
    if key not in _NAMES:
        made = _made_core(text, CoreSizes(*sizes), within)
        if len(_NAMES) >= _MOST_CORES:
            _forget_cores()
        name = f"core{len(_NAMES)}"
        setattr(_CORES, name, made)
        _NAMES[key] = name
    return _NAMES[key]


def _forget_cores() -> None:
    vars(_CORES).clear()
    _NAMES.clear()


register_cache(_forget_cores)


def _made_core(text: str, sizes: CoreSizes, within: str | None) -> Core:
    spec = Spec.parse(text)
    dims = Dims(
        sizes.heads * sizes.key_dim,
        sizes.heads,
        sizes.kv_heads,
        sizes.key_dim,
        sizes.value_dim,
        causal=sizes.causal,
        max_len=sizes.max_len,
        dropout=sizes.dropout,
    )
    try:
        made = core(spec, replace(dims, dropout=0.0))
        if sizes.dropout and Can.DROPOUT in made.can:
            made = core(spec, dims)
    except LengthNeeded as error:
        raise ValueError(f"{error}: the configuration of this model has no max_position_embeddings") from error
    _need_plain(spec, made)
    need_claims(made.name, made.can, Can.CAUSAL if sizes.causal else Can.NOTHING)
    if made.dims.dropout != sizes.dropout:
        raise ValueError(
            f"{spec} has no weights to drop, and the model drops {sizes.dropout} of them in training: set its attention dropout "
            "to 0 when it is made, in its configuration"
        )
    return made if within is None else _cut(spec, made, Pattern.of(within))


def _cut(spec: Spec, made: Core, within: Pattern) -> Core:
    """Return softmax attention over the pairs of a core that are in a pattern too."""
    if not has_pattern(made):
        raise ValueError(
            f"the model attends to {within} in this layer, which {spec} cannot do: give it a pattern there, "
            "or take the window from its configuration"
        )
    each = [within if own == Everything() else own & within for own in made.reach.each]
    alike = all(own == each[0] for own in each)
    return Sparse(made.dims, pattern=each[0] if alike else PerHead(each), scale=made.scale)


def has_pattern(made: Core) -> TypeGuard[Softmax | Sparse]:
    """Return whether a core is a softmax of scaled dot products over the pairs of a pattern: it has `reach` and `scale`."""
    return type(made) is Softmax or (isinstance(made, Sparse) and type(made).answer is Sparse.answer)
