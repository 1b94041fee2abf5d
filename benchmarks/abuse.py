"""Try to break every example of every row: wrong calls, states mixed up, padding that holds NaN, infinity and huge numbers.

python benchmarks/abuse.py            into results/abuse.json (about ten minutes on two cores); exits 1 if anything got through

Each wrong call must end in a ValueError or TypeError raised by this library, and poisoned padding must change no bit of the
outputs and of the gradients of tokens and weights. tests/test_wrong_calls.py, test_states.py and test_padding.py hold a part.
"""

from __future__ import annotations

import math
import sys
from collections import Counter

import torch

from common import ROOT, Progress, only_words, save

sys.path.insert(0, str(ROOT / "tests"))
from conftest import CASES, Case, data, modes, some
from regard.laws.padding_laws import outputs_and_gradients
from regard.mixers.base import Can, Mixer
from wrong_calls import refused, wrong_builds, wrong_uses

POISON = {torch.float32: (math.nan, math.inf, -math.inf, 1e4, 1e8, 1e10, 1e15, 1e20, 1e30, 1e38)}
POISON[torch.float64] = (*POISON[torch.float32], 1e150, 1e300)


def wrong(case: Case) -> list[str | None]:
    """Outcomes of the wrong calls of one example; None: refused as it should be."""
    found = [refused(call, accepts=True) for _, call in wrong_builds(case)]
    for way in ways(case):
        m = case.build(dtype=torch.float32, max_len=16, **way)
        found += [refused(call) for _, call in wrong_uses(m, way.get("cross", False))]
    return found


def ways(case: Case) -> list[dict[str, bool]]:
    return modes(case) + ([{"cross": True}] if case.can(Can.CROSS, cross=True) else [])


def mixed(case: Case, layers: list[tuple[Case, Mixer]]) -> list[str | None]:
    """Outcomes of giving the states of all other examples to one."""
    m = case.build(causal=True)
    states = [n.extend(n.start(2), data(3, b=2))[1] for other, n in layers if repr(other) != repr(case)]
    return [refused(lambda state=state: m.extend(state, data(1, b=2))) for state in states]


def poisoned(case: Case) -> list[str | None]:
    """Outcomes of every kind of poison at padding, one pass each: outputs and gradients bit for bit."""
    found: list[str | None] = []
    valid = some(3, 40)
    for dtype, kinds in POISON.items():
        x = data(40, dtype=dtype)
        for way in ways(case):
            m, read = case.build(dtype=dtype, **way), "cross" in way

            def call(z: torch.Tensor, m: Mixer = m, x: torch.Tensor = x, read: bool = read) -> torch.Tensor:
                return m(x, context=z, valid=valid) if read else m(z, valid=valid)

            clean = outputs_and_gradients(m, torch.where(valid[..., None], x, 0), call)
            for kind in kinds:
                again = outputs_and_gradients(m, torch.where(valid[..., None], x, kind), call)
                same = all(torch.equal(a, b) for a, b in zip(again, clean, strict=True))
                found.append(None if same else f"{case} {way} {dtype}: {kind} at padding changes outputs or gradients")
    return found


def main() -> int:
    only_words(__doc__)
    streams = [(c, c.build(causal=True)) for c in CASES if c.can(Can.STREAM, causal=True)]
    counts: dict[str, Counter[str]] = {}
    through, progress = [], Progress(len(CASES))
    for case in CASES:
        tried = {"wrong calls": wrong(case)}
        if case.can(Can.STREAM, causal=True):
            tried["states mixed up"] = mixed(case, streams)
        if case.can(Can.PADDING):
            tried["poisoned paddings"] = poisoned(case)
        row = counts.setdefault(case.row.name, Counter())
        for kind, outcomes in tried.items():
            row[kind] += len(outcomes)
            through += [f"{case}, {kind}: {why}" for why in outcomes if why]
        progress.step(f"{case}: {sum(map(len, tried.values()))} tries")
    rows = [{"row": name, **count} for name, count in counts.items()]
    path = save("abuse", {"poison": [str(x) for x in POISON[torch.float64]], "got through": through}, rows)
    total = sum(counts.values(), Counter())
    print(f"{dict(total)}; least wrong calls of a row: {min(c['wrong calls'] for c in counts.values())}")
    print("\n".join([*through[:20], f"{len(through)} got through; see {path.relative_to(ROOT)}"]))
    return bool(through)


if __name__ == "__main__":
    sys.exit(main())
