"""Beam search: several answers of every row, the likeliest of them kept at every step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.decoding.constraints import Constraints
from regard.decoding.generate import DecodingState, EndDetector, GenerativeModel, before_eos, prefill
from regard.mixers.feature_math import upcast
from regard.ops.topk import topk_by_part


class Beams(NamedTuple):
    """Hold the best answers of every row, the best first.

    `tokens` (b best n) are the answers, `scores` (b best) those that they are sorted by, `lengths` (b best) count their tokens.

    >>> import torch
    >>> from regard.decoding import Beams
    >>> found = Beams(torch.tensor([[[5, 6, 0]]]), torch.tensor([[-1.5]]), torch.tensor([[2]]))
    >>> found.tokens[0, 0, : found.lengths[0, 0]].tolist()
    [5, 6]
    """

    tokens: Tensor  # (b best max_new_tokens), eos behind the last token of each
    scores: Tensor  # (b best) log-probability / length ** penalty; -inf where there is no such answer
    lengths: Tensor  # (b best) eos counted

    def answers(self, eos: int) -> list[list[list[int]]]:
        """Return the tokens of all answers before eos, without places of `best` that no answer has taken."""
        rows = []
        for tokens, scores in zip(self.tokens.tolist(), self.scores.tolist(), strict=True):
            rows.append([before_eos(t, eos) for t, s in zip(tokens, scores, strict=True) if s > -torch.inf])
        return rows


class _Search(NamedTuple):
    """Hold b rows with k beams each, and the k best answers that have ended so far."""

    tokens: Tensor  # (b k t)
    scores: Tensor  # (b k)
    ended: Beams

    def full(self) -> Tensor:
        """Return (b) the rows of which as many answers have ended as there are beams."""
        return self.ended.scores[:, -1] > -torch.inf

    def grown(self, logs: Tensor, constraints: Constraints, penalty: float, early: bool) -> tuple[_Search, Tensor]:
        """Add one token by its log-probability (b k v); return also the parent beam of each new one (b k)."""
        (b, k, t), v = self.tokens.shape, logs.shape[-1]
        own = min(2 * k, v)  # no beam has more of the 2k best; at most k of those can end, so k go on
        value, token = topk_by_part(logs.flatten(0, 1), own)
        best = (self.scores[..., None] + value.view(b, k, own)).flatten(1).topk(min(2 * k, k * v), dim=1)
        beam, token = best.indices // own, token.view(b, -1).gather(1, best.indices)
        tokens = torch.cat([self.tokens.gather(1, beam[..., None].expand(-1, -1, t)), token[..., None]], -1)
        ends = token == constraints.eos
        among = ends & (torch.arange(tokens.shape[1], device=tokens.device) < k)  # only what would have gone on can end
        among = among & ~self.full()[:, None] if early else among
        ended = _joined(self.ended, tokens, best.values.masked_fill(~among, -torch.inf) / (t + 1) ** penalty, t + 1)
        alive = best.values.masked_fill(ends, -torch.inf).topk(min(k, tokens.shape[1]), dim=1)
        at = alive.indices
        tokens, beam = tokens.gather(1, at[..., None].expand(-1, -1, t + 1)), beam.gather(1, at)
        return _Search(tokens, alive.values, ended), beam

    def over(self, constraints: Constraints, penalty: float, best: int, early: bool) -> Tensor:
        """Return (b) the rows whose best answers no beam can beat: its bound is that of the next or of the longest length."""
        t = self.tokens.shape[2]
        top = self.scores.amax(1)
        bound = torch.maximum(top / (t + 1) ** penalty, top / constraints.max_new_tokens**penalty)
        sure = self.ended.scores[:, best - 1] >= bound
        return sure | self.full() if early else sure


def _joined(ended: Beams, tokens: Tensor, scores: Tensor, length: int) -> Beams:
    """Merge the best answers that have ended with those that end now."""
    k, most = ended.tokens.shape[1:]
    tokens = torch.cat([tokens, tokens[..., -1:].expand(-1, -1, most - tokens.shape[2])], 2)
    best = torch.cat([ended.scores, scores], 1).topk(k, dim=1)
    tokens = torch.cat([ended.tokens, tokens], 1).gather(1, best.indices[..., None].expand(-1, -1, most))
    lengths = torch.cat([ended.lengths, torch.full_like(scores, length, dtype=torch.long)], 1).gather(1, best.indices)
    return Beams(tokens, best.values, lengths)


@torch.no_grad()
def beam(
    model: GenerativeModel,
    state: DecodingState,
    prompt: Tensor,
    *,
    constraints: Constraints,
    width: int = 5,
    penalty: float = 1.0,
    best: int = 1,
    early: bool = False,
    valid: Tensor | None = None,
) -> Beams:
    """Search the `best` likeliest answers with `width` beams, by log-probability / length ** penalty; 0 favours short ones.

    The search stops only where no beam can still beat the answers found, so stopping changes nothing; where length is rewarded
    that may be late, as a long answer could still become the best. With early=True a row is over as soon as `width` answers
    of it have ended, independently of other rows: a few times as fast, and nearly always the same answer.

    `model`, `state`, `prompt`, `constraints` and `valid` are those of `generate`.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> from regard.decoding import Constraints, beam
    >>> limits = Constraints(eos=0, max_new_tokens=4)
    >>> found = beam(model, model.start(2), torch.randint(1, 20, (2, 3)), constraints=limits, width=3, best=2)
    >>> tuple(found.scores.shape)
    (2, 2)
    """
    constraints.checked()
    if width < 1 or not 1 <= best <= width:
        raise ValueError(f"best answers come out of the beams: 1 <= best <= width is needed, not best={best}, width={width}")
    scores, state = prefill(model, state, prompt, valid)
    (b, v), device = scores.shape, prompt.device
    state, logs = state.fan(width), upcast(scores).log_softmax(-1).repeat_interleave(width, 0)
    first = logs.new_full((b, width), -torch.inf)
    nothing = Beams(
        torch.full((b, width, constraints.max_new_tokens), constraints.eos, device=device),
        first.clone(),
        torch.zeros(b, width, dtype=torch.long, device=device),
    )
    first[:, 0] = 0  # all beams begin alike: one of them counts
    search, ended = _Search(prompt.new_zeros(b, width, 0), first, nothing), EndDetector.of(device)
    groups = torch.arange(b, device=device)[:, None] * width
    counted = constraints.prompt(prompt, valid)
    counted = None if counted is None else counted.repeat_interleave(width, 0)
    for step in range(constraints.max_new_tokens):
        allowed = constraints(logs, search.tokens.flatten(0, 1), counted).view(b, width, v)
        search, parents = search.grown(allowed, constraints, penalty, early)
        if step + 1 == constraints.max_new_tokens or ended(search.over(constraints, penalty, best, early)):
            break
        state = state.select((groups + parents).flatten(), within=True)
        scores, state = model.extend(state, search.tokens[:, :, -1].reshape(-1, 1))
        logs = upcast(scores[:, -1]).log_softmax(-1)
    found = search.ended
    if search.tokens.shape[2] == constraints.max_new_tokens:  # what has not ended by now is cut off
        left = search.scores.masked_fill(search.full()[:, None], -torch.inf) if early else search.scores
        found = _joined(found, search.tokens, left / constraints.max_new_tokens**penalty, constraints.max_new_tokens)
    return Beams(found.tokens[:, :best], found.scores[:, :best], found.lengths[:, :best])
