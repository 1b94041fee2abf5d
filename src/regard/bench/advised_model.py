"""The model of `regard advise`: one of regard by its sizes, or any torch module from a factory `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.bench.model_parts import ATTENTION, Part
from regard.bench.timing import Call
from regard.bench.whole_models import ENCODER_MODEL, ModelJob, ModelRequest, gradient_pass, mixed_precision, whole_model
from regard.mixers.base import Dims, Mixer
from regard.mixers.estimation import Estimator
from regard.spec import Spec

SEGMENT_ROWS = 4  # rows of a table that is none of tokens
HEAD_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")


@dataclass(frozen=True)
class AdviceRequest:
    """Hold what is analysed: a model, its lengths, and the mechanisms that might replace its own."""

    models: ModelRequest  # sizes, device, type, lengths, and the mechanisms that are compared
    base: Spec  # the model's own mechanism; unused with a factory
    kind: str = ENCODER_MODEL
    batch: int | None = None  # sequences; tokens / length unless given
    training: bool = True
    optimiser: bool = True
    checks: int = 2  # whole models that are measured to state the error of the prediction
    factory: str = ""  # package.module:name
    heads: int | None = None  # of a factory's model, where it has no attribute for them
    attention: tuple[str, ...] = ()  # classes of a factory's model

    def batch_at(self, n: int) -> int:
        return self.batch or max(1, self.models.tokens // n)

    @property
    def device(self) -> torch.device:
        return torch.device(self.models.device)

    def precision(self) -> AbstractContextManager[Any]:
        return mixed_precision(self.models)

    def to_json(self) -> dict[str, Any]:
        named = {name: value for name, value in vars(self).items() if name not in ("models", "base")}
        return {"model": self.models.to_json(), "base": str(self.base), **named}


class Runnable(NamedTuple):
    """Hold a model and its forward pass, up to the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]

    def step(self, training: bool, optimiser: bool) -> Call:
        """Return what is repeated: a training step, a forward and backward pass, or a forward pass."""
        if not training:
            return torch.no_grad()(self.loss)
        if not optimiser:
            return gradient_pass(self.model, self.loss)
        update = self.update()

        def step() -> None:
            self.loss().backward()
            update.step()
            update.zero_grad()

        return step

    def update(self) -> torch.optim.Optimizer:
        """Make an optimiser; it leaves the weights as they are."""
        weights = [p for p in self.model.parameters() if p.requires_grad]
        fused = any(p.is_cuda for p in weights)
        return torch.optim.AdamW(weights, lr=0.0, fused=fused, capturable=fused)


def own_model(request: AdviceRequest, spec: Spec, n: int, depth: int) -> Runnable:
    """Build a model of regard with a mechanism and a number of layers."""
    sizes = replace(request.models, depth=depth)
    model, loss = whole_model(sizes, ModelJob(spec, request.kind, False, n), request.batch_at(n))
    _quiet(model)
    model.train(request.training)
    return Runnable(model, loss)


class CannotCall(ValueError):
    """Report a model that does not take the inputs of a length."""


def factory_model(request: AdviceRequest, n: int) -> Runnable:
    """Call a factory: it returns a module, or a module and a function (batch, n) -> positional arguments of its call.

    Without that function the module is given random token ids that it has. The loss is the mean square of its first output.
    """
    torch.manual_seed(request.models.seed)
    made = _factory(request.factory)()
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{request.factory} returned {type(model).__name__}: return a torch.nn.Module, or (module, inputs)")
    model = model.to(request.device).train(request.training)
    given = _token_ids(model, request.batch_at(n), n) if inputs is None else inputs(request.batch_at(n), n)
    given = given if isinstance(given, tuple) else (given,)
    args = tuple(x.to(request.device) if isinstance(x, Tensor) else x for x in given)

    def loss() -> Tensor:
        try:
            with request.precision():
                out = model(*args)
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
                raise
            raise CannotCall(_refused_text(request.factory, args, error)) from error
        floats = [x for x in tree_leaves(_plain(out)) if isinstance(x, Tensor) and x.is_floating_point()]
        if not floats:
            raise ValueError(f"the model of {request.factory} returned no tensor of numbers, which a loss needs")
        return floats[0].float().square().mean()

    return Runnable(model, loss)


def _plain(out: Any) -> Any:
    """Turn an output with named fields, such as those of Hugging Face, into a tuple."""
    return out.to_tuple() if hasattr(out, "to_tuple") else out


def _token_ids(model: nn.Module, batch: int, n: int) -> tuple[Tensor]:
    """Draw ids that every table of the model has; those of a few segments are no tables of tokens."""
    sizes = [table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)]
    return (torch.randint(min([256, *(size for size in sizes if size > SEGMENT_ROWS)]), (batch, n)),)


def _refused_text(factory: str, args: tuple[Any, ...], error: Exception) -> str:
    given = ", ".join(f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)[:40] for x in args)
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"the model of {factory} cannot be called with {given} ({why}): return (module, function of batch and n) for others"


def _factory(text: str) -> Callable[[], Any]:
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"a model is named package.module:factory, not {text!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m does
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import {module!r} ({error}): run this where python finds it") from None
    if not callable(found):
        raise ValueError(f"{module} has no function {name!r} that makes a model")
    return found


def substitute(request: AdviceRequest, part: Part, spec: Spec, n: int) -> Mixer:
    """Build the layer that would replace an attention part of a factory's model: the same width and heads."""
    width = part.tokens.shape[-1]
    heads = _heads(request, part)
    dims = Dims(width, heads, causal=request.kind != ENCODER_MODEL, max_len=n)
    torch.manual_seed(request.models.seed)
    with request.device:
        mixer = spec.build(dims)
    _quiet(mixer)
    return mixer.to(_weights_dtype(part)).train(request.training)


def _weights_dtype(part: Part) -> torch.dtype:
    return next((p.dtype for p in part.module.parameters()), part.tokens.dtype)


def _heads(request: AdviceRequest, part: Part) -> int:
    if request.heads is not None:
        return request.heads
    for module in part.module.modules():
        for name in HEAD_NAMES:
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise ValueError(f"{part.name} ({type(part.module).__name__}) has no attribute for its number of heads: give --heads")


def _quiet(model: nn.Module) -> None:
    """Switch off the comparison with exact weights in first passes."""
    for part in model.modules():
        if isinstance(part, Estimator):
            part.warned = True


class Replacement(nn.Module):
    """Call a mixer in the place of another model's attention, with its first tokens and an answer of the same form."""

    def __init__(self, mixer: Mixer, part: Part) -> None:
        super().__init__()
        self.mixer = mixer
        self.others = part.answer  # outputs beside the tokens, which are None here
        self.batch_first = getattr(part.module, "batch_first", True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() == 3]
        x = given[0] if self.batch_first else given[0].transpose(0, 1)
        y = self.mixer(x)
        y = y if self.batch_first else y.transpose(0, 1)
        if self.others is None:
            return y
        return (y, *[None] * (self.others - 1))


def with_substitutes(request: AdviceRequest, made: Runnable, parts: list[Part], spec: Spec, n: int) -> Runnable:
    """Replace every attention of a factory's model by a mechanism, in place."""
    kinds = {type(part.module): part for part in parts if part.kind == ATTENTION}
    for module in list(made.model.modules()):
        for name, child in list(module.named_children()):
            part = kinds.get(type(child))
            if part is not None:
                module.add_module(name, Replacement(substitute(request, part, spec, n), part))
    return made
