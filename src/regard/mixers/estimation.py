"""Cores that estimate another attention: what they estimate, how far off they are, and a warning where that is too far."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from regard.mixers.base import Core
from regard.mixers.feature_math import per_query_head, upcast

CHECKED_CALLS = (1, 10, 100, 1000, 10_000)  # of forward passes, where the estimate is compared with what it estimates
QUERIES, KEYS, FEW = 16, 256, 8  # tokens of such a comparison, and how many there must be
BAD, WORSE = 0.75, 1.1  # a smaller error is no reason to warn, nor is one that is hardly above that of equal weights


class PoorEstimate(UserWarning):
    """Report an estimate of attention that is further from the exact one than equal weights are."""


def relative_errors(found: Tensor, exact: Tensor, seen: Tensor) -> tuple[float, float]:
    """Compare weights (... n m) with the exact ones: || found - exact || / || exact ||, and the same for equal weights.

    `seen` is True at the pairs that may have a weight.
    """
    count = seen.sum(-1, keepdim=True)
    equal = seen.to(exact.dtype) / count.clamp_min(1)
    size = exact.norm().clamp_min(torch.finfo(exact.dtype).tiny)
    error = (found - exact).norm() / size
    error_of_equal = (equal - exact).norm() / size
    return float(error), float(error_of_equal)


class Estimator(Core):
    """A core whose weights estimate a softmax. In its first passes it compares a few of them with the exact ones."""

    calls = 0
    warned = False

    def exact(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores (b h n m) whose softmax is estimated, for q (b h n d), k (b h m d)."""
        raise NotImplementedError

    def estimated(self, q: Tensor, k: Tensor) -> Tensor:
        """The estimate of that softmax, each row with the sum 1: quadratic, for a few tokens."""
        raise NotImplementedError

    def watch(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        if torch.compiler.is_compiling() or self.warned or q.shape[2] < FEW or k.shape[2] < FEW or not _eager(q):
            return
        self.calls += 1
        error, equal = self._compared(q, k, valid) if self.calls in CHECKED_CALLS else (0.0, 0.0)
        if error > max(WORSE * equal, BAD):
            self.warned = True
            warnings.warn(
                f"{self.name}: its weights are {error:.2f} away from the exact ones on these tokens, equal weights only "
                f"{equal:.2f} (relative errors): use more features, smaller queries and keys, or another mechanism; "
                "regard.analysis.probe.estimation_error measures it",
                PoorEstimate,
                stacklevel=3,
            )

    @torch.no_grad()
    def _compared(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[float, float]:
        """The relative errors of a few weights of the first sequence, and of equal weights; zeros if it is too short."""
        k = k[:1, :, :, : self.dims.d]
        if valid is not None:
            k = k[:, :, valid[0]]
        if k.shape[2] < FEW:
            return 0.0, 0.0
        query_step = -(-q.shape[2] // QUERIES)
        key_step = -(-k.shape[2] // KEYS)
        q = upcast(q[:1, :, ::query_step])
        k = upcast(k[:, :, ::key_step])
        k = per_query_head(k, q)
        exact = torch.softmax(self.exact(q, k), -1)
        return relative_errors(self.estimated(q, k), exact, torch.ones_like(exact))


def _eager(x: Tensor) -> bool:
    """Return whether it is an ordinary tensor with numbers that can be read now."""
    if type(x) is not Tensor or x.device.type == "meta" or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
