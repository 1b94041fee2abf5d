"""The exponential moving average of the weights of a model (EMA): what is validated and kept in place of the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.training.checkpoints import weights_of

# names the weights that training goes on from, beside the tensors of the optimiser: "stack.0.weight/trained"
TRAINED_WEIGHT = "trained"


class MovingAverage:
    """Hold mean <- keep mean + (1 - keep) weights of a model, behind every update.

    `keep` is `decay`, and at update t at most t / (9 + t), so that the first weights are soon forgotten. Floating-point
    parameters and buffers are averaged (means of norms too); integers are those of the model. Polyak, Juditsky 1992; with such a
    start Tarvainen, Valpola 2017, arXiv:1703.01780.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._trained = {name: x for name, x in weights_of(model).items() if x.is_floating_point()}
        self._mean = {name: x.clone() for name, x in self._trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the mean towards the weights behind update `step`, counted from 1."""
        keep = min(self.decay, step / (9 + step))
        torch._foreach_lerp_(list(self._mean.values()), list(self._trained.values()), 1 - keep)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the mean into the model; its own weights are there again at the end."""
        own = {name: x.clone() for name, x in self._trained.items()}
        self._put(self._mean)
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> dict[str, Tensor]:
        """Return the mean by name: of the names of `weights_of(model)` those that have one."""
        return dict(self._mean)

    def trained_state(self) -> dict[str, Tensor]:
        """Return the weights of the model itself, named for the file of an optimiser."""
        return {f"{name}/{TRAINED_WEIGHT}": x for name, x in self._trained.items()}

    def put_state(self, mean: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Go on from what `state` and `trained_state` returned."""
        for name, x in self._mean.items():
            x.copy_(mean[name])
        self._put({name: optimizer[f"{name}/{TRAINED_WEIGHT}"] for name in self._trained})

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, x in self._trained.items():
            x.copy_(weights[name])
