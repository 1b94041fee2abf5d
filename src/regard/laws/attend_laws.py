"""Laws of `attend` with queries that are some of the tokens: their places, and what is refused."""

from __future__ import annotations

from functools import partial

import torch

from regard.laws.law_case import LAW_HEADS, Case
from regard.laws.law_table import each, law
from regard.laws.verdicts import DoesNotApply, LawBroken, agree, demand, refuses
from regard.mixers.attend import attend
from regard.mixers.base import Can, Places

_PARTS = ((39, 1), (10, 20), (0, 7), (17, 23))  # of 40 tokens: the index of the first query, and how many
_ADVICE = (
    "`positional = False` where `read` does not depend on the positions of queries, `joint = True` where an answer depends on "
    "the other queries: set them as this case shows. In causal order compare `scan` with the inherited loop (scan_is_the_loop)"
)


@law(_ADVICE, core=True, given=each(padded=(False, True)))
def some_queries_get_what_all_get(case: Case, padded: bool = False, n: int = 40) -> None:
    """Some of the queries get the rows of the whole result, causal or not, or a sentence: never another result.

    `case` has the mechanism, keys are `padded` or not, `n` is the number of tokens.

    >>> from regard.laws import Case, some_queries_get_what_all_get
    >>> some_queries_get_what_all_get(Case("Local(4)"), n=16)
    """
    for mode in case.modes():
        core, causal = case.core(**mode), mode["causal"]
        q, k, v = case.heads(core, 2, n)
        valid = case.some(2, n) if padded and Can.PADDING in core.can else None
        whole = attend(q, k, v, core, causal=causal, valid=valid, query_valid=None if causal else valid)
        for first, count in ((first * n // 40, -(-count * n // 40)) for first, count in _PARTS):
            here = slice(first, first + count)
            asked = None if causal or valid is None else valid[:, here]
            part = partial(attend, q[:, :, here], k, v, core, causal=causal, valid=valid, query_valid=asked, offset=first)
            if causal or not core.joint:
                which = f"queries {first} to {first + count - 1} of {n}"
                agree(part(), whole[:, :, here], "some queries get another answer than among all", which)
            elif first or Can.CROSS not in core.can:
                refuses(part, "answers all queries together", "it is joint, and answers some of the queries")


@law(_ADVICE, core=True)
def positions_are_declared(case: Case, n: int = 40) -> None:
    """`positional` is what moving the queries shows, and `joint` what taking some of them shows.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, positions_are_declared
    >>> positions_are_declared(Case("Local(4)"), n=16)
    """
    core = case.core()
    q, k, v = case.heads(core, 2, n)
    memory = core.push(core.empty(k, v), k, v, Places.of(k[:, 0]))
    few, count = slice(n // 4, n * 3 // 4), n * 3 // 4 - n // 4
    if not core.joint:
        asked = q[:, :, : max(n * 9 // 40, 1)]
        moved = [core.read(memory, asked, Places.of(asked[:, 0], start=start)) for start in (0, 1, n // 3, n * 3 // 4)]
        depends = not all(torch.equal(moved[0], other) for other in moved[1:])
        demand(not depends or core.positional, "it says positional = False, and moved queries get other answers")
        if core.positional and not depends:
            _declared_too_much(case, "it says positional = True, and moved queries get the same answers", n)
        return
    try:
        found = core.read(memory, q[:, :, few], Places.of(q[:, 0, few], start=few.start))
    except (ValueError, RuntimeError):
        return
    alone = found.shape[2] == count and torch.allclose(found, attend(q, k, v, core)[:, :, few])
    if alone:
        _declared_too_much(case, "it says joint = True, and some queries get what they get among all", n)


def _declared_too_much(case: Case, what: str, n: int) -> None:
    """Report a declaration that nothing shows: for options that are no example of the row, longer sequences may show it."""
    if case.example is None:
        raise DoesNotApply(f"{what} of {n} tokens: right if its options are for longer sequences, else set it to False")
    raise LawBroken(what)


@law(_ADVICE, core=True)
def ambiguity_is_refused(case: Case) -> None:
    """Fewer queries than keys need an offset where positions matter, and one that lies inside of the keys.

    `case` has the mechanism.

    >>> from regard.laws import Case, ambiguity_is_refused
    >>> ambiguity_is_refused(Case("Local(4)"))
    """
    for mode in case.modes():
        core, causal = case.core(**mode), mode["causal"]
        q, k, v = case.heads(core, 2, 40)
        if causal or core.positional:
            sentence = "1 queries and 40 keys: give offset=39 if they are the last 1 tokens, offset=0"
            refuses(partial(attend, q[:, :, :1], k, v, core, causal=causal), sentence, "one query among 40 keys needs no offset")
        elif Can.CROSS in core.can and not core.rate > 1:
            shape = attend(q[:, :, :1], k, v, core).shape
            demand(shape == (2, LAW_HEADS, 1, core.dims.e), "one query gets another shape", f"{tuple(shape)}")
        if causal or Can.CROSS not in core.can:
            sentence = "queries are tokens among the 40 keys here: offset 30 and 11 queries are more"
            behind = partial(attend, q[:, :, :11], k, v, core, causal=causal, offset=30)
            refuses(behind, sentence, "queries behind the last key are answered")
