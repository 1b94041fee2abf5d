"""Apply a core to queries, keys and values that are given, in the shapes of SDPA."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from regard.checks import check_valid, shown
from regard.mixers.attention import no_autocast
from regard.mixers.base import Core
from regard.mixers.dims import Can, need_claims
from regard.mixers.own_scores import OwnScores, ScoreFunction, attend_own
from regard.mixers.packed_documents import attend_documents
from regard.mixers.places import Places, pooled_valid
from regard.patterns.algebra import Pattern


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core: Core,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
    offset: int | None = None,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    score: ScoreFunction | None = None,
) -> Tensor:
    """Apply a core to q (b h n d), k (b g m d), v (b g m e), the shapes of SDPA; returns (b h n e).

    `offset` is the index of the first query in the sequence of the keys: query i is token offset + i. A decoding step against a
    KV cache is offset=m - n, two sequences that begin together are offset=0. It may be left out where n == m (then it is 0), and
    in non-causal attention by a core that does not depend on positions. A causal query sees no key behind its own.
    `valid` (b m) belongs to the keys, `query_valid` (b n) to the queries: give both in padded self-attention, where positions
    count real tokens on both sides. In the causal form queries are tokens among the keys, and `valid` is enough.
    The output is zero where a query is padding.
    `documents` (b m) are integers, for sequences packed into rows: tokens attend inside their own document, by any core, as if it
    were a row of its own, with positions that begin anew. The tokens of a document are adjacent; `valid` may take tokens out.
    `mask` (bool, broadcast to b h n m, True = may attend) and `score` (called with the scaled scores and with the row, head,
    query and key of each, as in FlexAttention) change softmax and patterns, at the cost of all pairs; other cores refuse them. A
    mask that is a pattern, or documents, costs its own pairs alone if it is given as such.

    >>> import torch
    >>> from regard import Dims, attend, core
    >>> q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
    >>> window = core("Local(4)", Dims(width=32, heads=4))
    >>> out = attend(q, k, v, window, causal=True)
    >>> step = attend(q[:, :, -1:], k, v, window, causal=True, offset=9)
    >>> torch.allclose(step, out[:, :, -1:], atol=1e-6)
    True
    """
    _check_core(core, q, k, v)
    _check_heads(q, k, v, core.gates)
    _check_sizes(q, k, v, core)
    own = OwnScores(mask, score)
    if documents is not None:
        _check_alone(offset, query_valid, own)
        need_claims(core.name, core.can, Can.CAUSAL if causal else Can.NOTHING)
        each = partial(_attend_rows, core=core, causal=causal)
        return attend_documents(q, k, v, core, documents, valid, each)
    (b, _, m, _), n = k.shape, q.shape[2]
    need_claims(core.name, core.can, Can.CAUSAL if causal else Can.NOTHING)
    check_valid(valid, b, m, "keys")
    if valid is not None:
        need_claims(core.name, core.can, Can.PADDING)
    if causal and query_valid is not None:
        raise ValueError("in causal attention queries and keys are the same tokens: give valid alone")
    first = _checked_offset(offset, n, m, core, causal)
    real = query_valid
    if causal:
        real = valid if valid is None or n == m else valid[:, first : first + n]
    check_valid(real, b, n, "queries")
    k = _unpadded(k, valid)
    v = _unpadded(v, valid)
    q = _unpadded(q, real)
    places = Places.of_heads(k, valid)
    with no_autocast(q):
        core.watch(q, k, valid)
        if own.given:
            asked = places.part(first, first + n) if causal else _among_keys(q, query_valid, first, valid)
            out = attend_own(q, k, v, core, own, causal=causal, queries=asked, keys=places)
        elif causal and n == m:
            out = core.scan_all(q, k, v, places)
        elif causal:
            memory = core.unwritten(k, v)
            if first:
                memory = core.push(memory, k[:, :, :first], v[:, :, :first], places.part(0, first))
            k = k[:, :, first : first + n]
            v = v[:, :, first : first + n]
            out = core.scan(memory, q, k, v, places.part(first, first + n))[0]
        else:
            out = core.read_all(q, k, v, places, _among_keys(q, query_valid, first, valid))
    real = pooled_valid(real, core.rate)
    if real is None:
        return out
    return out.masked_fill(~real[:, None, :, None], 0)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *, core: Core, causal: bool) -> Tensor:
    """Attend in every row alone: q, k, v of the same tokens, valid (b n) of both sides."""
    return attend(q, k, v, core, causal=causal, valid=valid, query_valid=None if causal else valid)


def _check_alone(offset: int | None, query_valid: Tensor | None, own: OwnScores) -> None:
    """Refuse what documents do not go together with."""
    if offset:
        raise ValueError("documents are for tokens that attend to each other: leave out offset, and give a query for each key")
    if query_valid is not None:
        raise ValueError("the tokens of documents are queries and keys: give valid alone")
    if own.given:
        raise ValueError("documents take no mask and no score function: give one of them")


def _unpadded(x: Tensor, valid: Tensor | None) -> Tensor:
    """x (b h n d) with zeros at padding, whatever it holds."""
    if valid is None:
        return x
    return x.masked_fill(~valid[:, None, :, None], 0)


def _checked_offset(offset: int | None, n: int, m: int, core: Core, causal: bool) -> int:
    """Return the index of the first of n queries among m keys; refuse what is ambiguous or cannot be computed."""
    if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int) or offset < 0):
        raise ValueError(f"offset must be an integer from 0 on, the index of the first query among the keys, not {offset!r}")
    first = offset or 0
    inside = causal or Can.CROSS not in core.can
    if inside and first + n > m:
        raise ValueError(f"queries are tokens among the {m} keys here: offset {first} and {n} queries are more than that")
    if offset is None and n != m and (causal or core.positional):
        last = f"offset={m - n} if they are the last {n} tokens, " if n < m else ""
        raise ValueError(f"{n} queries and {m} keys: give {last}offset=0 if both begin with the same token")
    if causal and n != m:
        need_claims(core.name, core.can, Can.STREAM, f"so give a query for each of the {m} keys")
    if not causal and core.joint and (first or (inside and n != m)):
        raise ValueError(f"{core.name} answers all queries together: give a query for each of the {m} keys, and no offset")
    return first


def _among_keys(q: Tensor, query_valid: Tensor | None, first: int, valid: Tensor | None) -> Places:
    """Return the places of queries (b h n d) that begin at index `first` of the keys, counting real tokens only."""
    if not first or valid is None:
        return Places.of_heads(q, query_valid, first)
    behind = max(first - valid.shape[1], 0)
    before = valid[:, :first].sum(1) + behind
    return Places.of(q[:, 0], query_valid, before, start=None)


def _check_core(core: object, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what is no core, with the call that makes one for these queries, keys and values."""
    if isinstance(core, Core):
        return
    if isinstance(inside := getattr(core, "core", None), Core):
        raise TypeError(f"core must be a Core, not a layer: give its core, attend(q, k, v, layer.core), a {inside.name} here")
    call = f"core({_spec_text(core)}, {_dims_text(q, k, v)})"
    raise TypeError(f"core must be a Core, not {shown(core)}: build one with regard.core, as in {call}")


