"""Adversarial training: a generator and a discriminator with an optimiser each, the hinge loss, and two learning rates.

It is no `Task`: a task has one loss and one optimiser, and two networks that take turns have two of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.gan import ImageCritic, ImageGenerator


@dataclass(frozen=True)
class AdversarialRates:
    """Learning rates, batch and average. Heusel et al. 2017, arXiv:1706.08500, for the two rates."""

    generator: float = 1e-4
    critic: float = 4e-4
    betas: tuple[float, float] = (0.0, 0.9)
    batch: int = 64
    keep: float = 0.999  # of the averaged weights of the generator at each update, and less at first


def critic_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Compute the hinge loss of scores (b) of real and generated images: mean(relu(1 - real)) + mean(relu(1 + fake))."""
    return (1 - real).relu().mean() + (1 + fake).relu().mean()


def generator_loss(fake: Tensor) -> Tensor:
    """Compute what a generator lowers: minus the mean score (b) of its images."""
    return -fake.mean()


class Adversaries:
    """Two networks that learn from each other; `averaged` is the generator whose samples are scored.

    Random numbers are those of the device, and `state` holds them: what goes on from a state is what would have been.
    """

    def __init__(self, generator: ImageGenerator, critic: ImageCritic, rates: AdversarialRates, device: str = "cpu") -> None:
        self.generator, self.critic, self.rates, self.device = generator.to(device), critic.to(device), rates, device
        self.averaged: ImageGenerator = copy.deepcopy(self.generator).eval().requires_grad_(False)
        fused = (
            {"betas": rates.betas, "fused": True, "capturable": device == "cuda"} if device == "cuda" else {"betas": rates.betas}
        )
        self.optimizers = [
            torch.optim.Adam(net.parameters(), lr=lr, **fused)
            for net, lr in ((self.generator, rates.generator), (self.critic, rates.critic))
        ]
        self.step = 0
        self._pairs = list(zip(_kept(self.averaged), _kept(self.generator), strict=True))

    def update(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Update the critic on real images (b c h w) from -1 to 1, then the generator; returns both losses."""
        self.generator.train()
        with torch.no_grad():
            fake = self.generator(self.latent(len(real)))
        scores = self.critic(torch.cat([real, fake]))
        of_critic = critic_loss(*scores.chunk(2))
        self._take(1, of_critic)
        self.critic.requires_grad_(False)
        of_generator = generator_loss(self.critic(self.generator(self.latent(len(real)))))
        self.critic.requires_grad_(True)
        self._take(0, of_generator)
        self._average()
        self.step += 1
        return of_critic.detach(), of_generator.detach()

    def latent(self, count: int) -> Tensor:
        return torch.randn(count, self.generator.latent, device=self.device)

    def _take(self, which: int, loss: Tensor) -> None:
        self.optimizers[which].zero_grad(set_to_none=True)
        loss.backward()
        self.optimizers[which].step()

    @torch.no_grad()
    def _average(self) -> None:
        """Move averaged weights towards those of the generator; means of norms and vectors of the power method are copied."""
        keep = min(self.rates.keep, (1 + self.step) / (10 + self.step))  # the first weights are soon forgotten
        for mean, now in self._pairs:
            if mean.is_floating_point() and isinstance(now, nn.Parameter):
                mean.lerp_(now, 1 - keep)
            else:
                mean.copy_(now)

    @torch.no_grad()
    def samples(self, count: int, seed: int = 0, at_once: int = 500) -> Tensor:
        """Return images of the averaged generator (count c h w) from -1 to 1, on the CPU; the same for the same seed."""
        dice = torch.Generator().manual_seed(seed)
        latent = torch.randn(count, self.generator.latent, generator=dice)
        return torch.cat([self.averaged(part.to(self.device)).float().cpu() for part in latent.split(at_once)])

    def state(self) -> dict[str, Any]:
        """Return all that the next update depends on, but the real images."""
        random = torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()
        nets = {"generator": self.generator, "critic": self.critic, "averaged": self.averaged}
        return {
            "step": self.step,
            "random": random,
            "optimizers": [one.state_dict() for one in self.optimizers],
            **{name: net.state_dict() for name, net in nets.items()},
        }

    def put_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name in ("generator", "critic", "averaged"):
            getattr(self, name).load_state_dict(state[name])
        for one, kept in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(kept)
        self.step = state["step"]
        put: Callable[[Tensor], None] = torch.cuda.set_rng_state if self.device == "cuda" else torch.set_rng_state
        put(state["random"].cpu())


def _kept(net: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, in one order for all copies of a network."""
    return [*net.parameters(), *net.buffers()]
