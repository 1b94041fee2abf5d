"""Hide tokens of training examples and ask for them: a loss beside that of the label, on the same pass.

The masked tokens of BERT (Devlin et al. 2018, arXiv:1810.04805) without pre-training: Miralles-González et al. 2025,
arXiv:2501.14850.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, SideTargets

MASKED_SHARE = 2 / 3  # of the hidden tokens; the others become random ones


def hide_tokens(tokens: Tensor, valid: Tensor | None, share: float, mask: int, generator: Generator | None = None) -> SideTargets:
    """Hide a share of the real tokens of any shape and ask for them: two of three become `mask`, the others a random one."""
    draws = torch.rand(tokens.shape, device=tokens.device, generator=generator)
    others = torch.randint(1, mask, tokens.shape, device=tokens.device, dtype=tokens.dtype, generator=generator)
    hidden = draws < share
    if valid is not None:
        hidden = hidden & valid
    changed = torch.where(draws < share * MASKED_SHARE, mask, others)
    return SideTargets(torch.where(hidden, changed, tokens), torch.where(hidden, tokens, IGNORED))
