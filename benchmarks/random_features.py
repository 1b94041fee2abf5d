"""How far random features are from the attention that they estimate, beside equal weights and performer-pytorch.

Gaussian q, k, v of several sizes, d = 64. The error is || out - exact || / || exact ||, a mean over draws of the directions.

python benchmarks/random_features.py        into results/random_features.json; performer-pytorch is compared if it is installed
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from common import Progress, only_words, save
from regard import Dims, attend, core
from regard.mixers.estimation import PoorEstimate

HEADS, DIM, N, SEED, DRAWS = 4, 64, 512, 77, 3
FEATURES, SIZES, SCALES = (64, 128, 256, 512, 1024), (0.25, 0.5, 1.0, 2.0), (1.0, 2.0, 4.0, 8.0)
PERFORMERS = {
    "performer": "performer(features={f}, seed={s})",
    "unbiased, bounded": "performer(features={f}, kind='positive', seed={s})",
    "the paper's": "performer(features={f}, kind='positive', max_norm=None, seed={s})",
}
WAVES = {
    "rfa": "rfa(features={f}, scale={scale}, seed={s})",
    "rfa, orthogonal": "rfa(features={f}, scale={scale}, orthogonal=True, seed={s})",
}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def ours(text: str, features: int, seed: int, tokens: tuple[Tensor, Tensor, Tensor], scale: float = 1.0) -> Tensor:
    return attend(*tokens, core(text.format(f=features, s=seed, scale=scale), Dims(HEADS * DIM, HEADS)).double())


def theirs(features: int, seed: int, tokens: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    from performer_pytorch import FastAttention

    torch.manual_seed(seed)
    return FastAttention(DIM, nb_features=features)(*(x.float() for x in tokens)).double()


def mean(answer: Callable[[int], Tensor], exact: Tensor) -> dict[str, float]:
    """The error over draws, and the largest output of all."""
    outs = [answer(seed) for seed in range(DRAWS)]
    return {"error": sum(error(out, exact) for out in outs) / DRAWS, "largest": float(max(out.abs().max() for out in outs))}


def softmaxes(q: Tensor, k: Tensor, v: Tensor, others: bool) -> list[dict]:
    """Performers, on q and k of each size."""
    rows = []
    for size in SIZES:
        a, b = size * q, size * k
        exact = torch.softmax(a @ b.mT * DIM**-0.5, -1) @ v
        equal = error(v.mean(2, keepdim=True).expand_as(exact), exact)
        for f in FEATURES:
            found = {by: mean(partial(ours, t, f, tokens=(a, b, v)), exact) for by, t in PERFORMERS.items()}
            if others:
                found["performer-pytorch"] = mean(partial(theirs, f, tokens=(a, b, v)), exact)
            rows += [{"what": "softmax", "by": by, "size": size, "features": f, "equal": equal, **x} for by, x in found.items()]
    return rows


def cosines(q: Tensor, k: Tensor, v: Tensor) -> list[dict]:
    """Waves, for each scale of the softmax over cosines."""
    rows = []
    for scale in SCALES:
        exact = torch.softmax(scale * (normalize(q, dim=-1) @ normalize(k, dim=-1).mT), -1) @ v
        equal = error(v.mean(2, keepdim=True).expand_as(exact), exact)
        for f in FEATURES:
            for by, t in WAVES.items():
                found = mean(partial(ours, t, f, tokens=(q, k, v), scale=scale), exact)
                rows.append({"what": "cosines", "by": by, "size": scale, "features": f, "equal": equal, **found})
    return rows


@torch.no_grad()
def main() -> None:
    only_words(__doc__)
    warnings.simplefilter("ignore", PoorEstimate)
    random, progress = torch.Generator().manual_seed(SEED), Progress(2)
    q, k, v = (torch.randn(1, HEADS, N, DIM, generator=random, dtype=torch.float64) for _ in range(3))
    try:
        import performer_pytorch  # noqa: F401
    except ModuleNotFoundError:
        others = False
    else:
        others = True
    rows = softmaxes(q, k, v, others)
    progress.step("performers")
    rows += cosines(q, k, v)
    progress.step("waves")
    settings = {"n": N, "heads": HEADS, "dim": DIM, "batch": 1, "dtype": "float64", "seed": SEED, "draws": DRAWS}
    settings["largest_value"] = float(v.abs().max())
    print(save("random_features", settings, rows))


if __name__ == "__main__":
    main()
