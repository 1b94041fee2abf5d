"""Sequence-level training with a reward, such as BLEU: self-critical training and minimum risk training.

A reward is any function of answers and references, both lists of tokens without END, that returns a number for each pair.
Letters: b examples, x answers, m tokens of an answer, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from regard.data.batch import BEGIN, END, Batch, padded, shifted
from regard.decoding.constraints import Constraints
from regard.decoding.generate import Sample, before_eos, generate
from regard.mixers.base import select
from regard.models.translator import Translator
from regard.training.decoder_inputs import evaluating, sequence
from regard.training.losses import Loss, by_step

Texts = list[list[int]]
Reward = Callable[[Texts, Texts], Sequence[float]]


def self_critical(
    model: Translator, batch: Batch, reward: Reward, *, constraints: Constraints, dice: torch.Generator | None = None
) -> Loss:
    """REINFORCE with the reward of greedy decoding as baseline: -(r(sampled) - r(greedy)) log p(sampled), summed over examples.

    The expectation of its gradient is that of minus the expected reward. Rennie et al. 2016, arXiv:1612.00563. Answers are
    generated without dropout; their probability is computed in training mode, under the constraints.
    """
    truths = _truths(batch)
    with evaluating(model):
        state = model.start(batch.source, batch.source_valid)
        drawn = generate(model, state, _begin(batch), constraints=constraints, choice=_chance(dice))
        greedy = generate(model, state, _begin(batch), constraints=constraints)
    logs = log_probability(model, batch, drawn, constraints=constraints)
    got = _rewards(reward, drawn, truths, logs)
    base = _rewards(reward, greedy, truths, logs)
    total = -((got - base) * logs).sum()
    over = _reference_counts(truths, logs)
    return Loss(total, over, {"reward": got.sum(), "greedy": base.sum()})


def minimum_risk(
    model: Translator,
    batch: Batch,
    reward: Reward,
    *,
    constraints: Constraints,
    samples: int = 16,
    alpha: float = 0.005,
    truth: bool = True,
    dice: torch.Generator | None = None,
) -> Loss:
    """Compute minus the expected reward over a set S of answers, by Q(y) = p(y)^alpha / sum over y' in S of p(y')^alpha.

    S holds the distinct ones of `samples` sampled answers, and with `truth` the reference where the constraints allow it. Shen
    et al. 2015, arXiv:1512.02433. With alpha=1 and every possible answer in S it is the expected reward itself.
    """
    positive = 0 < alpha < math.inf
    if samples < 1 or not positive:
        raise ValueError(f"samples must be at least 1 and alpha above 0, not {samples!r} and {alpha!r}")
    truths = _truths(batch)
    with evaluating(model):
        state = model.start(batch.source, batch.source_valid).fan(samples)
        begin = _begin(batch, samples)
        drawn = generate(model, state, begin, constraints=constraints, choice=_chance(dice))
    sets = [_distinct(drawn[i * samples : (i + 1) * samples]) for i in range(len(truths))]
    if truth:
        longest = constraints.max_new_tokens
        pairs = zip(sets, truths, strict=True)
        sets = [_distinct([*few, true] if len(true) <= longest else few) for few, true in pairs]
    rows = [i for i, few in enumerate(sets) for _ in few]
    answers = [answer for few in sets for answer in few]
    logs = log_probability(model, batch, answers, constraints=constraints, rows=rows)
    references = [truths[i] for i in rows]
    got = _rewards(reward, answers, references, logs)
    columns = [j for few in sets for j in range(len(few))]
    at = torch.tensor([rows, columns], device=logs.device).unbind()
    widest = max(map(len, sets))
    table = logs.new_zeros(len(sets), widest)
    empty = table - torch.inf
    chosen = empty.index_put(at, alpha * logs).softmax(-1)
    rewards = table.index_put(at, got)
    total = -(chosen * rewards).sum()
    over = _reference_counts(truths, logs)
    return Loss(total, over, {"reward": -total.detach()})


def log_probability(
    model: Translator, batch: Batch, answers: Texts, *, constraints: Constraints, rows: Sequence[int] | None = None
) -> Tensor:
    """Compute log-probabilities (x) of answers without END in one pass, with gradients. `rows`: their examples, one each if None.

    Under the constraints: banned tokens have probability 0, and an answer of max_new_tokens was truncated, so it has no END.
    """
    ended = [[*answer, constraints.eos] if len(answer) < constraints.max_new_tokens else answer for answer in answers]
    target, valid = padded(ended)
    device = batch.source.device
    target = target.to(device)
    if valid is not None:
        valid = valid.to(device)
    memory = model.encode(batch.source, batch.source_valid)
    if rows is not None:
        index = torch.tensor(rows, device=device)
        memory = select(memory, index)
    y = model.hidden(memory, shifted(target), valid)
    scores = _allowed(model.head(y), target, constraints)
    terms = by_step(scores, target, valid)
    return -terms.sum(1)


def sentence_bleu(answers: Texts, truths: Texts) -> list[float]:
    """Compute BLEU of every answer by itself, from 0 to 1: precisions of n-grams up to 4, with add-one smoothing for n > 1.

    Lin & Och 2004. An answer without a matching token gets 0.
    """
    return [_bleu(answer, truth) for answer, truth in zip(answers, truths, strict=True)]


def _bleu(answer: list[int], truth: list[int], most: int = 4) -> float:
    left: dict[tuple[int, ...], int] = {}  # unmatched n-grams of the reference
    for n in range(1, most + 1):
        for run in _ngrams(truth, n):
            left[run] = left.get(run, 0) + 1
    length = len(answer)
    logs = 0.0
    for n in range(1, most + 1):
        right = 0
        for run in _ngrams(answer, n):
            if left.get(run):
                left[run] -= 1
                right += 1
        if n == 1 and not right:
            return 0.0
        smoothing = n > 1
        total = max(0, length - n + 1)
        precision = (right + smoothing) / (total + smoothing)
        logs += math.log(precision)
    brevity = min(0.0, 1 - len(truth) / length)
    return math.exp(logs / most + brevity)


def _ngrams(tokens: list[int], n: int) -> Iterator[tuple[int, ...]]:
    shifts = [tokens[i:] for i in range(n)]
    return zip(*shifts, strict=False)


def _allowed(scores: Tensor, target: Tensor, constraints: Constraints) -> Tensor:
    """Apply the constraints to scores (x m v) at every step of the target (x m)."""
    if constraints.min_new_tokens or constraints.no_repeat_ngram_size:
        begin = constraints.prompt(target.new_full((len(target), 1), BEGIN))
        steps = range(target.shape[1])
        allowed = [constraints(scores[:, i], target[:, :i], begin) for i in steps]
        return torch.stack(allowed, 1)
    if constraints.banned:
        nothing = target.new_zeros(target.numel(), 0)
        flat = constraints(scores.flatten(0, 1), nothing)
        return flat.view_as(scores)
    return scores


def _begin(batch: Batch, times: int = 1) -> Tensor:
    rows = times * len(batch.source)
    return sequence(batch).new_full((rows, 1), BEGIN)


def _chance(dice: torch.Generator | None) -> Sample:
    sample = Sample()
    sample.generator = dice
    return sample


def _distinct(answers: Texts) -> Texts:
    distinct = dict.fromkeys(map(tuple, answers))
    return [list(answer) for answer in distinct]


def _truths(batch: Batch) -> Texts:
    """Return the targets as lists, without END."""
    rows = sequence(batch).tolist()
    if batch.target_valid is not None:
        valid = batch.target_valid.tolist()
        rows = [list(compress(row, real)) for row, real in zip(rows, valid, strict=True)]
    return [before_eos(row, END) for row in rows]


def _rewards(reward: Reward, answers: Texts, truths: Texts, like: Tensor) -> Tensor:
    numbers = reward(answers, truths)
    found = torch.as_tensor(numbers, dtype=like.dtype, device=like.device)
    if found.shape != (len(answers),):
        raise ValueError(f"a reward gives a number for each of {len(answers)} answers, not shape {tuple(found.shape)}")
    return found


def _reference_counts(truths: Texts, like: Tensor) -> Tensor:
    return torch.tensor(len(truths), device=like.device)
