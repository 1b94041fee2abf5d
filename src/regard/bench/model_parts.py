"""Parts of a model, ours or any other: attention, feed-forward, embedding and head, each timed alone on its own inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves, tree_map

from regard.bench.timing import Call
from regard.blocks.feedforward import FeedForward
from regard.mixers.base import Mixer
from regard.models.embedding import Embedding
from regard.models.heads import NextToken

ATTENTION, PROJECTIONS, FEEDFORWARD, EMBEDDING, HEAD = "attention", "projections", "feed-forward", "embedding", "head"
REST, OPTIMISER = "rest", "optimiser"
PART_KINDS = (ATTENTION, PROJECTIONS, FEEDFORWARD, EMBEDDING, HEAD, REST, OPTIMISER)  # in the order of tables and figures
IN_EVERY_LAYER = (ATTENTION, FEEDFORWARD)
CLASSES: tuple[tuple[type[nn.Module], str], ...] = (
    (Mixer, ATTENTION),
    (nn.MultiheadAttention, ATTENTION),
    (FeedForward, FEEDFORWARD),
    (Embedding, EMBEDDING),
    (nn.Embedding, EMBEDDING),
    (NextToken, HEAD),
)
NAMES = (  # of classes, or of modules inside their parent: the first that matches
    (re.compile(r"attention|attn|mixer|mamba|ssm", re.I), ATTENTION),
    (re.compile(r"feed_?forward|ffn|mlp|intermediate|^(linear|fc)[12]$|^output$", re.I), FEEDFORWARD),
    (re.compile(r"embed|^w[tp]e$", re.I), EMBEDDING),
    (re.compile(r"lm_?head|classifier|^head$|^cls$", re.I), HEAD),
)
Precision = Callable[[], AbstractContextManager[Any]]


@dataclass
class Part:
    """Hold one kind of module with the inputs of its first call, and how many modules like it the model has."""

    kind: str
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int = 1
    answer: Any = None  # the kind of its output: a tensor, or a tuple with the tensor first

    @property
    def tokens(self) -> Tensor:
        """Return the tokens (b n w) that the part was given."""
        given = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        found = [x for x in given if x.dim() == 3 and x.is_floating_point()]
        if not found:
            raise ValueError(f"{self.name} was given no tokens (batch, n, width): another mechanism cannot stand in for it")
        return found[0].transpose(0, 1) if getattr(self.module, "batch_first", True) is False else found[0]


@dataclass
class _Recorder:
    kinds: dict[nn.Module, tuple[str, str]]  # kind and name
    parts: dict[Any, Part] = field(default_factory=dict)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind, name = self.kinds[module]
        shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        weights = [tuple(p.shape) for p in module.parameters()]
        key = (kind, type(module), str(shapes), str(weights))
        if key in self.parts:
            self.parts[key].count += 1
            return
        made: dict[int, Tensor] = {}  # one tensor given as query, key and value stays one
        given = tree_map(lambda x: _leaf(x, made), (args, kwargs))
        self.parts[key] = Part(kind, name, module, *given)

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:  # noqa: ARG002 - a hook takes them
        for part in self.parts.values():
            if part.module is module:
                part.answer = None if isinstance(out, Tensor) else len(out)


def _leaf(x: Any, made: dict[int, Tensor]) -> Any:
    """Detach a tensor of the pass; gradients are taken where they were. A KV cache, which would grow, is dropped."""
    if hasattr(x, "get_seq_length"):
        return None
    if not isinstance(x, Tensor):
        return x
    if id(x) not in made:
        made[id(x)] = x.detach().requires_grad_(x.requires_grad)
    return made[id(x)]


def kinds_of(model: nn.Module, attention: tuple[str, ...] = ()) -> dict[nn.Module, tuple[str, str]]:
    """Map the outermost modules of every kind to (kind, name); `attention` names classes of attention."""
    found: dict[nn.Module, tuple[str, str]] = {}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            own = f"{path}.{name}" if path else name
            kind = _kind(child, name, attention)
            if kind is None:
                visit(child, own)
            elif child not in found:
                found[child] = (kind, own)

    visit(model, "")
    return found


def _kind(module: nn.Module, name: str, attention: tuple[str, ...]) -> str | None:
    if type(module).__name__ in attention:
        return ATTENTION
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential | nn.Dropout | nn.LayerNorm):
        return None
    for own, kind in CLASSES:
        if isinstance(module, own):
            return kind
    if attention and _holds(module, attention):
        return None
    matches = (kind for pattern, kind in NAMES if pattern.search(name) or pattern.search(type(module).__name__))
    found = next(matches, None)
    if found is None or _is_container(module):
        return None
    return found


def _holds(module: nn.Module, classes: tuple[str, ...]) -> bool:
    return any(type(part).__name__ in classes for part in module.modules())


def _is_container(module: nn.Module) -> bool:
    """Return whether a module has attention and a feed-forward layer inside, such as a layer called AttentionBlock."""
    inside = {kind for part in module.modules() for own, kind in CLASSES if isinstance(part, own)}
    names = [name for part in module.modules() for name, _ in part.named_children()]
    for pattern, kind in NAMES[:2]:
        if any(pattern.search(name) for name in names):
            inside.add(kind)
    return {ATTENTION, FEEDFORWARD} <= inside


def recorded_parts(model: nn.Module, forward: Call, attention: tuple[str, ...] = ()) -> list[Part]:
    """Run a forward pass and record the inputs of every part."""
    recorder = _Recorder(kinds_of(model, attention))
    hooks: list[Any] = []
    for module in recorder.kinds:
        hooks.append(module.register_forward_pre_hook(recorder.before, with_kwargs=True))
        hooks.append(module.register_forward_hook(recorder.after))
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    parts = list(recorder.parts.values())
    if not any(part.kind == ATTENTION for part in parts):
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no attention was found in the model: name its class with --attention, one of {', '.join(classes)}")
    return parts


def part_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: Precision, training: bool) -> Call:
    """Return a call of a module alone: forward, and in training the gradients of its inputs and weights."""
    return _pass_of(lambda: module(*args, **kwargs), (args, kwargs, list(module.parameters())), precision, training)


def projection_call(part: Part, precision: Precision, training: bool) -> Call | None:
    """Return a call of the products of tokens and weights inside attention, which no other mechanism saves; None without any."""
    x = part.tokens
    width = x.shape[-1]
    maps = [one.weight for one in part.module.modules() if isinstance(one, nn.Linear)]
    joined = getattr(part.module, "in_proj_weight", None)
    maps += [] if joined is None else [joined]
    fitting = [weight for weight in maps if weight.shape[1] == width]
    if not fitting:
        return None
    return _pass_of(
        lambda: [linear(x, weight.to(_kind_of(x, precision))) for weight in fitting], (x, fitting), precision, training
    )


def _kind_of(x: Tensor, precision: Precision) -> torch.dtype:
    with precision():
        autocast = torch.is_autocast_enabled(x.device.type)
    return torch.float32 if autocast else x.dtype


def _pass_of(run: Callable[[], Any], inputs: Any, precision: Precision, training: bool) -> Call:
    wanted = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    gradients: list[Tensor] = []

    def call() -> None:
        with torch.set_grad_enabled(training), precision():
            out = run()
        if not training:
            return
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        if len(gradients) != len(outs):
            gradients[:] = [torch.randn_like(x) for x in outs]
        if outs and wanted:
            torch.autograd.grad(outs, wanted, gradients, allow_unused=True)

    return call


@contextmanager
def _saved_storages() -> Iterator[dict[int, int]]:
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def saved_bytes(forward: Callable[[], Any], model: nn.Module) -> int:
    """Count the bytes that a forward pass keeps for its backward pass, without weights; what two operations share counts once."""
    with torch.enable_grad(), _saved_storages() as found:
        out = forward()  # its graph keeps every tensor alive, so that no address is used twice
    for weight in model.parameters():
        found.pop(weight.untyped_storage().data_ptr(), None)
    del out
    return sum(found.values())
