"""Non-autoregressive decoding: the best CTC path, the best of several lengths, and mask-predict.

Letters: b batch, k lengths of each, m slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.data.batch import END
from regard.mixers.feature_math import upcast
from regard.models.nat import BLANK, CtcSlots, EncodedSource, LengthSlots, NatTranslator, SlotInputs, slots_for

NO_TOKEN = -1  # where an answer has no token


def ctc_collapse(path: Tensor, valid: Tensor | None = None) -> Tensor:
    """Collapse CTC paths (b m): repeats are one token, blanks are removed, NO_TOKEN fills the end."""
    kept = path != BLANK
    kept[:, 1:] &= path[:, 1:] != path[:, :-1]
    if valid is not None:
        kept &= valid
    m = path.shape[1]
    to = torch.where(kept, kept.cumsum(1) - 1, m)  # removed ones go to one more column, which is cut off
    return path.new_full((len(path), m + 1), NO_TOKEN).scatter(1, to, path)[:, :m]


def cut_at_eos(tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """Replace the first END of tokens (b m) and all behind it by NO_TOKEN."""
    over = (tokens == END).cumsum(1) > 0
    return tokens.masked_fill(over if valid is None else over | ~valid, NO_TOKEN)


def slot_argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best token of every slot and its log-probability, from scores (b m v)."""
    top = upcast(scores).log_softmax(-1).max(-1)
    return top.indices, top.values


def least_confident(sure: Tensor, valid: Tensor | None, t: int, rounds: int) -> Tensor:
    """Mark the floor(m (rounds - t) / rounds) least probable of every row's m real slots, (b m)."""
    count = sure.shape[1] if valid is None else valid.sum(1, keepdim=True)
    order = sure if valid is None else sure.masked_fill(~valid, torch.inf)
    return order.argsort(dim=1, stable=True).argsort(1) < count * (rounds - t) // rounds


def mask_predict(model: NatTranslator, read: EncodedSource, seats: SlotInputs, iterations: int) -> tuple[Tensor, Tensor]:
    """Mask-predict: predict all slots, then mask the least probable ones and predict them again.

    Return tokens and log-probabilities (b m). In round t of T the floor(m (T - t) / T) least probable tokens are masked.
    Ghazvininejad et al. 2019, arXiv:1904.09324.
    """
    tokens, sure = slot_argmax(model.answer(read, seats))
    for t in range(1, iterations):
        hidden = least_confident(sure, seats.valid, t, iterations)
        again, how = slot_argmax(model.answer(read, seats, tokens, ~hidden))
        tokens, sure = torch.where(hidden, again, tokens), torch.where(hidden, how, sure)
    return tokens, sure


@torch.no_grad()
def generate_nat(
    model: NatTranslator, source: Tensor, source_valid: Tensor | None = None, *, lengths: int = 1, iterations: int = 1
) -> list[list[int]]:
    """Return an answer for every row, without eos and blanks.

    Where slots are counted by a predicted length, the `lengths` likeliest are all tried, side by side, and the answer with the
    best log-probability / length is kept, that of its length included: a model that never saw a wrong length is overconfident
    there. With `iterations` > 1 each is refined. The host waits once, for the answers; and once more
    for a length, where one is predicted.
    """
    check_nat_options(model, lengths, iterations)
    return answer_tokens(nat_tokens(model, source, source_valid, lengths, iterations))


def check_nat_options(model: NatTranslator, lengths: int, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations!r}")
    if not isinstance(model.slots, LengthSlots) and (lengths != 1 or iterations != 1):
        name = model.slots.name
        raise ValueError(f"{name} has a fixed number of slots and one pass: lengths and iterations are for length and masked")


def nat_tokens(
    model: NatTranslator, source: Tensor, source_valid: Tensor | None, lengths: int = 1, iterations: int = 1, *, wait: bool = True
) -> Tensor:
    """Return token ids (b m) of all answers, NO_TOKEN where there is none.

    wait=False: the host never waits for a predicted length; there are slots for the longest possible one.
    """
    read = model.encode(source, source_valid)
    if isinstance(model.slots, LengthSlots):
        return _best_length(model, read, lengths, iterations, None if wait else model.slots.lengths.longest(read.x.shape[1]))
    seats = model.slot_inputs(read)
    tokens = model.answer(read, seats).argmax(-1)
    return ctc_collapse(tokens, seats.valid) if isinstance(model.slots, CtcSlots) else cut_at_eos(tokens)


def answer_tokens(tokens: Tensor) -> list[list[int]]:
    """Copy the answers of `nat_tokens` to the host."""
    nothing = (NO_TOKEN, BLANK, END)  # ctc learns no END, others no BLANK: one that is predicted all the same is dropped
    return [[token for token in row if token not in nothing] for row in tokens.tolist()]


def _best_length(model: NatTranslator, read: EncodedSource, k: int, iterations: int, most: int | None) -> Tensor:
    """Return answers (b m): of k lengths that with the best (log p(length) + log p(tokens)) / length; m is `most`, if given."""
    guessed, logs = model.guess(read, k)  # (b k)
    m, valid = slots_for(guessed.flatten(), most)
    if k > 1:
        read = read.select(torch.arange(guessed.numel(), device=guessed.device) // k)
    tokens, sure = mask_predict(model, read, model.slot_inputs(read, m, valid), iterations)
    tokens = cut_at_eos(tokens, valid)
    if k == 1:
        return tokens
    assert valid is not None
    mean = (sure.masked_fill(~valid, 0).sum(1).view_as(logs) + logs) / guessed
    best = mean.argmax(1)[:, None, None].expand(-1, 1, m)
    return tokens.view(*guessed.shape, m).gather(1, best).squeeze(1)
