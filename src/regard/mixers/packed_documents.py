"""Attention inside of documents that are packed into rows, one behind another: every document as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.checks import check_valid
from regard.mixers.base import Core
from regard.mixers.dims import Can, need_claims

DocumentAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # of q, k, v and the mask of real tokens


class DocumentGroup(NamedTuple):
    """Documents of similar length as rows of a batch."""

    tokens: Tensor  # (documents longest) their places among all tokens of the batch, row by row; any at padding
    valid: Tensor | None  # (documents longest); None: all are equally long


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, core: Core, documents: Tensor, valid: Tensor | None, attention: DocumentAttention
) -> Tensor:
    """Attend inside each document: q (b h n d), k (b g n d), v (b g n e); documents (b n) numbers the document of each token.

    Documents become rows of batches, each with lengths that differ by less than a factor of two, so that at most as many tokens
    are padding as are real. Positions begin anew in every document. The numbers are read by the host.
    """
    _check_documents(q, k, core, documents, valid)
    b, n = documents.shape
    by_token = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (b n, heads, d)
    out: Tensor | None = None
    for group in document_groups(documents, valid):
        index = group.tokens.to(q.device)
        real = None if group.valid is None else group.valid.to(q.device)
        rows = [x[index].transpose(1, 2) for x in by_token]
        answers = attention(rows[0], rows[1], rows[2], real).transpose(1, 2)  # (documents longest heads e)
        if out is None:
            out = answers.new_zeros(b * n, *answers.shape[2:])
        places, found = (index.flatten(), answers.flatten(0, 1)) if real is None else (index[real], answers[real])
        out = out.index_copy(0, places, found)
    if out is None:  # no real token
        out = v.new_zeros(b * n, q.shape[1], v.shape[-1] // core.streams)
    return out.unflatten(0, (b, n)).transpose(1, 2)


def document_groups(documents: Tensor, valid: Tensor | None) -> Iterator[DocumentGroup]:
    """Yield documents (b n) in groups of similar length, the short ones first; tokens that are not valid are in none."""
    b, n = documents.shape
    number = documents.cpu()
    real = torch.ones(b, n, dtype=torch.bool) if valid is None else valid.cpu()
    token = real.flatten().nonzero().squeeze(1)
    if not len(token):
        return
    row, number = token // n, number.flatten()[token]
    new = torch.ones(len(token), dtype=torch.bool)
    new[1:] = (row[1:] != row[:-1]) | (number[1:] != number[:-1])
    begin = new.nonzero().squeeze(1)
    owners = torch.stack([row[begin], number[begin]], 1)
    if len(owners.unique(dim=0)) < len(owners):
        raise ValueError("the tokens of a document are adjacent: one of documents comes again behind another in the same row")
    length = torch.cat([begin[1:], torch.tensor([len(token)])]) - begin
    size = (length - 1).double().add(0.5).log2().floor()  # 1 | 2 | 3, 4 | 5 .. 8 | ...
    for kind in size.unique().tolist():
        chosen = size == kind
        lengths, longest = length[chosen], int(length[chosen].max())
        step = torch.arange(longest)
        inside = step < lengths[:, None]
        index = token[(begin[chosen][:, None] + step).clamp_max(len(token) - 1)]
        yield DocumentGroup(index, None if bool(inside.all()) else inside)


def _check_documents(q: Tensor, k: Tensor, core: Core, documents: Tensor, valid: Tensor | None) -> None:
    b, m, n = k.shape[0], k.shape[2], q.shape[2]
    if torch.compiler.is_compiling():
        raise ValueError("documents are counted on the host, which torch.compile cannot do: call it outside of it")
    if not isinstance(documents, Tensor) or documents.is_floating_point() or documents.dtype == torch.bool:
        raise TypeError("documents must be a tensor of integers, the number of each token's document")
    if documents.shape != (b, m):
        raise ValueError(f"documents has shape {tuple(documents.shape)}, but the keys need (batch, length) = {(b, m)}")
    if n != m:
        raise ValueError(f"documents are for tokens that attend to each other: give a query for each of the {m} keys, not {n}")
    check_valid(valid, b, m, "documents")
    need_claims(core.name, core.can, Can.PADDING, "so give a batch of documents of one length")
    if core.rate > 1:
        raise ValueError(f"{core.name} has fewer answers than tokens, so documents cannot be packed: give each a row of its own")
