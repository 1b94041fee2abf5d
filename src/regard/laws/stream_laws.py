"""Laws of streaming: `extend` in any cuts is the whole pass, and states are values."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.laws.law_case import LONG, Case
from regard.laws.law_table import law
from regard.laws.verdicts import agree, demand
from regard.mixers.base import Can, Mixer, State, select

_ADVICE = (
    "one pass over all tokens and `push` and `read` of a few at a time must give the same: use `places.at` for positions, keep "
    "in the memory all that later tokens read, and compare `scan` with the inherited loop (scan_is_the_loop). A core that "
    "cannot, leaves Can.STREAM out"
)


@law(_ADVICE, Can.STREAM, causal=True, given=({}, {"n": LONG, "b": 1}))
def stream_is_the_whole_pass(case: Case, n: int = 60, b: int = 3) -> None:
    """A prompt, chunks and single decoding steps through `extend` give the outputs of one pass over all tokens.

    `case` has the mechanism, `n` is the number of tokens, `b` that of rows.

    >>> from regard.laws import Case, stream_is_the_whole_pass
    >>> stream_is_the_whole_pass(Case("Local(4)"), n=16)
    """
    m, x = case.build(causal=True), case.data(n, b=b)
    whole = m(x)
    for cuts in _cuts(n):
        # with gradients, single tokens behind a prompt stand for all single tokens, and short sequences for long ones
        for grad in (False, True) if n < LONG and (len(cuts) < n or n < 8) else (False,):
            with torch.set_grad_enabled(grad):
                y, _ = _extended(m, m.start(b), x.split(cuts, 1))
            pieces = f"pieces of {cuts[0]} tokens" if len({*cuts}) == 1 else f"pieces of {', '.join(map(str, cuts))} tokens"
            agree(y, whole, "a stream gives another output than the whole pass", pieces)


def _cuts(n: int) -> list[list[int]]:
    """Return lengths of pieces that add up to n; for 60: all single tokens, 17 1 1 21 20, all at once, 3 50 7, 0 30 0 30."""
    mixed, left = [], n
    for piece in (n * 17 // 60, 1, 1, n * 21 // 60, n):
        mixed.append(min(piece, left))
        left -= mixed[-1]
    first, middle = n // 20, n * 50 // 60
    return [[1] * n, mixed, [n], [first, middle, n - first - middle], [0, n // 2, 0, n - n // 2]]


def _extended(m: Mixer, state: State, parts: tuple[Tensor, ...]) -> tuple[Tensor, State]:
    out = []
    for part in parts:
        y, state = m.extend(state, part)
        out.append(y)
    return torch.cat(out, 1), state


@law(_ADVICE, Can.STREAM | Can.PADDING, causal=True)
def prompts_stream_together(case: Case, n: int = 40) -> None:
    """Prompts of different length in one batch, padded on either side, go on as each does alone.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, prompts_stream_together
    >>> prompts_stream_together(Case("linear"), n=16)
    """
    m, x, lengths = case.build(causal=True), case.data(n + 30), [n * 33 // 40, n // 2, -(-n // 8)]
    prompt = x[:, :n]
    valid = torch.arange(n, device=case.device) < torch.tensor(lengths, device=case.device)[:, None]
    alone = [m(torch.cat([x[r, :size], x[r, n:]])[None])[0] for r, size in enumerate(lengths)]
    with torch.no_grad():
        for side, real in (("right", valid), ("left", valid.flip(1))):
            tokens = torch.where(real[..., None], prompt.gather(1, _order(real)[..., None].expand_as(prompt)), 7.0)
            y, state = m.extend(m.start(3), tokens, real)
            steps, state = _extended(m, state, x[:, n:].split([1, 1, 24, 1, 3], 1))
            for r, size in enumerate(lengths):
                found = torch.cat([y[r][real[r]], steps[r]])
                what = "a prompt in a batch with longer ones goes on in another way than alone"
                agree(found, alone[r], what, f"{size} of {n} tokens, padded on the {side}")
                demand(int(state.t[r]) == size + 30, "a state counts other tokens", f"{int(state.t[r])} for {size + 30}")


def _order(valid: Tensor) -> Tensor:
    """Return which prompt token is at each place, when real tokens keep their order."""
    return (valid.long().cumsum(1) - 1).clamp_min(0)


@law(
    "`push` returns a new memory and never writes into the one it was given; the batch is the first dimension of all tensors",
    Can.STREAM,
    causal=True,
)
def states_are_values(case: Case, n: int = 40) -> None:
    """A state may be extended twice, and rows of it selected in another order, as beam search does.

    `case` has the mechanism, `n` is the number of tokens.

    >>> from regard.laws import Case, states_are_values
    >>> states_are_values(Case("linear"), n=16)
    """
    m, x = case.build(causal=True), case.data(n + 24)
    pick = torch.tensor([2, 0, 0, 1], device=case.device)
    with torch.no_grad():
        _, state = m.extend(m.start(3), x[:, :n])
        for _ in range(3):  # a few steps, so that the memory has room to write into
            _, state = m.extend(state, x[:, n : n + 1])
        past = torch.cat([x[:, :n], x[:, n : n + 1].expand(-1, 3, -1)], 1)
        futures = [case.data(21, seed=s, b=3) for s in (7, 8)]
        steps = [m.extend(state, future[:, :1]) for future in futures]  # the same state extended twice, before either goes on
        for future, (step, later) in zip(futures, steps, strict=True):
            rest, _ = m.extend(later, future[:, 1:])
            wanted = m(torch.cat([past, future], 1))[:, n + 3 :]
            agree(torch.cat([step, rest], 1), wanted, "a state that was extended twice goes on in another way")
        future = case.data(21, seed=9, b=4)
        wanted = m(torch.cat([past[pick], future], 1))[:, n + 3 :]
        for chosen in (state.select(pick), select(state, pick)):
            agree(m.extend(chosen, future)[0], wanted, "selected rows of a state go on in another way")
