"""All tokens of an answer at once: the best path, the best of several lengths, and second thoughts.

Letters: b batch, k lengths of each, m slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.mixers.feature_math import wide
from regard.models.nat import BLANK, END, Ctc, Length, Parallel, Read, Seats, rooms

NOTHING = -1  # where an answer has no token


def collapsed(path: Tensor, valid: Tensor | None = None) -> Tensor:
    """What a path (b m) says: tokens in a row taken as one, blanks removed, the rest in front, NOTHING behind it."""
    said = path != BLANK
    said[:, 1:] &= path[:, 1:] != path[:, :-1]
    if valid is not None:
        said &= valid
    m = path.shape[1]
    to = torch.where(said, said.cumsum(1) - 1, m)  # those that are not said go to one more column, which is cut off
    return path.new_full((len(path), m + 1), NOTHING).scatter(1, to, path)[:, :m]


def cut(tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """Tokens (b m) up to their first END, NOTHING from there on."""
    over = (tokens == END).cumsum(1) > 0
    return tokens.masked_fill(over if valid is None else over | ~valid, NOTHING)


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of every slot and its log-probability, from scores (b m v)."""
    top = wide(scores).log_softmax(-1).max(-1)
    return top.indices, top.values


def least_sure(sure: Tensor, valid: Tensor | None, t: int, rounds: int) -> Tensor:
    """Which floor(m (rounds - t) / rounds) of every row's m real slots are the least sure, (b m)."""
    count = sure.shape[1] if valid is None else valid.sum(1, keepdim=True)
    order = sure if valid is None else sure.masked_fill(~valid, torch.inf)
    return order.argsort(dim=1, stable=True).argsort(1) < count * (rounds - t) // rounds


def refined(model: Parallel, read: Read, seats: Seats, iterations: int) -> tuple[Tensor, Tensor]:
    """Mask-predict: say all, then hide what one is the least sure of and say it again; tokens and log-probabilities, (b m).

    In round t of T the floor(m (T - t) / T) least sure tokens are hidden. Ghazvininejad et al. 2019, arXiv:1904.09324.
    """
    tokens, sure = likeliest(model.answer(read, seats))
    for t in range(1, iterations):
        hidden = least_sure(sure, seats.valid, t, iterations)
        again, how = likeliest(model.answer(read, seats, tokens, ~hidden))
        tokens, sure = torch.where(hidden, again, tokens), torch.where(hidden, how, sure)
    return tokens, sure


@torch.no_grad()
def say_at_once(
    model: Parallel, source: Tensor, source_valid: Tensor | None = None, *, lengths: int = 1, iterations: int = 1
) -> list[list[int]]:
    """An answer for every row, without ends and blanks.

    Where slots are counted by a predicted length, the `lengths` likeliest are all tried, side by side, and the answer with the
    best log-probability / length is kept, that of its length included: a model that never saw a wrong length is too sure of what
    it says there. With `iterations` > 1 each is refined. The host waits once, for the answers; and once more
    for a length, where one is predicted.
    """
    check_asked(model, lengths, iterations)
    return words(tokens_at_once(model, source, source_valid, lengths, iterations))


def check_asked(model: Parallel, lengths: int, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations!r}")
    if not isinstance(model.slots, Length) and (lengths != 1 or iterations != 1):
        name = type(model.slots).__name__.lower()
        raise ValueError(f"{name} knows its slots and says them once: lengths and iterations are for length and masked")


def tokens_at_once(
    model: Parallel, source: Tensor, source_valid: Tensor | None, lengths: int = 1, iterations: int = 1, *, wait: bool = True
) -> Tensor:
    """Answers (b m) for `words` to hear. wait=False: the host asks for no length, there are slots for the longest that can be."""
    read = model.hear(source, source_valid)
    if isinstance(model.slots, Length):
        return _best_length(model, read, lengths, iterations, None if wait else model.slots.lengths.longest(read.x.shape[1]))
    seats = model.seats(read)
    tokens = model.answer(read, seats).argmax(-1)
    return collapsed(tokens, seats.valid) if isinstance(model.slots, Ctc) else cut(tokens)


def words(tokens: Tensor) -> list[list[int]]:
    """The answers of `tokens_at_once`, on the host."""
    nothing = (NOTHING, BLANK, END)  # ctc learns no END, others no BLANK; should they say one all the same, it is not heard
    return [[token for token in row if token not in nothing] for row in tokens.tolist()]


def _best_length(model: Parallel, read: Read, k: int, iterations: int, most: int | None) -> Tensor:
    """Answers (b m): of k lengths the one with the best (log p(length) + log p(its tokens)) / length; m is `most`, if given."""
    guessed, logs = model.guess(read, k)  # (b k)
    m, valid = rooms(guessed.flatten(), most)
    if k > 1:
        read = read.select(torch.arange(guessed.numel(), device=guessed.device) // k)
    tokens, sure = refined(model, read, model.seats(read, m, valid), iterations)
    tokens = cut(tokens, valid)
    if k == 1:
        return tokens
    assert valid is not None
    mean = (sure.masked_fill(~valid, 0).sum(1).view_as(logs) + logs) / guessed
    best = mean.argmax(1)[:, None, None].expand(-1, 1, m)
    return tokens.view(*guessed.shape, m).gather(1, best).squeeze(1)
