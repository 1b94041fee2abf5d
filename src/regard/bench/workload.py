"""What is measured: a mechanism on fixed inputs, as an operation on q, k, v or as a whole layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.mixers.attend import attend
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Core, Dims, Mixer
from regard.mixers.estimation import Estimator
from regard.spec import Spec

OPERATION, LAYER = "core", "layer"
LEVELS = (OPERATION, LAYER)
TYPES_BY_NAME = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Setting:
    """Hold the shape and the machine of one measurement."""

    n: int
    batch: int
    heads: int = 8
    dim: int = 64
    causal: bool = False
    device: str = "cpu"
    dtype: str = "fp32"
    backend: str = "auto"
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TYPES_BY_NAME[self.dtype]

    def dims(self) -> Dims:
        return Dims(self.width, self.heads, causal=self.causal, max_len=self.n, backend=self.backend)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Workload:
    """A function of tensors whose gradient is taken: inputs first, then the weights of its layer."""

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    up: Tensor | None = None  # the gradient of the output, made at the first backward pass

    def __post_init__(self) -> None:
        self.plain = tuple(x.detach() for x in self.inputs)

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.run(*self.plain)

    def both(self) -> tuple[Tensor | None, ...]:
        """Forward and backward pass; gradients of inputs and weights are returned and stored nowhere."""
        out = self.run(*self.inputs)
        if self.up is None or self.up.shape != out.shape:
            self.up = torch.randn_like(out)
        wanted = (*self.inputs, *self.weights)
        return torch.autograd.grad(out, wanted, self.up, allow_unused=True)


def spec_text(spec: Spec) -> str:
    """The text of a spec; that of a pattern without the name of its core."""
    if spec.name == "sparse" and len(spec.items) == 1:
        return str(spec.options["pattern"])
    return str(spec)


def build_mixer(spec: Spec, setting: Setting) -> Mixer:
    """Build the layer of a spec on its device, from the seed of the setting. Biases are 0: some peers have none."""
    torch.manual_seed(setting.seed)
    with setting.torch_device:
        mixer = spec.build(setting.dims())
    for part in mixer.modules():
        if isinstance(part, Estimator):
            part.warned = True  # no comparison with exact weights in its first passes
    if isinstance(mixer, Attention):
        for part in mixer.children():
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
    return mixer.to(setting.torch_dtype)


def operation_inputs(core: Core, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (b h n d), k (b h n d + gates), v (b h n e) in contiguous memory; keys are the queries where a core needs that."""
    torch.manual_seed(setting.seed)
    dims = core.dims
    sizes = (dims.d * core.streams, *core.sizes)
    shape = (setting.batch, setting.heads, setting.n)
    q, k, v = (torch.randn(*shape, size, device=setting.torch_device).to(setting.torch_dtype) for size in sizes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return q, q if core.shared_qk else k, v


def layer_input(setting: Setting) -> Tensor:
    """Random tokens (b n w)."""
    torch.manual_seed(setting.seed)
    x = torch.randn(setting.batch, setting.n, setting.width, device=setting.torch_device)
    return x.to(setting.torch_dtype).requires_grad_()


def own_workload(mixer: Mixer, setting: Setting, level: str, x: tuple[Tensor, ...]) -> Workload:
    """The workload of a mechanism of the catalogue; x holds q, k, v or the tokens."""
    if level == LAYER:
        return Workload(mixer, x, _trained(mixer))
    core = own_core(mixer)

    def operation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, core, causal=setting.causal)

    return Workload(operation, x, _trained(core))


def own_core(mixer: Mixer) -> Core:
    """The core of a layer; refuses a layer without one."""
    if not isinstance(mixer, Attention):
        raise ValueError(f"{mixer.name} is a whole layer without a core: measure it with --level layer")
    return mixer.core


def has_core(spec: Spec, setting: Setting) -> bool:
    """Return whether a mechanism can be measured without projections."""
    with torch.device("meta"):
        return isinstance(spec.build(setting.dims()), Attention)


def claims_of(spec: Spec, setting: Setting) -> Can:
    """The claims of a mechanism, or none where it cannot be built like this."""
    try:
        with torch.device("meta"):
            return spec.build(setting.dims()).can
    except ValueError:
        return Can.NOTHING


def module_workload(module: nn.Module, x: tuple[Tensor, ...]) -> Workload:
    """The workload of any module that maps tensors to one tensor."""
    return Workload(module, x, _trained(module))


def _trained(module: nn.Module) -> tuple[Tensor, ...]:
    return tuple(p for p in module.parameters() if p.requires_grad)


@contextmanager
def training_mode(module: nn.Module | None, mode: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode, and back."""
    if module is None:
        yield
        return
    before = module.training
    module.train(mode)
    try:
        yield
    finally:
        module.train(before)