def _spec_text(named: object) -> str:
    """Write what names a mechanism as the first argument of `core`; an example of it for anything else."""
    if isinstance(named, type) and issubclass(named, Core):
        return named.__name__
    spec = hasattr(named, "row")  # a Spec, whose module imports this one
    return shown(named) if spec or isinstance(named, str | Pattern) else "'Local(4)'"


def _dims_text(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Write the Dims of queries, keys and values, for an error message."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return "Dims(width=..., heads=...)"
    (h, d), g, e = (q.shape[1], q.shape[3]), k.shape[1], v.shape[3]
    grouped = f", kv_heads={g}" if g != h else ""
    values = f", value_dim={e}" if e != d else ""
    return f"Dims(width={h * d}, heads={h}{grouped}{values})"


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, core: Core) -> None:
    """Refuse heads of another number or size than the core was built for; values may have any size."""
    built, found = (core.dims.heads, core.dims.d * core.streams, core.sizes[0]), (q.shape[1], q.shape[3], k.shape[3])
    if found != built:
        raise ValueError(
            f"q and k have {found[0]} heads with queries of {found[1]} and keys of {found[2]}, but this {core.name} was built "
            f"for {built[0]} heads with queries of {built[1]} and keys of {built[2]}: build one with {_dims_text(q, k, v)}"
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor, gates: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but (batch, heads, length, dim) is needed")
        if x.device != q.device or x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} on {q.device} but {name} is {x.dtype} on {x.device}: they must agree")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k, v disagree in batch, heads or length: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if gates and q.shape[3] + gates != k.shape[3]:
        raise ValueError(
            f"k has dim {k.shape[3]}, but q has {q.shape[3]} and {gates} gates stand behind each key: give it their sum"
        )
    if q.shape[3] != k.shape[3] - gates or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} need the same dim and heads that divide evenly")
