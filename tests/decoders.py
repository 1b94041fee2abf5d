"""A small translator with random weights, sharp enough to have opinions, and batches with padding anywhere."""

import torch

from conftest import DEVICE, some
from regard.config import Config
from regard.data.batch import END, Batch
from regard.models.build import translator

VOCAB = 11


def small(seed=0, vocab=VOCAB, sharp=4.0, **settings):
    torch.manual_seed(seed)
    base = {"width": 16, "heads": 2, "depth": 1, "ffn": 16, "dropout": 0.0, "max_len": 32, "share": False}
    model = translator(Config(**{**base, **settings}), vocab).to(DEVICE, torch.float64).eval()
    model.head.map.weight.data *= sharp
    return model


def batch_of(b=3, n=6, m=5, padding="behind", vocab=VOCAB):
    """padding: none, behind (as batches are made), or anywhere."""
    dice = torch.Generator().manual_seed(1)
    source = torch.randint(5, vocab, (b, n), generator=dice).to(DEVICE)
    target = torch.randint(5, vocab, (b, m), generator=dice).to(DEVICE)
    if padding == "none":
        target[:, -1] = END
        return Batch(source, None, target, None)
    valid = (torch.arange(m) < torch.tensor([[m - i % m] for i in range(b)])).to(DEVICE) if padding == "behind" else some(b, m)
    last = (torch.arange(m, device=DEVICE) * valid).amax(1)
    target[torch.arange(b, device=DEVICE), last] = END
    return Batch(source, some(b, n, 7), target.masked_fill(~valid, 0), valid)


def rows(batch):
    """Each example by itself, as lists without padding: source, target with its end."""
    for i in range(len(batch.source)):
        source = batch.source[i] if batch.source_valid is None else batch.source[i][batch.source_valid[i]]
        target = batch.target[i] if batch.target_valid is None else batch.target[i][batch.target_valid[i]]
        yield source.tolist(), target.tolist()


def gradients(model, total):
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(model.parameters(), found, strict=True)]
    )
