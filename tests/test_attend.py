"""`attend` with queries that are only some of the tokens: where they are in the sequence of the keys, and what is refused."""

from __future__ import annotations

import pytest
import torch

from conftest import DEVICE, HEADS, Case, close, every_core, modes, some
from regard import Attention, Can, Core, Dims, Places, attend, core
from regard.positions import positions

M = 40
PARTS = [(39, 1), (10, 20), (0, 7), (17, 23)]  # the index of the first query, and how many


def built(case: Case, **dims: object) -> Core:
    mixer = case.build(**dims)
    assert isinstance(mixer, Attention)
    return mixer.core


def inputs(own: Core, m: int = M) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    shapes = ((HEADS, own.dims.d * own.streams), *((own.dims.g, size) for size in own.sizes))
    return [torch.randn(2, h, m, x, dtype=torch.float64, generator=draw).to(DEVICE) for h, x in shapes]


@every_core
@pytest.mark.parametrize("padded", [False, True])
def test_some_queries_get_what_all_get(case: Case, padded: bool) -> None:
    """The rows of the whole result, causal or not, or a sentence: never another result."""
    for mode in modes(case):
        own, causal = built(case, **mode), mode["causal"]
        q, k, v = inputs(own)
        valid = some(2, M) if padded else None
        whole = attend(q, k, v, own, causal=causal, valid=valid, query_valid=None if causal else valid)
        for first, n in PARTS:
            here = slice(first, first + n)
            asked = None if causal or valid is None else valid[:, here]

            def part() -> torch.Tensor:
                return attend(q[:, :, here], k, v, own, causal=causal, valid=valid, query_valid=asked, offset=first)  # noqa: B023

            if causal or not own.joint:
                close(part(), whole[:, :, here])
            elif first or Can.CROSS not in own.can:
                with pytest.raises(ValueError, match="answers all queries together"):
                    part()


@every_core
def test_a_core_tells_whether_positions_matter(case: Case) -> None:
    """`positional` is what moving the queries shows; `joint` what taking some of them shows."""
    own = built(case)
    q, k, v = inputs(own)
    memory = own.push(own.empty(k, v), k, v, Places.of(k[:, 0]))
    if not own.joint:
        moved = [own.read(memory, q[:, :, :9], Places.of(q[:, 0, :9], start=start)) for start in (0, 1, 13, 30)]
        assert own.positional == (not all(torch.equal(moved[0], other) for other in moved[1:]))
        return
    try:
        found = own.read(memory, q[:, :, 10:30], Places.of(q[:, 0, 10:30], start=10))
    except (ValueError, RuntimeError):
        return
    whole = attend(q, k, v, own)
    assert found.shape[2] != 20 or not torch.allclose(found, whole[:, :, 10:30])


@every_core
def test_what_is_ambiguous_is_refused(case: Case) -> None:
    for mode in modes(case):
        own, causal = built(case, **mode), mode["causal"]
        q, k, v = inputs(own)
        if causal or own.positional:
            with pytest.raises(
                ValueError, match=r"1 queries and 40 keys: give offset=39 if they are the last 1 tokens, offset=0"
            ):
                attend(q[:, :, :1], k, v, own, causal=causal)
        elif Can.CROSS in own.can and not own.rate > 1:
            assert attend(q[:, :, :1], k, v, own).shape == (2, HEADS, 1, own.dims.e)
        if causal or Can.CROSS not in own.can:
            with pytest.raises(ValueError, match="queries are tokens among the 40 keys here: offset 30 and 11 queries are more"):
                attend(q[:, :, :11], k, v, own, causal=causal, offset=30)


def test_one_query_is_the_newest_of_a_window() -> None:
    q, k, v = (torch.randn(2, 4, 101, 16, dtype=torch.float64) for _ in range(3))
    window = core("Local(16)", Dims(64, 4))
    near = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k[:, :, -16:], v[:, :, -16:])
    for causal in (False, True):
        close(attend(q[:, :, -1:], k, v, window, causal=causal, offset=100), near)
    behind = attend(q[:, :, -1:], k[:, :, :100], v[:, :, :100], window, offset=100)  # its own key is not among them
    close(behind, torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k[:, :, 85:100], v[:, :, 85:100]))
    valid = torch.arange(101) < torch.tensor([[101], [60]])
    behind = attend(q[:, :, -1:], k, v, window, valid=valid, offset=101)  # as in a prompt with padding behind it
    close(behind[1], attend(q[1:, :, -1:], k[1:, :, :60], v[1:, :, :60], window, offset=60)[0])


@pytest.mark.parametrize("offset", [-1, True, 1.0, "3"])
def test_an_offset_is_an_index(offset: object) -> None:
    q, k, v = (torch.randn(1, 4, 9, 16) for _ in range(3))
    with pytest.raises(ValueError, match="offset must be an integer from 0 on"):
        attend(q, k, v, core("softmax", Dims(64, 4)), offset=offset)  # type: ignore[arg-type]


def test_what_cannot_go_on_from_a_memory_says_so() -> None:
    q, k, v = (torch.randn(1, 4, 32, 16) for _ in range(3))
    drawn = core("Random(2, 4)", Dims(64, 4, causal=True))
    with pytest.raises(ValueError, match=r"cannot do stream: .* so give a query for each of the 32 keys"):
        attend(q[:, :, 30:], k, v, drawn, causal=True, offset=30)


def test_positions_that_add_to_scores_make_a_core_positional() -> None:
    dims = Dims(64, 4)
    own = core("softmax", dims)
    assert not own.positional
    own.honour(positions("alibi", dims))
    assert own.positional


@pytest.mark.parametrize("spec", ["softmax", "retention", "Local(4)"])
def test_all_tokens_at_once_keep_no_memory(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal pass over all tokens is the one that layers use, which writes no memory for later."""
    made = core(spec, Dims(16, 2, causal=True)).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 9, 8, device=DEVICE) for _ in range(3))
    expected = made.scan(made.unwritten(k, v), q, k, v, Places.of(k[:, 0]))[0]
    seen = []
    whole = made.scan_all
    monkeypatch.setattr(made, "scan_all", lambda *given: seen.append(spec) or whole(*given))
    close(attend(q, k, v, made, causal=True), expected)
    assert seen == [spec]
