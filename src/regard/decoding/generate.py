"""Generation token by token: greedy or sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.decoding.constraints import Constraints
from regard.mixers.base import check_valid
from regard.models.causal_lm import last_real
from regard.ops.topk import argmax_first
from regard.runtime.screened_argmax import ScreenedScores

END_DELAY = 4  # steps between a GPU's test whether all rows have ended and the host's use of it


class GenerativeModel(Protocol):
    """What decoding needs of a model.

    A protocol: any object with `extend` is one, whatever its constructor takes (`args`, `kwargs`). Language models and
    translators of this package are.

    >>> from regard.decoding import GenerativeModel
    >>> [name for name in vars(GenerativeModel) if not name.startswith("_")]
    ['extend']
    """

    def extend(self, state: Any, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return scores (b n v) of what follows each of these tokens (b n), and the state after them."""
        ...


class DecodingState(Protocol):
    """What decoding needs of a state."""

    def fan(self, k: int) -> DecodingState:
        """Repeat every row k times, side by side."""
        ...

    def select(self, rows: Tensor, within: bool = False) -> DecodingState:
        """Reorder rows; `within`: only among those that the same row was fanned into."""
        ...


@runtime_checkable
class LastTokenModel(Protocol):
    """A model that scores a prompt at its last token alone."""

    def last(self, state: Any, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return scores (b v) of what follows the last real token of every row, and the state after it."""
        ...


@runtime_checkable
class ScreeningModel(Protocol):
    """A model that finds the likeliest token without exact scores of all."""

    def sketch(self, state: Any, tokens: Tensor) -> tuple[Tensor | ScreenedScores, Any]:
        """Return screened scores of what follows these tokens (b 1), or the scores (b v) themselves."""
        ...


class TokenChoice(Protocol):
    def __call__(self, scores: Tensor) -> Tensor:
        """Choose a token for every row of scores (b v); -inf is never chosen."""
        ...


class Greedy:
    """Choose the likeliest token.

    It has no parameters.

    >>> import torch
    >>> from regard.decoding import Greedy
    >>> Greedy()(torch.tensor([[0.1, 2.0, 0.3]]))
    tensor([1])
    """

    def __call__(self, scores: Tensor) -> Tensor:
        return argmax_first(scores)


@dataclass
class Sample:
    """Draw among the top_k likeliest, the fewest that together have top_p, and those with at least min_p of the likeliest.

    A temperature below 1 sharpens, above 1 flattens; filters come after it, in this order. The same seed draws the same tokens.

    >>> import torch
    >>> from regard.decoding import Sample
    >>> draw = Sample(temperature=0.7, top_k=2, seed=0)
    >>> int(draw(torch.tensor([[0.1, 2.0, 3.0]]))) in (1, 2)
    True
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature!r}: Greedy() is what 0 would be")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k!r}")
        for name in ("top_p", "min_p"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {share!r}")
        self.generator: torch.Generator | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        if self.seed is not None and self.generator is None:
            self.generator = torch.Generator(scores.device).manual_seed(self.seed)
        return torch.multinomial(self.filtered(scores).softmax(-1), 1, generator=self.generator).squeeze(-1)

    def filtered(self, scores: Tensor) -> Tensor:
        """Return scores (b v) with -inf for filtered tokens."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p is not None:
            order = scores.sort(-1, descending=True)
            share = order.values.softmax(-1)
            out = share.cumsum(-1) - share >= self.top_p  # those before it have enough: the likeliest always stays
            scores = scores.masked_fill(torch.zeros_like(out).scatter(1, order.indices, out), -torch.inf)
        if self.min_p is not None:
            share = scores.softmax(-1)
            scores = scores.masked_fill(share < self.min_p * share.amax(-1, keepdim=True), -torch.inf)
        return scores


class EndDetector:
    """Test whether all rows have ended, with the result of `delay` steps ago, so that the host does not wait for a GPU.

    Further steps change nothing: rows that have ended repeat eos.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    @staticmethod
    def of(device: torch.device) -> EndDetector:
        return EndDetector(END_DELAY if device.type == "cuda" else 0)

    def __call__(self, over: Tensor) -> bool:
        flag, event = over.all(), None
        if flag.is_cuda:
            answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag, event = answer.copy_(flag, non_blocking=True), torch.cuda.Event()
            event.record()
        self.pending.append((flag, event))
        if len(self.pending) <= self.delay:
            return False
        flag, event = self.pending.popleft()
        if event is not None:
            event.synchronize()
        return bool(flag)


def prefill(model: GenerativeModel, state: Any, prompt: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
    """Return scores (b v) of what follows the prompt (b n), and the state after it. Rows may be padded anywhere."""
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"a prompt has shape (batch, tokens) with at least one token, not {tuple(prompt.shape)}")
    check_valid(valid, len(prompt), prompt.shape[1], "the prompt")
    if valid is not None and not bool(valid.any(1).all()):
        raise ValueError("every row of a prompt needs at least one real token")
    if isinstance(model, LastTokenModel):
        return model.last(state, prompt, valid)
    scores, state = model.extend(state, prompt, valid)
    return last_real(scores, valid), state


def before_eos(tokens: list[int], eos: int) -> list[int]:
    """Return the tokens before the first eos."""
    return tokens[: tokens.index(eos)] if eos in tokens else tokens


@torch.no_grad()
def _generated(
    model: GenerativeModel,
    state: Any,
    prompt: Tensor,
    constraints: Constraints,
    choice: TokenChoice | None,
    valid: Tensor | None,
    ended: EndDetector,
) -> Iterator[Tensor]:
    constraints, choose = constraints.checked(), choice or Greedy()
    scores: Tensor | ScreenedScores
    scores, state = prefill(model, state, prompt, valid)
    tokens = torch.empty(len(prompt), constraints.max_new_tokens, dtype=prompt.dtype, device=prompt.device)
    over = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    step, counted = 0, constraints.prompt(prompt, valid)

    def allowed(x: Tensor) -> Tensor:
        return constraints(x, tokens[:, :step], counted)

    for step in range(constraints.max_new_tokens):
        token = scores.likeliest(allowed) if isinstance(scores, ScreenedScores) else choose(allowed(scores))
        token = token.masked_fill(over, constraints.eos)
        yield token
        if step + 1 == constraints.max_new_tokens:
            return
        tokens[:, step], over = token, over | (token == constraints.eos)
        if ended(over):
            return
        if type(choose) is Greedy and isinstance(model, ScreeningModel):
            scores, state = model.sketch(state, token[:, None])
        else:
            every, state = model.extend(state, token[:, None])
            scores = every[:, -1]


def generate_stream(
    model: GenerativeModel,
    state: Any,
    prompt: Tensor,
    *,
    constraints: Constraints,
    choice: TokenChoice | None = None,
    valid: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row (b), as long as any row goes on; a row that has ended repeats eos.

    `model` has `extend`, `state` is what its `start` gave, `prompt` (b n) are the tokens to go on from, of which `valid` (b n)
    are real. `constraints` say where answers end, `choice` is how a token is chosen: `Greedy()` unless given, or `Sample(...)`.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> from regard.decoding import Constraints, generate_stream
    >>> limits = Constraints(eos=0, max_new_tokens=3, min_new_tokens=2)
    >>> for tokens in generate_stream(model, model.start(2), torch.randint(1, 20, (2, 3)), constraints=limits):
    ...     assert tokens.shape == (2,)
    """
    return _generated(model, state, prompt, constraints, choice, valid, EndDetector(0))


def generate(
    model: GenerativeModel,
    state: Any,
    prompt: Tensor,
    *,
    constraints: Constraints,
    choice: TokenChoice | None = None,
    valid: Tensor | None = None,
) -> list[list[int]]:
    """Return the answer of every row, without eos: the tokens of `generate_stream`.

    `model` has `extend`, `state` is what its `start` gave, `prompt` (b n) are the tokens to go on from, of which `valid` (b n)
    are real. `constraints` say where answers end, `choice` is how a token is chosen: `Greedy()` unless given, or `Sample(...)`.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> from regard.decoding import Constraints, Sample, generate
    >>> limits = Constraints(eos=0, max_new_tokens=5, min_new_tokens=4)
    >>> answers = generate(model, model.start(2), torch.randint(1, 20, (2, 3)), constraints=limits, choice=Sample(seed=1))
    >>> [len(answer) in (4, 5) for answer in answers]
    [True, True]
    """
    tokens = torch.stack(list(_generated(model, state, prompt, constraints, choice, valid, EndDetector.of(prompt.device))), 1)
    return [before_eos(row, constraints.eos) for row in tokens.tolist()]
