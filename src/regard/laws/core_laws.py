"""Laws of cores: the scan is the loop, contexts, grouped heads, sizes of heads, weights by the identity, order of queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.analysis.probe import attention_matrix, has_weights
from regard.laws.law_case import LAW_HEADS, LAW_WIDTH, LONG, Case
from regard.laws.law_table import law
from regard.laws.verdicts import DoesNotApply, LawBroken, agree, demand, refuses
from regard.mixers.attend import attend
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Places
from regard.spec import core as make_core

_GROUPED = "memories keep g key-value heads: `per_query_head(x, q)` repeats them for the h heads of the queries"


@law(
    "your `scan` means something else than `push` and `read` token by token: compare them in this case. Gradients too: a "
    "custom backward pass is the usual cause where outputs agree",
    Can.STREAM | Can.CAUSAL,
    core=True,
    causal=True,
    given=(
        *({"before": before, "kv_heads": g} for before, g in ((0, LAW_HEADS), (0, 2), (21, 2))),
        {"n": LONG, "b": 1},
    ),
)
def scan_is_the_loop(case: Case, n: int = 45, before: int = 0, kv_heads: int = LAW_HEADS, b: int = 2) -> None:
    """Outputs and gradients of `scan` are those of its definition, the loop over tokens, from an empty memory or behind one.

    `case` has the mechanism, `n` is the number of tokens, `before` that of tokens in the memory, `kv_heads` that of key-value
    heads, `b` that of rows.

    >>> from regard.laws import Case, scan_is_the_loop
    >>> scan_is_the_loop(Case("linear"), n=9, before=3)
    """
    if case.core(causal=True).shared_qk:  # its layer refuses fewer key-value heads, `attend` does not
        dims = Dims(LAW_WIDTH, LAW_HEADS, kv_heads=kv_heads, causal=True)
        core = make_core(case.spec, dims).to(case.device, torch.float64).eval()
    else:
        core = case.core(causal=True, kv_heads=kv_heads)
    fast = _scans(case, core, core.scan, n, before, b)
    slow = _scans(case, core, lambda *args: Core.scan(core, *args), n, before, b)
    names = [
        "outputs",
        "gradients of q",
        "gradients of k",
        "gradients of v",
        *(f"gradients of {p}" for p, _ in core.named_parameters()),
    ]
    for name, found, wanted in zip(names, fast, slow, strict=True):
        agree(found, wanted, f"{name} of scan differ from the loop", f"{before} tokens before, {kv_heads} key-value heads")


def _scans(case: Case, core: Core, scan: Callable[..., tuple[Tensor, Any]], n: int, before: int, b: int) -> list[Tensor]:
    """Return outputs and all gradients of a scan over n tokens, from an empty memory or behind one."""
    g = torch.Generator().manual_seed(5)
    shapes = ((LAW_HEADS, core.dims.d * core.streams), *((core.dims.g, size) for size in core.sizes))
    q, k, v = (
        torch.randn(b, h, n + before, x, dtype=torch.float64, generator=g).to(case.device).requires_grad_() for h, x in shapes
    )
    valid = case.some(b, n + before)
    places = Places.of(k[:, 0], valid)
    memory = core.empty(k, v)
    cut, rest = slice(0, before), slice(before, n + before)
    if before:
        memory = core.push(memory, k[:, :, cut], v[:, :, cut], places.part(0, before))
    here = Places(places.at[:, rest], valid[:, rest], None if before else 0)
    y, memory = scan(memory, q[:, :, rest], k[:, :, rest], v[:, :, rest], here)
    y = y * valid[:, None, rest, None]  # answers to padding mean nothing
    up = torch.randn(y.shape, dtype=torch.float64, generator=g).to(case.device)
    return [y, *torch.autograd.grad((y * up).sum(), (q, k, v, *core.parameters()), materialize_grads=True)]


@law(
    "queries come from another sequence than keys and values: n and m differ, and `valid` belongs to the keys. A core that "
    "cannot, leaves Can.CROSS out",
    Can.CROSS,
    cross=True,
)
def cross_attention(case: Case, n: int = 40) -> None:
    """A context of another width and length is read, padded for each row, in one pass and in a stream of queries.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, cross_attention
    >>> cross_attention(Case("linear"), n=16)
    """
    m, x, c = case.build(cross=True, context_width=24), case.data(n), case.data(33, seed=3, width=24)
    valid = torch.arange(33, device=case.device) < torch.tensor([33, 20, 5], device=case.device)[:, None]
    y = m(x, context=c, valid=valid)
    agree(y[2], m(x[2:], context=c[2:, :5])[0], "a padded context gives another output than a short one")
    if Can.STREAM in m.can:
        state, out = m.start(context=c, valid=valid), []
        for part in x.split([1, n // 2, n - 1 - n // 2], 1):
            o, state = m.extend(state, part)
            out.append(o)
        agree(torch.cat(out, 1), y, "a stream of queries to a context gives another output than one pass")


@law(_GROUPED + "; key dim d and value dim e may differ", core=True)
def head_sizes_may_differ(case: Case, n: int = 40) -> None:
    """Keys of another size than values, and fewer key-value heads than heads, give outputs of the same shape and gradients.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, head_sizes_may_differ
    >>> head_sizes_may_differ(Case("softmax"), n=8)
    """
    for mode in case.modes():
        few: dict[str, Any] = {} if case.core(**mode).shared_qk else {"kv_heads": 2}
        m, x = case.build(key_dim=6, value_dim=10, **few, **mode), case.data(n)
        assert isinstance(m, Attention)
        y = m(x)
        demand(y.shape == (3, -(-n // m.rate), LAW_WIDTH), "the output has another shape", f"{tuple(y.shape)}")
        y.sum().backward()
        demand(m.v.weight.shape[0] in (20, 40), "values have another size than value_dim", f"{m.v.weight.shape[0]}")


@law(_GROUPED, core=True)
def grouped_heads_are_repeated(case: Case, n: int = 40) -> None:
    """Two key-value heads for four heads give what four do of which two and two are equal.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, grouped_heads_are_repeated
    >>> grouped_heads_are_repeated(Case("softmax"), n=8)
    """
    for mode in case.modes():
        if case.core(**mode).shared_qk:
            refuses(partial(case.build, kv_heads=2, **mode), "no kv_heads", "shared queries and keys have kv_heads")
            continue
        few, many = case.build(kv_heads=2, **mode), case.build(**mode)
        state = few.state_dict()
        for name, full in many.state_dict().items():
            if state[name].shape != full.shape:  # what belongs to the two key-value heads: projections, gates, rates
                state[name] = state[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
        many.load_state_dict(state)
        agree(few(case.data(n)), many(case.data(n)), "grouped heads give another output than repeated ones")


@law(
    "out = A v with an A that does not depend on v: if that is not so, write weights=False in the examples of the row", core=True
)
def weights_are_shown(case: Case, n: int = 37) -> None:
    """The matrix that the identity for v shows, times the values, is the output; a causal one is zero above its diagonal.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, weights_are_shown
    >>> weights_are_shown(Case("Local(4)"), n=9)
    """
    claimed = None if case.example is None else case.example.weights
    for mode in case.modes():
        core = case.core(**mode)
        found = has_weights(core)
        if claimed is not None:
            what = (
                "zero values have an output, so that it has no weights"
                if claimed
                else "the row says weights=False, and zero values have no output"
            )
            demand(found == claimed, what)
        if not found:
            continue
        g = torch.Generator().manual_seed(5)
        sizes = core.dims.d * core.streams, *core.sizes
        q, k, v = (torch.randn(2, LAW_HEADS, n, x, dtype=torch.float64, generator=g).to(case.device) for x in sizes)
        a = attention_matrix(core, q, k, causal=mode["causal"])
        half = v[..., : core.dims.e]
        value = torch.cat([half] * core.streams, -1)
        try:
            agree(a @ half, attend(q, k, value, core, causal=mode["causal"]), "A v is not the output")
        except LawBroken as broken:
            if claimed is None:
                raise DoesNotApply(f"it is not linear in its values ({broken.numbers}): its row says weights=False") from None
            raise
        if mode["causal"]:
            demand(a.triu(1).abs().max() == 0, "a weight above the diagonal is not zero")
    if not claimed and not found:
        raise DoesNotApply("zero values have an output that is not zero: it is no weighted sum of values")


@law(
    "the order of queries matters to `read`, though positional = False and joint = False say that neither positions nor other "
    "queries do: set the one that does to True",
    core=True,
)
def permuted_queries(case: Case, n: int = 33) -> None:
    """Where positions of queries change nothing and no answer depends on the others, permuted queries get permuted answers.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, permuted_queries
    >>> permuted_queries(Case("softmax"), n=9)
    """
    core = case.core()
    if core.positional or core.joint:
        raise DoesNotApply("its answers depend on the positions of queries, or on the other queries")
    q, k, v = case.heads(core, 2, n)
    memory = core.push(core.empty(k, v), k, v, Places.of(k[:, 0]))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(6)).to(case.device)
    places = Places.of(q[:, 0])
    agree(
        core.read(memory, q[:, :, order], places), core.read(memory, q, places)[:, :, order], "permuted queries get other answers"
    )
