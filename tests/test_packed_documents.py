"""`attend` on packed documents, for every core, and with masks and score functions of the caller's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import conftest
from conftest import DEVICE, HEADS, close, modes, some
from regard import Can, Dims, attend, core
from regard.laws import Case
from regard.mixers.packed_documents import document_groups
from regard.positions import positions

LENGTHS = ([5, 1, 20, 3, 11], [16, 24])  # of the documents of two rows of 40 tokens
DOCUMENTS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]).to(DEVICE)
DOCUMENTS[1] += 4  # the last document of a row and the first of the next have the same number, and are two
ANY = Case("softmax", device=DEVICE)
MATRIX = torch.rand(2, HEADS, 40, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.3


@conftest.claiming(Can.PADDING, core=True, cases=conftest.PATHS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_document_is_as_if_alone(case, padded):
    for mode in modes(case):
        own, causal = case.core(**mode), mode["causal"]
        tensors = [x.requires_grad_() for x in case.heads(own, 2, 40)]
        valid = some(2, 40) if padded else None
        if own.rate > 1:
            with pytest.raises(ValueError, match="has fewer answers than tokens, so documents cannot be packed"):
                attend(*tensors, own, documents=DOCUMENTS)
            continue
        packed = attend(*tensors, own, causal=causal, documents=DOCUMENTS, valid=valid)
        alone = torch.zeros_like(packed)
        for row in range(2):
            for number in DOCUMENTS[row].unique():
                at = (DOCUMENTS[row] == number) & (True if valid is None else valid[row])
                if at.any():
                    alone[row, :, at] = attend(*(x[row : row + 1, :, at] for x in tensors), own, causal=causal)[0]
        close(packed, alone)
        found = [torch.autograd.grad(y.square().sum(), tensors, allow_unused=True) for y in (packed, alone)]
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                close(one, other)


def test_documents_of_similar_length_share_a_batch():
    groups = list(document_groups(DOCUMENTS, None))
    assert [tuple(group.tokens.shape) for group in groups] == [(1, 1), (1, 3), (1, 5), (2, 16), (2, 24)]
    assert [None if group.valid is None else group.valid.sum(1).tolist() for group in groups][-2:] == [[11, 16], [20, 24]]
    assert sum(group.tokens.numel() for group in groups) < 2 * 80
    assert list(document_groups(DOCUMENTS, torch.zeros_like(DOCUMENTS, dtype=torch.bool))) == []


def test_numbers_of_documents_may_be_any_but_their_tokens_are_adjacent():
    own = core("softmax", Dims(64, 4))
    q, k, v = (torch.randn(2, 4, 40, 16, device=DEVICE) for _ in range(3))
    close(attend(q, k, v, own, documents=7 - DOCUMENTS), attend(q, k, v, own, documents=DOCUMENTS), 1e-6)
    back = DOCUMENTS.clone()
    back[0, -1] = 0
    for wrong, kind, sentence in (
        (back, ValueError, "the tokens of a document are adjacent"),
        (DOCUMENTS[:, :9], ValueError, r"documents has shape \(2, 9\), but the keys need \(batch, length\) = \(2, 40\)"),
        (DOCUMENTS.float(), TypeError, "documents must be a tensor of integers"),
    ):
        with pytest.raises(kind, match=sentence):
            attend(q, k, v, own, documents=wrong)
    for more, sentence in (
        ({"offset": 3}, "leave out offset"),
        ({"query_valid": some(2, 40)}, "give valid alone"),
        ({"mask": MATRIX}, "documents take no mask and no score function"),
    ):
        with pytest.raises(ValueError, match=sentence):
            attend(q, k, v, own, documents=DOCUMENTS, **more)
    with pytest.raises(ValueError, match="give a query for each of the 40 keys, not 3"):
        attend(q[:, :, :3], k, v, own, documents=DOCUMENTS)
    nothing = attend(q, k, v, own, documents=DOCUMENTS, valid=torch.zeros(2, 40, dtype=torch.bool, device=DEVICE))
    assert nothing.shape == (2, 4, 40, 16) and not nothing.any()


@pytest.mark.parametrize("spec", ["softmax", "softmax(scale=0.7)", "Local(9)", "PerHead([Local(5), Stride(3)])"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_your_own_takes_pairs_away(spec, causal):
    own = core(spec, Dims(32, HEADS))
    q, k, v = (x.requires_grad_() for x in ANY.heads(core("softmax", Dims(32, HEADS)), 2, 40))
    i, j = torch.arange(40, device=DEVICE)[:, None], torch.arange(40, device=DEVICE)
    seen = torch.stack([pattern(0, i, j).expand(40, 40) for pattern in own.reach.each]) & MATRIX
    seen = seen & (i >= j) if causal else seen
    scores = (own.scale * q @ k.mT).masked_fill(~seen, -1e300).softmax(-1)
    right = scores.masked_fill(~seen, 0) @ v
    out = attend(q, k, v, own, causal=causal, mask=MATRIX)
    close(out, right)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, right)), strict=True):
        close(one, other)
    part = attend(q[:, :, 30:33], k, v, own, causal=causal, mask=MATRIX[:, :, 30:33], offset=30)
    close(part, out[:, :, 30:33])


def test_masks_are_those_of_sdpa_and_padding_stays_padding():
    own = core("softmax", Dims(32, HEADS))
    q, k, v = ANY.heads(own, 2, 40)
    shared = torch.rand(40, 40, device=DEVICE) < 0.5
    shared[:, 0] = True
    close(attend(q, k, v, own, mask=shared), sdpa(q, k, v, attn_mask=shared))
    valid = some(2, 40)
    padded = attend(q, k, v, own, mask=shared, valid=valid, query_valid=valid)
    for row in range(2):
        at = valid[row]
        close(padded[row, :, at], attend(*(x[row : row + 1, :, at] for x in (q, k, v)), own, mask=shared[at][:, at])[0])
    assert not padded.transpose(1, 2)[~valid].any()
    assert not attend(q, k, v, own, mask=torch.zeros(1, 1, 40, 1, dtype=torch.bool, device=DEVICE)).any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_score_function_can_be_alibi(causal):
    dims = Dims(32, HEADS)
    own, biased = core("Local(30)", dims), core("Local(30)", dims)
    biased.honour(positions("alibi", dims))
    q, k, v = ANY.heads(own, 2, 40)
    slopes = torch.tensor([2 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], dtype=torch.float64, device=DEVICE)
    valid = some(2, 40)

    def alibi(score, row, head, i, j):
        assert row.shape == (2, 1, 1, 1)
        return score - slopes[head] * (i - j).abs()

    padding = {"valid": valid} if causal else {"valid": valid, "query_valid": valid}
    close(attend(q, k, v, own, causal=causal, score=alibi, **padding), attend(q, k, v, biased, causal=causal, **padding))


def test_weights_of_masks_are_dropped_in_training():
    own = core("softmax", Dims(32, HEADS, dropout=0.5)).train()
    q, k, v = ANY.heads(own, 2, 40)
    assert not torch.equal(attend(q, k, v, own, mask=MATRIX), attend(q, k, v, own.eval(), mask=MATRIX))


@conftest.every_core
def test_what_has_no_scores_of_all_pairs_refuses_them(case):
    own = case.core()
    if case.row.name in ("softmax", "sparse") and case.positions in (None, "rotary"):
        return
    q, k, v = ANY.heads(own, 2, 40)
    with pytest.raises(ValueError, match=r"takes no mask of your own: softmax and patterns do|positions add to the scores"):
        attend(q, k, v, own, mask=MATRIX)
    with pytest.raises(ValueError, match=r"takes no score function of your own|positions add to the scores"):
        attend(q, k, v, own, score=lambda score, *_: score)


def test_wrong_masks_and_scores_are_refused():
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    own, drawn = core("softmax", Dims(32, 4)), core("Random(2, 4)", Dims(32, 4))
    for mask, kind, sentence in (
        (torch.zeros(9, 9), TypeError, "mask must be a bool tensor, True = may attend, not torch.float32"),
        ("all", TypeError, "not str"),
        (torch.ones(3, 4, 9, 9, dtype=torch.bool), ValueError, r"must broadcast to .* = \(2, 4, 9, 9\)"),
        (torch.ones(1, 2, 4, 9, 9, dtype=torch.bool), ValueError, "must broadcast to"),
        (torch.ones(9, 9, dtype=torch.bool, device="meta"), ValueError, "mask is on meta but the keys are on cpu"),
    ):
        with pytest.raises(kind, match=sentence):
            attend(q, k, v, own, mask=mask)
    with pytest.raises(ValueError, match=r"score must return scores of the shape it is given, \(2, 4, 9, 9\), not \(2, 4, 9\)"):
        attend(q, k, v, own, score=lambda score, *_: score.sum(-1))
    with pytest.raises(ValueError, match="is drawn for the length of each row"):
        attend(q, k, v, drawn, mask=torch.ones(9, 9, dtype=torch.bool), valid=torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="the backend triton takes no mask of your own"):
        attend(q, k, v, core("Local(3)", Dims(32, 4, backend="triton")), mask=torch.ones(9, 9, dtype=torch.bool))
