"""Convert patterns to edge lists, in time proportional to the number of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.cache import bounded_cache
from regard.patterns import Alternative, Causal, Edges, Pattern
from regard.patterns.plan import plan
from regard.patterns.tiles import Span, TilePart

EDGE_LIST_ELEMENTS = 1 << 22  # mask elements evaluated at once


@bounded_cache(Tensor.numel)
def edge_list(pattern: Pattern, span: Span, causal: bool, device: torch.device) -> Tensor:
    """List the pairs (2, pairs) of the pattern of one head: queries over keys, relative to the span, sorted by query."""
    if device.type != "cpu":
        pairs = edge_list(pattern, span, causal, torch.device("cpu"))
        return pairs.to(device)
    if not span.n or not span.m:  # no pairs; `bound` may refuse this length
        return torch.zeros(2, 0, dtype=torch.long)
    pattern = pattern.bound(span.n, span.m)
    if causal:
        pattern = pattern & Causal()
    ways = pattern.alternatives()
    if len(ways) == 1 and any(isinstance(atom, Edges) for atom in ways[0]):
        return _on_graph(ways[0], span)
    parts = plan(pattern, span).parts
    codes = [code for part in parts for code in _codes(part, span)]
    empty = torch.zeros(0, dtype=torch.long)
    code = torch.cat([empty, *codes]).sort().values
    return torch.stack([code // span.m, code % span.m])


def _on_graph(atoms: Alternative, s: Span) -> Tensor:
    """Filter the edges of a graph by the other atoms and by the span."""
    edges = next(atom for atom in atoms if isinstance(atom, Edges))
    j, i = edges.index
    if len(atoms) == 1 and s == (0, edges.nodes, 0, edges.nodes):
        return torch.stack([i, j])
    rows = (i >= s.t) & (i < s.t + s.n)
    kept = rows & (j >= s.u) & (j < s.u + s.m)
    for atom in atoms:
        if atom is not edges:
            kept = kept & atom(0, i, j)
    return torch.stack([i - s.t, j - s.u])[:, kept]


def pairs_by_row(pattern: Pattern, query_valid: Tensor, key_valid: Tensor, causal: bool) -> Tensor:
    """List the pairs (2, pairs) of a padded batch, as indices into its flattened rows: positions count valid tokens only.

    query_valid (b n) and key_valid (b m) are the masks of queries and keys.
    """
    (b, n), m, device = query_valid.shape, key_valid.shape[1], query_valid.device
    queries = query_valid.sum(1)
    keys = key_valid.sum(1)
    if pattern.depends_on_length:  # every row has a list of its own
        spans = zip(queries.tolist(), keys.tolist(), strict=True)
        each = [edge_list(pattern, Span(0, x, 0, y), causal, device) for x, y in spans]
        sizes = torch.tensor([x.shape[1] for x in each], device=device)
        row = torch.arange(b, device=device).repeat_interleave(sizes)
        i, j = torch.cat(each, 1)
    else:
        i, j = edge_list(pattern, Span(0, n, 0, m), causal, device)
        inside = (i < queries[:, None]) & (j < keys[:, None])
        row, at = inside.nonzero(as_tuple=True)
        i, j = i[at], j[at]
    query = row * n + _valid_first(query_valid)[row, i]
    key = row * m + _valid_first(key_valid)[row, j]
    return torch.stack([query, key])


def _valid_first(valid: Tensor) -> Tensor:
    """Return the indices (b n) of the valid tokens of each row in order, then those of the others."""
    padding = (~valid).long()
    return padding.argsort(dim=1, stable=True)


def _codes(part: TilePart, s: Span) -> list[Tensor]:
    """List codes i * m + j of the pairs of one part, a few tiles at a time."""
    i = part.queries.positions(s.t, s.n) - s.t
    j = part.keys.positions(s.u, s.m) - s.u
    found = []
    for group in part.groups:
        elements = part.queries.size * part.keys.size * group.cols.shape[1]
        step = max(1, EDGE_LIST_ELEMENTS // elements)
        for rows, cols in zip(group.rows.split(step), group.cols.split(step), strict=True):
            query = i[rows][:, :, None]
            key = j[cols.clamp_min(0)].flatten(1)[:, None]
            code = query * s.m + key
            found.append(code[part.mask(rows, cols)])
    return found
