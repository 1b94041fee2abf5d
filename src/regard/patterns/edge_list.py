"""The pairs of a pattern as a list, for mechanisms that walk along edges. The list is made in time that follows the pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.cache import bounded_cache
from regard.patterns import Alternative, Causal, Edges, Pattern
from regard.patterns.plan import plan
from regard.patterns.tiles import Span, TilePart

EDGE_LIST_ELEMENTS = 1 << 22  # mask elements looked at together


@bounded_cache(Tensor.numel)
def edge_list(pattern: Pattern, span: Span, causal: bool, device: torch.device) -> Tensor:
    """(2, pairs) queries over keys, counted from the first of each, in order of the queries; of the pattern of one head."""
    if device.type != "cpu":
        return edge_list(pattern, span, causal, torch.device("cpu")).to(device)
    if not span.n or not span.m:  # nobody to ask: of no length in particular
        return torch.zeros(2, 0, dtype=torch.long)
    pattern = pattern.bound(span.n, span.m)
    pattern = pattern & Causal() if causal else pattern
    ways = pattern.alternatives()
    if len(ways) == 1 and any(isinstance(atom, Edges) for atom in ways[0]):
        return _on_graph(ways[0], span)
    codes = [code for part in plan(pattern, span).parts for code in _codes(part, span)]
    code = torch.cat([torch.zeros(0, dtype=torch.long), *codes]).sort().values
    return torch.stack([code // span.m, code % span.m])


def _on_graph(atoms: Alternative, s: Span) -> Tensor:
    """Edges are a list already: the other conditions strike out some of it."""
    edges = next(atom for atom in atoms if isinstance(atom, Edges))
    j, i = edges.index
    if len(atoms) == 1 and s == (0, edges.nodes, 0, edges.nodes):
        return torch.stack([i, j])
    seen = (i >= s.t) & (i < s.t + s.n) & (j >= s.u) & (j < s.u + s.m)
    for atom in atoms:
        seen = seen if atom is edges else seen & atom(0, i, j)
    return torch.stack([i - s.t, j - s.u])[:, seen]


def pairs_by_row(pattern: Pattern, asking: Tensor, there: Tensor, causal: bool) -> Tensor:
    """Pairs (2, pairs) in the rows of a batch laid end to end: positions count the real tokens of each row.

    asking (b n) and there (b m) are the real queries and keys.
    """
    (b, n), m, device = asking.shape, there.shape[1], asking.device
    counts = [x.sum(1) for x in (asking, there)]
    if pattern.bends_with_length:  # every row has a length of its own
        spans = zip(*(x.tolist() for x in counts), strict=True)
        each = [edge_list(pattern, Span(0, x, 0, y), causal, device) for x, y in spans]
        row = torch.arange(b, device=device).repeat_interleave(torch.tensor([x.shape[1] for x in each], device=device))
        i, j = torch.cat(each, 1)
    else:
        i, j = edge_list(pattern, Span(0, n, 0, m), causal, device)
        row, at = ((i < counts[0][:, None]) & (j < counts[1][:, None])).nonzero(as_tuple=True)
        i, j = i[at], j[at]
    where = [(~x).long().argsort(dim=1, stable=True) for x in (asking, there)]  # of the first real token, the second, ...
    return torch.stack([row * n + where[0][row, i], row * m + where[1][row, j]])


def _codes(part: TilePart, s: Span) -> list[Tensor]:
    """i * m + j of the pairs of one part, a few tiles at a time."""
    i, j = part.queries.positions(s.t, s.n) - s.t, part.keys.positions(s.u, s.m) - s.u
    found = []
    for group in part.groups:
        step = max(1, EDGE_LIST_ELEMENTS // (part.queries.size * part.keys.size * group.cols.shape[1]))
        for rows, cols in zip(group.rows.split(step), group.cols.split(step), strict=True):
            code = i[rows][:, :, None] * s.m + j[cols.clamp_min(0)].flatten(1)[:, None]
            found.append(code[part.mask(rows, cols)])
    return found
