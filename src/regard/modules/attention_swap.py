"""Exchange the attention of any torch model: every nn.MultiheadAttention in it gets another mechanism and keeps its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from regard.checks import check_flag, shown
from regard.mixers.base import Dims
from regard.modules.attention_forms import AttentionForms
from regard.modules.multihead_attention import MultiheadAttention, check_extra_keys
from regard.spec import Named, Spec

Chosen = Callable[[str, nn.Module], bool] | str | Sequence[str] | None


def replace_attention(
    model: nn.Module,
    mixer: Named,
    *,
    only: Chosen = None,
    causal: bool | None = None,
    max_len: int | None = None,
    dropout: float | None = None,
    backend: str = "auto",
    weights: bool = True,
) -> list[str]:
    """Make a `regard.MultiheadAttention` of every nn.MultiheadAttention in a model, in place, and return their names.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    >>> regard.replace_attention(model, "Local(16) | Global(first=1)", only="layers.*")
    ['layers.0.self_attn', 'layers.1.self_attn']

    Modules, parameters, hooks and names stay the same, so that optimizers and checkpoints stay valid; only the computation
    changes, in training and in evaluation: the fast path of torch's encoders, which does not call its attention, is off.
    `mixer` is a Spec, its text, a pattern or a class. `only` chooses: patterns of names such as "decoder.*.self_attn", or a
    function of name and module. `causal`, `max_len`, `backend` and `weights` are those of `MultiheadAttention`; `dropout` is
    that of every module unless given: mechanisms without weights need dropout=0. All modules are replaced, or none: what
    cannot be is refused with its name and the reason. Cross attention of torch's decoder layers (`multihead_attn`) stays softmax
    unless `only` chooses it: queries and keys are of two sequences there, in which equal places are not near each other.
    A model that was compiled before is traced again by its next call.
    """
    spec = Spec.of(mixer)
    check_flag("weights", weights)
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    if not found:
        raise ValueError(f"{type(model).__name__} holds no nn.MultiheadAttention: attention of another class is not replaced")
    across = _cross_attention(model) if only is None else set()
    chosen = {name: module for name, module in found.items() if module not in across and _is_chosen(name, module, only)}
    if not chosen:
        raise ValueError(f"only={shown(only)} chooses none of the attention modules of this model: {shown(list(found))}")
    planned = {}
    for name, module in chosen.items():
        try:
            planned[name] = _planned(module, spec, causal, max_len, dropout, backend)
        except ValueError as error:
            raise ValueError(f"nothing was replaced, because {name or 'the model itself'} cannot be: {error}") from error
    for name, module in chosen.items():
        if dropout is not None:
            module.dropout = dropout
        module.__class__ = MultiheadAttention
        module.take(planned[name], weights)  # type: ignore[operator]
    _keep_padded(model)
    return list(chosen)


def _cross_attention(model: nn.Module) -> set[nn.Module]:
    """Return the modules by which torch's decoder layers read another sequence."""
    return {module.multihead_attn for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer)}


def _is_chosen(name: str, module: nn.Module, only: Chosen) -> bool:
    if only is None:
        return True
    if callable(only):
        return bool(only(name, module))
    patterns = [only] if isinstance(only, str) else only
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _planned(
    module: nn.MultiheadAttention, spec: Spec, causal: bool | None, max_len: int | None, dropout: float | None, backend: str
) -> AttentionForms:
    """Build the mechanism of a module; refuse modules whose own code would be lost."""
    kind = type(module)
    if kind not in (nn.MultiheadAttention, MultiheadAttention):
        raise ValueError(f"{kind.__name__} is a class of its own, whose code would be lost")
    dropped = module.dropout if dropout is None else dropout
    dims = Dims(module.embed_dim, module.num_heads, max_len=max_len, dropout=dropped, backend=backend)
    forms = AttentionForms.of(spec, dims, causal)
    check_extra_keys(module, forms)
    return forms


def _keep_padded(model: nn.Module) -> None:
    """Keep torch's encoders from nested tensors, which only their fast path computes, where attention was replaced."""
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if any(isinstance(part, MultiheadAttention) for part in encoder.modules()):
            encoder.use_nested_tensor = False
